/* edge_maps on CUDA, with the division of work, windows and borders of common/stencil.cuh.

     forward: a thread holds rows r-1, r, r+1 of its window as differences; rows r+2, r+3 are being loaded
       x  --16 B loads-->  top | at | bottom  -->  gx, gy, lap  -->  3 or 4 maps  --16 B stores-->
       contiguous halves from sm_80 on: all rows of a band are on their way to shared memory, by cp.async, before one is used

     backward: row r of the filters' gradients (d gx, d gy, d lap) adds to rows r-1, r, r+1 of grad_x
       shared memory, of contiguous images from sm_80 on, 16 B a thread of each tensor:
         gradients of rows r, r+1 and x below each: computed   |   of rows r+2, r+3: on their way, by cp.async
       registers:  sum_above (row r-1, complete once r is added) | sum_at (row r) | the next row starts
       the columns beside a thread's own come from its neighbours:
         contiguous      by warp shuffles     [ 0 | 1 ... 30 | 31 ]   lanes 0 and 31 only serve their neighbours
         channels_last   by shared memory     [2 buffers][gx, gy, lap][V * threads], one barrier a row;
                                              the first and the last column of a block only serve their neighbours

   Each element is read once from memory, its neighbours from the L1 cache or from the neighbours' staged rows. No atomics: the
   same bits on every run. */
#include "../common/stencil.cuh"
#include "edge.h"

#include <float.h>

#define EDGE_THREADS 128
#define EDGE_BACKWARD_BLOCKS 3 /* of them a multiprocessor must hold: at most 168 registers a thread */
#define EDGE_TILE_THREADS 160  /* channels_last backward */
#define EDGE_TILE_BLOCKS 2     /* at most 168 registers */
#define EDGE_WARP_OUTPUTS 30   /* lanes of a warp that write in the backward */

/* The forward of contiguous halves: see camox_forward_band. */
template <typename T, int V, bool LAST>
static constexpr bool edge_stages_forward = !LAST && camox_stages<T, V> && V == 8;

/* The same of the forward: as many as registers allow without spilling. */
template <typename T, int V, bool LAST>
struct edge_blocks {
  static constexpr int forward = V == 8 && !edge_stages_forward<T, V, LAST> ? 3 : 4;
};

/* Backward of contiguous images: rows that are asked for at once, on their way to shared memory while as many are computed. They
   are contiguous, and memory is faster at longer pieces. Registers hold none of them; the 12 or 16 warps that a row's registers
   leave do not hide its wait. */
#define EDGE_STAGED_ROWS 2

struct edge_plan {
  camox_edge_params p;
  camox_partition partition;
  camox_view4 shared_view; /* the strides that all maps have, where several elements are accessed at once */
  float eps;
  camox_tiles tiles; /* backward of channels_last */
};

/* One row of x around a thread's V elements, as differences, so that a large mean cancels before it is rounded away. */
template <int V>
struct edge_row {
  float middle[V];            /* x */
  float rise[V];              /* x - the x above */
  float difference[V];        /* right - left */
  float second_difference[V]; /* (right - x) - (x - left) */
};

template <typename T, int V, bool LAST>
using edge_raw = camox_window<T, V, LAST, 1>;

template <int V, bool LAST>
__device__ __forceinline__ edge_row<V> edge_differences(const edge_raw<float, V, LAST> &x, const edge_row<V> &above) {
  edge_row<V> f;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float left = x.x[i], middle = x.x[x.center + i], right = x.x[x.center + x.step + i];
    f.middle[i] = middle;
    f.rise[i] = middle - above.middle[i];
    f.difference[i] = right - left;
    f.second_difference[i] = (right - middle) - (middle - left);
  }
  return f;
}

template <typename T, int V, bool LAST>
__device__ __forceinline__ edge_row<V> edge_features(const edge_raw<T, V, LAST> &raw, const edge_row<V> &above) {
  return edge_differences<V, LAST>(camox_widen(raw), above);
}

/* square = gx^2 + gy^2 + eps */
struct edge_filters {
  float gx, gy, lap, square;
};

/* The filters at element i of the middle row. The kernels' zeros multiply too, as in a convolution:
   an inf or NaN under one of them makes that filter NaN - the corners for lap, the cross for gx^2 + gy^2. */
