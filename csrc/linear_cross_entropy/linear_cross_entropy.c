/* Checks, the order of steps and the table of variants. */
#include "linear_cross_entropy.h"

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "linear_cross_entropy_plan.h"

static int check_smoothing(double smoothing, const char *op) {
  if (smoothing >= 0 && smoothing <= 1) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: label_smoothing must be in [0, 1], got %g", op, smoothing);
}

#ifdef CAMOX_CUDA_PART
int camox_linear_cross_entropy_rows_check(const camox_linear_cross_entropy_rows_params *p, const char *op) {
  const int64_t logits[2] = {p->rows, p->classes};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(check_smoothing(p->smoothing, op));
  CAMOX_REQUIRE(camox_check_sizes(op, "logits", logits, 2));
  if (p->pitch % 4 != 0 || p->pitch < p->classes || (uintptr_t)p->logits % 16 != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: logits must have rows of whole 16 bytes, got one every %lld elements", op,
                      (long long)p->pitch);
  return CAMOX_OK;
}
#else
int camox_linear_cross_entropy_check(const camox_linear_cross_entropy_params *p, const char *op) {
  const int64_t x[2] = {p->rows, p->depth}, weight[2] = {p->classes, p->depth};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  if (p->reduction < CAMOX_LOSS_MEAN || p->reduction > CAMOX_LOSS_NONE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown reduction code %d", op, (int)p->reduction);
  CAMOX_REQUIRE(check_smoothing(p->smoothing, op));
  CAMOX_REQUIRE(camox_check_sizes(op, "x", x, 2));
  return camox_check_sizes(op, "weight", weight, 2);
}

CAMOX_KERNEL_TABLE(camox_linear_cross_entropy_kernel, camox_linear_cross_entropy, camox_linear_cross_entropy_kernel)

int camox_linear_cross_entropy_check_targets(const camox_linear_cross_entropy_params *p, const char *op) {
  for (int64_t row = 0; row < p->rows; ++row) {
    const int64_t target = p->target[row];
    if ((target < 0 || target >= p->classes) && target != p->ignore_index)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: target must be in [0, %lld) or ignore_index %lld, got %lld in row %lld",
                        op, (long long)p->classes, (long long)p->ignore_index, (long long)target, (long long)row);
  }
  return CAMOX_OK;
}

enum { ROWS = 1, CLASSES };

/* Steps that are repeated for each block of rows, or of classes. */
typedef struct {
  int first, last, over;
} step_loop;

/* What a call does: its steps in order, and the loops over them, the inner of two that end with the same step first. */
typedef struct {
  int steps[10];
  step_loop loops[3];
} schedule;

static const schedule forward = {
    {CAMOX_LCE_STAGE_X, CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_STATISTICS, CAMOX_LCE_LOSS, CAMOX_LCE_DONE},
    {{CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_STATISTICS, CLASSES}}};
static const schedule forward_with_gradients = {
    {CAMOX_LCE_ROW_GRADS, CAMOX_LCE_STAGE_X, CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_STATISTICS, CAMOX_LCE_LOSS,
     CAMOX_LCE_STAGE_WEIGHT_AGAIN, CAMOX_LCE_SOFTMAX, CAMOX_LCE_GRAD_WEIGHT, CAMOX_LCE_GRAD_X, CAMOX_LCE_DONE},
    {{CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_STATISTICS, CLASSES},
     {CAMOX_LCE_STAGE_WEIGHT_AGAIN, CAMOX_LCE_GRAD_X, CLASSES},
     {CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_GRAD_X, ROWS}}};
static const schedule backward = {
    {CAMOX_LCE_ROW_GRADS, CAMOX_LCE_STAGE_X, CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_SOFTMAX, CAMOX_LCE_GRAD_WEIGHT, CAMOX_LCE_GRAD_X,
     CAMOX_LCE_STORE_WEIGHT, CAMOX_LCE_STORE_X, CAMOX_LCE_DONE},
    {{CAMOX_LCE_SOFTMAX, CAMOX_LCE_GRAD_X, ROWS}, {CAMOX_LCE_STAGE_WEIGHT, CAMOX_LCE_STORE_WEIGHT, CLASSES}}};

static const schedule *schedule_of(const camox_linear_cross_entropy_params *p) {
  return p->backward ? &backward : camox_lce_plan_of(p).with_gradients ? &forward_with_gradients : &forward;
}

void camox_linear_cross_entropy_begin(camox_linear_cross_entropy_params *p) {
  p->step = schedule_of(p)->steps[0];
  p->row0 = p->class0 = 0;
}

void camox_linear_cross_entropy_next(camox_linear_cross_entropy_params *p) {
  const camox_lce_plan plan = camox_lce_plan_of(p);
  const schedule *const s = schedule_of(p);
  for (const step_loop *loop = s->loops; loop < s->loops + 3 && loop->over; ++loop) {
    if (loop->last != p->step) continue;
    int64_t *const at = loop->over == ROWS ? &p->row0 : &p->class0;
    const int64_t block = loop->over == ROWS ? plan.block_rows : plan.block_classes;
    if (*at + block < (loop->over == ROWS ? p->rows : p->classes)) {
      *at += block, p->step = loop->first;
      return;
    }
    *at = 0;
  }
  const int *step = s->steps;
  while (*step != p->step) ++step;
  p->step = step[1];
}

int64_t camox_linear_cross_entropy_items(const camox_linear_cross_entropy_params *p) {
  const camox_lce_plan plan = camox_lce_plan_of(p);
  const int64_t rows = camox_lce_rows(p, &plan), classes = camox_lce_classes(p, &plan);
  const int64_t tiles = camox_ceil_div(rows, CAMOX_LCE_TILE_ROWS) * camox_ceil_div(classes, CAMOX_LCE_TILE_CLASSES);
  switch (p->step) {
    case CAMOX_LCE_STAGE_X: return plan.direct ? 0 : plan.row_tiles;
    case CAMOX_LCE_STAGE_WEIGHT:
    case CAMOX_LCE_STAGE_WEIGHT_AGAIN: return plan.direct ? 0 : camox_ceil_div(classes, CAMOX_LCE_TILE_ROWS);
    case CAMOX_LCE_STATISTICS:
    case CAMOX_LCE_SOFTMAX: return tiles;
    case CAMOX_LCE_GRAD_WEIGHT:
      return p->grad_weight || p->grad_bias ? camox_ceil_div(classes, camox_lce_product_rows(p, classes)) : 0;
    case CAMOX_LCE_GRAD_X: return p->grad_x ? camox_ceil_div(rows, camox_lce_product_rows(p, rows)) : 0;
    case CAMOX_LCE_STORE_WEIGHT: return plan.direct || !p->grad_weight ? 0 : camox_ceil_div(classes, CAMOX_LCE_TILE_ROWS);
    case CAMOX_LCE_STORE_X: return plan.direct || !p->grad_x ? 0 : plan.row_tiles;
    default: return 1;
  }
}

int64_t camox_linear_cross_entropy_shared(const camox_linear_cross_entropy_params *p) {
  const camox_lce_plan plan = camox_lce_plan_of(p);
  return plan.end * plan.real;
}

int64_t camox_linear_cross_entropy_scratch(const camox_linear_cross_entropy_params *p) {
  const int64_t tile = CAMOX_LCE_TILE_ROWS * (CAMOX_LCE_TILE_CLASSES + CAMOX_LCE_PAD);
  const camox_lce_plan plan = camox_lce_plan_of(p);
  return CAMOX_SGEMM_SCRATCH_BYTES + (p->backward || plan.with_gradients ? 0 : tile * plan.real);
}
#endif
