/* moe: routing of a sparse mixture of experts, its rows' copies to the experts and back, and the losses that balance it.

   route     logits (rows,E). The K largest of a row are its experts, best first, ties to the lower one. Slot s = row*K+k.
             Weights of the chosen:
               topk_softmax  softmax over the K chosen, and so is softmax_topk_renorm: what all share cancels
               softmax_topk  softmax over all E
               sigmoid_topk  1/(1+exp(-logit))
             A slot has a copy if its row is valid and fewer than `capacity` earlier slots chose its expert.
               counts (E), offsets (E+1)  copies of each expert, and their sums before each
               position[s]  offsets[e] + how many earlier slots with a copy chose e; -1 without a copy, the weight is 0 then
               order        the slot of each place, -1 past the last
   place     the same counts, offsets, position and order for experts that the caller chose; weights are left alone (NULL).
   rows      of any trailing shape: blocks of `row_size` elements, in the same order in all tensors of a call.
               dispatch  place[position[s]] = row[s/K], zeros in the other places
               combine   row[r] = sum over k, in order, of weight * place[position[r*K+k]]; without weights dispatch's backward
               backward  of combine: grad_place = weight * grad_row, zeros in the other places;
                         grad_weight = <grad_row, place>, 0 without a copy
             With capacity >= 0 they are padded: place experts[s]*capacity + position[s] - offsets[experts[s]].
   aux loss  p = softmax(logits), n = valid rows (at least 1), f = counts/(n*K), S[e] = sum of p over valid rows:
               switch          E * sum(f * S/n)
               importance_cv2  var(S, biased)/(mean(S)^2 + 1e-10)
               z               sum(logsumexp^2)/n
               usage_mse       0.01 * mean((counts/(rows*K + 1e-8) - 1/E)^2), which has no gradient
             slope[e] = d loss / d S[e], so that d loss / d logit[e] = p[e] * (slope[e] - sum(slope * p)); of z it is 2/n for
             each e, and d loss / d logit[e] = slope[e] * logsumexp * p[e].
   activation, of a row h of TokenMoE's experts, sizes H or, gated, 2H (gate, then value); on the CPU:
               swiglu  a = silu(gate) * value          gelu  a = gelu(h), by erf
             backward  of grad to a, with a number `scale` of the row: a_scaled = scale * a, dot = <grad, a>, and grad_h, the
                       gradient of h by scale * grad
   dtypes    float32, bfloat16, float16, computed in float32; float64. Weights, losses, slopes are of the type computed in.
   order     of every sum is set by the shape alone; the copies of an expert lie in the order of their rows.
   backward  of route reads the logits again; of combine y and the weights. Nothing else is saved.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype or kind, a negative size, E beyond 1024, top_k of 0 or beyond E. Values, on
             the CPU: NaN among the logits of a valid row; offsets, experts and positions that lie out of bounds or contradict
             each other. On CUDA the weights of such a row become NaN; a slot out of bounds has no copy, and makes NaN of its
             row in combine and of its gradient (place gives a slot whose expert is out of bounds such a position);
             CAMOX_ERROR_MOE_* is set (common/device_errors.h).
   source    Shazeer et al., arXiv 1701.06538 (importance); Switch Transformers, arXiv 2101.03961 (switch, capacity); ST-MoE,
             arXiv 2202.08906 (z); usage_mse: MoELayer of CamoXpert. */
#ifndef CAMOX_MOE_H
#define CAMOX_MOE_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CAMOX_MOE_MOST_EXPERTS 1024
#define CAMOX_MOE_SCRATCH (193 << 10)

typedef enum { CAMOX_MOE_TOPK_SOFTMAX = 0, CAMOX_MOE_SOFTMAX_TOPK = 1, CAMOX_MOE_SIGMOID_TOPK = 2 } camox_moe_score;
typedef enum { CAMOX_EXPERT_SWIGLU = 0, CAMOX_EXPERT_GELU = 1 } camox_expert_activation;
typedef enum { CAMOX_MOE_SWITCH = 0, CAMOX_MOE_IMPORTANCE_CV2 = 1, CAMOX_MOE_Z = 2, CAMOX_MOE_USAGE_MSE = 3 } camox_moe_aux;

