/* Box means on CUDA. Sums are never formed by subtracting: no drift, and NaN and infinity stay where they are. No atomics:
   fixed bits.

   Contiguous images with windows of up to 61 x 61, channels_last with up to 31 x 31: one launch, x is read once and y written
   once (box_bands_kernel).

              planes of a block, `across` threads each, V = 4 adjacent columns (8 or 16 bytes of x) to a thread
       row  4j     | t t t t | <-- trailing rows, from the ring in shared memory: the first rows of the step's windows
            4j+4   |         |
             ...   |         |     whole steps of 4 rows: their totals lie in shared memory
            4j+2r  | l l l l | <-- leading rows, loaded one step ahead: the last rows of the windows
              |
              v  a block iterates down its row band, four rows of output to a step

     load     the leading rows of the next step are asked for when a step begins, and have all of it to arrive.
     begin    the rows above the band's first leading rows are copied into the ring, all at once, and their totals are made.
     down     sum = trailing rows from the window's first on + totals between + leading rows to the window's last. The totals
              between are a sum over a window again: the end of one block of totals, whose sums to the end replace them once
              it is complete, and the beginning of the next, in registers. The leading rows then take the places of the
              trailing ones in the ring. Windows of 3 rows need no ring.
     across   a thread's V columns, four rows at once, are a segment: the columns and their sum lie in shared memory. What the
              windows of another thread's V columns have in common is mostly whole segments; column by column, from right to
              left, those are added that only the windows further left have, and then those that only the windows further
              right have. Windows of 3, 5 and 7 columns take their neighbours' outermost columns instead.
     shared   [segments, with zeros beside each row] [ring of rows of x] [totals]; ring and totals are each thread's own. Two
              barriers a step.

     channels_last   threads beside each other have adjacent channels, four each (8 or 16 bytes of x) of one column; a plane is
              these channels of an image. Down the columns they do the same. Twice four rows are then put into shared memory:

                 down     a thread has a column of 8 rows        across   a thread has 8 columns of a row, a segment
                          c                                                r r r r r r r r
                          c
                          ...      whose lines of 16 bytes are four channels of a pixel, not four rows of a column

              so that segments are added in the same way, and each of the 8 pixels is written at once. Three barriers for 8 rows.

   Larger windows and windows of one column: sums along the rows into float32 memory, then down the columns, in two launches. A side is
   counted from -radius on, where the window of pixel 0 begins, in blocks as long as the window. A window is the end of one
   block and the beginning of the next: its sum is the sum from its first pixel to the end of that block, plus the sum from the
   beginning of the next block on. Both are restarted in each block.

     lines   a thread has a block of a line of pixels that are apart in memory: down it upwards for the sums to the end, which
             it keeps where the result will be, and down the next block for the other sums. Neighbouring threads have adjacent
             elements, so accesses are whole. Columns in both memory formats, rows in channels_last.
     rows    a warp has a row of adjacent pixels, 32 at a time, whose sums it makes by shuffles that stop at the blocks' ends. */
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

/* ---- contiguous images, both directions at once: a block for planes beside each other and a row band ---- */

#define BOX_BAND_THREADS 256 /* at most */
#define BOX_BUSY_THREADS 256 /* of a multiprocessor: with fewer a step takes almost as long */
/* Elements of a thread: eight of a half type would be 16 bytes, but twice the instructions of a warp's step and 167 registers,
   with which half as many warps run at (32,80,88,88). */
#define BOX_LANES 4
#define BOX_STEP 4    /* rows of a step down the columns */
#define BOX_SEGMENT 8 /* channels_last: columns of a segment, and rows that are summed down before they are summed along */
#define BOX_BLOCK_RESERVED 1024 /* bytes of shared memory that the driver takes for each block */
#define BOX_SECTOR 32           /* bytes that memory is read in at least */

/* Threads that a multiprocessor's registers are enough for: with 128 each, or 168 where a step has 8 rows. */
template <bool LAST>
static constexpr int box_resident_threads = LAST ? 384 : 512;

#define BOX_REACH 3 /* windows of up to 7 columns take their neighbours' outermost columns; not in channels_last */

/* Lines of a segment in shared memory, of 16 bytes: one number of each of a step's four rows. Windows that reach into the
   neighbours alone need the outermost 2 * radius columns, larger ones all V and their sum. An odd number, so that neighbouring
   threads' accesses fall into different banks. */
template <int V>
static constexpr int box_segment_lines = V + 1;
__host__ __device__ static constexpr int box_reaching_lines(int radius) { return 2 * radius + 1; }

/* Adjacent columns of a row in shared memory, as a thread reads them: from `at` on, in floats from its own segment's first, and
   how many of them lie before the next segment. */
struct box_columns {
  int at, before_next;
};

/* The windows of V columns from 0 on, larger than 7: column c's is [-radius + c, radius + c].
     head     -radius ... -radius + V-2      column c's has the last V-1-c of them
     core     -radius + V-1 ... radius       in the windows of all: single columns, whole segments, and single columns
     tail     radius + 1 ... radius + V-1    column c's has the first c of them */
struct box_spans {
  box_columns head, tail;
  int left, left_columns; /* where in shared memory, and how many */
  int whole, whole_segments;
  int right, right_columns;
};

