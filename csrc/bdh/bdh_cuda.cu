/* bdh_attention on CUDA: products of 64 x 64 tiles, whose operands are turned, masked or weighed on their way into shared
   memory; float16 and bfloat16 on tensor cores, float32 (and bfloat16 on sm_75) by FMA, sums in float32.
     scores   s = scale r r^T, a tile and its mirror image at once      softmax  a warp a row
     values   out = w v                                                 grad_v   w^T g
     pairs    e = d s + d s^T                                           grad_q   scale e r, turned back
   Scores and pairs of some heads, or of a strip of rows of one head, lie in scratch at a time: the strips of the backward
   need nothing of each other, because s is symmetric. Every length goes this way, also those whose state form has
   fewer products. No atomics: fixed bits.
   Half types: r, w and e are rounded to the type as the tensor cores take them. */
#include "../common/cuda_util.cuh"
#include "bdh.h"

#define BDH_THREADS 128
#define BDH_TILE 64            /* rows and columns of a block's tile: 2 x 2 warps of 32 x 32 */
#define BDH_TILES_AT_ONCE 2048 /* of scores and of pairs in scratch, or one strip of BDH_TILE rows: enough to fill a GPU */
#define BDH_STEP_THREADS 256
#define BDH_STEP_COLUMNS 32 /* columns of the state of a block, whose warps share its rows */
#define BDH_STEP_CHUNK 512  /* elements of r in shared memory */

/* 16 bytes, the widest access; elements of an operand along k in one turn of the loop, 32 words. */
template <typename T>
constexpr int bdh_lanes = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int bdh_depth = 128 / static_cast<int>(sizeof(T));

/* An operand in shared memory: two halves along k, each [BDH_TILE] rows of 16 words. The padding keeps the four rows, or two,
   that eight lanes read at once in different banks. */
template <typename T>
struct bdh_tile {
  static constexpr int row = sizeof(T) == 4 ? 20 : 16; /* words from row to row */
  static constexpr int half = BDH_TILE * row + 16;
  static constexpr int words = 2 * half;
};

/* Rows [unit * height + row - first_row], unit and row counted from the first of the launch. */
struct bdh_strip {
  int64_t first_unit, units, first_row, rows;
};

struct bdh_plan {
  camox_bdh_params p;
  float scale;
  bdh_strip strip;
  float *scores; /* [units, rows, T] from the strip's first unit and row on, of all rows where p.scores holds them */
  void *pairs;   /* [units, rows, T] in the element type */
  float *delta;  /* [B*H, T] */
  bool weights;  /* scores are w already, of all rows: the forward's; else s, and w follows from it */
  bool wide_q, wide_v, wide_grad, wide_tables, wide_scores, wide_pairs; /* 16-byte accesses */
};

__device__ __forceinline__ float *bdh_scores_of(const bdh_plan &plan, int64_t unit) {
  const int64_t before = plan.p.scores ? unit * plan.p.length : (unit - plan.strip.first_unit) * plan.strip.rows;
  return plan.scores + before * plan.p.length;
}

/* ---- operands: V neighbouring elements of a row in memory, 0 beyond the ends ---- */

template <typename T>
struct bdh_matrix {
  const T *data;
  int64_t row, column; /* strides */
  int64_t rows, columns;
  bool wide;

