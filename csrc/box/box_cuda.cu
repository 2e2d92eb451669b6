/* Box means on CUDA. Sums are never formed by subtracting: no drift, and NaN and infinity stay where they are. No atomics:
   fixed bits.

   Contiguous images, windows of up to 61 x 61: one launch, x is read once and y written once (box_bands_kernel).

              planes of a block, `across` threads each, V adjacent columns (16 bytes of x) to a thread
       row  4j     | t t t t | <-- trailing rows, from the ring in shared memory: the first rows of the step's windows
            4j+4   |         |
             ...   |         |     whole steps of 4 rows: their totals lie in shared memory
            4j+2r  | l l l l | <-- leading rows, loaded one step ahead: the last rows of the windows
              |
              v  a block iterates down its row band, four rows of output to a step

     down     sum = trailing rows from the window's first on + totals between + leading rows to the window's last. The totals
              between are a sum over a window again: the end of one block of totals, whose sums to the end replace them once
              it is complete, and the beginning of the next, in registers. Windows of 3 rows need no ring.
     across   a thread's V columns, four rows at once, are a segment, whose sums from its begin and to its end lie in shared
              memory: sum = end of a segment + whole segments + beginning of a later one. Windows of 3, 5 and 7 columns take
              their neighbours' outermost columns instead, and add.
     shared   [sums or columns of segments, with zeros beside each row] [ring of rows of x] [totals]; ring and totals are each
              thread's own. Two barriers a step.

   channels_last and larger windows: sums along the rows into float32 memory, then down the columns, in two launches. A side is
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

#define BOX_BAND_THREADS 256    /* at most */
#define BOX_STEP 4              /* rows of a step */
#define BOX_BLOCK_RESERVED 1024 /* bytes of shared memory that the driver takes for each block */

/* Threads that a multiprocessor's registers are enough for: with 128 each, or 168 where a thread has 8 columns. */
template <int V>
static constexpr int box_resident_threads = V == 8 ? 384 : 512;

struct box_bands {
  box_args a;
  bool vectors;  /* all accesses of V elements are aligned */
  int threads;   /* of a block */
  int across;    /* threads of a row or, where a row is longer than a block, of its tile, */
  int halo;      /* whose first and last so many only serve the others */
  int side;      /* segments that a window reaches into on each side; so many of zeros lie beside each row */
  int positions; /* segments in shared memory, those of zeros too */
  int planes;    /* of a block, beside each other */
  int rows;      /* of a row band */
  int ring_rows; /* 2 * radius_y */
  int totals;    /* whole steps between a window's trailing and leading rows */
  int64_t tiles, row_bands;
};

