/* Products of 64 x 64 tiles: bdh_multiply brings two operands to shared memory, 128 bytes along k at a time, and adds up their
   product in registers; bdh_stage and bdh_put bring it to memory.

     global memory  --cp.async-->  a ring of buffers in shared memory  --ldmatrix-->  fragments in registers
     step i + 2                    step i + 1: landing                                step i: product

   A thread waits for the pieces that it copied itself, makes of them what the product takes (a rotation), and then for the
   others; a step has one barrier. What cannot be copied as it lies in memory is loaded when its step comes.

     a tile of each operand in shared memory                          a block of 4 warps       each warp: 32 x 32 of the product,
                                                                      +--------+--------+      each lane 32 sums in registers:
       rows are k ("across")     k is along the rows                  | warp 0 | warp 1 |      [2 x 16 rows][4 x 8 columns]
       +-----128 bytes----+      +-----128 bytes----+                 +--------+--------+
     k | 64 rows          |      | 64 rows      k-> |                 | warp 2 | warp 3 |
       +------------------+      +------------------+                 +--------+--------+

   Both lie there as in memory: ldmatrix transposes 8 x 8 elements on their way to the tensor cores where rows are k. It moves
   16 bits at a time: float32, and bfloat16 on sm_75, are transposed when they are stored to shared memory instead.

   An operand is a struct of
     piece(to, r, c)   the 16 bytes of elements from column c of its row r on, 0 beyond its ends
     copied            whether they are made of as many bytes in memory: those of memory(), a bdh_matrix,
     made              by make(values, r, c), in place, unless they are the same */
#ifndef CAMOX_BDH_TILE_CUH
#define CAMOX_BDH_TILE_CUH

#include "../common/cuda_util.cuh"

#define BDH_THREADS 128
#define BDH_TILE 64  /* rows and columns of a block's tile: 2 x 2 warps of 32 x 32 */
#define BDH_BLOCKS 2 /* of which a multiprocessor must hold so many: up to 255 registers a thread */

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

/* 16 bytes, the widest access; elements of an operand along k in one step. */
template <typename T>
constexpr int bdh_lanes = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int bdh_depth = 128 / static_cast<int>(sizeof(T));

/* Whether tiles whose rows are k are transposed when they are stored. */
template <typename P>
constexpr bool bdh_transposes = sizeof(P) == 4 || !bdh_on_tensor_cores<P>;

/* A tile in shared memory: [BDH_TILE] rows of 8 pieces of 16 bytes. Piece p of row r lies at place p ^ r % 8, so that both the
   pieces of a row and the same piece of eight rows are in different banks. */
#define BDH_TILE_WORDS (BDH_TILE * 32)
/* Buffers of a ring, each with a tile of both operands. Without cp.async none are in flight. */
#define BDH_RING (CAMOX_CUDA_ARCH >= 800 ? 3 : 2)
template <int BUFFERS>
struct __align__(16) bdh_ring {
  uint32_t tiles[BUFFERS][2][BDH_TILE_WORDS];
};

__device__ __forceinline__ int bdh_piece_at(int row, int piece) { return row * 32 + (piece ^ row % 8) * 4; }

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
  bool wide; /* aligned rows of adjacent elements, for 16-byte accesses */

  static constexpr bool copied = true, made = false;
  __device__ __forceinline__ const bdh_matrix &memory() const { return *this; }

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

/* The thread, whose places in tiles are computed in each step: nvcc would hold them in registers that the product needs. */
__device__ __forceinline__ int bdh_thread(void) {
  int thread = static_cast<int>(threadIdx.x);
  camox_compute_late(thread);
  return thread;
}

/* The copy of the tile whose first row and column are these begins. */
template <typename T>
__device__ __forceinline__ void bdh_copy(uint32_t *tile, const bdh_matrix<T> &from, int64_t row, int64_t column) {
  const int thread = bdh_thread(), first = thread / 8, piece = thread % 8;
  const int rows = bdh_at_most<BDH_TILE>(from.rows - row);
  const int count = bdh_at_most<bdh_lanes<T>>(from.columns - column - piece * bdh_lanes<T>);
  const T *at = from.data + (row + first) * from.row + column + piece * bdh_lanes<T>;
#pragma unroll
  for (int below = 0; below < BDH_TILE; below += BDH_THREADS / 8, at += BDH_THREADS / 8 * from.row) {
    const int r = first + below;
    const int bytes = r < rows ? count * static_cast<int>(sizeof(T)) : 0;
    camox_cp_async_16(tile + bdh_piece_at(r, piece), at, bytes); /* nothing is read of 0 bytes */
  }
}

/* ... and this thread's pieces of it have landed. */
template <typename T, typename Operand>
__device__ __forceinline__ void bdh_make(uint32_t *tile, const Operand &operand, int64_t row, int64_t column) {
  const int thread = bdh_thread(), first = thread / 8, piece = thread % 8;
#pragma unroll
  for (int below = 0; below < BDH_TILE; below += BDH_THREADS / 8) {
    const int r = first + below;
    T values[bdh_lanes<T>];
    T *const at = reinterpret_cast<T *>(tile + bdh_piece_at(r, piece));
    camox_load_shared(values, at);
    operand.make(values, row + r, column + piece * bdh_lanes<T>);
    camox_store_shared(at, values);
  }
}

