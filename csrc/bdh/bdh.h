/* bdh_attention: BDH's attention, whose queries are its keys, from queries that are not yet rotated; and one step of it.

   q (B,H,T,N), v (B,Hv,T,D) with Hv = H or 1 (shared by the heads), any strides; tables (table_length, N/2 or N), dense.
     x = relu(q) where relu, else q         r[2i] = x[2i]c[2i] - x[2i+1]s[2i]    r[2i+1] = x[2i+1]c[2i+1] + x[2i]s[2i+1]
     s[i,j] = scale * sum_n r[i,n] r[j,n]   causal: j < i counts, strictly; the other scores are 0, with softmax -inf
     w = softmax(s) over j, or s            a causal softmax has zeros in row 0
     out[i] = sum_j w[i,j] v[j]
   backward, g = d out, m[i,j] = 1 where the score counts:
     d v[j]   = sum_i w[i,j] g[i], and over the heads where Hv = 1, in their order
     d w[i,j] = m[i,j] sum_d g[i,d] v[j,d]
     d s      = d w, with softmax w * (d w - delta[i]), delta[i] = sum_d g[i,d] out[i,d]
     d r      = scale * (d s + d s^T) r
     d x[2i] = d r[2i] c[2i] + d r[2i+1] s[2i+1]   d x[2i+1] = d r[2i+1] c[2i+1] - d r[2i] s[2i]   d q = d x where q > 0
   With grad_of_rotated grad_q is d r itself: what a gradient to the tables begins with.
   state form, without softmax, the same numbers in another order: Z = r^T v (N,D), out = scale * r Z; causal in blocks of
     tokens, Z the sum over the blocks before, scores inside a block. Cheaper than T^2 products above camox_bdh_crossover.
   dtypes    q, v, out, g and their gradients float32, bfloat16, float16, tables and sums float32; float64 with float64.
             One rounding, at the store; with avx512_bf16 r, w and d s of the backward are bfloat16 where they are multiplied.
   saved     scores w [B,H,T,T] where camox_bdh_saves_scores, else with softmax the rows' log(sum(exp(s))) [B,H,T] (-inf
             for a row without keys), else nothing. Nothing of (T,N) is written but grad_q: r is made in tiles; on CUDA
             half types in state form may have r of some heads in scratch.
   work      items are B*H heads; those of the sum of grad_v over the heads B*T rows.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype, a negative size, N odd or 0, Hv neither 1 nor H, tables of another width
             or shorter than T, scale not > 0 and finite, softmax in state form, an output whose elements share memory.
   source    Attention of takzen/vision-bdh, models/bdh.py at 71cb8ab; The Dragon Hatchling, arXiv 2509.26507. */
#ifndef CAMOX_BDH_H
#define CAMOX_BDH_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_BDH_BY_COST = 0, CAMOX_BDH_QUADRATIC = 1, CAMOX_BDH_STATE = 2 } camox_bdh_form;

typedef struct {
  camox_dtype dtype;
  int relu, causal, softmax;
  int tf32; /* float32 products on tensor cores, where CUDA has them */
  camox_bdh_form form;
  double scale;
  int64_t batch, heads, value_heads, length, dim, value_dim; /* B, H, Hv, T, N, D */
  int64_t table_length, table_columns;
  const void *cos, *sin; /* [table_length, table_columns], dense */
  camox_view4 q;         /* [B,H,T,N] */
  camox_view4 v;         /* [B,Hv,T,D]; over heads the stride is 0 where Hv = 1 */
  camox_view4 out;       /* [B,H,T,D]; the backward reads it with softmax */
  void *scores;          /* [B,H,T,T] dense: written by the forward, may be NULL: not saved, or to be computed again */
  void *logsumexp;       /* [B,H,T] dense, likewise */
  /* Backward. */
  int grad_of_rotated; /* grad_q is d r */
  int avx512_bf16;     /* for the kernel of camox_bdh_backward_avx512_bf16 */
  camox_view4 grad;    /* [B,H,T,D] */
  camox_view4 grad_q;  /* [B,H,T,N] */
  camox_view4 grad_v;  /* [B,Hv,T,D] */
  void *partial; /* gradients of v of each head [B,H,T,D], dense, in what is computed in; NULL where Hv = H. On the CPU also
                    NULL where there are heads and as many batch elements as slots: each is one slot's, which sums */
  void *scratch; /* `slots` of camox_bdh_scratch elements each, in what is computed in; on CUDA camox_bdh_cuda_scratch bytes */
  int64_t slots;
} camox_bdh_params;

