/* The replacements' kernels against plain loops: every instruction set of this machine. */
#include "../../csrc/common/philox.h"
#include "../../csrc/tune/batch_norm.h"
#include "../../csrc/tune/bernoulli.h"
#include "../../csrc/tune/depthwise.h"
#include "../../csrc/tune/max_pool.h"
#include "../../csrc/tune/softmax.h"
#include "../../csrc/tune/upsample.h"
#include "camox_test.h"

static void test_bernoulli(camox_isa isa, camox_dtype dtype, int64_t count, double p, int exceeds_cache) {
  unsigned char *out = aligned_alloc(64, (size_t)(count + 64) / 64 * 64 * test_size[dtype]);
  camox_bernoulli_params params = {out, count, 0x123456789abcdefu, (uint64_t)(ldexp(p, 32) + 0.5), exceeds_cache};
  camox_bernoulli(dtype, isa)(&params, 0, (count + CAMOX_BERNOULLI_ITEM - 1) / CAMOX_BERNOULLI_ITEM);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t group = (uint64_t)i / 8;
    const camox_philox_words second = {{(uint32_t)group, (uint32_t)(group >> 32), 1, 0}};
    const camox_philox_words low = camox_philox(second, (uint32_t)params.seed, (uint32_t)(params.seed >> 32), 7);
    const uint64_t h = camox_philox_bits(camox_philox_group(params.seed, group), (int)(i % 8));
    const uint64_t u = h << 16 | camox_philox_bits(low, (int)(i % 8));
    TEST(test_get(dtype, out, i) == (u < params.bound), "%s %s p %g at %lld", camox_isa_name(isa), test_dtype_names[dtype], p,
         (long long)i);
  }
  free(out);
}

/* Factor `factor` along a side: pixel i of y lies at (i + 0.5) / factor - 0.5 of x. To be freed by free_side. */
typedef struct {
  camox_upsample_side side;
  double *share; /* [to, from] */
} upsampled_side;

static upsampled_side upsampled(int64_t from, int64_t factor, int backward) {
  const int64_t to = from * factor, padded = to + CAMOX_UPSAMPLE_VECTOR, taps = 2 * factor + 1;
  int32_t *index = calloc((size_t)padded, sizeof *index), *count = calloc((size_t)padded, sizeof *count);
  float *weights = calloc((size_t)(padded + from * taps), sizeof *weights);
  double *share = calloc((size_t)(to * from), sizeof *share);
  for (int64_t i = 0; i < padded; ++i) {
    const double at = fmax(0, ((double)(i < to ? i : to - 1) + 0.5) / (double)factor - 0.5), left = floor(at);
    const double t = at - left;
    const int64_t p = (int64_t)left, next = p + 1 < from ? p + 1 : from - 1;
    if (!backward) index[i] = (int32_t)left, weights[i] = (float)t;
    if (i < to) share[i * from + p] += 1 - t, share[i * from + next] += t;
  }
  for (int64_t p = 0; p < from && backward; ++p) {
    for (int64_t i = to - 1; i >= 0; --i)
      if (share[i * from + p] != 0) index[p] = (int32_t)i, count[p] += 1;
    for (int32_t k = 0; k < count[p]; ++k) weights[p * taps + k] = (float)share[(index[p] + k) * from + p];
  }
  return (upsampled_side){{from, to, index, count, weights, taps}, share};
}

static void free_side(upsampled_side *s) {
  free((void *)s->side.index), free((void *)s->side.count), free((void *)s->side.weights), free(s->share);
}

