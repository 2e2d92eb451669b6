/* Products of matrices against a double loop: those of csrc/common/gemm.inc in cache, every form and instruction set, and those
 * of csrc/gemm in memory. Sizes lie around blocks of registers, vectors, chains of sums, panels and steps. */
#include "../../csrc/gemm/gemm.h"
#include "../../csrc/gemm/sgemm.h"
#include "../../csrc/common/kernel_table.h"
#include "camox_test.h"
#include "gemm_calls.h"

CAMOX_KERNEL_TABLE(gemm_call_fn, gemm_of, test_gemm)
#if defined(CAMOX_HAVE_X86)
extern gemm_call_fn test_gemm_pairs;
#endif

/* max|got - truth| against sums of at most a few hundred terms below 1; elements right of the diagonal only where not lower. */
static int close_enough(const test_image *got, const double *truth, int lower, double *error) {
  double largest = 0;
  const double *next = truth;
  *error = 0;
  TEST_EACH(got, b, c, i, j) {
    const double difference = fabs(test_at(got, b, c, i, j) - *next);
    if (!(lower && j > i) && !(difference <= *error)) *error = difference;
    if (fabs(*next) > largest) largest = fabs(*next);
    ++next;
  }
  return *error <= 16 * test_epsilon[got->dtype] * (largest + 1);
}

/* A matrix of random values on [-1, 1), strides in elements, in a buffer of its size that is aligned to vectors. */
static test_image matrix(camox_dtype dtype, int64_t rows, int64_t columns, int64_t row, int64_t column) {
  const int64_t size[4] = {1, 1, rows, columns}, stride[4] = {0, 0, row, column};
  test_image m = test_allocate(dtype, size, stride);
  void *aligned;
  if (posix_memalign(&aligned, 64, m.bytes ? m.bytes : 1)) abort();
  free(m.buffer), m.buffer = m.view.data = memset(aligned, 0xa5, m.bytes);
  TEST_EACH(&m, b, c, i, j) test_set(dtype, m.view.data, test_offset(&m, b, c, i, j), test_random(8));
  return m;
}

typedef struct {
  camox_isa isa;
  camox_dtype dtype;
  int64_t rows, columns, depth;
  int transposed; /* a is stored as its transpose */
  int gap;        /* elements between rows */
  int accumulate, scaled, non_temporal, lower;
} tile_case;

static int64_t padded(int64_t n, int64_t lanes) { return (n + lanes - 1) / lanes * lanes; }

static void describe(char what[160], const char *form, const tile_case *t) {
  snprintf(what, 160, "%s %s %s (%d,%d,%d) transposed %d gap %d accumulate %d scaled %d non_temporal %d lower %d",
           camox_isa_name(t->isa), form, test_dtype_names[t->dtype], (int)t->rows, (int)t->columns, (int)t->depth,
           t->transposed, t->gap, t->accumulate, t->scaled, t->non_temporal, t->lower);
}

/* gemm_nn and gemm_nt in `real`: rows of b, and of nt's a, are padded to whole vectors. */
static void test_real(gemm_form form, const tile_case *t) {
  gemm_call_fn *const call = gemm_of(t->dtype, t->isa);
  const int64_t lanes = call(NULL), nt = form == GEMM_FORM_NT;
  const int64_t columns = nt ? t->columns : padded(t->columns, lanes), depth = nt ? padded(t->depth, lanes) : t->depth;
  const int64_t gap = t->gap ? (t->non_temporal ? lanes : 3) : 0, transposed = t->transposed && !nt;
  test_image a =
      transposed ? matrix(t->dtype, t->rows, depth, 1, t->rows + gap) : matrix(t->dtype, t->rows, depth, depth + gap, 1);
  test_image b = nt ? matrix(t->dtype, columns, depth, depth + gap, 1) : matrix(t->dtype, depth, columns, columns + gap, 1);
  test_image c = matrix(t->dtype, t->rows, columns, columns + gap, 1), factors = matrix(t->dtype, 1, columns, columns, 1);
  const gemm_call what_to_do = {.form = form,
                                .c = c.view.data,
                                .c_row = columns + gap,
                                .a = {a.view.data, a.view.stride[2], a.view.stride[3]},
                                .b = {b.view.data, b.view.stride[2], 1},
                                .rows = t->rows,
                                .columns = columns,
                                .depth = depth,
                                .scale = t->scaled ? 0.375 : 1,
                                .accumulate = t->accumulate,
                                .lower = t->lower,
                                .non_temporal = t->non_temporal,
                                .column_scale = t->scaled && !nt ? factors.view.data : NULL};
  double *truth = test_values(&c, !t->accumulate), error;
  for (int64_t i = 0; i < t->rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += test_at(&a, 0, 0, i, k) * (nt ? test_at(&b, 0, 0, j, k) : test_at(&b, 0, 0, k, j));
      double *const to = truth + i * columns + j;
      *to = (*to + what_to_do.scale * sum) * (what_to_do.column_scale ? test_at(&factors, 0, 0, 0, j) : 1);
    }
  char what[160];
  describe(what, nt ? "nt" : "nn", t);
  call(&what_to_do);
  TEST(close_enough(&c, truth, t->lower, &error), "%s: off by %g", what, error);
  TEST(test_untouched(&c), "%s: written outside its elements", what);
  free(truth), test_free(&a), test_free(&b), test_free(&c), test_free(&factors);
}

