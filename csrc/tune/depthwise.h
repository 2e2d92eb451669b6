/* Depthwise convolutions of stride 1, float32, and the gradient of their weights, for PyTorch's convolution.

   formula   y[i][j] = bias + sum over r, c of  w[r][c] x[i + r - top][j + c - left],  x being 0 outside the image
   backward  of x: the same with the window turned by half a turn and the padding size - 1 - top, size - 1 - left;
             of w: dw[r][c] = sum over images, i, j of  dy[i][j] x[i + r - top][j + c - left];  of the bias: the sum of dy
   shapes    x (B,C,H,W), w (C,1,size,size), y (B,C,H',W'), bias (C), all contiguous; 0 <= top, left < size
   source    torch.nn.functional.conv2d with groups = C. */
#ifndef CAMOX_TUNE_DEPTHWISE_H
#define CAMOX_TUNE_DEPTHWISE_H

#include <stddef.h>

#include "../common/integers.h"
#include "../common/isa.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CAMOX_DEPTHWISE_BAND = 16,    /* rows of y that are worked on together */
  CAMOX_DEPTHWISE_LARGEST = 11, /* windows are 3, 5, 7, 9 or 11 */
};

typedef struct {
  int64_t batch, channels, size, top, left;
  int64_t rows, columns;           /* of x */
  int64_t y_rows, y_columns;       /* of y */
  const float *x, *weights, *bias; /* bias may be NULL */
  const float *dy;                 /* of the gradient alone */
  float *y;                        /* of the convolution alone */
  float *d_weights, *d_bias;       /* of the gradient alone; d_bias may be NULL */
  int turned;                      /* weights are read from the last to the first */
  void *scratch;                   /* camox_depthwise_scratch bytes for each thread, aligned to a vector */
} camox_depthwise_params;

/* Floats from one line of scratch to the next: a row of y in whole pairs of the widest vectors, and the window's reach. */
static inline int64_t camox_depthwise_pitch(const camox_depthwise_params *p) { return camox_round_up(p->y_columns, 32) + 16; }

size_t camox_depthwise_scratch(const camox_depthwise_params *p);

/* Work items [begin, end): planes of y, or channels for the gradient. */
typedef void camox_depthwise_kernel(const camox_depthwise_params *p, int64_t begin, int64_t end);
camox_depthwise_kernel *camox_depthwise(camox_isa isa);
camox_depthwise_kernel *camox_depthwise_gradient(camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