/* Tokens from which the state form has fewer products: 1.5 T^2 (N+D) against 6 T N D, and all of T^2 D where not causal. */
static CAMOX_ANYWHERE inline int camox_bdh_crossover(const camox_bdh_params *p) {
  return p->length * (p->dim + (p->causal ? 1 : 2) * p->value_dim) > 4 * p->dim * p->value_dim;
}

static CAMOX_ANYWHERE inline int camox_bdh_state_form(const camox_bdh_params *p) {
  if (p->softmax || p->form == CAMOX_BDH_QUADRATIC) return 0;
  return p->form == CAMOX_BDH_STATE || camox_bdh_crossover(p);
}

/* Tokens of a chunk of the causal state form on CUDA, whole tiles of 64: half of the cross-over, because states are traffic,
   twice as much in chunks half as long. */
static CAMOX_ANYWHERE inline int64_t camox_bdh_cuda_chunk(const camox_bdh_params *p) {
  const int64_t tokens = p->value_dim > 0 ? 2 * p->dim * p->value_dim / (p->dim + p->value_dim) / 64 * 64 : 64;
  return tokens < 64 ? 64 : tokens < 512 ? tokens : 512;
}

static CAMOX_ANYWHERE inline int camox_bdh_saves_scores(const camox_bdh_params *p) {
  return !camox_bdh_state_form(p) && 4 * p->length <= p->dim;
}

int camox_bdh_check(const camox_bdh_params *p, int backward);

/* Work items of the forward and of the first part of the backward, which are heads, and of the second part, rows of grad_v. */
int64_t camox_bdh_work_items(const camox_bdh_params *p);
int64_t camox_bdh_sum_work_items(const camox_bdh_params *p);

/* Notes (status.h) which form is computed and why, and of a bfloat16 backward whether by AVX512-BF16. */
void camox_bdh_note(const camox_bdh_params *p, int backward);

/* Elements of one slot of scratch. Slot s of `slots` computes the work items s*items/slots ... (s+1)*items/slots - 1; where the
   backward of shared values has no `partial`, batch elements instead. */
int64_t camox_bdh_scratch(const camox_bdh_params *p, int backward);

/* begin and end are slots; of camox_bdh_sum they are work items. */
typedef void camox_bdh_kernel(const camox_bdh_params *p, int64_t begin, int64_t end);
camox_bdh_kernel *camox_bdh_forward(camox_dtype dtype, camox_isa isa);
camox_bdh_kernel *camox_bdh_backward(camox_dtype dtype, camox_isa isa);
/* The backward of bfloat16 by the dot products of AVX512-BF16, where camox_isa_has_avx512_bf16(). */
camox_bdh_kernel *camox_bdh_backward_avx512_bf16(void);
camox_bdh_kernel *camox_bdh_sum(camox_dtype dtype, camox_isa isa);

/* One token: out = scale * r S, then next = S + r v^T. */
typedef struct {
  camox_dtype dtype;
  int relu;
  double scale;
  int64_t batch, heads, value_heads, dim, value_dim;
  int64_t table_columns;
  const void *cos, *sin; /* [table_columns] */
  camox_view4 q;         /* [B,H,1,N] */
  camox_view4 v;         /* [B,Hv,1,D]; over heads the stride is 0 where Hv = 1 */
  camox_view4 out;       /* [B,H,1,D] */
  camox_view4 state;     /* S [B,H,N,D] in what is computed in; data NULL: zeros */
  void *next;            /* [B,H,N,D], dense */
} camox_bdh_step_params;

int camox_bdh_step_check(const camox_bdh_step_params *p);
int64_t camox_bdh_step_work_items(const camox_bdh_step_params *p); /* heads */
typedef void camox_bdh_step_fn(const camox_bdh_step_params *p, int64_t begin, int64_t end);
camox_bdh_step_fn *camox_bdh_step(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int64_t camox_bdh_cuda_scratch(const camox_bdh_params *p, int backward); /* bytes */
int camox_bdh_cuda(const camox_bdh_params *p, void *stream);
int camox_bdh_backward_cuda(const camox_bdh_params *p, void *stream);
int camox_bdh_step_cuda(const camox_bdh_step_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
