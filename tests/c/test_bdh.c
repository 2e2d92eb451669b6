/* bdh_attention and its step against plain loops: every kernel of this machine, both forms, saved scores and not, layouts and
 * sizes around vectors and tiles. */
#include "../../csrc/bdh/bdh.h"
#include "camox_test.h"

typedef struct {
  int relu, causal, softmax, full_width, shared, save, grad_of_rotated;
  camox_bdh_form form;
  int avx512_bf16;
} options;

/* An operand of exactly its size: dense, random or the pattern. */
static test_image dense(camox_dtype dtype, int64_t rows, int64_t columns, int filled) {
  int64_t size[4] = {1, 1, rows, columns};
  return filled ? test_input(dtype, TEST_CONTIGUOUS, size) : test_output(dtype, 0, 0, size);
}

static double table_at(const camox_bdh_params *p, const void *table, int64_t t, int64_t n) {
  int64_t column = p->table_columns == p->dim ? n : n / 2;
  return test_get(p->dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, table, t * p->table_columns + column);
}

static double relu_of(const camox_bdh_params *p, double x) { return p->relu && x < 0 ? 0 : x; }

/* r [T,N] of a head */
static void naive_rotate(const camox_bdh_params *p, const test_image *q, int64_t b, int64_t h, double *r) {
  for (int64_t t = 0; t < p->length; ++t)
    for (int64_t n = 0; n < p->dim; ++n) {
      double own = relu_of(p, test_at(q, b, h, t, n)), partner = relu_of(p, test_at(q, b, h, t, n ^ 1));
      r[t * p->dim + n] = own * table_at(p, p->cos, t, n) + (n % 2 ? partner : -partner) * table_at(p, p->sin, t, n);
    }
}

/* weights [T,T] of a head */
static void naive_weights(const camox_bdh_params *p, const double *r, double *w) {
  for (int64_t i = 0; i < p->length; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < p->length; ++j) {
      double s = 0;
      for (int64_t n = 0; n < p->dim; ++n) s += r[i * p->dim + n] * r[j * p->dim + n];
      s *= p->scale;
      if (p->softmax) s = exp(s);
      if (p->causal && j >= i) s = 0;
      w[i * p->length + j] = s, sum += s;
    }
    for (int64_t j = 0; p->softmax && sum > 0 && j < p->length; ++j) w[i * p->length + j] /= sum;
  }
}

/* out [B,H,T,D], grad_q [B,H,T,N] and, added to zeros, grad_v [B,Hv,T,D] */
static void naive(const camox_bdh_params *p, const test_image *q, const test_image *v, const test_image *grad, double *out,
                  double *grad_q, double *grad_v) {
  const int64_t length = p->length, dim = p->dim, value_dim = p->value_dim;
  double *r = calloc((size_t)(length * dim) + 1, sizeof *r), *w = calloc((size_t)(length * length) + 1, sizeof *w);
  double *ds = calloc((size_t)(length * length) + 1, sizeof *ds), *dr = calloc((size_t)dim + 1, sizeof *dr);
  if (!r || !w || !ds || !dr) abort();
  for (int64_t b = 0; b < p->batch; ++b)
    for (int64_t h = 0; h < p->heads; ++h) {
      const int64_t hv = p->value_heads == 1 ? 0 : h;
      double *grad_of_v = grad_v + (b * p->value_heads + hv) * length * value_dim;
      naive_rotate(p, q, b, h, r);
      naive_weights(p, r, w);
      for (int64_t i = 0; i < length; ++i) {
        double delta = 0;
        for (int64_t d = 0; d < value_dim; ++d) {
          double sum = 0;
          for (int64_t j = 0; j < length; ++j) sum += w[i * length + j] * test_at(v, b, hv, j, d);
          *out++ = sum;
        }
        for (int64_t j = 0; j < length; ++j) {
          double dw = 0;
          for (int64_t d = 0; d < value_dim; ++d) {
            dw += test_at(grad, b, h, i, d) * test_at(v, b, hv, j, d);
            grad_of_v[j * value_dim + d] += w[i * length + j] * test_at(grad, b, h, i, d);
          }
          ds[i * length + j] = p->causal && j >= i ? 0 : dw;
          delta += w[i * length + j] * dw;
        }
        for (int64_t j = 0; p->softmax && j < length; ++j)
          ds[i * length + j] = w[i * length + j] * (ds[i * length + j] - delta);
      }
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t n = 0; n < dim; ++n) {
          dr[n] = 0;
          for (int64_t j = 0; j < length; ++j) dr[n] += (ds[i * length + j] + ds[j * length + i]) * r[j * dim + n];
          dr[n] *= p->scale;
        }
        for (int64_t n = 0; n < dim; ++n) {
          double rotated = dr[n] * table_at(p, p->cos, i, n);
          rotated += (n % 2 ? -1 : 1) * dr[n ^ 1] * table_at(p, p->sin, i, n ^ 1);
          *grad_q++ = p->grad_of_rotated ? dr[n] : p->relu && test_at(q, b, h, i, n) <= 0 ? 0 : rotated;
        }
      }
    }
  free(r), free(w), free(ds), free(dr);
}

