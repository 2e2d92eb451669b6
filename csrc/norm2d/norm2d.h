/* layer_norm2d: LayerNorm over each group of channels at every pixel of an image, activation and residual in one pass.

   x (B,C,H,W), weight and bias (C,); over each group of C/groups channels, at every pixel:
     z = (x - mean) / sqrt(var + eps)   u = z * weight + bias   y = act(u) [+ residual]
   var       biased, from the differences to the mean, or to 0 where the mean is small beside it. The mean's own rounding is
             summed too and corrected, so a mean of 1e4 with a standard deviation of 1 costs no digits.
   act       none, gelu x Phi(x), gelu_tanh x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), relu, silu x sigmoid(x)
   dtypes    x, residual, y in float32, bfloat16, float16, computed in float32; float64 in float64. weight, bias and their
             gradients are in the dtype computed in, or in x's (half_weights). One rounding, at the store.
   backward  needs x and stats: per pixel and group the mean as its difference from the group's first channel, which keeps
             all its digits, and, with an activation or on CUDA, 1/sqrt(var + eps). u and act' are recomputed.
             d relu / du at 0 is 0. With g = grad act'(u),
             d = g weight and means over the group:  grad_x = (d - mean(d) - z mean(d z)) / sqrt(var + eps),
             grad_weight = sum(g z), grad_bias = sum(g) over batch and pixels: a partial sum per work item, then over items.
   errors    CAMOX_INVALID_ARGUMENT: eps not > 0 or not finite, groups that do not divide C, unknown activation or dtype,
             weight or bias of another length or not contiguous, a negative size.
   source    LayerNorm2d of mahi-chan/camoXpert, models/backbone.py at 47e858c. */
#ifndef CAMOX_NORM2D_H
#define CAMOX_NORM2D_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CAMOX_ACT_NONE = 0,
  CAMOX_ACT_GELU = 1,
  CAMOX_ACT_GELU_TANH = 2,
  CAMOX_ACT_RELU = 3,
  CAMOX_ACT_SILU = 4,
  CAMOX_ACT_COUNT = 5
} camox_activation;

/* A (C,) tensor. */
typedef struct {
  const void *data;
  int64_t length, stride;
} camox_norm2d_affine;

typedef struct {
  camox_dtype dtype;
  camox_activation activation;
  double eps;
  int64_t batch, channels, height, width, groups;
  camox_view4 x; /* any strides, as all views here */
  camox_norm2d_affine weight, bias;
  int half_weights; /* beside a half-precision x: grad_weight and grad_bias are in its dtype, on CUDA weight and bias too. Else
                       all of them, and on the CPU weight and bias always, are in the dtype computed in */
  void *stats; /* [2, B, groups, H*W] in the dtype computed in: mean - first channel, 1/sqrt(var + eps); without an activation
                  the CPU has the first alone; forward: may be NULL */
  camox_view4 residual;          /* forward, optional */
  camox_view4 y;                 /* forward: the output */
  camox_view4 grad;              /* backward: the incoming gradient */
  camox_view4 grad_x;            /* backward: the output, and so are the following */
  void *partial;                 /* [items, 2, C]: the work items' shares of grad_weight and grad_bias */
  void *grad_weight, *grad_bias; /* [C] */
  void *scratch; /* CPU, forward and backward: CAMOX_NORM2D_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_norm2d_params;

#define CAMOX_NORM2D_SCRATCH (704 << 10)

/* Validates all arguments of a call; when it fails, nothing has been written. */
int camox_norm2d_check(const camox_norm2d_params *p);

/* The number of independent work items, blocks of pixels of one image, which the shape alone decides: any number of threads
   gives the same bits. */
int64_t camox_norm2d_items(const camox_norm2d_params *p);

typedef void camox_norm2d_kernel(const camox_norm2d_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_norm2d_kernel *camox_norm2d_forward(camox_dtype dtype, camox_isa isa);
camox_norm2d_kernel *camox_norm2d_backward(camox_dtype dtype, camox_isa isa);
/* After backward: grad_weight and grad_bias of channels [begin, end) from the partial sums, in the order of the items. */
camox_norm2d_kernel *camox_norm2d_reduce(camox_dtype dtype, camox_isa isa);

/* As camox_norm2d_items for the CUDA kernels: `partial` must have room for this many, fewer may be used. */
int64_t camox_norm2d_cuda_items(const camox_norm2d_params *p);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_norm2d_cuda(const camox_norm2d_params *p, void *stream);
int camox_norm2d_backward_cuda(const camox_norm2d_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
