/* Checks and the table of variants. */
#include "bias_gelu.h"

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "bias_gelu_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_bias_gelu_kernel, camox_bias_gelu_forward, camox_bias_gelu_forward_kernel)
CAMOX_KERNEL_TABLE(camox_bias_gelu_kernel, camox_bias_gelu_backward, camox_bias_gelu_backward_kernel)
CAMOX_KERNEL_TABLE(camox_bias_gelu_kernel, camox_bias_gelu_reduce, camox_bias_gelu_reduce_kernel)
#endif

int camox_bias_gelu_check(const camox_bias_gelu_params *p) {
  static const char op[] = "bias_gelu";
  const int64_t size[2] = {p->rows, p->columns};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_probability(op, p->p));
  CAMOX_REQUIRE(camox_check_sizes(op, "x", size, 2));
  return camox_check_affine(op, "bias", "column", p->columns, p->bias_length, p->bias_stride);
}

int64_t camox_bias_gelu_items(const camox_bias_gelu_params *p) {
  return camox_ceil_div(p->rows, camox_bias_gelu_item_rows(p->columns));
}