/* 4 * V elements from memory; zeros where the row or the column lies outside the image. */
template <typename T, int V>
__device__ __forceinline__ void box_fetch(T (&to)[BOX_STEP][V], const box_bands &plan, const T *from, int y, int columns) {
#pragma unroll
  for (int i = 0; i < BOX_STEP; ++i)
#pragma unroll
    for (int c = 0; c < V; ++c) to[i][c] = camox_from_float<T>(0.0f);
  const unsigned height = static_cast<unsigned>(plan.a.p.height);
  if (plan.vectors) {
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i)
      if (columns > 0 && static_cast<unsigned>(y + i) < height) camox_load(to[i], from + i * plan.a.p.x.stride[2]);
  } else {
#pragma unroll
    for (int i = 0; i < BOX_STEP; ++i) {
      if (static_cast<unsigned>(y + i) >= height) continue;
#pragma unroll
      for (int c = 0; c < V; ++c)
        if (c < columns) to[i][c] = __ldg(from + i * plan.a.p.x.stride[2] + c * plan.a.p.x.stride[3]);
    }
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

/* Floats of shared memory that a segment's sums take: from its begin to each column, and from each but the first to its end. */
template <int V, int REACH>
static constexpr int box_segment_lines = REACH > 0 ? 2 * REACH : 2 * V - 1;

/* Sums along the rows, of four rows at once. `mine`: the thread's segment, in shared memory; a line is one column of all. */
template <int V, int REACH>
__device__ __forceinline__ void box_across(float (&sums)[BOX_STEP][V], const box_bands &plan, float *mine) {
  const int line = BOX_STEP * plan.positions;
  if constexpr (REACH > 0) {
    /* lines 0 ... REACH-1: the first columns, the others: the last */
#pragma unroll
    for (int c = 0; c < REACH; ++c) {
      const float first[BOX_STEP] = {sums[0][c], sums[1][c], sums[2][c], sums[3][c]};
      camox_store_shared(mine + c * line, first);
      constexpr int from = V - REACH;
      const float last[BOX_STEP] = {sums[0][from + c], sums[1][from + c], sums[2][from + c], sums[3][from + c]};
      camox_store_shared(mine + (REACH + c) * line, last);
    }
    __syncthreads();
    float left[REACH][BOX_STEP], right[REACH][BOX_STEP];
#pragma unroll
    for (int c = 0; c < REACH; ++c) {
      camox_load_shared(left[c], mine - BOX_STEP + (REACH + c) * line);
      camox_load_shared(right[c], mine + BOX_STEP + c * line);
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
  } else {
    /* line c < V: columns 0 ... c; line V-1+c: columns c ... V-1, so that line V-1 is the whole segment */
    const int radius = static_cast<int>(plan.a.radius_x);
    float sum[BOX_STEP];
#pragma unroll
    for (int c = 0; c < V; ++c) {
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) sum[i] = c > 0 ? sum[i] + sums[i][c] : sums[i][c];
      camox_store_shared(mine + c * line, sum);
    }
#pragma unroll
    for (int c = V - 1; c > 0; --c) {
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) sum[i] = c < V - 1 ? sum[i] + sums[i][c] : sums[i][c];
      camox_store_shared(mine + (V - 1 + c) * line, sum);
    }
    __syncthreads();
    /* column 0's window begins in segment `first`, begin columns behind its first, and ends in segment `last` */
    const int first = -plan.side, begin = plan.side * V - radius, last = radius / V, end = radius % V;
    const float *const whole = mine + (V - 1) * line;
    float between[BOX_STEP] = {}; /* segments that lie in the windows of all columns */
#pragma unroll 1
    for (int segment = first + 2; segment < last; ++segment) {
      camox_load_shared(sum, whole + segment * BOX_STEP);
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) between[i] += sum[i];
    }
    const float *from = mine + first * BOX_STEP + (V - 1 + begin) * line, *to = mine + last * BOX_STEP + end * line;
    float inside[BOX_STEP] = {between[0], between[1], between[2], between[3]};
    if (first + 1 < last) {
      camox_load_shared(sum, whole + (first + 1) * BOX_STEP);
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) inside[i] += sum[i];
    }
#pragma unroll
    for (int c = 0; c < V; ++c) {
      const bool next_first = begin + c == V, next_last = end + c == V;
      if (next_first) from += BOX_STEP - V * line;
      if (next_last) to += BOX_STEP - V * line;
      if (next_first || next_last) {
        /* the windows have left segment `first` or reached the one behind `last` */
        const bool left = begin + c >= V, reached = end + c >= V;
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i) inside[i] = between[i];
        if (!left && first + 1 < last) {
          camox_load_shared(sum, whole + (first + 1) * BOX_STEP);
#pragma unroll
          for (int i = 0; i < BOX_STEP; ++i) inside[i] += sum[i];
        }
        if (reached && first + (left ? 1 : 0) < last) {
          camox_load_shared(sum, whole + last * BOX_STEP);
#pragma unroll
          for (int i = 0; i < BOX_STEP; ++i) inside[i] += sum[i];
        }
      }
      float ending[BOX_STEP], beginning[BOX_STEP];
      camox_load_shared(ending, from);
      camox_load_shared(beginning, to);
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) sums[i][c] = (ending[i] + inside[i]) + beginning[i];
      from += line, to += line;
    }
  }
  __syncthreads();
}

