/* linear_cross_entropy: the cross entropy of a linear layer's logits, which exist a block at a time.

   x (R,D), weight (V,D), bias (V) or none, target (R) in 0 ... V-1 or ignore_index; label smoothing s:
     z = x weight^T + bias                                 [R,V], never in memory as a whole
     lse[i] = top[i] + log[i], the largest logit and the logarithm of the sum over j of exp(z[i,j] - top[i]), which are kept
              apart: rounded, their sum would be off by more than the softmax of logits of 100
     row[i] = lse[i] - (1-s) z[i,target[i]] - s mean(z[i])      0 where target[i] is ignore_index
     loss: row (NONE), its sum (SUM), or its sum / number of targets that are not ignored (MEAN; NaN of none, as in PyTorch)
   backward  with g the gradient of row[i], 0 where it is ignored:
     dz[i,j] = g[i] (exp(z[i,j] - lse[i]) - s / V - (1-s) [j = target[i]])
     grad_x = dz weight      grad_weight = dz^T x      grad_bias[j] = sum over i of dz[i,j]
   forward with gradients  of a loss that is one number (MEAN, SUM), not in float64: these of g = 1 / number of targets that
             are not ignored, or 1, in float32, which the loss' own gradient is multiplied into later
   dtypes    x and weight float32, bfloat16, float16 computed in float32, float64 in float64; bias, top, log and loss in the dtype
             computed in. Each gradient is rounded once. Rows of x and weight have any strides.
   saved     x, weight, bias, target, top and log; the gradients that a forward has made.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype or reduction, smoothing outside [0, 1], a negative size; a target that is
             no class (CPU; a CUDA kernel writes NaN for its row and sets CAMOX_ERROR_CROSS_ENTROPY_TARGET).
   source    E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the recomputed logits. */
#ifndef CAMOX_LINEAR_CROSS_ENTROPY_H
#define CAMOX_LINEAR_CROSS_ENTROPY_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_LOSS_MEAN = 0, CAMOX_LOSS_SUM = 1, CAMOX_LOSS_NONE = 2 } camox_loss_reduction;

typedef struct {
  camox_dtype dtype;
  camox_loss_reduction reduction;
  int64_t rows, depth, classes; /* R, D, V */
  int64_t ignore_index;
  double smoothing;
  const void *x, *weight;
  int64_t x_stride[2], weight_stride[2];
  const void *bias;      /* [V] in the dtype computed in, like all that follows but the gradients; may be NULL */
  const int64_t *target; /* [R] */
  void *top, *log;       /* [R]; forward writes, backward reads */
  void *loss;            /* forward: [R], or one number where it is reduced */
  const void *grad;      /* backward: the incoming gradient, as loss */
  /* Dense; NULL where a gradient is not needed. backward: in x's dtype, the bias' in the one computed in. forward: all in
     float32, of a loss whose own gradient is 1. */
  void *grad_x, *grad_weight, *grad_bias;

  /* Set by camox_linear_cross_entropy_begin and _next. */
  int64_t threads;      /* that share the work items; results do not depend on it */
  int backward;         /* which of the two directions */
  int step;             /* camox_linear_cross_entropy_step */
  int64_t row0, class0; /* the block of logits that the step works on */
  void *shared;         /* scratch of the call: camox_linear_cross_entropy_shared bytes */
  void *scratch;        /* of the thread: camox_linear_cross_entropy_scratch bytes, aligned to 64 */
} camox_linear_cross_entropy_params;

/* What a call does, one step after the other, each shared by threads. */
enum {
  CAMOX_LCE_STAGE_X,            /* x in the dtype computed in, where it is not read in place */
  CAMOX_LCE_STAGE_WEIGHT,       /* the same of a block of classes of the weight */
  CAMOX_LCE_STATISTICS,         /* forward: tiles of a block of logits -> each row's maximum, sum of exp, sum, target's logit */
  CAMOX_LCE_LOSS,               /* forward: top, log and loss of these */
  CAMOX_LCE_STAGE_WEIGHT_AGAIN, /* forward with gradients */
  CAMOX_LCE_ROW_GRADS,          /* gradients: g */
  CAMOX_LCE_SOFTMAX,            /* gradients: tiles of a block of logits -> dz */
  CAMOX_LCE_GRAD_WEIGHT,        /* gradients: a block of dz^T x, and of the bias' gradient */
  CAMOX_LCE_GRAD_X,             /* gradients: dz times a block of the weight */
  CAMOX_LCE_STORE_WEIGHT,       /* backward: the block's gradient rounded, where it is not summed in place */
  CAMOX_LCE_STORE_X,
  CAMOX_LCE_DONE
};

/* Validates all arguments; nothing has been written when it fails. */
int camox_linear_cross_entropy_check(const camox_linear_cross_entropy_params *p, const char *op);

/* Whether every target is a class or ignored. */
int camox_linear_cross_entropy_check_targets(const camox_linear_cross_entropy_params *p, const char *op);

/* for (begin(p); p->step != CAMOX_LCE_DONE; next(p)) kernel(p, 0, items(p)) */
void camox_linear_cross_entropy_begin(camox_linear_cross_entropy_params *p);
void camox_linear_cross_entropy_next(camox_linear_cross_entropy_params *p);
int64_t camox_linear_cross_entropy_items(const camox_linear_cross_entropy_params *p);
int64_t camox_linear_cross_entropy_shared(const camox_linear_cross_entropy_params *p);
int64_t camox_linear_cross_entropy_scratch(const camox_linear_cross_entropy_params *p);

typedef void camox_linear_cross_entropy_kernel(const camox_linear_cross_entropy_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set, of every step. */
camox_linear_cross_entropy_kernel *camox_linear_cross_entropy(camox_dtype dtype, camox_isa isa);

/* CUDA: a block of rows between its products, which are cuBLAS' (camox_ops/ops/_linear_cross_entropy_cuda.py). */
typedef struct {
  camox_dtype dtype; /* of x, weight and dz: float32, bfloat16 or float16 */
  int64_t rows, depth, classes;
  int64_t ignore_index;
  double smoothing;
  float *logits;          /* [rows], without the bias, each row aligned to 16 bytes; dz is written over it */
  int64_t pitch;          /* elements from one row of logits to the next */
  const void *x, *weight; /* [rows,D], [V,D]: what the logits are made of */
  int64_t x_stride[2], weight_stride[2];
  const float *bias;       /* [V] or NULL */
  const int64_t *target;   /* [rows] */
  float *top, *log, *loss; /* [rows] */
  const float *grad;       /* g of each row, or NULL: no dz. Rows that are ignored have 0 whatever it says. */
  int64_t grad_stride;     /* 0: one g for all rows */
  uint32_t *error_word;    /* of the device, may be NULL */
} camox_linear_cross_entropy_rows_params;

int camox_linear_cross_entropy_rows_check(const camox_linear_cross_entropy_rows_params *p, const char *op);

/* Host wrapper of the kernel: 0 or a cudaError_t. */
int camox_linear_cross_entropy_rows_cuda(const camox_linear_cross_entropy_rows_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