/* test_close without its bound of one rounding of a short sum: these sums are long. */
static int close_enough(const test_image *got, const double *truth, double *error) {
  double largest = 0;
  const double *next = truth;
  *error = 0;
  TEST_EACH(got, b, h, t, d) {
    double difference = fabs(test_at(got, b, h, t, d) - *next);
    if (!(difference <= *error)) *error = difference;
    if (fabs(*next) > largest) largest = fabs(*next);
    ++next;
  }
  return *error <= 64 * test_epsilon[got->dtype] * (largest + 1);
}

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[5], options o) {
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  const int64_t real_size = real == CAMOX_F64 ? 8 : 4;
  camox_bdh_params p = {.dtype = dtype, .relu = o.relu, .causal = o.causal, .softmax = o.softmax, .form = o.form};
  p.batch = size[0], p.heads = size[1], p.length = size[2], p.dim = size[3], p.value_dim = size[4];
  p.value_heads = o.shared ? 1 : p.heads, p.grad_of_rotated = o.grad_of_rotated, p.avx512_bf16 = o.avx512_bf16;
  p.scale = 1 / (double)p.dim, p.table_length = p.length, p.table_columns = o.full_width ? p.dim : p.dim / 2;
  const int64_t of_q[4] = {p.batch, p.heads, p.length, p.dim}, of_v[4] = {p.batch, p.value_heads, p.length, p.value_dim};
  const int64_t of_out[4] = {p.batch, p.heads, p.length, p.value_dim};
  const int last = layout == TEST_CHANNELS_LAST, gaps = layout == TEST_STRIDED;
  test_image q = test_input(dtype, layout, of_q), v = test_input(dtype, layout, of_v), grad = test_input(dtype, layout, of_out);
  test_image out = test_output(dtype, last, gaps, of_out), grad_q = test_output(dtype, last, gaps, of_q);
  test_image grad_v = test_output(dtype, last, gaps, of_v), cosines = dense(real, p.length, p.table_columns, 1);
  test_image sines = dense(real, p.length, p.table_columns, 1);
  test_image scores = dense(real, p.batch * p.heads * p.length, p.length, 0);
  test_image sums = dense(real, p.batch * p.heads, p.length, 0);
  test_image partial = dense(real, p.batch * p.heads * p.length, p.value_dim, 0);
  p.q = q.view, p.v = v.view, p.grad = grad.view, p.out = out.view, p.grad_q = grad_q.view, p.grad_v = grad_v.view;
  p.cos = cosines.view.data, p.sin = sines.view.data;
  if (p.value_heads == 1) p.v.stride[1] = 0;
  const int summed = o.relu && p.heads > 0 && p.batch > 0; /* over the heads, by the slots */
  if (p.value_heads != p.heads && !summed) p.partial = partial.view.data;
  if (o.save && camox_bdh_saves_scores(&p)) p.scores = scores.view.data;
  if (o.softmax) p.logsumexp = sums.view.data;
  char what[200];
  snprintf(what, sizeof what,
           "%s%s %s %s (%d,%d,%d,%d,%d) relu %d causal %d softmax %d full_width %d shared %d save %d form %d",
           camox_isa_name(isa), o.avx512_bf16 ? ", AVX512-BF16" : "", test_dtype_names[dtype], test_layout_names[layout],
           (int)size[0], (int)size[1], (int)size[2], (int)size[3], (int)size[4], o.relu, o.causal, o.softmax, o.full_width,
           o.shared, o.save, (int)o.form);

  double *truth = test_values(&out, 1), *truth_q = test_values(&grad_q, 1), *truth_v = test_values(&grad_v, 1), error;
  naive(&p, &q, &v, &grad, truth, truth_q, truth_v);
  const int64_t items = camox_bdh_work_items(&p);
  for (int backward = 0; backward < 2; ++backward) {
    TEST(camox_bdh_check(&p, backward) == CAMOX_OK, "%s: %s", what, camox_last_error());
    p.slots = items > 1 && (!summed || p.batch > 1) ? 2 : 1;
    p.scratch = malloc((size_t)(p.slots * camox_bdh_scratch(&p, backward) * real_size));
    if (p.scratch == NULL) abort();
    memset(p.scratch, 0xa5, (size_t)(p.slots * camox_bdh_scratch(&p, backward) * real_size));
    camox_bdh_kernel *kernel = !backward       ? camox_bdh_forward(dtype, isa)
                               : o.avx512_bf16 ? camox_bdh_backward_avx512_bf16()
                                               : camox_bdh_backward(dtype, isa);
    if (items > 0) kernel(&p, 0, p.slots);
    free(p.scratch);
  }
  if (p.partial) camox_bdh_sum(dtype, isa)(&p, 0, camox_bdh_sum_work_items(&p));
  TEST(close_enough(&out, truth, &error), "%s: off by %g", what, error);
  TEST(close_enough(&grad_q, truth_q, &error), "%s: gradient of q off by %g", what, error);
  TEST(close_enough(&grad_v, truth_v, &error), "%s: gradient of v off by %g", what, error);
  TEST(test_untouched(&out) && test_untouched(&grad_q) && test_untouched(&grad_v), "%s: written outside its elements", what);
  free(truth), free(truth_q), free(truth_v);
  test_image *const all[] = {&q, &v, &grad, &out, &grad_q, &grad_v, &cosines, &sines, &scores, &sums, &partial};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

static void test_step(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], int with_state,
                      int full_width) {
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  camox_bdh_step_params p = {.dtype = dtype, .relu = 1, .scale = 0.5};
  p.batch = size[0], p.heads = size[1], p.dim = size[2], p.value_dim = size[3], p.value_heads = 1;
  p.table_columns = full_width ? p.dim : p.dim / 2;
  const int64_t of_q[4] = {p.batch, p.heads, 1, p.dim}, of_v[4] = {p.batch, 1, 1, p.value_dim};
  const int64_t of_out[4] = {p.batch, p.heads, 1, p.value_dim}, of_state[4] = {p.batch, p.heads, p.dim, p.value_dim};
  test_image q = test_input(dtype, layout, of_q), v = test_input(dtype, layout, of_v);
  test_image out = test_output(dtype, 0, 0, of_out), state = test_input(real, TEST_CONTIGUOUS, of_state);
  test_image next = test_output(real, 0, 0, of_state), cosines = dense(real, 1, p.table_columns, 1);
  test_image sines = dense(real, 1, p.table_columns, 1);
  p.q = q.view, p.v = v.view, p.v.stride[1] = 0, p.out = out.view, p.next = next.view.data;
  p.cos = cosines.view.data, p.sin = sines.view.data;
  if (with_state) p.state = state.view;
  double *truth = test_values(&out, 1), *after = test_values(&next, 1), error;
  const camox_bdh_params head = {
      .dtype = dtype, .relu = 1, .length = 1, .dim = p.dim, .table_columns = p.table_columns, .cos = p.cos, .sin = p.sin};
  double *r = calloc((size_t)p.dim + 1, sizeof *r);
  if (r == NULL) abort();
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads; ++h) {
      naive_rotate(&head, &q, b, h, r);
      for (int64_t n = 0; n < p.dim; ++n)
        for (int64_t d = 0; d < p.value_dim; ++d) {
          double before = with_state ? test_at(&state, b, h, n, d) : 0;
          truth[(b * p.heads + h) * p.value_dim + d] += p.scale * r[n] * before;
          after[((b * p.heads + h) * p.dim + n) * p.value_dim + d] = before + r[n] * test_at(&v, b, 0, 0, d);
        }
    }
  TEST(camox_bdh_step_check(&p) == CAMOX_OK, "step: %s", camox_last_error());
  camox_bdh_step(dtype, isa)(&p, 0, camox_bdh_step_work_items(&p));
  TEST(close_enough(&out, truth, &error), "step %s %s: off by %g", camox_isa_name(isa), test_dtype_names[dtype], error);
  TEST(close_enough(&next, after, &error), "step %s %s: state off by %g", camox_isa_name(isa), test_dtype_names[dtype], error);
  free(truth), free(after), free(r);
  test_image *const all[] = {&q, &v, &out, &state, &next, &cosines, &sines};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

