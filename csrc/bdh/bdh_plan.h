/* How the CPU kernels of bdh divide tokens and columns into tiles, and where their buffers lie in a slot of scratch. */
#ifndef CAMOX_BDH_PLAN_H
#define CAMOX_BDH_PLAN_H

#include "../common/integers.h"
#include "bdh.h"

#define CAMOX_BDH_ROWS 128          /* tokens of a tile at most */
#define CAMOX_BDH_TILE 65536        /* elements of a tile of r: two of them and what is made of them fit an L2 cache */
#define CAMOX_BDH_STATE_COLUMNS 256 /* columns of q whose state is in scratch at once */
#define CAMOX_BDH_ALL_SCORES 1024   /* tokens up to which all scores of a head are materialized where they are not saved */
#define CAMOX_BDH_LINE 16           /* rows of buffers are padded to whole vectors of any instruction set */

enum {
  BDH_R,            /* [rows, columns] rotated queries */
  BDH_KEYS_OR_GRAD, /* the same of other tokens, or the gradient of r */
  BDH_VALUES,       /* [T or rows, D] */
  BDH_GRADS,        /* [T or rows, D] of out */
  BDH_SUMS,         /* [T or rows, D] out or the gradient of v */
  BDH_W,            /* [band, T] or [T, rows] scores */
  BDH_DW,           /* and their gradients */
  BDH_W_T,          /* [band, T] the scores of all tokens with those of a band, where not all are materialized */
  BDH_DW_T,
  BDH_DELTA,       /* [T] */
  BDH_GRAD_V,      /* [T, D] gradients of shared values, summed over the heads so far */
  BDH_SCORE_PAIRS, /* [T/2, T] pairs of rows of the scores or their gradients */
  BDH_Z,           /* [columns, D] the state */
  BDH_DZ,
  BDH_BUFFERS
};

typedef struct {
  int64_t rows, columns;      /* of a tile of r */
  int64_t band;               /* rows of scores that are in scratch at once */
  int64_t heads_per_item;     /* heads of one batch element that one slot computes in their order */
  int64_t pitch, value_pitch; /* of tiles with `columns` and D columns */
  int64_t offset[BDH_BUFFERS], total;
} camox_bdh_plan;

static inline int64_t camox_bdh_padded(int64_t n) { return camox_round_up(n, CAMOX_BDH_LINE); }

/* One more vector, so that rows do not all begin in one set of the L1 cache. */
static inline int64_t camox_bdh_pitch(int64_t n) { return camox_bdh_padded(n) + CAMOX_BDH_LINE; }

static inline void camox_bdh_sizes_quadratic(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward,
                                             int64_t *size) {
  const int64_t length = p->length, several = length > plan->rows, all_scores = plan->band == length;
  size[BDH_R] = plan->rows * plan->pitch;
  size[BDH_KEYS_OR_GRAD] = backward || several ? plan->rows * plan->pitch : 0;
  size[BDH_VALUES] = length * plan->value_pitch;
  size[BDH_SUMS] = plan->rows * plan->value_pitch;
  size[BDH_W] = p->scores ? 0 : plan->band * length;
  if (!backward) return;
  size[BDH_GRADS] = length * plan->value_pitch;
  size[BDH_DW] = plan->band * length;
  size[BDH_W_T] = size[BDH_DW_T] = all_scores ? 0 : plan->band * length;
  size[BDH_DELTA] = p->softmax && !all_scores ? length : 0;
}

/* What AVX512-BF16 changes in them: 32 bits hold two elements. */
static inline void camox_bdh_sizes_avx512_bf16(const camox_bdh_params *p, const camox_bdh_plan *plan, int64_t *size) {
  const int64_t length = p->length, width = camox_bdh_padded(p->value_dim), pitch = camox_bdh_padded(length);
  if (p->scores) size[BDH_R] = (plan->rows + 1) / 2 * plan->pitch;
  size[BDH_VALUES] = width / 2 * pitch;
  size[BDH_GRADS] = (length + 1) / 2 * width;
  size[BDH_DW] = length * pitch;
  size[BDH_SCORE_PAIRS] = (length + 1) / 2 * pitch;
}

static inline void camox_bdh_sizes_state(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward, int64_t *size) {
  size[BDH_R] = plan->rows * plan->pitch;
  size[BDH_VALUES] = plan->rows * plan->value_pitch;
  size[BDH_SUMS] = p->length * plan->value_pitch;
  size[BDH_W] = p->causal ? p->length * plan->rows : 0;
  size[BDH_Z] = plan->columns * plan->value_pitch;
  if (!backward) return;
  size[BDH_KEYS_OR_GRAD] = (p->causal ? p->length : plan->rows) * plan->pitch;
  size[BDH_GRADS] = plan->rows * plan->value_pitch;
  size[BDH_DW] = size[BDH_W];
  size[BDH_DZ] = size[BDH_Z];
}

static inline int camox_bdh_uses_avx512_bf16(const camox_bdh_params *p, const camox_bdh_plan *plan, int backward) {
  return backward && p->avx512_bf16 && plan->band == p->length && !camox_bdh_state_form(p);
}

static inline camox_bdh_plan camox_bdh_plan_of(const camox_bdh_params *p, int backward) {
  camox_bdh_plan plan = {0};
  const int64_t length = p->length > 0 ? p->length : 1, state = camox_bdh_state_form(p);
  plan.rows = camox_min_i64(length, CAMOX_BDH_ROWS);
  int64_t columns = CAMOX_BDH_TILE / plan.rows;
  if (state) columns = CAMOX_BDH_STATE_COLUMNS;
  if (state && backward && p->causal) { /* a gradient of r is materialized for every token */
    columns = camox_min_i64(columns, 2 * CAMOX_BDH_TILE / length);
    if (columns < 2 * CAMOX_BDH_LINE) columns = 2 * CAMOX_BDH_LINE;
  }
  if (backward && p->scores) columns = camox_min_i64(columns, CAMOX_BDH_TILE / 2 / plan.rows);
  columns = columns / (2 * CAMOX_BDH_LINE) * (2 * CAMOX_BDH_LINE);
  plan.columns = camox_min_i64(columns, p->dim);
  plan.band = p->scores || length <= CAMOX_BDH_ALL_SCORES ? length : plan.rows;
  plan.pitch = camox_bdh_pitch(plan.columns);
  plan.value_pitch = camox_bdh_pitch(p->value_dim);
  int64_t size[BDH_BUFFERS] = {0};
  if (state)
    camox_bdh_sizes_state(p, &plan, backward, size);
  else
    camox_bdh_sizes_quadratic(p, &plan, backward, size);
  if (camox_bdh_uses_avx512_bf16(p, &plan, backward)) camox_bdh_sizes_avx512_bf16(p, &plan, size);
  plan.heads_per_item = backward && p->value_heads != p->heads && !p->partial ? p->heads : 1;
  if (plan.heads_per_item > 1) size[BDH_GRAD_V] = length * camox_bdh_padded(p->value_dim);
  for (int i = 0; i < BDH_BUFFERS; ++i) plan.offset[i] = plan.total, plan.total += camox_bdh_padded(size[i]);
  return plan;
}

#endif
