/* Box means on CUDA: sums along the rows into float32 memory, then down the columns, in two launches.

   A side is counted from -radius on, where the window of pixel 0 begins, in blocks as long as the window. A window is the end
   of one block and the beginning of the next: its sum is the sum from its first pixel to the end of that block, plus the sum
   from the beginning of the next block on. Both are restarted in each block, and nothing is ever subtracted: no drift, and NaN
   and infinity stay where they are.

     lines   a thread has a block of a line of pixels that are apart in memory: down it upwards for the sums to the end, which
             it keeps where the result will be, and down the next block for the other sums. Neighbouring threads have adjacent
             elements, so accesses are whole. Columns in both memory formats, rows in channels_last.
     rows    a warp has a row of adjacent pixels, 32 at a time, whose sums it makes by shuffles that stop at the blocks' ends.

   No atomics: fixed bits. */
#include "../common/cuda_util.cuh"
#include "box.h"

#define BOX_THREADS 128
#define BOX_WARPS (BOX_THREADS / CAMOX_WARP)

struct box_args {
  camox_box_params p;
  int64_t radius_y, radius_x; /* clipped: a window that reaches past both sides sums what a smaller one sums */
  int64_t items;              /* of a launch: lines' blocks, or rows */
};

__device__ __forceinline__ int64_t box_count(int64_t at, int64_t radius, int64_t side) {
  return min(side - 1, at + radius) - max(static_cast<int64_t>(0), at - radius) + 1;
}

__device__ __forceinline__ int64_t box_offset(const camox_view4 &view, int64_t b, int64_t c, int64_t y, int64_t x) {
  return b * view.stride[0] + c * view.stride[1] + y * view.stride[2] + x * view.stride[3];
}

/* What x adds to the sums along its row. */
template <typename T>
__device__ __forceinline__ float box_term(const box_args &a, int64_t b, int64_t c, int64_t y, int64_t x) {
  const float value = camox_to_float(__ldg(static_cast<const T *>(a.p.x.data) + box_offset(a.p.x, b, c, y, x)));
  if (a.p.kind != CAMOX_BOX_COUNTED_ADJOINT) return value;
  return value /
         (static_cast<float>(box_count(y, a.radius_y, a.p.height)) * static_cast<float>(box_count(x, a.radius_x, a.p.width)));
}

/* The result of a window's sum. */
template <typename T>
__device__ __forceinline__ float box_result(const box_args &a, float sum, int64_t b, int64_t c, int64_t y, int64_t x) {
  float result = sum;
  if (a.p.kind == CAMOX_BOX_COUNTED)
    result /=
        static_cast<float>(box_count(y, a.radius_y, a.p.height)) * static_cast<float>(box_count(x, a.radius_x, a.p.width));
  else if (a.p.kind != CAMOX_BOX_COUNTED_ADJOINT)
    result /= static_cast<float>(a.p.window_height) * static_cast<float>(a.p.window_width);
  if (a.p.kind == CAMOX_BOX_STRUCTURE_WEIGHT) {
    const float x_value = camox_to_float(__ldg(static_cast<const T *>(a.p.x.data) + box_offset(a.p.x, b, c, y, x)));
    result = 1.0f + static_cast<float>(a.p.gain) * fabsf(result - x_value);
  }
#ifdef CAMOX_BREAK_BOX
  result += 1e-3f;
#endif
  return result;
}

/* ---- rows of adjacent pixels: a warp each ---- */

template <typename T>
__global__ void __launch_bounds__(BOX_THREADS) box_rows_kernel(const __grid_constant__ box_args a) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  const int64_t radius = a.radius_x, window = 2 * radius + 1, width = a.p.width;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * BOX_WARPS + warp; row < a.items;
       row += static_cast<int64_t>(gridDim.x) * BOX_WARPS) {
    int64_t y, c;
    const int64_t plane = camox_divide(row, a.p.height, &y), b = camox_divide(plane, a.p.channels, &c);
    float *const sums = a.p.row_sums + box_offset(a.p.y, b, c, y, 0);

    /* from each pixel to the end of its block, from right to left */
    float carry = 0.0f; /* of the first pixel of the 32 to the right */
    int64_t carry_block = -1;
    for (int64_t first = camox_ceil_div(width + radius, CAMOX_WARP) * CAMOX_WARP - CAMOX_WARP; first >= 0;
         first -= CAMOX_WARP) {
      const int64_t q = first + lane;
      int64_t at;
      const int64_t block = camox_divide(q, window, &at);
      float sum = q >= radius && q < width + radius ? box_term<T>(a, b, c, y, q - radius) : 0.0f;
#pragma unroll
      for (int step = 1; step < CAMOX_WARP; step *= 2) {
        const float other = __shfl_down_sync(CAMOX_FULL_MASK, sum, step);
        if (lane + step < CAMOX_WARP && at + step < window) sum += other;
      }
      if (block == carry_block) sum += carry;
      carry = __shfl_sync(CAMOX_FULL_MASK, sum, 0);
      carry_block = __shfl_sync(CAMOX_FULL_MASK, block, 0);
      if (q < width) sums[q] = sum;
    }
    __syncwarp();

    /* from the beginning of each block, from left to right; block 0 is no window's second */
    carry = 0.0f, carry_block = -1;
    for (int64_t first = window; first < width + window - 1; first += CAMOX_WARP) {
      const int64_t q = first + lane;
      int64_t at;
      const int64_t block = camox_divide(q, window, &at);
      float sum = q < width + radius ? box_term<T>(a, b, c, y, q - radius) : 0.0f;
#pragma unroll
      for (int step = 1; step < CAMOX_WARP; step *= 2) {
        const float other = __shfl_up_sync(CAMOX_FULL_MASK, sum, step);
        if (lane >= step && at >= step) sum += other;
      }
      if (block == carry_block) sum += carry;
      carry = __shfl_sync(CAMOX_FULL_MASK, sum, CAMOX_WARP - 1);
      carry_block = __shfl_sync(CAMOX_FULL_MASK, block, CAMOX_WARP - 1);
      const int64_t x = q - window + 1;
      if (x < width && at + 1 < window) sums[x] += sum;
    }
    __syncwarp();
  }
}

