/* edge_maps: Sobel magnitude, Laplacian magnitude and their joint gradient of every channel of an image, in one pass.

   x (B,C,H,W); cross-correlation with un-normalised kernels, x extended by `border` by one pixel:
     gx = x * [[-1,0,1],[-2,0,2],[-1,0,1]]   gy = x * its transpose   lap = x * [[0,1,0],[1,-4,1],[0,1,0]]
     sobel = sqrt(gx^2 + gy^2 + eps)   laplacian = |lap|   gradient = sqrt(sobel^2 + laplacian^2 + eps)
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store.
   zeros in  the kernels still multiply: 0 * inf is NaN, as in a convolution.
   backward  needs x alone; gx, gy and lap are recomputed. d|l|/dl at 0 is 0.
   errors    CAMOX_INVALID_ARGUMENT: eps not > 0 or not finite, unknown border or dtype, a negative size,
             reflect on a side shorter than 2, an output that is neither dense planes nor channels_last.
   source    EdgeExpert.compute_edges of mahi-chan/camoXpert, models/experts.py at 47e858c. */
#ifndef CAMOX_EDGE_H
#define CAMOX_EDGE_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CAMOX_EDGE_SOBEL = 0, CAMOX_EDGE_LAPLACIAN = 1, CAMOX_EDGE_GRADIENT = 2, CAMOX_EDGE_INPUT = 3, CAMOX_EDGE_MAPS = 4 };

typedef struct {
  camox_dtype dtype;
  camox_border border;
  int channels_last; /* outputs have stride 1 over C, else dense planes */
  double eps;
  int64_t batch, channels, height, width;
  camox_view4 x; /* any strides */
  /* forward: the outputs; CAMOX_EDGE_INPUT, a copy of x for the stacked form, may be NULL.
     backward: the incoming gradients, any strides, NULL where there is none. */
  camox_view4 maps[CAMOX_EDGE_MAPS];
  camox_view4 grad_x; /* backward: the output */
  void *scratch;      /* CPU: CAMOX_STENCIL_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_edge_params;

/* Validates all arguments of a forward (backward = 0) or backward call; when it fails, nothing has been written. */
int camox_edge_check(const camox_edge_params *p, int backward);

/* The number of independent work items, which the shape alone decides: any number of threads gives the same bits. */
int64_t camox_edge_items(const camox_edge_params *p);

typedef void camox_edge_kernel(const camox_edge_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_edge_kernel *camox_edge_forward(camox_dtype dtype, camox_isa isa);
camox_edge_kernel *camox_edge_backward(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_edge_cuda(const camox_edge_params *p, void *stream);
int camox_edge_backward_cuda(const camox_edge_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
