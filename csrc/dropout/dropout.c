/* Checks and the tables of variants. */
#include "dropout.h"

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "dropout_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_dropout_kernel, camox_dropout, camox_dropout_forward_kernel)
CAMOX_KERNEL_TABLE(camox_dropout_kernel, camox_sparse_gate, camox_sparse_gate_forward_kernel)
CAMOX_KERNEL_TABLE(camox_dropout_kernel, camox_sparse_gate_backward, camox_sparse_gate_backward_kernel)
CAMOX_KERNEL_TABLE(camox_dropout_norm_kernel, camox_dropout_norm, camox_dropout_norm_forward_kernel)
CAMOX_KERNEL_TABLE(camox_dropout_norm_kernel, camox_dropout_norm_backward, camox_dropout_norm_backward_kernel)
CAMOX_KERNEL_TABLE(camox_dropout_norm_kernel, camox_dropout_norm_reduce, camox_dropout_norm_reduce_kernel)
#endif

int camox_dropout_check(const camox_dropout_params *p, const char *op) {
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_probability(op, p->p));
  if (p->dims < 0 || p->dims > CAMOX_DROPOUT_DIMS)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: x must have at most %d dimensions, got %d", op, (int)CAMOX_DROPOUT_DIMS,
                      p->dims);
  for (int d = 0; d < p->dims; ++d)
    if (p->size[d] < 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: x has a negative size %lld in dimension %d", op, (long long)p->size[d], d);
  return CAMOX_OK;
}

int camox_dropout_norm_check(const camox_dropout_norm_params *p, int backward) {
  static const char op[] = "dropout_add_layer_norm";
  const int64_t size[2] = {p->rows, p->width};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_probability(op, p->p));
  CAMOX_REQUIRE(camox_check_eps(op, p->dtype, p->eps));
  CAMOX_REQUIRE(camox_check_sizes(op, "x", size, 2));
  CAMOX_REQUIRE(camox_check_affine(op, "weight", "column", p->width, p->weight.length, p->weight.stride));
  return backward ? CAMOX_OK : camox_check_affine(op, "bias", "column", p->width, p->bias.length, p->bias.stride);
}

int64_t camox_dropout_items(const camox_dropout_params *p) { return camox_dropout_plan_of(p).items; }

int64_t camox_dropout_norm_items(const camox_dropout_norm_params *p) {
  return camox_ceil_div(p->rows, camox_dropout_norm_item_rows(p->width));
}