/* Every output against a loop over every input. */
static void test_upsample(camox_isa isa, camox_dtype dtype, const int64_t *size, int64_t factor, int backward) {
  upsampled_side rows = upsampled(size[0], factor, backward);
  upsampled_side columns = upsampled(size[1], factor, backward);
  const int64_t x_size[4] = {2, 3, size[0], size[1]}, y_size[4] = {2, 3, size[0] * factor, size[1] * factor};
  test_image in = test_input(dtype, TEST_CONTIGUOUS, backward ? y_size : x_size);
  test_image out = test_output(dtype, 0, 1, backward ? x_size : y_size);
  double *values = test_values(&in, 0), *truth = test_values(&out, 1), *next = truth, error, allowed;
  TEST_EACH(&out, b, c, y, x) {
    double sum = 0;
    for (int64_t row = 0; row < in.size[2]; ++row)
      for (int64_t column = 0; column < in.size[3]; ++column) {
        const double of_row = backward ? rows.share[row * size[0] + y] : rows.share[y * size[0] + row];
        const double of_column = backward ? columns.share[column * size[1] + x] : columns.share[x * size[1] + column];
        sum += of_row * of_column * values[((b * 3 + c) * in.size[2] + row) * in.size[3] + column];
      }
    *next++ = sum;
  }
  camox_upsample_params p = {.channels = 3, .planes = 6, .rows = rows.side, .columns = columns.side, .bands = 2};
  p.in = in.view, p.out = out.view;
  p.scratch = test_scratch((camox_upsample_scratch(&p) + 63) / 64 * 64);
  camox_upsample_kernel *kernel = backward ? camox_upsample_backward(dtype, isa) : camox_upsample_forward(dtype, isa);
  kernel(&p, 0, 5), kernel(&p, 5, 12);
  TEST(test_close_within(16, &out, truth, &error, &allowed),
       "%s %s upsample %lldx%lld by %lld, backward %d: off by %g, allowed %g", camox_isa_name(isa), test_dtype_names[dtype],
       (long long)size[0], (long long)size[1], (long long)factor, backward, error, allowed);
  TEST(test_untouched(&out), "%s: written outside its pixels", test_dtype_names[dtype]);
  test_free(&in), test_free(&out), free_side(&rows), free_side(&columns);
  free(values), free(truth), free(p.scratch);
}

/* By whole factors along rows and columns, the later work items first. */
static void test_nearest(camox_isa isa, camox_dtype dtype, const int64_t *size, int64_t f, int64_t g, int backward) {
  const int64_t x_size[4] = {2, 3, size[0], size[1]}, y_size[4] = {2, 3, size[0] * f, size[1] * g};
  test_image in = test_input(dtype, TEST_CONTIGUOUS, backward ? y_size : x_size);
  test_image out = test_output(dtype, 0, backward, backward ? x_size : y_size);
  int32_t *index = calloc((size_t)size[0], sizeof *index), *count = calloc((size_t)size[0], sizeof *count);
  float *weights = calloc((size_t)(size[0] * f), sizeof *weights);
  double error, allowed;
  for (int64_t p = 0; p < size[0]; ++p) index[p] = (int32_t)(f * p), count[p] = (int32_t)f;
  for (int64_t i = 0; i < size[0] * f; ++i) weights[i] = 1;
  camox_upsample_params p = {.channels = 3, .planes = 6, .bands = size[0] > 1 ? 2 : 1};
  p.rows = (camox_upsample_side){size[0], size[0] * f, index, count, weights, f};
  p.columns = (camox_upsample_side){.from = size[1], .to = size[1] * g};
  p.in = in.view, p.out = out.view;
  p.scratch = test_scratch((camox_upsample_scratch(&p) + 63) / 64 * 64);
  camox_upsample_kernel *kernel = backward ? camox_nearest_backward(dtype, isa) : camox_nearest_forward(dtype, isa);
  kernel(&p, 5, 6 * p.bands), kernel(&p, 0, 5);
  double *values = test_values(&in, 0), *truth = test_values(&out, 1), *next = truth;
  TEST_EACH(&out, b, c, y, x) {
    const double *plane = values + (b * 3 + c) * in.size[2] * in.size[3];
    double sum = 0;
    for (int64_t k = 0; k < f * g && backward; ++k) sum += plane[(y * f + k / g) * in.size[3] + x * g + k % g];
    *next++ = backward ? sum : plane[y / f * in.size[3] + x / g];
  }
  TEST(test_close_within(backward ? 16 : 0, &out, truth, &error, &allowed),
       "%s %s nearest %lldx%lld by %lld, %lld, backward %d: off by %g, allowed %g", camox_isa_name(isa),
       test_dtype_names[dtype], (long long)size[0], (long long)size[1], (long long)f, (long long)g, backward, error, allowed);
  TEST(test_untouched(&out), "%s: written outside its pixels", test_dtype_names[dtype]);
  test_free(&in), test_free(&out), free(values), free(truth), free(p.scratch), free(index), free(count), free(weights);
}

