/* Plan, checks and the table of variants. */
#include "linear_attention.h"

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "causal_plan.h"

/* A call has about this many work items, of chunks between the shortest and the longest: a longer chunk rounds more, and on the
   CPU leaves the cache before the next head of the same positions is read; a shorter one has more partial sums in memory. On
   CUDA whole waves of blocks: the few blocks of another wave would take as long as a full one. */
#ifdef CAMOX_CUDA_PART
/* Two waves, which on an H200 take 2 to 4% less than one. A multiprocessor holds three blocks, or four of bfloat16 heads that are
   channels, forward. Of float32 it holds two or three, backward: six are whole waves of both. Of wider float32 heads, which are
   not for tensor cores, it holds four. */
static int64_t work_items(const camox_linear_attention_params *p) {
  const int four = p->dtype == CAMOX_BF16 && p->k.stride[2] == 1 && !p->backward;
  int64_t blocks = four ? 8 : 6;
  if (p->dtype == CAMOX_F32 && (p->key_dim > 32 || p->value_dim > 32)) blocks = 8;
  return blocks * p->multiprocessors;
}
#define CAMOX_LINEAR_ATTENTION_WORK_ITEMS(p) work_items(p)
#define CAMOX_LINEAR_ATTENTION_CHUNKS(items, sequences) ((items) > (sequences) ? (items) / (sequences) : 1)
#define CAMOX_LINEAR_ATTENTION_MIN_CHUNK 128
#define CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p) 4096
#else
#define CAMOX_LINEAR_ATTENTION_WORK_ITEMS(p) 64
#define CAMOX_LINEAR_ATTENTION_CHUNKS(items, sequences) camox_ceil_div(items, sequences)
#define CAMOX_LINEAR_ATTENTION_MIN_CHUNK 256
#define CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p) ((p)->key_dim > 32 ? 16 * (p)->key_dim : 640)
#endif

void camox_linear_attention_plan(camox_linear_attention_params *p) {
  p->chunk = CAMOX_LINEAR_ATTENTION_MIN_CHUNK, p->chunks = 1;
  int64_t sequences = p->batch * p->heads;
  if (sequences <= 0 || p->length <= 0) return;
  int64_t wanted = CAMOX_LINEAR_ATTENTION_CHUNKS(CAMOX_LINEAR_ATTENTION_WORK_ITEMS(p), sequences);
  int64_t chunk = camox_ceil_div(p->length, wanted);
  const int64_t longest = CAMOX_LINEAR_ATTENTION_MAX_CHUNK(p);
  if (chunk > longest) chunk = camox_ceil_div(p->length, camox_ceil_div(p->length, longest));
  if (chunk < CAMOX_LINEAR_ATTENTION_MIN_CHUNK) chunk = CAMOX_LINEAR_ATTENTION_MIN_CHUNK;
  p->chunk = camox_round_up(chunk, 64); /* full tiles of any kernel */
  p->chunks = camox_ceil_div(p->length, p->chunk);
}

/* What the kernels of either form and the step have in common. */
typedef struct {
  camox_dtype dtype;
  int feature_map, normalize;
  double eps;
  int64_t key_dim, value_dim;
} kind;

static int check_kind(const char *op, const kind *of) {
  CAMOX_REQUIRE(camox_check_dtype(op, (int)of->dtype));
  if (of->feature_map < 0 || of->feature_map > CAMOX_FEATURE_IDENTITY)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown feature map code %d", op, of->feature_map);
  if (of->normalize < 0 || of->normalize > CAMOX_NORMALIZE_NONE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown normalization code %d", op, of->normalize);
  CAMOX_REQUIRE(camox_check_eps(op, of->dtype, of->eps));
  if (of->key_dim < 1 || of->key_dim > CAMOX_LINEAR_ATTENTION_MAX_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: the head size of q and k must be from 1 to %d, got %lld", op,
                      CAMOX_LINEAR_ATTENTION_MAX_DIM, (long long)of->key_dim);
  if (of->value_dim < 1 || of->value_dim > CAMOX_LINEAR_ATTENTION_MAX_DIM)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: the head size of v must be from 1 to %d, got %lld", op,
                      CAMOX_LINEAR_ATTENTION_MAX_DIM, (long long)of->value_dim);
  return CAMOX_OK;
}

int camox_linear_attention_check(const camox_linear_attention_params *p, int backward) {
  static const char op[] = "linear_attention";
  const int64_t size[3] = {p->batch, p->heads, p->length};
  const kind of = {p->dtype, p->feature_map, p->normalize, p->eps, p->key_dim, p->value_dim};
  CAMOX_REQUIRE(check_kind(op, &of));
  CAMOX_REQUIRE(camox_check_sizes(op, "q", size, 3));
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

static int check_cu_seqlens(const camox_causal_params *p) {
  if (p->batch != 1 || p->sequences < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: cu_seqlens needs q of one batch element, got %lld",
                      (long long)p->batch);
#ifdef CAMOX_CUDA_PART
  if (p->sequences == 0 && p->length != 0) /* the kernels see the values */
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: cu_seqlens must end with the %lld positions of q",
                      (long long)p->length);
#else
  const int32_t *cu = p->cu_seqlens;
  if (cu[0] != 0) return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: cu_seqlens[0] must be 0, got %d", (int)cu[0]);
  for (int64_t s = 0; s < p->sequences; ++s)
    if (cu[s + 1] < cu[s])
      return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: cu_seqlens must not fall, got %d after %d at index %lld",
                        (int)cu[s + 1], (int)cu[s], (long long)(s + 1));
  if (cu[p->sequences] != p->length)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: cu_seqlens must end with the %lld positions of q, got %d",
                      (long long)p->length, (int)cu[p->sequences]);
