#include "image_op.h"

#include "check.h"
#include "image_plan.h"

int camox_image_check(const char *op, const camox_image_params *p, int backward) {
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_sizes(op, "x", size, 4));
  CAMOX_REQUIRE(camox_check_border(op, (int)p->border, p->height, p->width));
  if (camox_image_items(p) == 0) return CAMOX_OK;
  return camox_check_image_output(op, backward ? "grad_x" : "y", backward ? &p->grad_x : &p->y, p->channels_last, p->channels,
                                  p->width);
}

int64_t camox_image_items(const camox_image_params *p) {
  camox_stencil s = camox_image_stencil(p);
  return camox_stencil_tiling(&s).units;
}
