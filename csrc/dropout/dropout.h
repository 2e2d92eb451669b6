/* dropout, sparse_gate and dropout_add_layer_norm: masks that are computed where they are used, and stored nowhere.

   keep(i)   of the element with row-major index i of the logical shape: Philox bits >= round(65536 p), see common/philox.h
   drop(x)   x * 65536 / (65536 - round(65536 p)) where kept, 0 where dropped, even if x is NaN
   dropout                  out = drop(x); its own backward, with the gradient as x
   sparse_gate              out = drop(relu(x) * relu(y))
             backward       grad_x = drop(grad) * relu(y) where x > 0, grad_y = drop(grad) * relu(x) where y > 0
   dropout_add_layer_norm   s = residual + drop(x) over rows of D elements; z = (s - mean) / sqrt(var + eps)
                            y = z * weight + bias, with the biased variance, from differences to the mean
             backward       d = grad * weight; grad_residual = (d - mean(d) - z mean(d z)) / sqrt(var + eps),
                            grad_x = drop(grad_residual), grad_weight = sum(grad z), grad_bias = sum(grad)
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store. weight, bias and
             their gradients are in the dtype computed in, or in x's (half_weights).
   saved     dropout: the seed. sparse_gate: x, y and the seed. dropout_add_layer_norm: x, residual, weight, the seed, and two
             numbers per row: the mean less the row's first s, which keeps its digits, and 1/sqrt(var + eps).
   errors    CAMOX_INVALID_ARGUMENT: p outside [0, 1), an unknown dtype, a negative size, more than CAMOX_DROPOUT_DIMS
             dimensions; eps not > 0 or not finite, weight or bias of another length or not contiguous.
   source    torch.nn.functional.dropout and layer_norm; the gate of takzen/vision-bdh, models/bdh.py at 71cb8ab. */
#ifndef CAMOX_DROPOUT_H
#define CAMOX_DROPOUT_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CAMOX_DROPOUT_DIMS = 16 };

/* A tensor of `dims` dimensions, any strides. */
typedef struct {
  void *data;
  int64_t stride[CAMOX_DROPOUT_DIMS];
} camox_dropout_view;

/* dropout reads X and writes OUT; sparse_gate reads X, Y and writes OUT; its backward reads X, Y, GRAD and writes the gradients
   of x to OUT and of y to OUT_Y. The others have no data. */
enum {
  CAMOX_DROPOUT_X = 0,
  CAMOX_DROPOUT_Y = 1,
  CAMOX_DROPOUT_GRAD = 2,
  CAMOX_DROPOUT_OUT = 3,
  CAMOX_DROPOUT_OUT_Y = 4,
  CAMOX_DROPOUT_VIEWS = 5
};

typedef struct {
  camox_dtype dtype;
  int dims;
  double p;
  const int64_t *seed; /* one number, where the tensors are; NULL: nothing is dropped, nothing scaled */
  int64_t size[CAMOX_DROPOUT_DIMS];
  camox_dropout_view view[CAMOX_DROPOUT_VIEWS];
} camox_dropout_params;

/* A (D,) tensor. */
typedef struct {
  const void *data;
  int64_t length, stride;
} camox_dropout_affine;

/* All tensors are contiguous. */
typedef struct {
  camox_dtype dtype;
  double p, eps;
  const int64_t *seed;
  int64_t rows, width;
  const void *x, *residual; /* [rows, width] */
  camox_dropout_affine weight, bias;
  int half_weights; /* beside a half-precision x: grad_weight and grad_bias are in its dtype, on CUDA weight and bias
                                    too. Else all of them, and on the CPU weight and bias always, are in the dtype computed in */
  void *y;          /* forward: the output */
  void *stats;      /* [2, rows]: mean - first s, 1/sqrt(var + eps); forward writes, backward reads */
  const void *grad; /* backward: the incoming gradient */
  void *grad_x, *grad_residual;  /* backward: outputs, and so are the following; grad_x NULL without a seed */
  void *partial;                 /* [items, 2, width]: the work items' shares of grad_weight and grad_bias */
  void *grad_weight, *grad_bias; /* [width] */
} camox_dropout_norm_params;

/* Validates all arguments of a call, which messages name `op`; when it fails, nothing has been written. The backward of
   dropout_add_layer_norm has no bias. */
int camox_dropout_check(const camox_dropout_params *p, const char *op);
int camox_dropout_norm_check(const camox_dropout_norm_params *p, int backward);

/* The number of independent work items, which the shape alone decides: any number of threads gives the same bits. */
int64_t camox_dropout_items(const camox_dropout_params *p);
int64_t camox_dropout_norm_items(const camox_dropout_norm_params *p);

typedef void camox_dropout_kernel(const camox_dropout_params *p, int64_t begin, int64_t end);
typedef void camox_dropout_norm_kernel(const camox_dropout_norm_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_dropout_kernel *camox_dropout(camox_dtype dtype, camox_isa isa);
camox_dropout_kernel *camox_sparse_gate(camox_dtype dtype, camox_isa isa);
camox_dropout_kernel *camox_sparse_gate_backward(camox_dtype dtype, camox_isa isa);
camox_dropout_norm_kernel *camox_dropout_norm(camox_dtype dtype, camox_isa isa);
camox_dropout_norm_kernel *camox_dropout_norm_backward(camox_dtype dtype, camox_isa isa);
/* After backward: grad_weight and grad_bias of columns [begin, end) from the partial sums, in a fixed order. */
camox_dropout_norm_kernel *camox_dropout_norm_reduce(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_dropout_cuda(const camox_dropout_params *p, void *stream);
int camox_sparse_gate_cuda(const camox_dropout_params *p, void *stream);
int camox_sparse_gate_backward_cuda(const camox_dropout_params *p, void *stream);
int camox_dropout_norm_cuda(const camox_dropout_norm_params *p, void *stream);
int camox_dropout_norm_backward_cuda(const camox_dropout_norm_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