  __device__ __forceinline__ void piece(T (&to)[bdh_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = bdh_lanes<T>;
    if (wide && r < rows && c + V <= columns) {
      camox_load<V>(to, data + r * row + c);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        to[i] = r < rows && c + i < columns ? __ldg(data + r * row + (c + i) * column) : camox_from_float<T>(0.0f);
    }
  }
};

template <typename T>
__device__ __forceinline__ bdh_matrix<T> bdh_view(const camox_view4 &view, int64_t b, int64_t h, int64_t rows, int64_t columns,
                                                  bool wide) {
  return {static_cast<const T *>(view.data) + b * view.stride[0] + h * view.stride[1],
          view.stride[2],
          view.stride[3],
          rows,
          columns,
          wide};
}

/* N angles from column c of a row of a table that holds one a pair, or one an element (each); c is even. */
template <int N>
__device__ __forceinline__ void bdh_angles(float (&to)[N], const float *row, bool each, bool wide, int64_t c, int64_t columns) {
  if (wide && c + N <= columns) {
    if (each) {
      camox_load_floats<N>(to, row + c);
    } else {
      float of_pairs[N / 2];
      camox_load_floats<N / 2>(of_pairs, row + c / 2);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = of_pairs[i / 2];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = c + i < columns ? __ldg(row + (each ? c + i : (c + i) / 2)) : 0.0f;
  }
}

__device__ __forceinline__ float bdh_relu(float x) { return x < 0.0f ? 0.0f : x; }

/* r of one head. */
template <typename T>
struct bdh_turned {
  bdh_matrix<T> q;
  const float *cos, *sin;
  int64_t table_columns;
  bool relu, wide_tables;

  __device__ __forceinline__ void piece(T (&to)[bdh_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = bdh_lanes<T>;
    q.piece(to, r, c);
    if (r >= q.rows) return;
    const bool each = table_columns == q.columns;
    float x[V], y[V], cosines[V], sines[V];
    bdh_angles<V>(cosines, cos + r * table_columns, each, wide_tables, c, q.columns);
    bdh_angles<V>(sines, sin + r * table_columns, each, wide_tables, c, q.columns);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      x[i] = camox_to_float(to[i]);
      if (relu) x[i] = bdh_relu(x[i]);
    }
#pragma unroll
    for (int i = 0; i < V; i += 2) {
      y[i] = fmaf(x[i], cosines[i], -x[i + 1] * sines[i]);
      y[i + 1] = fmaf(x[i + 1], cosines[i + 1], x[i] * sines[i + 1]);
    }
    camox_round(to, y);
  }
};

template <typename T>
__device__ __forceinline__ bdh_turned<T> bdh_turned_of(const bdh_plan &plan, int64_t b, int64_t h) {
  const camox_bdh_params &p = plan.p;
  return {bdh_view<T>(p.q, b, h, p.length, p.dim, plan.wide_q),
          static_cast<const float *>(p.cos),
          static_cast<const float *>(p.sin),
          p.table_columns,
          p.relu != 0,
          plan.wide_tables};
}

/* Scores of one head as the element type: the strip's rows; or, where they are s of the backward, TRANSPOSED weights:
   row j has w[i,j] for all i, from s[j,i]. */
template <typename T, bool TRANSPOSED>
struct bdh_weights {
  const float *data;
  int64_t first_row, rows, length;
  const float *logsumexp; /* of the head's rows, NULL without softmax */
  bool causal, wide;

  __device__ __forceinline__ void piece(T (&to)[bdh_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = bdh_lanes<T>;
    const float *const row = data + (r - first_row) * length;
    float x[V];
    if (wide && r < first_row + rows && c + V <= length) {
      camox_load_floats<V>(x, row + c);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] = r < first_row + rows && c + i < length ? __ldg(row + c + i) : 0.0f;
    }
    if constexpr (TRANSPOSED) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (c + i >= length || (causal && r >= c + i)) {
          x[i] = 0.0f;
        } else if (logsumexp) {
          x[i] = expf(x[i] - __ldg(logsumexp + c + i));
        }
      }
    }
    camox_round(to, x);
  }
};

/* ---- tiles in shared memory ---- */

/* Rows [first, first + BDH_TILE) of the operand are rows in memory, k its columns. */
template <typename T, typename Operand>
__device__ __forceinline__ void bdh_load_along(uint32_t *tile, const Operand &operand, int64_t first, int64_t k) {
#pragma unroll
  for (int u = 0; u < BDH_TILE * 8 / BDH_THREADS; ++u) {
    const int item = static_cast<int>(threadIdx.x) + u * BDH_THREADS, row = item / 8, piece = item % 8;
    T values[bdh_lanes<T>];
    operand.piece(values, first + row, k + piece * bdh_lanes<T>);
    camox_store_shared(reinterpret_cast<T *>(tile + piece / 4 * bdh_tile<T>::half + row * bdh_tile<T>::row + piece % 4 * 4),
                       values);
  }
}

/* k are rows in memory, and the operand's rows its columns: a thread makes words of what neighbouring k have. */
template <typename T, typename Operand>
__device__ __forceinline__ void bdh_load_across(uint32_t *tile, const Operand &operand, int64_t first, int64_t k) {
  constexpr int V = bdh_lanes<T>, of_word = 4 / static_cast<int>(sizeof(T));
  const int word = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  uint32_t *const to = tile + word / 16 * bdh_tile<T>::half + word % 16;
#pragma unroll
  for (int u = 0; u < BDH_TILE / V / (BDH_THREADS / CAMOX_WARP); ++u) {
    const int row = (warp + u * (BDH_THREADS / CAMOX_WARP)) * V;
    T values[of_word][V];
#pragma unroll
    for (int i = 0; i < of_word; ++i) operand.piece(values[i], k + word * of_word + i, first + row);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      T pair[of_word];
#pragma unroll
      for (int i = 0; i < of_word; ++i) pair[i] = values[i][j];
      camox_store_shared(reinterpret_cast<T *>(to + (row + j) * bdh_tile<T>::row), pair);
    }
  }
}

/* ---- the product of two tiles ----
   A warp has 32 x 32 of it; element [m][n][e] of a lane is, in both ways to compute it, at row bdh_row and column bdh_column,
   so that columns of even and odd e are neighbours. */
typedef float bdh_sums[2][4][4];

__device__ __forceinline__ int bdh_row(int m, int e) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / (2 * CAMOX_WARP) * 32 + m * 16 + e / 2 * 8 + thread % CAMOX_WARP / 4;
}
__device__ __forceinline__ int bdh_column(int n, int e) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / CAMOX_WARP % 2 * 32 + n * 8 + thread % 4 * 2 + e % 2;
}

