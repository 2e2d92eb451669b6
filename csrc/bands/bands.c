/* Checks and the table of variants. */
#include "bands.h"

#include <stddef.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "bands_plan.h"

static const char OP[] = "frequency_bands";

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_bands_kernel, camox_bands_forward, camox_bands_forward_kernel)
CAMOX_KERNEL_TABLE(camox_bands_kernel, camox_bands_backward, camox_bands_backward_kernel)
#endif

static int check_output(const camox_bands_params *p, const camox_view4 *view, const char *name) {
  return camox_check_image_output(OP, name, view, p->channels_last, p->channels, p->width);
}

int camox_bands_check(const camox_bands_params *p, int backward) {
  static const char *const names[CAMOX_BANDS_MAPS] = {"low", "mid", "high", "x"};
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(OP, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_sizes(OP, "x", size, 4));
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  if (backward) return check_output(p, &p->grad_x, "grad_x");
  for (int band = 0; band < CAMOX_BANDS_MAPS; ++band) {
    const camox_view4 *view = &p->bands[band], *low = &p->bands[CAMOX_BANDS_LOW];
    if (view->data == NULL && band == CAMOX_BANDS_INPUT) continue;
    if (view->data != NULL && (view->stride[2] != low->stride[2] || view->stride[3] != low->stride[3]))
      return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s must have the strides of low over H and W", OP, names[band]);
    CAMOX_REQUIRE(check_output(p, view, names[band]));
  }
  return CAMOX_OK;
}

int64_t camox_bands_items(const camox_bands_params *p) {
  camox_stencil s = bands_stencil(p, 0);
  return camox_stencil_tiling(&s).units;
}