/* gemm_lanes: matrix elements are vectors, columns of a or b may be rows in memory. */
static void test_lanes(const tile_case *t) {
  gemm_call_fn *const call = gemm_of(t->dtype, t->isa);
  const int64_t lanes = call(NULL), rows = t->rows, columns = t->columns, depth = t->depth;
  test_image a = matrix(t->dtype, rows * depth, lanes, lanes, 1), b = matrix(t->dtype, depth * columns, lanes, lanes, 1);
  test_image c = matrix(t->dtype, rows * columns, lanes, lanes, 1);
  const int64_t a_row = t->transposed ? 1 : depth, a_column = t->transposed ? rows : 1;
  const int64_t b_row = t->gap ? 1 : columns, b_column = t->gap ? depth : 1;
  const gemm_call what_to_do = {.form = GEMM_FORM_LANES,
                                .c = c.view.data,
                                .c_row = columns,
                                .a = {a.view.data, a_row, a_column},
                                .b = {b.view.data, b_row, b_column},
                                .rows = rows,
                                .columns = columns,
                                .depth = depth};
  double *truth = test_values(&c, 1), error;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t lane = 0; lane < lanes; ++lane)
          truth[(i * columns + j) * lanes + lane] +=
              test_at(&a, 0, 0, i * a_row + k * a_column, lane) * test_at(&b, 0, 0, k * b_row + j * b_column, lane);
  char what[160];
  describe(what, "lanes", t);
  call(&what_to_do);
  TEST(close_enough(&c, truth, 0, &error), "%s: off by %g", what, error);
  free(truth), test_free(&a), test_free(&b), test_free(&c);
}

#if defined(CAMOX_HAVE_X86)
/* gemm_nn of bfloat16 pairs: `depth` pairs along k; element 2 (k * columns + j) + h of b is b[2k + h, j]. */
static void test_pairs(const tile_case *t) {
  const int64_t columns = padded(t->columns, 16), rows = t->rows, depth = t->depth;
  test_image a = matrix(CAMOX_BF16, rows * depth, 2, 2, 1), b = matrix(CAMOX_BF16, depth * columns, 2, 2, 1);
  test_image c = matrix(CAMOX_F32, rows, columns, columns, 1), factors = matrix(CAMOX_F32, 1, columns, columns, 1);
  const int64_t a_row = t->transposed ? 1 : depth, a_column = t->transposed ? rows : 1;
  const gemm_call what_to_do = {.c = c.view.data,
                                .c_row = columns,
                                .a = {a.view.data, a_row, a_column},
                                .b = {b.view.data, columns, 1},
                                .rows = rows,
                                .columns = columns,
                                .depth = depth,
                                .scale = t->scaled ? 0.375 : 1,
                                .accumulate = t->accumulate,
                                .non_temporal = t->non_temporal,
                                .column_scale = t->scaled ? factors.view.data : NULL};
  double *truth = test_values(&c, !t->accumulate), error;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t half = 0; half < 2; ++half)
          sum += test_at(&a, 0, 0, i * a_row + k * a_column, half) * test_at(&b, 0, 0, k * columns + j, half);
      double *const to = truth + i * columns + j;
      *to = (*to + what_to_do.scale * sum) * (t->scaled ? test_at(&factors, 0, 0, 0, j) : 1);
    }
  char what[160];
  describe(what, "pairs", t);
  test_gemm_pairs(&what_to_do);
  TEST(close_enough(&c, truth, 0, &error), "%s: off by %g", what, error);
  free(truth), test_free(&a), test_free(&b), test_free(&c), test_free(&factors);
}
#endif

