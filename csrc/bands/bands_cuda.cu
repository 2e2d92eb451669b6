/* frequency_bands on CUDA, with the division of work, windows and borders of common/stencil.cuh.

     forward: a row is summed over 3 and 5 columns once and added to the five rows of output that it reaches
                        row r-2   r-1    r    r+1   r+2
       sums of row r  ->  [ pending[0] | [1] | [2] | [3] | new ]     registers, V elements each
                            complete: stored, then all move up by one
       row r: copied to the input's map; row r-1: low and high are complete; row r-2: mid is

     backward: the same with rows of gradients, grad_x = box3(low + mid - high) - box5(mid) + high + input

     rows of x, and of the gradients of low, mid and high
       contiguous, from sm_80 on: rows r, r+1 are in shared memory, r+2, r+3 on their way there by cp.async (of gradients halves)
       otherwise: row r+1 or r+2 is being loaded to registers
     columns beside a thread's own
       from its neighbours' staged ones, or from the L1 cache
       backward of channels_last: from its neighbours, by shared memory, one barrier a row
                                  [2 buffers][low + mid - high, mid][V * threads]

   So the two passes of a separable filter are one; each element is read once from memory (16 B). Windows are summed as
   differences from their centre: what their pixels have in common cancels before anything is rounded, so a large mean costs no
   accuracy. A pixel k rows from the centre differs from it by the sum of the k steps between: with s_r = x_r - x_(r-1), a
   column of five pixels sums to

       5 x_r + 2 (s_(r+1) - s_r) + (s_(r+2) - s_(r-1))        so row r's step s_r goes to centres r-2 ... r+1, as its sums do

   No atomics: the same bits on every run. */
#include "../common/stencil.cuh"
#include "bands.h"

#include <float.h>

#define BANDS_THREADS 128
/* Rows of a band of the forward: more than CAMOX_FORWARD_BAND, because a band computes four rows beside its own. In
   channels_last 3 to 7% faster than six on an H200, contiguous no difference. */
#define BANDS_FORWARD_BAND 8

/* Blocks that a multiprocessor must hold: as many as registers allow without spilling, which of bfloat16's staged forward is one
   more on sm_90. */
template <typename T, int V, bool STAGED>
struct bands_blocks {
  static constexpr bool fewer_registers = STAGED && camox_is_bfloat16<T>::value && CAMOX_CUDA_ARCH == 900;
  static constexpr int forward = V == 8 && !fewer_registers ? 3 : 4, backward = STAGED ? 5 : 4;
};
#define BANDS_STAGED_ROWS 2 /* contiguous images, see camox_stage */
/* The backward of halves: 15% faster on an H200, where float32's is 8% slower than with rows in registers. */
template <typename T, int V>
static constexpr bool bands_stages_backward = camox_stages<T, V> && V == 8;
#define BANDS_TILE_THREADS 256 /* channels_last */
#define BANDS_TILE_BLOCKS 2

struct bands_plan {
  camox_bands_params p;
  camox_partition partition;
  camox_view4 shared_view; /* the strides that all bands have, where several elements are accessed at once */
  camox_tiles tiles;       /* backward of channels_last */
};

/* A pixel whose mid or high was written as not finite once more by the plain formulas, in which inf - inf is met only where
   avg_pool2d meets it. */
template <typename T>
__device__ __forceinline__ void bands_repair(const camox_bands_params &p, int64_t b, int64_t c, int64_t y, int64_t column) {
  T *out[3];
#pragma unroll
  for (int band = 0; band < 3; ++band)
    out[band] = static_cast<T *>(p.bands[band].data) + camox_offset(p.bands[band], b, c, y, column);
  if (fabsf(camox_to_float(*out[1])) <= FLT_MAX && fabsf(camox_to_float(*out[2])) <= FLT_MAX) return;
  const T *x = static_cast<const T *>(p.x.data);
  float sum3 = 0.0f, sum5 = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 25; ++i) {
    const int64_t row = y + i / 5 - 2, at = column + i % 5 - 2;
    if (row < 0 || row >= p.height || at < 0 || at >= p.width) continue;
    const float pixel = camox_to_float(x[camox_offset(p.x, b, c, row, at)]);
    sum5 += pixel;
    if (row >= y - 1 && row <= y + 1 && at >= column - 1 && at <= column + 1) sum3 += pixel;
  }
  const float low = sum3 * (1.0f / 9.0f);
  *out[0] = camox_from_float<T>(low);
  *out[1] = camox_from_float<T>(low - sum5 * (1.0f / 25.0f));
  *out[2] = camox_from_float<T>(camox_to_float(x[camox_offset(p.x, b, c, y, column)]) - low);
}

