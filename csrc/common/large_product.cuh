/* Products of large tiles for CUDA, of matrices of half types: 128 rows by 128 or 192 columns a block of 8 warps, on tensor
   cores from sm_80 on. Each operand is read from L2 a third or half as often as by the tiles of 64 x 64 of tile_product.cuh.
   The second operand lies ready in memory; of the first a thread may still make something of the pieces that it copied itself.
   What is made of the sums goes to memory rounded (camox_large_put), in float32 (camox_large_put_floats), or by way of shared
   memory in float32 (camox_large_stage), where a thread takes adjacent columns of a row.

     global memory  --cp.async-->  a ring of stages in shared memory  --ldmatrix-->  fragments in registers
     step i + stages - 1           the steps before it: landing                      step i: product, 32 terms of the sum

     a block's tile: 4 warps side by side      each warp: 64 x 32 or 64 x 48 of the product,
       +-------+-------+-------+-------+     each lane 64 or 96 sums in registers:
       | warp 0|   1   |   2   |   3   |     [4 x 16 rows][4 or 6 x 8 columns]
       +-------+-------+-------+-------+
       | warp 4|   5   |   6   |   7   |
       +-------+-------+-------+-------+

   A stage has the first operand's tile, then the second's, in pieces of 16 bytes, then what else the first needs. Where k is
   along an operand's rows a row of the tile is 64 bytes, where its rows are k ("across") 256 or 384; pieces are permuted within
   128 bytes so that the same piece of eight rows is in different banks, and ldmatrix transposes what lies across. */
#ifndef CAMOX_LARGE_PRODUCT_CUH
#define CAMOX_LARGE_PRODUCT_CUH

#include "tile_product.cuh"

#define CAMOX_LARGE_THREADS 256
#define CAMOX_LARGE_ROWS 128 /* of a block's tile */
#define CAMOX_LARGE_DEPTH 32 /* terms of the sum in a step */

/* Dynamic shared memory: words of a stage, and bytes, more than the 48 KB that need no cudaFuncSetAttribute. `Rows` is the first
   operand's side. */
template <typename Rows, int COLUMNS>
constexpr int camox_large_words = (CAMOX_LARGE_ROWS + COLUMNS) * CAMOX_LARGE_DEPTH / 2 + Rows::more_words;
template <typename Rows, int COLUMNS>
constexpr int camox_large_shared = Rows::stages * camox_large_words<Rows, COLUMNS> * 4;

/* Adjacent elements, rows aligned to 16 bytes. */
template <typename T>
struct camox_large_matrix {
  const T *data;
  int64_t pitch, rows, columns;
};

/* Where a piece lies in a tile: WIDTH rows with k along them, or ACROSS 32 rows of WIDTH elements. */
template <int WIDTH, bool ACROSS>
__device__ __forceinline__ unsigned camox_large_place(unsigned row, unsigned piece) {
  if constexpr (ACROSS) return row * (WIDTH / 8) + (piece ^ row % 8);
  return row * 4 + (piece ^ row / 2 % 4);
}

/* This thread's pieces of one operand's tiles, which are the same in all steps. As the first operand's side, `Rows` below:
     ACROSS      whether its rows are k
     stages      of the ring, which takes up to 84 KB; a block of sm_86 has 99
     more_words  of a stage, behind both tiles, for this side alone
     begin       the copies of the tile from this k on begin; called once for each step, in order
     complete    makes of this thread's landed pieces what the product takes; likewise */
template <typename T, int WIDTH, bool ACROSS_K>
struct camox_large_copy {
  static constexpr bool ACROSS = ACROSS_K;
  static constexpr int stages = 4, more_words = 0;
  static constexpr unsigned across = ACROSS ? WIDTH / 8 : 4, pieces = WIDTH * 4 / CAMOX_LARGE_THREADS;

  const T *from[pieces]; /* of the first step */
  unsigned to[pieces];
  int bytes[pieces], row[pieces]; /* row: of the tile, where rows are k */
  int64_t step, end;              /* end: of k, where k is along the rows from this thread's piece on */

