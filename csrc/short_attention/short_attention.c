/* Checks and the table of variants. */
#include "short_attention.h"

#include <math.h>

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "short_attention_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_short_attention_kernel, camox_short_attention_forward, camox_short_attention_forward_kernel)
CAMOX_KERNEL_TABLE(camox_short_attention_kernel, camox_short_attention_backward, camox_short_attention_backward_kernel)
#endif

int camox_short_attention_check(const camox_short_attention_params *p, int backward) {
  static const char op[] = "short_attention";
  const int64_t size[4] = {p->sequences, p->length, p->heads, p->dim};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  CAMOX_REQUIRE(camox_check_sizes(op, "q", size, 4));
  if (p->length > CAMOX_SHORT_ATTENTION_MAX_LENGTH)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: q must have at most %d tokens in dimension 1, got %lld", op,
                      (int)CAMOX_SHORT_ATTENTION_MAX_LENGTH, (long long)p->length);
  if (!isfinite(p->scale)) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: scale must be finite, got %g", op, p->scale);
  CAMOX_REQUIRE(camox_check_probability(op, p->p));
  if (!backward) return camox_check_distinct_elements(op, "out", &p->out, size);
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_q", &p->grad_q, size));
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_k", &p->grad_k, size));
  return camox_check_distinct_elements(op, "grad_v", &p->grad_v, size);
}

int64_t camox_short_attention_work_items(const camox_short_attention_params *p) {
  if (p->length == 0 || p->dim == 0) return 0;
  return camox_ceil_div(p->sequences * p->heads, CAMOX_SHORT_ATTENTION_PROBLEMS);
}
