/* linear_cross_entropy against a plain triple loop: every kernel of this machine, options, sizes around tiles. */
#include "../../csrc/linear_cross_entropy/linear_cross_entropy.h"
#include "camox_test.h"

typedef struct {
  int64_t rows, depth, classes;
} problem;

typedef struct {
  double *loss, *x, *weight, *bias, *top, *log; /* loss: one number, or one for each row */
} answer;

static double *zeros(int64_t count) {
  double *values = calloc((size_t)count + 1, sizeof *values);
  if (values == NULL) abort();
  return values;
}

static answer naive(const camox_linear_cross_entropy_params *p, const double *x, const double *weight, const double *bias,
                    const double *grad) {
  const int64_t none = p->reduction == CAMOX_LOSS_NONE;
  answer a = {zeros(p->rows + 1), zeros(p->rows * p->depth), zeros(p->classes * p->depth), zeros(p->classes), zeros(p->rows),
              zeros(p->rows)};
  double *z = zeros(p->classes), counted = 0;
  for (int64_t i = 0; i < p->rows; ++i) counted += p->target[i] != p->ignore_index;
  for (int64_t i = 0; i < p->rows; ++i) {
    double top = -INFINITY, sum = 0, total = 0;
    for (int64_t j = 0; j < p->classes; ++j) {
      z[j] = bias ? bias[j] : 0;
      for (int64_t k = 0; k < p->depth; ++k) z[j] += x[i * p->depth + k] * weight[j * p->depth + k];
      top = fmax(top, z[j]), total += z[j];
    }
    for (int64_t j = 0; j < p->classes; ++j) sum += exp(z[j] - top);
    const double lse = top + log(sum);
    a.top[i] = top, a.log[i] = log(sum);
    if (p->target[i] == p->ignore_index) continue;
    const double share = p->reduction == CAMOX_LOSS_MEAN ? 1 / counted : 1, g = grad[none ? i : 0] * share;
    const double uniform = p->smoothing / (double)p->classes;
    a.loss[none ? i : 0] += share * (lse - (1 - p->smoothing) * z[p->target[i]] - uniform * total);
    for (int64_t j = 0; j < p->classes; ++j) {
      const double dz = g * (exp(z[j] - lse) - uniform - (j == p->target[i] ? 1 - p->smoothing : 0));
      a.bias[j] += dz;
      for (int64_t k = 0; k < p->depth; ++k) {
        a.x[i * p->depth + k] += dz * weight[j * p->depth + k];
        a.weight[j * p->depth + k] += dz * x[i * p->depth + k];
      }
    }
  }
  free(z);
  return a;
}

/* All steps of one direction, the work items of each in two calls. */
static void run(camox_linear_cross_entropy_params *p, camox_isa isa) {
  const size_t bytes = (size_t)camox_linear_cross_entropy_shared(p);
  p->shared = test_scratch((bytes / 64 + 1) * 64);
  p->scratch = test_scratch((size_t)camox_linear_cross_entropy_scratch(p));
  for (camox_linear_cross_entropy_begin(p); p->step != CAMOX_LCE_DONE; camox_linear_cross_entropy_next(p)) {
    const int64_t items = camox_linear_cross_entropy_items(p);
    camox_linear_cross_entropy(p->dtype, isa)(p, items / 2, items);
    camox_linear_cross_entropy(p->dtype, isa)(p, 0, items / 2);
  }
  free(p->shared), free(p->scratch);
}

/* Gradients that the forward makes, in float32, of a loss whose own gradient is 1; the loss has the bits of one without them. */
static void test_forward_with_gradients(camox_isa isa, camox_linear_cross_entropy_params p, const double *x,
                                        const double *weight, const double *bias) {
  const double one = 1;
  const float expected = *(const float *)p.loss;
  const answer truth = naive(&p, x, weight, bias, &one);
  const int64_t size[3][4] = {{1, 1, p.rows, p.depth}, {1, 1, p.classes, p.depth}, {1, 1, 1, p.classes}};
  test_image grad[3];
  for (int i = 0; i < 3; ++i) grad[i] = test_output(CAMOX_F32, 0, 0, size[i]);
  p.backward = 0, p.grad = NULL;
  p.grad_x = grad[0].buffer, p.grad_weight = grad[1].buffer, p.grad_bias = grad[2].buffer;
  run(&p, isa);
  TEST(memcmp(p.loss, &expected, sizeof expected) == 0, "%s: loss %g with gradients, %g without", camox_isa_name(isa),
       *(const float *)p.loss, expected);
  double *const right[3] = {truth.x, truth.weight, truth.bias};
  for (int i = 0; i < 3; ++i) {
    double error, allowed;
    TEST(test_close_within(32, &grad[i], right[i], &error, &allowed),
         "%s %s (%d,%d,%d) gradient %d made in the forward off by %g, allowed %g", camox_isa_name(isa),
         test_dtype_names[p.dtype], (int)p.rows, (int)p.depth, (int)p.classes, i, error, allowed);
    test_free(&grad[i]);
  }
  free(truth.loss), free(truth.x), free(truth.weight), free(truth.bias), free(truth.top), free(truth.log);
}

