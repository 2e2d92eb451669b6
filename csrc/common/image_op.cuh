/* The GPU's kernels and launchers of an op of one image (image_op.h), from the formula that its CPU kernels are made from, here
   for numbers: image_op.inc says what it has. <op>_cuda.cu names the op, CAMOX_OP, and the file, CAMOX_FORMULA.

   Forward: the traversal of stencil.cuh. A thread owns V neighbours of a row and goes down some rows, three of them in registers and
   the next one loading; the columns beside it come from the cache.

   Backward: a thread owns one column of some rows. For each row it computes the filters' gradients of that column and of the
   two beside it, from five columns of x, and keeps three rows of them in registers; so threads exchange nothing.

       row r-1   x x x x x                      G G G
       row r     x x x x x   -> formula ->      G G G   -> adjoint -> grad_x of the middle
       row r+1   x x x x x                      G G G

   What the border's pixels read belongs to the pixels that they repeat: their G count again, as neighbours on the side where
   the border lies.                                                                                                           */
#include "image_op.h"
#include "stencil.cuh"

#define vr float
#define ELEM(name) name
#define VR(name) number_##name
#define CAMOX_INLINE static __device__ __forceinline__

/* A pixel and its neighbours. */
struct pixels {
  float tl, t, tr, l, m, r, bl, b, br;
};

CAMOX_INLINE float number_set1(float value) { return value; }
CAMOX_INLINE float number_abs(float value) { return fabsf(value); }
CAMOX_INLINE float number_sqrt(float value) { return sqrtf(value); }
CAMOX_INLINE float number_max(float a, float b) { return a > b ? a : b; }
CAMOX_INLINE float number_min(float a, float b) { return a < b ? a : b; }
CAMOX_INLINE float number_select(bool which, float yes, float no) { return which ? yes : no; }
CAMOX_INLINE float number_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
CAMOX_INLINE float sign(float value) { return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : 0.0f; }

#include CAMOX_FORMULA

#define IMAGE_THREADS 128

/* Tells the kernels of this op from another's, in their names too. */
struct CAMOX_OP;

struct image_plan {
  camox_image_params p;
  camox_partition partition;
  float number;
};

template <typename T, int V, bool LAST, typename Op>
__global__ void __launch_bounds__(IMAGE_THREADS) image_kernel(const __grid_constant__ image_plan plan) {
  const camox_image_params &p = plan.p;
  for (int64_t block = blockIdx.x; block * IMAGE_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t item = block * IMAGE_THREADS + threadIdx.x;
    if (item >= plan.partition.items) continue;
    int64_t b, c, column, y;
    camox_position<V, LAST>(plan.partition, item, &b, &c, &column, &y);
    auto reader = camox_reader_at<T, V, LAST, 1>(plan.partition, p.x, p.border, b, c, column, y, -1);
    T *out = static_cast<T *>(p.y.data) + camox_offset(p.y, b, c, y, column);

    camox_window<T, V, LAST, 1> raw, ahead;
    camox_fetch(raw, reader, p.x, p.border, -1);
    camox_window<float, V, LAST, 1> top = camox_widen(raw);
    camox_fetch(raw, reader, p.x, p.border, 0);
    camox_window<float, V, LAST, 1> at = camox_widen(raw);
    camox_fetch(ahead, reader, p.x, p.border, 1);
    const int rows = static_cast<int>(min(p.height - y, static_cast<int64_t>(plan.partition.rows)));
    for (int row = 0; row < rows; ++row) {
      const camox_window<float, V, LAST, 1> bottom = camox_widen(ahead);
      if (row + 1 < rows) camox_fetch(ahead, reader, p.x, p.border, row + 2);
      float result[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int l = i, m = at.center + i, r = at.center + at.step + i;
        const pixels x = {top.x[l], top.x[m], top.x[r], at.x[l], at.x[m], at.x[r], bottom.x[l], bottom.x[m], bottom.x[r]};
        result[i] = forward(&x, plan.number);
#ifdef CAMOX_BREAK
        result[i] += 1e-3f;
#endif
      }
      camox_store_float(out, result);
      out += p.y.stride[2];
      top = at;
      at = bottom;
    }
  }
}

