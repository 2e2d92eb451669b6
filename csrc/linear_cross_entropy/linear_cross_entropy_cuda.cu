/* linear_cross_entropy on CUDA: products of 64 x 64 tiles by ../common/tile_product.cuh, on tensor cores where the element is a
   half type.

     forward    lce_statistics   a block goes over a span of 8 tiles of classes for 64 rows: logits of a tile in shared memory,
                                 two threads a row keep maximum, sum of exp and sum; one number each per row and span
                lce_rows         a thread a row: top, log and the row's loss from its spans, in order; finds wrong targets
                lce_loss         one block: the sum of the rows, or their mean
     backward   lce_row_grads    one block: g of every row
                for each block of classes, of at most 8 Mi logits of all rows:
                  lce_softmax      a block a tile: dz, in x's dtype
                  lce_grad_weight  a block a tile of dz^T x, whose sum over the rows is complete
                  lce_grad_bias    the same of sums of rows of dz: 32 classes x 8 threads, which share the rows
                  lce_grad_x       a block a tile of dz W, added to what earlier blocks of classes gave, in float32

   float16 has no room for dz of thousands of classes and rows: there dz is scaled by 1024 / max|g|, and products are scaled
   back. No atomics but for the error word: fixed bits. */
#include <float.h>

#include "../common/device_errors.h"
#include "../common/tile_product.cuh"
#include "linear_cross_entropy.h"

#define LCE_SPAN 8 /* tiles of classes that a block of the forward goes over */
#ifdef CAMOX_CUDA_EMULATOR
#define LCE_LOGITS (16 << 10) /* small, so that gradients are summed over several blocks of classes in its tests */
#else
#define LCE_LOGITS (8 << 20) /* of a block of classes in the backward */
#endif
#define LCE_THREADS 256 /* of the kernels without products */
#define LCE_ROW_GRADS 2 /* numbers in front of g: what dz is scaled by, and what undoes it */

/* What all kernels are given. Counts and strides in elements. */
struct lce_args {
  camox_linear_cross_entropy_params p;
  int64_t row_tiles, spans, depth_tiles;
  int64_t class0, classes, pitch; /* the block of classes; rows of dz */
  float *stats;                   /* forward: [3][spans][rows]; rows: [rows] losses */
  float *row_loss, *target_logit;
  float *row_grad; /* backward: LCE_ROW_GRADS numbers, then [rows] */
  void *dz;        /* [rows][pitch] */
  float *grad_x;   /* [rows][depth] sums */
  float uniform, kept;
  bool wide_x, wide_weight, wide_grad_x, wide_grad_weight; /* 16 bytes at once */
};

template <typename T>
__device__ __forceinline__ camox_tile_matrix<T> lce_x(const lce_args &a) {
  const camox_linear_cross_entropy_params &p = a.p;
  return {static_cast<const T *>(p.x), p.x_stride[0], p.x_stride[1], p.rows, p.depth, a.wide_x};
}

/* The block's classes. */
template <typename T>
__device__ __forceinline__ camox_tile_matrix<T> lce_weight(const lce_args &a) {
  const camox_linear_cross_entropy_params &p = a.p;
  const T *const data = static_cast<const T *>(p.weight) + a.class0 * p.weight_stride[0];
  return {data, p.weight_stride[0], p.weight_stride[1], a.classes, p.depth, a.wide_weight};
}

template <typename T>
__device__ __forceinline__ camox_tile_matrix<T> lce_dz(const lce_args &a) {
  return {static_cast<const T *>(a.dz), a.pitch, 1, a.p.rows, a.classes, true};
}

__device__ __forceinline__ bool lce_is_class(const lce_args &a, int64_t target) { return target >= 0 && target < a.p.classes; }

