/* edge_maps on CUDA. A thread owns V neighbours along the innermost dimension (columns, or channels of channels_last) and walks
   down `rows` rows, so each element is read once from memory and its neighbours from the cache; the next row is under way while
   one is computed. V is the widest access that all tensors allow: 16 bytes, 4 bytes, or one element with any strides.
   The backward exchanges filter gradients with the threads of the neighbouring columns: by shuffles where they are lanes of one
   warp (its outer two lanes only serve their neighbours), through shared memory in channels_last. No atomics: fixed bits. */
#include "../common/cuda_util.cuh"
#include "edge.h"

#define EDGE_THREADS 256
#define EDGE_ROWS 8          /* rows a thread walks down in a large picture */
#define EDGE_FILL (1 << 18)  /* threads that fill a large GPU: below it threads take fewer rows */
#define EDGE_WARP_OUTPUTS 30 /* lanes of a warp that write in the backward */

struct edge_plan {
  camox_edge_params p;
  int rows;        /* rows that one thread walks down */
  int64_t strips;  /* of that many rows in a picture */
  int64_t vectors; /* along the innermost dimension */
  int64_t items;   /* threads with work; channels_last backward: blocks with work */
  int chunk, columns, chunks,
      tiles; /* channels_last backward: channel vectors and columns a block takes, and how many of each */
};

/* One row of x around a thread's V elements, kept as differences so that a large mean cancels before it is rounded away. */
template <int V>
struct edge_row {
  float middle[V], slope[V], bend[V]; /* x, right - left, (left - x) + (right - x) */
};

template <typename T, int V, bool LAST>
struct edge_raw {
  T middle[V], left[LAST ? V : 1], right[LAST ? V : 1];
};

/* Where a thread's column stands in x, and where its neighbours across the border are read. */
template <typename T>
struct edge_source {
  const T *x;
  int64_t row_stride, left, right; /* distances in elements from the first and the last of the thread's columns */
  int64_t height;
  int border;
  bool has_left, has_right;
};

template <typename T, int V, bool LAST>
__device__ __forceinline__ edge_source<T> edge_source_at(const camox_edge_params &p, int64_t b, int64_t c, int64_t column) {
  edge_source<T> s;
  s.x = static_cast<const T *>(p.x.data) + b * p.x.stride[0] + c * p.x.stride[1] + column * p.x.stride[3];
  s.row_stride = p.x.stride[2];
  s.height = p.height;
  s.border = p.border;
  const int64_t step = p.x.stride[3], inside = p.border == CAMOX_BORDER_REFLECT ? step : 0;
  const bool first = column == 0, last = column + (LAST ? 1 : V) == p.width;
  s.left = first ? inside : -step;
  s.right = last ? -inside : step;
  s.has_left = !first || p.border != CAMOX_BORDER_ZEROS;
  s.has_right = !last || p.border != CAMOX_BORDER_ZEROS;
  return s;
}

/* camox_border_index for the device: -1 where the border is zero. */
__device__ __forceinline__ int64_t edge_source_row(int64_t y, int64_t height, int border) {
  if (y >= 0 && y < height) return y;
  if (border == CAMOX_BORDER_ZEROS) return -1;
  if (border == CAMOX_BORDER_REPLICATE) return y < 0 ? 0 : height - 1;
  const int64_t mirrored = y < 0 ? -y : 2 * height - 2 - y;
  return mirrored >= 0 && mirrored < height ? mirrored : -1; /* two rows off: no filter there is ever used */
}

template <typename T, int V, bool LAST>
__device__ __forceinline__ void edge_fetch(edge_raw<T, V, LAST> &raw, const edge_source<T> &s, int64_t y) {
  const int64_t row = edge_source_row(y, s.height, s.border);
  const T zero = camox_from_float<T>(0.0f);
#pragma unroll
  for (int i = 0; i < V; ++i) raw.middle[i] = zero;
#pragma unroll
  for (int i = 0; i < (LAST ? V : 1); ++i) raw.left[i] = raw.right[i] = zero;
  if (row < 0) return;
  const T *at = s.x + row * s.row_stride;
  camox_load<V>(raw.middle, at);
  if (s.has_left) camox_load<(LAST ? V : 1)>(raw.left, at + s.left);
  if (s.has_right) camox_load<(LAST ? V : 1)>(raw.right, at + s.right + (LAST ? 0 : V - 1));
}