/* shape: outer, n, inner. long_rows: by the kernels of long rows, with 2 past the caches */
static void test_softmax(camox_isa isa, camox_dtype dtype, const int64_t *shape, int log, int backward, int long_rows) {
  const int64_t size[4] = {1, shape[0], shape[1], shape[2]}, n = shape[1], inner = shape[2];
  test_image in = test_input(dtype, TEST_CONTIGUOUS, size), grad = test_input(dtype, TEST_CONTIGUOUS, size);
  test_image out = test_output(dtype, 0, 0, size);
  double *values = test_values(&in, 0), *grads = test_values(&grad, 0), *truth = test_values(&out, 1), error, allowed;
  for (int64_t row = 0; row < shape[0] * inner; ++row) {
    const int64_t first = row / inner * n * inner + row % inner, end = first + n * inner;
    for (int64_t at = first; at < end; at += inner) {
      double sum = 0, flow = 0;
      for (int64_t i = first; i < end; i += inner) {
        sum += exp(values[i] - values[at]);
        flow += grads[i] * (log ? 1 : values[i]);
      }
      if (backward)
        truth[at] = log ? grads[at] - exp(values[at]) * flow : values[at] * (grads[at] - flow);
      else
        truth[at] = log ? -log1p(sum - 1) : 1 / sum;
    }
  }
  camox_softmax_params p = {.in = in.view.data, .grad = grad.view.data, .out = out.view.data};
  p.outer = shape[0], p.n = n, p.inner = inner, p.log = log;
  p.exceeds_cache = long_rows == 2;
  p.scratch = test_scratch((camox_softmax_scratch(&p) + 63) / 64 * 64);
  const int64_t items = long_rows ? p.outer : camox_softmax_items(&p);
  camox_softmax_kernel *kernel = backward ? camox_softmax_backward(dtype, isa) : camox_softmax_forward(dtype, isa);
  if (long_rows) kernel = backward ? camox_long_log_softmax_gradient(isa) : camox_long_softmax(isa);
  kernel(&p, 0, items / 2), kernel(&p, items / 2, items);
  TEST(test_close_within(16, &out, truth, &error, &allowed),
       "%s %s softmax %lldx%lldx%lld, log %d, backward %d, long %d: off by %g, allowed %g", camox_isa_name(isa),
       test_dtype_names[dtype], (long long)shape[0], (long long)n, (long long)inner, log, backward, long_rows, error, allowed);
  TEST(test_untouched(&out), "%s: written outside its elements", test_dtype_names[dtype]);
  test_free(&in), test_free(&grad), test_free(&out);
  free(values), free(grads), free(truth), free(p.scratch);
}

/* Small integers, whose sums are exact: every output equals that of plain loops. In buffers of exactly their size. */
static float *integers(int64_t count) {
  float *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; ++i) values[i] = (float)(test_random(3) * 4);
  return values;
}

/* x of image and channel `plane`, 0 outside. */
static double pixel(const camox_depthwise_params *p, int64_t plane, int64_t row, int64_t column) {
  const int inside = row >= 0 && row < p->rows && column >= 0 && column < p->columns;
  return inside ? p->x[(plane * p->rows + row) * p->columns + column] : 0;
}

