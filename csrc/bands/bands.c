/* Checks and the table of variants. */
#include "bands.h"

#include <stddef.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "bands_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_bands_forward_kernel, camox_bands_kernel)
CAMOX_DECLARE_KERNELS(camox_bands_backward_kernel, camox_bands_kernel)

static camox_bands_kernel *const forward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] =
    CAMOX_KERNELS(camox_bands_forward_kernel);
static camox_bands_kernel *const backward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] =
    CAMOX_KERNELS(camox_bands_backward_kernel);

camox_bands_kernel *camox_bands_forward(camox_dtype dtype, camox_isa isa) { return forward_kernels[dtype][isa]; }
camox_bands_kernel *camox_bands_backward(camox_dtype dtype, camox_isa isa) { return backward_kernels[dtype][isa]; }
#endif

/* What is written has stride 1 over its innermost dimension. */
static int check_written(const camox_bands_params *p, const camox_view4 *view, const char *name) {
  if ((p->channels_last ? p->channels : p->width) <= 1 || view->stride[p->channels_last ? 1 : 3] == 1) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: %s cannot be written with strides (%lld, %lld, %lld, %lld)", name,
                    (long long)view->stride[0], (long long)view->stride[1], (long long)view->stride[2],
                    (long long)view->stride[3]);
}

int camox_bands_check(const camox_bands_params *p, int backward) {
  static const char *const names[CAMOX_BANDS_MAPS] = {"low", "mid", "high", "x"};
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: unknown dtype code %d", (int)p->dtype);
  if (p->batch < 0 || p->channels < 0 || p->height < 0 || p->width < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: x has a negative size (%lld, %lld, %lld, %lld)",
                      (long long)p->batch, (long long)p->channels, (long long)p->height, (long long)p->width);
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  if (backward && p->grad_x.data == NULL)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: grad_x has no memory to be written to");
  if (backward) return check_written(p, &p->grad_x, "grad_x");
  for (int band = 0; band < CAMOX_BANDS_MAPS; ++band) {
    const camox_view4 *view = &p->bands[band], *low = &p->bands[CAMOX_BANDS_LOW];
    if (view->data == NULL && band == CAMOX_BANDS_INPUT) continue;
    if (view->data == NULL)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: %s has no memory to be written to", names[band]);
    if (view->stride[2] != low->stride[2] || view->stride[3] != low->stride[3])
      return camox_fail(CAMOX_INVALID_ARGUMENT, "frequency_bands: %s must have the strides of low over H and W", names[band]);
    int status = check_written(p, view, names[band]);
    if (status != CAMOX_OK) return status;
  }
  return CAMOX_OK;
}

int64_t camox_bands_units(const camox_bands_params *p) { return camox_bands_cut_of(p).units; }