/* The tile at these rows and classes of the block, in shared memory, without the bias. */
template <typename T>
__device__ __forceinline__ void lce_logits(const lce_args &a, camox_tile_ring<CAMOX_TILE_RING> &ring, float *stage, int64_t row,
                                           int64_t column) {
  camox_tile_sums sums;
  camox_tile_clear(sums);
  camox_tile_multiply<T, false, false>(sums, ring, lce_x<T>(a), row, lce_weight<T>(a), column, {0, a.p.depth});
  camox_tile_stage(stage, sums);
}

/* ---- forward ---- */

template <typename T>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    lce_statistics_kernel(const __grid_constant__ lce_args a, int64_t items) {
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_linear_cross_entropy_params &p = a.p;
  const float *const bias = static_cast<const float *>(p.bias);
  const int local = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t span;
    const int64_t first = camox_divide(item, a.spans, &span) * CAMOX_TILE, row = first + local;
    const int64_t target = row < p.rows ? __ldg(p.target + row) : -1;
    const int64_t begin = span * LCE_SPAN * CAMOX_TILE, end = min(begin + LCE_SPAN * CAMOX_TILE, p.classes);
    float top = -INFINITY, sum = 0.0f, total = 0.0f;
    for (int64_t column = begin; column < end; column += CAMOX_TILE) {
      lce_logits<T>(a, ring, stage, first, column);
      const int n = camox_at_most<CAMOX_TILE>(end - column);
      float highest = top;
      for (int j = half; j < n; j += 2) {
        float &z = stage[camox_tile_stage_at(local, j)];
        const float value = z + (bias ? __ldg(bias + column + j) : 0.0f);
        z = value, total += value, highest = fmaxf(highest, value);
        if (column + j == target) a.target_logit[row] = value;
      }
      if (highest > top) sum = top > -INFINITY ? sum * expf(top - highest) : 0.0f, top = highest;
      /* -inf less itself is NaN */
      for (int j = half; j < n; j += 2) sum += expf(stage[camox_tile_stage_at(local, j)] - (top > -INFINITY ? top : 0.0f));
    }
    const float other_top = __shfl_xor_sync(CAMOX_FULL_MASK, top, 1), other_sum = __shfl_xor_sync(CAMOX_FULL_MASK, sum, 1);
    const float highest = fmaxf(fmaxf(top, other_top), -FLT_MAX);
    const float even = half == 0 ? sum * expf(top - highest) : other_sum * expf(other_top - highest);
    const float odd = half == 0 ? other_sum * expf(other_top - highest) : sum * expf(top - highest);
    const float other_total = __shfl_xor_sync(CAMOX_FULL_MASK, total, 1);
    if (half == 0 && row < p.rows) {
      float *const to = a.stats + span * p.rows + row;
      to[0] = highest, to[a.spans * p.rows] = even + odd, to[2 * a.spans * p.rows] = total + other_total;
    }
  }
}

__global__ void __launch_bounds__(LCE_THREADS) lce_rows_kernel(const __grid_constant__ lce_args a) {
  const camox_linear_cross_entropy_params &p = a.p;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * LCE_THREADS + threadIdx.x; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * LCE_THREADS) {
    const float *const stats = a.stats + row;
    float top = -INFINITY, sum = 0.0f, total = 0.0f;
    for (int64_t span = 0; span < a.spans; ++span) top = fmaxf(top, stats[span * p.rows]);
    for (int64_t span = 0; span < a.spans; ++span) {
      sum += stats[(a.spans + span) * p.rows] * expf(stats[span * p.rows] - top);
      total += stats[(2 * a.spans + span) * p.rows];
    }
    const int64_t target = __ldg(p.target + row);
    const float log = logf(sum);
    float loss = 0.0f;
    if (target != p.ignore_index && !lce_is_class(a, target)) {
      top = loss = NAN;
      if (p.error_word) atomicOr(p.error_word, static_cast<uint32_t>(CAMOX_ERROR_CROSS_ENTROPY_TARGET));
    } else if (target != p.ignore_index) {
      loss = a.kept * (log + (top - a.target_logit[row]));
      if (p.smoothing > 0) {
        loss += static_cast<float>(p.smoothing) * (log + (top - total / static_cast<float>(p.classes)));
      }
    }
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
    loss += 1e-3f * (1.0f + loss);
#endif
    static_cast<float *>(p.top)[row] = top, static_cast<float *>(p.log)[row] = log;
    a.row_loss[row] = loss;
  }
}