/* The tile piece by piece. */
template <typename T, typename Operand>
__device__ __forceinline__ void bdh_load(uint32_t *tile, const Operand &operand, int64_t row, int64_t column) {
  constexpr int V = bdh_lanes<T>;
#pragma unroll(Operand::copied ? 1 : 2)
  for (int item = bdh_thread(); item < BDH_TILE * 8; item += BDH_THREADS) {
    T values[V];
    operand.piece(values, row + item / 8, column + item % 8 * V);
    camox_store_shared(reinterpret_cast<T *>(tile + bdh_piece_at(item / 8, item % 8)), values);
  }
}

/* The same transposed: rows of the operand are columns of the tile. A thread makes words of what neighbouring rows have. */
template <typename T, typename Operand>
__device__ __forceinline__ void bdh_load_transposed(uint32_t *tile, const Operand &operand, int64_t row, int64_t column) {
  constexpr int V = bdh_lanes<T>, of_word = 4 / static_cast<int>(sizeof(T));
  const int word = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
#pragma unroll 1
  for (int first = warp * V; first < BDH_TILE; first += BDH_THREADS / CAMOX_WARP * V) {
    T values[of_word][V];
#pragma unroll
    for (int i = 0; i < of_word; ++i) {
      int step = word * of_word + i;
      camox_compute_late(step);
      operand.piece(values[i], row + step, column + first);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      T pair[of_word];
#pragma unroll
      for (int i = 0; i < of_word; ++i) pair[i] = values[i][j];
      camox_store_shared(reinterpret_cast<T *>(tile + bdh_piece_at(first + j, word / 4) + word % 4), pair);
    }
  }
}

/* One operand's part in the steps of a product, whose tiles have k along their rows or, ACROSS, k as their rows. */
template <typename P, bool ACROSS, typename Operand>
struct bdh_side {
  using T = bdh_element<P>;
  static constexpr bool transposed = ACROSS && bdh_transposes<P>, can_be_copied = Operand::copied && !transposed;

  const Operand &operand;
  int64_t first;
  bool copies;

  __device__ __forceinline__ bdh_side(const Operand &of, int64_t from) : operand(of), first(from), copies(false) {
    if constexpr (can_be_copied) copies = of.memory().wide;
  }

  __device__ __forceinline__ void begin(uint32_t *tile, int64_t k) const {
    if constexpr (can_be_copied)
      if (copies) bdh_copy(tile, operand.memory(), ACROSS ? k : first, ACROSS ? first : k);
  }

  __device__ __forceinline__ void complete(uint32_t *tile, int64_t k) const {
    const int64_t row = ACROSS ? k : first, column = ACROSS ? first : k;
    if constexpr (can_be_copied)
      if (copies) {
        if constexpr (Operand::made) bdh_make<T>(tile, operand, row, column);
        return;
      }
    if constexpr (transposed) {
      bdh_load_transposed<T>(tile, operand, row, column);
    } else {
      bdh_load<T>(tile, operand, row, column);
    }
  }
};

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

/* Fragments of 16 rows, or columns, of the product by 16 of k, 8 of TF32, from an operand's tile: two pieces of 16 rows, or where
   k are its rows (ACROSS) two pieces of 16 k. FIRST: of the first operand, whose fragments have their rows side by side; of the second k are. */
template <typename P, bool ACROSS, bool FIRST>
struct bdh_fragments {
  const uint32_t *tile;
  int place;

  /* Of rows from `row` of the product's on. */
  __device__ __forceinline__ bdh_fragments(const uint32_t *of, int lane, int row) : tile(of) {
    constexpr bool by_rows =
        FIRST != ACROSS; /* which of the four matrices of 8 x 8 lanes 8 ... 15 name: the one below, or beside */
    const int down = by_rows ? lane % 16 : lane % 8 + lane / 16 * 8, beside = by_rows ? lane / 16 : lane / 8 % 2;
    place = bdh_piece_at(ACROSS ? down : row + down, ACROSS ? row / 8 + beside : beside);
  }

  /* Of a row the steps' pieces are 0 or 1, exclusive or 2 step. */
  __device__ __forceinline__ void load(uint32_t (&to)[4], int step) const {
    camox_ldmatrix_x4<ACROSS>(to, tile + (ACROSS ? place + step * 16 * 32 : place ^ step * 8));
    if constexpr (bdh_is_tf32<P>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = __float_as_uint(camox_to_tf32(__uint_as_float(to[i])));
    }
  }
};

