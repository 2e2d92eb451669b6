/* The largest pixel of each window of an image and where it lies, for PyTorch's max_pool2d_with_indices.

   formula   y[i][j] = x[r][c], indices[i][j] = r columns + c  for the pixel (r, c) of the window that PyTorch's loop over its
             rows, and over the pixels of each, ends with: a pixel takes the place of the one before if it is larger or NaN
   window    rows i stride[0] - padding[0] ..., window[0] of them; columns alike. Pixels outside of x are not in it
   dtypes    float32, bfloat16, float16. Nothing is rounded
   shapes    x (B,C,H,W), rows dense; y and indices contiguous. A plane of x has less than 2^30 pixels
   source    torch.nn.functional.max_pool2d, without dilation. */
#ifndef CAMOX_TUNE_MAX_POOL_H
#define CAMOX_TUNE_MAX_POOL_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t channels, planes; /* planes: B C */
  int64_t rows, columns, y_rows, y_columns;
  int64_t window[2], stride[2], padding[2]; /* of rows, of columns; window > padding */
  camox_view4 x;
  void *y;
  int64_t *indices;
  int64_t bands; /* of rows of y: (plane, band) is a work item */
  void *scratch; /* camox_max_pool_scratch bytes for each thread, aligned to a vector */
} camox_max_pool_params;

/* The most lanes that a vector has. */
enum { CAMOX_MAX_POOL_VECTOR = 16 };

size_t camox_max_pool_scratch(const camox_max_pool_params *p);

/* Elements of a row of x, with its padding, that are `stride` apart: those of one phase. */
int64_t camox_max_pool_phase(const camox_max_pool_params *p);

/* The most rows of x that a window has. */
int64_t camox_max_pool_lines(const camox_max_pool_params *p);

/* Work items [begin, end). */
typedef void camox_max_pool_kernel(const camox_max_pool_params *p, int64_t begin, int64_t end);
camox_max_pool_kernel *camox_max_pool(camox_dtype dtype, camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