__device__ __forceinline__ void bdh_clear(bdh_sums &sums) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
}

/* A lane takes 8 neighbouring k of each row in one access: the order of k within a step is the same for both operands, and no
   matter. */
template <typename T>
__device__ __forceinline__ void bdh_product_mma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  const int k = static_cast<int>(threadIdx.x) % 4 * 4,
            column = bdh_column(0, 0) - k / 2 + static_cast<int>(threadIdx.x) % CAMOX_WARP / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t rows[4][4], columns[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      camox_load_shared(rows[i], a + half * bdh_tile<T>::half + bdh_row(i / 2, i % 2 * 2) * bdh_tile<T>::row + k);
      camox_load_shared(columns[i], b + half * bdh_tile<T>::half + (column + i * 8) * bdh_tile<T>::row + k);
    }
#pragma unroll
    for (int step = 0; step < 4; step += 2) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t fragment[4] = {rows[2 * m][step], rows[2 * m + 1][step], rows[2 * m][step + 1],
                                      rows[2 * m + 1][step + 1]};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t other[2] = {columns[n][step], columns[n][step + 1]};
          camox_mma_m16n8k16<T>(sums[m][n], fragment, other);
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void bdh_product_fma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  constexpr int V = bdh_lanes<T>;
#pragma unroll 1
  for (int piece = 0; piece < 8; ++piece) {
    const int place = piece / 4 * bdh_tile<T>::half + piece % 4 * 4;
    T rows[4][V];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      camox_load_shared(rows[i], reinterpret_cast<const T *>(a + place + bdh_row(i / 2, i % 2 * 2) * bdh_tile<T>::row));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      T column[V];
      camox_load_shared(column, reinterpret_cast<const T *>(b + place + bdh_column(j / 2, j % 2) * bdh_tile<T>::row));
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
          sum = fmaf(camox_to_float(rows[i][v]), camox_to_float(column[v]), sum);
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void bdh_product(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  if constexpr (sizeof(T) == 4 || (CAMOX_CUDA_ARCH < 800 && camox_is_bfloat16<T>::value)) {
    bdh_product_fma<T>(sums, a, b);
  } else {
    bdh_product_mma<T>(sums, a, b);
  }
}

/* sums += a b^T over k of [begin, end), rows of a from `a_first`, of b from `b_first` on. ACROSS: k are the rows in memory.
   same: a and b are the same tile. */
template <typename T, bool A_ACROSS, bool B_ACROSS, typename A, typename B>
__device__ __forceinline__ void bdh_multiply(bdh_sums &sums, uint32_t *tiles, const A &a, int64_t a_first, const B &b,
                                             int64_t b_first, int64_t begin, int64_t end, bool same = false) {
  uint32_t *const b_tile = same ? tiles : tiles + bdh_tile<T>::words;
  for (int64_t k = begin; k < end; k += bdh_depth<T>) {
    __syncthreads();
    if constexpr (A_ACROSS) {
      bdh_load_across<T>(tiles, a, a_first, k);
    } else {
      bdh_load_along<T>(tiles, a, a_first, k);
    }
    if (!same) {
      if constexpr (B_ACROSS) {
        bdh_load_across<T>(b_tile, b, b_first, k);
      } else {
        bdh_load_along<T>(b_tile, b, b_first, k);
      }
    }
    __syncthreads();
    bdh_product<T>(sums, tiles, b_tile);
  }
}

#define BDH_TILES(T, tiles) __shared__ __align__(16) uint32_t tiles[2 * bdh_tile<T>::words]

/* Which tile `item` is: of `across` tiles in a row of them, and the strip's rows. */
struct bdh_place {
  int64_t unit, b, h, row, column; /* the tile's first */
};

__device__ __forceinline__ bdh_place bdh_place_of(const bdh_plan &plan, int64_t item, int64_t across) {
  bdh_place place;
  place.unit = camox_divide(item, across, &place.column);
  place.unit = camox_divide(place.unit, camox_ceil_div(plan.strip.rows, BDH_TILE), &place.row);
  place.unit += plan.strip.first_unit;
  place.b = camox_divide(place.unit, plan.p.heads, &place.h);
  place.row = plan.strip.first_row + place.row * BDH_TILE;
  place.column *= BDH_TILE;
  return place;
}

#define BDH_FOR_TILES(item, items) for (int64_t item = blockIdx.x; item < (items); item += gridDim.x)

/* ---- forward ---- */

/* The strip's scores. MASKED: w of the forward but for softmax; else s as it is, on both sides of the diagonal. Where the strip
   is all rows, only tiles up to the diagonal are computed. */
template <typename T, bool MASKED>
__global__ void __launch_bounds__(BDH_THREADS) bdh_scores_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  BDH_TILES(T, tiles);
  const camox_bdh_params &p = plan.p;
  const int64_t length = p.length;
  const bool mirrored = plan.strip.rows == length && !(MASKED && p.causal);
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, camox_ceil_div(length, BDH_TILE));
    const bool above = at.column > at.row;
    if (above && (mirrored || (MASKED && p.causal && !p.scores))) continue;
    float *const scores = bdh_scores_of(plan, at.unit);
    bdh_sums sums;
    bdh_clear(sums);
    if (!(above && MASKED && p.causal)) {
      const bdh_turned<T> r = bdh_turned_of<T>(plan, at.b, at.h);
      bdh_multiply<T, false, false>(sums, tiles, r, at.row, r, at.column, 0, p.dim, at.row == at.column);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int m = i / 16, n = i / 4 % 4, e = i % 4;
      const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
      if (row >= length || column >= length || row >= plan.strip.first_row + plan.strip.rows) continue;
      const float score = MASKED && p.causal && column >= row ? 0.0f : sums[m][n][e] * plan.scale;
      scores[(row - plan.strip.first_row) * length + column] = score;
      if (mirrored && at.column < at.row) scores[column * length + row] = score;
    }
  }
}