template <int V>
__device__ __forceinline__ edge_filters edge_filter(const edge_row<V> &top, const edge_row<V> &at, const edge_row<V> &bottom,
                                                    int i, float eps) {
  edge_filters f;
  const float corners = top.difference[i] + bottom.difference[i];
  const float cross = (bottom.rise[i] - at.rise[i]) + at.second_difference[i];
  f.gx = fmaf(2.0f, at.difference[i], corners);
  f.gy = fmaf(4.0f, at.rise[i] + bottom.rise[i], bottom.second_difference[i] - top.second_difference[i]);
  f.lap = fmaf(0.0f, corners, cross);
  f.square = fmaf(f.gx, f.gx, fmaf(f.gy, f.gy, fmaf(0.0f, cross, eps)));
  return f;
}

template <typename T, int V, bool LAST>
__global__ void __launch_bounds__(EDGE_THREADS, edge_blocks<T, V, LAST>::forward)
    edge_kernel(const __grid_constant__ edge_plan plan) {
  constexpr bool staged = edge_stages_forward<T, V, LAST>;
  __shared__ camox_forward_stage<staged, EDGE_THREADS> stage;
  const camox_edge_params &p = plan.p;
  for (int64_t block = blockIdx.x; block * EDGE_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t unclamped = block * EDGE_THREADS + threadIdx.x, item = min(unclamped, plan.partition.items - 1);
    if (!staged && unclamped != item) continue; /* of staged rows threads too many copy with their warp */
    int64_t b, c, column, y;
    camox_position<V, LAST>(plan.partition, item, &b, &c, &column, &y);
    auto reader = camox_reader_at<T, V, LAST, 1>(plan.partition, p.x, p.border, b, c, column, y, -1);
    auto out = camox_cursor_at<V>(p.maps, plan.shared_view, b, c, y, column);
    const int rows = unclamped == item ? static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;

    edge_row<V> top = {}, at = {}; /* rows r-2 and r-1 */
    const auto add_row = [&](const edge_raw<float, V, LAST> &x, int r) {
      const edge_row<V> bottom = edge_differences<V, LAST>(x, at);
      if (r >= 1 && r <= rows) {
        float sobel[V], laplacian[V], gradient[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const edge_filters f = edge_filter(top, at, bottom, i, plan.eps);
          sobel[i] = camox_sqrt(f.square);
          laplacian[i] = fabsf(f.lap);
          gradient[i] = camox_sqrt(f.square + fmaf(f.lap, f.lap, plan.eps));
#ifdef CAMOX_BREAK_EDGE
          sobel[i] += 1e-3f;
#endif
        }
        camox_store_float(camox_at<T>(p.maps, out, CAMOX_EDGE_SOBEL), sobel);
        camox_store_float(camox_at<T>(p.maps, out, CAMOX_EDGE_LAPLACIAN), laplacian);
        camox_store_float(camox_at<T>(p.maps, out, CAMOX_EDGE_GRADIENT), gradient);
        if (p.maps[CAMOX_EDGE_INPUT].data) camox_store_float(camox_at<T>(p.maps, out, CAMOX_EDGE_INPUT), at.middle);
        camox_next_row(p.maps, plan.shared_view, out);
      }
      top = at;
      at = bottom;
    };
    camox_forward_band<staged>(stage, reader, p.x, p.border, plan.partition.rows, rows, add_row);
  }
}

/* ---- backward ---- */

/* Gradients with respect to the filters' outputs, at a thread's elements or one beside them. */
template <int V>
struct edge_grads {
  float gx[V], gy[V], lap[V];
};

/* The gradient of a border column belongs to the column whose pixels it repeated. The adjoint sees that as a changed neighbour:
   with replicate the border column itself with gx negated; with reflect twice the neighbour, without its gx. */
template <int V>
__device__ __forceinline__ void edge_fold(edge_grads<V> &neighbour, const float *gx, const float *gy, const float *lap,
                                          float gx_factor, float factor) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    neighbour.gx[i] = gx_factor * gx[i];
    neighbour.gy[i] = factor * gy[i];
    neighbour.lap[i] = factor * lap[i];
  }
}

