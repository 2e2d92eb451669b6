/* Checks and the table of variants. */
#include "edge.h"

#include <math.h>
#include <stddef.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "edge_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_edge_forward_kernel, camox_edge_kernel)
CAMOX_DECLARE_KERNELS(camox_edge_backward_kernel, camox_edge_kernel)

static camox_edge_kernel *const forward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] = CAMOX_KERNELS(camox_edge_forward_kernel);
static camox_edge_kernel *const backward_kernels[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] =
    CAMOX_KERNELS(camox_edge_backward_kernel);

camox_edge_kernel *camox_edge_forward(camox_dtype dtype, camox_isa isa) { return forward_kernels[dtype][isa]; }
camox_edge_kernel *camox_edge_backward(camox_dtype dtype, camox_isa isa) { return backward_kernels[dtype][isa]; }
#endif

/* What is written has stride 1 over C (channels_last), or whole planes one row after the other. */
static int check_written(const camox_edge_params *p, const camox_view4 *view, const char *name) {
  if (view->data == NULL) return CAMOX_OK;
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return CAMOX_OK;
  int fits = p->channels_last ? p->channels <= 1 || view->stride[1] == 1
                              : (p->width <= 1 || view->stride[3] == 1) && (p->height <= 1 || view->stride[2] == p->width);
  if (fits) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: %s cannot be written with strides (%lld, %lld, %lld, %lld)", name,
                    (long long)view->stride[0], (long long)view->stride[1], (long long)view->stride[2],
                    (long long)view->stride[3]);
}

int camox_edge_check(const camox_edge_params *p, int backward) {
  static const char *const map_names[CAMOX_EDGE_MAPS] = {"sobel", "laplacian", "gradient", "x"};
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: unknown dtype code %d", (int)p->dtype);
  if (!(camox_as_computed(p->dtype, p->eps) > 0) || isinf(p->eps))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: eps must be > 0 and finite, got %g", p->eps);
  if (p->border != CAMOX_BORDER_ZEROS && p->border != CAMOX_BORDER_REPLICATE && p->border != CAMOX_BORDER_REFLECT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: unknown border code %d", (int)p->border);
  if (p->batch < 0 || p->channels < 0 || p->height < 0 || p->width < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: x has a negative size (%lld, %lld, %lld, %lld)", (long long)p->batch,
                      (long long)p->channels, (long long)p->height, (long long)p->width);
  if (p->border == CAMOX_BORDER_REFLECT && (p->height == 1 || p->width == 1))
    return camox_fail(CAMOX_INVALID_ARGUMENT,
                      "edge_maps: border 'reflect' needs sides of at least 2, got x with H=%lld, W=%lld", (long long)p->height,
                      (long long)p->width);
  if (backward) return check_written(p, &p->grad_x, "grad_x");
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) {
    if (p->maps[map].data == NULL && map != CAMOX_EDGE_INPUT && camox_edge_units(p) > 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "edge_maps: %s has no memory to be written to", map_names[map]);
    int status = check_written(p, &p->maps[map], map_names[map]);
    if (status != CAMOX_OK) return status;
  }
  return CAMOX_OK;
}

int64_t camox_edge_units(const camox_edge_params *p) {
  camox_stencil s = edge_stencil(p);
  return camox_stencil_tiling(&s).units;
}