/* The strip's scores become their softmax, a warp a row. */
__global__ void __launch_bounds__(BDH_THREADS) bdh_softmax_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  const camox_bdh_params &p = plan.p;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * (BDH_THREADS / CAMOX_WARP) + warp; item < items;
       item += static_cast<int64_t>(gridDim.x) * (BDH_THREADS / CAMOX_WARP)) {
    int64_t row;
    const int64_t unit = camox_divide(item, plan.strip.rows, &row);
    float *const scores = plan.scores + item * p.length;
    row += plan.strip.first_row;
    const int64_t keys = p.causal ? row : p.length;
    float most = -INFINITY;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) most = fmaxf(most, scores[j]);
    most = camox_warp_max(most);
    float sum = 0.0f;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) sum += expf(scores[j] - most);
    sum = camox_warp_sum(sum);
    const float factor = 1.0f / sum;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) scores[j] = expf(scores[j] - most) * factor;
    if (p.logsumexp && lane == 0)
      static_cast<float *>(p.logsumexp)[(plan.strip.first_unit + unit) * p.length + row] =
          keys > 0 ? most + logf(sum) : -INFINITY;
  }
}

template <typename T>
__global__ void __launch_bounds__(BDH_THREADS) bdh_values_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  BDH_TILES(T, tiles);
  const camox_bdh_params &p = plan.p;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, camox_ceil_div(p.value_dim, BDH_TILE));
    const bdh_weights<T, false> w = {bdh_scores_of(plan, at.unit),
                                     plan.strip.first_row,
                                     plan.strip.rows,
                                     p.length,
                                     nullptr,
                                     p.causal != 0,
                                     plan.wide_scores};
    const bdh_matrix<T> v = bdh_view<T>(p.v, at.b, at.h, p.length, p.value_dim, plan.wide_v);
    bdh_sums sums;
    bdh_clear(sums);
    const int64_t end = p.causal ? min(p.length, at.row + BDH_TILE) : p.length;
    bdh_multiply<T, false, true>(sums, tiles, w, at.row, v, at.column, 0, end);
    T *const out = static_cast<T *>(p.out.data) + at.b * p.out.stride[0] + at.h * p.out.stride[1];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int m = i / 16, n = i / 4 % 4, e = i % 4;
      const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
      if (row >= plan.strip.first_row + plan.strip.rows || column >= p.value_dim) continue;
#ifdef CAMOX_BREAK_BDH
      sums[m][n][e] += 1e-3f;
#endif
      out[row * p.out.stride[2] + column * p.out.stride[3]] = camox_from_float<T>(sums[m][n][e]);
    }
  }
}

/* ---- backward ---- */

/* delta[i] = sum_d g[i,d] out[i,d] of every head, a warp a row. */
template <typename T>
__global__ void __launch_bounds__(BDH_THREADS) bdh_delta_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  const camox_bdh_params &p = plan.p;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * (BDH_THREADS / CAMOX_WARP) + warp; item < items;
       item += static_cast<int64_t>(gridDim.x) * (BDH_THREADS / CAMOX_WARP)) {
    int64_t row, h;
    const int64_t b = camox_divide(camox_divide(item, p.length, &row), p.heads, &h);
    const bdh_matrix<T> grad = bdh_view<T>(p.grad, b, h, p.length, p.value_dim, false);
    const bdh_matrix<T> out = bdh_view<T>(p.out, b, h, p.length, p.value_dim, false);
    float sum = 0.0f;
    for (int64_t d = lane; d < p.value_dim; d += CAMOX_WARP)
      sum = fmaf(camox_to_float(__ldg(grad.data + row * grad.row + d * grad.column)),
                 camox_to_float(__ldg(out.data + row * out.row + d * out.column)), sum);
    sum = camox_warp_sum(sum);
    if (lane == 0) plan.delta[item] = sum;
  }
}

