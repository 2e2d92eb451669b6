/* spatial_gradient on CUDA, with the division of work, windows and borders of common/stencil.cuh.

     forward:  x        --16 B loads-->  top | at | bottom  -->  gx, gy  --16 B stores-->     rows r+2, r+3 are being loaded
     backward: gx, gy   --16 B loads-->  row r adds to rows r-1 (`above`, then complete), r (`at`) and r+1 of grad_x

     of contiguous halves from sm_80 on rows come by way of shared memory, to which cp.async copies
       forward:  [ first half of a band's rows | second half ]      both on their way before the first is waited for
       backward: [ rows r, r+1: computed | r+2, r+3: on their way ]

   The op is linear: its backward iterates over the incoming gradients alone and computes nothing for other threads. Each element
   is read once from memory, its neighbours from the L1 cache or from the staged rows. No atomics: the same bits on every run. */
#include "../common/stencil.cuh"
#include "spatial_gradient.h"

#define GRADIENT_THREADS 128
#define GRADIENT_MAPS 2
#define GRADIENT_STAGED_ROWS 2 /* backward of contiguous images, see camox_stage */
/* Of halves: the backward is 6% faster on an H200, where float32's is 8% slower than with rows in registers. */
template <typename T, int V, bool LAST>
static constexpr bool gradient_stages = !LAST && camox_stages<T, V> && V == 8;

/* Blocks that a multiprocessor must hold: as many as registers allow without spilling. */
template <typename T, int V, bool LAST>
struct gradient_blocks {
  static constexpr int forward = LAST && V == 8 ? 3 : gradient_stages<T, V, LAST> ? 5 : 4, backward = LAST && V == 8 ? 4 : 5;
};

struct gradient_plan {
  camox_spatial_gradient_params p;
  camox_partition partition;
  camox_view4 shared_view; /* the strides that gx and gy have, where several elements are accessed at once */
  float side, middle;
};

/* Differences of pixels first, so that a large mean cancels before it is rounded away. The kernels' zeros multiply too, as in a
   convolution: an inf or NaN under one of them makes that derivative NaN. */
template <int V, bool LAST>
__device__ __forceinline__ void gradient_filter(const camox_window<float, V, LAST, 1> &top,
                                                const camox_window<float, V, LAST, 1> &at,
                                                const camox_window<float, V, LAST, 1> &bottom, float side, float middle,
                                                float (&gx)[V], float (&gy)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int l = i, m = at.center + i, r = at.center + at.step + i;
    gx[i] = fmaf(side, (top.x[r] - top.x[l]) + (bottom.x[r] - bottom.x[l]), middle * (at.x[r] - at.x[l]));
    gy[i] = fmaf(side, (bottom.x[l] - top.x[l]) + (bottom.x[r] - top.x[r]), middle * (bottom.x[m] - top.x[m]));
    gx[i] = fmaf(0.0f, (top.x[m] - at.x[m]) + (bottom.x[m] - at.x[m]), gx[i]);
    gy[i] = fmaf(0.0f, (at.x[l] - at.x[m]) + (at.x[r] - at.x[m]), gy[i]);
#ifdef CAMOX_BREAK_SPATIAL_GRADIENT
    gx[i] += 1e-3f;
#endif
  }
}

template <typename T, int V, bool LAST>
__global__ void __launch_bounds__(GRADIENT_THREADS, gradient_blocks<T, V, LAST>::forward)
    spatial_gradient_kernel(const __grid_constant__ gradient_plan plan) {
  constexpr bool staged = gradient_stages<T, V, LAST>;
  __shared__ camox_forward_stage<staged, GRADIENT_THREADS> stage;
  const camox_spatial_gradient_params &p = plan.p;
  for (int64_t block = blockIdx.x; block * GRADIENT_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t unclamped = block * GRADIENT_THREADS + threadIdx.x, item = min(unclamped, plan.partition.items - 1);
    if (!staged && unclamped != item) continue; /* of staged rows threads too many copy with their warp */
    int64_t b, c, column, y;
    camox_position<V, LAST>(plan.partition, item, &b, &c, &column, &y);
    auto reader = camox_reader_at<T, V, LAST, 1>(plan.partition, p.x, p.border, b, c, column, y, -1);
    auto out = camox_cursor_at<V>(p.gradient, plan.shared_view, b, c, y, column);
    const int rows = unclamped == item ? static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;

    camox_window<float, V, LAST, 1> top, at; /* rows r-2 and r-1 */
    camox_clear(top), camox_clear(at);
    const auto add_row = [&](const camox_window<float, V, LAST, 1> &bottom, int r) {
      if (r >= 1 && r <= rows) {
        float gx[V], gy[V];
        gradient_filter(top, at, bottom, plan.side, plan.middle, gx, gy);
        camox_store_float(camox_at<T>(p.gradient, out, 0), gx);
        camox_store_float(camox_at<T>(p.gradient, out, 1), gy);
        camox_next_row(p.gradient, plan.shared_view, out);
      }
      top = at;
      at = bottom;
    };
    camox_forward_band<staged>(stage, reader, p.x, p.border, plan.partition.rows, rows, add_row);
  }
}

