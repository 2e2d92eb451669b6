/* Argument checks that several ops share. Each returns a status code; its message begins with the op's name. */
#ifndef CAMOX_CHECK_H
#define CAMOX_CHECK_H

#include "status.h"
#include "types.h"

/* Returns from the calling check with the status of `check` unless that is CAMOX_OK. */
#define CAMOX_REQUIRE(check)                             \
  do {                                                   \
    const int camox_status_ = (check);                   \
    if (camox_status_ != CAMOX_OK) return camox_status_; \
  } while (0)

int camox_check_dtype(const char *op, int dtype);

/* The sizes of the argument `name` by dimension, none of them negative. dimensions: at most 4. */
int camox_check_sizes(const char *op, const char *name, const int64_t *size, int dimensions);

/* eps, added under a root or to a variance: > 0 in the type that this dtype is computed in. */
int camox_check_eps(const char *op, camox_dtype dtype, double eps);

/* The probability that an element is dropped: in [0, 1). */
int camox_check_probability(const char *op, double p);

/* A known border code, and sides that allow it. */
int camox_check_border(const char *op, int border, int64_t height, int64_t width);

/* weight or bias: dense, an element for each `unit` ("channel", "column") of x. */
int camox_check_affine(const char *op, const char *name, const char *unit, int64_t expected, int64_t length, int64_t stride);

/* Fails because the output `name` has these strides. */
int camox_fail_strides(const char *op, const char *name, const camox_view4 *view);

/* An output image must have stride 1 over its innermost dimension: C where channels_last, else W. */
int camox_check_image_output(const char *op, const char *name, const camox_view4 *view, int channels_last, int64_t channels,
                             int64_t width);

/* Whether several elements of a view have one address because a stride is 0. */
int camox_shares_elements(const camox_view4 *view, const int64_t size[4]);

/* The elements of the output `name` must have distinct addresses. */
int camox_check_distinct_elements(const char *op, const char *name, const camox_view4 *view, const int64_t size[4]);

#endif