static void test_case(camox_isa isa, camox_dtype dtype, problem size, int options) {
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  camox_linear_cross_entropy_params p = {.dtype = dtype, .rows = size.rows, .depth = size.depth, .classes = size.classes};
  p.reduction = (camox_loss_reduction)(options % 3), p.smoothing = options / 3 % 2 ? 0.25 : 0, p.threads = 1 + options % 4;
  p.ignore_index = -100;
  const test_layout layout = options % 2 ? TEST_STRIDED : TEST_CONTIGUOUS;
  const int64_t of_x[4] = {1, 1, size.rows, size.depth}, of_weight[4] = {1, 1, size.classes, size.depth};
  const int64_t of_bias[4] = {1, 1, 1, size.classes}, of_rows[4] = {1, 1, 1, size.rows};
  const int64_t of_loss[4] = {1, 1, 1, p.reduction == CAMOX_LOSS_NONE ? size.rows : 1};
  test_image x = test_input(dtype, layout, of_x), weight = test_input(dtype, layout, of_weight);
  test_image bias = test_input(real, TEST_CONTIGUOUS, of_bias), grad = test_input(real, TEST_CONTIGUOUS, of_loss);
  test_image top = test_output(real, 0, 0, of_rows), log = test_output(real, 0, 0, of_rows),
             loss = test_output(real, 0, 0, of_loss);
  test_image grad_x = test_output(dtype, 0, 0, of_x), grad_weight = test_output(dtype, 0, 0, of_weight);
  test_image grad_bias = test_output(real, 0, 0, of_bias);
  int64_t *target = calloc((size_t)size.rows, sizeof *target);
  if (target == NULL) abort();
  for (int64_t i = 0; i < size.rows; ++i) target[i] = i % 3 == 1 ? -100 : i * 7 % size.classes;
  p.x = x.buffer, p.weight = weight.buffer, p.target = target, p.top = top.buffer, p.log = log.buffer, p.loss = loss.buffer,
  p.grad = grad.buffer;
  for (int d = 0; d < 2; ++d) p.x_stride[d] = x.view.stride[2 + d], p.weight_stride[d] = weight.view.stride[2 + d];
  if (options & 1) p.bias = bias.buffer;
  double *xs = test_values(&x, 0), *ws = test_values(&weight, 0), *bs = test_values(&bias, 0), *gs = test_values(&grad, 0);
  answer truth = naive(&p, xs, ws, p.bias ? bs : NULL, gs);
  TEST(camox_linear_cross_entropy_check(&p, "op") == CAMOX_OK, "%s", camox_last_error());
  TEST(camox_linear_cross_entropy_check_targets(&p, "op") == CAMOX_OK, "%s", camox_last_error());
  run(&p, isa);
  p.backward = 1, p.grad_x = grad_x.buffer, p.grad_weight = grad_weight.buffer, p.grad_bias = grad_bias.buffer;
  run(&p, isa);
  if (dtype != CAMOX_F64 && p.reduction != CAMOX_LOSS_NONE) test_forward_with_gradients(isa, p, xs, ws, p.bias ? bs : NULL);
  const struct {
    const char *name;
    test_image *ours;
    double *truth;
  } results[] = {{"loss", &loss, truth.loss},
                 {"top", &top, truth.top},
                 {"log", &log, truth.log},
                 {"grad_x", &grad_x, truth.x},
                 {"grad_weight", &grad_weight, truth.weight},
                 {"grad_bias", &grad_bias, truth.bias}};
  for (size_t i = 0; i < sizeof results / sizeof *results; ++i) {
    double error, allowed;
    /* The sum of exp is 1 at least, and rounded: its logarithm may be off by that however small it is itself. */
    const double of_sum = results[i].ours == &log ? 2 * (real == CAMOX_F64 ? DBL_EPSILON : FLT_EPSILON) : 0;
    TEST(test_close_within(32, results[i].ours, results[i].truth, &error, &allowed) || error <= of_sum,
         "%s %s (%d,%d,%d) options %d: %s off by %g, allowed %g", camox_isa_name(isa), test_dtype_names[dtype], (int)size.rows,
         (int)size.depth, (int)size.classes, options, results[i].name, error, allowed);
  }
  target[0] = size.classes;
  TEST(camox_linear_cross_entropy_check_targets(&p, "op") == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), "in row 0"),
       "%s", camox_last_error());
  test_image *const every[] = {&x, &weight, &bias, &grad, &top, &log, &loss, &grad_x, &grad_weight, &grad_bias};
  for (size_t i = 0; i < sizeof every / sizeof *every; ++i) test_free(every[i]);
  free(xs), free(ws), free(bs), free(gs), free(target);
  free(truth.loss), free(truth.x), free(truth.weight), free(truth.bias), free(truth.top), free(truth.log);
}

static void refused(const camox_linear_cross_entropy_params *p, const char *message) {
  int status = camox_linear_cross_entropy_check(p, "linear_cross_entropy");
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  const camox_linear_cross_entropy_params good = {.rows = 2, .depth = 3, .classes = 4};
  camox_linear_cross_entropy_params p = good;
  TEST(camox_linear_cross_entropy_check(&p, "op") == CAMOX_OK, "%s", camox_last_error());
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, "dtype code"), p = good;
  p.reduction = (camox_loss_reduction)3, refused(&p, "unknown reduction code 3"), p = good;
  p.smoothing = NAN, refused(&p, "label_smoothing must be in [0, 1], got nan"), p = good;
  p.smoothing = -1, refused(&p, "label_smoothing must be in [0, 1], got -1"), p = good;
  p.classes = -1, refused(&p, "negative size");
}

int main(void) {
  static const problem sizes[] = {{1, 1, 1}, {5, 7, 9}, {3, 400, 33}, {257, 9, 40}, {7, 16, 513}, {150, 3, 2100}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("linear_cross_entropy: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
        for (int options = 0; options < 6; ++options) test_case((camox_isa)isa, (camox_dtype)dtype, sizes[i], options);
  }
  return test_report("linear_cross_entropy");
}
