/* How the CPU kernels of bdh cut tokens and columns into tiles, and where their buffers lie in a slot of scratch. */
#ifndef CAMOX_BDH_PLAN_H
#define CAMOX_BDH_PLAN_H

#include "../common/integers.h"
#include "bdh.h"

#define CAMOX_BDH_ROWS 128          /* tokens of a tile at most */
#define CAMOX_BDH_TILE 65536        /* elements of a tile of r: two of them and what is made of them fit an L2 cache */
#define CAMOX_BDH_STATE_COLUMNS 256 /* columns of q whose state is held at once */
#define CAMOX_BDH_WHOLE 1024        /* tokens up to which all scores of a head are held at once where they are not saved */
#define CAMOX_BDH_LINE 16           /* rows of buffers are padded to whole vectors of any instruction set */

enum {
  BDH_R,       /* [rows, columns] rotated queries */
  BDH_OTHER_R, /* the same of other tokens, or the gradient of r */
  BDH_VALUES,  /* [T or rows, D] */
  BDH_GRADS,   /* [T or rows, D] of out */
  BDH_SUMS,    /* [T or rows, D] out or the gradient of v */
  BDH_W,       /* [strip, T] or [T, rows] scores */
  BDH_DW,      /* and their gradients */
  BDH_W_T,     /* [strip, T] the scores of all tokens with those of a strip, where not all are held */
  BDH_DW_T,
  BDH_DELTA,  /* [T] */
  BDH_GRAD_V, /* [T, D] gradients of shared values, summed over the heads so far */
  BDH_PAIRS,  /* [T/2, T] pairs of rows of the scores or their gradients */
  BDH_Z,      /* [columns, D] the state */
  BDH_DZ,
  BDH_BUFFERS
};

typedef struct {
  int64_t rows, columns, strip;
  int64_t together;           /* heads of one batch element that one slot computes in their order */
  int64_t pitch, value_pitch; /* of tiles with `columns` and D columns */
  int64_t offset[BDH_BUFFERS], total;
} camox_bdh_plan;

static inline int64_t camox_bdh_padded(int64_t n) { return camox_round_up(n, CAMOX_BDH_LINE); }

/* One more vector, so that rows do not all begin in one set of the L1 cache. */
static inline int64_t camox_bdh_pitch(int64_t n) { return camox_bdh_padded(n) + CAMOX_BDH_LINE; }

static inline void camox_bdh_sizes_quadratic(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward,
                                             int64_t *size) {
  const int64_t length = p->length, several = length > plan->rows, whole = plan->strip == length;
  size[BDH_R] = plan->rows * plan->pitch;
  size[BDH_OTHER_R] = backward || several ? plan->rows * plan->pitch : 0;
  size[BDH_VALUES] = length * plan->value_pitch;
  size[BDH_SUMS] = plan->rows * plan->value_pitch;
  size[BDH_W] = p->scores ? 0 : plan->strip * length;
  if (!backward) return;
  size[BDH_GRADS] = length * plan->value_pitch;
  size[BDH_DW] = plan->strip * length;
  size[BDH_W_T] = size[BDH_DW_T] = whole ? 0 : plan->strip * length;
  size[BDH_DELTA] = p->softmax && !whole ? length : 0;
}

/* What bfloat16 pairs change in them: 32 bits hold two elements. */
static inline void camox_bdh_sizes_pairs(const camox_bdh_params *p, const camox_bdh_plan *plan, int64_t *size) {
  const int64_t length = p->length, width = camox_bdh_padded(p->value_dim), pitch = camox_bdh_padded(length);
  if (p->scores) size[BDH_R] = (plan->rows + 1) / 2 * plan->pitch;
  size[BDH_VALUES] = width / 2 * pitch;
  size[BDH_GRADS] = (length + 1) / 2 * width;
  size[BDH_DW] = length * pitch;
  size[BDH_PAIRS] = (length + 1) / 2 * pitch;
}

