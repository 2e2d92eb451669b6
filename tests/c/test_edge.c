/* edge_maps against a plain double loop: every kernel of this machine, layouts, borders and sizes around tiles and vectors. */
#include "../../csrc/edge/edge.h"
#include "camox_test.h"

static const double sobel_kernel[9] = {-1, 0, 1, -2, 0, 2, -1, 0, 1};
static const double laplacian_kernel[9] = {0, 1, 0, 1, -4, 1, 0, 1, 0};

/* Index of the pixel that a tap at (y, x) reads within its plane, -1 where it reads the border's zero. */
static int64_t tap(const camox_edge_params *p, int64_t y, int64_t x) {
  int64_t at[2] = {y, x}, side[2] = {p->height, p->width};
  for (int d = 0; d < 2; ++d) {
    if (at[d] >= 0 && at[d] < side[d]) continue;
    if (p->border == CAMOX_BORDER_ZEROS) return -1;
    if (p->border == CAMOX_BORDER_REPLICATE) at[d] = at[d] < 0 ? 0 : side[d] - 1;
    if (p->border == CAMOX_BORDER_REFLECT) at[d] = at[d] < 0 ? 1 : side[d] - 2;
  }
  return at[0] * p->width + at[1];
}

/* Three maps of the plane x[H*W]; with gradients (each may be NULL) also the gradient of x, added to grad_x. */
static void naive_plane(const camox_edge_params *p, const double *x, double *const maps[4], double *const gradients[4],
                        double *grad_x) {
  for (int64_t row = 0; row < p->height; ++row)
    for (int64_t column = 0; column < p->width; ++column) {
      double gx = 0, gy = 0, lap = 0;
      int64_t here = row * p->width + column, source[9];
      for (int k = 0; k < 9; ++k) {
        source[k] = tap(p, row + k / 3 - 1, column + k % 3 - 1);
        double value = source[k] < 0 ? 0 : x[source[k]];
        gx += sobel_kernel[k] * value;
        gy += sobel_kernel[k % 3 * 3 + k / 3] * value;
        lap += laplacian_kernel[k] * value;
      }
      double sobel = sqrt(gx * gx + gy * gy + p->eps), gradient = sqrt(sobel * sobel + lap * lap + p->eps);
      maps[0][here] = sobel, maps[1][here] = fabs(lap), maps[2][here] = gradient, maps[3][here] = x[here];
      if (grad_x == NULL) continue;
      double incoming[4];
      for (int map = 0; map < 4; ++map) incoming[map] = gradients[map] ? gradients[map][here] : 0;
      double scale = incoming[0] / sobel + incoming[2] / gradient;
      double lap_scale = incoming[1] * ((lap > 0) - (lap < 0)) + incoming[2] / gradient * lap;
      for (int k = 0; k < 9; ++k)
        if (source[k] >= 0)
          grad_x[source[k]] +=
              scale * (gx * sobel_kernel[k] + gy * sobel_kernel[k % 3 * 3 + k / 3]) + lap_scale * laplacian_kernel[k];
      grad_x[here] += incoming[3];
    }
}

static double *dense(const test_image *p, const camox_edge_params *of) {
  double *values = calloc((size_t)(of->batch * of->channels * of->height * of->width) + 1, sizeof *values), *next = values;
  if (values == NULL) abort();
  if (p) TEST_EACH(p, b, c, y, x) *next++ = test_at(p, b, c, y, x);
  return values;
}

static void run(camox_edge_kernel *kernel, const camox_edge_params *p, int pieces) {
  TEST_RUN(kernel, camox_edge_params, p, camox_edge_items(p), pieces, CAMOX_STENCIL_SCRATCH);
}