template <typename T, int V, bool LAST>
__device__ __forceinline__ edge_row<V> edge_features(const edge_raw<T, V, LAST> &raw) {
  edge_row<V> f;
#pragma unroll
  for (int i = 0; i < V; ++i) f.middle[i] = camox_to_float(raw.middle[i]);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float left, right;
    if constexpr (LAST) {
      left = camox_to_float(raw.left[i]), right = camox_to_float(raw.right[i]);
    } else {
      left = i > 0 ? f.middle[i > 0 ? i - 1 : 0] : camox_to_float(raw.left[0]);
      right = i + 1 < V ? f.middle[i + 1 < V ? i + 1 : 0] : camox_to_float(raw.right[0]);
    }
    f.slope[i] = right - left;
    f.bend[i] = (left - f.middle[i]) + (right - f.middle[i]);
  }
  return f;
}

/* The filters at element i of the middle row; square = gx^2 + gy^2 + eps. The kernels' zeros multiply too, as in a convolution:
   an inf or NaN under one of them makes that filter NaN - the corners for lap, the cross for gx^2 + gy^2. */
template <int V>
__device__ __forceinline__ void edge_filter(const edge_row<V> &top, const edge_row<V> &at, const edge_row<V> &bottom, int i,
                                            float eps, float *gx, float *gy, float *lap, float *square) {
  const float corners = top.slope[i] + bottom.slope[i];
  const float cross = ((top.middle[i] - at.middle[i]) + (bottom.middle[i] - at.middle[i])) + at.bend[i];
  *gx = fmaf(2.0f, at.slope[i], corners);
  *gy = fmaf(4.0f, bottom.middle[i] - top.middle[i], bottom.bend[i] - top.bend[i]);
  *lap = fmaf(0.0f, corners, cross);
  *square = fmaf(*gx, *gx, fmaf(*gy, *gy, fmaf(0.0f, cross, eps)));
}

template <typename T>
__device__ __forceinline__ T *edge_at(const camox_view4 &view, int64_t b, int64_t c, int64_t y, int64_t column) {
  if (view.data == nullptr) return nullptr;
  return static_cast<T *>(view.data) + b * view.stride[0] + c * view.stride[1] + y * view.stride[2] + column * view.stride[3];
}

/* Thread `item` -> picture, channel, column and first row; neighbouring threads are neighbours in memory. */
template <int V, bool LAST>
__device__ __forceinline__ void edge_place(const edge_plan &plan, int64_t item, int64_t *b, int64_t *c, int64_t *column,
                                           int64_t *y) {
  int64_t vector, strip;
  int64_t rest = camox_divide(item, plan.vectors, &vector);
  if (LAST) {
    rest = camox_divide(rest, plan.p.width, column);
    *b = camox_divide(rest, plan.strips, &strip);
    *c = vector * V;
  } else {
    rest = camox_divide(rest, plan.strips, &strip);
    *b = camox_divide(rest, plan.p.channels, c);
    *column = vector * V;
  }
  *y = strip * plan.rows;
}