/* A map's address `rows` above the cursor's row. */
template <typename T, int V>
__device__ __forceinline__ T *bands_above(const bands_plan &plan, const camox_cursor<V, CAMOX_BANDS_MAPS> &cursor, int map,
                                          int rows) {
  return camox_at<T>(plan.p.bands, cursor, map) - rows * camox_strides<V>(plan.p.bands, plan.shared_view, map).stride[2];
}

/* Row r is written to the copy of x, completes low and high of row r-1, and mid of row r-2. */
template <typename T, int V, bool LAST>
__global__ void __launch_bounds__(BANDS_THREADS, bands_blocks<T, V, !LAST && camox_stages<T, V>>::forward)
    bands_kernel(const __grid_constant__ bands_plan plan) {
  constexpr bool staged = !LAST && camox_stages<T, V>;
  typedef camox_window<T, V, LAST, CAMOX_BANDS_REACH> window;
  typedef camox_stage<1, BANDS_THREADS, BANDS_STAGED_ROWS> staged_rows;
  __shared__ typename camox_select<staged, staged_rows, int>::type stage;
  const camox_bands_params &p = plan.p;
  for (int64_t block = blockIdx.x; block * BANDS_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t unclamped = block * BANDS_THREADS + threadIdx.x, item = min(unclamped, plan.partition.items - 1);
    int64_t b, c, column, y;
    camox_position<V, LAST>(plan.partition, item, &b, &c, &column, &y);
    auto out = camox_cursor_at<V>(p.bands, plan.shared_view, b, c, y - 2, column);
    const int rows = unclamped == item ? static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;

    float above[V], sum3_above[V]; /* row r-1: pixels, and sums over 3 columns */
    float pending3[V];             /* of row r-1, over 3 rows, as far as it is known */
    float pending[4][V];           /* -25 mid of rows r-2 to r+1, as far as it is known */
    const float largest = sizeof(T) == 2 ? 65504.0f : FLT_MAX;
    bool overflow = false;
#pragma unroll
    for (int i = 0; i < V; ++i)
      above[i] = sum3_above[i] = pending3[i] = pending[0][i] = pending[1][i] = pending[2][i] = pending[3][i] = 0.0f;
    const auto add_row = [&](const camox_window<float, V, LAST, CAMOX_BANDS_REACH> &x, int r) {
      float low[V], mid[V], high[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        /* differences of neighbours, which a thread computes once for both: along the row and to the row above */
        const int at = x.center + i;
        const float pixel = x.x[at], step = pixel - above[i];
        const float sum3 = (x.x[at + x.step] - pixel) - (pixel - x.x[at - x.step]);
        const float sum5 = sum3 + ((x.x[at + 2 * x.step] - pixel) - (pixel - x.x[at - 2 * x.step]));
        const float box = (pending3[i] + fmaf(3.0f, step, sum3)) * (1.0f / 9.0f);
        low[i] = above[i] + box;
        high[i] = -box;
        mid[i] = (pending[0][i] + fmaf(5.0f, step, sum5)) * (-1.0f / 25.0f);
#ifdef CAMOX_BREAK_BANDS
        mid[i] += 1e-3f;
#endif
        overflow |= !(fabsf(mid[i]) + fabsf(box) <= largest);
        const float both = fmaf(-25.0f / 9.0f, sum3, sum5);
        pending3[i] = fmaf(-3.0f, step, sum3_above[i] + sum3);
        pending[0][i] = pending[1][i] + fmaf(5.0f / 3.0f, step, both);
        pending[1][i] = pending[2][i] + fmaf(-5.0f / 3.0f, step, both);
        pending[2][i] = pending[3][i] + fmaf(-5.0f, step, both);
        pending[3][i] = sum5, sum3_above[i] = sum3, above[i] = pixel;
      }
      if (r >= 1 && r <= rows) {
        camox_store_float(bands_above<T>(plan, out, CAMOX_BANDS_LOW, 1), low);
        camox_store_float(bands_above<T>(plan, out, CAMOX_BANDS_HIGH, 1), high);
      }
      if (r >= 2 && r < rows + 2) camox_store_float(bands_above<T>(plan, out, CAMOX_BANDS_MID, 2), mid);
      camox_next_row(p.bands, plan.shared_view, out);
    };
    const auto store_copy = [&](window &raw, int r) {
      if (r >= 0 && r < rows && p.bands[CAMOX_BANDS_INPUT].data)
        camox_store(bands_above<T>(plan, out, CAMOX_BANDS_INPUT, 0), window::template part<V>(raw.x + raw.center));
    };
    if constexpr (staged) {
      const camox_view4 x[1] = {p.x};
      auto cursor = camox_cursor_at<V>(x, p.x, b, c, y - 2, column);
      const auto sides = camox_sides_at<V, false, CAMOX_BANDS_REACH>(plan.partition, column, 1, CAMOX_BORDER_ZEROS);
      const auto receive_row = [&](const auto &staged_at, int r, int) {
        window raw;
        camox_receive(raw, staged_at(0), sides);
        store_copy(raw, r);
        add_row(camox_widen(raw), r);
      };
      camox_staged_band<T>(stage, x, p.x, cursor, sides, camox_rows_at(plan.partition, y), plan.partition.rows, receive_row);
    } else {
      auto reader =
          camox_reader_at<T, V, LAST, CAMOX_BANDS_REACH>(plan.partition, p.x, CAMOX_BORDER_ZEROS, b, c, column, y, -2);
      window raw, next; /* two rows are being loaded at any time */
      camox_fetch(raw, reader, p.x, CAMOX_BORDER_ZEROS, -2);
      camox_fetch(next, reader, p.x, CAMOX_BORDER_ZEROS, -1);
#pragma unroll 2
      for (int r = -2; r < rows + 2; ++r) {
        const auto x = camox_widen(raw);
        store_copy(raw, r);
        raw = next;
        if (r < rows) camox_fetch(next, reader, p.x, CAMOX_BORDER_ZEROS, r + 2);
        add_row(x, r);
      }
    }
    if (!overflow) continue;
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < V; ++i) bands_repair<T>(p, b, LAST ? c + i : c, y + r, LAST ? column : column + i);
  }
}