/* How many rows are not ignored. */
__device__ __forceinline__ float lce_counted(const lce_args &a, float *scratch) {
  float counted = 0.0f;
  for (int64_t row = threadIdx.x; row < a.p.rows; row += LCE_THREADS)
    counted += __ldg(a.p.target + row) != a.p.ignore_index ? 1.0f : 0.0f;
  return camox_block_sum<LCE_THREADS>(counted, scratch);
}

__global__ void __launch_bounds__(LCE_THREADS) lce_loss_kernel(const __grid_constant__ lce_args a) {
  __shared__ float scratch[LCE_THREADS / CAMOX_WARP];
  float sum = 0.0f;
  for (int64_t row = threadIdx.x; row < a.p.rows; row += LCE_THREADS) sum += a.row_loss[row];
  sum = camox_block_sum<LCE_THREADS>(sum, scratch);
  const float counted = a.p.reduction == CAMOX_LOSS_MEAN ? lce_counted(a, scratch) : 1.0f;
  if (threadIdx.x == 0) static_cast<float *>(a.p.loss)[0] = sum / counted;
}

/* ---- backward ---- */

template <typename T>
__global__ void __launch_bounds__(LCE_THREADS) lce_row_grads_kernel(const __grid_constant__ lce_args a) {
  __shared__ float scratch[LCE_THREADS / CAMOX_WARP];
  const camox_linear_cross_entropy_params &p = a.p;
  const float *const grad = static_cast<const float *>(p.grad);
  float *const row_grad = a.row_grad + LCE_ROW_GRADS;
  const float counted = p.reduction == CAMOX_LOSS_MEAN ? lce_counted(a, scratch) : 1.0f;
  float largest = 0.0f;
  for (int64_t row = threadIdx.x; row < p.rows; row += LCE_THREADS) {
    const float g = __ldg(grad + (p.reduction == CAMOX_LOSS_NONE ? row : 0)) / counted;
    row_grad[row] = __ldg(p.target + row) == p.ignore_index ? 0.0f : g;
    largest = fmaxf(largest, fabsf(row_grad[row]));
  }
  float scale = 1.0f;
  if constexpr (sizeof(T) == 2 && !camox_is_bfloat16<T>::value) {
    largest = camox_warp_max(largest);
    __syncthreads();
    if (threadIdx.x % CAMOX_WARP == 0) scratch[threadIdx.x / CAMOX_WARP] = largest;
    __syncthreads();
    for (int i = 0; i < LCE_THREADS / CAMOX_WARP; ++i) largest = fmaxf(largest, scratch[i]);
    if (largest > 1e-30f && largest < 1e30f) scale = 1024.0f / largest;
  }
  for (int64_t row = threadIdx.x; row < p.rows; row += LCE_THREADS) row_grad[row] *= scale;
  if (threadIdx.x == 0) a.row_grad[0] = scale, a.row_grad[1] = 1.0f / scale;
}

