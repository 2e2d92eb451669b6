/* spatial_gradient: derivatives of every channel of an image along x and y by a 3x3 filter, in one pass.

   x (B,C,H,W); cross-correlation, x extended by `border` by one pixel, with s = side and m = middle:
     gx = x * [[-s,0,s],[-m,0,m],[-s,0,s]]   gy = x * its transpose
   Sobel: s = 1, m = 2; Scharr: s = 3, m = 10; normalised: divided by the sum of the weights' absolute values.
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store.
   accuracy  differences of pixels are taken first: a large mean cancels before it is rounded.
   zeros in  the kernels still multiply: 0 * inf is NaN, as in a convolution.
   backward  linear, so nothing is saved: the transposed filters; values on the border are added to the pixels that it repeats.
   errors    CAMOX_INVALID_ARGUMENT: weights that are not finite, unknown border or dtype, a negative size,
             reflect on a side shorter than 2, an output that is neither dense rows nor channels_last.
   source    the Sobel and Scharr operators as textbooks give them. */
#ifndef CAMOX_SPATIAL_GRADIENT_H
#define CAMOX_SPATIAL_GRADIENT_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  camox_dtype dtype;
  camox_border border;
  int channels_last; /* outputs have stride 1 over C, else over W */
  double side, middle;
  int64_t batch, channels, height, width;
  camox_view4 x; /* forward: any strides */
  /* gx, gy. forward: the output; backward: the incoming gradients, any strides, NULL where there is none. */
  camox_view4 gradient[2];
  camox_view4 grad_x; /* backward: the output */
  void *scratch;      /* CPU: CAMOX_STENCIL_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_spatial_gradient_params;

/* Validates all arguments of a forward (backward = 0) or backward call; when it fails, nothing has been written. */
int camox_spatial_gradient_check(const camox_spatial_gradient_params *p, int backward);

/* The number of independent work items, which the shape alone decides: any number of threads gives the same bits. */
int64_t camox_spatial_gradient_items(const camox_spatial_gradient_params *p);

typedef void camox_spatial_gradient_kernel(const camox_spatial_gradient_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_spatial_gradient_kernel *camox_spatial_gradient_forward(camox_dtype dtype, camox_isa isa);
camox_spatial_gradient_kernel *camox_spatial_gradient_backward(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_spatial_gradient_cuda(const camox_spatial_gradient_params *p, void *stream);
int camox_spatial_gradient_backward_cuda(const camox_spatial_gradient_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
