/* grad_norms against a plain loop: every kernel of this machine, sizes around vectors, sums, pieces and work items. */
#include "../../csrc/grad_norms/grad_norms.h"
#include "../../csrc/grad_norms/grad_norms_plan.h"
#include "camox_test.h"

enum { GRADS = 12, GROUPS = 5 };
static const int64_t sizes[GRADS] = {1, 7, 31, 32, 33, 64, 8191, 8192, 8193, 70001, 0, 5};

typedef struct {
  camox_grad grads[GRADS];
  camox_grad_norms_params p;
  camox_grad_piece *piece;
  int64_t *item;
} test_list;

/* A buffer of exactly its size, whose ends AddressSanitizer guards. */
static void *allocated(size_t bytes) {
  void *buffer = malloc(bytes);
  if (buffer == NULL) abort();
  return buffer;
}

/* Gradients of all dtypes by turns, or of one. */
static test_list make_list(int dtype) {
  test_list list = {0};
  for (int i = 0; i < GRADS; ++i) {
    const camox_dtype own = (camox_dtype)(dtype < CAMOX_DTYPE_COUNT ? dtype : i % CAMOX_DTYPE_COUNT);
    void *data = allocated((size_t)sizes[i] * test_size[own]);
    for (int64_t k = 0; k < sizes[i]; ++k) test_set(own, data, k, test_random(8));
    list.grads[i] = (camox_grad){data, sizes[i], i % 3 + 1, 0.5 + i % 4 * 0.25, (3 * i) % (GROUPS - 1), own};
  }
  return list;
}

/* The list's addresses are final when this is called. */
static void plan_list(test_list *list) {
  camox_grad_norms_params *p = &list->p;
  p->count = GRADS, p->groups = GROUPS, p->grads = list->grads;
  TEST(camox_grad_norms_check(p, "grad_group_norms") == CAMOX_OK, "%s", camox_last_error());
  p->pieces = camox_grad_norms_pieces(p);
  list->piece = allocated((size_t)p->pieces * sizeof *list->piece);
  list->item = allocated((size_t)(p->pieces + 1) * sizeof *list->item);
  p->items = camox_grad_norms_plan(p, list->piece, list->item);
  p->piece = list->piece, p->item = list->item;
  TEST(p->items > 1 && list->item[0] == 0 && list->item[p->items] == p->pieces, "%d items", (int)p->items);
}

static void free_list(test_list *list) {
  for (int i = 0; i < GRADS; ++i) free(list->grads[i].data);
  free(list->piece), free(list->item);
}

static void test_norms(int dtype, camox_group_reduce reduce, camox_dtype of_norms) {
  test_list list = make_list(dtype);
  camox_grad_norms_params *p = &list.p;
  plan_list(&list);
  double truth[GROUPS] = {0}, sum[GROUPS], wide[GROUPS];
  float narrow[GROUPS];
  for (int i = 0; i < GRADS; ++i) {
    long double squares = 0;
    for (int64_t k = 0; k < sizes[i]; ++k) {
      const long double x = test_get(list.grads[i].dtype, list.grads[i].data, k);
      squares += x * x;
    }
    squares *= list.grads[i].repeats;
    truth[list.grads[i].group] += (double)(reduce == CAMOX_GROUP_L2 ? squares : sqrtl(squares));
  }
  p->reduce = reduce, p->norms_dtype = of_norms;
  p->norms = of_norms == CAMOX_F64 ? (void *)wide : (void *)narrow;
  p->partial = allocated((size_t)p->pieces * sizeof *p->partial);
  camox_grad_norms_sums(p, 0, p->items / 2);
  camox_grad_norms_sums(p, p->items / 2, p->items);
  p->squares = allocated(GRADS * sizeof *p->squares);
  camox_grad_norms_gather(p);
  for (int i = 0; i < GRADS; ++i)
    TEST(camox_grad_norms_of_run(&list.grads[i]) == p->squares[i], "gradient %d: not the sum of its pieces", i);
  camox_grad_norms_finish(p, sum);
  for (int k = 0; k < GROUPS; ++k) {
    const double expected = reduce == CAMOX_GROUP_L2 ? sqrt(truth[k]) : truth[k];
    const double ours = of_norms == CAMOX_F64 ? wide[k] : (double)narrow[k];
    TEST(fabs(ours - expected) <= (of_norms == CAMOX_F64 ? 1e-13 : 1e-7) * expected,
         "%s %s reduce %d group %d: %.17g, not %.17g", camox_isa_name(camox_isa_current()),
         dtype < CAMOX_DTYPE_COUNT ? test_dtype_names[dtype] : "mixed", (int)reduce, k, ours, expected);
  }
  free(p->partial), free(p->squares);
  free_list(&list);
}

