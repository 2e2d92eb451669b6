/* frequency_bands: three bands of every channel of an image by box filters of 3 and 5, in one pass.

   x (B,C,H,W), zero outside the image; box k is the mean over k*k pixels, zeros counted:
     low = box3(x)   mid = box3(x) - box5(x)   high = x - box3(x)
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store.
   accuracy  an error of the order of eps times the largest pixel of the window. Where windows end inside the image (two
             pixels or more inside its borders, rows of more than 8 pixels) they are summed as differences from their centre,
             so a large mean cancels before it is rounded.
   nan, inf  what the three formulas above give, as with avg_pool2d, in windows that hold such pixels and nowhere else.
   backward  linear, so nothing is saved; a box filter with zero borders is its own adjoint:
               grad_x = box3(g_low + g_mid - g_high) - box5(g_mid) + g_high + g_input
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype, a negative size, an output without memory, whose
             innermost stride is not 1, or whose rows and columns lie unlike those of low.
   source    FrequencyExpert.forward of mahi-chan/camoXpert, models/experts.py at 47e858c. */
#ifndef CAMOX_BANDS_H
#define CAMOX_BANDS_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CAMOX_BANDS_LOW = 0, CAMOX_BANDS_MID = 1, CAMOX_BANDS_HIGH = 2, CAMOX_BANDS_INPUT = 3, CAMOX_BANDS_MAPS = 4 };
/* The reach of the filters, in pixels. */
enum { CAMOX_BANDS_REACH = 2 };

typedef struct {
  camox_dtype dtype;
  int channels_last; /* outputs have stride 1 over C (else over W) */
  int64_t batch, channels, height, width;
  camox_view4 x; /* forward: any strides */
  /* forward: the output; CAMOX_BANDS_INPUT, a copy of x for the stacked form, may be NULL.
     backward: the incoming gradients, any strides, NULL where there is none. */
  camox_view4 bands[CAMOX_BANDS_MAPS];
  camox_view4 grad_x; /* backward: the output */
  void *scratch;      /* CPU: CAMOX_STENCIL_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_bands_params;

/* Validates all arguments of a forward (backward = 0) or backward call; when it fails, nothing has been written. */
int camox_bands_check(const camox_bands_params *p, int backward);

/* The number of independent work items, which the shape alone decides: any number of threads gives the same bits. */
int64_t camox_bands_items(const camox_bands_params *p);

typedef void camox_bands_kernel(const camox_bands_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_bands_kernel *camox_bands_forward(camox_dtype dtype, camox_isa isa);
camox_bands_kernel *camox_bands_backward(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_bands_cuda(const camox_bands_params *p, void *stream);
int camox_bands_backward_cuda(const camox_bands_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