/* e[j,i] = d s[j,i] + d s[i,j] of the strip's rows j. */
template <typename T>
__global__ void __launch_bounds__(BDH_THREADS) bdh_pairs_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  BDH_TILES(T, tiles);
  const camox_bdh_params &p = plan.p;
  const int64_t length = p.length;
  const bool mirrored = plan.strip.rows == length;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, camox_ceil_div(length, BDH_TILE));
    if (mirrored && at.column > at.row) continue;
    const bdh_matrix<T> g = bdh_view<T>(p.grad, at.b, at.h, length, p.value_dim, plan.wide_grad);
    const bdh_matrix<T> v = bdh_view<T>(p.v, at.b, at.h, length, p.value_dim, plan.wide_v);
    const float *const delta = plan.delta + at.unit * length;
    const float *const logsumexp = static_cast<const float *>(p.logsumexp) + at.unit * length;
    const float *const scores = bdh_scores_of(plan, at.unit);
    bdh_sums sums, pairs;
    bdh_clear(pairs);
    /* d w[j,i], then d w[i,j] */
#pragma unroll 1
    for (int other = 0; other < 2; ++other) {
      if (p.causal && (other ? at.column < at.row : at.column > at.row)) continue;
      bdh_clear(sums);
      if (other) {
        bdh_multiply<T, false, false>(sums, tiles, v, at.row, g, at.column, 0, p.value_dim);
      } else {
        bdh_multiply<T, false, false>(sums, tiles, g, at.row, v, at.column, 0, p.value_dim);
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int m = i / 16, n = i / 4 % 4, e = i % 4;
        const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
        const int64_t query = other ? column : row, key = other ? row : column;
        if (row >= length || column >= length || row >= plan.strip.first_row + plan.strip.rows || (p.causal && key >= query))
          continue;
        float grad = sums[m][n][e];
        if (p.softmax) {
          const float w = plan.weights
                              ? __ldg(scores + query * length + key)
                              : expf(__ldg(scores + (row - plan.strip.first_row) * length + column) - __ldg(logsumexp + query));
          grad = w * (grad - __ldg(delta + query));
        }
        pairs[m][n][e] += grad;
      }
    }
    T *const to = static_cast<T *>(plan.pairs) + (at.unit - plan.strip.first_unit) * plan.strip.rows * length;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int m = i / 16, n = i / 4 % 4, e = i % 4;
      const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
      if (row >= length || column >= length || row >= plan.strip.first_row + plan.strip.rows) continue;
      const T pair = camox_from_float<T>(pairs[m][n][e]);
      to[(row - plan.strip.first_row) * length + column] = pair;
      if (mirrored && at.column < at.row) to[column * length + row] = pair;
    }
  }
}

/* d r = scale e r of the strip's rows, turned back and cut where relu cut, unless `unturned`. */
template <typename T>
__global__ void __launch_bounds__(BDH_THREADS) bdh_grad_q_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  BDH_TILES(T, tiles);
  const camox_bdh_params &p = plan.p;
  const bool each = p.table_columns == p.dim;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, camox_ceil_div(p.dim, BDH_TILE));
    const bdh_turned<T> r = bdh_turned_of<T>(plan, at.b, at.h);
    const bdh_matrix<T> pairs = {
        static_cast<const T *>(plan.pairs) + (at.unit - plan.strip.first_unit) * plan.strip.rows * p.length,
        p.length,
        1,
        plan.strip.rows,
        p.length,
        plan.wide_pairs};
    bdh_sums sums;
    bdh_clear(sums);
    bdh_multiply<T, false, true>(sums, tiles, pairs, at.row - plan.strip.first_row, r, at.column, 0, p.length);
    T *const to = static_cast<T *>(p.grad_q.data) + at.b * p.grad_q.stride[0] + at.h * p.grad_q.stride[1];
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int m = i / 16, n = i / 4 % 4, e = i % 4;
      const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
      if (row >= plan.strip.first_row + plan.strip.rows || column >= p.dim) continue;
      float grad[2] = {sums[m][n][e] * plan.scale, sums[m][n][e + 1] * plan.scale};
#ifdef CAMOX_BREAK_BDH
      grad[0] += 1e-3f;
#endif
      if (!p.unturned) {
        const int64_t angle = row * p.table_columns + (each ? column : column / 2);
        const float c0 = __ldg(r.cos + angle), c1 = __ldg(r.cos + angle + each);
        const float s0 = __ldg(r.sin + angle), s1 = __ldg(r.sin + angle + each);
        const float turned = grad[0];
        grad[0] = fmaf(turned, c0, grad[1] * s1);
        grad[1] = fmaf(grad[1], c1, -turned * s0);
        const T *const q = r.q.data + row * r.q.row + column * r.q.column;
        if (p.relu && !(camox_to_float(__ldg(q)) > 0.0f)) grad[0] = 0.0f;
        if (p.relu && !(camox_to_float(__ldg(q + r.q.column)) > 0.0f)) grad[1] = 0.0f;
      }
      to[row * p.grad_q.stride[2] + column * p.grad_q.stride[3]] = camox_from_float<T>(grad[0]);
      to[row * p.grad_q.stride[2] + (column + 1) * p.grad_q.stride[3]] = camox_from_float<T>(grad[1]);
    }
  }
}

