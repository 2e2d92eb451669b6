/* How the logits are divided into blocks and tiles, and what lies where in scratch. Sizes depend on the shape alone, so that
   sums have one order; only the tiles of a product, which change no bit, follow the number of threads. */
#ifndef CAMOX_LINEAR_CROSS_ENTROPY_PLAN_H
#define CAMOX_LINEAR_CROSS_ENTROPY_PLAN_H

#include "../common/integers.h"
#include "../gemm/sgemm.h"
#include "linear_cross_entropy.h"

enum {
  CAMOX_LCE_TILE_ROWS = 256, /* a tile of logits, which lies in L2: what a work item computes */
  CAMOX_LCE_TILE_CLASSES = 512,
  CAMOX_LCE_BLOCK_ROWS = 4096, /* a block of logits: at most 8 MiB, which lies in L3 between the steps of a backward */
  CAMOX_LCE_BLOCK_CLASSES = 4096,
  CAMOX_LCE_BLOCK = 2 << 20,
  /* Of a forward with gradients: the rows whose logits are there at once, all classes of them, at most 32 MiB, or 64 where that
     is an eighth of all logits, and where that is 256 rows and more: so that the weight is packed, and its gradient read and
     written, for enough rows. */
  CAMOX_LCE_WHOLE_ROWS = 8 << 20,
  CAMOX_LCE_WHOLE_SHARE = 8,
  CAMOX_LCE_FEWEST_WHOLE_ROWS = 256,
  CAMOX_LCE_WHOLE_ROWS_CLASSES = 2048, /* of a block of them, so that few rows of a block lie on a page each */
  CAMOX_LCE_PAD = 16, /* rows of tiles and blocks are no power of two apart, which would meet in few cache sets */
  CAMOX_LCE_STATS = 3 /* of a row of a tile: maximum, sum of exp, sum */
};

typedef struct {
  int with_gradients;                /* of a forward */
  int direct;                        /* x and weight are read, and their gradients summed, in place */
  int64_t block_rows, block_classes; /* of a block of logits */
  int64_t row_tiles, class_tiles;    /* of all logits */
  int64_t pitch, depth_pitch;        /* between rows of a block of logits; of staged matrices */
  int64_t real;                      /* bytes of an element of scratch */
  /* Offsets in shared scratch, in elements, and their end. */
  int64_t x, weight, grad_x, grad_weight, logits, stats, target_logit, row_loss, row_grad, end;
} camox_lce_plan;

static inline int64_t camox_lce_reserve(int64_t *end, int64_t elements) {
  const int64_t begin = *end;
  *end += camox_round_up(elements, 16);
  return begin;
}

