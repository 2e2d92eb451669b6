/* softmax and log_softmax and their gradients, for PyTorch's _softmax and _log_softmax: along one dimension of few elements, and
   of long rows.

   formula   y = exp(x - max) / sum of exp(x - max)                  log: y = (x - max) - log(sum of exp(x - max))
   backward  grad_x = y (grad - sum of grad y)                       log: grad_x = grad - exp(y) sum of grad
             with the maxima and sums over each row: the n elements along the dimension
   dtypes    float32, bfloat16, float16 computed in float32. One rounding, at the store
   shapes    (outer, n, inner), contiguous; long rows: inner is 1, float32, no gradient of softmax
   source    torch.nn.functional.softmax, log_softmax. */
#ifndef CAMOX_TUNE_SOFTMAX_H
#define CAMOX_TUNE_SOFTMAX_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *in, *grad; /* x; in backward y and its gradient */
  void *out;
  int64_t outer, n, inner;
  int log;
  int exceeds_cache; /* long rows: the caches will not hold the output, which is written past them */
  void *scratch;     /* short rows: camox_softmax_scratch bytes for each thread, aligned to a vector */
} camox_softmax_params;

/* Rows of a work item, a multiple of any vector's lanes. */
enum { CAMOX_SOFTMAX_ROWS = 64 };

int64_t camox_softmax_items(const camox_softmax_params *p);
size_t camox_softmax_scratch(const camox_softmax_params *p);

/* Work items [begin, end). */
typedef void camox_softmax_kernel(const camox_softmax_params *p, int64_t begin, int64_t end);
camox_softmax_kernel *camox_softmax_forward(camox_dtype dtype, camox_isa isa);
camox_softmax_kernel *camox_softmax_backward(camox_dtype dtype, camox_isa isa);

/* Long rows: [begin, end) are rows. The gradient is that of log_softmax. */
camox_softmax_kernel *camox_long_softmax(camox_isa isa);
camox_softmax_kernel *camox_long_log_softmax_gradient(camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
