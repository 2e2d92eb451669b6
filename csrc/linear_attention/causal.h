/* linear_attention, causal: position t sees the keys up to t, or before t where `strict`; and one position of it. The notation
   is that of linear_attention.h.

   S_t = S_0 + sum of b_j v_j^T, z_t = z_0 + sum of b_j, over j <= t, or j < t where strict
     out_t = r_t (a_t S_t)               r_t = 1 / (a_t . z_t + eps) for sum, else 1; 0 where that divides by 0
   backward, with g_t the gradient of out_t, and dS, dz those that flow into the returned state:
     u_t  = S_t (r_t g_t)                h_t = r_t (a_t . u_t) for sum, else 0
     da_t = u_t - h_t z_t
     db_j = dS_j v_j + dz_j              dS_j = dS + sum of a_t (r_t g_t)^T, dz_j = dz - sum of h_t a_t, over t >= j, or t > j
     dv_j = b_j dS_j                     where strict; over all t these are the gradients of S_0 and z_0
     dq, dk from da and db as in linear_attention.h
   sequences  B of T positions, or with cu_seqlens (sequences+1), which rise from 0 to T, those of one batch element: each begins
              with a state of its own, S_0[s], and leaves one.
   saved      the inputs. The backward computes the states again: once from the first chunk on, once from the last one back.
   CUDA       values of cu_seqlens are not known before the kernels run: those that do not rise from 0 to T set
              CAMOX_ERROR_CU_SEQLENS (common/device_errors.h), and the results are those of bounds that do.
   sums       chunk by chunk of CAMOX_CAUSAL_CHUNK positions of a sequence: the same bits for any number of threads.
   dtypes     as linear_attention.h.
   errors     CAMOX_INVALID_ARGUMENT: those of linear_attention.h; cu_seqlens that do not rise from 0 to T, or more than one
              batch element beside them. */
#ifndef CAMOX_LINEAR_ATTENTION_CAUSAL_H
#define CAMOX_LINEAR_ATTENTION_CAUSAL_H

#include "linear_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every real tensor is contiguous; its first dimension is the sequence. */
typedef struct {
  camox_dtype dtype;
  int feature_map, normalize, strict;
  double eps;
  int64_t batch, heads, length, key_dim, value_dim; /* B, H, T, N, D */
  int64_t sequences;                                /* B, or those of cu_seqlens */
  const int32_t *cu_seqlens;                        /* may be NULL */
  camox_view4 q, k, v;                              /* [B,H,T,N], [B,H,T,N], [B,H,T,D] */
  const uint8_t *key_mask;                          /* [B,T], not 0: ignore the key; may be NULL */
  int64_t mask_stride[2];
  const void *initial_s, *initial_z; /* real [sequences,H,N,D], [sequences,H,N]; NULL: zeros */
  void *s, *z;                       /* forward: written, the final state */
  camox_view4 out;                   /* [B,H,T,D] */
  /* Backward. */
  camox_view4 grad;                   /* of out; strides may be 0 */
  const void *grad_s, *grad_z;        /* real, of the final state; NULL: zeros */
  camox_view4 grad_q, grad_k, grad_v; /* written */
  void *sum_s, *sum_z;                /* written: the gradients of the initial state */
  void *rows;                         /* sum only, CUDA not with none: real [B,H,T,2], numbers of rows between the passes */
  void *scratch;                      /* CPU: camox_causal_scratch(p) bytes of this thread alone, aligned to 64 */
  /* CUDA. */
  void *records;        /* float, camox_causal_records(p) of them: a state for each chunk or segment */
  int32_t *bounds;      /* int32 [2, sequences + 1], with cu_seqlens */
  uint32_t *error_word; /* of the device, may be NULL */
} camox_causal_params;

enum { CAMOX_CAUSAL_CHUNK = 64 };

int camox_causal_check(const camox_causal_params *p, int backward);
int64_t camox_causal_scratch(const camox_causal_params *p);
typedef void camox_causal_kernel(const camox_causal_params *p, int64_t begin, int64_t end); /* heads of sequences */
camox_causal_kernel *camox_causal_forward(camox_dtype dtype, camox_isa isa);
camox_causal_kernel *camox_causal_backward(camox_dtype dtype, camox_isa isa);

/* One position; the state is read and written in place. */
typedef struct {
  camox_dtype dtype;
  int feature_map, normalize, strict;
  double eps;
  int64_t batch, heads, key_dim, value_dim;
  const void *q, *k, *v; /* [B,H,N], [B,H,N], [B,H,D], contiguous */
  void *s, *z;           /* real [B,H,N,D], [B,H,N]; z with sum only */
  void *out;             /* [B,H,D] */
} camox_causal_step_params;

int camox_causal_step_check(const camox_causal_step_params *p);
typedef void camox_causal_step_fn(const camox_causal_step_params *p, int64_t begin, int64_t end); /* heads */
camox_causal_step_fn *camox_causal_step(camox_dtype dtype, camox_isa isa);

/* Of the CUDA part, of the current device. */
int64_t camox_causal_records(const camox_causal_params *p);
/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_linear_attention_causal_cuda(const camox_causal_params *p, void *stream);
int camox_linear_attention_causal_backward_cuda(const camox_causal_params *p, void *stream);
int camox_linear_attention_step_cuda(const camox_causal_step_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
