/* Checks and the table of variants. */
#include "short_attention.h"

#include <math.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "short_attention_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_short_attention_forward_kernel, camox_short_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_short_attention_backward_kernel, camox_short_attention_kernel)

typedef camox_short_attention_kernel *camox_short_attention_table[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT];
static const camox_short_attention_table forward_kernels = CAMOX_KERNELS(camox_short_attention_forward_kernel);
static const camox_short_attention_table backward_kernels = CAMOX_KERNELS(camox_short_attention_backward_kernel);

camox_short_attention_kernel *camox_short_attention_forward(camox_dtype dtype, camox_isa isa) {
  return forward_kernels[dtype][isa];
}
camox_short_attention_kernel *camox_short_attention_backward(camox_dtype dtype, camox_isa isa) {
  return backward_kernels[dtype][isa];
}
#endif

static int check_written(const camox_short_attention_params *p, const camox_view4 *view, const char *name) {
  const int64_t size[4] = {p->sequences, p->length, p->heads, p->dim};
  for (int d = 0; d < 4; ++d)
    if (size[d] == 0) return CAMOX_OK;
  for (int d = 0; d < 4; ++d)
    if (size[d] > 1 && view->stride[d] == 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: elements of %s share memory, their stride is 0", name);
  return CAMOX_OK;
}

int camox_short_attention_check(const camox_short_attention_params *p, int backward) {
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: unknown dtype code %d", (int)p->dtype);
  if (p->sequences < 0 || p->length < 0 || p->heads < 0 || p->dim < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: q has a negative size (%lld, %lld, %lld, %lld)",
                      (long long)p->sequences, (long long)p->length, (long long)p->heads, (long long)p->dim);
  if (p->length > CAMOX_SHORT_ATTENTION_LONGEST)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: q must have at most %d tokens in dimension 1, got %lld",
                      (int)CAMOX_SHORT_ATTENTION_LONGEST, (long long)p->length);
  if (!isfinite(p->scale)) return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: scale must be finite, got %g", p->scale);
  if (!(p->p >= 0 && p->p < 1)) return camox_fail(CAMOX_INVALID_ARGUMENT, "short_attention: p must be in [0, 1), got %g", p->p);
  if (!backward) return check_written(p, &p->out, "out");
  int status = check_written(p, &p->grad_q, "grad_q");
  if (status == CAMOX_OK) status = check_written(p, &p->grad_k, "grad_k");
  return status == CAMOX_OK ? check_written(p, &p->grad_v, "grad_v") : status;
}

int64_t camox_short_attention_units(const camox_short_attention_params *p) {
  if (p->length == 0 || p->dim == 0) return 0;
  return (p->sequences * p->heads + CAMOX_SHORT_ATTENTION_ITEMS - 1) / CAMOX_SHORT_ATTENTION_ITEMS;
}