static void refused(const camox_bdh_params *p, int backward, const char *message) {
  int status = camox_bdh_check(p, backward);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  float elements[24], angles[8] = {0};
  const camox_view4 view = {elements, {24, 12, 4, 1}};
  const camox_bdh_params good = {.scale = 1,
                                 .batch = 1,
                                 .heads = 2,
                                 .value_heads = 1,
                                 .length = 3,
                                 .dim = 4,
                                 .value_dim = 4,
                                 .table_length = 3,
                                 .table_columns = 2,
                                 .cos = angles,
                                 .sin = angles,
                                 .q = view,
                                 .v = view,
                                 .out = view,
                                 .grad = view,
                                 .grad_q = view,
                                 .grad_v = view,
                                 .partial = elements};
  TEST(camox_bdh_check(&good, 0) == CAMOX_OK && camox_bdh_check(&good, 1) == CAMOX_OK, "%s", camox_last_error());
  camox_bdh_params p = good;
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, 0, "dtype code"), p = good;
  p.heads = -1, refused(&p, 0, "negative size"), p = good;
  p.dim = 3, refused(&p, 0, "even and > 0, got 3"), p = good;
  p.dim = 0, refused(&p, 0, "even and > 0, got 0"), p = good;
  p.value_heads = 3, refused(&p, 0, "1 or 2 heads, got 3"), p = good;
  p.table_columns = 3, refused(&p, 0, "columns, got 3"), p = good;
  p.table_length = 2, refused(&p, 0, "fewer than the 3 positions"), p = good;
  p.scale = 0, refused(&p, 0, "scale must be > 0"), p = good;
  p.scale = INFINITY, refused(&p, 0, "scale must be > 0"), p = good;
  p.form = (camox_bdh_form)3, refused(&p, 0, "form must be"), p = good;
  p.form = CAMOX_BDH_STATE, p.softmax = 1, refused(&p, 0, "form must be"), p = good;
  p.out.stride[1] = 0, refused(&p, 0, "share memory"), p = good;
  p.grad_q.stride[2] = 0, refused(&p, 1, "share memory"), p = good;
  p.grad_v.stride[3] = 0, refused(&p, 1, "share memory"), p = good;
  p.softmax = 1, refused(&p, 1, "needs out and what was saved"), p = good;
  p.partial = NULL, p.slots = 2, refused(&p, 1, "have no memory");
}