struct box_bands {
  box_args a;
  bool vectors;     /* all accesses of V elements are aligned */
  int64_t inner;    /* x's stride between a thread's V elements */
  int64_t together; /* planes of an image; channels_last: of V channels each */
  int threads;      /* of a block */
  int across;       /* threads of a row or, where a row is longer than a block, of its tile, */
  int halo;         /* whose first and last so many only serve the others */
  int segments;     /* of a row of a tile, in shared memory, */
  int lines;        /* of a segment */
  int side;         /* segments that a window reaches into on each side; so many of zeros lie beside each row */
  int positions;    /* segments in shared memory, those of zeros too */
  int planes;       /* of a block, beside each other */
  int rows;         /* of a row band */
  int ring_rows;    /* 2 * radius_y */
  int totals;       /* whole steps between a window's trailing and leading rows */
  int64_t tiles, row_bands;
  box_spans spans;
};

/* V elements of row y; zeros where the row, of which only those before `end` count, or the column lies outside the image. */
template <typename T, int V>
__device__ __forceinline__ void box_fetch_row(T (&to)[V], const box_bands &plan, const T *from, int y, int end, int elements) {
#pragma unroll
  for (int c = 0; c < V; ++c) to[c] = camox_from_float<T>(0.0f);
  if (static_cast<unsigned>(y) >= static_cast<unsigned>(end)) return;
  if (plan.vectors) {
    if (elements > 0) camox_load(to, from);
  } else {
#pragma unroll
    for (int c = 0; c < V; ++c)
      if (c < elements) to[c] = __ldg(from + c * plan.inner);
  }
}

/* The same of four rows from y >= 0 on, `stride` apart. A thread without elements never loads, so its zeros stay. `from` becomes
   the row after them. */
template <typename T, int V>
__device__ __forceinline__ void box_fetch(T (&to)[BOX_STEP][V], const box_bands &plan, const T *&from, int64_t stride, int y,
                                          int end, int elements) {
  const T *const rows[BOX_STEP] = {from, from + stride, from + 2 * stride, from + 2 * stride + stride};
  from = rows[3] + stride;
  if (plan.vectors && y + BOX_STEP <= end) {
    if (elements > 0) {
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) camox_load(to[i], rows[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) box_fetch_row(to[i], plan, rows[i], y + i, end, elements);
  }
}

/* 1 / the pixels of a window that lie in the image, along one side; of any number outside it. */
__device__ __forceinline__ float box_share(int at, int radius, int64_t side) {
  return camox_reciprocal(static_cast<float>(max(min(static_cast<int>(side) - 1, at + radius) - max(0, at - radius) + 1, 1)));
}

/* Sums of 2 * REACH + 1 adjacent elements, from sums of 2 and 4. */
template <int V, int REACH>
__device__ __forceinline__ void box_add_adjacent(float (&to)[V], const float (&from)[V + 2 * REACH]) {
  float pair[V + 2 * REACH - 1];
#pragma unroll
  for (int i = 0; i < V + 2 * REACH - 1; ++i) pair[i] = from[i] + from[i + 1];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (REACH == 1) to[i] = pair[i] + from[i + 2];
    if constexpr (REACH == 2) to[i] = (pair[i] + pair[i + 2]) + from[i + 4];
    if constexpr (REACH == 3) to[i] = (pair[i] + pair[i + 2]) + (pair[i + 4] + from[i + 6]);
  }
}

/* Where the columns of head and tail lie in shared memory, in floats. HELD in registers: found again in each step they would
   take two instructions each, since the line of a segment's sum lies between its columns and the next one's. */
template <int V>
struct box_ends {
  int head[V - 1], tail[V - 1];
};

template <int V, bool HELD>
__device__ __forceinline__ box_ends<V> box_ends_of(const box_spans &spans, int mine) {
  box_ends<V> ends;
#pragma unroll
  for (int c = 0; c < V - 1; ++c) {
    ends.head[c] = mine + spans.head.at + (c < spans.head.before_next ? c : c + 1) * BOX_STEP;
    ends.tail[c] = mine + spans.tail.at + (c < spans.tail.before_next ? c : c + 1) * BOX_STEP;
    if (HELD) camox_compute_late(ends.head[c]);
    if (HELD) camox_compute_late(ends.tail[c]);
  }
  return ends;
}

/* Adds N lines from `from` on, `pitch` floats apart, all of them loaded before one is added. `from` becomes the line after them. */
template <int N>
__device__ __forceinline__ void box_add_lines_at_once(float (&to)[BOX_STEP], const float *&from, int pitch) {
  float line[N][BOX_STEP];
#pragma unroll
  for (int n = 0; n < N; ++n) camox_load_shared(line[n], from + n * pitch);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) to[i] += line[n][i];
  from += N * pitch;
}

/* Adds `count` lines from `from` on: loaded one by one, a warp would wait for shared memory as often. */
__device__ __forceinline__ void box_add_lines(float (&to)[BOX_STEP], const float *from, int count, int pitch) {
#pragma unroll 1
  for (; count >= 4; count -= 4) box_add_lines_at_once<4>(to, from, pitch);
  if (count >= 2) box_add_lines_at_once<2>(to, from, pitch);
  if (count % 2 != 0) box_add_lines_at_once<1>(to, from, pitch);
}

/* Puts the sum of a segment's columns behind them in shared memory, for those whose windows have all of them. */
template <int V>
__device__ __forceinline__ void box_put_whole(float *mine, const float (&sums)[BOX_STEP][V]) {
  float whole[BOX_STEP];
#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i) whole[i] = sums[i][0] + sums[i][1];
#pragma unroll
  for (int c = 2; c < V; c += 2)
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) whole[i] += sums[i][c] + sums[i][c + 1];
  camox_store_shared(mine + V * BOX_STEP, whole);
}