/* Parameters of the route, the losses and their backwards. Tensors without strides here are contiguous; [rows,K] is written
   [slots]. */
typedef struct {
  camox_dtype dtype;
  int score; /* camox_moe_score */
  int aux;   /* camox_moe_aux */
  int64_t rows, num_experts, top_k;
  int64_t capacity;   /* < 0: none */
  const void *logits; /* [rows, E] */
  int64_t logits_stride[2];
  const uint8_t *valid; /* [rows], may be NULL: all are */
  int64_t valid_stride;
  void *weights;                       /* [slots]; place: NULL */
  int64_t *experts, *order, *position; /* [slots] */
  int64_t *counts, *offsets;           /* [E], [E+1] */
  /* CPU: for each block of rows the number of its slots that chose each expert, and of its rows whose logits hold NaN; after
     camox_moe_scan the rank of its first slot among those of each expert. */
  int64_t *block_counts; /* [blocks, E+1] */
  /* Losses. */
  void *partial;     /* [blocks, E+2], double, on CUDA float: sums of p, of logsumexp^2, of valid rows */
  void *loss;        /* [1] */
  void *slope;       /* [E] */
  const void *grad;  /* backward: [slots] to the weights, or [1] to the loss */
  void *grad_logits; /* [rows, E] */
  void *scratch;     /* CPU: CAMOX_MOE_SCRATCH bytes of this thread alone, aligned to 64 bytes */
  /* CUDA. */
  int32_t *block_totals; /* [blocks, E]: how many slots of each block of rows chose each expert */
  uint32_t *error_word;  /* of the device, may be NULL */
} camox_moe_route_params;

/* Parameters of dispatch, combine and their backwards. */
typedef struct {
  camox_dtype dtype;
  int64_t rows, top_k, num_experts, row_size;
  int64_t capacity;                            /* < 0: rows*K sorted places; else E*capacity */
  const int64_t *experts, *offsets, *position; /* as routed */
  void *row;                                   /* [rows, row_size]: read by dispatch and combine's backward, else written */
  int64_t row_stride;
  void *place; /* [places, row_size]: written by dispatch, else read */
  int64_t place_stride;
  const void *weights; /* [slots]; NULL: all 1 */
  void *grad_place;    /* [places, row_size], dense */
  void *grad_weights;  /* [slots] */
  void *partial;       /* [rows, chunks, K], where a row has several chunks: sums of each */
  uint32_t *error_word;
} camox_moe_rows_params;

/* Parameters of the activations. All tensors are dense. */
typedef struct {
  camox_dtype dtype;
  int activation; /* camox_expert_activation */
  int64_t rows, hidden;
  const void *h;            /* [rows, hidden], swiglu [rows, 2*hidden] */
  void *a;                  /* [rows, hidden]: a, in the backward a_scaled */
  const void *grad, *scale; /* backward: [rows, hidden]; [rows], of the type computed in */
  void *grad_h, *dots;      /* backward: as h; [rows], of the type computed in */
} camox_moe_activation_params;

int camox_moe_activation_check(const camox_moe_activation_params *p);
int camox_moe_route_check(const camox_moe_route_params *p);
int camox_moe_rows_check(const camox_moe_rows_params *p);

/* Validates experts, which the caller must be able to read. */
int camox_moe_check_experts(const int64_t *experts, int64_t slots, int64_t num_experts);
/* Validates that the slots with a copy have the first offsets[E] sorted places, one each, and with a capacity those of their
   experts, so that every place has one copy or is vacant. The indices must be readable by the caller. taken: [slots], all
   0. */
int camox_moe_check_places(const camox_moe_rows_params *p, uint8_t *taken);