template <typename T, int V, bool LAST>
__global__ void __launch_bounds__(EDGE_THREADS) edge_kernel(const __grid_constant__ edge_plan plan) {
  const float eps = static_cast<float>(plan.p.eps);
  for (int64_t block = blockIdx.x; block * EDGE_THREADS < plan.items; block += gridDim.x) {
    const int64_t item = block * EDGE_THREADS + threadIdx.x;
    if (item >= plan.items) continue;
    int64_t b, c, column, y;
    edge_place<V, LAST>(plan, item, &b, &c, &column, &y);
    const edge_source<T> source = edge_source_at<T, V, LAST>(plan.p, b, c, column);
    T *out[CAMOX_EDGE_MAPS];
#pragma unroll
    for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) out[map] = edge_at<T>(plan.p.maps[map], b, c, y, column);

    edge_raw<T, V, LAST> raw, ahead;
    edge_fetch(raw, source, y - 1);
    edge_row<V> top = edge_features(raw);
    edge_fetch(raw, source, y);
    edge_row<V> at = edge_features(raw);
    edge_fetch(ahead, source, y + 1);
    const int64_t end = y + plan.rows < plan.p.height ? y + plan.rows : plan.p.height;
#pragma unroll 2
    for (; y < end; ++y) {
      const edge_raw<T, V, LAST> below = ahead;
      if (y + 1 < end) edge_fetch(ahead, source, y + 2);
      const edge_row<V> bottom = edge_features(below);
      float sobel[V], laplacian[V], gradient[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float gx, gy, lap, square;
        edge_filter(top, at, bottom, i, eps, &gx, &gy, &lap, &square);
        sobel[i] = camox_sqrt(square);
        laplacian[i] = fabsf(lap);
        gradient[i] = camox_sqrt(square + fmaf(lap, lap, eps));
#ifdef CAMOX_BREAK_EDGE
        sobel[i] += 1e-3f;
#endif
      }
      camox_store_float(out[CAMOX_EDGE_SOBEL], sobel);
      camox_store_float(out[CAMOX_EDGE_LAPLACIAN], laplacian);
      camox_store_float(out[CAMOX_EDGE_GRADIENT], gradient);
      if (out[CAMOX_EDGE_INPUT]) camox_store_float(out[CAMOX_EDGE_INPUT], at.middle);
#pragma unroll
      for (int map = 0; map < CAMOX_EDGE_MAPS; ++map)
        if (out[map]) out[map] += plan.p.maps[map].stride[2];
      top = at;
      at = bottom;
    }
  }
}

/* ---- backward ---- */

/* Gradients with respect to the filters' outputs at a thread's V elements. */
template <int V>
struct edge_grads {
  float gx[V], gy[V], lap[V];
};

template <typename T, int V>
struct edge_maps_raw {
  T map[CAMOX_EDGE_MAPS][V];
};

/* Row y of the incoming gradients; zeros off the picture and where there is none. */
template <typename T, int V>
__device__ __forceinline__ void edge_fetch_maps(edge_maps_raw<T, V> &raw, const edge_plan &plan, const T *const *maps,
                                                int64_t y, bool inside) {
  const T zero = camox_from_float<T>(0.0f);
  inside = inside && y >= 0 && y < plan.p.height;
#pragma unroll
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) {
    if (maps[map] && inside) {
      camox_load<V>(raw.map[map], maps[map] + y * plan.p.maps[map].stride[2]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) raw.map[map][i] = zero;
    }
  }
}

template <typename T, int V>
__device__ __forceinline__ edge_grads<V> edge_filter_gradient(const edge_row<V> &top, const edge_row<V> &at,
                                                              const edge_row<V> &bottom, const edge_maps_raw<T, V> &maps,
                                                              float eps, bool inside) {
  edge_grads<V> d;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float gx, gy, lap, square;
    edge_filter(top, at, bottom, i, eps, &gx, &gy, &lap, &square);
    /* d gradient = (sobel d sobel + lap d lap) / gradient, and sobel d sobel = gx dgx + gy dgy */
    const float joint = camox_to_float(maps.map[CAMOX_EDGE_GRADIENT][i]) * rsqrtf(square + fmaf(lap, lap, eps));
    const float scale = fmaf(camox_to_float(maps.map[CAMOX_EDGE_SOBEL][i]), rsqrtf(square), joint);
    const float sign = lap > 0.0f ? 1.0f : lap < 0.0f ? -1.0f : 0.0f;
    d.gx[i] = inside ? scale * gx : 0.0f;
    d.gy[i] = inside ? scale * gy : 0.0f;
    d.lap[i] = inside ? fmaf(camox_to_float(maps.map[CAMOX_EDGE_LAPLACIAN][i]), sign, joint * lap) : 0.0f;
  }
  return d;
}

/* What row r of filter gradients adds to rows r-1, r and r+1 of the result at one element, from its left, own and right column.
   Columns and rows that the border read stand for others: what would fall on them is folded back onto those. */