/* Sums over the windows of a segment's columns, of the columns and segments in shared memory. */
template <int V>
__device__ __forceinline__ void box_add_segments(float (&sums)[BOX_STEP][V], const box_spans &spans, const float *segments,
                                                 const float *mine, const box_ends<V> &ends) {
  float sum[BOX_STEP] = {};
  box_add_lines(sum, mine + spans.left, spans.left_columns, BOX_STEP);
  box_add_lines(sum, mine + spans.whole, spans.whole_segments, BOX_STEP * box_segment_lines<V>);
  box_add_lines(sum, mine + spans.right, spans.right_columns, BOX_STEP);
#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i) sums[i][V - 1] = sum[i];
#pragma unroll
  for (int c = V - 2; c >= 0; --c) {
    float column[BOX_STEP];
    camox_load_shared(column, segments + ends.head[c]);
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) sum[i] += column[i], sums[i][c] = sum[i];
  }
#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int c = 0; c < V - 1; ++c) {
    float column[BOX_STEP];
    camox_load_shared(column, segments + ends.tail[c]);
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) sum[i] = c > 0 ? sum[i] + column[i] : column[i], sums[i][c + 1] += sum[i];
  }
}

/* Puts a column of four rows into a line of shared memory. */
template <int V>
__device__ __forceinline__ void box_put_column(float *line, const float (&sums)[BOX_STEP][V], int c) {
  const float column[BOX_STEP] = {sums[0][c], sums[1][c], sums[2][c], sums[3][c]};
  camox_store_shared(line, column);
}

/* Sums along the rows, of four rows at once, over windows of 2 * REACH + 1 columns. `mine`: the thread's segment, in shared
   memory. */
template <int REACH, int V>
__device__ __forceinline__ void box_across_neighbours(float (&sums)[BOX_STEP][V], float *mine) {
  constexpr int pitch = BOX_STEP * box_reaching_lines(REACH);
  /* lines 0 ... REACH-1: the first columns, the others: the last */
#pragma unroll
  for (int c = 0; c < REACH; ++c) {
    box_put_column(mine + c * BOX_STEP, sums, c);
    box_put_column(mine + (REACH + c) * BOX_STEP, sums, V - REACH + c);
  }
  __syncthreads();
  float left[REACH][BOX_STEP], right[REACH][BOX_STEP];
#pragma unroll
  for (int c = 0; c < REACH; ++c) {
    camox_load_shared(left[c], mine - pitch + (REACH + c) * BOX_STEP);
    camox_load_shared(right[c], mine + pitch + c * BOX_STEP);
  }
#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i) {
    float row[V + 2 * REACH];
#pragma unroll
    for (int c = 0; c < V; ++c) row[REACH + c] = sums[i][c];
#pragma unroll
    for (int c = 0; c < REACH; ++c) row[c] = left[c][i], row[REACH + V + c] = right[c][i];
    box_add_adjacent<V, REACH>(sums[i], row);
  }
}

/* The same over windows of any size. */
template <int V>
__device__ __forceinline__ void box_across(float (&sums)[BOX_STEP][V], const box_bands &plan, const float *segments,
                                           float *mine, const box_ends<V> &ends) {
  static_assert(BOX_REACH == 3, "a case for each of them");
  const int64_t radius = plan.a.radius_x;
  if (radius > BOX_REACH) {
    /* lines 0 ... V-1: the columns, line V: their sum */
#pragma unroll
    for (int c = 0; c < V; ++c) box_put_column(mine + c * BOX_STEP, sums, c);
    box_put_whole(mine, sums);
    __syncthreads();
    box_add_segments(sums, plan.spans, segments, mine, ends);
  } else if (radius == 1) {
    box_across_neighbours<1>(sums, mine);
  } else if (radius == 2) {
    box_across_neighbours<2>(sums, mine);
  } else {
    box_across_neighbours<3>(sums, mine);
  }
  __syncthreads();
}

/* Sums along the rows of channels_last, of a segment of columns of one row. A line of it has four channels, not rows, so that
   segments are added in the same way; its columns have been summed down by other threads. `windows`: by channel, then column. */
__device__ __forceinline__ void box_across_channels_last(float (&windows)[BOX_STEP][BOX_SEGMENT], const box_bands &plan,
                                                         const float *segments, float *mine) {
  constexpr int pitch = BOX_STEP * box_segment_lines<BOX_SEGMENT>, reach = 2;
  float row[BOX_STEP][BOX_SEGMENT + 2 * reach];
  const auto get_column = [&](const float *from, int column) {
    float line[BOX_STEP];
    camox_load_shared(line, from);
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) row[i][reach + column] = line[i];
  };
#pragma unroll
  for (int k = 0; k < BOX_SEGMENT; ++k) get_column(mine + k * BOX_STEP, k);
  if (plan.a.radius_x <= reach) {
#pragma unroll
    for (int k = 0; k < reach; ++k) {
      get_column(mine - pitch + (BOX_SEGMENT - reach + k) * BOX_STEP, k - reach);
      get_column(mine + pitch + k * BOX_STEP, BOX_SEGMENT + k);
    }
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) {
      if (plan.a.radius_x == reach) {
        box_add_adjacent<BOX_SEGMENT, reach>(windows[i], row[i]);
      } else {
        float nearest[BOX_SEGMENT + 2];
#pragma unroll
        for (int k = 0; k < BOX_SEGMENT + 2; ++k) nearest[k] = row[i][reach - 1 + k];
        box_add_adjacent<BOX_SEGMENT, 1>(windows[i], nearest);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i)
#pragma unroll
      for (int k = 0; k < BOX_SEGMENT; ++k) windows[i][k] = row[i][reach + k];
    box_put_whole(mine, windows);
    __syncthreads();
    int here = static_cast<int>(mine - segments); /* the ends' places, in registers, would spill others */
    camox_compute_late(here);
    box_add_segments(windows, plan.spans, segments, mine, box_ends_of<BOX_SEGMENT, false>(plan.spans, here));
  }
}

