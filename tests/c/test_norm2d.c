/* layer_norm2d against plain double loops: every kernel of this machine, layouts and sizes around vectors, tiles and blocks. */
#include "../../csrc/norm2d/norm2d.h"
#include "camox_test.h"

static double act(double u, camox_activation activation) {
  double cubic = sqrt(8 / acos(-1)) * (u + 0.044715 * u * u * u);
  if (activation == CAMOX_ACT_GELU) return u * erfc(-u / sqrt(2)) / 2;
  if (activation == CAMOX_ACT_GELU_TANH) return u / (1 + exp(-cubic));
  if (activation == CAMOX_ACT_RELU) return fmax(u, 0);
  return activation == CAMOX_ACT_SILU ? u / (1 + exp(-u)) : u;
}

static double act_slope(double u, camox_activation activation) {
  double step = 1e-5; /* the derivative of every activation but relu is smooth */
  if (activation == CAMOX_ACT_NONE) return 1;
  if (activation == CAMOX_ACT_RELU) return u > 0;
  return (8 * (act(u + step, activation) - act(u - step, activation)) -
          (act(u + 2 * step, activation) - act(u - 2 * step, activation))) /
         (12 * step);
}

/* One group at one pixel: x, d and z are `count` values `apart` apart. */
typedef struct {
  int64_t count, apart;
  double mean, scale;
} test_group;

static test_group group_of(const camox_norm2d_params *p, const double *x) {
  test_group g = {.count = p->channels / p->groups, .apart = p->height * p->width};
  double squares = 0;
  for (int64_t c = 0; c < g.count; ++c) g.mean += x[c * g.apart] / (double)g.count;
  for (int64_t c = 0; c < g.count; ++c) squares += (x[c * g.apart] - g.mean) * (x[c * g.apart] - g.mean);
  g.scale = 1 / sqrt(squares / (double)g.count + p->eps);
  return g;
}

/* y, grad_x and the sums for weight and bias of one group at one pixel. */
static void naive(const camox_norm2d_params *p, const double *weight, const double *bias, const double *x,
                  const double *residual, const double *grad, double *y, double *grad_x, double *grad_weight,
                  double *grad_bias) {
  test_group g = group_of(p, x);
  double d_mean = 0, dz_mean = 0;
  for (int64_t c = 0; c < g.count; ++c) {
    double z = (x[c * g.apart] - g.mean) * g.scale, u = z * weight[c] + bias[c];
    double gated = grad[c * g.apart] * act_slope(u, p->activation);
    y[c * g.apart] = act(u, p->activation) + (residual ? residual[c * g.apart] : 0);
    grad_weight[c] += gated * z, grad_bias[c] += gated;
    grad_x[c * g.apart] = gated * weight[c];
    d_mean += gated * weight[c] / (double)g.count, dz_mean += gated * weight[c] * z / (double)g.count;
  }
  for (int64_t c = 0; c < g.count; ++c) {
    double z = (x[c * g.apart] - g.mean) * g.scale;
    grad_x[c * g.apart] = (grad_x[c * g.apart] - d_mean - z * dz_mean) * g.scale;
  }
}

/* n numbers in a buffer of exactly their size; random or a pattern. */
static void *numbers(camox_dtype dtype, int64_t n, double *values) {
  void *data = malloc((size_t)n * test_size[dtype] + 1);
  if (data == NULL) abort();
  memset(data, 0xa5, (size_t)n * test_size[dtype]);
  for (int64_t i = 0; values && i < n; ++i) test_set(dtype, data, i, values[i] = test_random(8));
  return data;
}

/* In the dtype computed in. */
static void *reals(camox_dtype dtype, int64_t n, double *values) {
  return numbers(dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, n, values);
}

static double *zeros(int64_t n) {
  double *values = calloc((size_t)n + 1, sizeof *values);
  if (values == NULL) abort();
  return values;
}

