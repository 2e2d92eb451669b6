/* linear_attention against a plain double loop: every kernel of this machine, feature maps, normalizations, masks, states,
 * layouts and sizes around vectors, blocks and tiles. */
#include "../../csrc/linear_attention/linear_attention.h"
#include "camox_test.h"

/* The layouts of camox_test.h, and positions side by side as in the output of a convolution. */
enum { POSITIONS_INNERMOST = TEST_LAYOUTS, LAYOUTS };

static test_image heads(camox_dtype dtype, int layout, const int64_t size[4], int filled) {
  if (filled && layout < TEST_LAYOUTS) return test_input(dtype, (test_layout)layout, size);
  const int64_t h = size[1], t = size[2], d = size[3];
  const int64_t innermost[4] = {3 * h * t * d, t * d, 1, t}, dense[4] = {h * t * d, t * d, d, 1};
  test_image p = test_allocate(dtype, size, layout == POSITIONS_INNERMOST ? innermost : dense);
  if (filled) TEST_EACH(&p, b, i, y, x) test_set(dtype, p.view.data, test_offset(&p, b, i, y, x), test_random(8));
  return p;
}

static double map(double x, int feature_map) {
  return feature_map == CAMOX_FEATURE_IDENTITY ? x : feature_map == CAMOX_FEATURE_RELU ? fmax(x, 0) : x > 0 ? x + 1 : exp(x);
}

static double derivative(double x, int feature_map) {
  return feature_map == CAMOX_FEATURE_IDENTITY ? 1 : feature_map == CAMOX_FEATURE_RELU ? x > 0 : x > 0 ? 1 : exp(x);
}

/* What the loops compute, without gaps; the gradients are added up by the formulas of the whole function's derivative. */
typedef struct {
  double *s, *z, *out, *grad_q, *grad_k, *grad_v, *sum_s, *sum_z;
} truth;

#define MOST 80

/* f(row) and its weight: 1 / sum with "feature", 0 where that is 0, else 1 */
static double features(const test_image *x, int64_t b, int64_t h, int64_t t, const camox_linear_attention_params *p,
                       double f[MOST]) {
  double sum = 0;
  for (int64_t n = 0; n < p->key_dim; ++n) sum += f[n] = map(test_at(x, b, h, t, n), p->feature_map);
  return p->normalize != CAMOX_NORMALIZE_FEATURE ? 1 : sum == 0 ? 0 : 1 / sum;
}

/* The gradient to row t of x from that to its weighted features. */
static void features_back(const test_image *x, int64_t b, int64_t h, int64_t t, const camox_linear_attention_params *p,
                          const double *f, double weight, const double *grad, double *to) {
  double inner = 0;
  for (int64_t n = 0; n < p->key_dim; ++n) inner += weight * f[n] * grad[n];
  if (p->normalize != CAMOX_NORMALIZE_FEATURE) inner = 0;
  for (int64_t n = 0; n < p->key_dim; ++n)
    to[n] = derivative(test_at(x, b, h, t, n), p->feature_map) * weight * (grad[n] - inner);
}

static int counts(const camox_linear_attention_params *p, int64_t b, int64_t t) {
  return !p->key_mask || !p->key_mask[b * p->mask_stride[0] + t * p->mask_stride[1]];
}

