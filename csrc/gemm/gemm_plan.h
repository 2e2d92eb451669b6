/* How a product is divided into work items, and where their buffers lie in a slot of scratch. */
#ifndef CAMOX_GEMM_PLAN_H
#define CAMOX_GEMM_PLAN_H

#include "../common/integers.h"
#include "gemm.h"

#define CAMOX_GEMM_ROWS 8     /* of a panel of a: what the registers hold, see common/gemm.inc */
#define CAMOX_GEMM_COLUMNS 48 /* of a panel of b */
#define CAMOX_GEMM_DEPTH 384  /* of both: a panel of b fits an L1 cache */
#define CAMOX_GEMM_LINE 16    /* rows of buffers are padded to whole vectors */

typedef struct {
  int64_t down, across, items; /* tiles of a head, and of all heads: the work items */
  int64_t pitch;               /* of the sums of a tile */
  int64_t b_panels, a_panels;  /* offsets in scratch, after the sums; total: its size. All of them count 32 bits */
  int64_t total;
} camox_gemm_plan;

static inline camox_gemm_plan camox_gemm_plan_of(const camox_gemm_params *p) {
  camox_gemm_plan plan = {0};
  const int64_t pairs = (camox_min_i64(p->depth, CAMOX_GEMM_DEPTH) + 1) / 2;
  plan.down = camox_ceil_div(p->rows, p->tile_rows);
  plan.across = camox_ceil_div(p->columns, p->tile_columns);
  plan.items = p->heads * plan.down * plan.across;
  plan.pitch = camox_round_up(p->tile_columns, CAMOX_GEMM_LINE);
  plan.b_panels = p->tile_rows * plan.pitch;
  plan.a_panels = plan.b_panels + camox_round_up(p->tile_columns, CAMOX_GEMM_COLUMNS) * pairs;
  const int64_t panels = p->a_stride[2] == 1 ? 1 : camox_ceil_div(p->tile_rows, CAMOX_GEMM_ROWS);
  plan.total = plan.a_panels + panels * CAMOX_GEMM_ROWS * camox_round_up(pairs, CAMOX_GEMM_LINE);
  return plan;
}

#endif
