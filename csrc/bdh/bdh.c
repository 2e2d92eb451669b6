/* Checks, sizes and the table of variants. */
#include "bdh.h"

#include <math.h>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "bdh_plan.h"

/* What the attention and its step have in common. */
typedef struct {
  camox_dtype dtype;
  int64_t batch, heads, value_heads, length, dim, value_dim, table_columns;
  double scale;
} bdh_sizes;

static int check_sizes(const char *op, const bdh_sizes *s) {
  CAMOX_REQUIRE(camox_check_dtype(op, (int)s->dtype));
  if (s->batch < 0 || s->heads < 0 || s->value_heads < 0 || s->length < 0 || s->dim < 0 || s->value_dim < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: q or v has a negative size", op);
  if (s->dim == 0 || s->dim % 2 != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: the last dimension of q must be even and > 0, got %lld", op,
                      (long long)s->dim);
  if (s->value_heads != 1 && s->value_heads != s->heads)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: v must have 1 or %lld heads, got %lld", op, (long long)s->heads,
                      (long long)s->value_heads);
  if (s->table_columns != s->dim / 2 && s->table_columns != s->dim)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: cos and sin must have %lld or %lld columns, got %lld", op,
                      (long long)(s->dim / 2), (long long)s->dim, (long long)s->table_columns);
  if (!(s->scale > 0) || !isfinite(s->scale))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: scale must be > 0 and finite, got %g", op, s->scale);
  return CAMOX_OK;
}

/* Whether elements of a tensor of this shape share memory. */
static int overlaps(const camox_view4 *view, int64_t batch, int64_t heads, int64_t length, int64_t dim) {
  const int64_t size[4] = {batch, heads, length, dim};
  return camox_shares_elements(view, size);
}

int camox_bdh_check(const camox_bdh_params *p, int backward) {
  const bdh_sizes sizes = {p->dtype, p->batch,     p->heads,         p->value_heads, p->length,
                           p->dim,   p->value_dim, p->table_columns, p->scale};
  CAMOX_REQUIRE(check_sizes("bdh_attention", &sizes));
  if (p->table_length < p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: cos and sin have %lld rows, fewer than the %lld positions of q",
                      (long long)p->table_length, (long long)p->length);
  if ((int)p->form < 0 || p->form > CAMOX_BDH_STATE || (p->form == CAMOX_BDH_STATE && p->softmax))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: form must be 0, 1 or, without softmax, 2, got %d", (int)p->form);
  const int shared = backward ? overlaps(&p->grad_q, p->batch, p->heads, p->length, p->dim) ||
                                    overlaps(&p->grad_v, p->batch, p->value_heads, p->length, p->value_dim)
                              : overlaps(&p->out, p->batch, p->heads, p->length, p->value_dim);
  if (shared) return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention: elements of the output share memory");
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
  const bdh_sizes sizes = {p->dtype, p->batch, p->heads, p->value_heads, 1, p->dim, p->value_dim, p->table_columns, p->scale};
  CAMOX_REQUIRE(check_sizes("bdh_attention_step", &sizes));
  if (overlaps(&p->out, p->batch, p->heads, 1, p->value_dim))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "bdh_attention_step: elements of the output share memory");
  return CAMOX_OK;
}

int64_t camox_bdh_work_items(const camox_bdh_params *p) { return p->length == 0 ? 0 : p->batch * p->heads; }
int64_t camox_bdh_sum_work_items(const camox_bdh_params *p) { return p->batch * p->length; }
int64_t camox_bdh_step_work_items(const camox_bdh_step_params *p) { return p->batch * p->heads; }

#ifndef CAMOX_CUDA_PART
int64_t camox_bdh_scratch(const camox_bdh_params *p, int backward) { return camox_bdh_plan_of(p, backward).total; }

CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_forward, camox_bdh_forward_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_backward, camox_bdh_backward_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_kernel, camox_bdh_sum, camox_bdh_sum_kernel)
CAMOX_KERNEL_TABLE(camox_bdh_step_fn, camox_bdh_step, camox_bdh_step_kernel)
#if defined(CAMOX_HAVE_X86)
extern camox_bdh_kernel camox_bdh_backward_kernel_bf16_avx512_bf16;
#endif

void camox_bdh_note(const camox_bdh_params *p, int backward) {
  const char *form = camox_bdh_state_form(p) ? "state" : "quadratic";
  const long long n = p->dim, d = p->value_dim, by_scores = p->length * (n + (p->causal ? 1 : 2) * d);
  if (p->softmax)
    camox_note("why %s form: softmax has no other", form);
  else if (p->form != CAMOX_BDH_BY_COST)
    camox_note("why %s form: asked for", form);
  else
    camox_note("why %s form: T(N+%sD) = %lld %s 4ND = %lld", form, p->causal ? "" : "2", by_scores,
               camox_bdh_crossover(p) ? ">" : "<=", 4 * n * d);
  if (!backward || p->dtype != CAMOX_BF16) return;
  if (!p->avx512_bf16) {
    camox_note("why not avx512_bf16: this CPU or instruction set has no dot product of bfloat16");
    return;
  }
  camox_note("kernel camox_bdh_backward_kernel_bf16_avx512_bf16");
  const camox_bdh_plan plan = camox_bdh_plan_of(p, backward);
  if (!camox_bdh_uses_avx512_bf16(p, &plan, backward))
    camox_note("why float32 products within: %s",
               camox_bdh_state_form(p) ? "the state form has no others" : "T is too long to keep all scores in bfloat16");
}

camox_bdh_kernel *camox_bdh_backward_avx512_bf16(void) {
#if defined(CAMOX_HAVE_X86)
  return camox_bdh_backward_kernel_bf16_avx512_bf16;
#else
  return NULL;
#endif
}
#endif