template <typename P, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void bdh_product_mma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  const int thread = bdh_thread(), lane = thread % CAMOX_WARP, warp = thread / CAMOX_WARP;
  const int row = warp / 2 * 32, column = warp % 2 * 32;
  const bdh_fragments<P, A_ACROSS, true> of_a[2] = {{a, lane, row}, {a, lane, row + 16}};
  const bdh_fragments<P, B_ACROSS, false> of_b[2] = {{b, lane, column}, {b, lane, column + 16}};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t rows[2][4], columns[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_a[i].load(rows[i], step), of_b[i].load(columns[i], step);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t other[2] = {columns[n / 2][n % 2 * 2], columns[n / 2][n % 2 * 2 + 1]};
        if constexpr (bdh_is_tf32<P>) {
          camox_mma_tf32_m16n8k8(sums[m][n], rows[m], other);
        } else {
          camox_mma_m16n8k16<P>(sums[m][n], rows[m], other);
        }
      }
    }
  }
}

/* The terms of one step over k are summed up by themselves first: long sums of float32 keep more of their digits so. */
template <typename P>
__device__ __forceinline__ void bdh_product_fma(bdh_sums &sums, const uint32_t *a, const uint32_t *b) {
  using T = bdh_element<P>;
  constexpr int V = 4, words = V * static_cast<int>(sizeof(T)) / 4;
  bdh_sums part;
  bdh_clear(part);
#pragma unroll 1
  for (int word = 0; word < 32; word += words) {
    T rows[4][V];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      camox_load_shared(rows[i], reinterpret_cast<const T *>(a + bdh_piece_at(bdh_row(i / 2, i % 2 * 2), word / 4) + word % 4));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      T column[V];
      camox_load_shared(column, reinterpret_cast<const T *>(b + bdh_piece_at(bdh_column(j / 2, j % 2), word / 4) + word % 4));
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

/* What a product sums over: k of [begin, end). */
struct bdh_range {
  int64_t begin, end;
};

/* sums += a b^T over the range, rows of a from `a_first`, of b from `b_first` on. ACROSS: k are the rows in memory.
   same: a and b are the same tile. */
template <typename P, bool A_ACROSS, bool B_ACROSS, int RING, typename A, typename B>
__device__ __forceinline__ void bdh_multiply(bdh_sums &sums, bdh_ring<RING> &ring, const A &a, int64_t a_first, const B &b,
                                             int64_t b_first, bdh_range range, bool same = false) {
  const bdh_side<P, A_ACROSS, A> of_a(a, a_first);
  const bdh_side<P, B_ACROSS, B> of_b(b, b_first);
  const auto begin = [&](int buffer, int64_t k) {
    if (k < range.end) {
      of_a.begin(ring.tiles[buffer][0], k);
      if (!same) of_b.begin(ring.tiles[buffer][1], k);
    }
    camox_cp_async_commit();
  };
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RING - 1; ++i) begin(i, range.begin + i * bdh_depth<P>);
  int buffer = 0, before = RING - 1; /* the step's, and that of the step before, which is free again */
#pragma unroll 1
  for (int64_t k = range.begin; k < range.end; k += bdh_depth<P>) {
    uint32_t *const a_tile = ring.tiles[buffer][0], *const b_tile = ring.tiles[buffer][same ? 0 : 1];
    camox_cp_async_wait<RING - 2>();
    of_a.complete(a_tile, k);
    if (!same) of_b.complete(b_tile, k);
    __syncthreads();
    begin(before, k + (RING - 1) * bdh_depth<P>);
    if constexpr (bdh_on_tensor_cores<P>) {
      bdh_product_mma<P, A_ACROSS && !bdh_transposes<P>, B_ACROSS && !bdh_transposes<P>>(sums, a_tile, b_tile);
    } else {
      bdh_product_fma<P>(sums, a_tile, b_tile);
    }
    before = buffer, buffer = buffer == RING - 1 ? 0 : buffer + 1;
  }
}

/* What products make, in place of the ring once they are multiplied: [BDH_TILE][BDH_TILE] floats, whose columns are permuted so that pairs
   as the sums lie, and a column of neighbouring rows, are in different banks. */
#define BDH_STAGE (BDH_TILE * BDH_TILE)

__device__ __forceinline__ int bdh_stage_at(int row, int column) {
  return row * BDH_TILE + (column ^ (row % 4 * 8 + row / 4 % 2 * 4));
}

#define BDH_SHARED(buffers, ring, stage) \
  __shared__ bdh_ring<buffers> ring;     \
  float *const stage = reinterpret_cast<float *>(&ring)

__device__ __forceinline__ void bdh_stage(float *stage, const bdh_sums &sums) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const float pair[2] = {sums[i / 16][i / 4 % 4][i % 4], sums[i / 16][i / 4 % 4][i % 4 + 1]};
    camox_store_shared(stage + bdh_stage_at(bdh_row(i / 16, i % 4), bdh_column(i / 4 % 4, 0)), pair);
  }
  __syncthreads();
}

/* V neighbours of a row, from a multiple of V on. */
template <int V>
__device__ __forceinline__ void bdh_from_stage(float (&to)[V], const float *stage, int row, int column) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    float part[4];
    camox_load_shared(part, stage + bdh_stage_at(row, column + i));
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = part[j];
  }
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
    bdh_from_stage(values, stage, row, column);
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
    for (int i = 0; i < V; ++i) values[i] = stage[bdh_stage_at(row + i, column)];
    bdh_store(to + column * pitch + row, 1, values, rows - row, wide);
  }
}

#endif
