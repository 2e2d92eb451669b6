/* linear_attention on CUDA. A block takes a chunk of the T tokens of one head and iterates over its tiles of rows.

     forward    sums:  S_chunk = x^T y         x = f(k) [rows, N], y = v [rows, D]     -> partial [chunks, N, D + 1]
                state: partial -> S, z         in the order of the chunks
                apply: out = x S               x = f(q)
     backward   gradient of q with the sums of dS and dz; state; gradient of k with that of v

     shared memory, floats:   | x: rows x (N + 4) | y: rows x (D + 4) | S: N x (D + 4) |    rows 4 banks apart
     registers:               a thread has 4 x 4 elements of a product
                              x^T y: 4 of N by 4 of D, groups of threads share the rows, then add up in order
                              x S:   4 rows, a quarter of the tile apart, by 4 columns

   The state of heads up to LA_RESIDENT stays in shared memory; a larger one passes through in slices, and the backward takes
   one kernel more for each direction. Loads and stores are 16 bytes along a row or a column where strides allow. Sums over T
   have a fixed order: no atomics. What can be read in vectors goes to linear_attention_mma.h instead where tensor cores serve it. */
#include "../common/cuda_util.cuh"
#include "linear_attention.h"

#define LA_THREADS 256  /* at most */
#define LA_SIDE 4       /* rows and columns of a thread's elements */
#define LA_RESIDENT 64  /* head size up to which the state stays in shared memory, and columns of a block of the sums */
#define LA_LANES 8      /* that share a row */
#define LA_SLICE 3072   /* floats of a slice of a larger state */
#define LA_SHARED 12000 /* floats of shared memory of a block */
/* Chunks up to which each block that reads a state adds them up itself: they lie in L2, a kernel of its own is 5 us. */
#define LA_ADDED_CHUNKS 8

typedef enum { LA_PLAIN = 0, LA_FEATURE = 1, LA_DIVIDE = 2 } la_weight; /* 1, 1 / sum f, 1 / (f . line + eps) */
typedef enum { LA_ALONE = 0, LA_WITH_SUMS = 1, LA_WITH_APPLY = 2 } la_fusion;
typedef enum { LA_ANY = 0, LA_ROWS = 1, LA_COLUMNS = 2 } la_memory; /* any strides; 16-byte vectors of a row; of a column */

/* Sums of chunks to s and z: the state or its gradient. */
struct la_state_args {
  const float *partial, *initial_s, *initial_z;
  float *s, *z;
  int64_t sequences, chunks, stored; /* B*H; chunks to add up, and those that partial has room for */
  int n, d;
};

/* One pass over x and y. */
struct la_pass {
  int64_t batch, heads, length, chunk, chunks;
  int n, d; /* columns of x and y */
  int feature_map;
  la_weight weight;
  float eps;
  camox_view4 x, y, grad_x, out; /* out: what is written like y */
  const uint8_t *mask;           /* of the rows of x */
  int64_t mask_stride[2];
  const float *state, *line; /* [B*H,N,D], [B*H,N] or NULL */
  la_state_args added;       /* where state is NULL: the pass adds up the chunks itself, and writes the state */
  float *partial;
  bool sums_line; /* z or dz too */
  int rows;       /* of a tile */
  int slice;      /* rows (apply) or columns (gradient) of the state in shared memory at a time */
  int shared;     /* floats */
};

__host__ __device__ static inline int la_padded(int columns) { return (columns + LA_SIDE - 1) / LA_SIDE * LA_SIDE; }
/* Rows 4 banks apart: 8 of them give 16 bytes each without conflict. */
__host__ __device__ static inline int la_pitch(int columns) { return la_padded(columns) + 4; }

__device__ __forceinline__ float la_exp(float x, float) { return expf(x); }
template <typename T>
__device__ __forceinline__ float la_exp(float x, T) {
  return camox_exp2(x * 1.44269504f);
}

template <typename T>
__device__ __forceinline__ float la_feature(float x, int map) {
  if (map == CAMOX_FEATURE_ELU1) return x > 0.0f ? x + 1.0f : la_exp(x, T());
  return map == CAMOX_FEATURE_RELU ? (x < 0.0f ? 0.0f : x) : x;
}

/* f'(x) of f(x) */
__device__ __forceinline__ float la_feature_derivative(float f, int map) {
  if (map == CAMOX_FEATURE_ELU1) return f > 1.0f ? 1.0f : f;
  return map == CAMOX_FEATURE_RELU ? (f > 0.0f ? 1.0f : 0.0f) : 1.0f;
}

/* ---- elements ---- */

/* An element of either half type, where which of them is known when the kernel runs: one kernel is for both. */
struct la_half16 {
  uint16_t bits;
};