  __device__ __forceinline__ camox_large_copy(const camox_large_matrix<T> &matrix, int64_t first)
      : step(ACROSS ? CAMOX_LARGE_DEPTH * matrix.pitch : CAMOX_LARGE_DEPTH),
        end(ACROSS ? matrix.rows : matrix.columns - threadIdx.x % across * 8) {
#pragma unroll
    for (unsigned i = 0; i < pieces; ++i) {
      const unsigned item = threadIdx.x + i * CAMOX_LARGE_THREADS, down = item / across, piece = item % across;
      to[i] = camox_large_place<WIDTH, ACROSS>(down, piece) * 4;
      row[i] = static_cast<int>(down);
      if constexpr (ACROSS) {
        const int64_t column = first + piece * 8;
        from[i] = matrix.data + down * matrix.pitch + column;
        bytes[i] = camox_at_most<8>(matrix.columns - column) * 2;
      } else {
        from[i] = matrix.data + (first + down) * matrix.pitch + piece * 8;
        bytes[i] = first + down < matrix.rows ? 16 : 0;
      }
    }
  }

  /* Nothing is read of 0 bytes. */
  __device__ __forceinline__ void begin(uint32_t *tile, uint32_t *, int64_t k) {
    const int remaining = ACROSS ? camox_at_most<CAMOX_LARGE_DEPTH>(end - k) : camox_at_most<8>(end - k) * 2;
#pragma unroll
    for (unsigned i = 0; i < pieces; ++i) {
      const int read = ACROSS ? (row[i] < remaining ? bytes[i] : 0) : min(bytes[i], remaining);
      camox_cp_async_16(tile + to[i], from[i], read);
      from[i] += step;
    }
  }

  __device__ __forceinline__ void complete(uint32_t *, const uint32_t *, int64_t) {}
};

/* A warp's sums; element [m][n][e] of a lane is at row camox_large_row and column camox_large_column of the block's tile. */
template <int COLUMNS>
using camox_large_sums = float[4][COLUMNS / 32][4];

__device__ __forceinline__ unsigned camox_large_row(unsigned m, unsigned e) {
  return threadIdx.x / 128 * 64 + m * 16 + e / 2 * 8 + threadIdx.x % CAMOX_WARP / 4;
}
template <int COLUMNS>
__device__ __forceinline__ unsigned camox_large_column(unsigned n, unsigned e) {
  return threadIdx.x / CAMOX_WARP % 4 * (COLUMNS / 4) + n * 8 + threadIdx.x % 4 * 2 + e % 2;
}

/* Words of the tile's piece that this lane names to ldmatrix for 16 rows (FIRST), or columns, of the product from `first` on,
   for the first 16 terms of a step. */
template <int WIDTH, bool ACROSS, bool FIRST>
__device__ __forceinline__ unsigned camox_large_fragment(unsigned first) {
  /* lanes 8 ... 15 name the second of four 8 x 8 matrices: the one below the first, or beside it */
  constexpr bool by_rows = FIRST != ACROSS;
  const unsigned lane = threadIdx.x % CAMOX_WARP;
  const unsigned down = by_rows ? lane % 16 : lane % 8 + lane / 16 * 8, beside = by_rows ? lane / 16 : lane / 8 % 2;
  return camox_large_place<WIDTH, ACROSS>(ACROSS ? down : first + down, ACROSS ? first / 8 + beside : beside) * 4;
}

/* The same for the other 16 terms. */
template <int WIDTH, bool ACROSS>
__device__ __forceinline__ unsigned camox_large_second(unsigned fragment) {
  return ACROSS ? fragment + 16 * WIDTH / 2 : fragment ^ 8;
}