/* ---- backward: grad_x = box3(low + mid - high) - box5(mid) + high + input, of the incoming gradients ---- */

/* Row r of the gradients, summed over 3 and 5 columns, adds to rows r-2 to r+2 of the result, so row r-2 is complete: `done`.
   narrow: low + mid - high; pending: rows r-2 to r+1 as far as they are known. Products are fused where it says so and nowhere
   else, so that the kernels of all layouts give the same bits. */
template <int V, bool LAST>
__device__ __forceinline__ void bands_add_row(float (&done)[V], float (&pending)[4][V],
                                              const camox_window<float, V, LAST, 1> &narrow,
                                              const camox_window<float, V, LAST, 2> &mid, const float (&high)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int at = narrow.center + i, wide_at = mid.center + i, step = mid.step;
    const float sum3 = (narrow.x[at - step] + narrow.x[at]) + narrow.x[at + step];
    /* pairs of neighbours, which two windows of a thread share */
    const float sum5 =
        ((mid.x[wide_at - 2 * step] + mid.x[wide_at - step]) + (mid.x[wide_at + step] + mid.x[wide_at + 2 * step])) +
        mid.x[wide_at];
    const float only5 = __fmul_rn(sum5, -1.0f / 25.0f), both = fmaf(1.0f / 9.0f, sum3, only5);
    done[i] = pending[0][i] + only5;
    pending[0][i] = pending[1][i] + both;
    pending[1][i] = pending[2][i] + both + high[i];
    pending[2][i] = pending[3][i] + both;
    pending[3][i] = only5;
  }
#ifdef CAMOX_BREAK_BANDS
  done[0] += 1e-3f;
#endif
}

