/* The replacements' kernels against plain loops: every instruction set of this machine, transpositions, sizes around tiles. */
#include "../../csrc/common/philox.h"
#include "../../csrc/tune/bernoulli.h"
#include "../../csrc/tune/sgemm.h"
#include "camox_test.h"

static float *integers(int64_t count) {
  float *x = malloc((size_t)count * sizeof *x);
  for (int64_t i = 0; i < count; ++i) x[i] = (float)(int)(4 * test_random(8));
  return x;
}

/* Integers, so that sums are exact in any order; in two tiles, as two threads take them. */
static void test_product(camox_isa isa, const int64_t *size, int transpose_x, int transpose_y, float beta) {
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
  float *before = malloc((size_t)(rows * columns) * sizeof *before);
  memcpy(before, c, (size_t)(rows * columns) * sizeof *before);
  for (int64_t i = 0; beta == 0 && i < rows * columns; ++i) c[i] = NAN; /* is not read */
  float *scratch = aligned_alloc(64, CAMOX_SGEMM_SCRATCH_BYTES);
  memset(scratch, 0xff, CAMOX_SGEMM_SCRATCH_BYTES);
  const camox_sgemm_operands at = {x, y, c};
  const camox_sgemm_tile tiles[] = {{0, rows / 2, 0, columns}, {rows / 2, rows - rows / 2, 0, columns}};
  for (int tile = rows > 1 ? 0 : 1; tile < 2; ++tile) camox_sgemm(isa)(&s, &at, tiles[tile], scratch);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = beta == 0 ? 0 : beta * before[i * columns + j];
      for (int64_t k = 0; k < depth; ++k) sum += 2.0 * x[i * s.x_row + k * s.x_depth] * y[k * s.y_depth + j * s.y_column];
      TEST(c[i * columns + j] == sum, "%s %lldx%lldx%lld at %lld, %lld", camox_isa_name(isa), (long long)rows,
           (long long)columns, (long long)depth, (long long)i, (long long)j);
    }
  free(x), free(y), free(c), free(before), free(scratch);
}

static void test_bernoulli(camox_isa isa, camox_dtype dtype, int64_t count, double p, int exceeds_cache) {
  unsigned char *out = aligned_alloc(64, (size_t)(count + 64) / 64 * 64 * test_size[dtype]);
  camox_bernoulli_params params = {out, count, 0x123456789abcdefu, (uint64_t)(ldexp(p, 32) + 0.5), exceeds_cache};
  camox_bernoulli(dtype, isa)(&params, 0, (count + CAMOX_BERNOULLI_ITEM - 1) / CAMOX_BERNOULLI_ITEM);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t group = (uint64_t)i / 8;
    const camox_philox_words second = {{(uint32_t)group, (uint32_t)(group >> 32), 1, 0}};
    const camox_philox_words low = camox_philox(second, (uint32_t)params.seed, (uint32_t)(params.seed >> 32), 7);
    const uint64_t h = camox_philox_bits(camox_philox_group(params.seed, group), (int)(i % 8));
    const uint64_t u = h << 16 | camox_philox_bits(low, (int)(i % 8));
    TEST(test_get(dtype, out, i) == (u < params.bound), "%s %s p %g at %lld", camox_isa_name(isa), test_dtype_names[dtype], p,
         (long long)i);
  }
  free(out);
}

int main(void) {
  static const int64_t sizes[][3] = {{1, 1, 1},    {15, 33, 9},  {14, 16, 8},     {29, 70, 385},  {200, 40, 17}, {8, 8, 1000},
                                     {500, 33, 3}, {60, 700, 2}, {170, 330, 400}, {15, 900, 390}, {3, 2, 5}};
  static const double probabilities[] = {0, 1e-5, 0.1, 0.5, 65535.5 / 65536, 1};
  static const int64_t counts[] = {1, 63, 64, 65, 1000, 40000};
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("tune: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
      for (int which = 0; which < 8; ++which)
        test_product((camox_isa)isa, sizes[i], which & 1, which >> 1 & 1, which & 4 ? 0.5f : 0);
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t p = 0; p < sizeof probabilities / sizeof *probabilities; ++p)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i)
          for (int exceeds_cache = 0; exceeds_cache < 2; ++exceeds_cache)
            test_bernoulli((camox_isa)isa, (camox_dtype)dtype, counts[i], probabilities[p], exceeds_cache);
  }
  return test_report("tune");
}
