/* Bilinear interpolation of images to a larger size, and its adjoint, for PyTorch's upsample_bilinear2d.

   formula   y[i][j] = sum over rows r and columns c of  rows(i, r) columns(j, c) x[r][c],  where along each side
             w(i, p) = 1 - t, w(i, p + 1) = t    for the pixel p and the fraction t of the table, p + 1 clamped to the last one
   backward  its transpose: gradients of y in x's place, of x in y's. Each pixel of x is a sum over the few adjacent pixels of y
             that it contributes to, whose first one and weights are in the table, so that every thread writes pixels of its own
   dtypes    float32, bfloat16, float16 computed in float32. One rounding, at the store
   shapes    x, y (B,C,H,W), rows dense
   source    torch.nn.functional.interpolate, mode="bilinear", without antialias.

   And nearest interpolation by whole factors, for upsample_nearest2d and _upsample_nearest_exact2d:
   formula   y[i][j] = x[i / f][j / g], f = rows.to / rows.from and g = columns.to / columns.from at most CAMOX_NEAREST_LARGEST
   backward  its transpose: each pixel of x is the sum of f g pixels of y, whose rows are added up first
   dtypes    the same; y has the bits of x
   shapes    the same; y contiguous. */
#ifndef CAMOX_TUNE_UPSAMPLE_H
#define CAMOX_TUNE_UPSAMPLE_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One side, `from` pixels of x to `to` of y. */
typedef struct {
  int64_t from, to;
  const int32_t *index; /* forward [to]: p. backward [from]: the first pixel of y that a pixel of x contributes to */
  const int32_t *count; /* backward [from]: how many it contributes to: of no other pixel a NaN may spread. May be 0 */
  const float *weights; /* forward [to]: t. backward [from, taps] */
  int64_t taps;         /* backward: the largest count */
} camox_upsample_side;

typedef struct {
  int64_t channels, planes; /* planes: B C */
  camox_upsample_side rows, columns;
  camox_view4 in, out; /* x and y; in backward the gradients of y and x */
  int64_t bands;       /* of rows of out, nearest: of x: (plane, band) is a work item */
  void *scratch;       /* camox_upsample_scratch bytes for each thread, aligned to a vector */
} camox_upsample_params;

/* Behind forward's index of the columns lie as many readable elements. */
enum { CAMOX_UPSAMPLE_VECTOR = 16, CAMOX_NEAREST_LARGEST = 8 };

size_t camox_upsample_scratch(const camox_upsample_params *p);

/* Work items [begin, end). */
typedef void camox_upsample_kernel(const camox_upsample_params *p, int64_t begin, int64_t end);
camox_upsample_kernel *camox_upsample_forward(camox_dtype dtype, camox_isa isa);
camox_upsample_kernel *camox_upsample_backward(camox_dtype dtype, camox_isa isa);
/* Of the sides' tables only those of the rows are read, in backward: all weights are 1. */
camox_upsample_kernel *camox_nearest_forward(camox_dtype dtype, camox_isa isa);
camox_upsample_kernel *camox_nearest_backward(camox_dtype dtype, camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