static inline camox_lce_plan camox_lce_plan_of(const camox_linear_cross_entropy_params *p) {
  camox_lce_plan plan = {0};
  plan.direct = p->dtype == CAMOX_F32 && (p->depth <= 1 || (p->x_stride[1] == 1 && p->weight_stride[1] == 1));
  plan.real = p->dtype == CAMOX_F64 ? 8 : 4;
  plan.with_gradients = !p->backward && (p->grad_x || p->grad_weight || p->grad_bias);
  int64_t whole_rows = CAMOX_LCE_WHOLE_ROWS / camox_max_i64(p->classes, 1);
  whole_rows = camox_max_i64(whole_rows, camox_min_i64(2 * whole_rows, p->rows / CAMOX_LCE_WHOLE_SHARE));
  plan.block_rows = p->rows;
  if (p->backward) plan.block_rows = camox_even_part(p->rows, CAMOX_LCE_BLOCK_ROWS, 1);
  if (plan.with_gradients)
    plan.block_rows = camox_even_part(p->rows, camox_max_i64(whole_rows, CAMOX_LCE_FEWEST_WHOLE_ROWS), 1);
  const int64_t classes = camox_min_i64(CAMOX_LCE_BLOCK / camox_max_i64(plan.block_rows, 1), CAMOX_LCE_BLOCK_CLASSES);
  plan.block_classes = camox_max_i64(classes / CAMOX_LCE_TILE_CLASSES, 1) * CAMOX_LCE_TILE_CLASSES;
  if (plan.with_gradients) plan.block_classes = CAMOX_LCE_WHOLE_ROWS_CLASSES;
  plan.block_classes = camox_min_i64(plan.block_classes, camox_round_up(camox_max_i64(p->classes, 1), CAMOX_SGEMM_COLUMNS));
  plan.row_tiles = camox_ceil_div(p->rows, CAMOX_LCE_TILE_ROWS);
  plan.class_tiles = camox_ceil_div(p->classes, CAMOX_LCE_TILE_CLASSES);
  plan.pitch = plan.block_classes + CAMOX_LCE_PAD;
  plan.depth_pitch = camox_round_up(p->depth, 16);
  int64_t *const end = &plan.end;
  if (!plan.direct) {
    plan.x = camox_lce_reserve(end, p->rows * plan.depth_pitch);
    plan.weight = camox_lce_reserve(end, plan.block_classes * plan.depth_pitch);
  }
  if (!p->backward) {
    plan.stats = camox_lce_reserve(end, plan.class_tiles * CAMOX_LCE_STATS * p->rows);
    plan.target_logit = camox_lce_reserve(end, p->rows);
    plan.row_loss = camox_lce_reserve(end, p->rows);
    if (!plan.with_gradients) return plan;
  } else if (!plan.direct) {
    if (p->grad_x) plan.grad_x = camox_lce_reserve(end, p->rows * plan.depth_pitch);
    if (p->grad_weight) plan.grad_weight = camox_lce_reserve(end, plan.block_classes * plan.depth_pitch);
  }
  const int64_t blocks = plan.with_gradients ? camox_ceil_div(p->classes, plan.block_classes) : 1;
  plan.logits = camox_lce_reserve(end, blocks * plan.block_rows * plan.pitch);
  plan.row_grad = camox_lce_reserve(end, p->rows);
  return plan;
}

/* A block of classes of the logits, all of its rows: where it begins in those that are there at once. */
static inline int64_t camox_lce_logits_of(const camox_linear_cross_entropy_params *p, const camox_lce_plan *plan) {
  const int64_t block = plan->with_gradients ? p->class0 / plan->block_classes : 0;
  return plan->logits + block * plan->block_rows * plan->pitch;
}

/* Rows of this block of logits, and its classes. */
static inline int64_t camox_lce_rows(const camox_linear_cross_entropy_params *p, const camox_lce_plan *plan) {
  return camox_min_i64(plan->block_rows, p->rows - p->row0);
}
static inline int64_t camox_lce_classes(const camox_linear_cross_entropy_params *p, const camox_lce_plan *plan) {
  return camox_min_i64(plan->block_classes, p->classes - p->class0);
}

static inline int64_t camox_lce_row_tiles(int64_t rows) { return camox_ceil_div(rows, CAMOX_LCE_TILE_ROWS); }

/* A tile of a block of logits of these sizes, as work items count them: all rows of a tile's classes, then the next classes. */
typedef struct {
  int64_t row, rows, column, columns;
} camox_lce_tile;

static inline camox_lce_tile camox_lce_tile_of(int64_t rows, int64_t classes, int64_t item) {
  const int64_t down = camox_lce_row_tiles(rows);
  camox_lce_tile t = {0};
  t.row = item % down * CAMOX_LCE_TILE_ROWS, t.column = item / down * CAMOX_LCE_TILE_CLASSES;
  t.rows = camox_min_i64(CAMOX_LCE_TILE_ROWS, rows - t.row);
  t.columns = camox_min_i64(CAMOX_LCE_TILE_CLASSES, classes - t.column);
  return t;
}

/* Rows of a product that one work item computes, of n. */
static inline int64_t camox_lce_product_rows(const camox_linear_cross_entropy_params *p, int64_t n) {
  return camox_max_i64(camox_ceil_div(n, camox_max_i64(p->threads, 1)), 64);
}

#endif