/* Sums over n pixels: of (C,), in a half type rounded once. */
static int sums_close(camox_dtype dtype, const void *ours, const double *truth, int64_t channels, int64_t n) {
  double allowed = 40 * sqrt((double)n + 1) * (dtype == CAMOX_F64 ? 1e-11 : FLT_EPSILON); /* 1e-11: act_slope's own error */
  for (int64_t c = 0; c < channels; ++c) {
    double difference = fabs(test_get(dtype, ours, c) - truth[c]), rounding = test_is_half(dtype) ? test_epsilon[dtype] : 0;
    if (!(difference <= allowed + rounding * fabs(truth[c]))) return 0;
  }
  return 1;
}

/* max|ours - truth| <= bound max(1, max|truth|) and one rounding to a half type. */
static int close_within(const test_image *ours, const double *truth, double bound, double *error) {
  double largest = 1, rounding = test_epsilon[ours->dtype];
  const double *value = truth;
  TEST_EACH(ours, b, c, y, x) largest = fmax(largest, fabs(*value++));
  int close = 1;
  *error = 0, value = truth;
  TEST_EACH(ours, b, c, y, x) {
    double difference = fabs(test_at(ours, b, c, y, x) - *value);
    if (!(difference <= bound * largest + rounding * fabs(*value++))) close = 0, *error = difference;
  }
  return close;
}

static void run(camox_norm2d_kernel *kernel, const camox_norm2d_params *p, int64_t items, int pieces) {
  for (int piece = 0; piece < pieces; ++piece) kernel(p, items * piece / pieces, items * (piece + 1) / pieces);
}

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], int64_t groups,
                      camox_activation activation, int pieces) {
  int channels_last = layout == TEST_CHANNELS_LAST;
  camox_norm2d_params p = {.dtype = dtype, .activation = activation, .eps = 1e-2, .groups = groups};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  int64_t pixels = p.height * p.width, elements = p.batch * p.channels * pixels, channels = p.channels / groups;
  test_image x = test_input(dtype, layout, size), grad = test_input(dtype, layout, size);
  test_image residual = test_input(dtype, layout, size), y = test_output(dtype, channels_last, 0, size);
  test_image grad_x = test_output(dtype, channels_last, 0, size);
  int with_residual = groups > 1;
  double *weight = zeros(p.channels), *bias = zeros(p.channels), *true_y = zeros(elements), *true_grad = zeros(elements);
  double *true_weight = zeros(p.channels), *true_bias = zeros(p.channels);
  double *xs = test_values(&x, 0), *grads = test_values(&grad, 0), *residuals = test_values(&residual, 0);
  p.x = x.view, p.y = y.view, p.grad = grad.view, p.grad_x = grad_x.view;
  if (with_residual) p.residual = residual.view;
  p.weight = (camox_norm2d_affine){reals(dtype, p.channels, weight), p.channels, 1};
  p.bias = (camox_norm2d_affine){reals(dtype, p.channels, bias), p.channels, 1};
  p.stats = reals(dtype, (activation == CAMOX_ACT_NONE ? 1 : 2) * p.batch * groups * pixels, NULL);
  p.half_weights = with_residual && test_is_half(dtype);
  camox_dtype sums = p.half_weights ? dtype : dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  p.grad_weight = numbers(sums, p.channels, NULL), p.grad_bias = numbers(sums, p.channels, NULL);
  p.scratch = test_scratch(CAMOX_NORM2D_SCRATCH);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t c = 0; c < p.channels; c += channels)
      for (int64_t i = 0; i < pixels; ++i) {
        int64_t at = (b * p.channels + c) * pixels + i;
        naive(&p, weight + c, bias + c, xs + at, with_residual ? residuals + at : NULL, grads + at, true_y + at, true_grad + at,
              true_weight + c, true_bias + c);
      }

  char what[160];
  snprintf(what, sizeof what, "%s %s %s (%d,%d,%d,%d) groups %d activation %d", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)size[0], (int)size[1], (int)size[2], (int)size[3], (int)groups, (int)activation);
  double error = 0, epsilon = dtype == CAMOX_F64 ? DBL_EPSILON : FLT_EPSILON;
  TEST(camox_norm2d_check(&p) == CAMOX_OK, "%s: %s", what, camox_last_error());
  int64_t items = camox_norm2d_items(&p);
  p.partial = reals(dtype, 2 * items * p.channels, NULL);
  run(camox_norm2d_forward(dtype, isa), &p, items, pieces);
  TEST(close_within(&y, true_y, (16 + (double)channels / 64) * epsilon, &error), "%s: off by %g", what, error);
  TEST(test_untouched(&y), "%s: written outside its pixels", what);
  run(camox_norm2d_backward(dtype, isa), &p, items, pieces);
  run(camox_norm2d_reduce(dtype, isa), &p, p.channels, pieces);
  /* act_slope is no better than 1e-10, and groups of few channels nearly cancel */
  TEST(close_within(&grad_x, true_grad, fmax(1e-9, 64 * epsilon), &error), "%s: gradient off by %g", what, error);
  TEST(test_untouched(&grad_x), "%s: gradient written outside its pixels", what);
  TEST(sums_close(sums, p.grad_weight, true_weight, p.channels, p.batch * pixels), "%s: grad_weight", what);
  TEST(sums_close(sums, p.grad_bias, true_bias, p.channels, p.batch * pixels), "%s: grad_bias", what);

  test_free(&x), test_free(&grad), test_free(&residual), test_free(&y), test_free(&grad_x);
  free(weight), free(bias), free(true_y), free(true_grad), free(true_weight), free(true_bias);
  free(xs), free(grads), free(residuals);
  free((void *)p.weight.data), free((void *)p.bias.data);
  free(p.stats), free(p.grad_weight), free(p.grad_bias), free(p.partial), free(p.scratch);
}