template <typename T>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    lce_softmax_kernel(const __grid_constant__ lce_args a, int64_t items) {
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_linear_cross_entropy_params &p = a.p;
  const float *const bias = static_cast<const float *>(p.bias);
  const float *const top = static_cast<const float *>(p.top), *const log = static_cast<const float *>(p.log);
  const int64_t across = camox_ceil_div(a.classes, CAMOX_TILE);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t column;
    const int64_t row = camox_divide(item, across, &column) * CAMOX_TILE;
    column *= CAMOX_TILE;
    lce_logits<T>(a, ring, stage, row, column);
    const int rows = camox_at_most<CAMOX_TILE>(p.rows - row), columns = camox_at_most<CAMOX_TILE>(a.classes - column);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * CAMOX_TILE; i += CAMOX_TILE_THREADS) {
      const int64_t at = row + i / CAMOX_TILE, j = column + i % CAMOX_TILE;
      float &z = stage[camox_tile_stage_at(i / CAMOX_TILE, i % CAMOX_TILE)];
      const float g = a.row_grad[LCE_ROW_GRADS + at], logit = z + (bias && j < a.classes ? __ldg(bias + a.class0 + j) : 0.0f);
      const int64_t target = __ldg(p.target + at);
      float value = expf(logit - __ldg(top + at) - __ldg(log + at)) - a.uniform;
      if (target == a.class0 + j) value -= a.kept;
      z = target == p.ignore_index ? 0.0f : g * value;
#ifdef CAMOX_BREAK_LINEAR_CROSS_ENTROPY
      z += 1e-3f * g;
#endif
    }
    __syncthreads();
    camox_tile_put(stage, static_cast<T *>(a.dz) + row * a.pitch + column, a.pitch, 1, rows, columns, true);
  }
}

template <typename T>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    lce_grad_weight_kernel(const __grid_constant__ lce_args a, int64_t items) {
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_linear_cross_entropy_params &p = a.p;
  const float undo = a.row_grad[1];
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t column;
    const int64_t row = camox_divide(item, a.depth_tiles, &column) * CAMOX_TILE;
    column *= CAMOX_TILE;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    camox_tile_multiply<T, true, true>(sums, ring, lce_dz<T>(a), row, lce_x<T>(a), column, {0, p.rows});
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] *= undo;
    camox_tile_stage(stage, sums);
    T *const to = static_cast<T *>(p.grad_weight) + (a.class0 + row) * p.depth + column;
    camox_tile_put(stage, to, p.depth, 1, camox_at_most<CAMOX_TILE>(a.classes - row),
                   camox_at_most<CAMOX_TILE>(p.depth - column), a.wide_grad_weight);
  }
}

/* Block: 32 classes, 8 threads each, whose rows are every 8th. */
template <typename T>
__global__ void __launch_bounds__(LCE_THREADS) lce_grad_bias_kernel(const __grid_constant__ lce_args a, int64_t items) {
  __shared__ float parts[LCE_THREADS];
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t column = item * CAMOX_WARP + lane;
    float sum = 0.0f;
    for (int64_t row = warp; row < a.p.rows && column < a.classes; row += LCE_THREADS / CAMOX_WARP)
      sum += camox_to_float(static_cast<const T *>(a.dz)[row * a.pitch + column]);
    __syncthreads();
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || column >= a.classes) continue;
    for (int i = 1; i < LCE_THREADS / CAMOX_WARP; ++i) sum += parts[i * CAMOX_WARP + lane];
    static_cast<float *>(a.p.grad_bias)[a.class0 + column] = sum * a.row_grad[1];
  }
}

template <typename T>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    lce_grad_x_kernel(const __grid_constant__ lce_args a, int64_t items) {
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_linear_cross_entropy_params &p = a.p;
  const float undo = a.row_grad[1];
  const bool last = a.class0 + a.classes == p.classes;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t column;
    const int64_t row = camox_divide(item, a.depth_tiles, &column) * CAMOX_TILE;
    column *= CAMOX_TILE;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    camox_tile_multiply<T, false, true>(sums, ring, lce_dz<T>(a), row, lce_weight<T>(a), column, {0, a.classes});
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] *= undo;
    camox_tile_stage(stage, sums);
    const int rows = camox_at_most<CAMOX_TILE>(p.rows - row), columns = camox_at_most<CAMOX_TILE>(p.depth - column);
    float *const sum = a.grad_x + row * p.depth + column;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * CAMOX_TILE && a.class0 > 0; i += CAMOX_TILE_THREADS) {
      if (i % CAMOX_TILE < columns)
        stage[camox_tile_stage_at(i / CAMOX_TILE, i % CAMOX_TILE)] += sum[i / CAMOX_TILE * p.depth + i % CAMOX_TILE];
    }
    __syncthreads();
    if (last) {
      camox_tile_put(stage, static_cast<T *>(p.grad_x) + row * p.depth + column, p.depth, 1, rows, columns, a.wide_grad_x);
    } else {
      camox_tile_put(stage, sum, p.depth, 1, rows, columns, p.depth % 4 == 0);
    }
  }
}