template <typename T>
__device__ __forceinline__ float la_to_float(T x, bool) {
  return camox_to_float(x);
}
__device__ __forceinline__ float la_to_float(la_half16 x, bool is_float16) {
  __half value;
  __builtin_memcpy(static_cast<void *>(&value), &x, sizeof x);
  return is_float16 ? __half2float(value) : __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <int N, typename T>
__device__ __forceinline__ void la_store_floats(T *to, const float (&value)[N], bool) {
  camox_store_float(to, value);
}
template <int N>
__device__ __forceinline__ void la_store_floats(la_half16 *to, const float (&value)[N], bool is_float16) {
  if (is_float16)
    camox_store_float(reinterpret_cast<__half *>(to), value);
  else
    camox_store_float(reinterpret_cast<__nv_bfloat16 *>(to), value);
}

/* ---- tiles ---- */

/* Item i of an iteration in steps of the block's threads: its row and its place in it, without a division at every step. */
struct la_iterator {
  int outer, inner, outer_step, inner_step, width;
};

__device__ __forceinline__ la_iterator la_iterator_of(int width) {
  const unsigned thread = threadIdx.x, threads = blockDim.x, w = static_cast<unsigned>(width);
  return {static_cast<int>(thread / w), static_cast<int>(thread % w), static_cast<int>(threads / w),
          static_cast<int>(threads % w), width};
}

__device__ __forceinline__ void la_step(la_iterator &it) {
  it.outer += it.outer_step, it.inner += it.inner_step;
  if (it.inner >= it.width) it.inner -= it.width, it.outer += 1;
}

/* Elements of a vector. */
template <typename T, int MEMORY>
static constexpr int la_lanes = MEMORY == LA_ANY ? 1 : camox_lanes<T>::value;

/* Where item (outer, inner) begins. Columns as vectors: 16 columns beside each other for the banks of shared memory, two
   vectors under each other for whole sectors of global memory. LA_ANY: down, whether a column's elements are closer than a
   row's. */
template <int V, int MEMORY>
struct la_place {
  int row, column;
  __device__ __forceinline__ la_place(const la_iterator &it, bool down) {
    if (MEMORY == LA_ROWS)
      row = it.outer, column = it.inner * V;
    else if (MEMORY == LA_COLUMNS)
      row = (it.outer * 2 + (it.inner & 1)) * V, column = it.inner >> 1;
    else
      row = down ? it.inner : it.outer, column = down ? it.outer : it.inner;
  }
};

template <int V, int MEMORY>
__device__ __forceinline__ la_iterator la_iterator_over(int rows, int columns, bool down) {
  return la_iterator_of(MEMORY == LA_ROWS ? columns / V : MEMORY == LA_COLUMNS ? 2 * columns : down ? rows : columns);
}

template <int V, int MEMORY>
__device__ __forceinline__ int la_outer(int rows, int columns, bool down) {
  return MEMORY == LA_ROWS ? rows : MEMORY == LA_COLUMNS ? rows / (2 * V) : down ? columns : rows;
}

/* Rows [0, valid) of a view: base, and steps of a row and of a column. */
template <typename T>
struct la_rows {
  T *base;
  int64_t row, column;
};

/* One head of a batch element. */
struct la_sequence {
  int64_t batch, head;
};

__device__ __forceinline__ la_sequence la_sequence_at(const la_pass &p, int64_t index) {
  la_sequence at;
  at.batch = camox_divide(index, p.heads, &at.head);
  return at;
}

template <typename T>
__device__ __forceinline__ la_rows<T> la_rows_at(const camox_view4 &view, const la_sequence &at, int64_t t, int column = 0) {
  return {static_cast<T *>(view.data) + at.batch * view.stride[0] + at.head * view.stride[1] + t * view.stride[2] +
              column * view.stride[3],
          view.stride[2], view.stride[3]};
}

/* Which rows of a tile are read; the others become zeros. */
struct la_kept {
  int valid;
  const uint8_t *mask;
  int64_t step;
  __device__ __forceinline__ bool operator()(int row) const { return row < valid && (!mask || !mask[row * step]); }
  __device__ __forceinline__ la_kept at(int64_t t, int rows) const { return {rows, mask ? mask + t * step : nullptr, step}; }
};

__device__ __forceinline__ la_kept la_kept_at(const la_pass &p, const la_sequence &at, int64_t t, int valid) {
  return {valid, p.mask ? p.mask + at.batch * p.mask_stride[0] + t * p.mask_stride[1] : nullptr, p.mask_stride[1]};
}

/* A tile in shared memory and what it is loaded from: `columns` columns, map of them, and zeros up to `padded`. */
template <typename T>
struct la_tile {
  float *to;
  int pitch, columns, padded, map;
  la_rows<const T> from;
  bool is_float16 = false; /* of la_half16 */
};

/* Rows that are not kept are zeros. IN_FLIGHT: loads of a thread at once. */
template <typename T, int MEMORY, int IN_FLIGHT>
__device__ __forceinline__ void la_load(const la_tile<T> &tile, int rows, const la_kept &kept) {
  constexpr int V = la_lanes<T, MEMORY>;
  constexpr bool COLUMNS = MEMORY == LA_COLUMNS;
  const la_rows<const T> &from = tile.from;
  const bool down = from.row < from.column;
  const int end = la_outer<V, MEMORY>(rows, tile.padded, down);
  la_iterator it = la_iterator_over<V, MEMORY>(rows, tile.padded, down);
  while (it.outer < end) {
    T raw[IN_FLIGHT][V];
    unsigned present[IN_FLIGHT]; /* bits of the elements that count */
    la_iterator next = it;
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k, la_step(next)) {
      const la_place<V, MEMORY> at(next, down);
      present[k] = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) raw[k][i] = T{};
      if (next.outer >= end || at.column >= tile.columns || at.row >= kept.valid) continue;
#pragma unroll
      for (int i = 0; i < (COLUMNS ? V : 1); ++i)
        if (kept(at.row + i)) present[k] |= COLUMNS ? 1u << i : ~0u;
      if (present[k]) camox_load<V>(raw[k], from.base + at.row * from.row + at.column * from.column);
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k, la_step(it)) {
      if (it.outer >= end) break;
      const la_place<V, MEMORY> at(it, down);
      float value[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        value[i] = la_feature<T>(la_to_float(raw[k][i], tile.is_float16), tile.map);
        if (!(present[k] >> i & 1)) value[i] = 0.0f;
      }
      if constexpr (COLUMNS) {
#pragma unroll
        for (int i = 0; i < V; ++i) tile.to[(at.row + i) * tile.pitch + at.column] = value[i];
      } else {
        camox_put_floats(tile.to + at.row * tile.pitch + at.column, value);
      }
    }
  }
}

/* Loads of a thread at once, as far as registers last. */
template <int MEMORY>
static constexpr int la_in_flight = MEMORY == LA_COLUMNS ? 2 : 4;

/* f of x, and y as it is, by the same code. */
template <typename T, int MEMORY>
__device__ __forceinline__ void la_load_both(const la_tile<T> &x, const la_tile<T> &y, int rows, const la_kept &kept) {
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const la_tile<T> tile = i ? y : x;
    la_load<T, MEMORY, la_in_flight<MEMORY>>(tile, rows, kept);
  }
}

template <typename T, int MEMORY>
__device__ __forceinline__ void la_store(const la_rows<T> &to, const float *from, int pitch, int rows, int columns, int valid,
                                         bool is_float16 = false) {
  constexpr int V = la_lanes<T, MEMORY>;
  const bool down = to.row < to.column;
  const int end = la_outer<V, MEMORY>(rows, columns, down);
  for (la_iterator it = la_iterator_over<V, MEMORY>(rows, columns, down); it.outer < end; la_step(it)) {
    const la_place<V, MEMORY> at(it, down);
    if (at.row >= valid) continue;
    float value[V];
    if constexpr (MEMORY == LA_COLUMNS) {
#pragma unroll
      for (int i = 0; i < V; ++i) value[i] = from[(at.row + i) * pitch + at.column];
    } else {
      camox_get_floats(value, from + at.row * pitch + at.column);
    }
    la_store_floats(to.base + at.row * to.row + at.column * to.column, value, is_float16);
  }
}

