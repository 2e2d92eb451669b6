/* Products of 64 x 64 tiles: bdh_multiply brings two operands to shared memory piece by piece and adds up their product in
   registers, bdh_stage and bdh_put bring it to memory.

     shared:  A [64 rows][128 bytes along k]  B the same      a block of 4 warps        each warp: 32 x 32 of the product,
                                                              +---------+---------+      each lane 32 sums in registers:
              A B^T, 128 bytes of k at a time                 | warp 0  | warp 1  |      [2 x 16 rows][4 x 8 columns]
              (16-byte loads, 16-byte pieces of rows)         +---------+---------+
                                                              | warp 2  | warp 3  |
                                                              +---------+---------+

   An operand is a struct with piece(to, r, c): the 16 bytes of elements from column c of its row r on as they lie in memory, 0
   beyond its ends. */
#ifndef CAMOX_BDH_TILE_CUH
#define CAMOX_BDH_TILE_CUH

#include "../common/cuda_util.cuh"

#define BDH_THREADS 128
#define BDH_TILE 64  /* rows and columns of a block's tile: 2 x 2 warps of 32 x 32 */
#define BDH_BLOCKS 3 /* of which a multiprocessor must hold so many: at most 168 registers a thread */

/* float32 whose products may be made of TF32, as far as the architecture has tensor cores for it. A product's P is this or the
   element type itself. */
struct bdh_tf32 {
  float value;
};
template <typename P>
constexpr bool bdh_is_tf32 = false;
template <>
constexpr bool bdh_is_tf32<bdh_tf32> = true;
template <typename P>
using bdh_element = typename camox_select<bdh_is_tf32<P>, float, P>::type;

template <typename P>
constexpr bool bdh_on_tensor_cores =
    bdh_is_tf32<P> ? CAMOX_CUDA_ARCH >= 800 : sizeof(P) == 2 && (CAMOX_CUDA_ARCH >= 800 || !camox_is_bfloat16<P>::value);

/* 16 bytes, the widest access; elements of an operand along k in one iteration, 32 words. */
template <typename T>
constexpr int bdh_lanes = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int bdh_depth = 128 / static_cast<int>(sizeof(T));

/* An operand in shared memory: two halves along k, each [BDH_TILE] rows of 16 words. The padding keeps the four rows, or two,
   that eight lanes read at once in different banks. */
template <typename P>
struct bdh_tile {
  static constexpr int row = sizeof(P) == 4 && !bdh_on_tensor_cores<P> ? 20 : 16; /* words from row to row */
  static constexpr int half = BDH_TILE * row + 16;
  static constexpr int words = 2 * half;
};

/* ---- operands ---- */

/* How many of MOST: n, but not below 0. */
template <int MOST>
__device__ __forceinline__ int bdh_at_most(int64_t n) {
  return n >= MOST ? MOST : n > 0 ? static_cast<int>(n) : 0;
}

template <int V>
__device__ __forceinline__ void bdh_load_floats(float (&to)[V], const float *from, int count, bool wide) {
  if (wide && count == V) {
    camox_load_floats<V>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = i < count ? __ldg(from + i) : 0.0f;
  }
}

template <typename E, int V>
__device__ __forceinline__ void bdh_store(E *to, int64_t step, const float (&values)[V], int count, bool wide) {
  if (wide && count >= V) {
    camox_store_float(to, values);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i < count) to[i * step] = camox_from_float<E>(values[i]);
  }
}

template <typename T>
struct bdh_matrix {
  const T *data;
  int64_t row, column; /* strides */
  int64_t rows, columns;
  bool wide;

