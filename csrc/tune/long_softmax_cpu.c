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

/* The maximum of a row and the sum of exp(x - maximum). NaN wherever the row holds NaN or +inf. */
static float weigh(const float *x, int64_t n, float *total) {
  vf32 largest = vf32_set1(-FLT_MAX), sum = vf32_set1(0);
  for (int64_t i = 0; i < n; i += BLOCK) {
    vf32 block[4], highest = largest, of_block = vf32_set1(0);
    for (int v = 0; v < 4; ++v) {
      const int64_t at = i + v * VF32_LANES;
      block[v] = vf32_set1(-INFINITY);
      if (at + VF32_LANES <= n)
        block[v] = vf32_load(x + at);
      else
        for (int64_t lane = 0; lane < n - at; ++lane) block[v][lane] = x[at + lane];
      highest = vf32_max(highest, block[v]);
    }
    if (vf32_any((vi32)(highest > largest))) sum *= vf32_exp_weight(largest - highest), largest = highest;
    for (int v = 0; v < 4; ++v) of_block += vf32_exp_weight(block[v] - largest);
    sum += of_block;
  }
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
  int64_t i = 0;
  if (past_caches) { /* from the first vector whose address is a multiple of its size */
    const int64_t head = camox_min_i64(n, (int64_t)(-(uintptr_t)to / sizeof(float) % VF32_LANES));
    if (head > 0) vf32_store_n(to, result_of(kind, vf32_load_n(a, head), vf32_load_n(y, head), first, second), head);
    for (i = head; i + VF32_LANES <= n; i += VF32_LANES)
      vstream_f32(to + i, result_of(kind, vf32_load(a + i), vf32_load(y + i), first, second));
  }
  for (; i + VF32_LANES <= n; i += VF32_LANES)
    vf32_store(to + i, result_of(kind, vf32_load(a + i), vf32_load(y + i), first, second));
  if (i < n) vf32_store_n(to + i, result_of(kind, vf32_load_n(a + i, n - i), vf32_load_n(y + i, n - i), first, second), n - i);
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
