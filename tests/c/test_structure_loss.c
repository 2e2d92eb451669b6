/* structure_loss against a plain double loop: every kernel of this machine, options, sizes around vectors and work items. */
#include "../../csrc/structure_loss/structure_loss.h"
#include "camox_test.h"

/* In long double: sums of thousands of doubles are no truth for another order of them. */
typedef struct {
  long double loss, bce, weight, inter, total;
} image_sums;

static image_sums naive_image(const camox_structure_loss_params *p, const double *z, const double *m, const double *w) {
  image_sums s = {0};
  for (int64_t i = 0; i < p->pixels; ++i) {
    const double q = p->probabilities ? z[i] : 1 / (1 + exp(-z[i]));
    const double bce = -m[i] * fmax(log(q), -100) - (1 - m[i]) * fmax(log(1 - q), -100);
    s.bce += p->bce == CAMOX_BCE_WEIGHTED ? w[i] * bce : bce;
    s.weight += w[i], s.inter += q * m[i] * w[i], s.total += (q + m[i]) * w[i];
  }
  s.loss = 1 - (s.inter + p->smooth) / (s.total - s.inter + p->smooth);
  if (p->bce == CAMOX_BCE_WEIGHTED) s.loss += s.bce / s.weight;
  return s;
}

static void test_case(camox_isa isa, camox_dtype dtype, int half_mask, int64_t images, int64_t pixels, int options) {
  const camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, of_mask = half_mask ? dtype : real;
  camox_structure_loss_params p = {.dtype = dtype, .images = images, .pixels = pixels, .smooth = 0.5};
  p.half_mask = half_mask;
  p.bce = options & 1 ? CAMOX_BCE_MEAN : CAMOX_BCE_WEIGHTED, p.probabilities = options >> 1 & 1;
  p.reduction = (camox_reduction)(options >> 2);
  const int64_t items = camox_structure_loss_items(&p), numbers = p.reduction == CAMOX_REDUCE_NONE ? images : 1;
  const int64_t size[4] = {1, 1, images, pixels}, share[4] = {1, 1, items, CAMOX_STRUCTURE_PARTIAL};
  const int64_t sum[4] = {1, 1, images, CAMOX_STRUCTURE_SUMS}, number[4] = {1, 1, 1, numbers};
  test_image z = test_input(dtype, TEST_CONTIGUOUS, size), m = test_input(of_mask, TEST_CONTIGUOUS, size);
  test_image w = test_input(of_mask, TEST_CONTIGUOUS, size), grad = test_input(real, TEST_CONTIGUOUS, number);
  TEST_EACH(&z, b, c, y, x) {
    const int64_t at = test_offset(&z, b, c, y, x);
    if (p.probabilities) test_set(dtype, z.buffer, at, fabs(test_get(dtype, z.buffer, at)) / 2 + 0.25);
    test_set(of_mask, m.buffer, at, fabs(test_get(of_mask, m.buffer, at)));
    test_set(of_mask, w.buffer, at, 2 + test_get(of_mask, w.buffer, at));
  }
  test_image partial = test_output(real, 0, 0, share), sums = test_output(real, 0, 0, sum);
  test_image loss = test_output(real, 0, 0, number), grad_logits = test_output(dtype, 0, 0, size);
  double *zs = test_values(&z, 0), *ms = test_values(&m, 0), *ws = test_values(&w, 0), *gs = test_values(&grad, 0);
  double *truth = test_values(&loss, 1), *truth_grad = test_values(&z, 1), of_grads = 0, error, allowed;
  double largest = 0, terms = 0; /* of a gradient, and of what it is the sum of, which may nearly cancel */
  long double batch = 0;
  image_sums *all = calloc((size_t)images + 1, sizeof *all);
  if (all == NULL) abort();
  for (int64_t i = 0; i < images; ++i)
    all[i] = naive_image(&p, zs + i * pixels, ms + i * pixels, ws + i * pixels), batch += all[i].bce;
  for (int64_t i = 0; i < images; ++i) {
    const double g = p.reduction == CAMOX_REDUCE_NONE  ? gs[i]
                     : p.reduction == CAMOX_REDUCE_SUM ? gs[0]
                                                       : gs[0] / (double)images;
    const double of_image = (double)(all[i].loss + (p.bce == CAMOX_BCE_MEAN ? batch / (double)(images * pixels) : 0));
    of_grads += g;
    truth[p.reduction == CAMOX_REDUCE_NONE ? i : 0] += p.reduction == CAMOX_REDUCE_MEAN ? of_image / (double)images : of_image;
  }
  for (int64_t i = 0; i < images; ++i)
    for (int64_t k = i * pixels; k < (i + 1) * pixels; ++k) {
      const double g = p.reduction == CAMOX_REDUCE_NONE  ? gs[i]
                       : p.reduction == CAMOX_REDUCE_SUM ? gs[0]
                                                         : gs[0] / (double)images;
      const double q = p.probabilities ? zs[k] : 1 / (1 + exp(-zs[k])), slope = p.probabilities ? 1 : q * (1 - q);
      const double below = (double)(all[i].total - all[i].inter) + p.smooth, above = (double)all[i].inter + p.smooth;
      const double bce = p.bce == CAMOX_BCE_MEAN ? of_grads / (double)(images * pixels) : g * ws[k] / (double)all[i].weight;
      const double of_bce = bce * (q - ms[k]) / (p.probabilities ? q * (1 - q) : 1);
      const double iou = g * ws[k] * slope, up = above * (1 - ms[k]) / (below * below), down = ms[k] / below;
      truth_grad[k] = of_bce + iou * (up - down);
      largest = fmax(largest, fabs(truth_grad[k])), terms = fmax(terms, fabs(of_bce) + fabs(iou) * (up + down));
    }
  p.logits = z.buffer, p.mask = m.buffer, p.weight = w.buffer, p.partial = partial.buffer, p.sums = sums.buffer;
  p.loss = loss.buffer, p.grad = grad.buffer, p.grad_logits = grad_logits.buffer;
  char what[120];
  snprintf(what, sizeof what, "%s %s%s (%d,%d) options %d", camox_isa_name(isa), test_dtype_names[dtype],
           half_mask ? " half mask" : "", (int)images, (int)pixels, options);
  TEST(camox_structure_loss_check(&p, "structure_loss") == CAMOX_OK, "%s: %s", what, camox_last_error());
  camox_structure_loss_forward(dtype, isa)(&p, 0, items / 2);
  camox_structure_loss_forward(dtype, isa)(&p, items / 2, items);
  TEST(camox_structure_loss_check_mask(&p) == CAMOX_OK, "%s: %s", what, camox_last_error());
  camox_structure_loss_finish(dtype, isa)(&p, 0, 1);
  camox_structure_loss_backward(dtype, isa)(&p, 0, items);
  TEST(test_close(&loss, truth, &error, &allowed), "%s: loss off by %g, allowed %g", what, error, allowed);
  const double steps = largest > 0 ? 16 * terms / largest : 16;
  TEST(test_close_within(steps, &grad_logits, truth_grad, &error, &allowed), "%s: gradient off by %g, allowed %g", what, error,
       allowed);
  test_set(of_mask, m.buffer, images * pixels - 1, 1.5);
  camox_structure_loss_forward(dtype, isa)(&p, 0, items);
  TEST(camox_structure_loss_check_mask(&p) == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), "in [0, 1], got 1.5"),
       "%s: %s", what, camox_last_error());
  test_image *const every[] = {&z, &m, &w, &grad, &partial, &sums, &loss, &grad_logits};
  for (size_t i = 0; i < sizeof every / sizeof *every; ++i) test_free(every[i]);
  free(zs), free(ms), free(ws), free(gs), free(truth), free(truth_grad), free(all);
}

