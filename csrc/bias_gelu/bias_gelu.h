/* bias_gelu: the bias of a linear layer, GELU and dropout in one pass.

   x [rows,columns], contiguous, bias [columns]
     y = drop(gelu(x + bias))       gelu(u) = u/2 (1 + erf(u / sqrt(2)))
   drop      by the mask of common/philox.h over row-major indices; 0 where dropped, whatever x is there
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store. bias and its
             gradient are in the dtype computed in, or in x's (half_bias).
   backward  grad_x = drop(grad) gelu'(x + bias), grad_bias = its sum over the rows of a work item, then over items.
   saved     x, bias and the seed; x + bias, gelu' and the mask are computed again.
   errors    CAMOX_INVALID_ARGUMENT: an unknown dtype, a negative size, p outside [0, 1), a bias of another length or not
             contiguous.
   source    Hendrycks and Gimpel, arXiv 1606.08415; torch.nn.functional.gelu. */
#ifndef CAMOX_BIAS_GELU_H
#define CAMOX_BIAS_GELU_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  camox_dtype dtype;
  double p;
  const int64_t *seed; /* one number, where the tensors are; NULL: nothing is dropped, nothing scaled */
  int64_t rows, columns;
  const void *x;    /* [rows, columns] */
  const void *bias; /* [bias_length] */
  int64_t bias_length, bias_stride;
  int half_bias;    /* beside a half-precision x: grad_bias is in its dtype, on CUDA bias too. Else both, and on the CPU bias
                       always, are in the dtype computed in */
  void *y;          /* forward: the output */
  const void *grad; /* backward: the incoming gradient */
  void *grad_x;     /* backward: the output, and so are the following */
  void *partial;    /* [items, columns]: the work items' shares of grad_bias */
  void *grad_bias;  /* [columns] */
} camox_bias_gelu_params;

/* Validates all arguments of a call; when it fails, nothing has been written. */
int camox_bias_gelu_check(const camox_bias_gelu_params *p);

/* The number of independent work items, each some contiguous rows, which the shape alone decides. */
int64_t camox_bias_gelu_items(const camox_bias_gelu_params *p);

typedef void camox_bias_gelu_kernel(const camox_bias_gelu_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_bias_gelu_kernel *camox_bias_gelu_forward(camox_dtype dtype, camox_isa isa);
camox_bias_gelu_kernel *camox_bias_gelu_backward(camox_dtype dtype, camox_isa isa);
/* After backward: grad_bias of columns [begin, end) from the partial sums, in a fixed order. */
camox_bias_gelu_kernel *camox_bias_gelu_reduce(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_bias_gelu_cuda(const camox_bias_gelu_params *p, void *stream);
int camox_bias_gelu_backward_cuda(const camox_bias_gelu_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