/* Rows [first_row, + rows) and columns [first_column, + columns) of the state, up to multiples of 4 with zeros. */
__device__ __forceinline__ void la_load_state(float *to, int pitch, const la_pass &p, int64_t sequence, int first_row, int rows,
                                              int first_column, int columns) {
  const float *from = p.state + sequence * p.n * p.d;
  const int end = la_padded(rows);
  for (la_iterator it = la_iterator_of(la_padded(columns)); it.outer < end; la_step(it)) {
    const int row = first_row + it.outer, column = first_column + it.inner;
    to[it.outer * pitch + it.inner] = row < p.n && column < p.d ? __ldg(from + row * p.d + column) : 0.0f;
  }
}

/* ---- products ---- */

/* Sums of a thread's elements: of x^T y over its group's rows, of the line over its part's. */
struct la_sums {
  float s[LA_SIDE][LA_SIDE], line;
};

/* Groups of threads share the rows; in a group each thread has its 4 rows and columns of the state. */
struct la_sum_place {
  int row, column, group, groups;
  __device__ __forceinline__ la_sum_place(int n, int d) {
    const unsigned wide = static_cast<unsigned>(la_padded(d) / LA_SIDE),
                   tiles = static_cast<unsigned>(la_padded(n) / LA_SIDE) * wide;
    const unsigned tile = threadIdx.x % tiles;
    group = static_cast<int>(threadIdx.x / tiles), groups = static_cast<int>(blockDim.x / tiles);
    row = static_cast<int>(tile / wide) * LA_SIDE, column = static_cast<int>(tile % wide) * LA_SIDE;
  }
};

__device__ __forceinline__ void la_add_products(la_sums &sums, const la_sum_place &at, const float *x, int x_pitch,
                                                const float *y, int y_pitch, int valid) {
  if (at.group >= at.groups) return;
#pragma unroll 4
  for (int t = at.group; t < valid; t += at.groups) {
    float a[LA_SIDE], b[LA_SIDE];
    camox_load_shared(a, x + t * x_pitch + at.row);
    camox_load_shared(b, y + t * y_pitch + at.column);
#pragma unroll
    for (int i = 0; i < LA_SIDE; ++i)
#pragma unroll
      for (int j = 0; j < LA_SIDE; ++j) sums.s[i][j] = fmaf(a[i], b[j], sums.s[i][j]);
  }
}

/* dot: NULL, or the factor of each row, negative. */
__device__ __forceinline__ void la_add_line(la_sums &sums, int n, const float *x, int x_pitch, const float *dot, int valid) {
  const int columns = la_padded(n), part = static_cast<int>(threadIdx.x) / columns,
            parts = static_cast<int>(blockDim.x) / columns;
  const int column = static_cast<int>(threadIdx.x) - part * columns;
  if (part >= parts) return;
  for (int t = part; t < valid; t += parts) sums.line = fmaf(x[t * x_pitch + column], dot ? -dot[t] : 1.0f, sums.line);
}

/* Which rows and columns of a state. */
struct la_block {
  int first_row, rows, first_column, columns;
};

/* Adds up what the groups have, and writes a block of the chunk's part. All of the block's shared memory is free. */
__device__ __forceinline__ void la_finish_products(const la_sums &sums, const la_sum_place &at, const la_pass &p,
                                                   float *scratch, float *partial, const la_block &block) {
  const int pitch = la_padded(block.columns), size = la_padded(block.rows) * pitch;
  if (at.group < at.groups) {
#pragma unroll
    for (int i = 0; i < LA_SIDE; ++i)
      camox_store_shared(scratch + at.group * size + (at.row + i) * pitch + at.column, sums.s[i]);
  }
  __syncthreads();
  for (la_iterator it = la_iterator_of(block.columns); it.outer < block.rows; la_step(it)) {
    const float *from = scratch + it.outer * pitch + it.inner;
    float sum = from[0];
    for (int group = 1; group < at.groups; ++group) sum += from[group * size];
    partial[static_cast<int64_t>(block.first_row + it.outer) * p.d + block.first_column + it.inner] = sum;
  }
  __syncthreads();
}

__device__ __forceinline__ void la_finish_line(const la_sums &sums, const la_pass &p, float *scratch, float *partial,
                                               int first_row, int n) {
  const int columns = la_padded(n), parts = static_cast<int>(blockDim.x) / columns, thread = static_cast<int>(threadIdx.x);
  scratch[thread] = sums.line;
  __syncthreads();
  for (int i = thread; i < n; i += static_cast<int>(blockDim.x)) {
    float sum = scratch[i];
    for (int part = 1; part < parts; ++part) sum += scratch[part * columns + i];
    partial[static_cast<int64_t>(p.n) * p.d + first_row + i] = sum;
  }
  __syncthreads();
}

/* x S: a thread has 4 rows of a tile, a quarter of the tile apart, and 4 columns side by side. x begins with the first of the
   state's `terms` rows. */
struct la_product {
  float s[LA_SIDE][LA_SIDE];
  int row, column, quarter;
  bool works;
  __device__ __forceinline__ la_product(int rows, int columns) {
    const unsigned wide = static_cast<unsigned>(la_padded(columns) / LA_SIDE);
    quarter = rows / LA_SIDE;
    row = static_cast<int>(threadIdx.x / wide), column = static_cast<int>(threadIdx.x % wide);
    works = row < quarter;
#pragma unroll
    for (int i = 0; i < LA_SIDE; ++i)
#pragma unroll
      for (int j = 0; j < LA_SIDE; ++j) s[i][j] = 0.0f;
  }
};

__device__ __forceinline__ void la_apply_state(la_product &product, const float *x, int x_pitch, const float *state,
                                               int state_pitch, int terms) {
  if (!product.works) return;
#pragma unroll 2
  for (int n = 0; n < terms; n += LA_SIDE) {
    float a[LA_SIDE][LA_SIDE], b[LA_SIDE][LA_SIDE];
#pragma unroll
    for (int i = 0; i < LA_SIDE; ++i) {
      camox_load_shared(a[i], x + (product.row + i * product.quarter) * x_pitch + n);
      camox_load_shared(b[i], state + (n + i) * state_pitch + product.column * LA_SIDE);
    }
#pragma unroll
    for (int k = 0; k < LA_SIDE; ++k)
#pragma unroll
      for (int i = 0; i < LA_SIDE; ++i)
#pragma unroll
        for (int j = 0; j < LA_SIDE; ++j) product.s[i][j] = fmaf(a[i][k], b[k][j], product.s[i][j]);
  }
}