/* sums += the product of a stage. A_ACROSS, B_ACROSS: of the first and of the second operand. */
template <typename T, int COLUMNS, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void camox_large_step(camox_large_sums<COLUMNS> &sums, const uint32_t *stage,
                                                 const unsigned (&of_rows)[4], const unsigned (&of_columns)[COLUMNS / 64]) {
  const uint32_t *const second = stage + CAMOX_LARGE_ROWS * CAMOX_LARGE_DEPTH / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t rows[4][4], columns[COLUMNS / 64][4];
#pragma unroll
    for (int n = 0; n < COLUMNS / 64; ++n)
      camox_ldmatrix_x4<B_ACROSS>(columns[n],
                                  second + (half ? camox_large_second<COLUMNS, B_ACROSS>(of_columns[n]) : of_columns[n]));
#pragma unroll
    for (int m = 0; m < 4; ++m)
      camox_ldmatrix_x4<A_ACROSS>(rows[m],
                                  stage + (half ? camox_large_second<CAMOX_LARGE_ROWS, A_ACROSS>(of_rows[m]) : of_rows[m]));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < COLUMNS / 32; ++n) {
        const uint32_t other[2] = {columns[n / 2][n % 2 * 2], columns[n / 2][n % 2 * 2 + 1]};
        camox_mma_m16n8k16<T>(sums[m][n], rows[m], other);
      }
    }
  }
}

/* sums = the product of the block's rows of the first operand and columns of the second, over k of [0, depth). */
template <typename T, int COLUMNS, bool B_ACROSS, typename Rows>
__device__ __forceinline__ void camox_large_multiply(camox_large_sums<COLUMNS> &sums, uint32_t *shared, Rows &of_a,
                                                     camox_large_copy<T, COLUMNS, B_ACROSS> &of_b, int64_t depth) {
  constexpr int words = camox_large_words<Rows, COLUMNS>, a_words = CAMOX_LARGE_ROWS * CAMOX_LARGE_DEPTH / 2;
  constexpr int more = a_words + COLUMNS * CAMOX_LARGE_DEPTH / 2, stages = Rows::stages;
  constexpr bool A_ACROSS = Rows::ACROSS;
  const auto begin = [&](int stage, int64_t k) {
    if (k < depth) {
      uint32_t *const to = shared + stage * words;
      of_a.begin(to, to + more, k), of_b.begin(to + a_words, nullptr, k);
    }
    camox_cp_async_commit();
  };
  unsigned of_rows[4], of_columns[COLUMNS / 64];
#pragma unroll
  for (unsigned m = 0; m < 4; ++m)
    of_rows[m] = camox_large_fragment<CAMOX_LARGE_ROWS, A_ACROSS, true>(threadIdx.x / 128 * 64 + m * 16);
#pragma unroll
  for (unsigned n = 0; n < COLUMNS / 64; ++n)
    of_columns[n] = camox_large_fragment<COLUMNS, B_ACROSS, false>(threadIdx.x / CAMOX_WARP % 4 * (COLUMNS / 4) + n * 16);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 32; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.0f;
    }
  }
  __syncthreads(); /* what shared memory held is no longer read */
#pragma unroll
  for (int i = 0; i < stages - 1; ++i) begin(i, i * CAMOX_LARGE_DEPTH);
  int stage = 0;
#pragma unroll 1
  for (int64_t k = 0; k < depth; k += CAMOX_LARGE_DEPTH) {
    uint32_t *const of_step = shared + stage * words;
    camox_cp_async_wait<stages - 2>();
    of_a.complete(of_step, of_step + more, k);
    __syncthreads(); /* all pieces of this step are in place, and the stage of the step before is free again */
    begin(stage == 0 ? stages - 1 : stage - 1, k + (stages - 1) * CAMOX_LARGE_DEPTH);
    camox_large_step<T, COLUMNS, A_ACROSS, B_ACROSS>(sums, of_step, of_rows, of_columns);
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
}

__device__ __forceinline__ int camox_large_stage_at(int row, int column) {
  return column / CAMOX_TILE * CAMOX_LARGE_ROWS * CAMOX_TILE + camox_tile_stage_at(row, column % CAMOX_TILE);
}

