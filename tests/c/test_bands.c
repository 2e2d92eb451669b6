/* frequency_bands against a plain double loop: every kernel of this machine, layouts and sizes around tiles and vectors. */
#include "../../csrc/bands/bands.h"
#include "camox_test.h"

/* to[H*W] += scale * box filter of from[H*W], zeros outside counted. */
static void add_box(const camox_bands_params *p, double *to, const double *from, int reach, double scale) {
  double share = scale / ((2 * reach + 1) * (2 * reach + 1));
  for (int64_t row = 0; row < p->height; ++row)
    for (int64_t column = 0; column < p->width; ++column)
      for (int64_t y = row - reach; y <= row + reach; ++y)
        for (int64_t x = column - reach; x <= column + reach; ++x)
          if (y >= 0 && y < p->height && x >= 0 && x < p->width) to[row * p->width + column] += share * from[y * p->width + x];
}

static void add(const camox_bands_params *p, double *to, const double *from) {
  for (int64_t i = 0; i < p->height * p->width; ++i) to[i] += from[i];
}

/* Four maps of the plane x[H*W], and what the incoming gradients (each may be NULL) add to grad_x. */
static void naive_plane(const camox_bands_params *p, const double *x, double *const maps[4], double *const incoming[4],
                        double *grad_x) {
  static const double box3[4] = {1, 1, -1, 0}, box5[4] = {0, -1, 0, 0};
  for (int map = 0; map < 4; ++map) {
    add_box(p, maps[map], x, 1, box3[map]), add_box(p, maps[map], x, 2, box5[map]);
    if (map >= CAMOX_BANDS_HIGH) add(p, maps[map], x);
    if (incoming[map] == NULL) continue;
    add_box(p, grad_x, incoming[map], 1, box3[map]), add_box(p, grad_x, incoming[map], 2, box5[map]);
    if (map >= CAMOX_BANDS_HIGH) add(p, grad_x, incoming[map]);
  }
}

static void run(camox_bands_kernel *kernel, const camox_bands_params *p, int pieces) {
  TEST_RUN(kernel, camox_bands_params, p, camox_bands_items(p), pieces, CAMOX_STENCIL_SCRATCH);
}

/* given: a bit for each incoming gradient that is there; with bit CAMOX_BANDS_INPUT the forward also copies x. */
static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], unsigned given) {
  int channels_last = layout == TEST_CHANNELS_LAST, gaps = given == 0xf;
  camox_bands_params p = {.dtype = dtype, .channels_last = channels_last};
  p.batch = size[0], p.channels = size[1], p.height = size[2], p.width = size[3];
  test_image x = test_input(dtype, layout, size), maps[4], gradients[4];
  test_image grad_x = test_output(dtype, channels_last, gaps, size);
  double *values = test_values(&x, 0), *truth[4], *incoming[4], *truth_x = test_values(&x, 1);
  p.x = x.view;
  for (int map = 0; map < 4; ++map) {
    maps[map] = test_output(dtype, channels_last, gaps, size);
    gradients[map] = test_input(dtype, layout, size);
    truth[map] = test_values(&x, 1);
    incoming[map] = given >> map & 1 ? test_values(&gradients[map], 0) : NULL;
    if (map != CAMOX_BANDS_INPUT || given >> map & 1) p.bands[map] = maps[map].view;
  }
  for (int64_t plane = 0; plane < p.batch * p.channels; ++plane) {
    int64_t at = plane * p.height * p.width;
    double *of_maps[4], *of_incoming[4];
    for (int map = 0; map < 4; ++map)
      of_maps[map] = truth[map] + at, of_incoming[map] = incoming[map] ? incoming[map] + at : NULL;
    naive_plane(&p, values + at, of_maps, of_incoming, truth_x + at);
  }

  char what[160];
  snprintf(what, sizeof what, "%s %s %s (%d,%d,%d,%d) given %x", camox_isa_name(isa), test_dtype_names[dtype],
           test_layout_names[layout], (int)size[0], (int)size[1], (int)size[2], (int)size[3], given);
  double error, allowed;
  TEST(camox_bands_check(&p, 0) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_bands_forward(dtype, isa), &p, 1 + (int)(given & 1));
  for (int map = 0; map < 4; ++map) {
    if (p.bands[map].data)
      TEST(test_close(&maps[map], truth[map], &error, &allowed), "%s: map %d off by %g, allowed %g", what, map, error, allowed);
    TEST(test_untouched(&maps[map]), "%s: map %d written outside its pixels", what, map);
    p.bands[map] = given >> map & 1 ? gradients[map].view : (camox_view4){0};
  }
  p.grad_x = grad_x.view;
  TEST(camox_bands_check(&p, 1) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_bands_backward(dtype, isa), &p, 1 + (int)(given & 1));
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
  camox_bands_params good = {.dtype = CAMOX_F32, .batch = 1, .channels = 2, .height = 3, .width = 4};
  good.bands[0] = good.bands[1] = good.bands[2] = good.grad_x = planes;
  TEST(camox_bands_check(&good, 0) == CAMOX_OK && camox_bands_check(&good, 1) == CAMOX_OK, "%s", camox_last_error());
  enum { BAD = 7 };
  struct {
    const char *message;
    int backward;
    camox_bands_params p;
  } bad[BAD] = {{.message = "dtype code"},          {.message = "negative size"},
                {.message = "low cannot"},          {.message = "mid must have the strides"},
                {.message = "high has no memory"},  {.message = "grad_x cannot"},
                {.message = "grad_x has no memory"}};
  for (int i = 0; i < BAD; ++i) bad[i].p = good;
  bad[0].p.dtype = CAMOX_DTYPE_COUNT, bad[1].p.height = -1;
  bad[2].p.bands[0].stride[3] = 2, bad[3].p.bands[1].stride[2] = 5, bad[4].p.bands[2].data = NULL;
  bad[5].p.grad_x.stride[3] = 2, bad[6].p.grad_x.data = NULL;
  bad[5].backward = bad[6].backward = 1;
  for (int i = 0; i < BAD; ++i) {
    int status = camox_bands_check(&bad[i].p, bad[i].backward);
    TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), bad[i].message), "%s: got %d, %s", bad[i].message,
         status, camox_last_error());
  }
}

int main(void) {
  /* one pixel of many channels; around one vector; a plane of several items, items of several planes; as wide as flat items
     get, wider, wider than a row buffer; more channels and columns than a tile of channels_last holds; empty */
  static const int64_t sizes[][4] = {{1, 40, 1, 1},   {2, 3, 2, 2},    {1, 2, 5, 7},    {2, 1, 3, 17},   {1, 2, 9, 31},
                                     {1, 1, 150, 95}, {1, 1, 3, 513},  {1, 1, 2, 1027}, {1, 35, 70, 18}, {1, 67, 3, 18},
                                     {0, 3, 4, 4},    {2, 3, 0, 4},    {2, 60, 9, 9},   {1, 1, 70, 128}, {1, 2, 5, 129},
                                     {1, 1, 2, 2100}, {1, 131, 6, 40}, {1, 520, 2, 24}};
  static const unsigned given[] = {0xf, 0x7, 0x1, 0x2, 0x4};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("bands: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
          size_t some = sizes[i][2] * sizes[i][3] > 200 ? 2 : sizeof given / sizeof *given;
          for (size_t g = 0; g < some; ++g)
            test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], given[g]);
        }
  }
  return test_report("bands");
}
