/* Checks, the order of tokens and the table of variants. */
#include "rope.h"

#include <stddef.h>

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "rope_plan.h"

int camox_rope_check(const camox_rope_params *p, int backward) {
  const int64_t size[4] = {p->batch, p->heads, p->length, p->dim};
  CAMOX_REQUIRE(camox_check_dtype("rope", (int)p->dtype));
  CAMOX_REQUIRE(camox_check_sizes("rope", "x", size, 4));
  if (p->rotary_dim < 0 || p->rotary_dim > p->dim || p->rotary_dim % 2 != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: rotary_dim must be even, from 0 to x's last dimension %lld, got %lld",
                      (long long)p->dim, (long long)p->rotary_dim);
  if (p->table_columns != p->rotary_dim / 2 && p->table_columns != p->rotary_dim)
    return camox_fail(CAMOX_INVALID_ARGUMENT,
                      "rope: cos and sin must have rotary_dim/2 = %lld or rotary_dim = %lld columns, got %lld",
                      (long long)(p->rotary_dim / 2), (long long)p->rotary_dim, (long long)p->table_columns);
  if (p->positions && p->cu_seqlens) return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: give positions or cu_seqlens, not both");
  if (p->cu_seqlens && (p->batch != 1 || p->sequences < 0))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cu_seqlens needs at least one element and x of shape (total, H, D)");
  if (!p->positions && !p->cu_seqlens && p->table_length < p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cos and sin have %lld rows, fewer than the %lld positions of x",
                      (long long)p->table_length, (long long)p->length);
  CAMOX_REQUIRE(camox_check_distinct_elements("rope", "what is written", &p->y, size));
#ifndef CAMOX_CUDA_PART
  if (backward && (p->positions || p->cu_seqlens) && !(p->tokens && p->row_begin))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: the order of the tokens is missing");
#else
  (void)backward;
#endif
  return CAMOX_OK;
}

int64_t camox_rope_items(const camox_rope_params *p) {
  if (p->heads == 0 || p->dim == 0) return 0;
  return p->batch * camox_ceil_div(p->length, camox_rope_tile(p));
}

int64_t camox_rope_backward_items(const camox_rope_params *p) { return p->table_length; }

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_rope_kernel, camox_rope_forward, camox_rope_forward_kernel)
CAMOX_KERNEL_TABLE(camox_rope_kernel, camox_rope_backward, camox_rope_backward_kernel)

static int check_cu_seqlens(const camox_rope_params *p) {
  const int32_t *cu = p->cu_seqlens;
  if (cu[0] != 0) return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cu_seqlens[0] must be 0, got %d", (int)cu[0]);
  for (int64_t s = 0; s < p->sequences; ++s) {
    if (cu[s + 1] < cu[s])
      return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cu_seqlens must not fall, got %d after %d at index %lld", (int)cu[s + 1],
                        (int)cu[s], (long long)s + 1);
    if ((int64_t)cu[s + 1] - cu[s] > p->table_length)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cu_seqlens: sequence %lld has %d tokens, cos and sin have %lld rows",
                        (long long)s, (int)(cu[s + 1] - cu[s]), (long long)p->table_length);
  }
  if (cu[p->sequences] != p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "rope: cu_seqlens must end with the %lld tokens of x, got %d",
                      (long long)p->length, (int)cu[p->sequences]);
  return CAMOX_OK;
}

int camox_rope_check_values(const camox_rope_params *p) {
  if (p->cu_seqlens) return check_cu_seqlens(p);
  if (!p->positions) return CAMOX_OK;
  int64_t rows = p->position_stride[0] == 0 ? (p->batch > 0) : p->batch;
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < p->length; ++t) {
      int64_t position = camox_rope_row(p, b, t, NULL);
      if (position < 0 || position >= p->table_length)
        return camox_fail(CAMOX_INVALID_ARGUMENT,
                          "rope: positions must be >= 0 and < %lld, the rows of cos and sin, got %lld at token %lld",
                          (long long)p->table_length, (long long)position, (long long)t);
    }
  return CAMOX_OK;
}

void camox_rope_sort_tokens(const camox_rope_params *p, int64_t *row_begin, int64_t *tokens) {
  for (int64_t row = 0; row <= p->table_length; ++row) row_begin[row] = 0;
  int64_t sequence = 0;
  for (int64_t b = 0; b < p->batch; ++b)
    for (int64_t t = 0; t < p->length; ++t) ++row_begin[camox_rope_row(p, b, t, &sequence)];
  /* counts become ends; each token, last first, then takes the entry before the end of its row */
  for (int64_t row = 1; row <= p->table_length; ++row) row_begin[row] += row_begin[row - 1];
  for (int64_t b = p->batch - 1; b >= 0; --b)
    for (int64_t t = p->length - 1; t >= 0; --t) {
      sequence = p->cu_seqlens ? camox_rope_sequence(p->cu_seqlens, p->sequences, t) : 0;
      tokens[--row_begin[camox_rope_row(p, b, t, &sequence)]] = b * p->length + t;
    }
}
#endif