struct edge_shares {
  float up, same, down;
};

__device__ __forceinline__ edge_shares edge_adjoint(float left_gx, float left_gy, float left_lap, float gx, float gy, float lap,
                                                    float right_gx, float right_gy, float right_lap, int64_t column, int64_t r,
                                                    const camox_edge_params &p) {
  float x = left_gx - right_gx, y = fmaf(2.0f, gy, left_gy + right_gy), side = left_lap + right_lap;
  if (p.border != CAMOX_BORDER_ZEROS) {
    const bool reflect = p.border == CAMOX_BORDER_REFLECT;
    if (column == (reflect ? 1 : 0)) {
      x -= reflect ? left_gx : gx;
      y += reflect ? left_gy : gy;
      side += reflect ? left_lap : lap;
    }
    if (column == p.width - (reflect ? 2 : 1)) {
      x += reflect ? right_gx : gx;
      y += reflect ? right_gy : gy;
      side += reflect ? right_lap : lap;
    }
  }
  edge_shares s = {(x - y) + lap, fmaf(2.0f, x, fmaf(-4.0f, lap, side)), (x + y) + lap};
  if (p.border == CAMOX_BORDER_REPLICATE) {
    s.same += (r == 0 ? s.up : 0.0f) + (r == p.height - 1 ? s.down : 0.0f);
  } else if (p.border == CAMOX_BORDER_REFLECT) {
    const float up = s.up;
    if (r == p.height - 1) s.up += s.down;
    if (r == 0) s.down += up;
  }
  return s;
}

/* The rows of the result that are not complete yet: r-1 and r while row r of filter gradients is computed. */
template <int V>
struct edge_sums {
  float above[V], at[V];
};

/* Completes row r-1 in `done` and moves on by a row. */
template <int V>
__device__ __forceinline__ void edge_add(edge_sums<V> &sums, float (&done)[V], int i, const edge_shares &s, float grad_input) {
  done[i] = sums.above[i] + s.up;
  sums.above[i] = sums.at[i] + (s.same + grad_input);
  sums.at[i] = s.down;
}

/* The walk down a strip that both layouts share: exchange(d, left, right) hands out the neighbouring columns' gradients. */
template <typename T, int V, bool LAST, typename Exchange>
__device__ __forceinline__ void edge_walk(const edge_plan &plan, int64_t b, int64_t c, int64_t column, int64_t y, bool inside,
                                          bool writes, const Exchange &exchange) {
  const camox_edge_params &p = plan.p;
  const float eps = static_cast<float>(p.eps);
  const edge_source<T> source = edge_source_at<T, V, LAST>(p, b, c, column);
  const T *maps[CAMOX_EDGE_MAPS];
#pragma unroll
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) maps[map] = edge_at<const T>(p.maps[map], b, c, 0, column);
  T *out = edge_at<T>(p.grad_x, b, c, y, column);
  const int64_t end = y + plan.rows < p.height ? y + plan.rows : p.height;

  edge_raw<T, V, LAST> raw, ahead;
  edge_maps_raw<T, V> maps_ahead;
  edge_fetch(raw, source, y - 2);
  edge_row<V> top = edge_features(raw);
  edge_fetch(raw, source, y - 1);
  edge_row<V> at = edge_features(raw);
  edge_fetch(ahead, source, y);
  edge_fetch_maps<T, V>(maps_ahead, plan, maps, y - 1, inside);
  edge_sums<V> sums;