  __device__ __forceinline__ void piece(T (&to)[bdh_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = bdh_lanes<T>;
    const T *from = data + r * row + c * column;
    const int count = r < rows ? bdh_at_most<V>(columns - c) : 0;
    if (wide && count == V) {
      camox_load<V>(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i, from += column) to[i] = i < count ? __ldg(from) : camox_from_float<T>(0.0f);
    }
  }
};

/* ---- tiles in shared memory ---- */

/* 16 bytes of the operand as the product takes them. */
template <typename P, typename Operand>
__device__ __forceinline__ void bdh_piece(bdh_element<P> (&to)[bdh_lanes<P>], const Operand &operand, int64_t r, int64_t c) {
  operand.piece(to, r, c);
  if constexpr (bdh_is_tf32<P> && bdh_on_tensor_cores<P>) {
#pragma unroll
    for (int i = 0; i < bdh_lanes<P>; ++i) to[i] = camox_to_tf32(to[i]);
  }
}

/* Rows [first, first + BDH_TILE) of the operand are rows in memory, k its columns. */
template <typename P, typename Operand>
__device__ __forceinline__ void bdh_load_along(uint32_t *tile, const Operand &operand, int64_t first, int64_t k) {
#pragma unroll 2
  for (int u = 0; u < BDH_TILE * 8 / BDH_THREADS; ++u) {
    const int item = static_cast<int>(threadIdx.x) + u * BDH_THREADS, row = item / 8, piece = item % 8;
    bdh_element<P> values[bdh_lanes<P>];
    bdh_piece<P>(values, operand, first + row, k + piece * bdh_lanes<P>);
    uint32_t *const to = tile + piece / 4 * bdh_tile<P>::half + row * bdh_tile<P>::row + piece % 4 * 4;
    camox_store_shared(reinterpret_cast<bdh_element<P> *>(to), values);
  }
}

/* k are rows in memory, and the operand's rows its columns: a thread makes words of what neighbouring k have. */
template <typename P, typename Operand>
__device__ __forceinline__ void bdh_load_across(uint32_t *tile, const Operand &operand, int64_t first, int64_t k) {
  using T = bdh_element<P>;
  constexpr int V = bdh_lanes<T>, of_word = 4 / static_cast<int>(sizeof(T));
  const int word = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  uint32_t *const to = tile + word / 16 * bdh_tile<P>::half + word % 16;
#pragma unroll 1
  for (int u = 0; u < BDH_TILE / V / (BDH_THREADS / CAMOX_WARP); ++u) {
    const int row = (warp + u * (BDH_THREADS / CAMOX_WARP)) * V;
    T values[of_word][V];
#pragma unroll
    for (int i = 0; i < of_word; ++i) {
      int step = word * of_word + i;
      camox_compute_late(step);
      bdh_piece<P>(values[i], operand, k + step, first + row);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      T pair[of_word];
#pragma unroll
      for (int i = 0; i < of_word; ++i) pair[i] = values[i][j];
      camox_store_shared(reinterpret_cast<T *>(to + (row + j) * bdh_tile<P>::row), pair);
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
template <typename P>
__device__ __forceinline__ void bdh_product_mma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  const int k = static_cast<int>(threadIdx.x) % 4 * 4,
            column = bdh_column(0, 0) - k / 2 + static_cast<int>(threadIdx.x) % CAMOX_WARP / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t rows[4][4], columns[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      camox_load_shared(rows[i], a + half * bdh_tile<P>::half + bdh_row(i / 2, i % 2 * 2) * bdh_tile<P>::row + k);
      camox_load_shared(columns[i], b + half * bdh_tile<P>::half + (column + i * 8) * bdh_tile<P>::row + k);
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
          if constexpr (bdh_is_tf32<P>) {
            camox_mma_tf32_m16n8k8(sums[m][n], fragment, other);
          } else {
            camox_mma_m16n8k16<P>(sums[m][n], fragment, other);
          }
        }
      }
    }
  }
}

/* The terms of one iteration over k are summed up by themselves first: long sums of float32 keep more of their digits so. */
template <typename P>
__device__ __forceinline__ void bdh_product_fma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  using T = bdh_element<P>;
  constexpr int V = 4, words = V * static_cast<int>(sizeof(T)) / 4;
  bdh_sums part;
  bdh_clear(part);
#pragma unroll 1
  for (int word = 0; word < 32; word += words) {
    const int place = word / 16 * bdh_tile<P>::half + word % 16;
    T rows[4][V];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      camox_load_shared(rows[i], reinterpret_cast<const T *>(a + place + bdh_row(i / 2, i % 2 * 2) * bdh_tile<P>::row));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      T column[V];
      camox_load_shared(column, reinterpret_cast<const T *>(b + place + bdh_column(j / 2, j % 2) * bdh_tile<P>::row));
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &sum = part[i / 2][j / 2][i % 2 * 2 + j % 2];
          sum = fmaf(camox_to_float(rows[i][v]), camox_to_float(column[v]), sum);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
}

