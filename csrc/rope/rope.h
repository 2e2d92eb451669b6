/* rope: rotary position embedding, each pair of elements of a token is rotated by its position's angles, in one pass.

   x (B,H,T,D), any strides; the first r = rotary_dim elements are rotated, the others copied. Pair i is elements
   (a,b) = (2i,2i+1) where interleaved, else (i,i+r/2). With c, s the row of the tables that belongs to the token's position:
     y[a] = x[a]c[a] - x[b]s[a]   y[b] = x[b]c[b] + x[a]s[b]
     y[a] = x[a]c[a] + x[b]s[b]   y[b] = x[b]c[b] - x[a]s[a]   transposed: the inverse rotation
   tables    cos, sin (table_length, r/2), one angle per pair (c[a] = c[b]), or (table_length, r), one per element.
   position  t; or positions (B,T) int64; or cu_seqlens (sequences+1,) int32: T tokens of several contiguous
             sequences (B = 1), whose positions each begin at 0.
   dtypes    float32, bfloat16, float16 with float32 tables, computed in float32; float64 with float64 tables. One rounding,
             at the store. y may be x itself.
   backward  to x: the inverse rotation of the gradient; nothing is saved. To the tables, where needed: x is read again,
             products are summed over heads, then over tokens, for each row of the tables in the order of the tokens;
             sums of many tokens in float64, so that their number costs no accuracy.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype, a negative size, an odd rotary_dim or one beyond D, tables of another
             width or shorter than T, both positions and cu_seqlens. Values, on the CPU: a position that is negative or past
             the tables, cu_seqlens that do not rise from 0 to T, a sequence longer than the tables. On CUDA the rows of such
             a token become NaN and CAMOX_ERROR_ROPE_POSITION is set (common/device_errors.h).
   source    RoFormer, arXiv 2104.09864, equation 34; Attention.rope of takzen/vision-bdh, models/bdh.py at 71cb8ab. */
#ifndef CAMOX_ROPE_H
#define CAMOX_ROPE_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order of a tensor's dimensions. */
typedef enum { CAMOX_ROPE_BHTD = 0, CAMOX_ROPE_BTHD = 1 } camox_rope_layout;

typedef struct {
  camox_dtype dtype;
  int interleaved, transposed;
  int64_t batch, heads, length, dim; /* B, H, T, D */
  int64_t rotary_dim;
  int64_t table_length, table_columns;
  const void *cos, *sin; /* [table_length, table_columns], dense */
  const int64_t *positions;
  int64_t position_stride[2]; /* over B and T */
  const int32_t *cu_seqlens;  /* dense */
  int64_t sequences;
  camox_view4 x; /* [B,H,T,D]: the input; in the backward the incoming gradient, rotated the other way */
  camox_view4 y; /* the output */
  /* Backward to the tables. */
  camox_view4 input;         /* the forward's x */
  void *grad_cos, *grad_sin; /* like cos, sin: every row is written */
  const int64_t *tokens;     /* with positions or cu_seqlens: tokens b*T+t sorted by their row of the tables, */
  const int64_t *row_begin;  /* and where the tokens of each row begin among them [table_length+1] */
  double *totals;            /* on the CPU: the sums of rows of many tokens [table_length, 2, table_columns] */
  /* CUDA. */
  uint32_t *error_word; /* of the device, may be NULL */
  float *partial;       /* backward to the tables: the sums of each token over its heads [2, B*T, table_columns] */
} camox_rope_params;

/* Validates all arguments except the values of positions and cu_seqlens. */
int camox_rope_check(const camox_rope_params *p, int backward);

/* Validates the values of positions and cu_seqlens, which the caller must be able to read. */
int camox_rope_check_values(const camox_rope_params *p);

/* The sequence that token t belongs to: the last one that begins at or before t. */
static CAMOX_ANYWHERE inline int64_t camox_rope_sequence(const int32_t *cu_seqlens, int64_t sequences, int64_t t) {
  int64_t low = 0, high = sequences;
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    if (cu_seqlens[middle] <= t)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* tokens and row_begin of these positions, which have been checked: row_begin[table_length+1], tokens[B*T]. */
void camox_rope_sort_tokens(const camox_rope_params *p, int64_t *row_begin, int64_t *tokens);

/* The number of independent work items, which the shape alone decides: tiles of tokens; in the backward rows of the tables. */
int64_t camox_rope_items(const camox_rope_params *p);
int64_t camox_rope_backward_items(const camox_rope_params *p);

typedef void camox_rope_kernel(const camox_rope_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_rope_kernel *camox_rope_forward(camox_dtype dtype, camox_isa isa);
camox_rope_kernel *camox_rope_backward(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_rope_cuda(const camox_rope_params *p, void *stream);
int camox_rope_backward_cuda(const camox_rope_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