#pragma unroll
  for (int i = 0; i < V; ++i) sums.above[i] = sums.at[i] = 0.0f;

  /* every thread of a warp or block makes the same number of steps: the exchange needs them all */
  for (int step = 0; step < plan.rows + 2; ++step) {
    const int64_t r = y - 1 + step;
    const edge_raw<T, V, LAST> below = ahead;
    const edge_maps_raw<T, V> grads = maps_ahead;
    if (r < end) {
      edge_fetch(ahead, source, r + 2);
      edge_fetch_maps<T, V>(maps_ahead, plan, maps, r + 1, inside);
    }
    const edge_row<V> bottom = edge_features(below);
    const edge_grads<V> d = edge_filter_gradient<T, V>(top, at, bottom, grads, eps, inside && r >= 0 && r < p.height);
    edge_grads<(LAST ? V : 1)> left, right;
    exchange(d, left, right);
    float done[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      edge_shares s;
      if constexpr (LAST) {
        s = edge_adjoint(left.gx[i], left.gy[i], left.lap[i], d.gx[i], d.gy[i], d.lap[i], right.gx[i], right.gy[i],
                         right.lap[i], column, r, p);
      } else {
        const int l = i > 0 ? i - 1 : 0, n = i + 1 < V ? i + 1 : 0;
        s = edge_adjoint(i > 0 ? d.gx[l] : left.gx[0], i > 0 ? d.gy[l] : left.gy[0], i > 0 ? d.lap[l] : left.lap[0], d.gx[i],
                         d.gy[i], d.lap[i], i + 1 < V ? d.gx[n] : right.gx[0], i + 1 < V ? d.gy[n] : right.gy[0],
                         i + 1 < V ? d.lap[n] : right.lap[0], column + i, r, p);
      }
      edge_add(sums, done, i, s, camox_to_float(grads.map[CAMOX_EDGE_INPUT][i]));
#ifdef CAMOX_BREAK_EDGE
      done[i] += 1e-3f;
#endif
    }
    if (writes && r > y && r <= end) {
      camox_store_float(out, done);
      out += p.grad_x.stride[2];
    }
    top = at;
    at = bottom;
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(EDGE_THREADS) edge_backward_kernel(const __grid_constant__ edge_plan plan) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  const int64_t warps = camox_ceil_div(plan.items, EDGE_WARP_OUTPUTS);
  for (int64_t warp = (static_cast<int64_t>(blockIdx.x) * EDGE_THREADS + threadIdx.x) / CAMOX_WARP; warp < warps;
       warp += static_cast<int64_t>(gridDim.x) * (EDGE_THREADS / CAMOX_WARP)) {
    const int64_t wanted = warp * EDGE_WARP_OUTPUTS + lane - 1;
    const int64_t item = wanted < 0 ? 0 : wanted < plan.items ? wanted : plan.items - 1;
    int64_t b, c, column, y;
    edge_place<V, false>(plan, item, &b, &c, &column, &y);
    const bool writes = wanted == item && lane > 0 && lane <= EDGE_WARP_OUTPUTS;
    const bool has_left = column > 0, has_right = column + V < plan.p.width;
    edge_walk<T, V, false>(plan, b, c, column, y, true, writes,
                           [&](const edge_grads<V> &d, edge_grads<1> &left, edge_grads<1> &right) {
                             const float last_gx = __shfl_up_sync(CAMOX_FULL_MASK, d.gx[V - 1], 1);
                             const float last_gy = __shfl_up_sync(CAMOX_FULL_MASK, d.gy[V - 1], 1);
                             const float last_lap = __shfl_up_sync(CAMOX_FULL_MASK, d.lap[V - 1], 1);
                             const float first_gx = __shfl_down_sync(CAMOX_FULL_MASK, d.gx[0], 1);
                             const float first_gy = __shfl_down_sync(CAMOX_FULL_MASK, d.gy[0], 1);
                             const float first_lap = __shfl_down_sync(CAMOX_FULL_MASK, d.lap[0], 1);
                             left.gx[0] = has_left ? last_gx : 0.0f;
                             left.gy[0] = has_left ? last_gy : 0.0f;
                             left.lap[0] = has_left ? last_lap : 0.0f;
                             right.gx[0] = has_right ? first_gx : 0.0f;
                             right.gy[0] = has_right ? first_gy : 0.0f;
                             right.lap[0] = has_right ? first_lap : 0.0f;
                           });
  }
}

/* One array of V floats a thread, in pieces of up to 16 bytes that lie side by side for side-by-side threads. */
template <int V>
__device__ __forceinline__ void edge_put(float *shared, const float (&from)[V], int thread) {
  constexpr int piece = V < 4 ? V : 4;
#pragma unroll
  for (int i = 0; i < V; i += piece) {
    float part[piece];
#pragma unroll
    for (int j = 0; j < piece; ++j) part[j] = from[i + j];
    camox_store<piece>(shared + i * EDGE_THREADS + thread * piece, part);
  }
}