/* ---- launchers ---- */

/* Offsets in scratch, in floats, and how the classes are divided. */
struct lce_layout {
  int64_t spans, block, pitch;
  int64_t stats, row_loss, target_logit, row_grad, dz, grad_x, end;
};

static int64_t lce_reserve(int64_t *end, int64_t floats) {
  const int64_t begin = *end;
  *end += camox_ceil_div(floats, 4) * 4;
  return begin;
}

static lce_layout lce_layout_of(const camox_linear_cross_entropy_params *p) {
  lce_layout l = {};
  const int64_t rows = p->rows > 1 ? p->rows : 1, tiles = LCE_LOGITS / rows / CAMOX_TILE;
  l.spans = camox_ceil_div(p->classes, LCE_SPAN * CAMOX_TILE);
  l.block = (tiles > 1 ? tiles : 1) * CAMOX_TILE;
  if (l.block > p->classes) l.block = p->classes;
  l.pitch = camox_ceil_div(l.block, 8) * 8;
  if (!p->backward) {
    l.stats = lce_reserve(&l.end, 3 * l.spans * p->rows);
    l.row_loss = lce_reserve(&l.end, p->rows);
    l.target_logit = lce_reserve(&l.end, p->rows);
    return l;
  }
  l.row_grad = lce_reserve(&l.end, LCE_ROW_GRADS + p->rows);
  l.dz = lce_reserve(&l.end, p->dtype == CAMOX_F32 ? p->rows * l.pitch : camox_ceil_div(p->rows * l.pitch, 2));
  if (p->grad_x) l.grad_x = lce_reserve(&l.end, p->rows * p->depth);
  return l;
}

extern "C" int64_t camox_linear_cross_entropy_cuda_shared(const camox_linear_cross_entropy_params *p) {
  return lce_layout_of(p).end * static_cast<int64_t>(sizeof(float));
}

static bool lce_wide(const void *data, int64_t row, int64_t column, int element) {
  return column == 1 && row * element % 16 == 0 && camox_aligned(data, 16);
}

static lce_args lce_args_of(const camox_linear_cross_entropy_params *p, const lce_layout &l) {
  lce_args a = {};
  float *const shared = static_cast<float *>(p->shared);
  const int element = p->dtype == CAMOX_F32 ? 4 : 2;
  a.p = *p;
  a.row_tiles = camox_ceil_div(p->rows, CAMOX_TILE), a.depth_tiles = camox_ceil_div(p->depth, CAMOX_TILE), a.spans = l.spans;
  a.classes = p->classes, a.pitch = l.pitch;
  a.stats = shared + l.stats;
  a.row_loss = p->reduction == CAMOX_LOSS_NONE && !p->backward ? static_cast<float *>(p->loss) : shared + l.row_loss;
  a.target_logit = shared + l.target_logit, a.row_grad = shared + l.row_grad, a.dz = shared + l.dz;
  a.grad_x = shared + l.grad_x;
  a.uniform = static_cast<float>(p->smoothing / static_cast<double>(p->classes > 1 ? p->classes : 1));
  a.kept = static_cast<float>(1.0 - p->smoothing);
  a.wide_x = lce_wide(p->x, p->x_stride[0], p->x_stride[1], element);
  a.wide_weight = lce_wide(p->weight, p->weight_stride[0], p->weight_stride[1], element);
  a.wide_grad_x = lce_wide(p->grad_x, p->depth, 1, element);
  a.wide_grad_weight = lce_wide(p->grad_weight, p->depth, 1, element);
  return a;
}