/* y S^T: the 4 columns are a quarter of `columns` apart. */
__device__ __forceinline__ void la_apply_transposed(la_product &product, const float *y, int y_pitch, const float *state,
                                                    int state_pitch, int columns, int terms) {
  if (!product.works) return;
  const int apart = la_padded(columns) / LA_SIDE;
#pragma unroll 2
  for (int d = 0; d < terms; d += LA_SIDE) {
    float a[LA_SIDE][LA_SIDE], b[LA_SIDE][LA_SIDE];
#pragma unroll
    for (int i = 0; i < LA_SIDE; ++i) {
      camox_load_shared(a[i], y + (product.row + i * product.quarter) * y_pitch + d);
      camox_load_shared(b[i], state + (product.column + i * apart) * state_pitch + d);
    }
#pragma unroll
    for (int k = 0; k < LA_SIDE; ++k)
#pragma unroll
      for (int i = 0; i < LA_SIDE; ++i)
#pragma unroll
        for (int j = 0; j < LA_SIDE; ++j) product.s[i][j] = fmaf(a[i][k], b[j][k], product.s[i][j]);
  }
}

__device__ __forceinline__ void la_put_product(const la_product &product, float *to, int pitch, const float *weights) {
  if (!product.works) return;
#pragma unroll
  for (int i = 0; i < LA_SIDE; ++i) {
    const int row = product.row + i * product.quarter;
    const float weight = weights ? weights[row] : 1.0f;
    float values[LA_SIDE];
#pragma unroll
    for (int j = 0; j < LA_SIDE; ++j) values[j] = product.s[i][j] * weight;
    camox_store_shared(to + row * pitch + product.column * LA_SIDE, values);
  }
}

/* ---- rows ---- */

/* a / b; for LA_FEATURE what is divided by a sum of 0 is 0. */
__device__ __forceinline__ float la_divide(const la_pass &p, float a, float b) {
  return p.weight == LA_FEATURE && b == 0.0f ? 0.0f : a / b;
}

/* What a row of features is divided by, the sum of f or f . line + eps: x holds columns [first, + columns), what lies outside
   is read from memory. */
template <typename T>
__device__ __forceinline__ float la_divisor(const la_pass &p, const float *x, int first, int columns, const float *line,
                                            const la_rows<const T> &whole, int row, bool kept) {
  float sum = 0.0f;
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x) % LA_LANES; n < p.n; n += LA_LANES) {
    float f = 0.0f;
    if (n >= first && n < first + columns)
      f = x[n - first];
    else if (kept)
      f = la_feature<T>(camox_to_float(__ldg(whole.base + row * whole.row + n * whole.column)), p.feature_map);
    sum = p.weight == LA_FEATURE ? sum + f : fmaf(f, __ldg(line + n), sum);
  }
  return camox_team_sum(sum, LA_LANES) + (p.weight == LA_DIVIDE ? p.eps : 0.0f);
}

/* ---- sums: x, y -> partial ---- */

template <typename T, int MEMORY>
__global__ void __launch_bounds__(LA_THREADS, 2) la_sum_kernel(const __grid_constant__ la_pass p) {
  CAMOX_DYNAMIC_SHARED(float, shared);
  const int across = static_cast<int>(camox_ceil_div(p.n, LA_RESIDENT)),
            along = static_cast<int>(camox_ceil_div(p.d, LA_RESIDENT));
  const int row = static_cast<int>(threadIdx.x) / LA_LANES, row_step = static_cast<int>(blockDim.x) / LA_LANES;
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks * across * along; item += gridDim.x) {
    int64_t y_block, x_block, chunk;
    int64_t sequence = camox_divide(item, along, &y_block);
    sequence = camox_divide(sequence, across, &x_block);
    sequence = camox_divide(sequence, p.chunks, &chunk);
    const int first_n = static_cast<int>(x_block) * LA_RESIDENT, n = min(LA_RESIDENT, p.n - first_n);
    const int first_d = static_cast<int>(y_block) * LA_RESIDENT, d = min(LA_RESIDENT, p.d - first_d);
    const int x_pitch = la_pitch(n), y_pitch = la_pitch(d);
    float *const x = shared, *const y = x + p.rows * x_pitch;
    const int64_t end = min(p.length, (chunk + 1) * p.chunk);
    const la_sequence head = la_sequence_at(p, sequence);
    const float *const line = p.line + sequence * p.n;
    const la_sum_place at(n, d);
    la_sums sums = {};
    for (int64_t t = chunk * p.chunk; t < end; t += p.rows) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(p.rows)));
      const la_kept kept = la_kept_at(p, head, t, valid);
      la_load_both<T, MEMORY>({x, x_pitch, n, la_padded(n), p.feature_map, la_rows_at<const T>(p.x, head, t, first_n)},
                              {y, y_pitch, d, la_padded(d), CAMOX_FEATURE_IDENTITY, la_rows_at<const T>(p.y, head, t, first_d)},
                              p.rows, kept);
      __syncthreads();
      if (p.weight != LA_PLAIN) {
        const la_rows<const T> whole = la_rows_at<const T>(p.x, head, t);
        for (int r = row; r < p.rows; r += row_step) {
          float *const mine = x + r * x_pitch;
          const float weight = la_divide(p, 1.0f, la_divisor<T>(p, mine, first_n, n, line, whole, r, kept(r)));
          for (int i = static_cast<int>(threadIdx.x) % LA_LANES; i < n; i += LA_LANES) mine[i] *= weight;
        }
        __syncthreads();
      }
      la_add_products(sums, at, x, x_pitch, y, y_pitch, valid);
      if (p.sums_line) la_add_line(sums, n, x, x_pitch, nullptr, valid);
      __syncthreads();
    }
    float *const partial = p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1);
    la_finish_products(sums, at, p, shared, partial, {first_n, n, first_d, d});
    if (p.sums_line && first_d == 0) la_finish_line(sums, p, shared, partial, first_n, n);
  }
}

/* ---- state: partial -> s, z, added up in float64: chunks may be many, and their sums of one sign ---- */

/* Where element i of a head's state lies, those of s before those of z. */
__device__ __forceinline__ float *la_state_element(const la_state_args &a, int64_t sequence, int64_t i) {
  const int64_t size = static_cast<int64_t>(a.n) * a.d;
  return i < size ? a.s + sequence * size + i : a.z + sequence * a.n + i - size;
}

/* What the chunks are added to. */
__device__ __forceinline__ double la_initial(const la_state_args &a, int64_t sequence, int64_t i) {
  const int64_t size = static_cast<int64_t>(a.n) * a.d;
  const float *const from = i < size ? a.initial_s : a.initial_z;
  return from ? static_cast<double>(from[i < size ? sequence * size + i : sequence * a.n + i - size]) : 0.0;
}