/* ---- lines of pixels that are apart: a block of one for each thread ---- */

/* An element along a line, in x (ROWS: along the row) or in the rows' sums. */
template <typename T, bool ROWS>
__device__ __forceinline__ float box_line_term(const box_args &a, int64_t b, int64_t c, int64_t y, int64_t x, int64_t at) {
  if constexpr (ROWS)
    return box_term<T>(a, b, c, y, at);
  else
    return a.p.row_sums[box_offset(a.p.y, b, c, at, x)];
}

template <typename T, bool ROWS>
__device__ __forceinline__ void box_line_store(const box_args &a, float sum, int64_t b, int64_t c, int64_t y, int64_t x,
                                               int64_t at) {
  if constexpr (ROWS)
    a.p.row_sums[box_offset(a.p.y, b, c, y, at)] = sum;
  else
    static_cast<T *>(a.p.y.data)[box_offset(a.p.y, b, c, at, x)] = camox_from_float<T>(box_result<T>(a, sum, b, c, at, x));
}

template <typename T, bool ROWS>
__global__ void __launch_bounds__(BOX_THREADS) box_lines_kernel(const __grid_constant__ box_args a) {
  const int64_t radius = ROWS ? a.radius_x : a.radius_y, window = 2 * radius + 1, side = ROWS ? a.p.width : a.p.height;
  const int64_t blocks = camox_ceil_div(side, window);
  float *const kept = ROWS ? a.p.row_sums : a.p.running_sums;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * BOX_THREADS + threadIdx.x; item < a.items;
       item += static_cast<int64_t>(gridDim.x) * BOX_THREADS) {
    /* the innermost dimension first, then the blocks of a line */
    int64_t b, c, y = 0, x = 0, block, outer;
    if constexpr (ROWS) {
      outer = camox_divide(item, a.p.channels, &c);
      outer = camox_divide(outer, blocks, &block);
      b = camox_divide(outer, a.p.height, &y);
    } else if (a.p.channels_last) {
      outer = camox_divide(item, a.p.channels, &c);
      outer = camox_divide(outer, a.p.width, &x);
      b = camox_divide(outer, blocks, &block);
    } else {
      outer = camox_divide(item, a.p.width, &x);
      outer = camox_divide(outer, blocks, &block);
      b = camox_divide(outer, a.p.channels, &c);
    }
    const int64_t first = block * window, end = min(first + window, side);
    float sum = 0.0f;
    for (int64_t q = min(first + window, side + radius) - 1; q >= first; --q) {
      if (q >= radius) sum += box_line_term<T, ROWS>(a, b, c, y, x, q - radius);
      if (q < side) kept[ROWS ? box_offset(a.p.y, b, c, y, q) : box_offset(a.p.y, b, c, q, x)] = sum;
    }
    box_line_store<T, ROWS>(a, sum, b, c, y, x, first);
    sum = 0.0f;
    for (int64_t at = first + 1; at < end; ++at) { /* whose window ends with pixel at + radius */
      if (at + radius < side) sum += box_line_term<T, ROWS>(a, b, c, y, x, at + radius);
      const float ending = kept[ROWS ? box_offset(a.p.y, b, c, y, at) : box_offset(a.p.y, b, c, at, x)];
      box_line_store<T, ROWS>(a, ending + sum, b, c, y, x, at);
    }
  }
}

/* ---- launcher ---- */

template <typename T>
static void box_run(box_args a, void *stream) {
  const camox_box_params &p = a.p;
  const int64_t elements = p.batch * p.channels * p.height * p.width;
  if (p.channels_last) {
    a.items = elements / p.width * camox_ceil_div(p.width, 2 * a.radius_x + 1);
    CAMOX_LAUNCH((box_lines_kernel<T, true>), camox_grid(camox_ceil_div(a.items, BOX_THREADS)), BOX_THREADS, 0, stream, a);
  } else {
    a.items = elements / p.width;
    CAMOX_LAUNCH((box_rows_kernel<T>), camox_grid(camox_ceil_div(a.items, BOX_WARPS)), BOX_THREADS, 0, stream, a);
  }
  a.items = elements / p.height * camox_ceil_div(p.height, 2 * a.radius_y + 1);
  CAMOX_LAUNCH((box_lines_kernel<T, false>), camox_grid(camox_ceil_div(a.items, BOX_THREADS)), BOX_THREADS, 0, stream, a);
}

extern "C" int camox_box_cuda(const camox_box_params *p, void *stream) {
  if (p->batch * p->channels * p->height * p->width == 0) return cudaSuccess;
  box_args a = {};
  a.p = *p;
  a.radius_y = p->window_height / 2 < p->height - 1 ? p->window_height / 2 : p->height - 1;
  a.radius_x = p->window_width / 2 < p->width - 1 ? p->window_width / 2 : p->width - 1;
  switch (p->dtype) {
    case CAMOX_F32: box_run<float>(a, stream); break;
    case CAMOX_BF16: box_run<__nv_bfloat16>(a, stream); break;
    case CAMOX_F16: box_run<__half>(a, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}
