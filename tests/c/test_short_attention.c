/* short_attention against a plain double loop: every kernel of this machine, both ways, padding, causal, dropout, layouts. */
#include "../../csrc/short_attention/short_attention.h"
#include "../../csrc/common/philox.h"
#include "camox_test.h"

enum { MAX_LENGTH = 64 };

typedef double row_of_weights[MAX_LENGTH];

static double dot(const test_image *a, const test_image *b, int64_t s, int64_t i, int64_t j, int64_t h) {
  double sum = 0;
  for (int64_t d = 0; d < a->size[3]; ++d) sum += test_at(a, s, i, h, d) * test_at(b, s, j, h, d);
  return sum;
}

static double factor_of(const camox_short_attention_params *p, int64_t s, int64_t h, int64_t i, int64_t j) {
  if (!p->seed) return 1;
  const uint64_t element = (uint64_t)(((s * p->heads + h) * p->length + i) * p->length + j);
  const uint32_t threshold = camox_dropout_threshold(p->p);
  const camox_philox_words words = camox_philox_group((uint64_t)*p->seed, element / CAMOX_PHILOX_ELEMENTS);
  return camox_philox_bits(words, (int)(element % CAMOX_PHILOX_ELEMENTS)) < threshold ? 0 : camox_dropout_scale(threshold);
}

/* The weights of token i before dropout. */
static void weigh(const camox_short_attention_params *p, const test_image *q, const test_image *k, int64_t s, int64_t h,
                  int64_t i, double *weight) {
  double largest = -INFINITY, sum = 0;
  for (int64_t j = 0; j < p->length; ++j) {
    int counts = (!p->padding || !p->padding[s * p->padding_stride[0] + j * p->padding_stride[1]]) && (!p->causal || j <= i);
    weight[j] = counts ? p->scale * dot(q, k, s, i, j, h) : -INFINITY;
    largest = fmax(largest, weight[j]);
  }
  for (int64_t j = 0; j < p->length; ++j) sum += weight[j] = largest == -INFINITY ? 0 : exp(weight[j] - largest);
  for (int64_t j = 0; j < p->length; ++j) weight[j] = sum == 0 ? 0 : weight[j] / sum;
}

/* out, and the gradients of q, k and v, [S,T,H,D] */
static void naive(const camox_short_attention_params *p, const test_image *q, const test_image *k, const test_image *v,
                  const test_image *grad, double *const to[4]) {
  static row_of_weights weight[MAX_LENGTH];
  for (int64_t s = 0; s < p->sequences; ++s)
    for (int64_t h = 0; h < p->heads; ++h)
      for (int64_t i = 0; i < p->length; ++i) {
        double mean = 0, weight_grad[MAX_LENGTH];
        weigh(p, q, k, s, h, i, weight[i]);
        for (int64_t j = 0; j < p->length; ++j) {
          weight_grad[j] = weight[i][j] == 0 ? 0 : factor_of(p, s, h, i, j) * dot(grad, v, s, i, j, h);
          mean += weight[i][j] * weight_grad[j];
        }
        for (int64_t j = 0; j < p->length; ++j) {
          if (weight[i][j] == 0) continue;
          const double dropped = weight[i][j] * factor_of(p, s, h, i, j),
                       by = p->scale * weight[i][j] * (weight_grad[j] - mean);
          for (int64_t d = 0; d < p->dim; ++d) {
            const int64_t at_i = ((s * p->length + i) * p->heads + h) * p->dim + d;
            const int64_t at_j = ((s * p->length + j) * p->heads + h) * p->dim + d;
            to[0][at_i] += dropped * test_at(v, s, j, h, d);
            to[1][at_i] += by * test_at(k, s, j, h, d);
            to[2][at_j] += by * test_at(q, s, i, h, d);
            to[3][at_j] += dropped * test_at(grad, s, i, h, d);
          }
        }
      }
}

/* NaN in the keys or values that are padding. */
static void poison(const camox_short_attention_params *p, const test_image *x) {
  for (int64_t s = 0; s < p->sequences; ++s)
    for (int64_t t = 0; t < p->length; ++t)
      for (int64_t i = 0; p->padding[s * p->length + t] && i < p->heads * p->dim; ++i)
        test_set(x->dtype, x->view.data, test_offset(x, s, t, i / p->dim, i % p->dim), NAN);
}

