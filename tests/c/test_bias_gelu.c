/* bias_gelu against a plain double loop: every kernel of this machine, dropout, sizes around vectors, pieces and work items. */
#include "../../csrc/bias_gelu/bias_gelu.h"
#include "../../csrc/common/philox.h"
#include "camox_test.h"

static double factor_of(const camox_bias_gelu_params *p, int64_t element) {
  if (!p->seed) return 1;
  const uint32_t threshold = camox_dropout_threshold(p->p);
  const camox_philox_words words = camox_philox_group((uint64_t)*p->seed, (uint64_t)element / CAMOX_PHILOX_ELEMENTS);
  return camox_philox_bits(words, (int)(element % CAMOX_PHILOX_ELEMENTS)) < threshold ? 0 : camox_dropout_scale(threshold);
}

static void naive(const camox_bias_gelu_params *p, const test_image *x, const test_image *bias, const test_image *grad,
                  double *y, double *grad_x, double *grad_bias) {
  for (int64_t row = 0; row < p->rows; ++row)
    for (int64_t column = 0; column < p->columns; ++column) {
      const int64_t at = row * p->columns + column;
      const double u = test_at(x, 0, 0, row, column) + test_at(bias, 0, 0, 0, column), phi = 0.5 * erfc(-u * M_SQRT1_2);
      const double derivative = phi + u * exp(-0.5 * u * u) / sqrt(2 * M_PI);
      y[at] = factor_of(p, at) * u * phi;
      grad_x[at] = factor_of(p, at) * test_at(grad, 0, 0, row, column) * derivative;
      grad_bias[column] += grad_x[at];
    }
}

static void test_case(camox_isa isa, camox_dtype dtype, int64_t rows, int64_t columns, int dropped) {
  static const int64_t seed = -77;
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  const int64_t size[4] = {1, 1, rows, columns}, row[4] = {1, 1, 1, columns};
  camox_bias_gelu_params p = {.dtype = dtype, .p = 0.3, .rows = rows, .columns = columns, .bias_length = columns};
  p.bias_stride = 1, p.seed = dropped ? &seed : NULL;
  p.half_bias = dropped && test_is_half(dtype);
  const int64_t items = camox_bias_gelu_items(&p), shares[4] = {1, 1, items, columns};
  test_image x = test_input(dtype, TEST_CONTIGUOUS, size), grad = test_input(dtype, TEST_CONTIGUOUS, size);
  test_image bias = test_input(real, TEST_CONTIGUOUS, row), y = test_output(dtype, 0, 0, size);
  test_image grad_x = test_output(dtype, 0, 0, size), grad_bias = test_output(p.half_bias ? dtype : real, 0, 0, row);
  test_image partial = test_output(real, 0, 0, shares);
  p.x = x.view.data, p.bias = bias.view.data, p.y = y.view.data, p.grad = grad.view.data;
  p.grad_x = grad_x.view.data, p.partial = partial.view.data, p.grad_bias = grad_bias.view.data;
  test_image *const outputs[] = {&y, &grad_x, &grad_bias}, *const all[] = {&x, &grad, &bias, &y, &grad_x, &grad_bias, &partial};
  double *truth[3], error, allowed;
  for (int i = 0; i < 3; ++i) truth[i] = test_values(outputs[i], 1);
  naive(&p, &x, &bias, &grad, truth[0], truth[1], truth[2]);
  TEST(camox_bias_gelu_check(&p) == CAMOX_OK, "%s", camox_last_error());
  camox_bias_gelu_forward(dtype, isa)(&p, 0, items / 2);
  camox_bias_gelu_forward(dtype, isa)(&p, items / 2, items);
  camox_bias_gelu_backward(dtype, isa)(&p, 0, items);
  camox_bias_gelu_reduce(dtype, isa)(&p, 0, columns / 2);
  camox_bias_gelu_reduce(dtype, isa)(&p, columns / 2, columns);
  for (int i = 0; i < 3; ++i) {
    TEST(test_close(outputs[i], truth[i], &error, &allowed), "%s %s (%d,%d) dropped %d: output %d off by %g, allowed %g",
         camox_isa_name(isa), test_dtype_names[dtype], (int)rows, (int)columns, dropped, i, error, allowed);
    free(truth[i]);
  }
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

static void refused(const camox_bias_gelu_params *p, const char *message) {
  int status = camox_bias_gelu_check(p);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  const camox_bias_gelu_params good = {.rows = 2, .columns = 3, .bias_length = 3, .bias_stride = 1};
  camox_bias_gelu_params p = good;
  TEST(camox_bias_gelu_check(&p) == CAMOX_OK, "%s", camox_last_error());
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, "dtype code"), p = good;
  p.p = 1, refused(&p, "p must be in [0, 1), got 1"), p = good;
  p.rows = -1, refused(&p, "negative size"), p = good;
  p.bias_length = 4, refused(&p, "one element per column of x, 3, got 4"), p = good;
  p.bias_stride = 2, refused(&p, "contiguous, got stride 2");
}

int main(void) {
  static const int64_t sizes[][2] = {{1, 1}, {5, 7}, {70, 16}, {3, 33}, {40, 130}, {2, 1024}, {2, 1100}, {0, 4}, {4, 0}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("bias_gelu: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
        for (int dropped = 0; dropped < 2; ++dropped)
          test_case((camox_isa)isa, (camox_dtype)dtype, sizes[i][0], sizes[i][1], dropped);
  }
  return test_report("bias_gelu");
}