/* What a thread keeps of its columns while it iterates down them, in shared memory that no other thread touches. A warp's 32
   threads lie beside each other in it, so that all distances are known when the kernel is compiled. */
template <typename T, int V>
struct box_history {
  static constexpr int row = CAMOX_WARP * V;   /* of the ring */
  static constexpr int total = CAMOX_WARP * V; /* of the totals; its pieces of four lie a warp apart */
  T *ring;          /* the 2 * radius_y rows of x above a step's leading rows, which take the places of its trailing rows */
  float *totals;    /* sums of the whole steps among those rows; those of a complete block are sums to its end */
  int trailing;     /* where in the ring the pair of rows lies with which the step's first window begins */
  float pair[2][V]; /* these two rows: the step before had to read them, too, where the radius is odd */
  int oldest;       /* where the total of the first whole step in the windows lies */
  float running[V]; /* the sum of the totals of the block that is not complete */

  __device__ __forceinline__ void read_pair() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T raw[V];
      camox_load_shared(raw, ring + trailing + i * row);
      camox_to_floats(pair[i], raw);
#pragma unroll
      for (int k = 0; k < V; ++k) camox_compute_late(pair[i][k]);
    }
  }
  __device__ __forceinline__ int next_pair(const box_bands &plan, int at) const {
    return at + 2 * row < plan.ring_rows * row ? at + 2 * row : 0;
  }
};

template <int N, int V>
__device__ __forceinline__ void box_multiply(float (&lines)[N][V], float by) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < V; ++k) lines[i][k] *= by;
}

/* Rows, or pixels, from `first` on divided by the pixels that a window has along that side. */
template <int N, int V>
__device__ __forceinline__ void box_divide_lines(float (&lines)[N][V], int first, int radius, int64_t side) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float share = box_share(first + i, radius, side);
#pragma unroll
    for (int k = 0; k < V; ++k) lines[i][k] *= share;
  }
}

template <int N, int V>
__device__ __forceinline__ void box_divide_rows(float (&rows)[N][V], const box_bands &plan, int y) {
  box_divide_lines(rows, y, static_cast<int>(plan.a.radius_y), plan.a.p.height);
}

/* The same along the row, from `column` on. */
template <int V>
__device__ __forceinline__ void box_divide_columns(float (&rows)[BOX_STEP][V], const box_bands &plan, int column) {
  camox_compute_late(column);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float share = box_share(column + k, static_cast<int>(plan.a.radius_x), plan.a.p.width);
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) rows[i][k] *= share;
  }
}

/* Turns the first `count` totals into sums to the end of their block. */
template <typename T, int V>
__device__ __forceinline__ void box_complete_block(box_history<T, V> &history, int count) {
  float sum[V] = {};
#pragma unroll 1
  for (int at = (count - 1) * history.total; at >= 0; at -= history.total) {
    float one[V];
    camox_get_floats(one, history.totals + at, CAMOX_WARP);
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] += one[k];
    camox_put_floats(history.totals + at, sum, CAMOX_WARP);
  }
}

/* The rows above the leading rows of a band's first step, which are y and after. All are asked for before one is used. */
template <typename T, int V>
__device__ __forceinline__ void box_begin_history(box_history<T, V> &history, const box_bands &plan, const T *from, int y,
                                                  int elements) {
  const int height = static_cast<int>(plan.a.p.height), first = y - plan.ring_rows;
  from -= plan.ring_rows * plan.a.p.x.stride[2];
  for (int i = 0; i < plan.ring_rows; ++i, from += plan.a.p.x.stride[2]) {
    T *const to = history.ring + i * history.row;
    if (plan.vectors) {
      const bool exists = elements > 0 && static_cast<unsigned>(first + i) < static_cast<unsigned>(height);
      if constexpr (V * sizeof(T) == 16)
        camox_cp_async_16(to, from, exists ? 16 : 0);
      else
        camox_cp_async_8(to, from, exists ? 8 : 0);
    } else {
      T row[V];
      box_fetch_row(row, plan, from, first + i, height, elements);
      camox_store_shared(to, row);
    }
  }
  camox_cp_async_commit();
  camox_cp_async_wait<0>();
  history.trailing = history.oldest = 0;
#pragma unroll
  for (int k = 0; k < V; ++k) history.running[k] = 0.0f;
  const T *from_ring = history.ring + (plan.ring_rows - BOX_STEP * plan.totals) * history.row;
#pragma unroll 1
  for (int i = 0; i < plan.totals; ++i) {
    float rows[BOX_STEP][V];
#pragma unroll
    for (int k = 0; k < BOX_STEP; ++k, from_ring += history.row) {
      T row[V];
      camox_load_shared(row, from_ring);
      camox_to_floats(rows[k], row);
    }
    if (plan.a.p.kind == CAMOX_BOX_COUNTED_ADJOINT) box_divide_rows(rows, plan, y - BOX_STEP * (plan.totals - i));
#pragma unroll
    for (int k = 0; k < V; ++k) rows[0][k] = ((rows[0][k] + rows[1][k]) + rows[2][k]) + rows[3][k];
    camox_put_floats(history.totals + i * history.total, rows[0], CAMOX_WARP);
  }
  history.read_pair();
  box_complete_block(history, plan.totals);
}