static void test_tiles(camox_isa isa, int has_bf16) {
  /* every number of rows and vectors of a block, and one more; depths around none, a vector and a chain */
  static const int64_t depths[] = {0, 1, 2, 15, 17, 63, 64, 65, 150};
  static const camox_dtype dtypes[] = {CAMOX_F32, CAMOX_F64};
  int round = 0;
  for (int64_t rows = 1; rows <= 18; rows += rows < 10 ? 1 : 4)
    for (int64_t columns = 1; columns <= 130; columns += columns < 10 ? 1 : 15, ++round)
      for (int d = 0; d < 2; ++d)
        for (int flags = 0; flags < 4; ++flags) {
          const int64_t depth = depths[(round + 2 * flags) % (int)(sizeof depths / sizeof *depths)];
          tile_case t = {isa, dtypes[d], rows, columns, depth, flags & 1, flags >> 1, (round + flags) & 1, (round + d) & 1,
                         0,   0};
          t.non_temporal = (round & 7) == 3;
          test_real(GEMM_FORM_NN, &t);
          if (has_bf16 && d == 0 && flags < 2) {
#if defined(CAMOX_HAVE_X86)
            test_pairs(&t);
#endif
          }
          t.non_temporal = 0, t.lower = flags >> 1;
          test_real(GEMM_FORM_NT, &t);
          t.lower = 0;
          if (rows < 8 && columns < 8) test_lanes(&t);
        }
  /* chains of gemm_nt, which are of vectors */
  for (int d = 0; d < 2; ++d) {
    const tile_case t = {isa, dtypes[d], 5, 7, 1100, 0, 1, 1, 0, 0, 0};
    test_real(GEMM_FORM_NT, &t);
  }
}

/* A product of size (H, M, N, K) with a or b stored as its transpose, by so many threads. */
static void test_product(const int64_t size[4], int a_transposed, int b_transposed, int64_t threads) {
  const int64_t heads = size[0], rows = size[1], columns = size[2], depth = size[3];
  const int64_t of_a[4] = {1, heads, a_transposed ? depth : rows, a_transposed ? rows : depth};
  const int64_t of_b[4] = {1, heads, b_transposed ? columns : depth, b_transposed ? depth : columns};
  const int64_t of_out[4] = {1, heads, rows, columns};
  test_image a = test_input(CAMOX_BF16, TEST_CONTIGUOUS, of_a), b = test_input(CAMOX_BF16, TEST_CONTIGUOUS, of_b);
  test_image out = test_output(CAMOX_BF16, 0, 0, of_out);
  camox_gemm_params p = {.dtype = CAMOX_BF16, .heads = heads, .rows = rows, .columns = columns, .depth = depth};
  p.a = a.view.data, p.b = b.view.data, p.out = out.view.data;
  p.a_stride[0] = rows * depth, p.a_stride[1] = a_transposed ? 1 : depth, p.a_stride[2] = a_transposed ? rows : 1;
  p.b_stride[0] = depth * columns, p.b_stride[1] = b_transposed ? 1 : columns, p.b_stride[2] = b_transposed ? depth : 1;
  p.out_stride[0] = rows * columns, p.out_stride[1] = columns;
  TEST(camox_gemm_check(&p) == CAMOX_OK, "product: %s", camox_last_error());
  camox_gemm_partition(&p, threads);
  p.scratch = malloc((size_t)(p.slots * camox_gemm_scratch(&p)) * sizeof(float));
  double *truth = test_values(&out, 1), error;
  if (p.scratch == NULL) abort();
  memset(p.scratch, 0xa5, (size_t)(p.slots * camox_gemm_scratch(&p)) * sizeof(float));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < depth; ++k) {
        const double factor = a_transposed ? test_at(&a, 0, h, k, i) : test_at(&a, 0, h, i, k);
        for (int64_t j = 0; j < columns; ++j)
          truth[(h * rows + i) * columns + j] += factor * (b_transposed ? test_at(&b, 0, h, j, k) : test_at(&b, 0, h, k, j));
      }
  camox_gemm(CAMOX_BF16)(&p, 0, p.slots);
  TEST(close_enough(&out, truth, 0, &error), "product (%d,%d,%d,%d) transposed %d %d: off by %g", (int)heads, (int)rows,
       (int)columns, (int)depth, a_transposed, b_transposed, error);
  TEST(test_untouched(&out), "product: written outside its elements");
  free(truth), free(p.scratch);
  test_free(&a), test_free(&b), test_free(&out);
}

static float *integers(int64_t count) {
  float *x = malloc((size_t)count * sizeof *x);
  for (int64_t i = 0; i < count; ++i) x[i] = (float)(int)(4 * test_random(8));
  return x;
}

typedef enum { NO_BIAS, COLUMN_BIAS, ROW_BIAS } sgemm_bias;