/* Row r of the gradient of the copy of x, `rows` above the cursor's row, is added to row r of the result, before the others'
   row r is: few ask for it, so it holds no registers from row to row. */
template <typename T, int V>
__device__ __forceinline__ void bands_add_input(float (&pending)[4][V], const bands_plan &plan,
                                                const camox_cursor<V, CAMOX_BANDS_MAPS> &cursor, int rows) {
  float input[V];
  camox_load_float(input, bands_above<const T>(plan, cursor, CAMOX_BANDS_INPUT, rows));
#pragma unroll
  for (int i = 0; i < V; ++i) pending[2][i] += input[i];
}

/* A row of the gradients, each with the columns that it reaches; zeros off the image and where there is none. */
template <typename T, int V>
struct bands_rows {
  camox_window<T, V, false, 1> low, high;
  camox_window<T, V, false, 2> mid;
};

template <typename T, int V>
__device__ __forceinline__ void bands_fetch(
    bands_rows<T, V> &raw, const bands_plan &plan, camox_cursor<V, CAMOX_BANDS_MAPS> &cursor,
    const camox_sides<V, false, CAMOX_BANDS_REACH> (&sides)[camox_cursor<V, CAMOX_BANDS_MAPS>::distinct], bool inside) {
  const camox_view4(&bands)[CAMOX_BANDS_MAPS] = plan.p.bands;
  constexpr bool one = V > 1;
  camox_clear(raw.low), camox_clear(raw.mid), camox_clear(raw.high);
  if (inside) {
    if (bands[CAMOX_BANDS_LOW].data)
      camox_fetch_at(raw.low, camox_at<const T>(bands, cursor, CAMOX_BANDS_LOW), sides[one ? 0 : CAMOX_BANDS_LOW]);
    if (bands[CAMOX_BANDS_MID].data)
      camox_fetch_at(raw.mid, camox_at<const T>(bands, cursor, CAMOX_BANDS_MID), sides[one ? 0 : CAMOX_BANDS_MID]);
    if (bands[CAMOX_BANDS_HIGH].data)
      camox_fetch_at(raw.high, camox_at<const T>(bands, cursor, CAMOX_BANDS_HIGH), sides[one ? 0 : CAMOX_BANDS_HIGH]);
  }
  camox_next_row(bands, plan.shared_view, cursor);
}

template <typename T, int V>
__global__ void __launch_bounds__(BANDS_THREADS, bands_blocks<T, V, bands_stages_backward<T, V>>::backward)
    bands_backward_kernel(const __grid_constant__ bands_plan plan) {
  constexpr bool staged = bands_stages_backward<T, V>;
  typedef camox_stage<CAMOX_BANDS_INPUT, BANDS_THREADS, BANDS_STAGED_ROWS> staged_rows;
  __shared__ typename camox_select<staged, staged_rows, int>::type stage;
  const camox_bands_params &p = plan.p;
  for (int64_t block = blockIdx.x; block * BANDS_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t unclamped = block * BANDS_THREADS + threadIdx.x, item = min(unclamped, plan.partition.items - 1);
    int64_t b, c, column, y;
    camox_position<V, false>(plan.partition, item, &b, &c, &column, &y);
    auto cursor = camox_cursor_at<V>(p.bands, plan.shared_view, b, c, y - 2, column);
    camox_sides<V, false, CAMOX_BANDS_REACH> sides[cursor.distinct];
#pragma unroll
    for (int map = 0; map < cursor.distinct; ++map)
      sides[map] = camox_sides_at<V, false, CAMOX_BANDS_REACH>(
          plan.partition, column, camox_strides<V>(p.bands, plan.shared_view, map).stride[3], CAMOX_BORDER_ZEROS);
    T *out = static_cast<T *>(p.grad_x.data) + camox_offset(p.grad_x, b, c, y, column);
    const camox_rows image_rows = camox_rows_at(plan.partition, y);
    const int rows = unclamped == item ? static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows))) : 0;

    float pending[4][V];
    camox_clear(pending[0]), camox_clear(pending[1]), camox_clear(pending[2]), camox_clear(pending[3]);
    const auto add_row = [&](const bands_rows<T, V> &raw, int r, int ahead) {
      camox_window<float, V, false, 1> low = camox_widen(raw.low), high = camox_widen(raw.high);
      const camox_window<float, V, false, 2> mid = camox_widen(raw.mid);
      camox_window<float, V, false, 1> narrow;
#pragma unroll
      for (int i = 0; i < narrow.size; ++i) narrow.x[i] = (low.x[i] + mid.x[mid.step + i]) - high.x[i];
      float done[V];
      if (p.bands[CAMOX_BANDS_INPUT].data && camox_inside(image_rows, r)) bands_add_input<T>(pending, plan, cursor, ahead);
      bands_add_row(done, pending, narrow, mid, camox_window<float, V, false, 1>::template part<V>(high.x + high.center));
      if (r >= 2 && r < rows + 2) {
        camox_store_float(out, done);
        out += p.grad_x.stride[2];
      }
    };
    if constexpr (staged) {
      const auto receive_row = [&](const auto &staged_at, int r, int ahead) {
        bands_rows<T, V> raw;
        camox_receive(raw.low, staged_at(CAMOX_BANDS_LOW), sides[0]);
        camox_receive(raw.mid, staged_at(CAMOX_BANDS_MID), sides[0]);
        camox_receive(raw.high, staged_at(CAMOX_BANDS_HIGH), sides[0]);
        add_row(raw, r, ahead);
      };
      camox_staged_band<T>(stage, p.bands, plan.shared_view, cursor, sides[0], image_rows, plan.partition.rows, receive_row);
    } else {
      bands_rows<T, V> prefetched;
      bands_fetch(prefetched, plan, cursor, sides, camox_inside(image_rows, -2));
#pragma unroll 2
      for (int r = -2; r < rows + 2; ++r) {
        const bands_rows<T, V> raw = prefetched;
        bands_fetch(prefetched, plan, cursor, sides, r < rows + 1 && camox_inside(image_rows, r + 1));
        add_row(raw, r, 2);
      }
    }
  }
}