/* ---- backward ---- */

/* The gradients of a border column belong to the column whose pixels it repeated. The adjoint sees that as a changed
   neighbour: with replicate the column itself, with gx's gradient negated; with reflect, one column further in, twice the
   gradient of gy and none of gx. Which elements of a thread that concerns: */
struct gradient_folds {
  bool copy_left, copy_right, double_left, double_right;
};

template <int V, bool LAST>
__device__ __forceinline__ gradient_folds gradient_folds_at(const camox_spatial_gradient_params &p, int64_t column) {
  /* columns 1 and W-2 lie beside columns 0 and W-1 of the same thread, or each has one of its own */
  constexpr int columns = LAST ? 1 : V, second = columns > 1 ? 0 : 1;
  const bool replicate = p.border == CAMOX_BORDER_REPLICATE, reflect = p.border == CAMOX_BORDER_REFLECT;
  gradient_folds folds;
  folds.copy_left = replicate && column == 0;
  folds.copy_right = replicate && column + columns == p.width;
  folds.double_left = reflect && column == second;
  folds.double_right = reflect && column + columns == p.width - second;
  return folds;
}

/* The horizontal half of the adjoint, of one row: the differences of gx's gradients, the weighted sums of gy's. */
template <int V, bool LAST>
__device__ __forceinline__ void gradient_across(const camox_window<float, V, LAST, 1> &gx,
                                                const camox_window<float, V, LAST, 1> &gy, const gradient_folds &folds,
                                                float side, float middle, float (&difference)[V], float (&sum)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int l = i, m = gx.center + i, r = gx.center + gx.step + i;
    float gx_left = gx.x[l], gx_right = gx.x[r], gy_left = gy.x[l], gy_right = gy.x[r];
    if (folds.copy_left && (LAST || i == 0)) gx_left = -gx.x[m], gy_left = gy.x[m];
    if (folds.copy_right && (LAST || i == V - 1)) gx_right = -gx.x[m], gy_right = gy.x[m];
    if (folds.double_left && (LAST || i == (V > 1 ? 1 : 0))) gx_left = 0.0f, gy_left *= 2.0f;
    if (folds.double_right && (LAST || i == (V > 1 ? V - 2 : 0))) gx_right = 0.0f, gy_right *= 2.0f;
    difference[i] = gx_left - gx_right;
    sum[i] = fmaf(side, gy_left + gy_right, middle * gy.x[m]);
  }
}

/* A row of both gradients; zeros off the image and where there is none. */
template <typename T, int V, bool LAST>
struct gradient_rows {
  camox_window<T, V, LAST, 1> map[GRADIENT_MAPS];
};

template <typename T, int V, bool LAST>
__device__ __forceinline__ void gradient_fetch(gradient_rows<T, V, LAST> &raw, const gradient_plan &plan,
                                               camox_cursor<V, GRADIENT_MAPS> &cursor,
                                               const camox_sides<V, LAST, 1> (&sides)[camox_cursor<V, GRADIENT_MAPS>::distinct],
                                               bool inside) {
#pragma unroll
  for (int map = 0; map < GRADIENT_MAPS; ++map) {
    camox_clear(raw.map[map]);
    if (plan.p.gradient[map].data && inside)
      camox_fetch_at(raw.map[map], camox_at<const T>(plan.p.gradient, cursor, map), sides[V > 1 ? 0 : map]);
  }
  camox_next_row(plan.p.gradient, plan.shared_view, cursor);
}