/* REACH: the radius along rows where it is 1, 2 or 3, else 0. TALL: windows of more than 3 rows. */
template <typename T, int V, int REACH, bool TALL>
__global__ void __launch_bounds__(box_resident_threads<V>, 1)
    box_bands_kernel(const __grid_constant__ box_bands plan, int64_t items) {
  CAMOX_DYNAMIC_SHARED(float, segments);
  const camox_box_params &p = plan.a.p;
  const int thread = static_cast<int>(threadIdx.x), radius_y = static_cast<int>(plan.a.radius_y),
            radius_x = static_cast<int>(plan.a.radius_x), height = static_cast<int>(p.height);
  const int place = thread / plan.across, at = thread % plan.across, stretch = plan.across + plan.side;
  constexpr int lines = box_segment_lines<V, REACH>;
  float *const mine = segments + BOX_STEP * (plan.side + place * stretch + at);
  T *const ring = reinterpret_cast<T *>(segments + lines * BOX_STEP * plan.positions) + V * thread;
  float *const totals = segments + lines * BOX_STEP * plan.positions + plan.ring_rows * plan.threads * 4 + 4 * thread;
  const int ring_row = V * plan.threads, total_step = plan.threads, total_size = V * plan.threads;
  const bool before = p.kind == CAMOX_BOX_COUNTED_ADJOINT, counted = before || p.kind == CAMOX_BOX_COUNTED;

  for (int zero = thread; zero < plan.side * (plan.positions / stretch + 1); zero += plan.threads) {
    const float zeros[BOX_STEP] = {};
    for (int i = 0; i < lines; ++i)
      camox_store_shared(segments + BOX_STEP * (i * plan.positions + zero / plan.side * stretch + zero % plan.side), zeros);
  }

  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t tile, row_band, c;
    const int64_t plane_of = camox_divide(camox_divide(item, plan.tiles, &tile), plan.row_bands, &row_band) * plan.planes;
    const int64_t plane = plane_of + place;
    const int64_t b = camox_divide(plane, p.channels, &c);
    const int64_t column = (tile * (plan.across - 2 * plan.halo) - plan.halo + at) * V;
    const bool exists = place < plan.planes && b < p.batch && column >= 0 && column < p.width;
    const int columns = exists ? static_cast<int>(min(p.width - column, static_cast<int64_t>(V))) : 0;
    const bool writes = exists && at >= plan.halo && at < plan.across - plan.halo;
    const int first_row = static_cast<int>(row_band) * plan.rows;
    const int steps = (min(plan.rows, height - first_row) + BOX_STEP - 1) / BOX_STEP;
    const int early = (2 * radius_y + BOX_STEP - 1) / BOX_STEP; /* steps that only add to the window */

    float share[V]; /* what a pixel's sum is multiplied by, but for the row's share */
#pragma unroll
    for (int i = 0; i < V; ++i)
      share[i] = counted ? box_share(static_cast<int>(column) + i, radius_x, p.width)
                         : 1.0f / (static_cast<float>(p.window_height) * static_cast<float>(p.window_width));

    int y = first_row - BOX_STEP * early; /* of the step's first output */
    const T *from = static_cast<const T *>(p.x.data) + box_offset(p.x, b, c, y + radius_y, column);
    T *out = static_cast<T *>(p.y.data) + box_offset(p.y, b, c, first_row, column);
    T raw[BOX_STEP][V];
    box_fetch(raw, plan, from, y + radius_y, columns);
    int leading = 0, trailing = 0; /* rows of the ring */
    if constexpr (TALL) {          /* so that the first output's window begins with the ring's row 0 */
      leading = 2 * radius_y < BOX_STEP * early ? plan.ring_rows - 2 : 0;
    }
    int total = 0;
    float running[V] = {};  /* TALL: totals of the block that is not complete */
    float above[2][V] = {}; /* else the two rows above the leading ones */
#pragma unroll 1
    for (int step = -early; step < steps; ++step, y += BOX_STEP) {
      float sums[BOX_STEP][V], lead[BOX_STEP][V];
      if constexpr (TALL) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; i += 2) {
          camox_store_shared(ring + leading * ring_row, raw[i]);
          camox_store_shared(ring + leading * ring_row + ring_row, raw[i + 1]);
          leading = leading + 2 < plan.ring_rows ? leading + 2 : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i) camox_to_floats(lead[i], raw[i]);
      if (before) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i) {
          const float row_share = box_share(y + radius_y + i, radius_y, p.height);
#pragma unroll
          for (int k = 0; k < V; ++k) lead[i][k] *= row_share;
        }
      }
      if constexpr (TALL) {
#pragma unroll
        for (int i = 1; i < BOX_STEP; ++i)
#pragma unroll
          for (int k = 0; k < V; ++k) lead[i][k] += lead[i - 1][k];
        if (step >= 0) {
          float trail[V];
#pragma unroll
          for (int k = 0; k < V; ++k) trail[k] = running[k];
          if (plan.totals > 0) {
            float ending[V];
            camox_get_floats(ending, totals + total * total_size, total_step);
#pragma unroll
            for (int k = 0; k < V; ++k) trail[k] += ending[k];
          }
          /* the trailing rows from the last to the first; of an odd radius two more, which no whole step has. A pair of rows
             does not wrap around. */
          const auto add_pair = [&](int i, bool first) {
            const int slot = trailing + i < plan.ring_rows ? trailing + i : trailing + i - plan.ring_rows;
#pragma unroll
            for (int k = 1; k >= 0; --k) {
              T row[V];
              float values[V];
              camox_load_shared(row, ring + slot * ring_row + k * ring_row);
              camox_to_floats(values, row);
              /* 1 but where terms are divided: the product costs nothing */
              const float row_share = before ? box_share(y - radius_y + i + k, radius_y, p.height) : 1.0f;
#pragma unroll
              for (int j = 0; j < V; ++j) {
                trail[j] = fmaf(values[j], row_share, trail[j]);
                if (first) sums[(i + k) % BOX_STEP][j] = trail[j] + lead[(i + k) % BOX_STEP][j];
              }
            }
          };
          if (radius_y % 2 != 0) add_pair(BOX_STEP, false);
          add_pair(2, true);
          add_pair(0, true);
          trailing += BOX_STEP;
          if (trailing >= plan.ring_rows) trailing -= plan.ring_rows;
        }
        if (plan.totals > 0) {
          camox_put_floats(totals + total * total_size, lead[BOX_STEP - 1], total_step);
#pragma unroll
          for (int k = 0; k < V; ++k) running[k] += lead[BOX_STEP - 1][k];
          if (++total == plan.totals) {
            /* the block's totals become sums to its end */
#pragma unroll
            for (int k = 0; k < V; ++k) running[k] = 0.0f;
#pragma unroll 1
            while (total > 0) {
              float one[V];
              --total;
              camox_get_floats(one, totals + total * total_size, total_step);
#pragma unroll
              for (int k = 0; k < V; ++k) running[k] += one[k];
              camox_put_floats(totals + total * total_size, running, total_step);
            }
#pragma unroll
            for (int k = 0; k < V; ++k) running[k] = 0.0f;
          }
        }
      } else {
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
      from += BOX_STEP * p.x.stride[2];
      if (step + 1 < steps) box_fetch(raw, plan, from, y + BOX_STEP + radius_y, columns);
      if (step < 0) continue;

      if (before) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i)
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] *= share[k];
      }
      box_across<V, REACH>(sums, plan, mine);
      if (!before) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i)
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] *= share[k];
      }
      if (p.kind == CAMOX_BOX_COUNTED) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i) {
          const float row_share = box_share(y + i, radius_y, p.height);
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] *= row_share;
        }
      }
      if (p.kind == CAMOX_BOX_STRUCTURE_WEIGHT) {
        T center[BOX_STEP][V];
        box_fetch(center, plan, from - (BOX_STEP + radius_y) * p.x.stride[2], y, columns);
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i) {
          float values[V];
          camox_to_floats(values, center[i]);
#pragma unroll
          for (int k = 0; k < V; ++k) sums[i][k] = 1.0f + static_cast<float>(p.gain) * fabsf(sums[i][k] - values[k]);
        }
      }