static void run(camox_short_attention_kernel *kernel, const camox_short_attention_params *p, int pieces) {
  const int64_t items = camox_short_attention_work_items(p);
  for (int piece = 0; piece < pieces; ++piece) kernel(p, items * piece / pieces, items * (piece + 1) / pieces);
}

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], int padded, int causal,
                      int dropped) {
  static const int64_t seed = 0x0123456789abcdef;
  static const char *const names[4] = {"out", "grad_q", "grad_k", "grad_v"};
  uint8_t padding[MAX_LENGTH * 40];
  camox_short_attention_params p = {.dtype = dtype, .causal = causal, .p = 0.3};
  p.scale = size[3] > 16 ? 0.125 : 0.5;
  p.sequences = size[0], p.length = size[1], p.heads = size[2], p.dim = size[3];
  for (int64_t i = 0; i < size[0] * size[1]; ++i) padding[i] = i < size[1] || test_random(8) > 0.5;
  if (padded) p.padding = padding, p.padding_stride[0] = size[1], p.padding_stride[1] = 1;
  if (dropped) p.seed = &seed;
  p.scratch = test_scratch(CAMOX_SHORT_ATTENTION_SCRATCH);
  test_image in[4], to[4];
  double *truth[4], error, allowed;
  for (int i = 0; i < 4; ++i) {
    in[i] = test_input(dtype, layout, size);
    to[i] = test_output(dtype, layout == TEST_CHANNELS_LAST, layout == TEST_STRIDED, size);
    truth[i] = test_values(&to[i], 1);
  }
  if (padded && layout != TEST_EXPANDED) poison(&p, &in[1]), poison(&p, &in[2]);
  p.q = in[0].view, p.k = in[1].view, p.v = in[2].view, p.grad = in[3].view;
  p.out = to[0].view, p.grad_q = to[1].view, p.grad_k = to[2].view, p.grad_v = to[3].view;
  naive(&p, &in[0], &in[1], &in[2], &in[3], truth);
  char what[200];
  snprintf(what, sizeof what, "%s %s %s (%d,%d,%d,%d) padded %d causal %d dropped %d", camox_isa_name(isa),
           test_dtype_names[dtype], test_layout_names[layout], (int)size[0], (int)size[1], (int)size[2], (int)size[3], padded,
           causal, dropped);
  TEST(camox_short_attention_check(&p, 0) == CAMOX_OK && camox_short_attention_check(&p, 1) == CAMOX_OK, "%s: %s", what,
       camox_last_error());
  run(camox_short_attention_forward(dtype, isa), &p, 1 + causal);
  run(camox_short_attention_backward(dtype, isa), &p, 1 + causal);
  const double steps = dtype == CAMOX_F64 ? 16 : 8; /* the double loop rounds, too */
  for (int i = 0; i < 4; ++i) {
    TEST(test_close_within(steps, &to[i], truth[i], &error, &allowed), "%s: %s off by %g, allowed %g", what, names[i], error,
         allowed);
    TEST(test_untouched(&to[i]), "%s: %s written outside its elements", what, names[i]);
    free(truth[i]), test_free(&in[i]), test_free(&to[i]);
  }
  free(p.scratch);
}

static void refused(const camox_short_attention_params *p, int backward, const char *message) {
  int status = camox_short_attention_check(p, backward);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  const camox_view4 dense = {NULL, {24, 12, 4, 1}}, repeated = {NULL, {0, 12, 4, 1}};
  const camox_short_attention_params good = {.sequences = 2,
                                             .length = 2,
                                             .heads = 3,
                                             .dim = 4,
                                             .scale = 1,
                                             .out = dense,
                                             .grad_q = dense,
                                             .grad_k = dense,
                                             .grad_v = dense};
  camox_short_attention_params p = good;
  TEST(camox_short_attention_check(&p, 0) == CAMOX_OK && camox_short_attention_check(&p, 1) == CAMOX_OK, "%s",
       camox_last_error());
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, 0, "dtype code"), p = good;
  p.heads = -1, refused(&p, 0, "negative size"), p = good;
  p.length = 65, refused(&p, 1, "at most 64 tokens"), p = good;
  p.scale = INFINITY, refused(&p, 0, "scale must be finite, got inf"), p = good;
  p.p = 1, refused(&p, 0, "p must be in [0, 1), got 1"), p = good;
  p.p = NAN, refused(&p, 1, "p must be in [0, 1)"), p = good;
  p.out = repeated, refused(&p, 0, "elements of out share memory"), p = good;
  p.grad_k = repeated, refused(&p, 1, "elements of grad_k share memory");
}

int main(void) {
  /* around the lanes of items and of columns; the longest sequence that goes by lanes; both ways' blocks; pieces; empty;
     four heads whose rows are whole vectors */
  static const int64_t sizes[][4] = {{2, 6, 8, 12}, {37, 1, 1, 1}, {3, 2, 5, 5},   {1, 16, 3, 16}, {2, 16, 3, 17},
                                     {1, 19, 2, 6}, {2, 5, 1, 67}, {1, 64, 1, 3},  {0, 3, 2, 4},   {2, 3, 2, 0},
                                     {5, 7, 4, 4},  {5, 3, 8, 8},  {3, 2, 12, 16}, {4, 3, 5, 8}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("short_attention: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
          for (int flags = 0; flags < 8; ++flags)
            test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], flags & 1, flags >> 1 & 1,
                      flags >> 2 & 1);
  }
  return test_report("short_attention");
}