static void naive(const camox_linear_attention_params *p, const test_image *q, const test_image *k, const test_image *v,
                  const test_image *grad, truth r) {
  const int64_t N = p->key_dim, D = p->value_dim, T = p->length;
  const int sum = p->normalize == CAMOX_NORMALIZE_SUM;
  double f[MOST], part[MOST];
  for (int64_t i = 0; i < p->batch * p->heads; ++i) {
    const int64_t b = i / p->heads, h = i % p->heads;
    double *s = r.s + i * N * D, *z = r.z + i * N, *sum_s = r.sum_s + i * N * D, *sum_z = r.sum_z + i * N;
    for (int64_t j = 0; j < N * D; ++j) {
      s[j] = p->initial_s ? test_get(p->dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, p->initial_s, i * N * D + j) : 0;
      sum_s[j] = p->grad_s ? test_get(p->dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, p->grad_s, i * N * D + j) : 0;
    }
    for (int64_t n = 0; n < N; ++n) z[n] = sum_z[n] = 0;
    for (int64_t t = 0; t < T; ++t) {
      double weight = features(k, b, h, t, p, f);
      for (int64_t n = 0; counts(p, b, t) && n < N; ++n) {
        z[n] += weight * f[n];
        for (int64_t d = 0; d < D; ++d) s[n * D + d] += weight * f[n] * test_at(v, b, h, t, d);
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      double weight = features(q, b, h, t, p, f), below = p->eps, product = 0;
      for (int64_t n = 0; n < N; ++n) below += f[n] * z[n];
      if (!sum) below = 1;
      for (int64_t d = 0; d < D; ++d) {
        double above = 0, g = test_at(grad, b, h, t, d) / below;
        for (int64_t n = 0; n < N; ++n) above += weight * f[n] * s[n * D + d], sum_s[n * D + d] += weight * f[n] * g;
        r.out[(i * T + t) * D + d] = above / below;
        product += g * above / below;
      }
      for (int64_t n = 0; n < N; ++n) {
        part[n] = sum ? -product * z[n] : 0;
        for (int64_t d = 0; d < D; ++d) part[n] += s[n * D + d] * test_at(grad, b, h, t, d) / below;
        if (sum) sum_z[n] -= product * f[n];
      }
      features_back(q, b, h, t, p, f, weight, part, r.grad_q + (i * T + t) * N);
    }
    for (int64_t t = 0; t < T; ++t) {
      double weight = features(k, b, h, t, p, f) * counts(p, b, t);
      for (int64_t n = 0; n < N; ++n) {
        part[n] = sum ? sum_z[n] : 0;
        for (int64_t d = 0; d < D; ++d) {
          part[n] += sum_s[n * D + d] * test_at(v, b, h, t, d);
          r.grad_v[(i * T + t) * D + d] += weight * f[n] * sum_s[n * D + d];
        }
      }
      features_back(k, b, h, t, p, f, weight, part, r.grad_k + (i * T + t) * N);
    }
  }
}

typedef struct {
  int feature_map, normalize, masked, stateful;
} options;

static void run(camox_linear_attention_kernel *kernel, const camox_linear_attention_params *p, int64_t items, int pieces) {
  for (int piece = 0; piece < pieces; ++piece) kernel(p, items * piece / pieces, items * (piece + 1) / pieces);
}

/* size: B, H, T, N, D */
static void test_case(camox_isa isa, camox_dtype dtype, int layout, const int64_t size[5], options o) {
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  const int sum = o.normalize == CAMOX_NORMALIZE_SUM;
  camox_linear_attention_params p = {.dtype = dtype, .feature_map = o.feature_map, .normalize = o.normalize, .eps = 0.5};
  p.batch = size[0], p.heads = size[1], p.length = size[2], p.key_dim = size[3], p.value_dim = size[4];
  const int64_t keys[4] = {size[0], size[1], size[2], size[3]}, values[4] = {size[0], size[1], size[2], size[4]};
  const int64_t state[4] = {size[0], size[1], size[3], size[4]}, row[4] = {size[0], size[1], 1, size[3]};
  test_image q = heads(dtype, layout, keys, 1), k = heads(dtype, layout, keys, 1), v = heads(dtype, layout, values, 1);
  test_image grad = heads(dtype, layout, values, 1), out = heads(dtype, layout, values, 0);
  test_image grad_q = heads(dtype, layout, keys, 0), grad_k = heads(dtype, layout, keys, 0);
  test_image grad_v = heads(dtype, layout, values, 0);
  test_image initial = heads(real, TEST_CONTIGUOUS, state, 1), grad_s = heads(real, TEST_CONTIGUOUS, state, 1);
  test_image s = heads(real, TEST_CONTIGUOUS, state, 0), z = heads(real, TEST_CONTIGUOUS, row, 0);
  test_image sum_s = heads(real, TEST_CONTIGUOUS, state, 0), sum_z = heads(real, TEST_CONTIGUOUS, row, 0);
  uint8_t *mask = malloc((size_t)(size[0] * size[2]) + 1);
  camox_linear_attention_plan(&p);
  const int64_t parts[4] = {1, size[0] * size[1], p.chunks, size[3] * (size[4] + 1)};
  test_image partial = heads(real, TEST_CONTIGUOUS, parts, 0);
  if (mask == NULL) abort();
  p.scratch = test_scratch(CAMOX_LINEAR_ATTENTION_SCRATCH);
  for (int64_t i = 0; i < size[0] * size[2]; ++i) mask[i] = i % 3 == 1 ? 1 + (uint8_t)(i % 5) : 0;
  p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view, p.grad = grad.view;
  p.grad_q = grad_q.view, p.grad_k = grad_k.view, p.grad_v = grad_v.view;
  p.s = s.view.data, p.sum_s = sum_s.view.data, p.partial = partial.view.data;
  if (sum) p.z = z.view.data, p.sum_z = sum_z.view.data;
  if (o.stateful) p.initial_s = initial.view.data, p.grad_s = grad_s.view.data;
  if (o.masked) p.key_mask = mask, p.mask_stride[0] = size[2], p.mask_stride[1] = 1;
  char what[200];
  snprintf(what, sizeof what, "%s %s layout %d (%d,%d,%d,%d,%d) map %d normalize %d masked %d stateful %d", camox_isa_name(isa),
           test_dtype_names[dtype], layout, (int)size[0], (int)size[1], (int)size[2], (int)size[3], (int)size[4], o.feature_map,
           o.normalize, o.masked, o.stateful);
  truth r = {test_values(&s, 1),      test_values(&z, 1),      test_values(&out, 1),   test_values(&grad_q, 1),
             test_values(&grad_k, 1), test_values(&grad_v, 1), test_values(&sum_s, 1), test_values(&sum_z, 1)};
  naive(&p, &q, &k, &v, &grad, r);
  for (int backward = 0; backward < 2; ++backward) {
    TEST(camox_linear_attention_check(&p, backward) == CAMOX_OK, "%s: %s", what, camox_last_error());
    for (int step = 0; step < CAMOX_ATTENTION_STEPS; ++step) {
      camox_attention_step which = (camox_attention_step)step;
      run(backward ? camox_linear_attention_backward(which, dtype, isa) : camox_linear_attention_forward(which, dtype, isa), &p,
          camox_linear_attention_work_items(&p, which), 1 + o.masked);
    }
  }
  const struct {
    test_image *ours;
    double *values;
    const char *name;
    int written;
  } found[] = {{&s, r.s, "s", 1},
               {&z, r.z, "z", sum},
               {&out, r.out, "out", 1},
               {&grad_q, r.grad_q, "grad_q", 1},
               {&grad_k, r.grad_k, "grad_k", 1},
               {&grad_v, r.grad_v, "grad_v", 1},
               {&sum_s, r.sum_s, "sum_s", 1},
               {&sum_z, r.sum_z, "sum_z", sum}};
  for (size_t i = 0; i < sizeof found / sizeof *found; ++i) {
    double error, allowed;
    if (found[i].written) /* gradients are differences of sums that are larger than they are */
      TEST(test_close_within(64, found[i].ours, found[i].values, &error, &allowed), "%s: %s off by %g, allowed %g", what,
           found[i].name, error, allowed);
    TEST(test_untouched(found[i].ours), "%s: %s written outside its elements", what, found[i].name);
    free(found[i].values);
  }
  test_image *const all[] = {&q,       &k,      &v, &grad, &out,   &grad_q, &grad_k, &grad_v,
                             &initial, &grad_s, &s, &z,    &sum_s, &sum_z,  &partial};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
  free(mask), free(p.scratch);
}

static void refused(const camox_linear_attention_params *p, int backward, const char *message) {
  int status = camox_linear_attention_check(p, backward);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  float elements[64];
  const camox_view4 view = {elements, {24, 12, 4, 1}};
  camox_linear_attention_params good = {.eps = 1, .batch = 1, .heads = 2, .length = 3, .key_dim = 4, .value_dim = 4};
  good.q = good.k = good.v = good.out = good.grad = good.grad_q = good.grad_k = good.grad_v = view;
  good.s = good.z = good.sum_s = good.sum_z = good.partial = elements;
  camox_linear_attention_plan(&good);
  for (int backward = 0; backward < 2; ++backward)
    TEST(camox_linear_attention_check(&good, backward) == CAMOX_OK, "%s", camox_last_error());
  camox_linear_attention_params p = good;
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, 0, "dtype code"), p = good;
  p.feature_map = 3, refused(&p, 0, "feature map code 3"), p = good;
  p.normalize = -1, refused(&p, 0, "normalization code -1"), p = good;
  p.eps = 0, refused(&p, 0, "eps must be > 0 and finite, got 0"), p.eps = NAN, refused(&p, 0, "eps"), p = good;
  p.heads = -1, refused(&p, 0, "negative size"), p = good;
  p.key_dim = 257, refused(&p, 0, "q and k must be from 1 to 256, got 257"), p = good;
  p.value_dim = 0, refused(&p, 0, "v must be from 1 to 256, got 0"), p = good;
  p.chunks = 0, refused(&p, 0, "0 chunks"), p.chunks = 1, p.chunk = 2, refused(&p, 0, "do not hold 3"), p = good;
  p.normalize = CAMOX_NORMALIZE_NONE, p.initial_z = elements, refused(&p, 0, "z belongs to"), p = good;
  p.partial = NULL, refused(&p, 0, "scratch is missing"), p = good;
  p.z = NULL, refused(&p, 0, "state"), p = good;
  p.sum_z = NULL, refused(&p, 1, "state"), p = good;
  p.out.stride[1] = 0, refused(&p, 0, "elements of out share memory"), p = good;
  p.grad_q.stride[2] = 0, refused(&p, 1, "elements of grad_q share memory"), p = good;
  p.grad_k.stride[3] = 0, refused(&p, 1, "elements of grad_k share memory"), p = good;
  p.grad_v.stride[1] = 0, refused(&p, 1, "elements of grad_v share memory");
}