/* w^T g of the strip's rows, of each head. WEIGHTS: plan.weights. */
template <typename T, bool WEIGHTS>
__global__ void __launch_bounds__(BDH_THREADS) bdh_grad_v_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  BDH_TILES(T, tiles);
  const camox_bdh_params &p = plan.p;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, camox_ceil_div(p.value_dim, BDH_TILE));
    const bdh_matrix<T> g = bdh_view<T>(p.grad, at.b, at.h, p.length, p.value_dim, plan.wide_grad);
    const float *const logsumexp =
        p.softmax && !WEIGHTS ? static_cast<const float *>(p.logsumexp) + at.unit * p.length : nullptr;
    const bdh_weights<T, !WEIGHTS> w = {bdh_scores_of(plan, at.unit),
                                        WEIGHTS ? 0 : plan.strip.first_row,
                                        WEIGHTS ? p.length : plan.strip.rows,
                                        p.length,
                                        logsumexp,
                                        p.causal != 0,
                                        plan.wide_scores};
    bdh_sums sums;
    bdh_clear(sums);
    bdh_multiply<T, WEIGHTS, true>(sums, tiles, w, at.row, g, at.column, p.causal ? at.row : 0, p.length);
    T *const to = static_cast<T *>(p.grad_v.data) + at.b * p.grad_v.stride[0] + at.h * p.grad_v.stride[1];
    float *const partial = static_cast<float *>(p.partial) + at.unit * p.length * p.value_dim;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int m = i / 16, n = i / 4 % 4, e = i % 4;
      const int64_t row = at.row + bdh_row(m, e), column = at.column + bdh_column(n, e);
      if (row >= plan.strip.first_row + plan.strip.rows || column >= p.value_dim) continue;
      if (p.partial) {
        partial[row * p.value_dim + column] = sums[m][n][e];
      } else {
        to[row * p.grad_v.stride[2] + column * p.grad_v.stride[3]] = camox_from_float<T>(sums[m][n][e]);
      }
    }
  }
}

/* The gradient of a v that the heads share: theirs added up in order. */
template <typename T>
__global__ void __launch_bounds__(BDH_THREADS) bdh_sum_kernel(const __grid_constant__ camox_bdh_params p, int64_t items) {
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * BDH_THREADS + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * BDH_THREADS) {
    int64_t row, column;
    const int64_t b = camox_divide(camox_divide(item, p.value_dim, &column), p.length, &row);
    const int64_t head = p.length * p.value_dim;
    const float *from = static_cast<const float *>(p.partial) + b * p.heads * head + row * p.value_dim + column;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t h = 0; h < p.heads; ++h, from += head) sum += __ldg(from);
    static_cast<T *>(p.grad_v.data)[b * p.grad_v.stride[0] + row * p.grad_v.stride[2] + column * p.grad_v.stride[3]] =
        camox_from_float<T>(sum);
  }
}

/* ---- one token ---- */

/* A block has BDH_STEP_COLUMNS columns of one head's state; its warps take turns with the rows. */
template <typename T>
__global__ void __launch_bounds__(BDH_STEP_THREADS)
    bdh_step_kernel(const __grid_constant__ camox_bdh_step_params p, float scale, int64_t items) {
  constexpr int WARPS = BDH_STEP_THREADS / CAMOX_WARP;
  __shared__ float r[BDH_STEP_CHUNK];
  __shared__ float shares[WARPS][BDH_STEP_COLUMNS];
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  const bool each = p.table_columns == p.dim;
  BDH_FOR_TILES(item, items) {
    int64_t tile, h;
    const int64_t unit = camox_divide(item, camox_ceil_div(p.value_dim, BDH_STEP_COLUMNS), &tile);
    const int64_t b = camox_divide(unit, p.heads, &h), column = tile * BDH_STEP_COLUMNS + lane;
    const T *const q = static_cast<const T *>(p.q.data) + b * p.q.stride[0] + h * p.q.stride[1];
    const bool exists = column < p.value_dim;
    float value = 0.0f;
    if (exists)
      value = camox_to_float(
          __ldg(static_cast<const T *>(p.v.data) + b * p.v.stride[0] + h * p.v.stride[1] + column * p.v.stride[3]));
    const float *const state = static_cast<const float *>(p.state.data);
    const int64_t place = b * p.state.stride[0] + h * p.state.stride[1] + column * p.state.stride[3];
    float *const next = static_cast<float *>(p.next) + unit * p.dim * p.value_dim + column;
    float sum = 0.0f;
    for (int64_t first = 0; first < p.dim; first += BDH_STEP_CHUNK) {
      const int rows = static_cast<int>(min(p.dim - first, static_cast<int64_t>(BDH_STEP_CHUNK)));
      __syncthreads();
      for (int i = 2 * static_cast<int>(threadIdx.x); i < rows; i += 2 * BDH_STEP_THREADS) {
        float x0 = camox_to_float(__ldg(q + (first + i) * p.q.stride[3]));
        float x1 = camox_to_float(__ldg(q + (first + i + 1) * p.q.stride[3]));
        if (p.relu) x0 = bdh_relu(x0), x1 = bdh_relu(x1);
        const int64_t angle = each ? first + i : (first + i) / 2;
        const float *const cosines = static_cast<const float *>(p.cos) + angle, *const sines =
                                                                                    static_cast<const float *>(p.sin) + angle;
        r[i] = fmaf(x0, __ldg(cosines), -x1 * __ldg(sines));
        r[i + 1] = fmaf(x1, __ldg(cosines + each), x0 * __ldg(sines + each));
      }
      __syncthreads();
      if (exists) {
#pragma unroll 4
        for (int i = warp; i < rows; i += WARPS) {
          const float before = state ? __ldg(state + place + (first + i) * p.state.stride[2]) : 0.0f;
          sum = fmaf(r[i], before, sum);
          next[(first + i) * p.value_dim] = fmaf(r[i], value, before);
        }
      }
    }
    shares[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && exists) {
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += shares[i][lane];
      sum *= scale;
#ifdef CAMOX_BREAK_BDH
      sum += 1e-3f;
#endif
      static_cast<T *>(p.out.data)[b * p.out.stride[0] + h * p.out.stride[1] + column * p.out.stride[3]] =
          camox_from_float<T>(sum);
    }
  }
}