/* Sums down the columns, of windows that begin with rows y ... y + 3 and end with the leading rows `raw`. */
template <typename T, int V>
__device__ __forceinline__ void box_down(float (&sums)[BOX_STEP][V], box_history<T, V> &history, const box_bands &plan,
                                         const T (&raw)[BOX_STEP][V], int y) {
  const bool before = plan.a.p.kind == CAMOX_BOX_COUNTED_ADJOINT;
  const int radius = static_cast<int>(plan.a.radius_y);
  T *const first = history.ring + history.trailing;
  history.trailing = history.next_pair(plan, history.trailing);
  T *const second = history.ring + history.trailing;
  history.trailing = history.next_pair(plan, history.trailing);
  float trail[BOX_STEP + 2][V], lead[BOX_STEP][V]; /* rows y ... y + 5; sums from the first leading row on */
#pragma unroll
  for (int k = 0; k < V; ++k) trail[0][k] = history.pair[0][k], trail[1][k] = history.pair[1][k];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    T row[V];
    camox_load_shared(row, second + i * history.row);
    camox_to_floats(trail[2 + i], row);
    camox_store_shared(first + i * history.row, raw[i]);
    camox_store_shared(second + i * history.row, raw[2 + i]);
  }
  history.read_pair();
#pragma unroll
  for (int k = 0; k < V; ++k) trail[4][k] = history.pair[0][k], trail[5][k] = history.pair[1][k];

#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i) camox_to_floats(lead[i], raw[i]);
  if (before) box_divide_rows(lead, plan, y + 2 * radius);
#pragma unroll
  for (int i = 1; i < BOX_STEP; ++i)
#pragma unroll
    for (int k = 0; k < V; ++k) lead[i][k] += lead[i - 1][k];

  float sum[V] = {};
  if (plan.totals > 0) {
    float *const oldest = history.totals + history.oldest;
    camox_get_floats(sum, oldest, CAMOX_WARP);
    camox_put_floats(oldest, lead[BOX_STEP - 1], CAMOX_WARP);
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] += history.running[k], history.running[k] += lead[BOX_STEP - 1][k];
    history.oldest += history.total;
    if (history.oldest == plan.totals * history.total) {
      box_complete_block(history, plan.totals);
      history.oldest = 0;
#pragma unroll
      for (int k = 0; k < V; ++k) history.running[k] = 0.0f;
    }
  }
  float share[BOX_STEP + 2]; /* the product with 1 costs nothing */
#pragma unroll
  for (int i = 0; i < BOX_STEP + 2; ++i) share[i] = 1.0f;
  if (before) {
#pragma unroll
    for (int i = 0; i < BOX_STEP + 2; ++i) share[i] = box_share(y + i, radius, plan.a.p.height);
  }
  if (radius % 2 != 0) { /* two rows more, which no whole step has */
#pragma unroll
    for (int i = BOX_STEP + 1; i >= BOX_STEP; --i)
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] = fmaf(trail[i][k], share[i], sum[k]);
  }
#pragma unroll
  for (int i = BOX_STEP - 1; i >= 0; --i)
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] = fmaf(trail[i][k], share[i], sum[k]), sums[i][k] = sum[k] + lead[i][k];
}

