/* Checks and the table of variants. */
#include "spatial_gradient.h"

#include <math.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "spatial_gradient_plan.h"

static const char OP[] = "spatial_gradient";

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_spatial_gradient_kernel, camox_spatial_gradient_forward, camox_spatial_gradient_forward_kernel)
CAMOX_KERNEL_TABLE(camox_spatial_gradient_kernel, camox_spatial_gradient_backward, camox_spatial_gradient_backward_kernel)
#endif

static int check_output(const camox_spatial_gradient_params *p, const camox_view4 *view, const char *name) {
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  return camox_check_image_output(OP, name, view, p->channels_last, p->channels, p->width);
}

int camox_spatial_gradient_check(const camox_spatial_gradient_params *p, int backward) {
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(OP, (int)p->dtype));
  if (!isfinite(p->side) || !isfinite(p->middle))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: weights must be finite, got side %g and middle %g", OP, p->side, p->middle);
  CAMOX_REQUIRE(camox_check_sizes(OP, "x", size, 4));
  CAMOX_REQUIRE(camox_check_border(OP, (int)p->border, p->height, p->width));
  if (backward) return check_output(p, &p->grad_x, "grad_x");
  CAMOX_REQUIRE(check_output(p, &p->gradient[0], "gx"));
  return check_output(p, &p->gradient[1], "gy");
}

int64_t camox_spatial_gradient_items(const camox_spatial_gradient_params *p) {
  camox_stencil s = gradient_stencil(p);
  return camox_stencil_tiling(&s).units;
}