/* The columns around a thread's: of x two on each side, the border's included, of the gradient of y one. */
struct image_columns {
  int64_t x[5], grad[3]; /* distances of the columns, which stand in a row, from its first element */
  bool has_x[5], has_grad[3];
};

static __device__ __forceinline__ image_columns image_columns_at(const camox_image_params &p, int64_t column) {
  image_columns columns;
#pragma unroll
  for (int k = 0; k < 5; ++k) {
    const int64_t at = column + k - 2, from = camox_border_index(at, p.width, p.border);
    columns.has_x[k] = at >= -1 && at <= p.width && from >= 0;
    columns.x[k] = from * p.x.stride[3];
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int64_t at = column + k - 1;
    columns.has_grad[k] = at >= 0 && at < p.width;
    columns.grad[k] = at * p.y.stride[3];
  }
  return columns;
}

/* Row y of x, the border's included, zeros beyond; plane: the first element of the thread's plane. */
template <typename T>
__device__ __forceinline__ void image_row(float (&to)[5], const camox_image_params &p, const image_columns &columns,
                                          const T *plane, int64_t y) {
  const int64_t from = y >= -1 && y <= p.height ? camox_border_index(y, p.height, p.border) : -1;
  const T *row = plane + from * p.x.stride[2];
#pragma unroll
  for (int k = 0; k < 5; ++k) to[k] = from >= 0 && columns.has_x[k] ? camox_to_float(row[columns.x[k]]) : 0.0f;
}

/* The filters' gradients of a row, in the columns to the left, at and to the right of the thread's. */
struct image_gradients {
  float l[CAMOX_FILTERS], m[CAMOX_FILTERS], r[CAMOX_FILTERS];
};

/* Where a pixel stands for one of the border, before the first and behind the last row or column: at the pixel next to the
   border (replicate), or one further in (reflect). */
static __device__ __forceinline__ bool image_repeats(const camox_image_params &p, int64_t beyond, int64_t size, int64_t at) {
  return p.border != CAMOX_BORDER_ZEROS && camox_border_index(beyond, size, p.border) == at;
}

/* Adds one row or the other. Numbers are chosen, not rows: a choice of addresses would put them into memory. */
static __device__ __forceinline__ void image_add(image_gradients &to, bool first, const image_gradients &one,
                                                 const image_gradients &other) {
#pragma unroll
  for (int k = 0; k < CAMOX_FILTERS; ++k) {
    to.l[k] += number_select(first, one.l[k], other.l[k]);
    to.m[k] += number_select(first, one.m[k], other.m[k]);
    to.r[k] += number_select(first, one.r[k], other.r[k]);
  }
}