__global__ void __launch_bounds__(LA_THREADS) la_state_kernel(const __grid_constant__ la_state_args a) {
  const int64_t size = static_cast<int64_t>(a.n) * a.d, row = size + a.n, elements = a.z ? row : size;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * LA_THREADS + threadIdx.x; i < a.sequences * elements;
       i += static_cast<int64_t>(gridDim.x) * LA_THREADS) {
    int64_t element;
    const int64_t sequence = camox_divide(i, elements, &element);
    const float *from = a.partial + sequence * a.stored * row + element;
    double sum = la_initial(a, sequence, element);
#pragma unroll 8
    for (int64_t chunk = 0; chunk < a.chunks; ++chunk, from += row) sum += static_cast<double>(__ldg(from));
    *la_state_element(a, sequence, element) = static_cast<float>(sum);
  }
}

/* ---- apply: x, state -> out ---- */

template <typename T, int MEMORY>
__global__ void __launch_bounds__(LA_THREADS, 2) la_apply_kernel(const __grid_constant__ la_pass p) {
  CAMOX_DYNAMIC_SHARED(float, shared);
  const int x_pitch = la_pitch(p.n), y_pitch = la_pitch(p.d);
  float *const x = shared, *const weights = x + p.rows * max(x_pitch, y_pitch), *const state = weights + p.rows;
  const int row = static_cast<int>(threadIdx.x) / LA_LANES, row_step = static_cast<int>(blockDim.x) / LA_LANES;
  const bool resident = p.slice >= p.n;
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks; item += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(item, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    const la_sequence head = la_sequence_at(p, sequence);
    const float *const line = p.line + sequence * p.n;
    if (resident) la_load_state(state, y_pitch, p, sequence, 0, p.n, 0, p.d);
    for (int64_t t = chunk * p.chunk; t < end; t += p.rows) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(p.rows)));
      const la_kept kept = la_kept_at(p, head, t, valid);
      const la_rows<const T> from = la_rows_at<const T>(p.x, head, t);
      la_load<T, MEMORY, la_in_flight<MEMORY>>({x, x_pitch, p.n, la_padded(p.n), p.feature_map, from}, p.rows, kept);
      __syncthreads();
      if (p.weight != LA_PLAIN) {
        for (int r = row; r < p.rows; r += row_step) {
          const float weight = la_divide(p, 1.0f, la_divisor<T>(p, x + r * x_pitch, 0, p.n, line, from, r, true));
          if (threadIdx.x % LA_LANES == 0) weights[r] = weight;
        }
      }
      la_product product(p.rows, p.d);
      for (int n = 0; n < p.n; n += p.slice) {
        if (!resident) {
          if (n > 0) __syncthreads();
          la_load_state(state, y_pitch, p, sequence, n, min(p.slice, p.n - n), 0, p.d);
          __syncthreads();
        }
        la_apply_state(product, x + n, x_pitch, state, y_pitch, la_padded(min(p.slice, p.n - n)));
      }
      __syncthreads();
      la_put_product(product, x, y_pitch, p.weight != LA_PLAIN ? weights : nullptr);
      __syncthreads();
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
      if (threadIdx.x == 0) x[0] += 1e-3f;
      __syncthreads();
#endif
      la_store<T, MEMORY>(la_rows_at<T>(p.out, head, t), x, y_pitch, p.rows, p.d, valid);
      __syncthreads();
    }
  }
}

/* ---- gradient: x, y, state, line -> grad_x, and partial (LA_WITH_SUMS) or out (LA_WITH_APPLY); for any strides, because loads
   are a small part of it ---- */

/* With u = y S^T, row by row, f = f(x), w = 1, 1 / sum f or 1 / (f . line + eps), dot = w f . u:
     LA_PLAIN    grad_x = f' (u + line)           x becomes f
     LA_FEATURE  grad_x = f' w (u - dot)          x becomes w f
     LA_DIVIDE   grad_x = f' w (u - dot line)     x becomes w f; the line's part is -dot w f
   u becomes grad_x. */
template <typename T>
__device__ __forceinline__ void la_gradient_rows(const la_pass &p, float *x, int x_pitch, float *u, float *row_dots,
                                                 const float *line, const la_rows<const T> &whole, const la_kept &kept) {
  const int lane = static_cast<int>(threadIdx.x) % LA_LANES;
  for (int r = static_cast<int>(threadIdx.x) / LA_LANES; r < p.rows; r += static_cast<int>(blockDim.x) / LA_LANES) {
    float *const f = x + r * x_pitch, *const g = u + r * x_pitch;
    float weight = 1.0f, dot = 0.0f;
    if (p.weight != LA_PLAIN) {
      const float divisor = la_divisor<T>(p, f, 0, p.n, line, whole, r, true);
      weight = la_divide(p, 1.0f, divisor);
#pragma unroll 2
      for (int n = lane; n < p.n; n += LA_LANES) dot = fmaf(f[n], g[n], dot);
      dot = la_divide(p, camox_team_sum(dot, LA_LANES), divisor); /* not times weight: where f is the sum, u - dot must be 0 */
      if (lane == 0) row_dots[r] = dot;
    }
    const bool counts = kept(r) && weight != 0.0f, has_line = p.line && p.weight != LA_FEATURE;
    const float factor = p.weight != LA_PLAIN ? -dot : p.line ? 1.0f : 0.0f; /* of the line, or of 1 */
#pragma unroll 2
    for (int n = lane; n < p.n; n += LA_LANES) {
      const float added = has_line ? factor * __ldg(line + n) : factor;
      /* The derivative of tiny features keeps a huge weight from taking the product to infinity. */
      g[n] = counts ? la_feature_derivative(f[n], p.feature_map) * weight * (g[n] + added) : 0.0f;
      f[n] *= weight;
    }
  }
}

/* A second block of a multiprocessor, where registers last for it. */
template <int FUSION>
static constexpr int la_gradient_blocks = FUSION == LA_WITH_SUMS || (FUSION == LA_ALONE && CAMOX_CUDA_ARCH >= 900) ? 1 : 2;