static CAMOX_ANYWHERE inline int64_t camox_moe_places(const camox_moe_rows_params *p) {
  return p->capacity < 0 ? p->rows * p->top_k : p->num_experts * p->capacity;
}

/* Where the copy of a slot lies, -1 for none; unchecked. */
static CAMOX_ANYWHERE inline int64_t camox_moe_place(const camox_moe_rows_params *p, int64_t slot) {
  int64_t position = p->position[slot];
  if (position < 0 || p->capacity < 0) return position;
  int64_t expert = p->experts[slot];
  return expert * p->capacity + position - p->offsets[expert];
}

/* Whether no slot has this place, which is one of `places`. */
static CAMOX_ANYWHERE inline int camox_moe_vacant(const camox_moe_rows_params *p, int64_t place) {
  if (p->capacity < 0) return place >= p->offsets[p->num_experts];
  int64_t expert = place / p->capacity;
  return place % p->capacity >= p->offsets[expert + 1] - p->offsets[expert];
}

/* CPU: the number of independent work items, which the shape alone decides: blocks of rows; chunks of rows, and in dispatch and
   combine's backward places without a copy. */
int64_t camox_moe_blocks(const camox_moe_route_params *p);
int64_t camox_moe_items(const camox_moe_rows_params *p, int fills_places);

typedef void camox_moe_route_kernel(const camox_moe_route_params *p, int64_t begin, int64_t end);
typedef void camox_moe_rows_kernel(const camox_moe_rows_params *p, int64_t begin, int64_t end);

/* Route: choose over blocks, then scan, which fails on NaN, then place over blocks. Given experts, which
   camox_moe_check_experts has validated, are counted over blocks instead. */
camox_moe_route_kernel *camox_moe_choose(camox_dtype dtype, camox_isa isa);
void camox_moe_count(const camox_moe_route_params *p, int64_t begin, int64_t end);
int camox_moe_scan(const camox_moe_route_params *p);
void camox_moe_place_slots(const camox_moe_route_params *p, int64_t begin, int64_t end);
camox_moe_route_kernel *camox_moe_route_backward(camox_dtype dtype, camox_isa isa);

/* Loss: sums over blocks, then finish. */
camox_moe_route_kernel *camox_moe_aux_sums(camox_dtype dtype, camox_isa isa);
void camox_moe_aux_finish(const camox_moe_route_params *p);
camox_moe_route_kernel *camox_moe_aux_backward(camox_dtype dtype, camox_isa isa);

camox_moe_rows_kernel *camox_moe_dispatch(camox_dtype dtype, camox_isa isa);
camox_moe_rows_kernel *camox_moe_combine(camox_dtype dtype, camox_isa isa);
camox_moe_rows_kernel *camox_moe_combine_backward(camox_dtype dtype, camox_isa isa);
/* Work items are rows. */
typedef void camox_moe_activation_function(const camox_moe_activation_params *p, int64_t begin, int64_t end);
camox_moe_activation_function *camox_moe_activation(camox_dtype dtype, camox_isa isa);
camox_moe_activation_function *camox_moe_activation_backward(camox_dtype dtype, camox_isa isa);

/* The weights' gradient from the sums of chunks, where a row has several. */
void camox_moe_sum_chunks(const camox_moe_rows_params *p);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_moe_route_cuda(const camox_moe_route_params *p, void *stream);
int camox_moe_place_cuda(const camox_moe_route_params *p, void *stream);
int camox_moe_route_backward_cuda(const camox_moe_route_params *p, void *stream);
int camox_moe_aux_cuda(const camox_moe_route_params *p, void *stream);
int camox_moe_aux_backward_cuda(const camox_moe_route_params *p, void *stream);
int camox_moe_dispatch_cuda(const camox_moe_rows_params *p, void *stream);
int camox_moe_combine_cuda(const camox_moe_rows_params *p, void *stream);
int camox_moe_combine_backward_cuda(const camox_moe_rows_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