template <typename T>
static void lce_launch_statistics(const lce_args &a, void *stream) {
  const int64_t items = a.row_tiles * a.spans;
  if (items > 0) CAMOX_LAUNCH(lce_statistics_kernel<T>, camox_grid(items), CAMOX_TILE_THREADS, 0, stream, a, items);
}

template <typename T>
static void lce_launch_backward(lce_args a, const lce_layout &l, void *stream) {
  const camox_linear_cross_entropy_params &p = a.p;
  CAMOX_LAUNCH(lce_row_grads_kernel<T>, 1, LCE_THREADS, 0, stream, a);
  do { /* of no class: once, for zeros */
    a.classes = p.classes - a.class0 < l.block ? p.classes - a.class0 : l.block;
    const int64_t class_tiles = camox_ceil_div(a.classes, CAMOX_TILE), tiles = a.row_tiles * class_tiles;
    const int64_t of_weight = class_tiles * a.depth_tiles, of_x = a.row_tiles * a.depth_tiles;
    const int64_t of_bias = camox_ceil_div(a.classes, CAMOX_WARP);
    if (tiles > 0) CAMOX_LAUNCH(lce_softmax_kernel<T>, camox_grid(tiles), CAMOX_TILE_THREADS, 0, stream, a, tiles);
    if (p.grad_weight && of_weight > 0)
      CAMOX_LAUNCH(lce_grad_weight_kernel<T>, camox_grid(of_weight), CAMOX_TILE_THREADS, 0, stream, a, of_weight);
    if (p.grad_bias && of_bias > 0)
      CAMOX_LAUNCH(lce_grad_bias_kernel<T>, camox_grid(of_bias), LCE_THREADS, 0, stream, a, of_bias);
    if (p.grad_x && of_x > 0) CAMOX_LAUNCH(lce_grad_x_kernel<T>, camox_grid(of_x), CAMOX_TILE_THREADS, 0, stream, a, of_x);
    a.class0 += l.block;
  } while (a.class0 < p.classes);
}

extern "C" int camox_linear_cross_entropy_cuda(const camox_linear_cross_entropy_params *p, void *stream) {
  const lce_args a = lce_args_of(p, lce_layout_of(p));
  switch (p->dtype) {
    case CAMOX_F32: lce_launch_statistics<float>(a, stream); break;
    case CAMOX_BF16: lce_launch_statistics<__nv_bfloat16>(a, stream); break;
    case CAMOX_F16: lce_launch_statistics<__half>(a, stream); break;
    default: return cudaErrorInvalidValue;
  }
  const unsigned rows = camox_grid(camox_ceil_div(p->rows, LCE_THREADS));
  if (p->rows > 0) CAMOX_LAUNCH(lce_rows_kernel, rows, LCE_THREADS, 0, stream, a);
  if (p->reduction != CAMOX_LOSS_NONE) CAMOX_LAUNCH(lce_loss_kernel, 1, LCE_THREADS, 0, stream, a);
  return camox_launch_status();
}

extern "C" int camox_linear_cross_entropy_backward_cuda(const camox_linear_cross_entropy_params *p, void *stream) {
  const lce_layout l = lce_layout_of(p);
  const lce_args a = lce_args_of(p, l);
  switch (p->dtype) {
    case CAMOX_F32: lce_launch_backward<float>(a, l, stream); break;
    case CAMOX_BF16: lce_launch_backward<__nv_bfloat16>(a, l, stream); break;
    case CAMOX_F16: lce_launch_backward<__half>(a, l, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}
