/* Tensors of 0 and 1, the randomness of PyTorch's dropout, from Philox instead of a Mersenne twister on one core.

   formula   out[i] = u(i) < round(2^32 p) ? 1 : 0, for element i in the order of memory
             u(i)   = 65536 h + l: h the element's 16 bits of common/philox.h, l those of the same place of the call whose third
                      counter word is 1. l decides only where h equals the upper half of the bound, and is computed only there
   dtypes    float32, bfloat16, float16, float64
   p         in [0, 1]; exact to 2^-33, and at 0 and 1 */
#ifndef CAMOX_TUNE_BERNOULLI_H
#define CAMOX_TUNE_BERNOULLI_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void *out;
  int64_t count;
  uint64_t seed;
  uint64_t bound;    /* round(2^32 p), at most 2^32 */
  int exceeds_cache; /* the caches will not hold the output: it is written past them */
} camox_bernoulli_params;

/* Elements of a work item; any number of threads gives the same bits. */
enum { CAMOX_BERNOULLI_ITEM = 32768 };

/* Work items [begin, end). */
typedef void camox_bernoulli_kernel(const camox_bernoulli_params *p, int64_t begin, int64_t end);
camox_bernoulli_kernel *camox_bernoulli(camox_dtype dtype, camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