#ifdef CAMOX_BREAK_BOX
      sums[0][0] += 1e-3f;
#endif
      const int rows = writes ? height - y : 0;
#pragma unroll
      for (int i = 0; i < BOX_STEP; ++i)
        if (i < rows && plan.vectors) camox_store_float(out + i * p.y.stride[2], sums[i]);
      if (!plan.vectors) {
#pragma unroll
        for (int i = 0; i < BOX_STEP; ++i)
          if (i < rows) camox_store_float(out + i * p.y.stride[2], sums[i], columns, false);
      }
      out += BOX_STEP * p.y.stride[2];
    }
  }
}

/* ---- launchers ---- */

/* How blocks divide the images: of the numbers of planes and of row bands the ones with the least time on the multiprocessor
   with the most blocks. What a multiprocessor holds at once takes as long as its threads have rows, and too few threads wait
   for memory as long as BOX_BAND_THREADS; a row of the halo costs half. False where no tile fits a block. */
static inline bool box_divide(box_bands &plan, int lanes, int lines, int resident_threads, int64_t processors,
                              int64_t block_shared, int *shared) {
  const camox_box_params &p = plan.a.p;
  const int64_t vectors = camox_ceil_div(p.width, lanes), all_planes = p.batch * p.channels;
  const int early = static_cast<int>(camox_ceil_div(2 * plan.a.radius_y, BOX_STEP));
  plan.side = static_cast<int>(camox_ceil_div(plan.a.radius_x, lanes));
  int64_t least = INT64_MAX;
  box_bands best = plan;
  for (plan.threads = CAMOX_WARP; plan.threads <= BOX_BAND_THREADS; plan.threads += CAMOX_WARP) {
    const bool tiles = vectors > plan.threads;
    if (tiles && plan.threads < 4 * plan.side) continue; /* most would only serve the others */
    plan.across = tiles ? plan.threads : static_cast<int>(vectors);
    plan.halo = tiles ? plan.side : 0;
    plan.tiles = camox_ceil_div(vectors, plan.across - 2 * plan.halo);
    plan.planes = plan.threads / plan.across;
    if (plan.planes > all_planes) plan.planes = static_cast<int>(all_planes);
    plan.positions = plan.side + static_cast<int>(camox_ceil_div(plan.threads, plan.across)) * (plan.across + plan.side);
    const int bytes = 16 * (lines * plan.positions + plan.threads * (plan.ring_rows + plan.totals * lanes / 4));
    if (bytes > block_shared) break;
    const int64_t by_shared = (block_shared + BOX_BLOCK_RESERVED) / (bytes + BOX_BLOCK_RESERVED),
                  by_registers = resident_threads / plan.threads,
                  resident = by_shared < by_registers ? by_shared : by_registers;
    const int64_t columns = camox_ceil_div(all_planes, plan.planes) * plan.tiles, at_once = processors * resident;
    const auto time_of = [&](int64_t blocks) {
      const int64_t busy = camox_ceil_div(blocks, processors) * plan.threads;
      return blocks == 0 ? 0 : busy < BOX_BAND_THREADS ? static_cast<int64_t>(BOX_BAND_THREADS) : busy;
    };
    const int64_t most = camox_ceil_div(p.height, BOX_STEP);
    for (int64_t bands = 1, steps = most; bands <= most; bands = steps > 1 ? camox_ceil_div(most, steps - 1) : most + 1) {
      steps = camox_ceil_div(most, bands); /* the next bands are the fewest of fewer steps */
      plan.row_bands = camox_ceil_div(most, steps);
      plan.rows = static_cast<int>(steps) * BOX_STEP;
      const int64_t blocks = columns * plan.row_bands;
      const int64_t time = (blocks / at_once * time_of(at_once) + time_of(blocks % at_once)) * (2 * steps + early);
      if (time >= least) continue;
      least = time, best = plan, *shared = bytes;
    }
  }
  plan = best;
  return least < INT64_MAX;
}

