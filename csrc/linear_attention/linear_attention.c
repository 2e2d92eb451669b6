/* Plan, checks and the table of variants. */
#include "linear_attention.h"

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"

/* A call has about this many work items, of chunks between the shortest and the longest: a longer chunk rounds more, and on the
   CPU leaves the cache before the next head of the same positions is read; a shorter one has more partial sums in memory. */
#ifdef CAMOX_CUDA_PART
#define CAMOX_LINEAR_ATTENTION_WORK_ITEMS 1024
#define CAMOX_LINEAR_ATTENTION_MIN_CHUNK 128
#define CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p) 4096
#else
#define CAMOX_LINEAR_ATTENTION_WORK_ITEMS 64
#define CAMOX_LINEAR_ATTENTION_MIN_CHUNK 256
#define CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p) ((p)->key_dim > 32 ? 16 * (p)->key_dim : 640)
#endif

void camox_linear_attention_plan(camox_linear_attention_params *p) {
  p->chunk = CAMOX_LINEAR_ATTENTION_MIN_CHUNK, p->chunks = 1;
  int64_t sequences = p->batch * p->heads;
  if (sequences <= 0 || p->length <= 0) return;
  int64_t wanted = camox_ceil_div(CAMOX_LINEAR_ATTENTION_WORK_ITEMS, sequences);
  int64_t chunk = camox_ceil_div(p->length, wanted);
  const int64_t longest = CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p);
  if (chunk > longest) chunk = camox_ceil_div(p->length, camox_ceil_div(p->length, longest));
  if (chunk < CAMOX_LINEAR_ATTENTION_MIN_CHUNK) chunk = CAMOX_LINEAR_ATTENTION_MIN_CHUNK;
  p->chunk = camox_round_up(chunk, 64); /* full tiles of any kernel */
  p->chunks = camox_ceil_div(p->length, p->chunk);
}

int camox_linear_attention_check(const camox_linear_attention_params *p, int backward) {
  static const char op[] = "linear_attention";
  const int64_t size[3] = {p->batch, p->heads, p->length};
  CAMOX_REQUIRE(camox_check_dtype(op, (int)p->dtype));
  if (p->feature_map < 0 || p->feature_map > CAMOX_FEATURE_IDENTITY)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: unknown feature map code %d", p->feature_map);
  if (p->normalize < 0 || p->normalize > CAMOX_NORMALIZE_NONE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: unknown normalization code %d", p->normalize);
  CAMOX_REQUIRE(camox_check_eps(op, p->dtype, p->eps));
  CAMOX_REQUIRE(camox_check_sizes(op, "q", size, 3));
  if (p->key_dim < 1 || p->key_dim > CAMOX_LINEAR_ATTENTION_MAX_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the head size of q and k must be from 1 to %d, got %lld",
                      CAMOX_LINEAR_ATTENTION_MAX_DIM, (long long)p->key_dim);
  if (p->value_dim < 1 || p->value_dim > CAMOX_LINEAR_ATTENTION_MAX_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the head size of v must be from 1 to %d, got %lld",
                      CAMOX_LINEAR_ATTENTION_MAX_DIM, (long long)p->value_dim);
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
  if (!backward) return camox_check_distinct_elements(op, "out", &p->out, values);
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_q", &p->grad_q, keys));
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_k", &p->grad_k, keys));
  return camox_check_distinct_elements(op, "grad_v", &p->grad_v, values);
}

int64_t camox_linear_attention_work_items(const camox_linear_attention_params *p, camox_attention_step step) {
  int64_t sequences = p->batch * p->heads;
  if (step == CAMOX_ATTENTION_STATE) return sequences;
  return sequences * camox_ceil_div(p->length, p->chunk);
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

static const char *const forward_names[CAMOX_ATTENTION_STEPS] = {
    "camox_linear_attention_partial_kernel", "camox_linear_attention_state_kernel", "camox_linear_attention_apply_kernel"};
static const char *const backward_names[CAMOX_ATTENTION_STEPS] = {"camox_linear_attention_backward_partial_kernel",
                                                                  "camox_linear_attention_backward_state_kernel",
                                                                  "camox_linear_attention_backward_apply_kernel"};

camox_linear_attention_kernel *camox_linear_attention_forward(camox_attention_step step, camox_dtype dtype, camox_isa isa) {
  CAMOX_NOTE_KERNEL(forward_names[step], dtype, isa)
  return forward_kernels[step][dtype][isa];
}
camox_linear_attention_kernel *camox_linear_attention_backward(camox_attention_step step, camox_dtype dtype, camox_isa isa) {
  CAMOX_NOTE_KERNEL(backward_names[step], dtype, isa)
  return backward_kernels[step][dtype][isa];
}
#endif