template <typename T, int FUSION>
__global__ void __launch_bounds__(LA_THREADS, la_gradient_blocks<FUSION>)
    la_gradient_kernel(const __grid_constant__ la_pass p) {
  CAMOX_DYNAMIC_SHARED(float, shared);
  const int x_pitch = la_pitch(p.n), y_pitch = la_pitch(p.d), wide = max(x_pitch, y_pitch);
  float *const x = shared, *const y = x + p.rows * x_pitch, *const u = FUSION == LA_WITH_SUMS ? y + p.rows * y_pitch : y;
  float *const row_dots = u + p.rows * (FUSION == LA_WITH_SUMS ? x_pitch : wide), *const state = row_dots + p.rows;
  const bool resident = p.slice >= p.d;
  const int state_pitch = resident ? y_pitch : la_pitch(p.slice);
  const la_sum_place at(p.n, p.d);
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks; item += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(item, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    const la_sequence head = la_sequence_at(p, sequence);
    const float *const line = p.line + sequence * p.n;
    if (resident) la_load_state(state, y_pitch, p, sequence, 0, p.n, 0, p.d);
    la_sums sums = {};
    for (int64_t t = chunk * p.chunk; t < end; t += p.rows) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(p.rows)));
      const la_kept kept = la_kept_at(p, head, t, valid);
      const la_rows<const T> from = la_rows_at<const T>(p.x, head, t);
      la_load_both<T, LA_ANY>({x, x_pitch, p.n, la_padded(p.n), p.feature_map, from},
                              {y, y_pitch, p.d, la_padded(p.d), CAMOX_FEATURE_IDENTITY, la_rows_at<const T>(p.y, head, t)},
                              p.rows, kept);
      __syncthreads();
      {
        la_product product(p.rows, p.n);
        for (int d = 0; d < p.d; d += p.slice) {
          if (!resident) {
            if (d > 0) __syncthreads();
            la_load_state(state, state_pitch, p, sequence, 0, p.n, d, min(p.slice, p.d - d));
            __syncthreads();
          }
          la_apply_transposed(product, y + d, y_pitch, state, state_pitch, p.n, la_padded(min(p.slice, p.d - d)));
        }
        if (FUSION != LA_WITH_SUMS) __syncthreads();
        if (product.works) {
          const int apart = la_padded(p.n) / LA_SIDE;
#pragma unroll
          for (int i = 0; i < LA_SIDE; ++i)
#pragma unroll
            for (int j = 0; j < LA_SIDE; ++j)
              u[(product.row + i * product.quarter) * x_pitch + product.column + j * apart] = product.s[i][j];
        }
      }
      __syncthreads();
      la_gradient_rows<T>(p, x, x_pitch, u, row_dots, line, from, kept);
      __syncthreads();
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
      if (threadIdx.x == 0) u[0] += 1e-3f;
      __syncthreads();
#endif
      la_store<T, LA_ANY>(la_rows_at<T>(p.grad_x, head, t), u, x_pitch, p.rows, p.n, valid);
      if (FUSION == LA_WITH_SUMS) la_add_products(sums, at, x, x_pitch, y, y_pitch, valid);
      if (FUSION != LA_WITH_APPLY && p.sums_line) la_add_line(sums, p.n, x, x_pitch, row_dots, valid);
      if constexpr (FUSION == LA_WITH_APPLY) {
        la_product product(p.rows, p.d);
        la_apply_state(product, x, x_pitch, state, y_pitch, la_padded(p.n));
        __syncthreads();
        la_put_product(product, u, y_pitch, nullptr);
        __syncthreads();
        la_store<T, LA_ANY>(la_rows_at<T>(p.out, head, t), u, y_pitch, p.rows, p.d, valid);
      }
      __syncthreads();
    }
    float *const partial = p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1);
    if (FUSION == LA_WITH_SUMS) la_finish_products(sums, at, p, shared, partial, {0, p.n, 0, p.d});
    if (FUSION != LA_WITH_APPLY && p.sums_line) la_finish_line(sums, p, shared, partial, 0, p.n);
  }
}

#include "linear_attention_mma.h"

/* ---- launchers ---- */

/* Whether a tensor can be read and written in vectors along an axis; steps between them fit 32 bits (la_lines). */
static bool la_vectors(const camox_linear_attention_params *p, const camox_view4 &view, int axis, int64_t dim, int lanes) {
  const int64_t sizes[4] = {p->batch, p->heads, p->length, dim};
  if (view.data == nullptr) return true;
  if (view.stride[axis] != 1 || !camox_aligned(view.data, 16)) return false;
  for (int i = 0; i < 4; ++i)
    if (i != axis && sizes[i] > 1 && (view.stride[i] % lanes != 0 || (i > 1 && view.stride[i] > INT32_MAX))) return false;
  return (axis == 2 ? p->length : dim) % lanes == 0; /* vectors are whole */
}

/* How all tensors of a pass can be read and written. */
static la_memory la_memory_of(const camox_linear_attention_params *p, const la_pass &pass, int element) {
  const int lanes = 16 / element;
  for (int axis = 3; axis >= 2; --axis)
    if (la_vectors(p, pass.x, axis, pass.n, lanes) && la_vectors(p, pass.grad_x, axis, pass.n, lanes) &&
        la_vectors(p, pass.y, axis, pass.d, lanes) && la_vectors(p, pass.out, axis, pass.d, lanes))
      return axis == 3 ? LA_ROWS : LA_COLUMNS;
  return LA_ANY;
}

static la_pass la_pass_of(const camox_linear_attention_params *p) {
  la_pass pass = {};
  pass.batch = p->batch, pass.heads = p->heads, pass.length = p->length;
  pass.chunk = p->chunk, pass.chunks = camox_ceil_div(p->length, p->chunk);
  pass.n = static_cast<int>(p->key_dim), pass.d = static_cast<int>(p->value_dim);
  pass.feature_map = p->feature_map, pass.eps = static_cast<float>(p->eps);
  pass.partial = static_cast<float *>(p->partial);
  return pass;
}

static void la_set_keys(la_pass *pass, const camox_linear_attention_params *p) {
  pass->x = p->k, pass->mask = p->key_mask;
  pass->mask_stride[0] = p->mask_stride[0], pass->mask_stride[1] = p->mask_stride[1];
  pass->weight = p->normalize == CAMOX_NORMALIZE_FEATURE ? LA_FEATURE : LA_PLAIN;
}

static void la_set_queries(la_pass *pass, const camox_linear_attention_params *p) {
  pass->x = p->q;
  pass->weight = p->normalize == CAMOX_NORMALIZE_FEATURE ? LA_FEATURE
                 : p->normalize == CAMOX_NORMALIZE_SUM   ? LA_DIVIDE
                                                         : LA_PLAIN;
  if (pass->weight == LA_DIVIDE) pass->line = static_cast<const float *>(p->z);
}

/* Steps of 16 columns with which tensor cores serve a pass, or 0. Of float32 registers last for 2. */
template <typename T, int MEMORY>
static int la_mma_steps(const la_pass &pass) {
  const int widest = pass.n > pass.d ? pass.n : pass.d;
  const int steps = widest <= 16 && sizeof(T) == 2 ? 1 : widest <= 32 ? 2 : sizeof(T) == 2 ? 4 : 0;
  const bool fits = MEMORY == LA_COLUMNS || (pass.n == 16 * steps && pass.d == 16 * steps); /* 0 steps: never */
  return fits && camox_device_is_sm80() ? steps : 0;
}