template <typename T, int REACH, bool TALL>
static int box_run_bands(const box_args &a, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  const camox_box_params &p = a.p;
  int device = 0, processors = 0, block_shared = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  box_bands plan = {};
  plan.a = a;
  plan.vectors = p.width % lanes == 0 && camox_aligned(p.x.data, 16) && camox_aligned(p.y.data, 16) && p.x.stride[3] == 1;
  for (int i = 0; i < 3; ++i) plan.vectors = plan.vectors && p.x.stride[i] % lanes == 0;
  plan.ring_rows = TALL ? static_cast<int>(2 * a.radius_y) + BOX_STEP : 0;
  plan.totals = TALL ? static_cast<int>(2 * a.radius_y - BOX_STEP) / BOX_STEP : 0;
  if (!box_divide(plan, lanes, box_segment_lines<lanes, REACH>, box_resident_threads<lanes>, processors, block_shared, &shared))
    return cudaErrorInvalidConfiguration;
  const auto kernel = box_bands_kernel<T, lanes, REACH, TALL>;
  error = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t items = camox_ceil_div(p.batch * p.channels, plan.planes) * plan.row_bands * plan.tiles;
  CAMOX_LAUNCH((box_bands_kernel<T, lanes, REACH, TALL>), camox_grid(items), plan.threads, shared, stream, plan, items);
  return cudaSuccess;
}

template <typename T>
static int box_run_at_once(const box_args &a, void *stream) {
  const bool tall = a.radius_y > 1;
  switch (a.radius_x) {
    case 1: return tall ? box_run_bands<T, 1, true>(a, stream) : box_run_bands<T, 1, false>(a, stream);
    case 2: return tall ? box_run_bands<T, 2, true>(a, stream) : box_run_bands<T, 2, false>(a, stream);
    case 3: return tall ? box_run_bands<T, 3, true>(a, stream) : box_run_bands<T, 3, false>(a, stream);
    default: return tall ? box_run_bands<T, 0, true>(a, stream) : box_run_bands<T, 0, false>(a, stream);
  }
}

template <typename T>
static int box_run(box_args a, void *stream) {
  const camox_box_params &p = a.p;
  if (camox_box_is_one_launch(&p)) return box_run_at_once<T>(a, stream);
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