static void test_depthwise(camox_isa isa, const int64_t *size, int64_t window, int64_t top, int64_t left, int turned) {
  camox_depthwise_params p = {.batch = 2, .channels = 3, .size = window, .top = top, .left = left, .turned = turned};
  p.rows = size[0], p.columns = size[1];
  p.y_rows = p.rows + 2 * top - window + 1, p.y_columns = p.columns + 2 * left - window + 1;
  if (p.y_rows < 1 || p.y_columns < 1) return;
  const int64_t taps = window * window, pixels = p.y_rows * p.y_columns;
  float *x = integers(6 * p.rows * p.columns), *weights = integers(3 * taps), *bias = integers(3), *dy = integers(6 * pixels);
  float *y = integers(6 * pixels), *d_weights = integers(3 * taps), *d_bias = integers(3);
  p.x = x, p.weights = weights, p.bias = bias, p.dy = dy, p.y = y, p.d_weights = d_weights, p.d_bias = d_bias;
  p.scratch = test_scratch((camox_depthwise_scratch(&p) + 63) / 64 * 64);
  camox_depthwise(isa)(&p, 0, 2), camox_depthwise(isa)(&p, 2, 6);
  camox_depthwise_gradient(isa)(&p, 0, 1), camox_depthwise_gradient(isa)(&p, 1, 3);
  int wrong = 0, wrong_gradient = 0;
  for (int64_t plane = 0; plane < 6; ++plane)
    for (int64_t i = 0; i < pixels; ++i) {
      double sum = bias[plane % 3];
      for (int64_t k = 0; k < taps; ++k)
        sum += weights[plane % 3 * taps + (turned ? taps - 1 - k : k)] *
               pixel(&p, plane, i / p.y_columns + k / window - top, i % p.y_columns + k % window - left);
      wrong += y[plane * pixels + i] != sum;
    }
  for (int64_t channel = 0; channel < 3; ++channel) {
    double of_bias = 0;
    for (int64_t k = 0; k <= taps; ++k) {
      double sum = 0;
      for (int64_t plane = channel; plane < 6; plane += 3)
        for (int64_t i = 0; i < pixels; ++i) {
          const double d = dy[plane * pixels + i];
          if (k == taps) of_bias += d;
          if (k < taps) sum += d * pixel(&p, plane, i / p.y_columns + k / window - top, i % p.y_columns + k % window - left);
        }
      if (k < taps) wrong_gradient += d_weights[channel * taps + k] != sum;
    }
    wrong_gradient += d_bias[channel] != of_bias;
  }
  TEST(wrong == 0 && wrong_gradient == 0,
       "%s depthwise %lldx%lld by %lld, padding %lld, %lld, turned %d: %d of y, %d of gradients", camox_isa_name(isa),
       (long long)size[0], (long long)size[1], (long long)window, (long long)top, (long long)left, turned, wrong,
       wrong_gradient);
  free(x), free(weights), free(bias), free(dy), free(y), free(d_weights), free(d_bias), free(p.scratch);
}

/* Against plain loops in double, and the same bits as portable code gives. In buffers of exactly their size. */
static void test_batch_norm(camox_isa isa, int64_t plane, int64_t bands) {
  enum { CHANNELS = 3, IMAGES = 2 };
  const int64_t count = IMAGES * CHANNELS * plane;
  const float weight[CHANNELS] = {0.5f, -2, 3}, bias[CHANNELS] = {0, 1, -1};
  camox_batch_norm_params p = {.images = IMAGES, .channels = CHANNELS, .plane = plane, .bands = bands, .momentum = 0.25};
  float *x = malloc((size_t)count * sizeof *x), *results[2];
  for (int64_t i = 0; i < count; ++i) x[i] = (float)(test_random(3) + 100);
  p.x = x, p.weight = weight, p.bias = bias, p.eps = 1e-3;
  p.sums = malloc((size_t)(2 * CHANNELS * bands) * sizeof *p.sums);
  const int64_t length = count + 4 * CHANNELS; /* y, mean, invstd and the running statistics */
  for (int which = 0; which < 2; ++which) {
    float *y = results[which] = malloc((size_t)length * sizeof *y);
    for (int64_t i = 0; i < length; ++i) y[i] = 1;
    p.y = y, p.mean = y + count, p.invstd = p.mean + CHANNELS;
    p.running_mean = p.invstd + CHANNELS, p.running_var = p.running_mean + CHANNELS;
    camox_batch_norm_kernel *kernel = camox_batch_norm(which ? CAMOX_ISA_PORTABLE : isa);
    p.adds_up = 1, p.writes = bands == 1;
    kernel(&p, 0, 1), kernel(&p, 1, CHANNELS * bands);
    p.adds_up = 0, p.writes = 1;
    if (bands > 1) kernel(&p, 0, 2), kernel(&p, 2, CHANNELS * bands);
  }
  const float *y = results[0], *saved = y + count;
  double error = 0;
  for (int64_t c = 0; c < CHANNELS; ++c) {
    double mean = 0, var = 0;
    const double n = (double)(IMAGES * plane);
    for (int64_t i = 0; i < count; ++i)
      if (i / plane % CHANNELS == c) mean += x[i] / n;
    for (int64_t i = 0; i < count; ++i)
      if (i / plane % CHANNELS == c) var += (x[i] - mean) * (x[i] - mean) / n;
    const double invstd = 1 / sqrt(var + p.eps), unbiased = var * n / (n - 1);
    for (int64_t i = 0; i < count; ++i)
      if (i / plane % CHANNELS == c) error = fmax(error, fabs(y[i] - ((x[i] - mean) * invstd * weight[c] + bias[c])));
    error = fmax(error, fabs(saved[c] - mean) / 100);
    error = fmax(error, fabs(saved[CHANNELS + c] - invstd) / invstd);
    error = fmax(error, fabs(saved[2 * CHANNELS + c] - (0.75 + 0.25 * mean)) / 100);
    error = fmax(error, fabs(saved[3 * CHANNELS + c] - (0.75 + 0.25 * unbiased)));
  }
  const int same = memcmp(results[0], results[1], (size_t)length * sizeof *y) == 0;
  TEST(error < 2e-6 && same, "%s batch norm of planes of %lld, %lld bands: off by %g, %s bits", camox_isa_name(isa),
       (long long)plane, (long long)bands, error, same ? "the same" : "other");
  free(x), free(p.sums), free(results[0]), free(results[1]);
}

