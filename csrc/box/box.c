/* Checks and the table of variants. */
#include "box.h"

#include <math.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "box_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_box_kernel, camox_box_forward, camox_box_forward_kernel)
#endif

static int check_margin(const camox_box_params *p, const char *op, const char *name, const int64_t margin[2]) {
  if (margin[0] >= 0 && margin[1] >= 0 && 2 * margin[0] < p->height && 2 * margin[1] < p->width &&
      (p->kind != CAMOX_BOX_STRUCTURE_WEIGHT || (margin[0] == 0 && margin[1] == 0)))
    return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: margins (%lld, %lld) of %s, the image is (%lld, %lld)", op,
                    (long long)margin[0], (long long)margin[1], name, (long long)p->height, (long long)p->width);
}

int camox_box_check(const camox_box_params *p, const char *op) {
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  if (p->kind < CAMOX_BOX_MEAN || p->kind > CAMOX_BOX_STRUCTURE_WEIGHT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown kind code %d", op, (int)p->kind);
  CAMOX_REQUIRE(camox_check_sizes(op, "x", size, 4));
  if (p->window_height < 1 || p->window_width < 1 || p->window_height % 2 == 0 || p->window_width % 2 == 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: size must be odd and > 0, got (%lld, %lld)", op, (long long)p->window_height,
                      (long long)p->window_width);
  if (!isfinite(p->gain)) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: gain must be finite, got %g", op, p->gain);
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  CAMOX_REQUIRE(check_margin(p, op, "x", p->x_margin));
  CAMOX_REQUIRE(check_margin(p, op, "y", p->y_margin));
  return camox_check_image_output(op, "y", &p->y, p->channels_last, p->channels, p->width - 2 * p->y_margin[1]);
}

int64_t camox_box_items(const camox_box_params *p) { return camox_box_plan_of(p).items; }

size_t camox_box_scratch(const camox_box_params *p) {
  const camox_box_plan plan = camox_box_plan_of(p);
  return (size_t)camox_box_scratch_elements(&plan) * (p->dtype == CAMOX_F64 ? sizeof(double) : sizeof(float));
}
