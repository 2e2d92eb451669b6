/* Checks and the tables of variants. */
#include "structure_loss.h"

#include <math.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "structure_loss_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_structure_loss_kernel, camox_structure_loss_forward, camox_structure_loss_forward_kernel)
CAMOX_KERNEL_TABLE(camox_structure_loss_kernel, camox_structure_loss_backward, camox_structure_loss_backward_kernel)
CAMOX_KERNEL_TABLE(camox_structure_loss_kernel, camox_structure_loss_finish, camox_structure_loss_finish_kernel)
#endif

/* How far beyond [0, 1] a mask is rounding: one step of bfloat16 below 1. */
#define MASK_ROUNDING 0x1p-8

int camox_structure_loss_check(const camox_structure_loss_params *p, const char *op) {
  const int64_t size[2] = {p->images, p->pixels};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  if (p->bce != CAMOX_BCE_WEIGHTED && p->bce != CAMOX_BCE_MEAN)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown bce code %d", op, (int)p->bce);
  if (p->reduction < CAMOX_REDUCE_MEAN || p->reduction > CAMOX_REDUCE_NONE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown reduction code %d", op, (int)p->reduction);
  if (!(p->smooth >= 0) || !isfinite(p->smooth))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: smooth must be >= 0 and finite, got %g", op, p->smooth);
  return camox_check_sizes(op, "logits", size, 2);
}

static double partial_at(const camox_structure_loss_params *p, int64_t index, int which) {
  const int64_t at = index * CAMOX_STRUCTURE_PARTIAL + which;
  return p->dtype == CAMOX_F64 ? ((const double *)p->partial)[at] : (double)((const float *)p->partial)[at];
}

int camox_structure_loss_check_mask(const camox_structure_loss_params *p) {
  for (int64_t index = 0; index < camox_structure_loss_items(p); ++index) {
    const double least = partial_at(p, index, CAMOX_STRUCTURE_LEAST), largest = partial_at(p, index, CAMOX_STRUCTURE_LARGEST);
    if (least < -MASK_ROUNDING || largest > 1 + MASK_ROUNDING)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "structure_loss: mask must lie in [0, 1], got %g",
                        least < -MASK_ROUNDING ? least : largest);
  }
  return CAMOX_OK;
}

int64_t camox_structure_loss_items(const camox_structure_loss_params *p) {
  return p->images * camox_structure_items_per_image(p);
}