int main(void) {
  /* one token; around vectors; more than a tile of tokens and, at 130 columns of q, of columns; empty */
  static const int64_t sizes[][5] = {{2, 2, 1, 2, 1},     {1, 2, 3, 34, 7},   {2, 2, 17, 66, 16},
                                     {1, 1, 20, 300, 33}, {1, 1, 131, 18, 5}, {0, 2, 3, 4, 5},
                                     {2, 0, 3, 4, 5},     {1, 2, 0, 4, 5},    {1, 2, 3, 4, 0}};
  static const int64_t step_sizes[][4] = {{2, 3, 2, 1}, {1, 2, 34, 17}, {1, 1, 300, 530}, {0, 2, 4, 4}};
  test_checks_refuse();
  const int avx512_bf16 = camox_isa_init() == CAMOX_OK && camox_isa_has_avx512_bf16();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("bdh: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_EXPANDED; ++layout) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
          for (int flags = 0; flags < 16; ++flags) {
            options o = {flags & 1,  flags >> 1 & 1,      flags >> 2 & 1,
                         (int)i & 1, flags >> 3,          (flags ^ layout) & 1,
                         flags == 9, CAMOX_BDH_QUADRATIC, 0};
            test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], o);
            o.form = CAMOX_BDH_STATE;
            if (!o.softmax) test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], o);
            if (!avx512_bf16 || isa != CAMOX_ISA_AVX512 || dtype != CAMOX_BF16) continue;
            o.avx512_bf16 = 1;
            if (!o.softmax) test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], o);
            o.form = CAMOX_BDH_QUADRATIC;
            test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], o);
          }
        for (size_t i = 0; i < sizeof step_sizes / sizeof *step_sizes; ++i)
          for (int flags = 0; flags < 4; ++flags)
            test_step((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, step_sizes[i], flags & 1, flags >> 1);
      }
    /* not all scores of a head are materialized at once */
    static const int64_t long_sequence[5] = {1, 1, 1030, 4, 3};
    for (int flags = 0; flags < 4; ++flags) {
      options o = {.relu = 1, .causal = flags & 1, .softmax = flags >> 1, .form = CAMOX_BDH_QUADRATIC};
      test_case((camox_isa)isa, CAMOX_F32, TEST_CONTIGUOUS, long_sequence, o);
      o.avx512_bf16 = avx512_bf16 && isa == CAMOX_ISA_AVX512;
      if (o.avx512_bf16) test_case((camox_isa)isa, CAMOX_BF16, TEST_CONTIGUOUS, long_sequence, o);
    }
  }
  return test_report("bdh");
}
