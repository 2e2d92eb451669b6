/* spatial_gradient against a plain double loop: every kernel of this machine, layouts, borders and sizes around tiles. */
#include "../../csrc/spatial_gradient/spatial_gradient.h"
#include "camox_test.h"

/* Index of the pixel that a tap at (y, x) reads within its plane, -1 where it reads the border's zero. */
static int64_t tap(const camox_spatial_gradient_params *p, int64_t y, int64_t x) {
  y = camox_border_index(y, p->height, p->border), x = camox_border_index(x, p->width, p->border);
  return y < 0 || x < 0 ? -1 : y * p->width + x;
}

/* gx and gy of the plane x[H*W], and what the incoming gradients (each may be NULL) add to grad_x. */
static void naive_plane(const camox_spatial_gradient_params *p, const double *x, double *const maps[2],
                        double *const incoming[2], double *grad_x) {
  const double weight[3] = {p->side, p->middle, p->side};
  for (int64_t row = 0; row < p->height; ++row)
    for (int64_t column = 0; column < p->width; ++column)
      for (int k = 0; k < 9; ++k) {
        int64_t here = row * p->width + column, source = tap(p, row + k / 3 - 1, column + k % 3 - 1);
        if (source < 0) continue;
        double of_maps[2] = {(k % 3 - 1) * weight[k / 3], (k / 3 - 1) * weight[k % 3]};
        for (int map = 0; map < 2; ++map) {
          maps[map][here] += of_maps[map] * x[source];
          if (incoming[map]) grad_x[source] += of_maps[map] * incoming[map][here];
        }
      }
}

static void run(camox_spatial_gradient_kernel *kernel, const camox_spatial_gradient_params *p, int pieces) {
  TEST_RUN(kernel, camox_spatial_gradient_params, p, camox_spatial_gradient_items(p), pieces, CAMOX_STENCIL_SCRATCH);
}

/* given: a bit for each incoming gradient that is there. */
static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, camox_border border, const int64_t size[4],
                      unsigned given) {
  int channels_last = layout == TEST_CHANNELS_LAST, gaps = given == 3;
  camox_spatial_gradient_params p = {.dtype = dtype, .border = border, .channels_last = channels_last, .side = 3, .middle = 10};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  test_image x = test_input(dtype, layout, size), maps[2], gradients[2];
  test_image grad_x = test_output(dtype, channels_last, gaps, size);
  double *values = test_values(&x, 0), *truth[2], *incoming[2], *truth_x = test_values(&x, 1);
  p.x = x.view;
  for (int map = 0; map < 2; ++map) {
    maps[map] = test_output(dtype, channels_last, gaps, size);
    gradients[map] = test_input(dtype, layout, size);
    truth[map] = test_values(&x, 1);
    incoming[map] = given >> map & 1 ? test_values(&gradients[map], 0) : NULL;
    p.gradient[map] = maps[map].view;
  }
  for (int64_t plane = 0; plane < p.batch * p.channels; ++plane) {
    int64_t at = plane * p.height * p.width;
    double *of_maps[2] = {truth[0] + at, truth[1] + at};
    double *of_incoming[2] = {incoming[0] ? incoming[0] + at : NULL, incoming[1] ? incoming[1] + at : NULL};
    naive_plane(&p, values + at, of_maps, of_incoming, truth_x + at);
  }

  char what[160];
  snprintf(what, sizeof what, "%s %s %s border %d (%d,%d,%d,%d) given %x", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)border, (int)size[0], (int)size[1], (int)size[2], (int)size[3], given);
  double error, allowed;
  TEST(camox_spatial_gradient_check(&p, 0) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_spatial_gradient_forward(dtype, isa), &p, (int)given);
  for (int map = 0; map < 2; ++map) {
    TEST(test_close(&maps[map], truth[map], &error, &allowed), "%s: map %d off by %g, allowed %g", what, map, error, allowed);
    TEST(test_untouched(&maps[map]), "%s: map %d written outside its pixels", what, map);
    p.gradient[map] = given >> map & 1 ? gradients[map].view : (camox_view4){0};
  }
  p.grad_x = grad_x.view;
  TEST(camox_spatial_gradient_check(&p, 1) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_spatial_gradient_backward(dtype, isa), &p, (int)given);
  TEST(test_close(&grad_x, truth_x, &error, &allowed), "%s: gradient off by %g, allowed %g", what, error, allowed);
  TEST(test_untouched(&grad_x), "%s: gradient written outside its pixels", what);

  for (int map = 0; map < 2; ++map) {
    test_free(&maps[map]), test_free(&gradients[map]);
    free(truth[map]), free(incoming[map]);
  }
  test_free(&x), test_free(&grad_x);
  free(values), free(truth_x);
}