/* ---- launchers ---- */

/* Whether rows of this view can be read 16 bytes at a time. */
static bool bdh_is_wide(const camox_view4 &view, int64_t element_bytes) {
  if (!camox_aligned(view.data, 16) || view.stride[3] != 1) return false;
  for (int d = 0; d < 3; ++d)
    if (view.stride[d] * element_bytes % 16 != 0) return false;
  return true;
}

static int64_t bdh_heads(const camox_bdh_params *p) { return p->length == 0 ? 0 : p->batch * p->heads; }

static int64_t bdh_element_bytes(const camox_bdh_params *p) { return p->dtype == CAMOX_F32 ? 4 : 2; }

/* The parts of scratch, in bytes; strips are all of one size, the last one may be shorter. */
struct bdh_scratch {
  int64_t units, rows; /* of a strip */
  int64_t delta, scores, pairs;
};

static int64_t bdh_rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

static bdh_scratch bdh_scratch_of(const camox_bdh_params *p, bool backward) {
  bdh_scratch s = {bdh_heads(p), p->length, 0, 0, 0};
  if (s.units == 0) return s;
  if (backward && p->softmax) s.delta = bdh_rounded(s.units * p->length * 4);
  if (p->scores && !backward) return s;
  const int64_t tiles = camox_ceil_div(p->length, BDH_TILE), most = camox_grid(BDH_TILES_AT_ONCE);
  if (tiles * tiles > most) {
    s.units = 1;
    const int64_t rows = (most > tiles ? most / tiles : 1) * BDH_TILE;
    if (rows < s.rows) s.rows = rows;
  } else if (s.units * tiles * tiles > most) {
    s.units = most / (tiles * tiles);
  }
  const int64_t elements = s.units * s.rows * p->length;
  if (!p->scores) s.scores = bdh_rounded(elements * 4);
  if (backward) s.pairs = bdh_rounded(elements * bdh_element_bytes(p));
  return s;
}

static bdh_plan bdh_plan_of(const camox_bdh_params *p, const bdh_scratch &s) {
  bdh_plan plan = {};
  plan.p = *p;
  plan.scale = static_cast<float>(p->scale);
  char *const scratch = static_cast<char *>(p->scratch);
  plan.delta = reinterpret_cast<float *>(scratch);
  plan.scores = static_cast<float *>(p->scores ? p->scores : scratch + s.delta);
  plan.pairs = scratch + s.delta + s.scores;
  plan.weights = p->scores != nullptr;
  const int64_t bytes = bdh_element_bytes(p);
  plan.wide_q = bdh_is_wide(p->q, bytes), plan.wide_v = bdh_is_wide(p->v, bytes);
  plan.wide_grad = p->grad.data && bdh_is_wide(p->grad, bytes);
  plan.wide_tables = camox_aligned(p->cos, 16) && camox_aligned(p->sin, 16) && p->table_columns % 4 == 0;
  plan.wide_scores = camox_aligned(plan.scores, 16) && p->length % 4 == 0;
  plan.wide_pairs = camox_aligned(plan.pairs, 16) && p->length * bytes % 16 == 0;
  return plan;
}