/* PyTorch's loop over each window. Buffers of exactly their size; few values, so that many are equal, NaN and -inf. */
static void test_max_pool(camox_isa isa, camox_dtype dtype, const int64_t *size, int64_t window, int64_t stride,
                          int64_t padding) {
  static const double values[] = {0, 1, -1, 2, -3, -INFINITY, NAN};
  camox_max_pool_params p = {.channels = 3, .planes = 6, .rows = size[0], .columns = size[1], .bands = 2};
  p.window[0] = window, p.stride[0] = stride, p.padding[0] = padding;
  p.window[1] = window + 1, p.stride[1] = stride, p.padding[1] = padding;
  if (p.rows + 2 * padding < p.window[0] || p.columns + 2 * padding < p.window[1]) return;
  p.y_rows = (p.rows + 2 * padding - p.window[0]) / stride + 1,
  p.y_columns = (p.columns + 2 * padding - p.window[1]) / stride + 1;
  const int64_t pixels = p.rows * p.columns, outputs = p.y_rows * p.y_columns;
  void *x = malloc((size_t)(6 * pixels) * test_size[dtype]), *y = malloc((size_t)(6 * outputs) * test_size[dtype]);
  p.x = (camox_view4){x, {3 * pixels, pixels, p.columns, 1}}, p.y = y;
  p.indices = malloc((size_t)(6 * outputs) * sizeof *p.indices);
  p.scratch = test_scratch((camox_max_pool_scratch(&p) + 63) / 64 * 64);
  for (int64_t i = 0; i < 6 * pixels; ++i)
    test_set(dtype, x, i, values[(int)(test_random(8) * 1000 + 3000) % (i % pixels < pixels / 2 ? 5 : 7)]);
  camox_max_pool(dtype, isa)(&p, 0, 5), camox_max_pool(dtype, isa)(&p, 5, 12);
  int64_t wrong = 0;
  for (int64_t i = 0; i < 6 * outputs; ++i) {
    const int64_t plane = i / outputs, top = i % outputs / p.y_columns * stride - padding;
    const int64_t left = i % p.y_columns * stride - padding;
    int64_t place = (top > 0 ? top : 0) * p.columns + (left > 0 ? left : 0);
    double largest = -INFINITY;
    for (int64_t k = 0; k < p.window[0] * p.window[1]; ++k) {
      const int64_t row = top + k / p.window[1], column = left + k % p.window[1];
      if (row < 0 || row >= p.rows || column < 0 || column >= p.columns) continue;
      const double value = test_get(dtype, x, plane * pixels + row * p.columns + column);
      if (value > largest || isnan(value)) largest = value, place = row * p.columns + column;
    }
    const double found = test_get(dtype, y, i);
    wrong += p.indices[i] != place || !(found == largest || (isnan(found) && isnan(largest)));
  }
  TEST(wrong == 0, "%s %s max_pool %lldx%lld by %lld, stride %lld, padding %lld: %lld wrong", camox_isa_name(isa),
       test_dtype_names[dtype], (long long)size[0], (long long)size[1], (long long)window, (long long)stride,
       (long long)padding, (long long)wrong);
  free(x), free(y), free(p.indices), free(p.scratch);
}