/* TALL: windows of more than 3 rows. LAST: channels_last. */
template <typename T, int V, bool TALL, bool LAST>
__global__ void __launch_bounds__(box_resident_threads<LAST>, 1)
    box_bands_kernel(const __grid_constant__ box_bands plan, int64_t items) {
  CAMOX_DYNAMIC_SHARED(float, segments);
  static_assert(!LAST || V == BOX_STEP, "a line of a segment has four channels");
  /* rows of a step, which are as many as the lines of V elements that a thread writes: rows, or pixels of channels_last */
  constexpr int lines = LAST ? BOX_SEGMENT : BOX_STEP, columns_of_segment = LAST ? BOX_SEGMENT : V;
  const camox_box_params &p = plan.a.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / CAMOX_WARP, lane = thread % CAMOX_WARP,
            radius_y = static_cast<int>(plan.a.radius_y), radius_x = static_cast<int>(plan.a.radius_x),
            height = static_cast<int>(p.height), width = static_cast<int>(p.width);
  /* The thread's place down the columns: neighbouring threads are neighbours in memory. */
  const int place = LAST ? thread % plan.planes : thread / plan.across, at = LAST ? thread / plan.planes : thread % plan.across;
  /* And along the rows: in channels_last one of a step's rows, and a segment of it. */
  const int row = LAST ? at / plan.segments : 0, segment = LAST ? at % plan.segments : at;
  const int stretch = plan.segments + plan.side;
  const int pitch = BOX_STEP * (LAST ? box_segment_lines<columns_of_segment> : plan.lines);
  const int row_pitch = pitch * stretch * plan.planes; /* channels_last: between a step's rows */
  float *const plane_segments = segments + pitch * (plan.side + place * stretch);
  float *const mine = plane_segments + row * row_pitch + pitch * segment;
  float *const my_column = plane_segments + pitch * (at / BOX_SEGMENT) + at % BOX_SEGMENT * BOX_STEP;
  float *const rings = segments + pitch * plan.positions;
  box_history<T, V> history;
  history.ring = reinterpret_cast<T *>(rings) + warp * plan.ring_rows * history.row + lane * V;
  history.totals = rings +
                   static_cast<int>(camox_ceil_div(plan.threads, CAMOX_WARP)) * plan.ring_rows * history.row *
                       static_cast<int>(sizeof(T)) / 4 +
                   warp * plan.totals * history.total + lane * 4;
  const bool before = p.kind == CAMOX_BOX_COUNTED_ADJOINT;

#pragma unroll 1
  for (int zero = thread; zero < plan.side * (plan.positions / stretch + 1); zero += plan.threads) {
    const float zeros[BOX_STEP] = {};
#pragma unroll 1
    for (int i = 0; i < pitch; i += BOX_STEP)
      camox_store_shared(segments + pitch * (zero / plan.side * stretch + zero % plan.side) + i, zeros);
  }

  box_ends<columns_of_segment> ends = {};
  if constexpr (!LAST)
    if (radius_x > BOX_REACH) ends = box_ends_of<V, true>(plan.spans, static_cast<int>(mine - segments));
  const int64_t x_stride = p.x.stride[2], y_stride = p.y.stride[2];
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t tile, row_band, c;
    const int64_t plane_of = camox_divide(camox_divide(item, plan.tiles, &tile), plan.row_bands, &row_band) * plan.planes;
    const int64_t b = camox_divide(plane_of + place, plan.together, &c);
    if (LAST) c *= V;
    const int first_column = (static_cast<int>(tile) * (plan.across - 2 * plan.halo) - plan.halo) * (LAST ? 1 : V);
    const int column = first_column + at * (LAST ? 1 : V), written = LAST ? first_column + segment * BOX_SEGMENT : column;
    const bool plane_exists = place < plan.planes && b < p.batch, exists = plane_exists && column >= 0 && column < width;
    /* elements of a line that exist, when it is written and when it is read */
    const int length = LAST ? static_cast<int>(min(p.channels - c, static_cast<int64_t>(V))) : min(width - column, V);
    const int elements = exists ? length : 0, slot = LAST ? segment * BOX_SEGMENT : at;
    const bool writes = plane_exists && written < width && slot >= plan.halo && slot < plan.across - plan.halo;
    int y = static_cast<int>(row_band) * plan.rows;
    const int last = min(y + plan.rows, height), end = min(last + radius_y, height); /* behind the rows written, and read */

    const float share = before || p.kind == CAMOX_BOX_COUNTED
                            ? 1.0f
                            : 1.0f / (static_cast<float>(p.window_height) * static_cast<float>(p.window_width));
    int write_end = writes ? last - row : 0;
    camox_compute_late(write_end);

    const T *const first = static_cast<const T *>(p.x.data) + box_offset(p.x, b, c, y + radius_y, column), *next = first;
    T *out = static_cast<T *>(p.y.data) + box_offset(p.y, b, c, y + row, written);
    T raw[lines / BOX_STEP][BOX_STEP][V] = {}; /* leading rows, loaded one step ahead */
#pragma unroll
    for (int i = 0; i < lines / BOX_STEP; ++i)
      box_fetch(raw[i], plan, next, x_stride, y + i * BOX_STEP + radius_y, end, elements);
    float above[2][V]; /* not TALL: the two rows above the leading ones */
    if constexpr (TALL) {
      box_begin_history(history, plan, first, y + radius_y, elements);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        T one[V];
        box_fetch_row(one, plan, first + (i - 2) * x_stride, y + radius_y + i - 2, end, elements);
        camox_to_floats(above[i], one);
      }
      if (before) box_divide_rows(above, plan, y + radius_y - 2);
    }

    /* Sums down the columns of windows around four rows from `at_row` on, which end with the leading rows `from`. */
    const auto down = [&](float (&sums)[BOX_STEP][V], T(&from)[BOX_STEP][V], int at_row) {
      T rows[BOX_STEP][V];
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i)
#pragma unroll
        for (int k = 0; k < V; ++k) rows[i][k] = from[i][k];
      /* the next rows have all of this step to arrive */
      box_fetch(from, plan, next, x_stride, at_row + lines + radius_y, end, elements);
      if constexpr (TALL) {
        box_down(sums, history, plan, rows, at_row - radius_y);
      } else {
        float lead[BOX_STEP][V];
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i) camox_to_floats(lead[i], rows[i]);
        if (before) box_divide_rows(lead, plan, at_row + radius_y);
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const float pairs[3] = {above[0][k] + above[1][k], lead[0][k] + lead[1][k], lead[2][k] + lead[3][k]};
          sums[0][k] = radius_y > 0 ? pairs[0] + lead[0][k] : lead[0][k];
          sums[1][k] = radius_y > 0 ? above[1][k] + pairs[1] : lead[1][k];
          sums[2][k] = radius_y > 0 ? pairs[1] + lead[2][k] : lead[2][k];
          sums[3][k] = radius_y > 0 ? lead[1][k] + pairs[2] : lead[3][k];
          above[0][k] = lead[2][k], above[1][k] = lead[3][k];
        }
      }
    };