/* channels_last: what the columns beside a thread's own are made of comes from its neighbours, converted once. */
template <typename T, int V>
__global__ void __launch_bounds__(BANDS_TILE_THREADS, BANDS_TILE_BLOCKS)
    bands_backward_channels_last_kernel(const __grid_constant__ bands_plan plan) {
  /* two buffers of low + mid - high and of mid: a row's exchange needs one barrier, not a second one before the next row
     overwrites it */
  __shared__ __align__(16) float buffers[2][2][V * BANDS_TILE_THREADS];
  typedef camox_window<float, V, true, 1> narrow_window;
  typedef camox_window<float, V, true, 2> mid_window;
  const camox_bands_params &p = plan.p;
  const int thread = static_cast<int>(threadIdx.x), column_threads = plan.tiles.chunk;
  int buffer_index = 0;
  for (int64_t block = blockIdx.x; block < plan.tiles.blocks; block += gridDim.x) {
    const camox_tile_place place = camox_tile_at<V>(plan.tiles, plan.partition, block);
    auto cursor = camox_cursor_at<V>(p.bands, plan.shared_view, place.b, place.c, place.y - 2, place.column);
    T *out = static_cast<T *>(p.grad_x.data) + camox_offset(p.grad_x, place.b, place.c, place.y, place.column);
    const camox_rows image_rows = camox_rows_at(plan.partition, place.y);
    const int rows = static_cast<int>(min(p.height - place.y, static_cast<int64_t>(plan.partition.rows)));
    const bool inside = place.exists && place.beyond == 0;
    /* threads that do not write read their own values: no address off the buffer */
    const int beside = place.writes ? column_threads : 0;
    const bool all = p.bands[CAMOX_BANDS_LOW].data && p.bands[CAMOX_BANDS_MID].data && p.bands[CAMOX_BANDS_HIGH].data;
    T raw[CAMOX_BANDS_INPUT][V];
    camox_fetch_maps(raw, p.bands, plan.shared_view, cursor, all, inside && camox_inside(image_rows, -2));
    float pending[4][V];
    camox_clear(pending[0]), camox_clear(pending[1]), camox_clear(pending[2]), camox_clear(pending[3]);
    /* every thread of a block makes the same number of steps: the exchange needs them all */
#pragma unroll 2
    for (int r = -2; r < rows + 2; ++r) {
      float low[V], middle[V], high[V], done[V];
      camox_to_floats(low, raw[CAMOX_BANDS_LOW]), camox_to_floats(middle, raw[CAMOX_BANDS_MID]);
      camox_to_floats(high, raw[CAMOX_BANDS_HIGH]);
      /* after its last row a band loads one for nothing: a comparison more would cost every row */
      camox_fetch_maps(raw, p.bands, plan.shared_view, cursor, all, inside && camox_inside(image_rows, r + 1));
      narrow_window narrow;
      mid_window mid;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        narrow.x[narrow.center + i] = (low[i] + middle[i]) - high[i];
        mid.x[mid.center + i] = middle[i];
      }
      /* `cursor` is two rows further down */
      if (p.bands[CAMOX_BANDS_INPUT].data && inside && camox_inside(image_rows, r))
        bands_add_input<T>(pending, plan, cursor, 2);
      float *const of_narrow = buffers[buffer_index][0], *const of_mid = buffers[buffer_index][1];
      buffer_index ^= 1;
      camox_put_tile<BANDS_TILE_THREADS>(of_narrow, narrow_window::template part<V>(narrow.x + narrow.center), thread);
      camox_put_tile<BANDS_TILE_THREADS>(of_mid, mid_window::template part<V>(mid.x + mid.center), thread);
      __syncthreads();
#pragma unroll
      for (int side = -2; side <= 2; ++side) {
        if (side == 0) continue;
        camox_get_tile<BANDS_TILE_THREADS>(mid_window::template part<V>(mid.x + mid.center + side * V), of_mid,
                                           thread + side * beside);
        if (side * side > 1) continue;
        camox_get_tile<BANDS_TILE_THREADS>(narrow_window::template part<V>(narrow.x + narrow.center + side * V), of_narrow,
                                           thread + side * beside);
      }
      bands_add_row(done, pending, narrow, mid, high);
      if (r >= 2 && place.writes) {
        camox_store_float(out, done);
        out += p.grad_x.stride[2];
      }
    }
  }
}

