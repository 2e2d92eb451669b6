/* Checks and the table of variants. */
#include "bias_gelu.h"

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "bias_gelu_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_bias_gelu_forward_kernel, camox_bias_gelu_kernel)
CAMOX_DECLARE_KERNELS(camox_bias_gelu_backward_kernel, camox_bias_gelu_kernel)
CAMOX_DECLARE_KERNELS(camox_bias_gelu_reduce_kernel, camox_bias_gelu_kernel)

typedef camox_bias_gelu_kernel *camox_bias_gelu_table[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT];
static const camox_bias_gelu_table forward_kernels = CAMOX_KERNELS(camox_bias_gelu_forward_kernel);
static const camox_bias_gelu_table backward_kernels = CAMOX_KERNELS(camox_bias_gelu_backward_kernel);
static const camox_bias_gelu_table reduce_kernels = CAMOX_KERNELS(camox_bias_gelu_reduce_kernel);

camox_bias_gelu_kernel *camox_bias_gelu_forward(camox_dtype dtype, camox_isa isa) { return forward_kernels[dtype][isa]; }
camox_bias_gelu_kernel *camox_bias_gelu_backward(camox_dtype dtype, camox_isa isa) { return backward_kernels[dtype][isa]; }
camox_bias_gelu_kernel *camox_bias_gelu_reduce(camox_dtype dtype, camox_isa isa) { return reduce_kernels[dtype][isa]; }
#endif

int camox_bias_gelu_check(const camox_bias_gelu_params *p) {
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bias_gelu: unknown dtype code %d", (int)p->dtype);
  if (!(p->p >= 0 && p->p < 1)) return camox_fail(CAMOX_INVALID_ARGUMENT, "bias_gelu: p must be in [0, 1), got %g", p->p);
  if (p->rows < 0 || p->columns < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bias_gelu: x has a negative size (%lld, %lld)", (long long)p->rows,
                      (long long)p->columns);
  if (p->bias_length != p->columns)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bias_gelu: bias must have one element per column of x, %lld, got %lld",
                      (long long)p->columns, (long long)p->bias_length);
  if (p->bias_length > 1 && p->bias_stride != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bias_gelu: bias must be contiguous, got stride %lld", (long long)p->bias_stride);
  return CAMOX_OK;
}

int64_t camox_bias_gelu_units(const camox_bias_gelu_params *p) {
  const int64_t rows = camox_bias_gelu_unit_rows(p->columns);
  return (p->rows + rows - 1) / rows;
}