static inline void camox_bdh_sizes_state(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward, int64_t *size) {
  size[BDH_R] = plan->rows * plan->pitch;
  size[BDH_VALUES] = plan->rows * plan->value_pitch;
  size[BDH_SUMS] = p->length * plan->value_pitch;
  size[BDH_W] = p->causal ? p->length * plan->rows : 0;
  size[BDH_Z] = plan->columns * plan->value_pitch;
  if (!backward) return;
  size[BDH_OTHER_R] = (p->causal ? p->length : plan->rows) * plan->pitch;
  size[BDH_GRADS] = plan->rows * plan->value_pitch;
  size[BDH_DW] = size[BDH_W];
  size[BDH_DZ] = size[BDH_Z];
}

static inline int camox_bdh_in_pairs(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward) {
  return backward && p->pairs && plan->strip == p->length && !camox_bdh_state_form(p);
}

static inline camox_bdh_plan camox_bdh_plan_of(const camox_bdh_params *p, int backward) {
  camox_bdh_plan plan = {0};
  const int64_t length = p->length > 0 ? p->length : 1, state = camox_bdh_state_form(p);
  plan.rows = camox_min_i64(length, CAMOX_BDH_ROWS);
  int64_t columns = CAMOX_BDH_TILE / plan.rows;
  if (state) columns = CAMOX_BDH_STATE_COLUMNS;
  if (state && backward && p->causal) { /* a gradient of r is held for every token */
    columns = camox_min_i64(columns, 2 * CAMOX_BDH_TILE / length);
    if (columns < 2 * CAMOX_BDH_LINE) columns = 2 * CAMOX_BDH_LINE;
  }
  if (backward && p->scores) columns = camox_min_i64(columns, CAMOX_BDH_TILE / 2 / plan.rows);
  columns = columns / (2 * CAMOX_BDH_LINE) * (2 * CAMOX_BDH_LINE);
  plan.columns = camox_min_i64(columns, p->dim);
  plan.strip = p->scores || length <= CAMOX_BDH_WHOLE ? length : plan.rows;
  plan.pitch = camox_bdh_pitch(plan.columns);
  plan.value_pitch = camox_bdh_pitch(p->value_dim);
  int64_t size[BDH_BUFFERS] = {0};
  if (state)
    camox_bdh_sizes_state(p, &plan, backward, size);
  else
    camox_bdh_sizes_quadratic(p, &plan, backward, size);
  if (camox_bdh_in_pairs(p, &plan, backward)) camox_bdh_sizes_pairs(p, &plan, size);
  plan.together = backward && p->value_heads != p->heads && !p->partial ? p->heads : 1;
  if (plan.together > 1) size[BDH_GRAD_V] = length * camox_bdh_padded(p->value_dim);
  for (int i = 0; i < BDH_BUFFERS; ++i) plan.offset[i] = plan.total, plan.total += camox_bdh_padded(size[i]);
  return plan;
}

typedef struct {
  int64_t down, across, units; /* tiles of a head, of all heads */
  int64_t pitch;               /* of the sums of a tile */
  int64_t b_panels, a_panels, total;
} camox_bdh_product_plan;

static inline camox_bdh_product_plan camox_bdh_product_plan_of(const camox_bdh_product_params *p) {
  camox_bdh_product_plan plan = {0};
  const int64_t pairs = (camox_min_i64(p->depth, CAMOX_BDH_PRODUCT_DEPTH) + 1) / 2;
  plan.down = camox_ceil_div(p->rows, p->tile_rows);
  plan.across = camox_ceil_div(p->columns, p->tile_columns);
  plan.units = p->heads * plan.down * plan.across;
  plan.pitch = camox_bdh_padded(p->tile_columns);
  plan.b_panels = p->tile_rows * plan.pitch;
  plan.a_panels = plan.b_panels + camox_round_up(p->tile_columns, CAMOX_BDH_PRODUCT_COLUMNS) * pairs;
  const int64_t panels = p->a_stride[2] == 1 ? 1 : camox_ceil_div(p->tile_rows, CAMOX_BDH_PRODUCT_ROWS);
  plan.total = plan.a_panels + panels * CAMOX_BDH_PRODUCT_ROWS * camox_bdh_padded(pairs);
  return plan;
}

#endif
