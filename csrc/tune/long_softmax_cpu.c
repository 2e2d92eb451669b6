/* Softmax of long rows of float32: two sweeps over each, of which the second finds it in L2. Compiled once per instruction set.

     forward    sweep 1, a block at a time:   x |####|####|####|..      in each lane: the largest so far, and the sum of
                                                                       exp(x - largest), smaller when the largest grows
                sweep 2:                      y from the maximum and the sum of the row
     backward   sweep 1: the sum of grad                               sweep 2: the gradient of x; of log_softmax alone

   What the caches will not hold is written past them: an ordinary store first reads the line that it writes. */
#include "softmax.h"

#include "../common/integers.h"
#include "../common/simd.h"
#include "../common/simd_log.h"

#ifdef CAMOX_BREAK_TUNE
#define FACTOR 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define FACTOR 1.0f
#endif

enum { BLOCK = 4 * VF32_LANES };

/* The maximum of a row and the sum of exp(x - maximum). NaN wherever the row holds NaN or +inf.

   Lanes add up some blocks, and then those sums: beside a large term thousands of small ones would be rounded one by one. */
static float weigh(const float *x, int64_t n, float *total) {
  enum { BLOCKS = 32 };
  vf32 largest = vf32_set1(-FLT_MAX), sum = vf32_set1(0), of_blocks = vf32_set1(0);
  for (int64_t i = 0; i < n; i += BLOCK) {
    float padded[BLOCK];
    const float *from = x + i;
    if (n - i < BLOCK) {
      for (int k = 0; k < BLOCK; ++k) padded[k] = k < n - i ? from[k] : -INFINITY;
      from = padded;
    }
    vf32 block[4], highest = largest, of_block = vf32_set1(0);
    for (int v = 0; v < 4; ++v) {
      block[v] = vf32_load(from + v * VF32_LANES);
      highest = vf32_max(highest, block[v]);
    }
    if (vf32_any((vi32)(highest > largest))) {
      const vf32 smaller = vf32_exp_weight(largest - highest);
      sum *= smaller, of_blocks *= smaller, largest = highest;
    }
    for (int v = 0; v < 4; ++v) of_block += vf32_exp_weight(block[v] - largest);
    of_blocks += of_block;
    if (i / BLOCK % BLOCKS == BLOCKS - 1) sum += of_blocks, of_blocks = vf32_set1(0);
  }
  sum += of_blocks;
  float maximum = largest[0];
  for (int lane = 1; lane < VF32_LANES; ++lane) maximum = largest[lane] > maximum ? largest[lane] : maximum;
  *total = vf32_sum(sum * vf32_exp_weight(largest - vf32_set1(maximum)));
  return maximum;
}

static float total_of(const float *grad, int64_t n) {
  vf32 sum[4] = {0};
  int64_t i = 0;
  for (; i + BLOCK <= n; i += BLOCK)
    for (int v = 0; v < 4; ++v) sum[v] += vf32_load(grad + i + v * VF32_LANES);
  for (; i < n; i += VF32_LANES) sum[0] += vf32_load_n(grad + i, n - i);
  return vf32_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

typedef enum { SOFTMAX, LOG_SOFTMAX, LOG_SOFTMAX_GRAD } result;

/* a is x or grad; first and second are what the row's first sweep found. */
CAMOX_INLINE vf32 result_of(result kind, vf32 a, vf32 y, vf32 first, vf32 second) {
  if (kind == SOFTMAX) return vf32_exp_weight(a - first) * second;
  if (kind == LOG_SOFTMAX) return (a - first) * vf32_set1(FACTOR) - second;
  return a - vf32_exp_weight(y) * first;
}

CAMOX_INLINE void write_row(result kind, float *to, const float *a, const float *y, int64_t n, float of_row, float of_sum,
                            int past_caches) {
  const vf32 first = vf32_set1(of_row), second = vf32_set1(of_sum);
  /* past the caches from the first vector whose address is a multiple of its size */
  int64_t count = past_caches ? (int64_t)(-(uintptr_t)to / sizeof(float) % VF32_LANES) : 0;
  if (count == 0) count = VF32_LANES;
  for (int64_t i = 0; i < n; i += count, count = VF32_LANES) {
    count = camox_min_i64(count, n - i);
    const int whole = count == VF32_LANES;
    const vf32 left = whole ? vf32_load(a + i) : vf32_load_n(a + i, count);
    const vf32 right = whole ? vf32_load(y + i) : vf32_load_n(y + i, count);
    const vf32 value = result_of(kind, left, right, first, second);
    if (!whole)
      vf32_store_n(to + i, value, count);
    else if (past_caches)
      vstream_f32(to + i, value);
    else
      vf32_store(to + i, value);
  }
}

void CAMOX_PASTE3(camox_long_softmax_kernel, f32, CAMOX_ISA)(const camox_softmax_params *p, int64_t begin, int64_t end) {
  const float *x = (const float *)p->in + begin * p->n;
  float *y = (float *)p->out + begin * p->n, sum;
  for (int64_t row = begin; row < end; ++row, x += p->n, y += p->n) {
    const float maximum = weigh(x, p->n, &sum);
    if (p->log)
      write_row(LOG_SOFTMAX, y, x, x, p->n, maximum, vf32_log(vf32_set1(sum))[0], p->exceeds_cache);
    else
      write_row(SOFTMAX, y, x, x, p->n, maximum, FACTOR / sum, p->exceeds_cache);
  }
  if (p->exceeds_cache) camox_stream_end();
}

void CAMOX_PASTE3(camox_long_log_softmax_gradient_kernel, f32, CAMOX_ISA)(const camox_softmax_params *p, int64_t begin,
                                                                          int64_t end) {
  const float *y = (const float *)p->in + begin * p->n, *grad = (const float *)p->grad + begin * p->n;
  float *out = (float *)p->out + begin * p->n;
  for (int64_t row = begin; row < end; ++row, y += p->n, grad += p->n, out += p->n)
    write_row(LOG_SOFTMAX_GRAD, out, grad, y, p->n, FACTOR * total_of(grad, p->n), 0, p->exceeds_cache);
  if (p->exceeds_cache) camox_stream_end();
}