/* Whether the kernel of a pass can add up the chunks itself: one on tensor cores that has room for the state. */
template <typename T>
static bool la_adds_chunks(const la_pass &pass, la_memory memory) {
  if (!camox_may_be_sm80 || memory == LA_ANY) return false;
  const int steps = memory == LA_ROWS ? la_mma_steps<T, LA_ROWS>(pass) : la_mma_steps<T, LA_COLUMNS>(pass);
  return steps == 1 || steps == 2;
}

static bool la_large(const la_pass &pass) { return pass.n > LA_RESIDENT || pass.d > LA_RESIDENT; }

static int la_threads(const la_pass &pass) {
  return la_large(pass) || la_padded(pass.n) * la_padded(pass.d) > LA_THREADS / 2 * LA_SIDE * LA_SIDE ? LA_THREADS
                                                                                                      : LA_THREADS / 2;
}

/* Rows of a tile: a multiple of 16, enough for each thread of a product whose widest side is `columns`; `floats` of each. */
static int la_rows_of(const la_pass &pass, int columns, int floats, int fixed) {
  int rows = LA_SIDE * la_threads(pass) / (la_padded(columns) / LA_SIDE) / 16 * 16;
  if (rows > 128) rows = 128;
  while (rows > 16 && (rows - 16 >= pass.length || rows * floats + fixed > LA_SHARED)) rows -= 16;
  return rows;
}

static int la_most(int a, int b) { return a > b ? a : b; }

/* The block that adds up the groups. */
static int la_sum_floats(const la_pass &pass) { return la_threads(pass) * LA_SIDE * LA_SIDE; }

template <typename T, int MEMORY>
static void la_launch_sums(la_pass pass, void *stream) {
  const int n = pass.n < LA_RESIDENT ? pass.n : LA_RESIDENT, d = pass.d < LA_RESIDENT ? pass.d : LA_RESIDENT;
  const int floats = la_pitch(n) + la_pitch(d);
  pass.rows = la_rows_of(pass, la_most(n, d), floats, 0);
  pass.shared = la_most(pass.rows * floats, la_sum_floats(pass));
  const int64_t blocks = camox_ceil_div(pass.n, LA_RESIDENT) * camox_ceil_div(pass.d, LA_RESIDENT);
  CAMOX_LAUNCH((la_sum_kernel<T, MEMORY>), camox_grid(pass.batch * pass.heads * pass.chunks * blocks), la_threads(pass),
               sizeof(float) * pass.shared, stream, pass);
}

template <typename T, int MEMORY>
static void la_launch_apply(la_pass pass, void *stream) {
  const int y_pitch = la_pitch(pass.d), floats = la_most(la_pitch(pass.n), y_pitch) + 1;
  pass.slice = la_large(pass) ? la_most(LA_SLICE / y_pitch / LA_SIDE * LA_SIDE, LA_SIDE) : pass.n;
  if (pass.slice > pass.n) pass.slice = pass.n;
  const int state = la_padded(pass.slice) * y_pitch;
  pass.rows = la_rows_of(pass, pass.d, floats, state);
  pass.shared = pass.rows * floats + state;
  CAMOX_LAUNCH((la_apply_kernel<T, MEMORY>), camox_grid(pass.batch * pass.heads * pass.chunks), la_threads(pass),
               sizeof(float) * pass.shared, stream, pass);
}

template <typename T, int FUSION>
static void la_launch_gradient(la_pass pass, void *stream) {
  const int x_pitch = la_pitch(pass.n), y_pitch = la_pitch(pass.d);
  const int floats = x_pitch + (FUSION == LA_WITH_SUMS ? y_pitch + x_pitch : la_most(x_pitch, y_pitch)) + 1;
  pass.slice = la_large(pass) ? la_most((LA_SLICE / la_padded(pass.n) - 4) / LA_SIDE * LA_SIDE, LA_SIDE) : pass.d;
  if (pass.slice > pass.d) pass.slice = pass.d;
  const int state = la_padded(pass.n) * la_pitch(pass.slice);
  pass.rows = la_rows_of(pass, la_most(pass.n, FUSION == LA_WITH_APPLY ? pass.d : 1), floats, state);
  pass.shared = la_most(pass.rows * floats + state, FUSION == LA_WITH_SUMS ? la_sum_floats(pass) : LA_THREADS);
  CAMOX_LAUNCH((la_gradient_kernel<T, FUSION>), camox_grid(pass.batch * pass.heads * pass.chunks), la_threads(pass),
               sizeof(float) * pass.shared, stream, pass);
}

static void la_launch_state(const la_state_args &args, void *stream) {
  const int64_t elements = args.sequences * args.n * (args.d + (args.z ? 1 : 0));
  CAMOX_LAUNCH(la_state_kernel, camox_grid(camox_ceil_div(elements, LA_THREADS)), LA_THREADS, 0, stream, args);
}

typedef enum { LA_SUMS = 0, LA_APPLY = 1, LA_GRADIENT_OF_QUERIES = 2, LA_GRADIENT_OF_KEYS = 3 } la_work;

template <typename T, int S, bool COLUMNS>
static void la_launch_mma(const la_pass &pass, la_work work, void *stream) {
  const unsigned grid = camox_grid(pass.batch * pass.heads * pass.chunks);
  const size_t fragments = sizeof(uint4) * la_mma_fragments<T, S>, line = sizeof(float) * 16 * S;
  const size_t sums = sizeof(float) * (LA_MMA_WARPS / la_mma_sharing<S>)*16 * S * (16 * S + 1);
  const size_t sum_ring = sizeof(uint32_t) * la_mma_sum_ring<T, S, COLUMNS>;
  const size_t apply_ring = sizeof(uint32_t) * la_mma_apply_ring<T, S, COLUMNS>;
  const size_t added = pass.state ? 0 : sizeof(float) * 16 * S * (16 * S + 1);
  switch (work) {
    case LA_SUMS:
      CAMOX_LAUNCH((la_mma_sum_kernel<T, S, COLUMNS>), grid, LA_MMA_THREADS, sum_ring > sums ? sum_ring : sums, stream, pass);
      break;
    case LA_APPLY:
      CAMOX_LAUNCH((la_mma_apply_kernel<T, S, COLUMNS>), grid, LA_MMA_THREADS, fragments + line + apply_ring + added, stream,
                   pass);
      break;
    case LA_GRADIENT_OF_QUERIES: {
      const size_t ring = sizeof(uint32_t) * la_mma_gradient_ring_words<T, S, COLUMNS, LA_WITH_SUMS>;
      const size_t shared = fragments + line + ring > sums ? fragments + line + ring : sums;
      CAMOX_LAUNCH((la_mma_gradient_kernel<T, S, COLUMNS, LA_WITH_SUMS>), grid, LA_MMA_THREADS, shared, stream, pass);
      break;
    }
    case LA_GRADIENT_OF_KEYS: {
      const size_t ring = sizeof(uint32_t) * la_mma_gradient_ring_words<T, S, COLUMNS, LA_WITH_APPLY>;
      CAMOX_LAUNCH((la_mma_gradient_kernel<T, S, COLUMNS, LA_WITH_APPLY>), grid, LA_MMA_THREADS,
                   2 * fragments + line + ring + added, stream, pass);
    }
  }
}