/* Calls launch(plan, tiles) for every strip; tiles of `columns` columns are tiles(columns). */
template <typename Launch>
static void bdh_for_strips(bdh_plan &plan, const bdh_scratch &s, const Launch &launch) {
  const int64_t units = bdh_heads(&plan.p);
  for (int64_t unit = 0; unit < units; unit += s.units)
    for (int64_t row = 0; row < plan.p.length; row += s.rows) {
      plan.strip = {unit, s.units < units - unit ? s.units : units - unit, row,
                    s.rows < plan.p.length - row ? s.rows : plan.p.length - row};
      launch();
    }
}

static int64_t bdh_tiles(const bdh_plan &plan, int64_t columns) {
  return plan.strip.units * camox_ceil_div(plan.strip.rows, BDH_TILE) * camox_ceil_div(columns, BDH_TILE);
}

#define BDH_LAUNCH(kernel, items, per_block, ...)                                                                     \
  do {                                                                                                                \
    const int64_t count = (items);                                                                                    \
    if (count > 0)                                                                                                    \
      CAMOX_LAUNCH(kernel, camox_grid(camox_ceil_div(count, per_block)), BDH_THREADS, 0, stream, __VA_ARGS__, count); \
  } while (0)

#define BDH_WARPS (BDH_THREADS / CAMOX_WARP)

template <typename T>
static int bdh_run(const camox_bdh_params *p, void *stream) {
  const bdh_scratch s = bdh_scratch_of(p, false);
  bdh_plan plan = bdh_plan_of(p, s);
  bdh_for_strips(plan, s, [&] {
    BDH_LAUNCH((bdh_scores_kernel<T, true>), bdh_tiles(plan, p->length), 1, plan);
    if (p->softmax) BDH_LAUNCH(bdh_softmax_kernel, plan.strip.units * plan.strip.rows, BDH_WARPS, plan);
    BDH_LAUNCH((bdh_values_kernel<T>), bdh_tiles(plan, p->value_dim), 1, plan);
  });
  return camox_launch_status();
}

template <typename T>
static int bdh_run_backward(const camox_bdh_params *p, void *stream) {
  const bdh_scratch s = bdh_scratch_of(p, true);
  bdh_plan plan = bdh_plan_of(p, s);
  if (p->softmax) BDH_LAUNCH((bdh_delta_kernel<T>), bdh_heads(p) * p->length, BDH_WARPS, plan);
  bdh_for_strips(plan, s, [&] {
    if (!plan.weights) BDH_LAUNCH((bdh_scores_kernel<T, false>), bdh_tiles(plan, p->length), 1, plan);
    if (plan.weights)
      BDH_LAUNCH((bdh_grad_v_kernel<T, true>), bdh_tiles(plan, p->value_dim), 1, plan);
    else
      BDH_LAUNCH((bdh_grad_v_kernel<T, false>), bdh_tiles(plan, p->value_dim), 1, plan);
    BDH_LAUNCH((bdh_pairs_kernel<T>), bdh_tiles(plan, p->length), 1, plan);
    BDH_LAUNCH((bdh_grad_q_kernel<T>), bdh_tiles(plan, p->dim), 1, plan);
  });
  if (p->partial) BDH_LAUNCH((bdh_sum_kernel<T>), p->batch * p->length * p->value_dim, BDH_THREADS, *p);
  return camox_launch_status();
}

template <typename T>
static int bdh_run_step(const camox_bdh_step_params *p, void *stream) {
  const int64_t items = p->batch * p->heads * camox_ceil_div(p->value_dim, BDH_STEP_COLUMNS);
  if (items == 0) return cudaSuccess;
  CAMOX_LAUNCH((bdh_step_kernel<T>), camox_grid(items), BDH_STEP_THREADS, 0, stream, *p, static_cast<float>(p->scale), items);
  return camox_launch_status();
}

extern "C" int64_t camox_bdh_cuda_scratch(const camox_bdh_params *p, int backward) {
  const bdh_scratch s = bdh_scratch_of(p, backward != 0);
  return s.delta + s.scores + s.pairs;
}

#define BDH_BY_TYPE(run)                                   \
  switch (p->dtype) {                                      \
    case CAMOX_F32: return run<float>(p, stream);          \
    case CAMOX_BF16: return run<__nv_bfloat16>(p, stream); \
    case CAMOX_F16: return run<__half>(p, stream);         \
    default: return cudaErrorInvalidValue;                 \
  }

extern "C" int camox_bdh_cuda(const camox_bdh_params *p, void *stream) { BDH_BY_TYPE(bdh_run) }

extern "C" int camox_bdh_backward_cuda(const camox_bdh_params *p, void *stream) {
  /* w of a softmax needs what the forward saved of it */
  if (p->softmax && !p->scores && !p->logsumexp && bdh_heads(p) > 0) return cudaErrorInvalidValue;
  BDH_BY_TYPE(bdh_run_backward)
}

extern "C" int camox_bdh_step_cuda(const camox_bdh_step_params *p, void *stream) { BDH_BY_TYPE(bdh_run_step) }
