/* Sums of the rows of a float32 matrix, column by column: the last step of gradients of weights and biases, to which every
   block of a backward kernel has added one row, its partial sums.

     block: CAMOX_SUM_COLUMNS adjacent columns           partial [rows][columns], mostly in L2
       +---+---+ ... +---+
       | 0 | 1 | ... | 7 |  row 0, and every blockDim.x / 8-th after it      a thread: one column of every 128th row
       | 8 | 9 | ... | 15|  row 1, ...                                       (of 1024 threads), eight loads in flight
       +---+---+ ... +---+
     a warp: 4 rows -> shuffles -> shared [warps][columns] -> the first warp -> out

   Each column is added in an order that the shape alone decides: the same bits on every run. */
#ifndef CAMOX_ROW_SUMS_CUH
#define CAMOX_ROW_SUMS_CUH

#include "cuda_util.cuh"
#include "types.h"

#define CAMOX_SUM_THREADS 1024
#define CAMOX_SUM_COLUMNS 8

/* out: columns [0, split) go to out[0], the others to out[1], each sum rounded to `dtype` once. */
struct camox_row_sums {
  const float *partial;
  int64_t rows, columns, split;
  void *out[2];
  camox_dtype dtype; /* float32 or half-precision */
};

__device__ __forceinline__ void camox_store_row_sum(const camox_row_sums &a, int64_t column, float sum) {
  void *const out = a.out[column < a.split ? 0 : 1];
  const int64_t i = column < a.split ? column : column - a.split;
  if (a.dtype == CAMOX_F32)
    static_cast<float *>(out)[i] = sum;
  else if (a.dtype == CAMOX_BF16)
    static_cast<__nv_bfloat16 *>(out)[i] = camox_from_float<__nv_bfloat16>(sum);
  else
    static_cast<__half *>(out)[i] = camox_from_float<__half>(sum);
}

/* Over the lanes of a warp that have the same column. */
template <int COLUMNS>
__device__ __forceinline__ float camox_sum_column(float sum) {
#pragma unroll
  for (int other = COLUMNS; other < CAMOX_WARP; other *= 2) sum += __shfl_xor_sync(CAMOX_FULL_MASK, sum, other);
  return sum;
}

/* Op: a type named after the op's folder, so that the budget knows whose kernel this is. */
template <int COLUMNS, typename Op>
__global__ void __launch_bounds__(CAMOX_SUM_THREADS) camox_row_sums_kernel(const __grid_constant__ camox_row_sums a) {
  __shared__ float sums[CAMOX_SUM_THREADS / CAMOX_WARP][COLUMNS];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / CAMOX_WARP, lane = thread % CAMOX_WARP;
  const int warps = static_cast<int>(blockDim.x) / CAMOX_WARP, rows_at_once = static_cast<int>(blockDim.x) / COLUMNS;
  for (int64_t block = blockIdx.x; block * COLUMNS < a.columns; block += gridDim.x) {
    const int64_t column = block * COLUMNS + thread % COLUMNS;
    float sum = 0.0f;
    if (column < a.columns) {
#pragma unroll 8
      for (int64_t row = thread / COLUMNS; row < a.rows; row += rows_at_once)
        sum += __ldg(a.partial + row * a.columns + column);
    }
    sum = camox_sum_column<COLUMNS>(sum);
    if (lane < COLUMNS) sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
      sum = 0.0f;
      for (int i = lane / COLUMNS; i < warps; i += CAMOX_WARP / COLUMNS) sum += sums[i][lane % COLUMNS];
      sum = camox_sum_column<COLUMNS>(sum);
      if (lane < COLUMNS && column < a.columns) camox_store_row_sum(a, column, sum);
    }
    __syncthreads();
  }
}

/* Without rows the sums become zeros. */
template <typename Op>
static inline void camox_launch_row_sums(const camox_row_sums &a, void *stream) {
  int threads = CAMOX_WARP;
  while (threads < CAMOX_SUM_THREADS && threads < CAMOX_SUM_COLUMNS * a.rows) threads *= 2;
  CAMOX_LAUNCH((camox_row_sums_kernel<CAMOX_SUM_COLUMNS, Op>), camox_grid(camox_ceil_div(a.columns, CAMOX_SUM_COLUMNS)),
               threads, 0, stream, a);
}

#endif