/* Row r of the gradients adds to rows r-1, r and r+1 of the result, so row r-1 is complete once r is added. */
template <typename T, int V, bool LAST>
__global__ void __launch_bounds__(GRADIENT_THREADS, gradient_blocks<T, V, LAST>::backward)
    spatial_gradient_backward_kernel(const __grid_constant__ gradient_plan plan) {
  constexpr bool staged = gradient_stages<T, V, LAST>;
  typedef camox_stage<GRADIENT_MAPS, GRADIENT_THREADS, GRADIENT_STAGED_ROWS> staged_rows;
  __shared__ typename camox_select<staged, staged_rows, int>::type stage;
  const camox_spatial_gradient_params &p = plan.p;
  const bool folds_rows = p.border != CAMOX_BORDER_ZEROS, reflect = p.border == CAMOX_BORDER_REFLECT;
  for (int64_t block = blockIdx.x; block * GRADIENT_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t unclamped = block * GRADIENT_THREADS + threadIdx.x, item = min(unclamped, plan.partition.items - 1);
    int64_t b, c, column, y;
    camox_position<V, LAST>(plan.partition, item, &b, &c, &column, &y);
    auto cursor = camox_cursor_at<V>(p.gradient, plan.shared_view, b, c, y - 1, column);
    camox_sides<V, LAST, 1> sides[cursor.distinct];
#pragma unroll
    for (int map = 0; map < cursor.distinct; ++map)
      sides[map] = camox_sides_at<V, LAST, 1>(
          plan.partition, column, camox_strides<V>(p.gradient, plan.shared_view, map).stride[3], CAMOX_BORDER_ZEROS);
    T *out = static_cast<T *>(p.grad_x.data) + camox_offset(p.grad_x, b, c, y, column);
    const gradient_folds folds = gradient_folds_at<V, LAST>(p, column);
    const camox_rows image_rows = camox_rows_at(plan.partition, y);
    const int rows = unclamped == item ? static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;

    float above[V], at[V]; /* rows r-1 and r of the result, not complete yet */
    camox_clear(above), camox_clear(at);
    const auto add_row = [&](const camox_window<float, V, LAST, 1> &gx, const camox_window<float, V, LAST, 1> &gy, int r) {
      float difference[V], sum[V], done[V];
      gradient_across(gx, gy, folds, plan.side, plan.middle, difference, sum);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        done[i] = above[i] + fmaf(plan.side, difference[i], -sum[i]);
        above[i] = fmaf(plan.middle, difference[i], at[i]);
        at[i] = fmaf(plan.side, difference[i], sum[i]);
      }
      const bool first = r == -image_rows.above, last = r == image_rows.span - image_rows.above - 1;
      if (folds_rows && (first || last)) {
        /* gradients of the row above the first (now in done) and below the last (in at) belong to the rows they repeat */
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float up = first ? done[i] : 0.0f, down = last ? at[i] : 0.0f;
          if (reflect) {
            at[i] += up;
            done[i] += down;
          } else {
            above[i] += up + down;
          }
        }
      }
      if (r > 0 && r <= rows) {
#ifdef CAMOX_BREAK_SPATIAL_GRADIENT
        done[0] += 1e-3f;
#endif
        camox_store_float(out, done);
        out += p.grad_x.stride[2];
      }
    };
    if constexpr (staged) {
      const auto receive_row = [&](const auto &staged_at, int r, int) {
        gradient_rows<T, V, LAST> raw;
        camox_receive(raw.map[0], staged_at(0), sides[0]);
        camox_receive(raw.map[1], staged_at(1), sides[0]);
        add_row(camox_widen(raw.map[0]), camox_widen(raw.map[1]), r);
      };
      camox_staged_band<T>(stage, p.gradient, plan.shared_view, cursor, sides[0], image_rows, plan.partition.rows, receive_row);
    } else {
      gradient_rows<T, V, LAST> prefetched;
      gradient_fetch(prefetched, plan, cursor, sides, camox_inside(image_rows, -1));
#pragma unroll 2
      for (int r = -1; r <= rows; ++r) {
        const camox_window<float, V, LAST, 1> gx = camox_widen(prefetched.map[0]), gy = camox_widen(prefetched.map[1]);
        if (r < rows) gradient_fetch(prefetched, plan, cursor, sides, camox_inside(image_rows, r + 1));
        add_row(gx, gy, r);
      }
    }
  }
}

/* ---- launchers ---- */

struct gradient_op {
  typedef camox_spatial_gradient_params params;
  static constexpr bool backward_reads_x = false;
  static auto maps(const params *p) -> const camox_view4 (&)[GRADIENT_MAPS] { return p->gradient; }

  static void launch_kernel(void (*kernel)(gradient_plan), const params *p, int lanes, int most_rows, void *stream) {
    gradient_plan plan = {};
    plan.p = *p;
    plan.shared_view = camox_first_map(p->gradient);
    plan.side = static_cast<float>(p->side), plan.middle = static_cast<float>(p->middle);
    plan.partition = camox_partition_of(camox_places_of(kernel, GRADIENT_THREADS), p->channels_last, p->batch, p->channels,
                                        p->height, p->width, lanes, GRADIENT_THREADS, 2, most_rows);
    const unsigned grid = camox_grid(camox_ceil_div(plan.partition.items, GRADIENT_THREADS));
    CAMOX_LAUNCH(kernel, grid, GRADIENT_THREADS, 0, stream, plan);
  }

  template <typename T, int V, bool LAST>
  static void launch(const params *p, bool backward, void *stream) {
    if (backward)
      launch_kernel(spatial_gradient_backward_kernel<T, V, LAST>, p, V, CAMOX_LARGEST_BAND, stream);
    else
      launch_kernel(spatial_gradient_kernel<T, V, LAST>, p, V, CAMOX_FORWARD_BAND, stream);
  }

  template <typename T>
  static void run(const params *p, bool backward, void *stream) {
    camox_launch_widest<gradient_op, T>(p, backward, stream);
  }
};

extern "C" int camox_spatial_gradient_cuda(const camox_spatial_gradient_params *p, void *stream) {
  return camox_run<gradient_op>(p, false, stream);
}

extern "C" int camox_spatial_gradient_backward_cuda(const camox_spatial_gradient_params *p, void *stream) {
  return camox_run<gradient_op>(p, true, stream);
}
