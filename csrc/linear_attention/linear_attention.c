/* Plan, checks and the table of variants. */
#include "linear_attention.h"

#include <math.h>

#include "../common/kernel_table.h"
#include "../common/status.h"

/* Chunks are cut until there are this many units, between the shortest and the longest chunk: a longer one rounds more, and on
   the CPU leaves the cache before the next head of the same positions is read; a shorter one has more partial sums to keep. */
#ifdef CAMOX_CUDA_PART
#define CAMOX_LINEAR_ATTENTION_UNITS 1024
#define CAMOX_LINEAR_ATTENTION_SHORTEST 128
#define CAMOX_LINEAR_ATTENTION_LONGEST(p) 4096
#else
#define CAMOX_LINEAR_ATTENTION_UNITS 64
#define CAMOX_LINEAR_ATTENTION_SHORTEST 256
#define CAMOX_LINEAR_ATTENTION_LONGEST(p) ((p)->key_dim > 32 ? 16 * (p)->key_dim : 640)
#endif

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void camox_linear_attention_plan(camox_linear_attention_params *p) {
  p->chunk = CAMOX_LINEAR_ATTENTION_SHORTEST, p->chunks = 1;
  int64_t sequences = p->batch * p->heads;
  if (sequences <= 0 || p->length <= 0) return;
  int64_t wanted = ceil_div(CAMOX_LINEAR_ATTENTION_UNITS, sequences);
  int64_t chunk = ceil_div(p->length, wanted);
  const int64_t longest = CAMOX_LINEAR_ATTENTION_LONGEST(p);
  if (chunk > longest) chunk = ceil_div(p->length, ceil_div(p->length, longest));
  if (chunk < CAMOX_LINEAR_ATTENTION_SHORTEST) chunk = CAMOX_LINEAR_ATTENTION_SHORTEST;
  p->chunk = ceil_div(chunk, 64) * 64; /* whole tiles of any kernel */
  p->chunks = ceil_div(p->length, p->chunk);
}

static int check_written(const camox_view4 *view, const int64_t size[4], const char *name) {
  for (int d = 0; d < 4; ++d)
    if (size[d] > 1 && view->stride[d] == 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: elements of %s share memory, their stride is 0", name);
  return CAMOX_OK;
}

int camox_linear_attention_check(const camox_linear_attention_params *p, int backward) {
  if ((int)p->dtype < 0 || p->dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: unknown dtype code %d", (int)p->dtype);
  if (p->feature_map < 0 || p->feature_map > CAMOX_FEATURE_IDENTITY)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: unknown feature map code %d", p->feature_map);
  if (p->normalize < 0 || p->normalize > CAMOX_NORMALIZE_NONE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: unknown normalization code %d", p->normalize);
  if (!(camox_as_computed(p->dtype, p->eps) > 0) || !isfinite(p->eps))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: eps must be > 0 and finite, got %g", p->eps);
  if (p->batch < 0 || p->heads < 0 || p->length < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: q has a negative size (%lld, %lld, %lld)", (long long)p->batch,
                      (long long)p->heads, (long long)p->length);
  if (p->key_dim < 1 || p->key_dim > CAMOX_LINEAR_ATTENTION_MOST_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the head size of q and k must be from 1 to %d, got %lld",
                      CAMOX_LINEAR_ATTENTION_MOST_DIM, (long long)p->key_dim);
  if (p->value_dim < 1 || p->value_dim > CAMOX_LINEAR_ATTENTION_MOST_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the head size of v must be from 1 to %d, got %lld",
                      CAMOX_LINEAR_ATTENTION_MOST_DIM, (long long)p->value_dim);
  if (p->chunk < 1 || p->chunks < 1 || p->chunk * p->chunks < p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: %lld chunks of %lld positions do not hold %lld",
                      (long long)p->chunks, (long long)p->chunk, (long long)p->length);
  const int sum = p->normalize == CAMOX_NORMALIZE_SUM, empty = p->batch == 0 || p->heads == 0;
  if (!sum && (p->initial_z || p->grad_z))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: z belongs to the normalization 'sum' only");
  if (!empty && (!p->s || !p->partial || (sum && !p->z) || (backward && (!p->sum_s || (sum && !p->sum_z)))))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the state or the scratch is missing");
  if (empty || p->length == 0) return CAMOX_OK;
  const int64_t keys[4] = {p->batch, p->heads, p->length, p->key_dim};
  const int64_t values[4] = {p->batch, p->heads, p->length, p->value_dim};
  if (!backward) return check_written(&p->out, values, "out");
  int status = check_written(&p->grad_q, keys, "grad_q");
  if (status == CAMOX_OK) status = check_written(&p->grad_k, keys, "grad_k");
  return status == CAMOX_OK ? check_written(&p->grad_v, values, "grad_v") : status;
}

int64_t camox_linear_attention_units(const camox_linear_attention_params *p, camox_attention_step step) {
  int64_t sequences = p->batch * p->heads;
  if (step == CAMOX_ATTENTION_STATE) return sequences;
  return sequences * ceil_div(p->length, p->chunk);
}

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_linear_attention_partial_kernel, camox_linear_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_linear_attention_state_kernel, camox_linear_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_linear_attention_apply_kernel, camox_linear_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_linear_attention_backward_partial_kernel, camox_linear_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_linear_attention_backward_state_kernel, camox_linear_attention_kernel)
CAMOX_DECLARE_KERNELS(camox_linear_attention_backward_apply_kernel, camox_linear_attention_kernel)

static camox_linear_attention_kernel *const forward_kernels[CAMOX_ATTENTION_STEPS][CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] = {
    CAMOX_KERNELS(camox_linear_attention_partial_kernel),
    CAMOX_KERNELS(camox_linear_attention_state_kernel),
    CAMOX_KERNELS(camox_linear_attention_apply_kernel),
};
static camox_linear_attention_kernel *const backward_kernels[CAMOX_ATTENTION_STEPS][CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] = {
    CAMOX_KERNELS(camox_linear_attention_backward_partial_kernel),
    CAMOX_KERNELS(camox_linear_attention_backward_state_kernel),
    CAMOX_KERNELS(camox_linear_attention_backward_apply_kernel),
};

camox_linear_attention_kernel *camox_linear_attention_forward(camox_attention_step step, camox_dtype dtype, camox_isa isa) {
  return forward_kernels[step][dtype][isa];
}
camox_linear_attention_kernel *camox_linear_attention_backward(camox_attention_step step, camox_dtype dtype, camox_isa isa) {
  return backward_kernels[step][dtype][isa];
}
#endif