static void refused(const camox_structure_loss_params *p, const char *message) {
  int status = camox_structure_loss_check(p, "structure_loss");
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  const camox_structure_loss_params good = {.images = 2, .pixels = 3, .smooth = 1};
  camox_structure_loss_params p = good;
  TEST(camox_structure_loss_check(&p, "structure_loss") == CAMOX_OK, "%s", camox_last_error());
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, "dtype code"), p = good;
  p.bce = (camox_bce)2, refused(&p, "unknown bce code 2"), p = good;
  p.reduction = (camox_reduction)3, refused(&p, "unknown reduction code 3"), p = good;
  p.smooth = NAN, refused(&p, "smooth must be >= 0 and finite, got nan"), p = good;
  p.pixels = -1, refused(&p, "negative size");
}

int main(void) {
  static const int64_t sizes[][2] = {{1, 1}, {3, 7}, {2, 33}, {1, 600}, {2, 8192}, {1, 8193}, {3, 9000}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("structure_loss: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
        for (int options = 0; options < 12; ++options)
          for (int half_mask = 0; half_mask <= (dtype == CAMOX_BF16 || dtype == CAMOX_F16); ++half_mask)
            test_case((camox_isa)isa, (camox_dtype)dtype, half_mask, sizes[i][0], sizes[i][1], options);
  }
  return test_report("structure_loss");
}
