/* Checks, sizes and the table of variants. */
#include "bdh.h"

#include <math.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "bdh_plan.h"

static int check_sizes(const char *op, camox_dtype dtype, int64_t batch, int64_t heads, int64_t value_heads, int64_t length,
                       int64_t dim, int64_t value_dim, int64_t table_columns, double scale) {
  CAMOX_REQUIRE(camox_check_dtype(op, (int)dtype));
  if (batch < 0 || heads < 0 || value_heads < 0 || length < 0 || dim < 0 || value_dim < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: q or v has a negative size", op);
  if (dim == 0 || dim % 2 != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: the last dimension of q must be even and > 0, got %lld", op, (long long)dim);
  if (value_heads != 1 && value_heads != heads)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: v must have 1 or %lld heads, got %lld", op, (long long)heads,
                      (long long)value_heads);
  if (table_columns != dim / 2 && table_columns != dim)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: cos and sin must have %lld or %lld columns, got %lld", op,
                      (long long)(dim / 2), (long long)dim, (long long)table_columns);
  if (!(scale > 0) || !isfinite(scale))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: scale must be > 0 and finite, got %g", op, scale);
  return CAMOX_OK;
}

/* Whether elements of a tensor of this shape share memory. */
static int overlaps(const camox_view4 *view, int64_t batch, int64_t heads, int64_t length, int64_t dim) {
  const int64_t size[4] = {batch, heads, length, dim};
  return camox_shares_elements(view, size);
}

int camox_bdh_check(const camox_bdh_params *p, int backward) {
  int status = check_sizes("bdh_attention", p->dtype, p->batch, p->heads, p->value_heads, p->length, p->dim, p->value_dim,
                           p->table_columns, p->scale);
  if (status != CAMOX_OK) return status;
  if (p->table_length < p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: cos and sin have %lld rows, fewer than the %lld positions of q",
                      (long long)p->table_length, (long long)p->length);
  if ((int)p->form < 0 || p->form > CAMOX_BDH_STATE || (p->form == CAMOX_BDH_STATE && p->softmax))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: form must be 0, 1 or, without softmax, 2, got %d", (int)p->form);
  const int shared = backward ? overlaps(&p->grad_q, p->batch, p->heads, p->length, p->dim) ||
                                    overlaps(&p->grad_v, p->batch, p->value_heads, p->length, p->value_dim)
                              : overlaps(&p->out, p->batch, p->heads, p->length, p->value_dim);
  if (shared) return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: elements of what is written share memory");
  /* An empty tensor may have no memory, and there is nothing to read from it. */
  const int rows = p->batch > 0 && p->heads > 0 && p->length > 0;
  if (backward && p->softmax && rows && ((p->value_dim > 0 && !p->out.data) || !(p->scores || p->logsumexp)))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: the backward of softmax needs out and what was saved");
#ifdef CAMOX_CUDA_PART
  const int summed = 0;
#else
  const int summed = p->heads > 0 && p->slots <= p->batch;
#endif
  if (backward && p->value_heads != p->heads && !p->partial && !summed)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: the gradients of v of each head have no memory");
  return CAMOX_OK;
}

int camox_bdh_step_check(const camox_bdh_step_params *p) {
  int status = check_sizes("bdh_attention_step", p->dtype, p->batch, p->heads, p->value_heads, 1, p->dim, p->value_dim,
                           p->table_columns, p->scale);
  if (status != CAMOX_OK) return status;
  if (overlaps(&p->out, p->batch, p->heads, 1, p->value_dim))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention_step: elements of what is written share memory");
  return CAMOX_OK;
}

int camox_bdh_product_check(const camox_bdh_product_params *p) {
  const char *op = "bdh_product";
  if (p->heads < 0 || p->rows < 0 || p->columns < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: a or b has a negative size", op);
  if (p->depth < 1) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: a must have columns, got %lld", op, (long long)p->depth);
  if (p->a_stride[1] != 1 && p->a_stride[2] != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: rows or columns of a must be dense", op);
  if (p->b_stride[1] != 1 && p->b_stride[2] != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: rows or columns of b must be dense", op);
  return CAMOX_OK;
}

int64_t camox_bdh_items(const camox_bdh_params *p) { return p->length == 0 ? 0 : p->batch * p->heads; }
int64_t camox_bdh_sum_items(const camox_bdh_params *p) { return p->batch * p->length; }
int64_t camox_bdh_step_items(const camox_bdh_step_params *p) { return p->batch * p->heads; }

#ifndef CAMOX_CUDA_PART
int64_t camox_bdh_product_scratch(const camox_bdh_product_params *p) { return camox_bdh_product_plan_of(p).total; }

/* The least multiple of `unit` that cuts n into as few tiles as `most` does. */
static int64_t even_tile(int64_t n, int64_t most, int64_t unit) {
  const int64_t tiles = n > most ? camox_ceil_div(n, most) : 1;
  return camox_ceil_div(n > 0 ? camox_ceil_div(n, tiles) : 1, unit) * unit;
}

void camox_bdh_product_cut(camox_bdh_product_params *p, int64_t threads) {
  /* Sums and panels of a tile fit an L2 cache. Rows of a that are dense are copied when they are used. */
  const int dense = p->a_stride[2] == 1;
  p->tile_rows = even_tile(p->rows, dense ? 512 : 192, CAMOX_BDH_PRODUCT_ROWS);
  p->tile_columns = even_tile(p->columns, dense ? 192 : 768, CAMOX_BDH_PRODUCT_COLUMNS);
  int64_t units = camox_bdh_product_plan_of(p).units;
  while (units % threads != 0 && units < 8 * threads) {
    if (p->tile_columns >= p->tile_rows && p->tile_columns > CAMOX_BDH_PRODUCT_COLUMNS)
      p->tile_columns = even_tile(p->tile_columns, p->tile_columns / 2, CAMOX_BDH_PRODUCT_COLUMNS);
    else if (p->tile_rows > 4 * CAMOX_BDH_PRODUCT_ROWS)
      p->tile_rows = even_tile(p->tile_rows, p->tile_rows / 2, CAMOX_BDH_PRODUCT_ROWS);
    else
      break;
    units = camox_bdh_product_plan_of(p).units;
  }
  p->slots = camox_min_i64(units, threads);
}

int64_t camox_bdh_scratch(const camox_bdh_params *p, int backward) { return camox_bdh_plan_of(p, backward).total; }

CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_forward, camox_bdh_forward_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_backward, camox_bdh_backward_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_sum, camox_bdh_sum_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_step_fn, camox_bdh_step, camox_bdh_step_kernel)
#if defined(CAMOX_HAVE_X86)
extern camox_bdh_kernel camox_bdh_backward_pairs_kernel_bf16_avx512;
extern camox_bdh_product_fn camox_bdh_product_kernel_bf16_avx512;
#endif

camox_bdh_kernel *camox_bdh_backward_pairs(void) {
#if defined(CAMOX_HAVE_X86)
  return camox_bdh_backward_pairs_kernel_bf16_avx512;
#else
  return NULL;
#endif
}
camox_bdh_product_fn *camox_bdh_product(void) {
#if defined(CAMOX_HAVE_X86)
  return camox_bdh_product_kernel_bf16_avx512;
#else
  return NULL;
#endif
}
#endif