template <typename T, int V>
__device__ __forceinline__ edge_grads<V> edge_filter_gradient(const edge_row<V> &top, const edge_row<V> &at,
                                                              const edge_row<V> &bottom, const T (&maps)[CAMOX_EDGE_INPUT][V],
                                                              float eps) {
  edge_grads<V> d;
  constexpr int pair = V % 2 == 0 ? 2 : 1; /* converted together, and only when they are used: registers are few */
#pragma unroll
  for (int first = 0; first < V; first += pair) {
    float sobel[pair], laplacian[pair], gradient[pair];
    camox_to_floats(sobel, maps[CAMOX_EDGE_SOBEL] + first);
    camox_to_floats(laplacian, maps[CAMOX_EDGE_LAPLACIAN] + first);
    camox_to_floats(gradient, maps[CAMOX_EDGE_GRADIENT] + first);
#pragma unroll
    for (int k = 0; k < pair; ++k) {
      const int i = first + k;
      const edge_filters f = edge_filter(top, at, bottom, i, eps);
      /* d gradient = (sobel d sobel + lap d lap) / gradient, and sobel d sobel = gx dgx + gy dgy */
      const float joint = gradient[k] * camox_rsqrt(f.square + fmaf(f.lap, f.lap, eps));
      const float scale = fmaf(sobel[k], camox_rsqrt(f.square), joint);
      const float sign = copysignf(f.lap == 0.0f ? 0.0f : 1.0f, f.lap);
      d.gx[i] = scale * f.gx;
      d.gy[i] = scale * f.gy;
      d.lap[i] = fmaf(laplacian[k], sign, joint * f.lap);
    }
  }
  return d;
}

/* The next rows of a thread in shared memory, which nobody else reads: 16 bytes of x and of each map's gradient, side by side
   with those of the other threads. */
struct edge_stage {
  uint4 word[2 * EDGE_STAGED_ROWS][1 + CAMOX_EDGE_INPUT][EDGE_THREADS];
};

/* Where row r >= -1 lies in it. */
__device__ __forceinline__ int edge_slot(int r) {
  return static_cast<int>(static_cast<unsigned>(r + 1) % (2 * EDGE_STAGED_ROWS));
}

/* sm_75 cannot copy to shared memory and go on. */
template <typename T, int V>
static constexpr bool edge_stages = CAMOX_CUDA_ARCH >= 800 && V * sizeof(T) == 16;

/* Row r, once it has arrived. The columns beside a thread's own are those of its neighbours in the warp, all of whose lanes
   call; those that the first and the last lane do not have are not used. */
template <typename T, int V, bool LAST>
__device__ __forceinline__ void edge_receive(edge_raw<T, V, LAST> &x, T (&grads)[CAMOX_EDGE_INPUT][V], const edge_stage &stage,
                                             const camox_sides<V, LAST, 1> &sides, int r) {
  const uint4(*const words)[EDGE_THREADS] = stage.word[edge_slot(r)];
  const T *const own = reinterpret_cast<const T *>(&words[0][threadIdx.x]);
  camox_clear(x);
  camox_load_shared(edge_raw<T, V, LAST>::template part<V>(x.x + x.center), own);
  if (sides.has_left[0]) x.x[0] = own[sides.left[0]];
  if (sides.has_right[0]) x.x[x.center + V] = own[sides.right[0]];
#pragma unroll
  for (int map = 0; map < CAMOX_EDGE_INPUT; ++map)
    camox_load_shared(grads[map], reinterpret_cast<const T *>(&words[1 + map][threadIdx.x]));
}

/* The iteration down a row band that both layouts share. Row r of filter gradients adds to rows r-1, r and r+1 of the result,
   so row r-1 is complete once r is added. exchange(d, left, right) hands out the gradients of the neighbouring columns: of
   contiguous images the columns beside the thread's, of channels_last one for each channel. */
