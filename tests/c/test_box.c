/* box against a plain loop over each window: every kernel of this machine, kinds, layouts, windows up to and beyond the image.
 */
#include "../../csrc/box/box.h"
#include "camox_test.h"

static int64_t inside(int64_t at, int64_t window, int64_t side) {
  int64_t count = 0;
  for (int64_t i = at - window / 2; i <= at + window / 2; ++i) count += i >= 0 && i < side;
  return count;
}

static double naive(const camox_box_params *p, const double *plane, int64_t y, int64_t x) {
  const int64_t h = p->window_height / 2, w = p->window_width / 2;
  double sum = 0, all = (double)p->window_height * (double)p->window_width;
  for (int64_t row = y - h; row <= y + h; ++row)
    for (int64_t column = x - w; column <= x + w; ++column) {
      if (row < 0 || row >= p->height || column < 0 || column >= p->width) continue;
      double value = plane[row * p->width + column];
      if (p->kind == CAMOX_BOX_COUNTED_ADJOINT)
        value /= (double)(inside(row, p->window_height, p->height) * inside(column, p->window_width, p->width));
      sum += value;
    }
  if (p->kind == CAMOX_BOX_COUNTED_ADJOINT) return sum;
  if (p->kind == CAMOX_BOX_COUNTED)
    all = (double)(inside(y, p->window_height, p->height) * inside(x, p->window_width, p->width));
  if (p->kind == CAMOX_BOX_STRUCTURE_WEIGHT) return 1 + p->gain * fabs(sum / all - plane[y * p->width + x]);
  return sum / all;
}

/* size: of the image. Of x, of y or of neither the middle alone is there. */
typedef enum { WHOLE, MIDDLE_OF_X, MIDDLE_OF_Y } middle;

/* Planes of the image from those of x, with zeros around. */
static double *with_zeros_around(const test_image *x, const camox_box_params *p) {
  double *inner = test_values(x, 0);
  double *values = calloc((size_t)(p->batch * p->channels * p->height * p->width) + 1, sizeof *values);
  const int64_t rows = x->size[2], columns = x->size[3];
  for (int64_t i = 0; i < p->batch * p->channels * rows * columns; ++i) {
    const int64_t plane = i / (rows * columns), y = i / columns % rows + p->x_margin[0], x_at = i % columns + p->x_margin[1];
    values[(plane * p->height + y) * p->width + x_at] = inner[i];
  }
  free(inner);
  return values;
}

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, camox_box_kind kind, const int64_t size[4],
                      const int64_t window[2], middle there) {
  const int channels_last = layout == TEST_CHANNELS_LAST, gaps = kind == CAMOX_BOX_COUNTED;
  camox_box_params p = {.dtype = dtype, .kind = kind, .channels_last = channels_last, .gain = 5};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  p.window_height = window[0], p.window_width = window[1];
  int64_t x_size[4], y_size[4];
  memcpy(x_size, size, sizeof x_size), memcpy(y_size, size, sizeof y_size);
  for (int side = 0; side < 2 && there != WHOLE; ++side) {
    const int64_t margin = (size[2 + side] - 1) / (side == 0 ? 4 : 3);
    if (there == MIDDLE_OF_X) p.x_margin[side] = margin, x_size[2 + side] -= 2 * margin;
    if (there == MIDDLE_OF_Y) p.y_margin[side] = margin, y_size[2 + side] -= 2 * margin;
  }
  test_image x = test_input(dtype, layout, x_size), y = test_output(dtype, channels_last, gaps, y_size);
  double *values = with_zeros_around(&x, &p), *truth = test_values(&y, 1), error, allowed;
  for (int64_t i = 0; i < p.batch * p.channels * y_size[2] * y_size[3]; ++i) {
    const int64_t plane = i / (y_size[2] * y_size[3]), row = i / y_size[3] % y_size[2], column = i % y_size[3];
    truth[i] = naive(&p, values + plane * p.height * p.width, row + p.y_margin[0], column + p.y_margin[1]);
  }
  p.x = x.view, p.y = y.view;
  char what[160];
  snprintf(what, sizeof what, "%s %s %s kind %d (%d,%d,%d,%d) window (%d,%d) middle %d", camox_isa_name(isa),
           test_dtype_names[dtype], test_layout_names[layout], (int)kind, (int)size[0], (int)size[1], (int)size[2],
           (int)size[3], (int)window[0], (int)window[1], (int)there);
  TEST(camox_box_check(&p, "box_mean") == CAMOX_OK, "%s: %s", what, camox_last_error());
  TEST_RUN(camox_box_forward(dtype, isa), camox_box_params, &p, camox_box_items(&p), 2, camox_box_scratch(&p));
  TEST(test_close_within(16, &y, truth, &error, &allowed), "%s: off by %g, allowed %g", what, error, allowed);
  TEST(test_untouched(&y), "%s: written outside its pixels", what);
  test_free(&x), test_free(&y);
  free(values), free(truth);
}

static void refused(const camox_box_params *p, const char *message) {
  int status = camox_box_check(p, "box_mean");
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  float pixels[24];
  const camox_view4 planes = {pixels, {24, 12, 4, 1}}, rows_apart = {pixels, {24, 12, 8, 2}};
  const camox_box_params good = {
      .batch = 1, .channels = 2, .height = 3, .width = 4, .window_height = 3, .window_width = 5, .x = planes, .y = planes};
  camox_box_params p = good;
  TEST(camox_box_check(&p, "box_mean") == CAMOX_OK, "%s", camox_last_error());
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, "dtype code"), p = good;
  p.kind = (camox_box_kind)4, refused(&p, "box_mean: unknown kind code 4"), p = good;
  p.width = -1, refused(&p, "negative size"), p = good;
  p.window_height = 4, refused(&p, "size must be odd and > 0, got (4, 5)"), p = good;
  p.window_width = -3, refused(&p, "size must be odd and > 0, got (3, -3)"), p = good;
  p.gain = NAN, refused(&p, "gain must be finite, got nan"), p = good;
  p.y = rows_apart, refused(&p, "y cannot be written"), p = good;
  p.y.data = NULL, refused(&p, "y has no memory"), p = good;
  p.y_margin[0] = 2, refused(&p, "margins (2, 0) of y, the image is (3, 4)"), p = good;
  p.x_margin[1] = -1, refused(&p, "margins (0, -1) of x"), p = good;
  p.kind = CAMOX_BOX_STRUCTURE_WEIGHT, p.x_margin[0] = 1, refused(&p, "margins (1, 0) of x");
}

int main(void) {
  static const int64_t sizes[][4] = {{1, 1, 1, 1},   {2, 3, 5, 7},   {1, 2, 9, 33}, {1, 21, 6, 17},
                                     {1, 1, 70, 20}, {1, 2, 131, 9}, {0, 2, 3, 4},  {2, 0, 3, 4}};
  static const int64_t windows[][2] = {{1, 1}, {3, 3}, {1, 7}, {5, 1}, {31, 11}, {9, 75}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("box: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (int kind = 0; kind <= CAMOX_BOX_STRUCTURE_WEIGHT; ++kind)
          for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
            for (size_t k = 0; k < sizeof windows / sizeof *windows; ++k)
              for (int there = WHOLE; there <= (kind == CAMOX_BOX_STRUCTURE_WEIGHT ? WHOLE : MIDDLE_OF_Y); ++there)
                test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, (camox_box_kind)kind, sizes[i], windows[k],
                          (middle)there);
  }
  return test_report("box");
}