/* given: a bit for each incoming gradient that is there; with bit CAMOX_EDGE_INPUT the forward also copies x. */
static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, camox_border border, const int64_t size[4],
                      unsigned given) {
  int channels_last = layout == TEST_CHANNELS_LAST, gaps = given == 0xf;
  camox_edge_params p = {.dtype = dtype, .border = border, .channels_last = channels_last, .eps = 0.01};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  test_image x = test_input(dtype, layout, size), maps[4], gradients[4];
  test_image grad_x = test_output(dtype, channels_last, gaps, size);
  double *values = dense(&x, &p), *truth[4], *incoming[4], *truth_x = dense(NULL, &p);
  p.x = x.view;
  for (int map = 0; map < 4; ++map) {
    maps[map] = test_output(dtype, channels_last, gaps, size);
    gradients[map] = test_input(dtype, layout, size);
    truth[map] = dense(NULL, &p);
    incoming[map] = given >> map & 1 ? dense(&gradients[map], &p) : NULL;
    if (map != CAMOX_EDGE_INPUT || given >> map & 1) p.maps[map] = maps[map].view;
  }
  char what[160];
  snprintf(what, sizeof what, "%s %s %s border %d (%d,%d,%d,%d) given %x", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)border, (int)size[0], (int)size[1], (int)size[2], (int)size[3], given);
  for (int64_t plane = 0; plane < p.batch * p.channels; ++plane) {
    int64_t at = plane * p.height * p.width;
    double *of_maps[4], *of_incoming[4];
    for (int map = 0; map < 4; ++map)
      of_maps[map] = truth[map] + at, of_incoming[map] = incoming[map] ? incoming[map] + at : NULL;
    naive_plane(&p, values + at, of_maps, of_incoming, truth_x + at);
  }

  double error, allowed;
  TEST(camox_edge_check(&p, 0) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_edge_forward(dtype, isa), &p, 1 + (int)(given & 1));
  for (int map = 0; map < 4; ++map) {
    if (p.maps[map].data)
      TEST(test_close(&maps[map], truth[map], &error, &allowed), "%s: map %d off by %g, allowed %g", what, map, error, allowed);
    TEST(test_untouched(&maps[map]), "%s: map %d written outside its pixels", what, map);
    p.maps[map] = given >> map & 1 ? gradients[map].view : (camox_view4){0};
  }
  p.grad_x = grad_x.view;
  TEST(camox_edge_check(&p, 1) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_edge_backward(dtype, isa), &p, 1 + (int)(given & 1));
  TEST(test_close(&grad_x, truth_x, &error, &allowed), "%s: gradient off by %g, allowed %g", what, error, allowed);
  TEST(test_untouched(&grad_x), "%s: gradient written outside its pixels", what);

  for (int map = 0; map < 4; ++map) {
    test_free(&maps[map]), test_free(&gradients[map]);
    free(truth[map]), free(incoming[map]);
  }
  test_free(&x), test_free(&grad_x);
  free(values), free(truth_x);
}

static void test_checks_refuse(void) {
  float pixels[24];
  camox_view4 planes = {pixels, {24, 12, 4, 1}};
  camox_edge_params good = {.dtype = CAMOX_F32, .eps = 1e-8, .batch = 1, .channels = 2, .height = 3, .width = 4};
  good.maps[0] = good.maps[1] = good.maps[2] = good.grad_x = planes;
  TEST(camox_edge_check(&good, 0) == CAMOX_OK && camox_edge_check(&good, 1) == CAMOX_OK, "%s", camox_last_error());
  enum { BAD = 11 };
  struct {
    const char *message;
    int backward;
    camox_edge_params p;
  } bad[BAD] = {{.message = "eps must be > 0"},  {.message = "eps must be > 0"},
                {.message = "eps must be > 0"},  {.message = "border code"},
                {.message = "dtype code"},       {.message = "negative size"},
                {.message = "reflect"},          {.message = "sobel cannot"},
                {.message = "laplacian cannot"}, {.message = "gradient has no memory"},
                {.message = "grad_x cannot"}};
  for (int i = 0; i < BAD; ++i) bad[i].p = good;
  bad[0].p.eps = 0, bad[1].p.eps = NAN, bad[2].p.eps = INFINITY;
  bad[3].p.border = (camox_border)3, bad[4].p.dtype = CAMOX_DTYPE_COUNT, bad[5].p.height = -1;
  bad[6].p.border = CAMOX_BORDER_REFLECT, bad[6].p.width = 1;
  bad[7].p.maps[0].stride[3] = 2, bad[8].p.maps[1].stride[2] = 5, bad[9].p.maps[2].data = NULL;
  bad[10].p.grad_x.stride[2] = 5, bad[10].backward = 1;
  for (int i = 0; i < BAD; ++i) {
    int status = camox_edge_check(&bad[i].p, bad[i].backward);
    TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), bad[i].message), "%s: got %d, %s", bad[i].message,
         status, camox_last_error());
  }
}

int main(void) {
  /* one pixel; around one vector; flat tiles of odd width; a plane of two tiles; wider than a flat row and than a tile;
     more channels than a tile holds; empty */
  static const int64_t sizes[][4] = {{1, 1, 1, 1},   {2, 3, 2, 2},    {1, 2, 5, 7},    {2, 1, 3, 17},
                                     {1, 2, 9, 31},  {1, 1, 66, 65},  {1, 1, 3, 513},  {1, 1, 2, 1027},
                                     {1, 67, 3, 18}, {1, 130, 2, 3},  {1, 520, 2, 24}, {1, 8, 33, 9},
                                     {1, 8, 5, 33},  {1, 200, 3, 17}, {0, 3, 4, 4},    {2, 3, 0, 4}};
  static const unsigned given[] = {0xf, 0x7, 0x1, 0x2, 0x4};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("edge: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (int border = 0; border < 3; ++border)
          for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            if (border == CAMOX_BORDER_REFLECT && (sizes[i][2] == 1 || sizes[i][3] == 1)) continue;
            size_t some = sizes[i][2] * sizes[i][3] > 200 ? 2 : sizeof given / sizeof *given;
            for (size_t g = 0; g < some; ++g)
              test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, (camox_border)border, sizes[i], given[g]);
          }
  }
  return test_report("edge");
}