template <typename T, int V, bool LAST, bool STAGED, typename Exchange>
__device__ __forceinline__ void edge_backward_band(const edge_plan &plan, int64_t b, int64_t c, int64_t column, int64_t y,
                                                   bool inside, bool writes, edge_stage *stage, const Exchange &exchange) {
  const camox_edge_params &p = plan.p;
  auto reader = camox_reader_at<T, V, LAST, 1>(plan.partition, p.x, p.border, b, c, column, y, -2);
  auto maps = camox_cursor_at<V>(p.maps, plan.shared_view, b, c, y - 1, column);
  T *out = static_cast<T *>(p.grad_x.data) + camox_offset(p.grad_x, b, c, y, column);
  const int rows = writes ? static_cast<int>(min(plan.p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;
  /* the image's first and last row, where they are close enough to matter */
  const bool folds = p.border != CAMOX_BORDER_ZEROS, reflect = p.border == CAMOX_BORDER_REFLECT;
  const bool rare = folds || p.maps[CAMOX_EDGE_INPUT].data;
  const int first_row = y < 2 ? -static_cast<int>(y) : INT32_MIN;
  const int last_row =
      reader.rows.span - reader.rows.above < plan.partition.rows + 2 ? reader.rows.span - reader.rows.above - 1 : INT32_MAX;
  /* contiguous and reflect: columns 1 and W-2 lie beside columns 0 and W-1 of the same thread */
  const bool fold_first = !LAST && V > 1 && reflect && column == 0,
             fold_last = !LAST && V > 1 && reflect && column + V == p.width;

  edge_raw<T, V, LAST> first, raw;
  T grads[CAMOX_EDGE_INPUT][V]; /* a row of the incoming gradients of the three filters' maps */
  /* of contiguous half types the second branch would spill */
  const bool all =
      LAST && p.maps[CAMOX_EDGE_SOBEL].data && p.maps[CAMOX_EDGE_LAPLACIAN].data && p.maps[CAMOX_EDGE_GRADIENT].data;
  /* bit i: there is a gradient of map i */
  const unsigned present = (p.maps[CAMOX_EDGE_SOBEL].data ? 1u << CAMOX_EDGE_SOBEL : 0) |
                           (p.maps[CAMOX_EDGE_LAPLACIAN].data ? 1u << CAMOX_EDGE_LAPLACIAN : 0) |
                           (p.maps[CAMOX_EDGE_GRADIENT].data ? 1u << CAMOX_EDGE_GRADIENT : 0);
  /* step r needs row r + 1 of x and row r of the gradients: rows that do not count arrive as zeros */
  const auto request = [&](int r) {
    if (r <= plan.partition.rows) {
      uint4(*const words)[EDGE_THREADS] = stage->word[edge_slot(r)];
      bool known;
      const T *const next_x = camox_next_of(reader, p.x, p.border, r + 1, known);
      const unsigned has = inside && camox_inside(reader.rows, r) ? present : 0;
      camox_cp_async_16(&words[0][threadIdx.x], next_x, known ? 16 : 0);
#pragma unroll
      for (int map = 0; map < CAMOX_EDGE_INPUT; ++map)
        camox_cp_async_16(&words[1 + map][threadIdx.x], camox_at<const T>(p.maps, maps, map), has & 1u << map ? 16 : 0);
    }
    camox_next_row(p.maps, plan.shared_view, maps);
  };
  const auto prefetch = [&](int r) {
    /* into the registers of the row that has been used: two rows of raw values would spill */
    if (LAST || r <= plan.partition.rows) camox_fetch(raw, reader, p.x, p.border, r + 1);
    camox_fetch_maps(grads, p.maps, plan.shared_view, maps, all,
                     inside && r <= plan.partition.rows && camox_inside(reader.rows, r));
  };
  camox_sides<V, LAST, 1> sides = reader.sides; /* of staged rows, of which the warp has none beyond its lanes */
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  if (lane == 0 && sides.left[0] < 0) sides.left[0] = 0;
  if (lane == CAMOX_WARP - 1 && sides.right[0] >= V) sides.right[0] = 0;
  /* with the rows of the first steps all on their way at once */
  camox_fetch(first, reader, p.x, p.border, -2);
  camox_fetch(raw, reader, p.x, p.border, -1);
  if constexpr (STAGED) {
    for (int r = -1; r < EDGE_STAGED_ROWS - 1; ++r) request(r);
    camox_cp_async_commit();
  }
  edge_row<V> top = edge_features(first, edge_row<V>{}), at = edge_features(raw, top);
  if constexpr (!STAGED) prefetch(-1);
  float sum_above[V], sum_at[V]; /* rows r-1 and r of the result, not complete yet */
#pragma unroll
  for (int i = 0; i < V; ++i) sum_above[i] = sum_at[i] = 0.0f;

  /* every thread of a warp or block makes the same number of steps: the exchange needs them all; two at a time save moving
     rows between registers */
#pragma unroll 2
  for (int r = -1; r <= plan.partition.rows; ++r) {
    if constexpr (STAGED) {
      if (edge_slot(r) % EDGE_STAGED_ROWS == 0) {
        for (int k = 0; k < EDGE_STAGED_ROWS; ++k) request(r + EDGE_STAGED_ROWS + k);
        camox_cp_async_commit();
        camox_cp_async_wait<1>();
        __syncwarp();
      }
      edge_receive(raw, grads, *stage, sides, r);
    }
    const edge_row<V> bottom = edge_features(raw, at);
    const edge_grads<V> d = edge_filter_gradient<T, V>(top, at, bottom, grads, plan.eps);
    if constexpr (!STAGED) prefetch(r + 1);
    edge_grads<(LAST ? V : 1)> left, right;
    exchange(d, left, right);
    float done[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      constexpr int mine = LAST ? V : 1;
      const int before = i > 0 ? i - 1 : 0, after = i + 1 < V ? i + 1 : 0, beside = i < mine ? i : 0;
      const bool out_left = LAST || i == 0, out_right = LAST || i == V - 1;
      float left_gx = out_left ? left.gx[beside] : d.gx[before], right_gx = out_right ? right.gx[beside] : d.gx[after];
      float left_gy = out_left ? left.gy[beside] : d.gy[before], right_gy = out_right ? right.gy[beside] : d.gy[after];
      float left_lap = out_left ? left.lap[beside] : d.lap[before], right_lap = out_right ? right.lap[beside] : d.lap[after];
      if (i == 1 && fold_first) left_gx = 0.0f, left_gy *= 2.0f, left_lap *= 2.0f;
      if (i == V - 2 && fold_last) right_gx = 0.0f, right_gy *= 2.0f, right_lap *= 2.0f;
      const float across = left_gx - right_gx, along = fmaf(2.0f, d.gy[i], left_gy + right_gy), both = across + d.lap[i];
      done[i] = sum_above[i] + (both - along);
      sum_above[i] = sum_at[i] + fmaf(2.0f, across, fmaf(-4.0f, d.lap[i], left_lap + right_lap));
      sum_at[i] = both + along;
    }
    if (rare) { /* one branch: predicates would cost every row the instructions of both */
      if (p.maps[CAMOX_EDGE_INPUT].data && inside && camox_inside(reader.rows, r)) {
        /* few ask for the copy of x, so its gradient holds no registers from row to row; `maps` is further down */
        const int below = STAGED ? 2 * EDGE_STAGED_ROWS - edge_slot(r) % EDGE_STAGED_ROWS : 2;
        float input[V];
        camox_load_float(input, camox_at<const T>(p.maps, maps, CAMOX_EDGE_INPUT) -
                                    below * camox_strides<V>(p.maps, plan.shared_view, CAMOX_EDGE_INPUT).stride[2]);
#pragma unroll
        for (int i = 0; i < V; ++i) sum_above[i] += input[i];
      }
      if (folds && (r == first_row || r == last_row)) {
        /* gradients of the row above the first (now in done) and below the last (in sum_at) belong to the rows they repeat */
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float up = r == first_row ? done[i] : 0.0f, down = r == last_row ? sum_at[i] : 0.0f;
          if (reflect) {
            sum_at[i] += up;
            done[i] += down;
          } else {
            sum_above[i] += up + down;
          }
        }
      }
    }
    if (r > 0 && r <= rows) {
#ifdef CAMOX_BREAK_EDGE
      done[0] += 1e-3f;
#endif
      camox_store_float(out, done);
      out += p.grad_x.stride[2];
    }
    top = at;
    at = bottom;
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(EDGE_THREADS, EDGE_BACKWARD_BLOCKS)
    edge_backward_kernel(const __grid_constant__ edge_plan plan) {
  constexpr bool staged = edge_stages<T, V>;
  __shared__ typename camox_select<staged, edge_stage, int>::type staging;
  edge_stage *const stage = staged ? reinterpret_cast<edge_stage *>(&staging) : nullptr;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  const int64_t warps = camox_ceil_div(plan.partition.items, EDGE_WARP_OUTPUTS);
  const bool replicate = plan.p.border == CAMOX_BORDER_REPLICATE, reflect = plan.p.border == CAMOX_BORDER_REFLECT;
  for (int64_t warp = (static_cast<int64_t>(blockIdx.x) * EDGE_THREADS + threadIdx.x) / CAMOX_WARP; warp < warps;
       warp += static_cast<int64_t>(gridDim.x) * (EDGE_THREADS / CAMOX_WARP)) {
    const int64_t unclamped = warp * EDGE_WARP_OUTPUTS + lane - 1;
    const int64_t item = unclamped < 0 ? 0 : unclamped < plan.partition.items ? unclamped : plan.partition.items - 1;
    int64_t b, c, column, y;
    camox_position<V, false>(plan.partition, item, &b, &c, &column, &y);
    const bool writes = unclamped == item && lane > 0 && lane <= EDGE_WARP_OUTPUTS;
    const bool at_left = column == 0, at_right = column + V == plan.p.width;
    /* one element a thread: columns 1 and W-2 have their neighbours in other threads */
    const bool second = V == 1 && reflect && column == 1, last_but_one = V == 1 && reflect && column + 2 == plan.p.width;
    edge_backward_band<T, V, false, staged>(
        plan, b, c, column, y, true, writes, stage, [&](const edge_grads<V> &d, edge_grads<1> &left, edge_grads<1> &right) {
          left.gx[0] = __shfl_up_sync(CAMOX_FULL_MASK, d.gx[V - 1], 1);
          left.gy[0] = __shfl_up_sync(CAMOX_FULL_MASK, d.gy[V - 1], 1);
          left.lap[0] = __shfl_up_sync(CAMOX_FULL_MASK, d.lap[V - 1], 1);
          right.gx[0] = __shfl_down_sync(CAMOX_FULL_MASK, d.gx[0], 1);
          right.gy[0] = __shfl_down_sync(CAMOX_FULL_MASK, d.gy[0], 1);
          right.lap[0] = __shfl_down_sync(CAMOX_FULL_MASK, d.lap[0], 1);
          if (at_left) edge_fold(left, d.gx, d.gy, d.lap, replicate ? -1.0f : 0.0f, replicate ? 1.0f : 0.0f);
          if (at_right)
            edge_fold(right, d.gx + V - 1, d.gy + V - 1, d.lap + V - 1, replicate ? -1.0f : 0.0f, replicate ? 1.0f : 0.0f);
          if (second) edge_fold(left, left.gx, left.gy, left.lap, 0.0f, 2.0f);
          if (last_but_one) edge_fold(right, right.gx, right.gy, right.lap, 0.0f, 2.0f);
        });
  }
}

template <int V>
__device__ __forceinline__ void edge_put(float (*buffer)[V * EDGE_TILE_THREADS], const edge_grads<V> &d, int thread) {
  camox_put_tile<EDGE_TILE_THREADS>(buffer[0], d.gx, thread);
  camox_put_tile<EDGE_TILE_THREADS>(buffer[1], d.gy, thread);
  camox_put_tile<EDGE_TILE_THREADS>(buffer[2], d.lap, thread);
}

template <int V>
__device__ __forceinline__ void edge_get(edge_grads<V> &d, const float (*buffer)[V * EDGE_TILE_THREADS], int thread) {
  camox_get_tile<EDGE_TILE_THREADS>(d.gx, buffer[0], thread);
  camox_get_tile<EDGE_TILE_THREADS>(d.gy, buffer[1], thread);
  camox_get_tile<EDGE_TILE_THREADS>(d.lap, buffer[2], thread);
}

template <typename T, int V>
__global__ void __launch_bounds__(EDGE_TILE_THREADS, EDGE_TILE_BLOCKS)
    edge_backward_channels_last_kernel(const __grid_constant__ edge_plan plan) {
  /* two buffers: a row's exchange needs one barrier, not a second one before the next row overwrites it */
  __shared__ __align__(16) float buffers[2][3][V * EDGE_TILE_THREADS];
  const camox_edge_params &p = plan.p;
  const int thread = static_cast<int>(threadIdx.x);
  const bool replicate = p.border == CAMOX_BORDER_REPLICATE, reflect = p.border == CAMOX_BORDER_REFLECT;
  int buffer_index = 0;
  for (int64_t block = blockIdx.x; block < plan.tiles.blocks; block += gridDim.x) {
    const camox_tile_place place = camox_tile_at<V>(plan.tiles, plan.partition, block);
    /* threads that do not write read their own values: no address off the buffer */
    const int beside = place.writes ? plan.tiles.chunk : 0;
    /* A column only hands its gradients to its neighbours, so those of the border are folded where they are handed out: by the
       columns off the image, which compute the border column's again (replicate), or by the border columns (reflect). */
    const bool repeats = replicate && place.beyond != 0;
    const bool doubles = reflect && place.beyond == 0 && (place.column == 0 || place.column == p.width - 1);
    edge_backward_band<T, V, true, false>(
        plan, place.b, place.c, place.column, place.y, place.exists && (replicate || place.beyond == 0), place.writes, nullptr,
        [&](const edge_grads<V> &d, edge_grads<V> &left, edge_grads<V> &right) {
          float (*const buffer)[V * EDGE_TILE_THREADS] = buffers[buffer_index];
          buffer_index ^= 1;
          if (repeats || doubles) {
            edge_grads<V> folded;
            edge_fold(folded, d.gx, d.gy, d.lap, repeats ? -1.0f : 0.0f, repeats ? 1.0f : 2.0f);
            edge_put(buffer, folded, thread);
          } else {
            edge_put(buffer, d, thread);
          }
          __syncthreads();
          edge_get(left, buffer, thread - beside);
          edge_get(right, buffer, thread + beside);
        });
  }
}

/* ---- launchers ---- */

static edge_plan edge_plan_of(const camox_edge_params *p) {
  edge_plan plan = {};
  plan.p = *p;
  plan.shared_view = camox_first_map(p->maps);
  plan.eps = p->eps > FLT_MIN ? static_cast<float>(p->eps) : FLT_MIN;
  return plan;
}

/* For a kernel whose blocks have `per_block` threads that write. */
static void edge_launch_kernel(void (*kernel)(edge_plan), const camox_edge_params *p, int lanes, int per_block, int most_rows,
                               void *stream) {
  edge_plan plan = edge_plan_of(p);
  plan.partition = camox_partition_of(camox_places_of(kernel, EDGE_THREADS), p->channels_last, p->batch, p->channels, p->height,
                                      p->width, lanes, per_block, 2, most_rows);
  const unsigned grid = camox_grid(camox_ceil_div(plan.partition.items, per_block));
  CAMOX_LAUNCH(kernel, grid, EDGE_THREADS, 0, stream, plan);
}

template <typename T, int V, bool LAST>
static void edge_launch(const camox_edge_params *p, void *stream) {
  edge_launch_kernel(edge_kernel<T, V, LAST>, p, V, EDGE_THREADS, CAMOX_FORWARD_BAND, stream);
}

template <typename T, int V, bool LAST>
static void edge_launch_backward(const camox_edge_params *p, void *stream) {
  if constexpr (LAST)
    camox_launch_tiles(edge_backward_channels_last_kernel<T, V>, edge_plan_of(p), 1, EDGE_TILE_THREADS, V, stream);
  else
    edge_launch_kernel(edge_backward_kernel<T, V>, p, V, EDGE_THREADS / CAMOX_WARP * EDGE_WARP_OUTPUTS, CAMOX_LARGEST_BAND,
                       stream);
}

template <typename T, int V>
static void edge_launch_either(const camox_edge_params *p, bool backward, void *stream) {
  if (!backward && p->channels_last)
    edge_launch<T, V, true>(p, stream);
  else if (!backward)
    edge_launch<T, V, false>(p, stream);
  else if (p->channels_last)
    edge_launch_backward<T, V == 8 ? 4 : V, true>(p, stream);
  else
    edge_launch_backward<T, V, false>(p, stream);
}

struct edge_op {
  typedef camox_edge_params params;
  static constexpr bool backward_reads_x = true;

  /* The widest access that fits: 16 bytes (8 in the channels_last backward of half types, whose registers would spill), 4
     bytes, or element by element. */
  template <typename T>
  static void run(const params *p, bool backward, void *stream) {
    constexpr int element = static_cast<int>(sizeof(T)), widest = 16 / element, middle = element == 2 ? 2 : 1;
    if (backward && p->channels_last && camox_fits(p, p->maps, 4, element))
      edge_launch_backward<T, 4, true>(p, stream);
    else if (!(backward && p->channels_last) && camox_fits(p, p->maps, widest, element))
      edge_launch_either<T, widest>(p, backward, stream);
    else if (element == 2 && camox_fits(p, p->maps, middle, element))
      edge_launch_either<T, middle>(p, backward, stream);
    else
      edge_launch_either<T, 1>(p, backward, stream);
  }
};

extern "C" int camox_edge_cuda(const camox_edge_params *p, void *stream) { return camox_run<edge_op>(p, false, stream); }

extern "C" int camox_edge_backward_cuda(const camox_edge_params *p, void *stream) {
  return camox_run<edge_op>(p, true, stream);
}