template <typename P>
__device__ __forceinline__ void bdh_product(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  if constexpr (bdh_on_tensor_cores<P>) {
    bdh_product_mma<P>(sums, a, b);
  } else {
    bdh_product_fma<P>(sums, a, b);
  }
}

/* What a product sums over: k of [begin, end). */
struct bdh_range {
  int64_t begin, end;
};

/* sums += a b^T over the range, rows of a from `a_first`, of b from `b_first` on. ACROSS: k are the rows in memory.
   same: a and b are the same tile. */
template <typename P, bool A_ACROSS, bool B_ACROSS, typename A, typename B>
__device__ __forceinline__ void bdh_multiply(bdh_sums &sums, uint32_t *tiles, const A &a, int64_t a_first, const B &b,
                                             int64_t b_first, bdh_range range, bool same = false) {
  uint32_t *const b_tile = same ? tiles : tiles + bdh_tile<P>::words;
  for (int64_t k = range.begin; k < range.end; k += bdh_depth<P>) {
    __syncthreads();
    if constexpr (A_ACROSS) {
      bdh_load_across<P>(tiles, a, a_first, k);
    } else {
      bdh_load_along<P>(tiles, a, a_first, k);
    }
    if (!same) {
      if constexpr (B_ACROSS) {
        bdh_load_across<P>(b_tile, b, b_first, k);
      } else {
        bdh_load_along<P>(b_tile, b, b_first, k);
      }
    }
    __syncthreads();
    bdh_product<P>(sums, tiles, b_tile);
  }
}

/* Shared memory of a block: the tiles of both operands, and in their place, once they are multiplied, what they make. */
#define BDH_STAGE_PITCH (BDH_TILE + 4)
#define BDH_STAGE (BDH_TILE * BDH_STAGE_PITCH)

template <typename P>
constexpr int bdh_words = 2 * bdh_tile<P>::words > BDH_STAGE ? 2 * bdh_tile<P>::words : BDH_STAGE;

#define BDH_SHARED(P, tiles, stage)                      \
  __shared__ __align__(16) uint32_t tiles[bdh_words<P>]; \
  float *const stage = reinterpret_cast<float *>(tiles)

__device__ __forceinline__ void bdh_stage(float *stage, const bdh_sums &sums) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const float pair[2] = {sums[i / 16][i / 4 % 4][i % 4], sums[i / 16][i / 4 % 4][i % 4 + 1]};
    camox_store_shared(stage + bdh_row(i / 16, i % 4) * BDH_STAGE_PITCH + bdh_column(i / 4 % 4, 0), pair);
  }
  __syncthreads();
}

/* The first `rows` and `columns` of the stage to `to`. wide: to and its rows are aligned to 16 bytes, and elements neighbours.
 */
template <typename E>
__device__ __forceinline__ void bdh_put(const float *stage, E *to, int64_t row_stride, int64_t column_stride, int rows,
                                        int columns, bool wide) {
  constexpr int V = bdh_lanes<E>, across = BDH_TILE / V;
#pragma unroll 2
  for (int item = static_cast<int>(threadIdx.x); item < BDH_TILE * across; item += BDH_THREADS) {
    const int row = item / across, column = item % across * V;
    if (row >= rows || column >= columns) continue;
    float values[V];
    camox_get_floats<V>(values, stage + row * BDH_STAGE_PITCH + column);
    bdh_store(to + row * row_stride + column * column_stride, column_stride, values, columns - column, wide);
  }
}

/* The same to the other side of the diagonal of a dense matrix. */
template <typename E>
__device__ __forceinline__ void bdh_put_mirrored(const float *stage, E *to, int64_t pitch, int rows, int columns, bool wide) {
  constexpr int V = bdh_lanes<E>;
#pragma unroll 2
  for (int item = static_cast<int>(threadIdx.x); item < BDH_TILE * BDH_TILE / V; item += BDH_THREADS) {
    const int row = item / BDH_TILE * V, column = item % BDH_TILE;
    if (row >= rows || column >= columns) continue;
    float values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = stage[(row + i) * BDH_STAGE_PITCH + column];
    bdh_store(to + column * pitch + row, 1, values, rows - row, wide);
  }
}

#endif