/* Chunks hold every position, and there are no more of them than are needed. */
static void test_plan(void) {
  for (int64_t length = 0; length < 20000; length += 1 + length / 3)
    for (int64_t sequences = 1; sequences <= 4096; sequences *= 4) {
      camox_linear_attention_params p = {.batch = sequences, .heads = 1, .length = length};
      camox_linear_attention_plan(&p);
      TEST(p.chunk * p.chunks >= length && p.chunk * (p.chunks - 1) <= length && p.chunks >= 1 && p.chunk % 64 == 0,
           "length %d: %d chunks of %d", (int)length, (int)p.chunks, (int)p.chunk);
    }
}

int main(void) {
  static const int64_t sizes[][5] = {{2, 2, 5, 3, 2},    {1, 2, 33, 6, 7},  {2, 1, 70, 17, 16}, {1, 1, 65, 5, 40},
                                     {1, 1, 130, 73, 9}, {1, 1, 300, 6, 5}, {1, 2, 37, 32, 16}, {1, 1, 130, 16, 64},
                                     {0, 2, 4, 3, 3},    {2, 2, 0, 3, 3}};
  test_checks_refuse();
  test_plan();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("linear_attention: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < LAYOUTS; ++layout)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
          for (int mode = 0; mode < 9; ++mode) {
            /* sums of identity features come near 0 */
            if (mode % 3 == CAMOX_FEATURE_IDENTITY && mode / 3 != CAMOX_NORMALIZE_NONE) continue;
            int both = (int)(i + (size_t)mode) % 2;
            test_case((camox_isa)isa, (camox_dtype)dtype, layout, sizes[i], (options){mode % 3, mode / 3, both, both});
          }
  }
  return test_report("linear_attention");
}
