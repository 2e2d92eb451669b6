/* short_attention: exact softmax attention over many short sequences, T <= 64, each sequence and head on its own.

   q, k, v (S,T,H,D), any strides; for every sequence s and head h
     score[i][j] = scale q[i].k[j]                 where key j counts for i: not padded, and j <= i where causal
     weight[i]   = softmax(score[i]), zeros for an i without a key
     out[i]      = sum_j drop(weight[i][j]) v[j]
   keep      of weight (s,h,i,j): element ((s H + h) T + i) T + j of a dropout mask of common/philox.h, kept ones scaled
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store; on CUDA's tensor
             cores (short_attention_mma.cuh) also of weights and d, which second products take in the half type.
   backward  the scores and the mask are computed again: it reads q, k, v and grad. With w = weight, m = keep * its scale,
             e[i][j] = m grad[i].v[j] and d = w (e - sum_j w e): grad_q = scale d k, grad_k = scale d^T q, grad_v = (w m)^T grad
   saved     q, k, v, the padding and the seed. Not out, nor the rows' log-sums: at this length they cost more to read than
             scores to compute.
   errors    CAMOX_INVALID_ARGUMENT: an unknown dtype, a negative size, T > 64, scale not finite, p outside [0, 1), written
             elements that share memory.
   source    torch.nn.functional.scaled_dot_product_attention. */
#ifndef CAMOX_SHORT_ATTENTION_H
#define CAMOX_SHORT_ATTENTION_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CAMOX_SHORT_ATTENTION_MAX_LENGTH = 64 };

typedef struct {
  camox_dtype dtype;
  int causal;
  double scale, p;
  const int64_t *seed;                   /* one number, where the tensors are; NULL: nothing is dropped, nothing scaled */
  int64_t sequences, length, heads, dim; /* S, T, H, D */
  camox_view4 q, k, v;                   /* [S,T,H,D], as all views here */
  const uint8_t *padding;                /* [S,T], not 0: the key is ignored; may be NULL */
  int64_t padding_stride[2];
  camox_view4 out;                          /* forward */
  camox_view4 grad, grad_q, grad_k, grad_v; /* backward */
  void *scratch; /* CPU: CAMOX_SHORT_ATTENTION_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_short_attention_params;

#define CAMOX_SHORT_ATTENTION_SCRATCH (200 << 10)

/* Validates all arguments of a call; nothing has been written when it fails. */
int camox_short_attention_check(const camox_short_attention_params *p, int backward);

/* Work items, which depend on the shape alone: runs of consecutive (s,h). */
int64_t camox_short_attention_work_items(const camox_short_attention_params *p);

typedef void camox_short_attention_kernel(const camox_short_attention_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_short_attention_kernel *camox_short_attention_forward(camox_dtype dtype, camox_isa isa);
camox_short_attention_kernel *camox_short_attention_backward(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_short_attention_cuda(const camox_short_attention_params *p, void *stream);
int camox_short_attention_backward_cuda(const camox_short_attention_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