template <typename T, bool LAST, typename Op>
__global__ void __launch_bounds__(IMAGE_THREADS) image_backward_kernel(const __grid_constant__ image_plan plan) {
  const camox_image_params &p = plan.p;
  const bool replicate = p.border == CAMOX_BORDER_REPLICATE;
  for (int64_t block = blockIdx.x; block * IMAGE_THREADS < plan.partition.items; block += gridDim.x) {
    const int64_t item = block * IMAGE_THREADS + threadIdx.x;
    if (item >= plan.partition.items) continue;
    int64_t b, c, column, y;
    camox_position<1, LAST>(plan.partition, item, &b, &c, &column, &y);
    const image_columns columns = image_columns_at(p, column);
    const T *x = static_cast<const T *>(p.x.data) + camox_offset(p.x, b, c, 0, 0);
    const T *grad = static_cast<const T *>(p.y.data) + camox_offset(p.y, b, c, 0, 0);
    T *out = static_cast<T *>(p.grad_x.data) + camox_offset(p.grad_x, b, c, 0, column);
    const bool at_left = image_repeats(p, -1, p.width, column), at_right = image_repeats(p, p.width, p.width, column);

    float rows[3][5]; /* of x: r-1, r and r+1 */
    image_row(rows[1], p, columns, x, y - 2);
    image_row(rows[2], p, columns, x, y - 1);
    image_gradients top = {}, at = {}; /* of rows r-2 and r-1 */
    const int64_t end = min(p.height, y + plan.partition.rows);
    for (int64_t r = y - 1; r <= end; ++r) {
#pragma unroll
      for (int k = 0; k < 5; ++k) rows[0][k] = rows[1][k], rows[1][k] = rows[2][k];
      image_row(rows[2], p, columns, x, r + 1);
      image_gradients bottom = {};
      if (r >= 0 && r < p.height) {
        float *const of_column[3] = {bottom.l, bottom.m, bottom.r};
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          if (!columns.has_grad[k]) continue;
          const pixels around = {rows[0][k],     rows[0][k + 1], rows[0][k + 2], rows[1][k],    rows[1][k + 1],
                                 rows[1][k + 2], rows[2][k],     rows[2][k + 1], rows[2][k + 2]};
          filter_gradients(&around, plan.number, camox_to_float(grad[r * p.y.stride[2] + columns.grad[k]]), of_column[k]);
        }
        const image_gradients own = bottom;
#pragma unroll
        for (int k = 0; k < CAMOX_FILTERS; ++k) {
          if (at_left) bottom.r[k] += number_select(replicate, own.m[k], own.l[k]);
          if (at_right) bottom.l[k] += number_select(replicate, own.m[k], own.r[k]);
        }
      }
      if (r > y) {
        image_gradients above = top, below = bottom;
        if (image_repeats(p, -1, p.height, r - 1)) image_add(below, replicate, at, top);
        if (image_repeats(p, p.height, p.height, r - 1)) image_add(above, replicate, at, bottom);
        pixels filter[CAMOX_FILTERS];
#pragma unroll
        for (int k = 0; k < CAMOX_FILTERS; ++k)
          filter[k] = {above.l[k], above.m[k], above.r[k], at.l[k], at.m[k], at.r[k], below.l[k], below.m[k], below.r[k]};
        float sum = adjoint(filter);
#ifdef CAMOX_BREAK
        sum += 1e-3f;
#endif
        out[(r - 1) * p.grad_x.stride[2]] = camox_from_float<T>(sum);
      }
      top = at;
      at = bottom;
    }
  }
}

/* ---- launchers ---- */

struct image_launcher {
  typedef camox_image_params params;
  static constexpr bool backward_reads_x = true;
  static auto maps(const params *p) -> const camox_view4 (&)[1] { return reinterpret_cast<const camox_view4(&)[1]>(p->y); }

  static void launch_kernel(void (*kernel)(image_plan), const params *p, int lanes, int most_rows, void *stream) {
    image_plan plan = {};
    plan.p = *p;
    plan.number = static_cast<float>(p->number);
    plan.partition = camox_partition_of(camox_places_of(kernel, IMAGE_THREADS), p->channels_last, p->batch, p->channels,
                                        p->height, p->width, lanes, IMAGE_THREADS, 2, most_rows);
    const unsigned grid = camox_grid(camox_ceil_div(plan.partition.items, IMAGE_THREADS));
    CAMOX_LAUNCH(kernel, grid, IMAGE_THREADS, 0, stream, plan);
  }

  template <typename T, int V, bool LAST>
  static void launch(const params *p, bool backward, void *stream) {
    if (backward)
      launch_kernel(image_backward_kernel<T, LAST, CAMOX_OP>, p, 1, CAMOX_LARGEST_BAND, stream);
    else
      launch_kernel(image_kernel<T, V, LAST, CAMOX_OP>, p, V, CAMOX_FORWARD_BAND, stream);
  }

  template <typename T>
  static void run(const params *p, bool backward, void *stream) {
    if (backward)
      camox_launch_layout<image_launcher, T, 1>(p, true, stream);
    else
      camox_launch_widest<image_launcher, T>(p, false, stream);
  }
};

#define CAMOX_IMAGE_LAUNCHER_(op, suffix) camox_##op##suffix
#define CAMOX_IMAGE_LAUNCHER(op, suffix) CAMOX_IMAGE_LAUNCHER_(op, suffix)

extern "C" int CAMOX_IMAGE_LAUNCHER(CAMOX_OP, _cuda)(const camox_image_params *p, void *stream) {
  return camox_run<image_launcher>(p, false, stream);
}

extern "C" int CAMOX_IMAGE_LAUNCHER(CAMOX_OP, _backward_cuda)(const camox_image_params *p, void *stream) {
  return camox_run<image_launcher>(p, true, stream);
}