/* float32. Integers, so that sums are exact in any order; in two tiles, as two threads take them. */
static void test_sgemm(camox_isa isa, const int64_t *size, int transpose_x, int transpose_y, float beta, sgemm_bias which) {
  const int64_t rows = size[0], columns = size[1], depth = size[2];
  const camox_sgemm_shape s = {.rows = rows,
                               .columns = columns,
                               .depth = depth,
                               .alpha = 2,
                               .beta = beta,
                               .x_row = transpose_x ? 1 : depth,
                               .x_depth = transpose_x ? rows : 1,
                               .y_depth = transpose_y ? 1 : columns,
                               .y_column = transpose_y ? depth : 1,
                               .c_row = columns};
  float *x = integers(rows * depth), *y = integers(depth * columns), *c = integers(rows * columns);
  float *bias = integers(which == ROW_BIAS ? rows : columns);
  float *before = malloc((size_t)(rows * columns) * sizeof *before);
  memcpy(before, c, (size_t)(rows * columns) * sizeof *before);
  for (int64_t i = 0; beta == 0 && i < rows * columns; ++i) c[i] = NAN; /* is not read */
  float *scratch = aligned_alloc(64, CAMOX_SGEMM_SCRATCH_BYTES);
  memset(scratch, 0xff, CAMOX_SGEMM_SCRATCH_BYTES);
  camox_sgemm_operands at = {.x = x, .y = y, .c = c};
  if (which == COLUMN_BIAS) at.bias = bias;
  if (which == ROW_BIAS) at.row_bias = bias;
  const camox_sgemm_tile tiles[] = {{0, rows / 2, 0, columns}, {rows / 2, rows - rows / 2, 0, columns}};
  for (int tile = rows > 1 ? 0 : 1; tile < 2; ++tile) camox_sgemm(isa)(&s, &at, tiles[tile], scratch);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = which == NO_BIAS ? 0 : bias[which == ROW_BIAS ? i : j];
      if (beta != 0) sum += beta * before[i * columns + j];
      for (int64_t k = 0; k < depth; ++k) sum += 2.0 * x[i * s.x_row + k * s.x_depth] * y[k * s.y_depth + j * s.y_column];
      TEST(c[i * columns + j] == sum, "%s %lldx%lldx%lld at %lld, %lld", camox_isa_name(isa), (long long)rows,
           (long long)columns, (long long)depth, (long long)i, (long long)j);
    }
  free(x), free(y), free(c), free(bias), free(before), free(scratch);
}

static void product_refused(const camox_gemm_params *p, const char *message) {
  int status = camox_gemm_check(p);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_product_refuses(void) {
  const camox_gemm_params good = {
      .heads = 1, .rows = 2, .columns = 2, .depth = 2, .a_stride = {4, 2, 1}, .b_stride = {4, 2, 1}};
  camox_gemm_params p = good;
  TEST(camox_gemm_check(&p) == CAMOX_OK, "product: %s", camox_last_error());
  p.rows = -1, product_refused(&p, "negative size"), p = good;
  p.depth = 0, product_refused(&p, "a must have columns, got 0"), p = good;
  p.a_stride[2] = 3, product_refused(&p, "columns of a must be dense"), p = good;
  p.b_stride[2] = 3, product_refused(&p, "columns of b must be dense");
}

int main(void) {
  const int has_bf16 = camox_isa_init() == CAMOX_OK && camox_isa_has_avx512_bf16();
  static const int64_t sizes[][3] = {{1, 1, 1},    {15, 33, 9},  {14, 16, 8},     {29, 70, 385},  {200, 40, 17}, {8, 8, 1000},
                                     {500, 33, 3}, {60, 700, 2}, {170, 330, 400}, {15, 900, 390}, {3, 2, 5}};
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("gemm: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    test_tiles((camox_isa)isa, has_bf16 && isa == CAMOX_ISA_AVX512);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
      for (int which = 0; which < 24; ++which)
        test_sgemm((camox_isa)isa, sizes[i], which & 1, which >> 1 & 1, which & 4 ? 0.5f : 0, (sgemm_bias)(which / 8));
  }
  test_product_refuses();
  TEST(!camox_gemm(CAMOX_F32) && !camox_gemm(CAMOX_BF16) == !has_bf16, "a kernel for bfloat16 where the CPU has one");
  /* one of everything; around vectors, panels and steps of depth; several tiles and heads */
  static const int64_t products[][4] = {{1, 1, 1, 1},      {2, 3, 7, 5},     {1, 8, 48, 384}, {2, 9, 49, 385},
                                        {1, 200, 100, 70}, {1, 33, 800, 31}, {3, 70, 33, 64}, {1, 520, 20, 33}};
  for (size_t i = 0; has_bf16 && i < sizeof products / sizeof *products; ++i)
    for (int transposed = 0; transposed < 4; ++transposed)
      test_product(products[i], transposed & 1, transposed >> 1, 1 + (int64_t)i % 3);
  return test_report("gemm");
}