static void test_every_element(camox_dtype dtype, camox_isa isa) {
  for (int i = 0; i < GRADS; ++i) {
    const int64_t n = sizes[i] < 9000 ? sizes[i] : 9000;
    void *x = allocated((size_t)n * test_size[dtype]);
    long double squares = 0;
    double off = 0;
    for (int64_t k = 0; k < n; ++k) {
      test_set(dtype, x, k, test_random(8));
      squares += (long double)test_get(dtype, x, k) * test_get(dtype, x, k);
    }
    const double ours = camox_grad_norms_squares(dtype, isa)(x, n, 2048);
    const double tolerance = dtype == CAMOX_F64 ? 1e-13 : 0x1p-22; /* eight squares are added in float32 */
    TEST(fabs(ours - (double)squares) <= tolerance * (double)squares, "%s %s %d: %.17g, not %.17g", camox_isa_name(isa),
         test_dtype_names[dtype], (int)n, ours, (double)squares);
    void *before = allocated((size_t)n * test_size[dtype]);
    if (n > 0) memcpy(before, x, (size_t)n * test_size[dtype]);
    camox_grad_norms_scale(dtype, isa)(x, n, 1.75);
    for (int64_t k = 0; k < n; ++k) {
      const double error = fabs(test_get(dtype, x, k) - 1.75 * test_get(dtype, before, k));
      off = fmax(off, error);
    }
    TEST(off <= 1.75 * test_epsilon[dtype], "%s %s %d: scaled numbers are off by %g", camox_isa_name(isa),
         test_dtype_names[dtype], (int)n, off);
    free(x), free(before);
  }
}

static void test_scaled_list(void) {
  test_list list = make_list(CAMOX_F64), same = {0};
  plan_list(&list);
  for (int i = 0; i < GRADS; ++i) {
    same.grads[i].data = allocated((size_t)sizes[i] * 8);
    if (sizes[i] > 0) memcpy(same.grads[i].data, list.grads[i].data, (size_t)sizes[i] * 8);
  }
  camox_scale_grads(&list.p, list.p.items / 2, list.p.items);
  camox_scale_grads(&list.p, 0, list.p.items / 2);
  for (int i = 0; i < GRADS; ++i)
    for (int64_t k = 0; k < sizes[i]; ++k)
      TEST(((double *)list.grads[i].data)[k] == ((double *)same.grads[i].data)[k] * list.grads[i].factor,
           "gradient %d, element %d", i, (int)k);
  free_list(&list), free_list(&same);
}

static void refused(const camox_grad_norms_params *p, const char *message) {
  const int status = camox_grad_norms_check(p, "grad_group_norms");
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  camox_grad grads[2] = {{.elements = 3, .group = 1}, {.elements = 2, .group = 0}};
  const camox_grad_norms_params good = {.count = 2, .groups = 2, .grads = grads};
  camox_grad_norms_params p = good;
  TEST(camox_grad_norms_check(&p, "grad_group_norms") == CAMOX_OK, "%s", camox_last_error());
  p.reduce = (camox_group_reduce)2, refused(&p, "unknown reduce code 2"), p = good;
  p.groups = -1, refused(&p, "num_groups must be >= 0, got -1"), p = good;
  p.groups = 1, refused(&p, "groups[0] must be in [0, 1), got 1"), p = good;
  grads[1].group = -1, refused(&p, "groups[1] must be in [0, 2), got -1"), grads[1].group = 0;
  grads[1].dtype = CAMOX_DTYPE_COUNT, refused(&p, "dtype code"), grads[1].dtype = CAMOX_F32;
  grads[0].elements = -1, refused(&p, "negative size");
}

int main(void) {
  test_checks_refuse();
  test_scaled_list();
  for (int dtype = 0; dtype <= CAMOX_DTYPE_COUNT; ++dtype)
    for (int reduce = 0; reduce < 2; ++reduce)
      for (int wide = 0; wide < 2; ++wide) test_norms(dtype, (camox_group_reduce)reduce, wide ? CAMOX_F64 : CAMOX_F32);
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("grad_norms: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype) test_every_element((camox_dtype)dtype, (camox_isa)isa);
  }
  return test_report("grad_norms");
}