/* factor * sums, rounded once, by way of shared memory, where each row is permuted as in a tile. place(row): where the first of
   `columns` elements of a row goes, NULL where it does not exist. wide: they are aligned to 16 bytes and adjacent. */
template <typename T, int COLUMNS, typename Place>
__device__ __forceinline__ void camox_large_put(uint32_t *shared, const camox_large_sums<COLUMNS> &sums, float factor,
                                                int64_t column_stride, int columns, bool wide, const Place &place) {
  __syncthreads(); /* the last step is no longer read */
#pragma unroll
  for (unsigned m = 0; m < 4; ++m) {
#pragma unroll
    for (unsigned n = 0; n < COLUMNS / 32; ++n) {
#pragma unroll
      for (unsigned e = 0; e < 4; e += 2) {
        const unsigned row = camox_large_row(m, e), column = camox_large_column<COLUMNS>(n, e);
        const float pair[2] = {factor * sums[m][n][e], factor * sums[m][n][e + 1]};
        T rounded[2];
        camox_round(rounded, pair);
        camox_store_shared(
            reinterpret_cast<T *>(shared + camox_large_place<COLUMNS, true>(row, column / 8) * 4 + column % 8 / 2), rounded);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned item = threadIdx.x; item < CAMOX_LARGE_ROWS * COLUMNS / 8; item += CAMOX_LARGE_THREADS) {
    const int row = static_cast<int>(item / (COLUMNS / 8)), column = static_cast<int>(item % (COLUMNS / 8)) * 8;
    T *const first = column < columns ? place(row) : nullptr;
    if (!first) continue;
    T values[8];
    camox_load_shared(values, reinterpret_cast<const T *>(
                                  shared + camox_large_place<COLUMNS, true>(item / (COLUMNS / 8), item % (COLUMNS / 8)) * 4));
    T *const at = first + column * column_stride;
    if (wide && columns - column >= 8) {
      camox_store(at, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < columns) at[i * column_stride] = values[i];
    }
  }
}

/* factor * sums in float32, straight to memory: the four lanes of a row write 32 bytes, a whole sector. place(row) as above;
   wide: pairs of adjacent columns are aligned to 8 bytes. */
template <int COLUMNS, typename Place>
__device__ __forceinline__ void camox_large_put_floats(const camox_large_sums<COLUMNS> &sums, float factor, int columns,
                                                       bool wide, const Place &place) {
#pragma unroll
  for (unsigned m = 0; m < 4; ++m) {
#pragma unroll
    for (unsigned e = 0; e < 4; e += 2) {
      float *const first = place(static_cast<int>(camox_large_row(m, e)));
      if (!first) continue;
#pragma unroll
      for (unsigned n = 0; n < COLUMNS / 32; ++n) {
        const int column = static_cast<int>(camox_large_column<COLUMNS>(n, e));
        const float pair[2] = {factor * sums[m][n][e], factor * sums[m][n][e + 1]};
        camox_store_float(first + column, pair, columns - column, wide);
      }
    }
  }
}

/* The sums in shared memory, [COLUMNS / 64] stages of 128 x 64 floats as in tile_product.cuh: 128 columns fit where the ring
   of four stages was. */
template <int COLUMNS>
__device__ __forceinline__ void camox_large_stage(float *stage, const camox_large_sums<COLUMNS> &sums) {
  __syncthreads(); /* the last step is no longer read */
#pragma unroll
  for (unsigned m = 0; m < 4; ++m) {
#pragma unroll
    for (unsigned n = 0; n < COLUMNS / 32; ++n) {
#pragma unroll
      for (unsigned e = 0; e < 4; e += 2) {
        const int row = static_cast<int>(camox_large_row(m, e)), column = static_cast<int>(camox_large_column<COLUMNS>(n, e));
        const float pair[2] = {sums[m][n][e], sums[m][n][e + 1]};
        camox_store_shared(stage + camox_large_stage_at(row, column), pair);
      }
    }
  }
  __syncthreads();
}

#endif
