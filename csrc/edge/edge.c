/* Checks and the table of variants. */
#include "edge.h"

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "edge_plan.h"

static const char OP[] = "edge_maps";

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_edge_kernel, camox_edge_forward, camox_edge_forward_kernel)
CAMOX_KERNEL_TABLE(camox_edge_kernel, camox_edge_backward, camox_edge_backward_kernel)
#endif

/* An output has stride 1 over C (channels_last), or contiguous planes. */
static int check_output(const camox_edge_params *p, const camox_view4 *view, const char *name) {
  if (view->data == NULL) return CAMOX_OK;
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  int fits = p->channels_last ? p->channels <= 1 || view->stride[1] == 1
                              : (p->width <= 1 || view->stride[3] == 1) && (p->height <= 1 || view->stride[2] == p->width);
  return fits ? CAMOX_OK : camox_fail_strides(OP, name, view);
}

int camox_edge_check(const camox_edge_params *p, int backward) {
  static const char *const map_names[CAMOX_EDGE_MAPS] = {"sobel", "laplacian", "gradient", "x"};
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(OP, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_eps(OP, p->dtype, p->eps));
  CAMOX_REQUIRE(camox_check_sizes(OP, "x", size, 4));
  CAMOX_REQUIRE(camox_check_border(OP, (int)p->border, p->height, p->width));
  if (backward) return check_output(p, &p->grad_x, "grad_x");
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) {
    if (p->maps[map].data == NULL && map != CAMOX_EDGE_INPUT && camox_edge_items(p) > 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s has no memory to be written to", OP, map_names[map]);
    CAMOX_REQUIRE(check_output(p, &p->maps[map], map_names[map]));
  }
  return CAMOX_OK;
}

int64_t camox_edge_items(const camox_edge_params *p) {
  camox_stencil s = edge_stencil(p);
  return camox_stencil_tiling(&s).units;
}