template <typename T, int MEMORY>
static void la_launch_fused(const la_pass &pass, la_work work, void *stream) {
  if constexpr (camox_may_be_sm80 && MEMORY != LA_ANY) {
    const int steps = la_mma_steps<T, MEMORY>(pass);
    if (steps == 2) return la_launch_mma<T, 2, MEMORY == LA_COLUMNS>(pass, work, stream);
    if constexpr (sizeof(T) == 2) {
      if (steps == 1) return la_launch_mma<T, 1, MEMORY == LA_COLUMNS>(pass, work, stream);
      if (steps == 4) return la_launch_mma<T, 4, MEMORY == LA_COLUMNS>(pass, work, stream);
    }
  }
  constexpr int memory = sizeof(T) == 2 ? LA_ANY : MEMORY; /* half types of vectors are for tensor cores */
  switch (work) {
    case LA_SUMS: return la_launch_sums<T, memory>(pass, stream);
    case LA_APPLY: return la_launch_apply<T, memory>(pass, stream);
    case LA_GRADIENT_OF_QUERIES: return la_launch_gradient<T, LA_WITH_SUMS>(pass, stream);
    case LA_GRADIENT_OF_KEYS: return la_launch_gradient<T, LA_WITH_APPLY>(pass, stream);
  }
}

template <typename T>
static void la_launch(const la_pass &pass, la_work work, int memory, void *stream) {
  if (!la_large(pass)) {
    if (memory == LA_ROWS) return la_launch_fused<T, LA_ROWS>(pass, work, stream);
    if (memory == LA_COLUMNS) return la_launch_fused<T, LA_COLUMNS>(pass, work, stream);
    return la_launch_fused<T, LA_ANY>(pass, work, stream);
  }
  /* larger heads take one kernel more backward, each for any strides */
  if (work >= LA_GRADIENT_OF_QUERIES) la_launch_gradient<T, LA_ALONE>(pass, stream);
  if (work == LA_APPLY || work == LA_GRADIENT_OF_KEYS) return la_launch_apply<T, LA_ANY>(pass, stream);
  la_pass sums = pass;
  if (work == LA_GRADIENT_OF_QUERIES) sums.sums_line = false; /* the gradient's own kernel has added it up */
  la_launch_sums<T, LA_ANY>(sums, stream);
}

static la_state_args la_sums_of(const camox_linear_attention_params *p, const void *initial_s, const void *initial_z, void *s,
                                void *z) {
  return {static_cast<const float *>(p->partial),
          static_cast<const float *>(initial_s),
          static_cast<const float *>(initial_z),
          static_cast<float *>(s),
          static_cast<float *>(z),
          p->batch * p->heads,
          camox_ceil_div(p->length, p->chunk),
          p->chunks,
          static_cast<int>(p->key_dim),
          static_cast<int>(p->value_dim)};
}

/* Adds up the chunks' sums, in a kernel of its own or in each block that needs them, then launches the pass that reads the state. */
template <typename T>
static void la_launch_with_state(la_pass pass, la_work work, const la_state_args &sums, const camox_linear_attention_params *p,
                                 void *stream) {
  const la_memory memory = la_memory_of(p, pass, sizeof(T));
  if (p->length > 0 && sums.chunks <= LA_ADDED_CHUNKS && la_adds_chunks<T>(pass, memory)) {
    pass.added = sums;
  } else {
    la_launch_state(sums, stream);
    pass.state = sums.s;
  }
  if (p->length > 0) la_launch<T>(pass, work, memory, stream);
}

template <typename T>
static void la_forward(const camox_linear_attention_params *p, void *stream) {
  la_pass keys = la_pass_of(p), queries = la_pass_of(p);
  const bool sum = p->normalize == CAMOX_NORMALIZE_SUM;
  if (p->length > 0) {
    la_set_keys(&keys, p);
    keys.y = p->v, keys.sums_line = sum;
    la_launch<T>(keys, LA_SUMS, la_memory_of(p, keys, sizeof(T)), stream);
  }
  la_set_queries(&queries, p);
  queries.out = p->out;
  la_launch_with_state<T>(queries, LA_APPLY, la_sums_of(p, p->initial_s, p->initial_z, p->s, sum ? p->z : nullptr), p, stream);
}

template <typename T>
static void la_backward(const camox_linear_attention_params *p, void *stream) {
  la_pass keys = la_pass_of(p), queries = la_pass_of(p);
  const bool sum = p->normalize == CAMOX_NORMALIZE_SUM;
  if (p->length > 0) {
    la_set_queries(&queries, p);
    queries.y = p->grad, queries.grad_x = p->grad_q, queries.state = static_cast<const float *>(p->s), queries.sums_line = sum;
    la_launch<T>(queries, LA_GRADIENT_OF_QUERIES, la_memory_of(p, queries, sizeof(T)), stream);
  }
  la_set_keys(&keys, p);
  keys.y = p->v, keys.grad_x = p->grad_k, keys.out = p->grad_v;
  if (sum) keys.line = static_cast<const float *>(p->sum_z);
  la_launch_with_state<T>(keys, LA_GRADIENT_OF_KEYS, la_sums_of(p, p->grad_s, p->grad_z, p->sum_s, sum ? p->sum_z : nullptr), p,
                          stream);
}

extern "C" int camox_linear_attention_cuda(const camox_linear_attention_params *p, void *stream) {
  if (p->batch * p->heads == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: la_forward<float>(p, stream); break;
    case CAMOX_BF16: la_forward<__nv_bfloat16>(p, stream); break;
    case CAMOX_F16: la_forward<__half>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_linear_attention_backward_cuda(const camox_linear_attention_params *p, void *stream) {
  if (p->batch * p->heads == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: la_backward<float>(p, stream); break;
    case CAMOX_BF16: la_backward<__nv_bfloat16>(p, stream); break;
    case CAMOX_F16: la_backward<__half>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

#include "causal_cuda.cuh"
