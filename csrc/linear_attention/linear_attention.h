/* linear_attention: attention over T positions through an N x D state, without the T x T matrix. Not causal.

   q, k (B,H,T,N), v (B,H,T,D), any strides, 1 <= N, D <= 256. f = feature map, m_t = 0 where key_mask is set, else 1.
     f(x)      elu1: x + 1 for x > 0, else exp(x); relu: max(x, 0); identity: x
     f'(x)     elu1: 1 for x > 0, else exp(x);     relu: 1 for x > 0, else 0; identity: 1
     sum       a_t = f(q_t)              b_t = m_t f(k_t)
     feature   a_t = f(q_t) / sum f(q_t) b_t = m_t f(k_t) / sum f(k_t), sums over N; a row whose sum is 0 is all 0
     none      as sum
     S = S_0 + sum_t b_t v_t^T (N,D)     z = z_0 + sum_t b_t (N), sum only; S_0, z_0 default to 0
     out_t = r_t (a_t S)                 r_t = 1 / (a_t . z + eps) for sum, else 1
   A masked position adds nothing to the state, even where its k or v is NaN, and its query is answered.
   backward, with g_t the gradient of out_t and dS, dz those of S and z, which begin with the ones that flow into the
   returned state and at the end are those of S_0 and z_0:
     u_t  = S g_t                        da_t = r_t (u_t - c_t z),  c_t = r_t (a_t . u_t) for sum, else da_t = u_t
     dS  += sum_t r_t a_t g_t^T          dz  -= sum_t r_t c_t a_t
     db_t = dS v_t + dz                  dv_t = b_t dS
     dq_t = f'(q_t) da_t                 dk_t = m_t f'(k_t) db_t
     feature: dq_t = f'(q_t) (da_t - a_t . da_t) / sum f(q_t), likewise dk_t of b_t and db_t; 0 where the sum is 0
   saved     q, k, v, key_mask, S and z.
   memory    forward: k, v read once for S, q read and out written once; backward: q and g read, dq written, then k and v read,
             dk and dv written.
   sums      over T in two steps of fixed order: `chunks` chunks of `chunk` positions, each summed by itself into its row of
             `partial`, then the initial state and the rows in rising order, in runs of 16. chunk depends on the shape alone.
   dtypes    float32, bfloat16, float16 computed in float32 with a float32 state; float64 with a float64 state. One rounding, at
             the store.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype, feature map or normalization, a negative size, N or D outside 1 ... 256, eps
             not > 0 and finite, no chunks, an output whose elements share memory, a z missing or superfluous.
   source    Transformers are RNNs, arXiv 2006.16236, equations 4 to 7; "feature" is linear_attention of mahi-chan/camoXpert,
             models/backbone.py at 47e858c. */
#ifndef CAMOX_LINEAR_ATTENTION_H
#define CAMOX_LINEAR_ATTENTION_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CAMOX_LINEAR_ATTENTION_MAX_DIM 256

typedef enum { CAMOX_FEATURE_ELU1 = 0, CAMOX_FEATURE_RELU = 1, CAMOX_FEATURE_IDENTITY = 2 } camox_feature_map;
typedef enum { CAMOX_NORMALIZE_SUM = 0, CAMOX_NORMALIZE_FEATURE = 1, CAMOX_NORMALIZE_NONE = 2 } camox_normalize;

/* `real` is float, or double for float64; every real tensor is contiguous. z, initial_z, grad_z, sum_z: with sum only. */
typedef struct {
  camox_dtype dtype;
  int feature_map, normalize;
  double eps;
  int64_t batch, heads, length, key_dim, value_dim; /* B, H, T, N, D */
  camox_view4 q, k, v;                              /* [B,H,T,N], [B,H,T,N], [B,H,T,D] */
  const uint8_t *key_mask;                          /* [B,T], not 0: ignore the key; may be NULL */
  int64_t mask_stride[2];
  const void *initial_s, *initial_z; /* real [B,H,N,D], [B,H,N]; NULL: zeros */
  void *s, *z;                       /* real [B,H,N,D], [B,H,N]: written by the forward, read by the backward */
  camox_view4 out;                   /* [B,H,T,D] */
  /* Backward. */
  camox_view4 grad;                   /* [B,H,T,D], of out; strides may be 0 */
  const void *grad_s, *grad_z;        /* real, of the returned state; NULL: zeros */
  camox_view4 grad_q, grad_k, grad_v; /* written, like q, k, v */
  void *sum_s, *sum_z;                /* real [B,H,N,D], [B,H,N]: dS, dz, written */
  /* Scratch of both directions, which the binding allocates after camox_linear_attention_plan: a row for each chunk. */
  int64_t multiprocessors; /* of the GPU, in the CUDA part */
  int backward;            /* whether the chunks are those of the backward */
  int64_t chunk, chunks;
  void *partial; /* real [B*H, chunks, N*D + N]: a chunk's part of S as [N,D], then of z as [N] (sum only); dS and dz alike */
  void *scratch; /* CPU: CAMOX_LINEAR_ATTENTION_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_linear_attention_params;

#define CAMOX_LINEAR_ATTENTION_SCRATCH (484 << 10)

/* Sets chunk and chunks; the sizes must be set, in the CUDA part dtype, k, multiprocessors and backward too. */
void camox_linear_attention_plan(camox_linear_attention_params *p);

int camox_linear_attention_check(const camox_linear_attention_params *p, int backward);

/* The steps of both directions, in order. */
typedef enum {
  CAMOX_ATTENTION_PARTIAL = 0, /* k, v -> partial; backward: q, grad, s, z -> partial, grad_q */
  CAMOX_ATTENTION_STATE = 1,   /* partial -> s, z; backward: -> sum_s, sum_z */
  CAMOX_ATTENTION_APPLY = 2,   /* q, s, z -> out; backward: k, v, sum_s, sum_z -> grad_k, grad_v */
  CAMOX_ATTENTION_STEPS = 3
} camox_attention_step;

/* Work items of a step: chunks of a head, or heads. */
int64_t camox_linear_attention_work_items(const camox_linear_attention_params *p, camox_attention_step step);

typedef void camox_linear_attention_kernel(const camox_linear_attention_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_linear_attention_kernel *camox_linear_attention_forward(camox_attention_step step, camox_dtype dtype, camox_isa isa);
camox_linear_attention_kernel *camox_linear_attention_backward(camox_attention_step step, camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels, all steps: 0 or a cudaError_t. */
int camox_linear_attention_cuda(const camox_linear_attention_params *p, void *stream);
int camox_linear_attention_backward_cuda(const camox_linear_attention_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