/* ---- launchers ---- */

struct bands_op {
  typedef camox_bands_params params;
  static constexpr bool backward_reads_x = false;
  static auto maps(const params *p) -> const camox_view4 (&)[CAMOX_BANDS_MAPS] { return p->bands; }

  static bands_plan plan_of(const params *p) {
    bands_plan plan = {};
    plan.p = *p;
    plan.shared_view = camox_first_map(p->bands);
    return plan;
  }

  static void launch_kernel(void (*kernel)(bands_plan), const params *p, int lanes, int most_rows, void *stream) {
    bands_plan plan = plan_of(p);
    plan.partition = camox_partition_of(camox_places_of(kernel, BANDS_THREADS), p->channels_last, p->batch, p->channels,
                                        p->height, p->width, lanes, BANDS_THREADS, 2 * CAMOX_BANDS_REACH, most_rows);
    const unsigned grid = camox_grid(camox_ceil_div(plan.partition.items, BANDS_THREADS));
    CAMOX_LAUNCH(kernel, grid, BANDS_THREADS, 0, stream, plan);
  }

  template <typename T, int V, bool LAST>
  static void launch(const params *p, bool backward, void *stream) {
    if (!backward)
      launch_kernel(bands_kernel<T, V, LAST>, p, V, BANDS_FORWARD_BAND, stream);
    else if constexpr (LAST)
      camox_launch_tiles(bands_backward_channels_last_kernel<T, V>, plan_of(p), CAMOX_BANDS_REACH, BANDS_TILE_THREADS, V,
                         stream);
    else
      launch_kernel(bands_backward_kernel<T, V>, p, V, CAMOX_LARGEST_BAND, stream);
  }

  template <typename T>
  static void run(const params *p, bool backward, void *stream) {
    camox_launch_widest<bands_op, T>(p, backward, stream);
  }
};

extern "C" int camox_bands_cuda(const camox_bands_params *p, void *stream) { return camox_run<bands_op>(p, false, stream); }

extern "C" int camox_bands_backward_cuda(const camox_bands_params *p, void *stream) {
  return camox_run<bands_op>(p, true, stream);
}
