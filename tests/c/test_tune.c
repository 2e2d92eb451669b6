/* bernoulli_'s replacement against a plain loop: every instruction set of this machine. */
#include "../../csrc/common/philox.h"
#include "../../csrc/tune/bernoulli.h"
#include "camox_test.h"

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
  static const double probabilities[] = {0, 1e-5, 0.1, 0.5, 65535.5 / 65536, 1};
  static const int64_t counts[] = {1, 63, 64, 65, 1000, 40000};
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("tune: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (size_t p = 0; p < sizeof probabilities / sizeof *probabilities; ++p)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i)
          for (int exceeds_cache = 0; exceeds_cache < 2; ++exceeds_cache)
            test_bernoulli((camox_isa)isa, (camox_dtype)dtype, counts[i], probabilities[p], exceeds_cache);
  }
  return test_report("tune");
}
