/* Philox against Random123's known answers; dropout, sparse_gate and dropout_add_layer_norm against plain double loops: every
   kernel of this machine, layouts, sizes around vectors, blocks of masks, tiles and chunks. */
#include "../../csrc/common/philox.h"
#include "../../csrc/dropout/dropout.h"
#include "camox_test.h"

static const double probability = 0.3;
static const int64_t seed = 0x0123456789abcdef;

static void test_philox(void) {
  static const struct {
    int rounds;
    uint32_t counter[4], key[2], words[4];
  } known[] = {
      {7, {0}, {0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {7,
       {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {7,
       {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
      {10, {0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {10,
       {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {10,
       {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    camox_philox_words words;
    memcpy(words.word, known[i].counter, sizeof words.word);
    words = camox_philox(words, known[i].key[0], known[i].key[1], known[i].rounds);
    TEST(memcmp(words.word, known[i].words, sizeof words.word) == 0, "philox, vector %d: %08x %08x %08x %08x", (int)i,
         words.word[0], words.word[1], words.word[2], words.word[3]);
  }
}

/* The factor of an element. */
static double factor(int64_t index, int dropping) {
  if (!dropping) return 1;
  uint32_t threshold = camox_dropout_threshold(probability);
  uint32_t bits = camox_philox_bits(camox_philox_group((uint64_t)seed, (uint64_t)index / 8), (int)(index % 8));
  return bits >= threshold ? camox_dropout_scale(threshold) : 0;
}

static camox_dropout_view view_of(const test_image *p) {
  camox_dropout_view view = {.data = p->view.data};
  memcpy(view.stride, p->view.stride, sizeof p->view.stride);
  return view;
}

static void run(camox_dropout_kernel *kernel, const camox_dropout_params *p) {
  int64_t items = camox_dropout_items(p);
  kernel(p, 0, items / 2);
  kernel(p, items / 2, items);
}

static void compare(const test_image *ours, const double *truth, const char *what, const char *which) {
  double error, allowed;
  TEST(test_close(ours, truth, &error, &allowed), "%s: %s off by %g, allowed %g", what, which, error, allowed);
  TEST(test_untouched(ours), "%s: %s written outside its elements", what, which);
}

static void test_elements(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], int dropping) {
  camox_dropout_params p = {.dtype = dtype, .dims = 4, .p = probability, .seed = dropping ? &seed : NULL};
  memcpy(p.size, size, sizeof p.size[0] * 4);
  test_image in[3], out[4];
  double *values[3], *truth[4];
  int64_t elements = size[0] * size[1] * size[2] * size[3];
  for (int i = 0; i < 3; ++i) {
    in[i] = test_input(dtype, i == 1 ? TEST_STRIDED : layout, size);
    values[i] = test_values(&in[i], 0);
    p.view[CAMOX_DROPOUT_X + i] = view_of(&in[i]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = test_output(dtype, layout == TEST_CHANNELS_LAST, i == 2, size);
    truth[i] = test_values(&out[i], 1);
  }
  for (int64_t i = 0; i < elements; ++i) {
    double f = factor(i, dropping), x = values[0][i], y = values[1][i], g = values[2][i] * f;
    truth[0][i] = x * f, truth[1][i] = x > 0 && y > 0 ? x * y * f : 0;
    truth[2][i] = x > 0 && y > 0 ? g * y : 0, truth[3][i] = x > 0 && y > 0 ? g * x : 0;
  }
  char what[160];
  snprintf(what, sizeof what, "%s %s %s (%d,%d,%d,%d)%s", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)size[0], (int)size[1], (int)size[2], (int)size[3], dropping ? "" : " all kept");
  TEST(camox_dropout_check(&p, "dropout") == CAMOX_OK, "%s: %s", what, camox_last_error());

  camox_dropout_params plain = p;
  plain.view[CAMOX_DROPOUT_Y].data = plain.view[CAMOX_DROPOUT_GRAD].data = NULL;
  plain.view[CAMOX_DROPOUT_OUT] = view_of(&out[0]);
  run(camox_dropout(dtype, isa), &plain);
  camox_dropout_params gate = p;
  gate.view[CAMOX_DROPOUT_GRAD].data = NULL;
  gate.view[CAMOX_DROPOUT_OUT] = view_of(&out[1]);
  run(camox_sparse_gate(dtype, isa), &gate);
  p.view[CAMOX_DROPOUT_OUT] = view_of(&out[2]);
  p.view[CAMOX_DROPOUT_OUT_Y] = view_of(&out[3]);
  run(camox_sparse_gate_backward(dtype, isa), &p);

  static const char *const names[4] = {"dropout", "gate", "grad_x", "grad_y"};
  for (int i = 0; i < 4; ++i) {
    compare(&out[i], truth[i], what, names[i]);
    test_free(&out[i]), free(truth[i]);
  }
  for (int i = 0; i < 3; ++i) test_free(&in[i]), free(values[i]);
}

/* A (rows, width) input or output in a buffer of exactly its size. */
static test_image matrix(camox_dtype dtype, int64_t rows, int64_t width, int input) {
  const int64_t size[4] = {1, 1, rows, width};
  return input ? test_input(dtype, TEST_CONTIGUOUS, size) : test_output(dtype, 0, 0, size);
}

static void test_norm(camox_isa isa, camox_dtype dtype, int64_t rows, int64_t width, int dropping) {
  camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  enum { X, RESIDUAL, GRAD, WEIGHT, BIAS, INPUTS };
  enum { Y, GRAD_X, GRAD_RESIDUAL, GRAD_WEIGHT, GRAD_BIAS, OUTPUTS };
  int half_weights = dropping && test_is_half(dtype);
  test_image in[INPUTS], out[OUTPUTS], stats = matrix(real, 2, rows, 0), partial;
  double *value[INPUTS], *truth[OUTPUTS];
  for (int i = 0; i < INPUTS; ++i) {
    in[i] = i < WEIGHT ? matrix(dtype, rows, width, 1) : matrix(real, 1, width, 1);
    value[i] = test_values(&in[i], 0);
  }
  for (int i = 0; i < OUTPUTS; ++i) {
    out[i] = i < GRAD_WEIGHT ? matrix(dtype, rows, width, 0) : matrix(half_weights ? dtype : real, 1, width, 0);
    truth[i] = test_values(&out[i], 1);
  }
  camox_dropout_norm_params p = {.dtype = dtype, .p = probability, .eps = 1e-2, .seed = dropping ? &seed : NULL};
  p.rows = rows, p.width = width, p.half_weights = half_weights;
  p.x = in[X].view.data, p.residual = in[RESIDUAL].view.data, p.grad = in[GRAD].view.data;
  p.weight = (camox_dropout_affine){in[WEIGHT].view.data, width, 1};
  p.bias = (camox_dropout_affine){in[BIAS].view.data, width, 1};
  p.y = out[Y].view.data, p.stats = stats.view.data;
  p.grad_x = out[GRAD_X].view.data, p.grad_residual = out[GRAD_RESIDUAL].view.data;
  p.grad_weight = out[GRAD_WEIGHT].view.data, p.grad_bias = out[GRAD_BIAS].view.data;
  int64_t items = camox_dropout_norm_items(&p);
  partial = matrix(real, 2 * items, width, 0);
  p.partial = partial.view.data;

  for (int64_t r = 0; r < rows; ++r) {
    long double mean = 0, variance = 0, d_mean = 0, dz_mean = 0;
    long double *z = calloc((size_t)width + 1, sizeof *z);
    if (z == NULL) abort();
    for (int64_t i = 0; i < width; ++i) {
      int64_t at = r * width + i;
      z[i] = value[RESIDUAL][at] + value[X][at] * factor(at, dropping);
      mean += z[i] / width;
    }
    for (int64_t i = 0; i < width; ++i) variance += (z[i] - mean) * (z[i] - mean) / width;
    long double scale = 1 / sqrtl(variance + p.eps);
    for (int64_t i = 0; i < width; ++i) {
      long double g = value[GRAD][r * width + i], d = g * value[WEIGHT][i];
      z[i] = (z[i] - mean) * scale;
      truth[Y][r * width + i] = (double)(z[i] * value[WEIGHT][i] + value[BIAS][i]);
      truth[GRAD_WEIGHT][i] += (double)(g * z[i]), truth[GRAD_BIAS][i] += (double)g;
      d_mean += d / width, dz_mean += d * z[i] / width;
    }
    for (int64_t i = 0; i < width; ++i) {
      int64_t at = r * width + i;
      double g = (double)((value[GRAD][at] * value[WEIGHT][i] - d_mean - z[i] * dz_mean) * scale);
      truth[GRAD_RESIDUAL][at] = g, truth[GRAD_X][at] = g * factor(at, dropping);
    }
    free(z);
  }
  char what[160];
  snprintf(what, sizeof what, "norm %s %s (%d,%d)%s", camox_isa_name(isa), test_dtype_names[dtype], (int)rows, (int)width,
           dropping ? "" : " all kept");
  TEST(camox_dropout_norm_check(&p, 0) == CAMOX_OK, "%s: %s", what, camox_last_error());
  camox_dropout_norm(dtype, isa)(&p, 0, items / 2);
  camox_dropout_norm(dtype, isa)(&p, items / 2, items);
  camox_dropout_norm_backward(dtype, isa)(&p, items / 2, items);
  camox_dropout_norm_backward(dtype, isa)(&p, 0, items / 2);
  camox_dropout_norm_reduce(dtype, isa)(&p, 0, width / 3);
  camox_dropout_norm_reduce(dtype, isa)(&p, width / 3, width);
  static const char *const names[OUTPUTS] = {"y", "grad_x", "grad_residual", "grad_weight", "grad_bias"};
  for (int i = 0; i < OUTPUTS; ++i) {
    compare(&out[i], truth[i], what, names[i]);
    test_free(&out[i]), free(truth[i]);
  }
  for (int i = 0; i < INPUTS; ++i) test_free(&in[i]), free(value[i]);
  test_free(&stats), test_free(&partial);
}

static void expect(int status, const char *message) {
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  camox_dropout_params good = {.dtype = CAMOX_F32, .dims = 1, .p = 0.5, .size = {3}}, bad = good;
  TEST(camox_dropout_check(&good, "dropout") == CAMOX_OK, "%s", camox_last_error());
  static const double wrong[] = {1, -0.1, NAN, INFINITY};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    bad = good, bad.p = wrong[i];
    expect(camox_dropout_check(&bad, "sparse_gate"), "sparse_gate: p must be in [0, 1)");
  }
  bad = good, bad.dims = 17;
  expect(camox_dropout_check(&bad, "dropout"), "at most 16 dimensions, got 17");
  bad = good, bad.size[0] = -1;
  expect(camox_dropout_check(&bad, "dropout"), "negative size -1");
  bad = good, bad.dtype = CAMOX_DTYPE_COUNT;
  expect(camox_dropout_check(&bad, "dropout"), "dtype code");

  float weight[4];
  camox_dropout_affine four = {weight, 4, 1};
  camox_dropout_norm_params right = {.dtype = CAMOX_F32, .p = 0.5, .eps = 1e-5, .rows = 2, .width = 4}, norm;
  right.weight = right.bias = four;
  TEST(camox_dropout_norm_check(&right, 0) == CAMOX_OK, "%s", camox_last_error());
  norm = right, norm.p = 1;
  expect(camox_dropout_norm_check(&norm, 0), "p must be in [0, 1)");
  norm = right, norm.eps = 0;
  expect(camox_dropout_norm_check(&norm, 0), "eps must be > 0");
  norm = right, norm.rows = -1;
  expect(camox_dropout_norm_check(&norm, 0), "negative size");
  norm = right, norm.weight.length = 3;
  expect(camox_dropout_norm_check(&norm, 1), "weight must have one element per column");
  norm = right, norm.bias.stride = 2;
  expect(camox_dropout_norm_check(&norm, 0), "bias must be contiguous");
  TEST(camox_dropout_norm_check(&norm, 1) == CAMOX_OK, "the backward has no bias: %s", camox_last_error());
}

int main(void) {
  /* one element; around 8, 16 and 64; rows of a tile and a bit; more than one item; empty */
  static const int64_t sizes[][4] = {{1, 1, 1, 1},   {1, 1, 1, 9},   {2, 3, 2, 2},    {1, 2, 5, 7},    {1, 1, 1, 64},
                                     {1, 5, 1, 131}, {2, 3, 16, 17}, {1, 2, 3, 259},  {1, 1, 9, 2053}, {1, 130, 2, 3},
                                     {0, 3, 4, 4},   {2, 3, 0, 4},   {1, 3, 35, 300}, {1, 1, 1, 20011}};
  static const int64_t rows[][2] = {{1, 1},    {5, 7},    {3, 16},   {300, 33}, {130, 96},
                                    {2, 4095}, {3, 4097}, {1, 9001}, {0, 5},    {2, 0}};
  test_philox();
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("dropout: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int dropping = 0; dropping < 2; ++dropping) {
        for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
          for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
            test_elements((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], dropping);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i)
          test_norm((camox_isa)isa, (camox_dtype)dtype, rows[i][0], rows[i][1], dropping);
      }
  }
  return test_report("dropout");
}
