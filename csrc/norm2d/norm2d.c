/* Checks and the table of variants. */
#include "norm2d.h"

#include <math.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "norm2d_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_norm2d_forward_kernel, camox_norm2d_kernel)
CAMOX_DECLARE_KERNELS(camox_norm2d_backward_kernel, camox_norm2d_kernel)
CAMOX_DECLARE_KERNELS(camox_norm2d_reduce_kernel, camox_norm2d_kernel)

typedef camox_norm2d_kernel *camox_norm2d_table[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT];
static const camox_norm2d_table forward_kernels = CAMOX_KERNELS(camox_norm2d_forward_kernel);
static const camox_norm2d_table backward_kernels = CAMOX_KERNELS(camox_norm2d_backward_kernel);
static const camox_norm2d_table reduce_kernels = CAMOX_KERNELS(camox_norm2d_reduce_kernel);

camox_norm2d_kernel *camox_norm2d_forward(camox_dtype dtype, camox_isa isa) { return forward_kernels[dtype][isa]; }
camox_norm2d_kernel *camox_norm2d_backward(camox_dtype dtype, camox_isa isa) { return backward_kernels[dtype][isa]; }
camox_norm2d_kernel *camox_norm2d_reduce(camox_dtype dtype, camox_isa isa) { return reduce_kernels[dtype][isa]; }

int64_t camox_norm2d_units(const camox_norm2d_params *p) { return camox_norm2d_plan_of(p).units; }
#endif

static int check_affine(const camox_norm2d_params *p, const camox_norm2d_affine *v, const char *name) {
  if (v->length != p->channels)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: %s must have one element per channel of x, %lld, got %lld", name,
                      (long long)p->channels, (long long)v->length);
  if (v->length > 1 && v->stride != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: %s must be contiguous, got stride %lld", name,
                      (long long)v->stride);
  return CAMOX_OK;
}

int camox_norm2d_check(const camox_norm2d_params *p) {
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: unknown dtype code %d", (int)p->dtype);
  if ((int)p->activation < 0 || p->activation >= CAMOX_ACT_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: unknown activation code %d", (int)p->activation);
  if (!(camox_as_computed(p->dtype, p->eps) > 0) || isinf(p->eps))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: eps must be > 0 and finite, got %g", p->eps);
  if (p->batch < 0 || p->channels < 0 || p->height < 0 || p->width < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: x has a negative size (%lld, %lld, %lld, %lld)",
                      (long long)p->batch, (long long)p->channels, (long long)p->height, (long long)p->width);
  if (p->groups < 1 || p->channels % p->groups != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "layer_norm2d: groups must be >= 1 and divide the %lld channels of x, got %lld",
                      (long long)p->channels, (long long)p->groups);
  int status = check_affine(p, &p->weight, "weight");
  return status != CAMOX_OK ? status : check_affine(p, &p->bias, "bias");
}