static void test_checks_refuse(void) {
  float pixels[24];
  camox_view4 planes = {pixels, {24, 12, 4, 1}};
  camox_spatial_gradient_params good = {.dtype = CAMOX_F32, .side = 1, .middle = 2, .batch = 1, .channels = 2, .height = 3};
  good.width = 4;
  good.gradient[0] = good.gradient[1] = good.grad_x = planes;
  TEST(camox_spatial_gradient_check(&good, 0) == CAMOX_OK && camox_spatial_gradient_check(&good, 1) == CAMOX_OK, "%s",
       camox_last_error());
  enum { BAD = 8 };
  struct {
    const char *message;
    int backward;
    camox_spatial_gradient_params p;
  } bad[BAD] = {{.message = "dtype code"},       {.message = "negative size"}, {.message = "weights must be finite"},
                {.message = "border code"},      {.message = "reflect"},       {.message = "gx cannot"},
                {.message = "gy has no memory"}, {.message = "grad_x cannot"}};
  for (int i = 0; i < BAD; ++i) bad[i].p = good;
  bad[0].p.dtype = CAMOX_DTYPE_COUNT, bad[1].p.height = -1, bad[2].p.middle = NAN, bad[3].p.border = (camox_border)3;
  bad[4].p.border = CAMOX_BORDER_REFLECT, bad[4].p.width = 1;
  bad[5].p.gradient[0].stride[3] = 2, bad[6].p.gradient[1].data = NULL;
  bad[7].p.grad_x.stride[3] = 2, bad[7].backward = 1;
  for (int i = 0; i < BAD; ++i) {
    int status = camox_spatial_gradient_check(&bad[i].p, bad[i].backward);
    TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), bad[i].message), "%s: got %d, %s", bad[i].message,
         status, camox_last_error());
  }
}

int main(void) {
  /* one pixel; around one vector; a plane of several tiles; wider than a flat row and than a tile; channels of one tile and of
     two; several tiles of columns; a last one of one column; empty */
  static const int64_t sizes[][4] = {{1, 1, 1, 1},    {2, 3, 2, 2},   {1, 2, 5, 7},    {2, 1, 3, 17},   {1, 2, 9, 31},
                                     {1, 1, 150, 95}, {1, 1, 3, 513}, {1, 1, 2, 1027}, {1, 35, 70, 18}, {1, 67, 3, 18},
                                     {1, 8, 5, 33},   {1, 32, 2, 49}, {1, 200, 3, 17}, {1, 520, 2, 24}, {1, 8, 33, 9},
                                     {0, 3, 4, 4},    {2, 3, 0, 4}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("spatial_gradient: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (int border = 0; border < 3; ++border)
          for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            if (border == CAMOX_BORDER_REFLECT && (sizes[i][2] == 1 || sizes[i][3] == 1)) continue;
            for (unsigned given = sizes[i][2] * sizes[i][3] > 200 ? 3 : 1; given < 4; ++given)
              test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, (camox_border)border, sizes[i], given);
          }
  }
  return test_report("spatial_gradient");
}
