#include "check.h"

#include <math.h>
#include <stdio.h>

int camox_check_dtype(const char *op, int dtype) {
  if (dtype >= 0 && dtype < CAMOX_DTYPE_COUNT) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown dtype code %d", op, dtype);
}

int camox_check_sizes(const char *op, const char *name, const int64_t *size, int dimensions) {
  int negative = 0, length = 0;
  char listed[4 * 24] = "";
  for (int d = 0; d < dimensions; ++d) negative |= size[d] < 0;
  if (!negative) return CAMOX_OK;
  for (int d = 0; d < dimensions; ++d)
    length += snprintf(listed + length, sizeof listed - (size_t)length, d ? ", %lld" : "%lld", (long long)size[d]);
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s has a negative size (%s)", op, name, listed);
}

int camox_check_eps(const char *op, camox_dtype dtype, double eps) {
  if (camox_as_computed(dtype, eps) > 0 && isfinite(eps)) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: eps must be > 0 and finite, got %g", op, eps);
}

int camox_check_probability(const char *op, double p) {
  if (p >= 0 && p < 1) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: p must be in [0, 1), got %g", op, p);
}

int camox_check_border(const char *op, int border, int64_t height, int64_t width) {
  if (border != CAMOX_BORDER_ZEROS && border != CAMOX_BORDER_REPLICATE && border != CAMOX_BORDER_REFLECT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown border code %d", op, border);
  if (border == CAMOX_BORDER_REFLECT && (height == 1 || width == 1))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: border 'reflect' needs sides of at least 2, got x with H=%lld, W=%lld", op,
                      (long long)height, (long long)width);
  return CAMOX_OK;
}

int camox_check_affine(const char *op, const char *name, const char *unit, int64_t expected, int64_t length, int64_t stride) {
  if (length != expected)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s must have one element per %s of x, %lld, got %lld", op, name, unit,
                      (long long)expected, (long long)length);
  if (length > 1 && stride != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s must be contiguous, got stride %lld", op, name, (long long)stride);
  return CAMOX_OK;
}

int camox_fail_strides(const char *op, const char *name, const camox_view4 *view) {
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s cannot be written with strides (%lld, %lld, %lld, %lld)", op, name,
                    (long long)view->stride[0], (long long)view->stride[1], (long long)view->stride[2],
                    (long long)view->stride[3]);
}

int camox_check_image_output(const char *op, const char *name, const camox_view4 *view, int channels_last, int64_t channels,
                             int64_t width) {
  if (view->data == NULL) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: %s has no memory to be written to", op, name);
  if ((channels_last ? channels : width) <= 1 || view->stride[channels_last ? 1 : 3] == 1) return CAMOX_OK;
  return camox_fail_strides(op, name, view);
}

int camox_shares_elements(const camox_view4 *view, const int64_t size[4]) {
  for (int d = 0; d < 4; ++d)
    if (size[d] == 0) return 0;
  for (int d = 0; d < 4; ++d)
    if (size[d] > 1 && view->stride[d] == 0) return 1;
  return 0;
}

int camox_check_distinct_elements(const char *op, const char *name, const camox_view4 *view, const int64_t size[4]) {
  if (!camox_shares_elements(view, size)) return CAMOX_OK;
  return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: elements of %s share memory, their stride is 0", op, name);
}
