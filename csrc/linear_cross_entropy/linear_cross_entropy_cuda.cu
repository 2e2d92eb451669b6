/* linear_cross_entropy on CUDA: what happens to a block of rows of logits between the products, which cuBLAS makes (the loop
   over blocks is in camox_ops/ops/_linear_cross_entropy_cuda.py).

     z = x W^T     [rows][pitch] float32       a block of threads per row, twice 4 classes per thread and iteration:
     +--------------------------------+        1  statistics    maximum, sum of exp and sum, each thread's own first; loss
     | row 0: z 0 1 2 ...             |        2  gradient      dz = g (exp(z - lse) - s/V - (1-s) [target]), in place
     +--------------------------------+

   Tensor cores, which make the logits of half types, truncate their sums: a logit of 550, a sum of 513 squares, is off by
   1e-3 on an H100, and so was the loss. The two logits that make up a large loss, the target's and the largest, are summed
   again here.

   A half dz takes the first half of its row's bytes. Iteration i reads the bytes from 16384 i on and writes those from 8192 i
   on, so that nothing is overwritten that was not read, given one barrier per iteration:

     row, in bytes   0        8192      16384     24576     32768
     reads           |  iteration 0       |  iteration 1      |
     writes          | iter. 0 | iter. 1  |

   No atomics but for the error word: fixed bits. */
#include <float.h>

#include "../common/cuda_util.cuh"
#include "../common/device_errors.h"
#include "linear_cross_entropy.h"

#define LCE_THREADS 512
#define LCE_LANES 4                         /* adjacent classes of a thread: 16 bytes */
#define LCE_PIECES 2                        /* of so many, whose loads are under way together */
#define LCE_PIECE (LCE_THREADS * LCE_LANES) /* classes from one piece of a thread to its next */

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

/* The class of the thread's i-th logit of an iteration whose first is class j. */
__device__ __forceinline__ int64_t lce_class(int64_t j, int i) { return j + i / LCE_LANES * LCE_PIECE + i % LCE_LANES; }

/* The thread's logits of an iteration, whose first is class j, with the bias; -inf beyond the last. Not by camox_load, whose
   read-only path forbids that the row is written in this kernel. */
__device__ __forceinline__ void lce_logits(float (&z)[LCE_PIECES][LCE_LANES], const float *row, const float *bias, int64_t j,
                                           int64_t classes) {
  if (j + (LCE_PIECES - 1) * LCE_PIECE + LCE_LANES <= classes) {
#pragma unroll
    for (int piece = 0; piece < LCE_PIECES; ++piece)
      __builtin_memcpy(static_cast<void *>(z[piece]), __builtin_assume_aligned(row + j + piece * LCE_PIECE, sizeof z[piece]),
                       sizeof z[piece]);
  } else {
#pragma unroll
    for (int i = 0; i < LCE_PIECES * LCE_LANES; ++i) {
      const int64_t at = lce_class(j, i);
      z[i / LCE_LANES][i % LCE_LANES] = at < classes ? row[at] : -INFINITY;
    }
  }
  if (!bias) return;
#pragma unroll
  for (int i = 0; i < LCE_PIECES * LCE_LANES; ++i) {
    const int64_t at = lce_class(j, i);
    if (at < classes) z[i / LCE_LANES][i % LCE_LANES] += __ldg(bias + at);
  }
}

/* The smallest class that a thread of the block names. scratch is free: a row uses it once, and has other barriers. */
__device__ __forceinline__ int64_t lce_block_first(int64_t j, int64_t *scratch) {
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  for (int offset = CAMOX_WARP / 2; offset > 0; offset /= 2) j = min(j, __shfl_xor_sync(CAMOX_FULL_MASK, j, offset));
  if (lane == 0) scratch[warp] = j;
  __syncthreads();
  for (int i = 0; i < LCE_THREADS / CAMOX_WARP; ++i) j = min(j, scratch[i]);
  return j;
}

/* A logit without its bias, as a sum in float32, in the logit's place as well. */
template <typename T>
__device__ __forceinline__ float lce_exact_logit(const camox_linear_cross_entropy_rows_params &p, int64_t row, int64_t j,
                                                 float *scratch) {
  const T *const x = static_cast<const T *>(p.x) + row * p.x_stride[0];
  const T *const weight = static_cast<const T *>(p.weight) + j * p.weight_stride[0];
  float sum = 0.0f;
  for (int64_t d = threadIdx.x; d < p.depth; d += LCE_THREADS)
    sum += camox_to_float(__ldg(x + d * p.x_stride[1])) * camox_to_float(__ldg(weight + d * p.weight_stride[1]));
  sum = camox_block_sum<LCE_THREADS>(sum, scratch);
  if (threadIdx.x == 0) p.logits[row * p.pitch + j] = sum;
  __syncthreads();
  return sum;
}

struct lce_row {
  float top, log, loss;
};

