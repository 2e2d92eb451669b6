/* Checks and the table of variants. */
#include "spatial_gradient.h"

#include <math.h>
#include <stddef.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "spatial_gradient_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_spatial_gradient_forward_kernel, camox_spatial_gradient_kernel)
CAMOX_DECLARE_KERNELS(camox_spatial_gradient_backward_kernel, camox_spatial_gradient_kernel)

static camox_spatial_gradient_kernel *const forward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] =
    CAMOX_KERNELS(camox_spatial_gradient_forward_kernel);
static camox_spatial_gradient_kernel *const backward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] =
    CAMOX_KERNELS(camox_spatial_gradient_backward_kernel);

camox_spatial_gradient_kernel *camox_spatial_gradient_forward(camox_dtype dtype, camox_isa isa) {
  return forward_kernels[dtype][isa];
}

camox_spatial_gradient_kernel *camox_spatial_gradient_backward(camox_dtype dtype, camox_isa isa) {
  return backward_kernels[dtype][isa];
}
#endif

/* What is written lies somewhere and has stride 1 over its innermost dimension. */
static int check_written(const camox_spatial_gradient_params *p, const camox_view4 *view, const char *name) {
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  if (view->data == NULL)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: %s has no memory to be written to", name);
  if ((p->channels_last ? p->channels : p->width) <= 1 || view->stride[p->channels_last ? 1 : 3] == 1) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: %s cannot be written with strides (%lld, %lld, %lld, %lld)",
                    name, (long long)view->stride[0], (long long)view->stride[1], (long long)view->stride[2],
                    (long long)view->stride[3]);
}

int camox_spatial_gradient_check(const camox_spatial_gradient_params *p, int backward) {
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: unknown dtype code %d", (int)p->dtype);
  if (!isfinite(p->side) || !isfinite(p->middle))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: weights must be finite, got side %g and middle %g", p->side,
                      p->middle);
  if (p->border != CAMOX_BORDER_ZEROS && p->border != CAMOX_BORDER_REPLICATE && p->border != CAMOX_BORDER_REFLECT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: unknown border code %d", (int)p->border);
  if (p->batch < 0 || p->channels < 0 || p->height < 0 || p->width < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "spatial_gradient: x has a negative size (%lld, %lld, %lld, %lld)",
                      (long long)p->batch, (long long)p->channels, (long long)p->height, (long long)p->width);
  if (p->border == CAMOX_BORDER_REFLECT && (p->height == 1 || p->width == 1))
    return camox_fail(CAMOX_INVALID_ARGUMENT,
                      "spatial_gradient: border 'reflect' needs sides of at least 2, got x with H=%lld, W=%lld",
                      (long long)p->height, (long long)p->width);
  if (backward) return check_written(p, &p->grad_x, "grad_x");
  int status = check_written(p, &p->gradient[0], "gx");
  return status == CAMOX_OK ? check_written(p, &p->gradient[1], "gy") : status;
}

int64_t camox_spatial_gradient_units(const camox_spatial_gradient_params *p) {
  camox_stencil s = gradient_stencil(p);
  return camox_stencil_tiling(&s).units;
}