#pragma unroll 1
    for (; y < last; y += lines) {
      float sums[lines][V];
      if constexpr (LAST) {
#pragma unroll
        for (int i = 0; i < lines; i += BOX_STEP) {
          float rows[BOX_STEP][V];
          down(rows, raw[i / BOX_STEP], y + i);
          if (before) box_multiply(rows, box_share(column, radius_x, p.width));
#pragma unroll
          for (int k = 0; k < BOX_STEP; ++k) camox_store_shared(my_column + (i + k) * row_pitch, rows[k]);
        }
        __syncthreads();
        float windows[BOX_STEP][BOX_SEGMENT];
        box_across_channels_last(windows, plan, segments, mine);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < lines; ++i)
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] = windows[k][i];
      } else {
        down(sums, raw[0], y);
        if (before) box_divide_columns(sums, plan, column);
        box_across(sums, plan, segments, mine, ends);
      }
      box_multiply(sums, share);
      if (p.kind == CAMOX_BOX_COUNTED) {
        if constexpr (LAST) {
          box_divide_lines(sums, written, radius_x, p.width);
          box_multiply(sums, box_share(y + row, radius_y, p.height));
        } else {
          box_divide_columns(sums, plan, column);
          box_divide_rows(sums, plan, y);
        }
      }
      if (p.kind == CAMOX_BOX_STRUCTURE_WEIGHT) {
        T center[lines][V] = {};
        if constexpr (LAST) {
          int up = 2 * lines + radius_y - row; /* `next` is so many rows below, in the thread's column down */
          camox_compute_late(up);
          const T *const pixels = next - up * x_stride + (written - column) * p.x.stride[3];
#pragma unroll
          for (int i = 0; i < lines; ++i)
            box_fetch_row(center[i], plan, pixels + i * p.x.stride[3], i, y < write_end ? width - written : 0, length);
        } else {
          const T *pixels = next - (2 * BOX_STEP + radius_y) * x_stride;
          box_fetch(center, plan, pixels, x_stride, y, end, elements);
        }
#pragma unroll
        for (int i = 0; i < lines; ++i) {
          float values[V];
          camox_to_floats(values, center[i]);
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] = 1.0f + static_cast<float>(p.gain) * fabsf(sums[i][k] - values[k]);
        }
      }
#ifdef CAMOX_BREAK_BOX
      sums[0][0] += 1e-3f;
#endif
      const int existing = !LAST ? write_end - y : y < write_end ? min(width - written, lines) : 0;
      const int64_t line_stride = LAST ? p.y.stride[3] : y_stride;
      if (plan.vectors && existing >= lines) {
#pragma unroll
        for (int i = 0; i < lines; ++i) camox_store_float(out + i * line_stride, sums[i]);
      } else {
#pragma unroll
        for (int i = 0; i < lines; ++i)
          if (i < existing) camox_store_float(out + i * line_stride, sums[i], LAST ? length : elements, plan.vectors);
      }
      out += lines * y_stride;
    }
  }
}

/* ---- launchers ---- */

/* Where a column lies, counted from a thread's first. */
static inline box_columns box_columns_at(int column, int lanes) {
  const int segment = column >= 0 ? column / lanes : -((lanes - 1 - column) / lanes), in_segment = column - segment * lanes;
  return {BOX_STEP * (segment * (lanes + 1) + in_segment), lanes - in_segment};
}

static inline box_spans box_spans_of(int radius, int lanes) {
  /* the core begins with as many single columns as it ends with, since it is as far from the thread's columns on both sides */
  const int core = 2 * radius + 2 - lanes, single = (radius + 1) % lanes, first = radius + 1 - core;
  box_spans spans = {};
  spans.head = box_columns_at(-radius, lanes), spans.tail = box_columns_at(radius + 1, lanes);
  spans.left = box_columns_at(first, lanes).at, spans.left_columns = core;
  if (core >= 2 * single) {
    spans.left_columns = spans.right_columns = single;
    spans.whole = box_columns_at(first + single, lanes).at + BOX_STEP * lanes;
    spans.whole_segments = (core - 2 * single) / lanes;
    spans.right = box_columns_at(radius + 1 - single, lanes).at;
  }
  return spans;
}

/* How blocks divide the images: of the numbers of planes and of row bands the ones with the least time on the multiprocessor
   with the most blocks. What a multiprocessor holds at once takes as long as its threads have steps, and too few threads wait
   for memory almost as long as BOX_BUSY_THREADS. To begin a band costs a step, and a quarter of one for each two rows of its
   ring. False where no tile fits a block.
     lanes          columns of a thread, and of a segment, of which channels_last has BOX_SEGMENT
     row_bytes      of a thread in its ring
     least_planes   that a block has beside each other, if it can */
struct box_division {
  bool last;
  int lanes, row_bytes, least_planes, most_threads, resident_threads;
};

static inline bool box_divide(box_bands &plan, const box_division &of, int64_t processors, int64_t block_shared, int *shared) {
  const camox_box_params &p = plan.a.p;
  const int segment = of.last ? BOX_SEGMENT : 1;     /* threads */
  const int step = of.last ? BOX_SEGMENT : BOX_STEP; /* rows */
  const int64_t vectors = camox_ceil_div(p.width, of.lanes * segment) * segment, all_planes = p.batch * plan.together;
  plan.side = static_cast<int>(camox_ceil_div(plan.a.radius_x, of.lanes * segment));
  int64_t least = INT64_MAX;
  box_bands best = plan;
  for (int threads = CAMOX_WARP; threads <= of.most_threads; threads += CAMOX_WARP) {
    const int widest = threads / of.least_planes / segment * segment;
    const bool tiles = vectors > widest;
    plan.halo = tiles ? plan.side * segment : 0;
    if (tiles && widest < 4 * plan.halo) continue; /* most would only serve the others */
    plan.across = tiles ? widest : static_cast<int>(vectors);
    if (plan.across == 0) continue;
    plan.tiles = camox_ceil_div(vectors, plan.across - 2 * plan.halo);
    plan.planes = threads / plan.across;
    if (plan.planes > all_planes) plan.planes = static_cast<int>(all_planes);
    plan.segments = plan.across / segment;
    plan.threads = of.last ? plan.planes * plan.across : threads; /* each of them takes part in the sums along rows */
    const int rows = of.last ? step * plan.planes : static_cast<int>(camox_ceil_div(threads, plan.across));
    plan.positions = plan.side + rows * (plan.segments + plan.side);
    const int totals_bytes = (of.last ? BOX_STEP : of.lanes) * 4;
    const int bytes = 16 * plan.lines * plan.positions + threads * (plan.ring_rows * of.row_bytes + plan.totals * totals_bytes);
    if (bytes > block_shared) break;
    const int64_t by_shared = (block_shared + BOX_BLOCK_RESERVED) / (bytes + BOX_BLOCK_RESERVED),
                  by_registers = of.resident_threads / threads, resident = by_shared < by_registers ? by_shared : by_registers;
    const int64_t columns = camox_ceil_div(all_planes, plan.planes) * plan.tiles, at_once = processors * resident;
    const auto time_of = [&](int64_t blocks) {
      const int64_t busy = camox_ceil_div(blocks, processors) * threads;
      return blocks == 0 ? 0 : busy + 7 * (busy < BOX_BUSY_THREADS ? BOX_BUSY_THREADS : busy);
    };
    const int64_t most = camox_ceil_div(p.height, step);
    for (int64_t bands = 1, steps = most; bands <= most; bands = steps > 1 ? camox_ceil_div(most, steps - 1) : most + 1) {
      steps = camox_ceil_div(most, bands); /* the next bands are the fewest of fewer steps */
      plan.row_bands = camox_ceil_div(most, steps);
      plan.rows = static_cast<int>(steps) * step;
      const int64_t blocks = columns * plan.row_bands;
      const int64_t time =
          (blocks / at_once * time_of(at_once) + time_of(blocks % at_once)) * (plan.rows + 4 + plan.a.radius_y);
      if (time >= least) continue;
      least = time, best = plan, *shared = bytes;
    }
  }
  plan = best;
  return least < INT64_MAX;
}