int main(void) {
  static const int64_t images[][2] = {{1, 1}, {2, 7}, {5, 8}, {3, 16}, {9, 33}, {1, 65}};
  static const int64_t softened[][3] = {{1, 1, 1}, {70, 2, 1}, {130, 4, 1}, {33, 6, 1}, {64, 15, 1}, {2, 3, 17}, {1, 21, 130}};
  static const int64_t long_rows[][3] = {{1, 1, 1}, {7, 31, 1}, {2, 64, 1}, {5, 130, 1}, {4, 1000, 1}};
  static const int64_t planes[][2] = {{1, 1}, {3, 16}, {7, 7}, {17, 33}, {36, 20}, {5, 64}};
  static const double probabilities[] = {0, 1e-5, 0.1, 0.5, 65535.5 / 65536, 1};
  static const int64_t lengths[] = {2, 7, 16, 17, 49, 333};
  static const int64_t counts[] = {1, 63, 64, 65, 1000, 40000};
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("tune: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_F64; ++dtype)
      for (size_t i = 0; i < sizeof images / sizeof *images; ++i)
        for (int which = 0; which < 6; ++which)
          test_upsample((camox_isa)isa, (camox_dtype)dtype, images[i], 2 + which % 3, which / 3);
    for (int dtype = 0; dtype < CAMOX_F64; ++dtype)
      for (size_t i = 0; i < sizeof images / sizeof *images; ++i)
        for (int64_t f = 1; f <= CAMOX_NEAREST_LARGEST; ++f)
          for (int backward = 0; backward < 2; ++backward)
            test_nearest((camox_isa)isa, (camox_dtype)dtype, images[i], 1 + f / 2, f, backward);
    for (int dtype = 0; dtype < CAMOX_F64; ++dtype)
      for (size_t i = 0; i < sizeof softened / sizeof *softened; ++i)
        for (int which = 0; which < 4; ++which)
          test_softmax((camox_isa)isa, (camox_dtype)dtype, softened[i], which % 2, which / 2, 0);
    for (size_t i = 0; i < sizeof long_rows / sizeof *long_rows; ++i)
      for (int past_caches = 0; past_caches < 2; ++past_caches) {
        test_softmax((camox_isa)isa, CAMOX_F32, long_rows[i], 0, 0, 1 + past_caches);
        for (int backward = 0; backward < 2; ++backward)
          test_softmax((camox_isa)isa, CAMOX_F32, long_rows[i], 1, backward, 1 + past_caches);
      }
    for (int dtype = 0; dtype < CAMOX_F64; ++dtype)
      for (size_t i = 0; i < sizeof planes / sizeof *planes; ++i)
        for (int64_t window = 1; window <= 5; ++window)
          for (int64_t stride = 1; stride <= 4; ++stride)
            for (int64_t padding = 0; padding <= window / 2; ++padding)
              test_max_pool((camox_isa)isa, (camox_dtype)dtype, planes[i], window, stride, padding);
    for (size_t i = 0; i < sizeof planes / sizeof *planes; ++i)
      for (int64_t window = 3; window <= CAMOX_DEPTHWISE_LARGEST; window += 2)
        for (int64_t top = 0; top < window; top += 2)
          test_depthwise((camox_isa)isa, planes[i], window, top, window - 1 - top / 2, (int)(top / 2 % 2));
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; ++i)
      for (int64_t bands = 1; bands < 4; ++bands) test_batch_norm((camox_isa)isa, lengths[i], bands);
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t p = 0; p < sizeof probabilities / sizeof *probabilities; ++p)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i)
          for (int exceeds_cache = 0; exceeds_cache < 2; ++exceeds_cache)
            test_bernoulli((camox_isa)isa, (camox_dtype)dtype, counts[i], probabilities[p], exceeds_cache);
  }
  return test_report("tune");
}