#endif
  return CAMOX_OK;
}

static int has_scratch(const camox_causal_params *p, int backward) {
#ifdef CAMOX_CUDA_PART
  return p->records && (p->bounds || !p->cu_seqlens) && (p->rows || !backward || p->normalize == CAMOX_NORMALIZE_NONE);
#else
  return p->rows || !backward || p->normalize != CAMOX_NORMALIZE_SUM;
#endif
}

int camox_causal_check(const camox_causal_params *p, int backward) {
  static const char op[] = "linear_attention";
  const int64_t size[3] = {p->batch, p->heads, p->length};
  const kind of = {p->dtype, p->feature_map, p->normalize, p->eps, p->key_dim, p->value_dim};
  CAMOX_REQUIRE(check_kind(op, &of));
  CAMOX_REQUIRE(camox_check_sizes(op, "q", size, 3));
  if (p->cu_seqlens) CAMOX_REQUIRE(check_cu_seqlens(p));
  if (!p->cu_seqlens && p->sequences != p->batch)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: %lld states beside %lld batch elements",
                      (long long)p->sequences, (long long)p->batch);
  const int sum = p->normalize == CAMOX_NORMALIZE_SUM;
  if (!sum && (p->initial_z || p->grad_z))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: z belongs to the normalization 'sum' only");
  if (p->sequences == 0 || p->heads == 0) return CAMOX_OK;
  if (backward ? !p->sum_s || (sum && !p->sum_z) : !p->s || (sum && !p->z))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the state is missing");
  if (p->length == 0) return CAMOX_OK;
  if (!has_scratch(p, backward)) return camox_fail(CAMOX_INVALID_ARGUMENT, "linear_attention: the scratch is missing");
  const int64_t keys[4] = {p->batch, p->heads, p->length, p->key_dim};
  const int64_t values[4] = {p->batch, p->heads, p->length, p->value_dim};
  if (!backward) return camox_check_distinct_elements(op, "out", &p->out, values);
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_q", &p->grad_q, keys));
  CAMOX_REQUIRE(camox_check_distinct_elements(op, "grad_k", &p->grad_k, keys));
  return camox_check_distinct_elements(op, "grad_v", &p->grad_v, values);
}

typedef struct {
  const char *name;
  const void *begin;
  int64_t bytes;
} memory_range;

static int share_memory(const memory_range *a, const memory_range *b) {
  const uintptr_t at_a = (uintptr_t)a->begin, at_b = (uintptr_t)b->begin;
  return a->bytes && b->bytes && at_a < at_b + (uintptr_t)b->bytes && at_b < at_a + (uintptr_t)a->bytes;
}

/* S and z are written while q, k and v are read. */
static int check_step_memory(const char *op, const camox_causal_step_params *p) {
  const int64_t real = p->dtype == CAMOX_F64 ? 8 : 4, size = p->dtype == CAMOX_F32 || p->dtype == CAMOX_F64 ? real : 2;
  const int64_t heads = p->batch * p->heads;
  const memory_range state[] = {
      {"S", p->s, heads * p->key_dim * p->value_dim * real},
      {"z", p->z, p->z ? heads * p->key_dim * real : 0},
  };
  const memory_range read[] = {
      {"z", state[1].begin, state[1].bytes},
      {"q", p->q, heads * p->key_dim * size},
      {"k", p->k, heads * p->key_dim * size},
      {"v", p->v, heads * p->value_dim * size},
  };
  for (int i = 0; i < 2; ++i)
    for (int j = i; j < 4; ++j)
      if (share_memory(&state[i], &read[j]))
        return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: state's %s is written: it must not share memory with %s", op,
                          state[i].name, read[j].name);
  return CAMOX_OK;
}

int camox_causal_step_check(const camox_causal_step_params *p) {
  static const char op[] = "linear_attention_step";
  const int64_t size[2] = {p->batch, p->heads};
  const kind of = {p->dtype, p->feature_map, p->normalize, p->eps, p->key_dim, p->value_dim};
  CAMOX_REQUIRE(check_kind(op, &of));
  CAMOX_REQUIRE(camox_check_sizes(op, "q", size, 2));
  if (p->batch && p->heads && (!p->s || (p->normalize == CAMOX_NORMALIZE_SUM) != (p->z != NULL)))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: the state needs S, and z with the normalization 'sum' only", op);
  return check_step_memory(op, p);
}

#ifndef CAMOX_CUDA_PART
int64_t camox_causal_scratch(const camox_causal_params *p) {
  int64_t begin[CAUSAL_BUFFERS];
  const int64_t reals = camox_causal_plan(p->key_dim, p->value_dim, begin);
  return reals * (int64_t)(p->dtype == CAMOX_F64 ? sizeof(double) : sizeof(float));
}

CAMOX_KERNEL_TABLE(camox_causal_kernel, camox_causal_forward, camox_causal_forward_kernel)
CAMOX_KERNEL_TABLE(camox_causal_kernel, camox_causal_backward, camox_causal_backward_kernel)
CAMOX_KERNEL_TABLE(camox_causal_step_fn, camox_causal_step, camox_causal_step_kernel)

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