/* In every thread. */
template <typename T>
__device__ __forceinline__ lce_row lce_statistics(const camox_linear_cross_entropy_rows_params &p, const lce_labels &labels,
                                                  int64_t row, int64_t target, float *scratch, int64_t *class_scratch) {
  constexpr bool exact = sizeof(T) == sizeof(float); /* the logits already, not made by tensor cores */
  const float *const z_row = p.logits + row * p.pitch;
  const bool is_class = target >= 0 && target < p.classes;
  float target_logit = 0.0f;
  if (is_class) target_logit = exact ? z_row[target] : lce_exact_logit<T>(p, row, target, scratch);
  if (is_class && p.bias) target_logit += __ldg(p.bias + target);
  float own_top = -INFINITY, sum = 0.0f, total = 0.0f;
  int64_t own_class = p.classes; /* of own_top */
  for (int64_t j = threadIdx.x * LCE_LANES; j < p.classes; j += LCE_PIECES * LCE_PIECE) {
    float z[LCE_PIECES][LCE_LANES];
    lce_logits(z, z_row, p.bias, j, p.classes);
    float highest = own_top;
#pragma unroll
    for (int i = 0; i < LCE_PIECES * LCE_LANES; ++i) {
      const int64_t at = lce_class(j, i);
      const float logit = z[i / LCE_LANES][i % LCE_LANES];
      if (logit > highest) highest = logit, own_class = at;
      if (p.smoothing > 0 && at < p.classes) total += logit;
    }
    if (highest > own_top) sum = own_top > -INFINITY ? sum * expf(own_top - highest) : 0.0f, own_top = highest;
    const float base = own_top > -INFINITY ? own_top : 0.0f; /* -inf less itself is NaN */
#pragma unroll
    for (int i = 0; i < LCE_PIECES * LCE_LANES; ++i) sum += expf(z[i / LCE_LANES][i % LCE_LANES] - base);
  }
  const float top = fmaxf(lce_block_max(own_top, scratch), -FLT_MAX);
  sum = camox_block_sum<LCE_THREADS>(sum * expf(own_top - top), scratch);
  if (p.smoothing > 0) total = camox_block_sum<LCE_THREADS>(total, scratch);
  if constexpr (!exact) {
    const int64_t top_class = lce_block_first(own_top == top ? own_class : p.classes, class_scratch);
    if (top_class < p.classes && top_class != target) {
      const float logit = lce_exact_logit<T>(p, row, top_class, scratch) + (p.bias ? __ldg(p.bias + top_class) : 0.0f);
      sum += expf(logit - top) - 1.0f;
    }
  }
  const float log = logf(sum);
  if (target == p.ignore_index) return {top, log, 0.0f};
  if (!is_class) {
    if (p.error_word && threadIdx.x == 0) atomicOr(p.error_word, static_cast<uint32_t>(CAMOX_ERROR_CROSS_ENTROPY_TARGET));
    return {NAN, log, NAN};
  }
  float loss = labels.kept * (log + (top - target_logit));
  if (p.smoothing > 0) loss += static_cast<float>(p.smoothing) * (log + (top - total / static_cast<float>(p.classes)));
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
  loss += 1e-3f * (1.0f + loss);
#endif
  return {top, log, loss};
}

/* dz over the row's logits. */
template <typename T>
__device__ __forceinline__ void lce_gradient(const camox_linear_cross_entropy_rows_params &p, const lce_labels &labels,
                                             int64_t row, int64_t target, float g, const lce_row &found) {
  const float *const z_row = p.logits + row * p.pitch;
  T *const dz_row = reinterpret_cast<T *>(p.logits + row * p.pitch);
  for (int64_t begin = 0; begin < p.classes; begin += LCE_PIECES * LCE_PIECE) {
    const int64_t first = begin + threadIdx.x * LCE_LANES;
    float z[LCE_PIECES][LCE_LANES];
    lce_logits(z, z_row, p.bias, first, p.classes);
#pragma unroll
    for (int i = 0; i < LCE_PIECES * LCE_LANES; ++i) {
      float &logit = z[i / LCE_LANES][i % LCE_LANES];
      float dz = expf(logit - found.top - found.log) - labels.uniform;
      if (lce_class(first, i) == target) dz -= labels.kept;
      logit = target == p.ignore_index ? 0.0f : g * dz;
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
      logit += 1e-3f * g;
#endif
    }
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads(); /* others' logits of this iteration are read */
#pragma unroll
    for (int piece = 0; piece < LCE_PIECES; ++piece) {
      const int64_t j = first + piece * LCE_PIECE;
      if (j < p.classes) camox_store_float(dz_row + j, z[piece], p.classes - j);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(LCE_THREADS)
    lce_rows_kernel(const __grid_constant__ camox_linear_cross_entropy_rows_params p, lce_labels labels) {
  __shared__ float scratch[LCE_THREADS / CAMOX_WARP];
  __shared__ int64_t class_scratch[LCE_THREADS / CAMOX_WARP];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t target = __ldg(p.target + row);
    const lce_row found = lce_statistics<T>(p, labels, row, target, scratch, class_scratch);
    if (threadIdx.x == 0) p.top[row] = found.top, p.log[row] = found.log, p.loss[row] = found.loss;
    if (p.grad) lce_gradient<T>(p, labels, row, target, __ldg(p.grad + row * p.grad_stride), found);
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