static void test_checks_refuse(void) {
  float numbers[24];
  camox_norm2d_params good = {.dtype = CAMOX_F32, .eps = 1e-6, .batch = 1, .channels = 6, .height = 2, .width = 2, .groups = 2};
  good.weight = good.bias = (camox_norm2d_affine){numbers, 6, 1};
  TEST(camox_norm2d_check(&good) == CAMOX_OK, "%s", camox_last_error());
  enum { BAD = 9 };
  struct {
    const char *message;
    camox_norm2d_params p;
  } bad[BAD] = {{.message = "dtype code"},      {.message = "activation code"},  {.message = "negative size"},
                {.message = "eps must be > 0"}, {.message = "eps must be > 0"},  {.message = "groups must be >= 1"},
                {.message = "divide the 6"},    {.message = "weight must have"}, {.message = "bias must be contiguous"}};
  for (int i = 0; i < BAD; ++i) bad[i].p = good;
  bad[0].p.dtype = CAMOX_DTYPE_COUNT, bad[1].p.activation = CAMOX_ACT_COUNT, bad[2].p.height = -1;
  bad[3].p.eps = 0, bad[4].p.eps = NAN, bad[5].p.groups = 0, bad[6].p.groups = 4;
  bad[7].p.weight.length = 5, bad[8].p.bias.stride = 2;
  for (int i = 0; i < BAD; ++i) {
    int status = camox_norm2d_check(&bad[i].p);
    TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), bad[i].message), "%s: got %d, %s", bad[i].message,
         status, camox_last_error());
  }
}

int main(void) {
  /* size and groups: one pixel; one channel; around vectors; several blocks; more than a tile of lines; blocks of few pixels;
     too many channels for the scratch memory of a block; empty */
  static const int64_t sizes[][5] = {{1, 40, 1, 1, 2},  {2, 1, 3, 5, 1},    {1, 5, 3, 5, 1},   {2, 8, 1, 17, 2},
                                     {1, 12, 9, 7, 4},  {1, 33, 6, 7, 3},   {1, 4, 40, 33, 1}, {1, 6, 35, 59, 1},
                                     {1, 600, 3, 6, 1}, {1, 4500, 1, 3, 1}, {0, 3, 4, 4, 1},   {2, 3, 0, 4, 3}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("norm2d: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
          int64_t elements = sizes[i][0] * sizes[i][1] * sizes[i][2] * sizes[i][3];
          for (int activation = 0; activation < (elements > 3000 ? 2 : CAMOX_ACT_COUNT); ++activation)
            test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], sizes[i][4],
                      (camox_activation)activation, 1 + activation % 3);
        }
  }
  return test_report("norm2d");
}