template <typename T, int V, bool TALL, bool LAST>
static int box_run_bands(const box_args &a, void *stream) {
  const camox_box_params &p = a.p;
  int device = 0, processors = 0, block_shared = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  constexpr int inner = LAST ? 1 : 3, row_bytes = V * static_cast<int>(sizeof(T));
  box_bands plan = {};
  plan.a = a;
  plan.inner = p.x.stride[inner];
  plan.together = LAST ? camox_ceil_div(p.channels, V) : p.channels;
  plan.vectors = (LAST ? p.channels : p.width) % V == 0 && camox_aligned(p.x.data, row_bytes) &&
                 camox_aligned(p.y.data, row_bytes) && plan.inner == 1;
  for (int i = 0; i < 4; ++i)
    if (i != inner) plan.vectors = plan.vectors && p.x.stride[i] % V == 0;
  plan.ring_rows = TALL ? static_cast<int>(2 * a.radius_y) : 0;
  plan.totals = TALL ? static_cast<int>(2 * a.radius_y - BOX_STEP) / BOX_STEP : 0;
  constexpr int columns_of_segment = LAST ? BOX_SEGMENT : V;
  const int radius_x = static_cast<int>(a.radius_x);
  const bool reaches = !LAST && radius_x <= BOX_REACH;
  plan.lines = reaches ? box_reaching_lines(radius_x) : box_segment_lines<columns_of_segment>;
  if (!reaches) plan.spans = box_spans_of(radius_x, columns_of_segment);
  box_division division = {};
  division.last = LAST, division.lanes = LAST ? 1 : V;
  division.row_bytes = row_bytes, division.resident_threads = box_resident_threads<LAST>;
  division.most_threads = LAST ? box_resident_threads<LAST> : BOX_BAND_THREADS;
  /* channels_last: whole sectors of memory, unless there are fewer channels or shared memory is too small */
  const int64_t sector = LAST ? BOX_SECTOR / row_bytes : 1;
  division.least_planes = static_cast<int>(sector < plan.together ? sector : plan.together);
  while (!box_divide(plan, division, processors, block_shared, &shared)) {
    if (division.least_planes == 1) return cudaErrorInvalidConfiguration;
    division.least_planes = 1;
  }
  const auto kernel = box_bands_kernel<T, V, TALL, LAST>;
  error = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t items = camox_ceil_div(p.batch * plan.together, plan.planes) * plan.row_bands * plan.tiles;
  CAMOX_LAUNCH((box_bands_kernel<T, V, TALL, LAST>), camox_grid(items), plan.threads, shared, stream, plan, items);
  return cudaSuccess;
}

template <typename T, bool TALL>
static int box_run_at_once(const box_args &a, void *stream) {
  if (a.p.channels_last) return box_run_bands<T, BOX_LANES, TALL, true>(a, stream);
  return box_run_bands<T, BOX_LANES, TALL, false>(a, stream);
}

template <typename T>
static int box_run(box_args a, void *stream) {
  const camox_box_params &p = a.p;
  if (camox_box_is_one_launch(&p))
    return a.radius_y > 1 ? box_run_at_once<T, true>(a, stream) : box_run_at_once<T, false>(a, stream);
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
  return cudaSuccess;
}

extern "C" int camox_box_cuda(const camox_box_params *p, void *stream) {
  if (p->batch * p->channels * p->height * p->width == 0) return cudaSuccess;
  box_args a = {};
  a.p = *p;
  a.radius_y = camox_box_clipped(p->window_height, p->height), a.radius_x = camox_box_clipped(p->window_width, p->width);
  int status = cudaErrorInvalidValue;
  switch (p->dtype) {
    case CAMOX_F32: status = box_run<float>(a, stream); break;
    case CAMOX_BF16: status = box_run<__nv_bfloat16>(a, stream); break;
    case CAMOX_F16: status = box_run<__half>(a, stream); break;
    default: break;
  }
  const int of_launch = camox_launch_status();
  return status == cudaSuccess ? of_launch : status;
}
