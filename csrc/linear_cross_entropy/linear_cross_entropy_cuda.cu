/* linear_cross_entropy on CUDA: what happens to a block of rows of logits between the products, which cuBLAS makes (the loop
   over blocks is in camox_ops/ops/_linear_cross_entropy_cuda.py).

     z = x W^T     [rows][pitch] float32       a block of threads per row, 4 classes per thread and iteration:
     +--------------------------------+        1  statistics    maximum, sum of exp and sum, each thread's own first; loss
     | row 0: z 0 1 2 ...             |        2  gradient      dz = g (exp(z - lse) - s/V - (1-s) [target]), in place
     +--------------------------------+
   A half dz takes the first half of its row's bytes. Iteration i reads the bytes from 4096 i on and writes those from 2048 i
   on, so that nothing is overwritten that was not read, given one barrier per iteration:

     row, in bytes   0        2048      4096      6144      8192
     reads           |  iteration 0       |  iteration 1      |
     writes          | iter. 0 | iter. 1  |

   No atomics but for the error word: fixed bits. */
#include <float.h>

#include "../common/cuda_util.cuh"
#include "../common/device_errors.h"
#include "linear_cross_entropy.h"

#define LCE_THREADS 256
#define LCE_LANES 4 /* classes of a thread at once: 16 bytes */

/* Factors of the labels: of every class, and of the target beside that. */
struct lce_labels {
  float uniform, kept;
};

__device__ __forceinline__ float lce_block_max(float x, float *scratch) {
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  x = camox_warp_max(x);
  __syncthreads(); /* the previous use of scratch is over */
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return camox_warp_max(scratch[lane % (LCE_THREADS / CAMOX_WARP)]);
}

/* Logits from class j on, with the bias; -inf beyond the last. Not by camox_load, whose read-only path forbids that the row is
   written in this kernel. */
__device__ __forceinline__ void lce_logits(float (&z)[LCE_LANES], const float *row, const float *bias, int64_t j,
                                           int64_t classes) {
  if (j + LCE_LANES <= classes) {
    __builtin_memcpy(static_cast<void *>(z), __builtin_assume_aligned(row + j, sizeof z), sizeof z);
  } else {
#pragma unroll
    for (int i = 0; i < LCE_LANES; ++i) z[i] = j + i < classes ? row[j + i] : -INFINITY;
  }
  if (!bias) return;
#pragma unroll
  for (int i = 0; i < LCE_LANES; ++i)
    if (j + i < classes) z[i] += __ldg(bias + j + i);
}

/* top, log and loss of a row, in every thread. */
__device__ __forceinline__ void lce_statistics(const camox_linear_cross_entropy_rows_params &p, const lce_labels &labels,
                                               const float *z_row, int64_t target, float *scratch, float &top, float &log,
                                               float &loss) {
  const bool is_class = target >= 0 && target < p.classes;
  const float target_logit = is_class ? z_row[target] + (p.bias ? __ldg(p.bias + target) : 0.0f) : 0.0f;
  float own_top = -INFINITY, sum = 0.0f, total = 0.0f;
  for (int64_t j = threadIdx.x * LCE_LANES; j < p.classes; j += LCE_THREADS * LCE_LANES) {
    float z[LCE_LANES];
    lce_logits(z, z_row, p.bias, j, p.classes);
    float highest = own_top;
#pragma unroll
    for (int i = 0; i < LCE_LANES; ++i) {
      highest = fmaxf(highest, z[i]);
      if (p.smoothing > 0 && j + i < p.classes) total += z[i];
    }
    if (highest > own_top) sum = own_top > -INFINITY ? sum * expf(own_top - highest) : 0.0f, own_top = highest;
    /* -inf less itself is NaN */
#pragma unroll
    for (int i = 0; i < LCE_LANES; ++i) sum += expf(z[i] - (own_top > -INFINITY ? own_top : 0.0f));
  }
  top = fmaxf(lce_block_max(own_top, scratch), -FLT_MAX);
  log = logf(camox_block_sum<LCE_THREADS>(sum * expf(own_top - top), scratch));
  if (p.smoothing > 0) total = camox_block_sum<LCE_THREADS>(total, scratch);
  loss = 0.0f;
  if (target == p.ignore_index) return;
  if (!is_class) {
    top = loss = NAN;
    if (p.error_word && threadIdx.x == 0) atomicOr(p.error_word, static_cast<uint32_t>(CAMOX_ERROR_CROSS_ENTROPY_TARGET));
    return;
  }
  loss = labels.kept * (log + (top - target_logit));
  if (p.smoothing > 0) loss += static_cast<float>(p.smoothing) * (log + (top - total / static_cast<float>(p.classes)));
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
  loss += 1e-3f * (1.0f + loss);
#endif
}

/* dz over the row's logits. */
template <typename T>
__device__ __forceinline__ void lce_gradient(const camox_linear_cross_entropy_rows_params &p, const lce_labels &labels,
                                             float *z_row, int64_t target, float g, float top, float log) {
  T *const dz_row = reinterpret_cast<T *>(z_row);
  for (int64_t begin = 0; begin < p.classes; begin += LCE_THREADS * LCE_LANES) {
    const int64_t j = begin + threadIdx.x * LCE_LANES;
    float z[LCE_LANES];
    lce_logits(z, z_row, p.bias, j, p.classes);
#pragma unroll
    for (int i = 0; i < LCE_LANES; ++i) {
      float dz = expf(z[i] - top - log) - labels.uniform;
      if (j + i == target) dz -= labels.kept;
      z[i] = target == p.ignore_index ? 0.0f : g * dz;
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
      z[i] += 1e-3f * g;
#endif
    }
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads(); /* others' logits of this iteration are read */
    camox_store_float(dz_row + j, z, p.classes - j);
  }
}

template <typename T>
__global__ void __launch_bounds__(LCE_THREADS)
    lce_rows_kernel(const __grid_constant__ camox_linear_cross_entropy_rows_params p, lce_labels labels) {
  __shared__ float scratch[LCE_THREADS / CAMOX_WARP];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float *const z_row = p.logits + row * p.pitch;
    const int64_t target = __ldg(p.target + row);
    float top, log, loss;
    if (p.loss) {
      lce_statistics(p, labels, z_row, target, scratch, top, log, loss);
      if (threadIdx.x == 0) p.top[row] = top, p.log[row] = log, p.loss[row] = loss;
    } else {
      top = p.top[row], log = p.log[row];
    }
    if (p.grad) lce_gradient<T>(p, labels, z_row, target, __ldg(p.grad + row * p.grad_stride), top, log);
  }
}

extern "C" int camox_linear_cross_entropy_rows_cuda(const camox_linear_cross_entropy_rows_params *p, void *stream) {
  const double classes = static_cast<double>(p->classes > 1 ? p->classes : 1);
  const lce_labels labels = {static_cast<float>(p->smoothing / classes), static_cast<float>(1.0 - p->smoothing)};
  if (p->rows == 0) return camox_launch_status();
  switch (p->dtype) {
    case CAMOX_F32: CAMOX_LAUNCH(lce_rows_kernel<float>, camox_grid(p->rows), LCE_THREADS, 0, stream, *p, labels); break;
    case CAMOX_BF16:
      CAMOX_LAUNCH(lce_rows_kernel<__nv_bfloat16>, camox_grid(p->rows), LCE_THREADS, 0, stream, *p, labels);
      break;
    case CAMOX_F16: CAMOX_LAUNCH(lce_rows_kernel<__half>, camox_grid(p->rows), LCE_THREADS, 0, stream, *p, labels); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}