template <int V>
__device__ __forceinline__ void edge_get(float (&to)[V], const float *shared, int thread) {
  constexpr int piece = V < 4 ? V : 4;
#pragma unroll
  for (int i = 0; i < V; i += piece) {
    float part[piece];
    camox_load_shared<piece>(part, shared + i * EDGE_THREADS + thread * piece);
#pragma unroll
    for (int j = 0; j < piece; ++j) to[i + j] = part[j];
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(EDGE_THREADS) edge_backward_channels_last_kernel(const __grid_constant__ edge_plan plan) {
  /* two buffers: a row's exchange needs one barrier, not a second one before the next row overwrites it */
  __shared__ __align__(16) float buffers[2][3 * V * EDGE_THREADS];
  const camox_edge_params &p = plan.p;
  const int thread = static_cast<int>(threadIdx.x), slot = thread / plan.chunk, lane = thread % plan.chunk;
  int turn = 0;
  for (int64_t block = blockIdx.x; block < plan.items; block += gridDim.x) {
    int64_t chunk, tile, strip;
    int64_t b = camox_divide(block, plan.chunks, &chunk);
    b = camox_divide(b, plan.tiles, &tile);
    b = camox_divide(b, plan.strips, &strip);
    const int64_t vector = chunk * plan.chunk + lane, wanted = tile * (plan.columns - 2) + slot - 1;
    const int64_t column = wanted < 0 ? 0 : wanted < p.width ? wanted : p.width - 1;
    const bool inside = wanted == column && slot < plan.columns && vector < plan.vectors;
    const bool writes = inside && slot > 0 && slot < plan.columns - 1;
    const int64_t c = (vector < plan.vectors ? vector : plan.vectors - 1) * V;
    edge_walk<T, V, true>(plan, b, c, column, strip * plan.rows, inside, writes,
                          [&](const edge_grads<V> &d, edge_grads<V> &left, edge_grads<V> &right) {
                            float *const buffer = buffers[turn];
                            turn ^= 1;
                            edge_put(buffer, d.gx, thread);
                            edge_put(buffer + V * EDGE_THREADS, d.gy, thread);
                            edge_put(buffer + 2 * V * EDGE_THREADS, d.lap, thread);
                            __syncthreads();
                            /* threads that do not write read their own values: no branch, no address out of the buffer */
                            const int before = writes ? thread - plan.chunk : thread;
                            const int after = writes ? thread + plan.chunk : thread;
                            edge_get(left.gx, buffer, before);
                            edge_get(left.gy, buffer + V * EDGE_THREADS, before);
                            edge_get(left.lap, buffer + 2 * V * EDGE_THREADS, before);
                            edge_get(right.gx, buffer, after);
                            edge_get(right.gy, buffer + V * EDGE_THREADS, after);
                            edge_get(right.lap, buffer + 2 * V * EDGE_THREADS, after);
                          });
  }
}

/* ---- launchers ---- */

static bool edge_view_fits(const camox_view4 &view, const int64_t *sizes, int inner, int lanes, int element) {
  if (view.data == nullptr) return true;
  if (!camox_aligned(view.data, lanes * element)) return false;
  for (int i = 0; i < 4; ++i) {
    if (i == inner ? view.stride[i] != 1 : sizes[i] > 1 && view.stride[i] % lanes != 0) return false;
  }
  return true;
}

/* Whether every tensor can be accessed `lanes` elements at a time along the innermost dimension. */
static bool edge_fits(const camox_edge_params *p, int lanes, int element) {
  const int64_t sizes[4] = {p->batch, p->channels, p->height, p->width};
  const int inner = p->channels_last ? 1 : 3;
  if (sizes[inner] % lanes != 0) return false;
  bool fits = edge_view_fits(p->x, sizes, inner, lanes, element) && edge_view_fits(p->grad_x, sizes, inner, lanes, element);
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) fits = fits && edge_view_fits(p->maps[map], sizes, inner, lanes, element);
  return fits;
}

/* Cuts the picture into strips, shorter ones where there are too few threads to fill the GPU. */
static edge_plan edge_plan_of(const camox_edge_params *p, int lanes) {
  edge_plan plan = {};
  plan.p = *p;
  plan.vectors = (p->channels_last ? p->channels : p->width) / lanes;
  const int64_t across = p->batch * plan.vectors * (p->channels_last ? p->width : p->channels);
  int rows = EDGE_ROWS;
  while (rows > 2 && across * camox_ceil_div(p->height, rows) < EDGE_FILL) rows /= 2;
  plan.strips = camox_ceil_div(p->height, rows);
  plan.rows = static_cast<int>(camox_ceil_div(p->height, plan.strips));
  plan.items = across * plan.strips;
  return plan;
}

template <typename T, int V>
static void edge_launch(const camox_edge_params *p, void *stream) {
  const edge_plan plan = edge_plan_of(p, V);
  const unsigned grid = camox_grid(camox_ceil_div(plan.items, EDGE_THREADS));
  if (p->channels_last)
    CAMOX_LAUNCH((edge_kernel<T, V, true>), grid, EDGE_THREADS, 0, stream, plan);
  else
    CAMOX_LAUNCH((edge_kernel<T, V, false>), grid, EDGE_THREADS, 0, stream, plan);
}

template <typename T, int V>
static void edge_launch_backward(const camox_edge_params *p, void *stream) {
  edge_plan plan = edge_plan_of(p, V);
  if (!p->channels_last) {
    const int64_t warps = camox_ceil_div(plan.items, EDGE_WARP_OUTPUTS);
    const unsigned grid = camox_grid(camox_ceil_div(warps, EDGE_THREADS / CAMOX_WARP));
    CAMOX_LAUNCH((edge_backward_kernel<T, V>), grid, EDGE_THREADS, 0, stream, plan);
    return;
  }
  plan.chunks = static_cast<int>(camox_ceil_div(plan.vectors, CAMOX_WARP));
  plan.chunk = static_cast<int>(camox_ceil_div(plan.vectors, plan.chunks));
  plan.columns = EDGE_THREADS / plan.chunk;
  if (plan.columns > p->width + 2) plan.columns = static_cast<int>(p->width + 2);
  plan.tiles = static_cast<int>(camox_ceil_div(p->width, plan.columns - 2));
  plan.items = p->batch * plan.strips * plan.tiles * plan.chunks;
  CAMOX_LAUNCH((edge_backward_channels_last_kernel<T, V>), camox_grid(plan.items), EDGE_THREADS, 0, stream, plan);
}

template <typename T, int V>
static void edge_launch_either(const camox_edge_params *p, bool backward, void *stream) {
  if (backward)
    edge_launch_backward<T, V>(p, stream);
  else
    edge_launch<T, V>(p, stream);
}

template <typename T>
static void edge_launch_widest(const camox_edge_params *p, bool backward, void *stream) {
  constexpr int element = static_cast<int>(sizeof(T));
  if (edge_fits(p, 16 / element, element))
    edge_launch_either<T, 16 / element>(p, backward, stream);
  else if (element == 2 && edge_fits(p, 2, element))
    edge_launch_either<T, element == 2 ? 2 : 1>(p, backward, stream);
  else
    edge_launch_either<T, 1>(p, backward, stream);
}

static int edge_run(const camox_edge_params *p, bool backward, void *stream) {
  if (p->batch * p->channels * p->height * p->width == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: edge_launch_widest<float>(p, backward, stream); break;
    case CAMOX_BF16: edge_launch_widest<__nv_bfloat16>(p, backward, stream); break;
    case CAMOX_F16: edge_launch_widest<__half>(p, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_edge_cuda(const camox_edge_params *p, void *stream) {
  camox_edge_params forward = *p;
  forward.grad_x.data = nullptr; /* not looked at, whatever it holds */
  return edge_run(&forward, false, stream);
}

extern "C" int camox_edge_backward_cuda(const camox_edge_params *p, void *stream) { return edge_run(p, true, stream); }
