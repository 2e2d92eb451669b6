/* The C test of an op of one image (csrc/common/image_op.h): every kernel of this machine against a plain double loop, in every
   layout and border and at sizes around tiles. Included by test_<op>.c after it has defined

     OP                                               the op's name
     static double formula(const double w[3][3], double number, double d[3][3])
                                                      the output of the nine pixels w[row][column], its derivatives in d */
#include "camox_test.h"

#define NAME_(op, verb) camox_##op##verb
#define NAME(op, verb) NAME_(op, verb)
#define TEXT_(op) #op
#define TEXT(op) TEXT_(op)

/* y of the plane x[H*W], and grad_x of the gradient of y. */
static void naive_plane(const camox_image_params *p, const double *x, const double *grad, double *y, double *grad_x) {
  for (int64_t row = 0; row < p->height; ++row)
    for (int64_t column = 0; column < p->width; ++column) {
      double w[3][3], d[3][3];
      int64_t source[3][3], here = row * p->width + column;
      for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {
          int64_t r = camox_border_index(row + i - 1, p->height, p->border);
          int64_t c = camox_border_index(column + j - 1, p->width, p->border);
          source[i][j] = r < 0 || c < 0 ? -1 : r * p->width + c;
          w[i][j] = source[i][j] < 0 ? 0 : x[source[i][j]];
        }
      y[here] = formula(w, p->number, d);
      for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j)
          if (source[i][j] >= 0) grad_x[source[i][j]] += grad[here] * d[i][j];
    }
}

/* All work items, in as many pieces as threads would take. */
static void run(camox_image_kernel *kernel, const camox_image_params *p, int pieces) {
  TEST_RUN(kernel, camox_image_params, p, camox_image_items(p), pieces, CAMOX_STENCIL_SCRATCH);
}

static void expect(const char *what, const test_image *ours, const double *truth, const char *name) {
  double error, allowed;
  TEST(test_close(ours, truth, &error, &allowed), "%s: %s off by %g, allowed %g", what, name, error, allowed);
  TEST(test_untouched(ours), "%s: %s written outside its pixels", what, name);
}

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, camox_border border, const int64_t size[4],
                      int gaps) {
  int channels_last = layout == TEST_CHANNELS_LAST;
  camox_image_params p = {.dtype = dtype, .border = border, .channels_last = channels_last, .number = 0.5};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  test_image x = test_input(dtype, layout, size), grad = test_input(dtype, layout, size);
  test_image y = test_output(dtype, channels_last, gaps, size), grad_x = test_output(dtype, channels_last, gaps, size);
  double *pixels = test_values(&x, 0), *incoming = test_values(&grad, 0);
  double *truth = test_values(&x, 1), *truth_x = test_values(&x, 1);
  for (int64_t plane = 0, n = p.height * p.width; plane < p.batch * p.channels; ++plane)
    naive_plane(&p, pixels + plane * n, incoming + plane * n, truth + plane * n, truth_x + plane * n);

  char what[160];
  snprintf(what, sizeof what, "%s %s %s border %d (%d,%d,%d,%d)", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)border, (int)size[0], (int)size[1], (int)size[2], (int)size[3]);
  p.x = x.view, p.y = y.view;
  TEST(NAME(OP, _check)(&p, 0) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(NAME(OP, _forward)(dtype, isa), &p, 1 + gaps);
  expect(what, &y, truth, "y");
  p.y = grad.view, p.grad_x = grad_x.view;
  TEST(NAME(OP, _check)(&p, 1) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(NAME(OP, _backward)(dtype, isa), &p, 1 + gaps);
  expect(what, &grad_x, truth_x, "grad_x");

  test_free(&x), test_free(&grad), test_free(&y), test_free(&grad_x);
  free(pixels), free(incoming), free(truth), free(truth_x);
}

static void test_checks_refuse(void) {
  float memory[24];
  camox_view4 planes = {memory, {24, 12, 4, 1}};
  camox_image_params good = {.dtype = CAMOX_F32, .number = 0.5, .batch = 1, .channels = 2, .height = 3, .width = 4};
  good.x = good.y = good.grad_x = planes;
  TEST(NAME(OP, _check)(&good, 0) == CAMOX_OK && NAME(OP, _check)(&good, 1) == CAMOX_OK, "%s", camox_last_error());
  enum { BAD = 7 };
  struct {
    const char *message;
    camox_image_params p;
  } bad[BAD] = {{.message = "dtype code"}, {.message = "negative size"},   {.message = "border code"},  {.message = "reflect"},
                {.message = "y cannot"},   {.message = "y has no memory"}, {.message = "grad_x cannot"}};
  for (int i = 0; i < BAD; ++i) bad[i].p = good;
  bad[0].p.dtype = CAMOX_DTYPE_COUNT, bad[1].p.height = -1, bad[2].p.border = (camox_border)3;
  bad[3].p.border = CAMOX_BORDER_REFLECT, bad[3].p.width = 1;
  bad[4].p.y.stride[3] = 2, bad[5].p.y.data = NULL, bad[6].p.grad_x.stride[3] = 2;
  for (int i = 0; i < BAD; ++i) {
    int status = NAME(OP, _check)(&bad[i].p, i == 6);
    TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), bad[i].message), "%s: got %d, %s", bad[i].message,
         status, camox_last_error());
  }
}

int main(void) {
  /* one pixel; around one vector; a plane of several tiles; wider than a flat row and than a tile; channels of one tile and of
     two; several tiles of columns; a last one of one column; empty */
  static const int64_t sizes[][4] = {{1, 1, 1, 1},    {2, 3, 2, 2},   {1, 2, 5, 7},    {1, 2, 9, 31},
                                     {1, 1, 150, 95}, {1, 1, 3, 513}, {1, 1, 2, 1601}, {1, 35, 70, 18},
                                     {1, 8, 5, 33},   {1, 3, 5, 513}, {1, 32, 2, 49},  {1, 200, 3, 17},
                                     {1, 520, 2, 24}, {1, 8, 33, 9},  {0, 3, 4, 4},    {2, 3, 0, 4}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf(TEXT(OP) ": %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (int border = 0; border < 3; ++border)
          for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            if (border == CAMOX_BORDER_REFLECT && (sizes[i][2] == 1 || sizes[i][3] == 1)) continue;
            for (int gaps = 0; gaps < 2; ++gaps)
              test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, (camox_border)border, sizes[i], gaps);
          }
  }
  return test_report(TEXT(OP));
}
