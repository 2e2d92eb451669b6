/* Products of 64 x 64 tiles for CUDA: camox_tile_multiply brings two operands to shared memory, 128 bytes along k at a time,
   and adds up their product in registers; camox_tile_stage and camox_tile_put bring it to memory.

     global memory  --cp.async-->  a ring of buffers in shared memory  --ldmatrix-->  fragments in registers
     step i + 2                    step i + 1: landing                                step i: product

   A thread waits for the pieces that it copied itself, makes of them what the product takes (a rotation), and then for the
   others; a step has one barrier. What cannot be copied as it lies in memory is loaded when its step comes.

     a tile of each operand in shared memory              a block of 4 warps     each warp: 32 x 32 of the product,
                                                          +--------+--------+    each lane 32 sums in registers:
       rows are k ("across")     k is along the rows      | warp 0 | warp 1 |    [2 x 16 rows][4 x 8 columns]
       +-----128 bytes----+      +-----128 bytes----+     +--------+--------+
     k | 64 rows          |      | 64 rows      k-> |     | warp 2 | warp 3 |
       +------------------+      +------------------+     +--------+--------+

   Both lie there as in memory: ldmatrix transposes 8 x 8 elements on their way to the tensor cores where rows are k. It moves
   16 bits at a time: float32, and bfloat16 on sm_75, are transposed on their way to shared memory instead, float32 by copies of
   4 bytes.

   An operand is a struct of
     piece(to, r, c)   the 16 bytes of elements from column c of its row r on, 0 beyond its ends
     copied            whether they are made of as many bytes in memory: those of memory(), a camox_tile_matrix,
     made              by make(values, r, c), in place, unless they are the same
     usual()           where all of it is aligned and whole; then place(r, c) once per step and
                       make_usual(values, place, below) for the piece, or pair, so many rows below are cheaper than make
   The loop over the steps exists twice: for usual operands, with nothing else in it, and for any. */
#ifndef CAMOX_TILE_PRODUCT_CUH
#define CAMOX_TILE_PRODUCT_CUH

#include "cuda_util.cuh"

#define CAMOX_TILE_THREADS 128
#define CAMOX_TILE 64       /* rows and columns of a block's tile: 2 x 2 warps of 32 x 32 */
#define CAMOX_TILE_BLOCKS 2 /* of which a multiprocessor must hold so many: up to 255 registers a thread */

/* float32 whose products may be made of TF32, as far as the architecture has tensor cores for it. A product's P is this or the
   element type itself. */
struct camox_tf32 {
  float value;
};
template <typename P>
constexpr bool camox_is_tf32 = false;
template <>
constexpr bool camox_is_tf32<camox_tf32> = true;
template <typename P>
using camox_tile_element = typename camox_select<camox_is_tf32<P>, float, P>::type;

template <typename P>
constexpr bool camox_on_tensor_cores =
    camox_is_tf32<P> ? CAMOX_CUDA_ARCH >= 800 : sizeof(P) == 2 && (CAMOX_CUDA_ARCH >= 800 || !camox_is_bfloat16<P>::value);

/* 16 bytes, the widest access; elements of an operand along k in one step. */
template <typename T>
constexpr int camox_tile_lanes = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int camox_tile_depth = 128 / static_cast<int>(sizeof(T));

/* Whether tiles whose rows are k are transposed when they are stored. */
template <typename P>
constexpr bool camox_tile_transposes = sizeof(P) == 4 || !camox_on_tensor_cores<P>;

/* A tile in shared memory: [CAMOX_TILE] rows of 8 pieces of 16 bytes. Piece p of row r lies at place p ^ r % 8, so that both
   the pieces of a row and the same piece of eight rows are in different banks. */
#define CAMOX_TILE_WORDS (CAMOX_TILE * 32)

__device__ __forceinline__ unsigned camox_tile_piece_at(unsigned row, unsigned piece) {
  return row * 32 + (piece ^ row % 8) * 4;
}

/* Buffers of a ring, each with a tile of both operands, or of one that is both: one step is multiplied while others land. sm_75
   has no cp.async. */
#define CAMOX_TILE_RING (CAMOX_CUDA_ARCH >= 800 ? 3 : 2)
template <int BUFFERS, int OPERANDS = 2>
struct __align__(16) camox_tile_ring {
  uint32_t tiles[BUFFERS][OPERANDS][CAMOX_TILE_WORDS];
};

/* Of the threads that share a product: a block may have several, whose threads are neighbours. */
__device__ __forceinline__ unsigned camox_tile_own_thread(void) { return threadIdx.x % CAMOX_TILE_THREADS; }

/* ---- operands ---- */

/* How many of MOST: n, but not below 0. */
template <int MOST>
__device__ __forceinline__ int camox_at_most(int64_t n) {
  return n >= MOST ? MOST : n > 0 ? static_cast<int>(n) : 0;
}

template <typename E, int V>
__device__ __forceinline__ void camox_tile_store(E *to, int64_t step, const float (&values)[V], int count, bool wide) {
  if (wide && count >= V) {
    camox_store_float(to, values);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i < count) to[i * step] = camox_from_float<E>(values[i]);
  }
}

template <typename T>
struct camox_tile_matrix {
  const T *data;
  int64_t row, column; /* strides */
  int64_t rows, columns;
  bool wide; /* aligned rows of adjacent elements, for 16-byte accesses */

  static constexpr bool copied = true, made = false;
  __device__ __forceinline__ const camox_tile_matrix &memory() const { return *this; }
  __device__ __forceinline__ bool usual() const { return wide; }

  __device__ __forceinline__ void piece(T (&to)[camox_tile_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = camox_tile_lanes<T>;
    const T *from = data + r * row + c * column;
    const int count = r < rows ? camox_at_most<V>(columns - c) : 0;
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
__device__ __forceinline__ unsigned camox_tile_thread(void) {
  int thread = static_cast<int>(camox_tile_own_thread());
  camox_compute_late(thread);
  return static_cast<unsigned>(thread);
}

/* The copy of the tile whose first row and column are these begins. */
template <typename T>
__device__ __forceinline__ void camox_tile_copy(uint32_t *tile, const camox_tile_matrix<T> &from, int64_t row, int64_t column) {
  constexpr unsigned V = camox_tile_lanes<T>, between = CAMOX_TILE_THREADS / 8;
  const unsigned thread = camox_tile_thread(), first = thread / 8, piece = thread % 8;
  const unsigned rows = camox_at_most<CAMOX_TILE>(from.rows - row);
  const int bytes = camox_at_most<camox_tile_lanes<T>>(from.columns - column - piece * V) * static_cast<int>(sizeof(T));
  const T *at = from.data + (row + first) * from.row + column + piece * V;
#pragma unroll
  for (unsigned below = 0; below < CAMOX_TILE; below += between, at += between * from.row) {
    /* nothing is read of 0 bytes */
    camox_cp_async_16(tile + camox_tile_piece_at(first + below, piece), at, first + below < rows ? bytes : 0);
  }
}

/* In a float32 tile that is transposed on its way a thread has two adjacent columns, at every fourth k. A warp copies 4 k of 8
   columns at a time, whose words are in different banks, as lanes 16 ... 31 begin with the second column. */
struct camox_tile_pairs {
  unsigned column, k, second_first;
};

__device__ __forceinline__ camox_tile_pairs camox_tile_pairs_of_thread(void) {
  const unsigned thread = camox_tile_thread();
  return {thread / CAMOX_WARP * 16 + thread % CAMOX_WARP / 4 * 2, thread % 4, thread / 16 % 2};
}

__device__ __forceinline__ void camox_cp_async_4(void *shared, const void *global, int valid_bytes) {
#if defined(CAMOX_CUDA_EMULATOR) && CAMOX_CUDA_ARCH >= 800
  camox_emulator_cp_async(shared, global, 4, valid_bytes, CAMOX_EMULATOR_SITE("cp.async"));
#else
  camox_cp_async<4>(shared, global, valid_bytes);
#endif
}

/* The copy of the tile whose rows are k, transposed, begins. */
__device__ __forceinline__ void camox_tile_copy_transposed(uint32_t *tile, const camox_tile_matrix<float> &from, int64_t row,
                                                           int64_t column) {
  const camox_tile_pairs own = camox_tile_pairs_of_thread();
  const unsigned first = own.column + own.second_first, second = own.column + 1 - own.second_first;
  const unsigned rows = camox_at_most<CAMOX_TILE>(from.rows - row), columns = camox_at_most<CAMOX_TILE>(from.columns - column);
  const int of_first = first < columns ? 4 : 0, of_second = second < columns ? 4 : 0;
  const float *const at = from.data + (row + own.k) * from.row + column;
  const float *from_first = at + first, *from_second = at + second;
  const int64_t step = 4 * from.row;
#pragma unroll
  for (unsigned below = 0; below < camox_tile_depth<float>; below += 4, from_first += step, from_second += step) {
    const bool exists = own.k + below < rows;
    camox_cp_async_4(tile + camox_tile_piece_at(first, below / 4) + own.k, from_first, exists ? of_first : 0);
    camox_cp_async_4(tile + camox_tile_piece_at(second, below / 4) + own.k, from_second, exists ? of_second : 0);
  }
}

/* ... and this thread's pairs of it have landed. */
template <typename Operand>
__device__ __forceinline__ void camox_tile_make_transposed(uint32_t *tile, const Operand &operand, int64_t row,
                                                           int64_t column) {
  const camox_tile_pairs own = camox_tile_pairs_of_thread();
  const auto place = operand.place(row + own.k, column + own.column);
#pragma unroll
  for (unsigned below = 0; below < camox_tile_depth<float>; below += 4) {
    float *const first = reinterpret_cast<float *>(tile + camox_tile_piece_at(own.column, below / 4) + own.k);
    float *const second = reinterpret_cast<float *>(tile + camox_tile_piece_at(own.column + 1, below / 4) + own.k);
    float pair[2] = {*first, *second};
    operand.make_usual(pair, place, static_cast<int>(below));
    *first = pair[0], *second = pair[1];
  }
}

/* ... and this thread's pieces of it have landed. */
template <bool USUAL, typename T, typename Operand>
__device__ __forceinline__ void camox_tile_make(uint32_t *tile, const Operand &operand, int64_t row, int64_t column) {
  const unsigned thread = camox_tile_thread(), first = thread / 8, piece = thread % 8;
  row += first, column += piece * camox_tile_lanes<T>;
  const auto place = operand.place(row, column);
#pragma unroll
  for (unsigned below = 0; below < CAMOX_TILE; below += CAMOX_TILE_THREADS / 8) {
    T values[camox_tile_lanes<T>];
    T *const at = reinterpret_cast<T *>(tile + camox_tile_piece_at(first + below, piece));
    camox_load_shared(values, at);
    if constexpr (USUAL) {
      operand.make_usual(values, place, static_cast<int>(below));
    } else {
      operand.make(values, row + below, column);
    }
    camox_store_shared(at, values);
  }
}

/* The tile piece by piece. */
template <typename T, typename Operand>
__device__ __forceinline__ void camox_tile_load(uint32_t *tile, const Operand &operand, int64_t row, int64_t column) {
  constexpr int V = camox_tile_lanes<T>;
#pragma unroll(Operand::copied ? 1 : 2)
  for (unsigned item = camox_tile_thread(); item < CAMOX_TILE * 8; item += CAMOX_TILE_THREADS) {
    T values[V];
    operand.piece(values, row + item / 8, column + item % 8 * V);
    camox_store_shared(reinterpret_cast<T *>(tile + camox_tile_piece_at(item / 8, item % 8)), values);
  }
}

/* The same transposed: rows of the operand are columns of the tile. A thread makes words of what neighbouring rows have. */
template <typename T, typename Operand>
__device__ __forceinline__ void camox_tile_load_transposed(uint32_t *tile, const Operand &operand, int64_t row,
                                                           int64_t column) {
  constexpr int V = camox_tile_lanes<T>, of_word = 4 / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(camox_tile_own_thread()), word = thread % CAMOX_WARP, warp = thread / CAMOX_WARP;
#pragma unroll 1
  for (int first = warp * V; first < CAMOX_TILE; first += CAMOX_TILE_THREADS / CAMOX_WARP * V) {
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
      camox_store_shared(reinterpret_cast<T *>(tile + camox_tile_piece_at(first + j, word / 4) + word % 4), pair);
    }
  }
}

/* One operand's part in the steps of a product, whose tiles have k along their rows or, ACROSS, k as their rows. Both take the
   tile at k: begin, some steps ahead, and complete. */
template <typename P, bool ACROSS, bool USUAL, typename Operand>
struct camox_tile_side {
  using T = camox_tile_element<P>;
  static constexpr bool transposed = ACROSS && camox_tile_transposes<P>;
  static constexpr bool can_be_copied = Operand::copied && (!transposed || (USUAL && sizeof(P) == 4 && CAMOX_CUDA_ARCH >= 800));

  const Operand &operand;
  int64_t first;

  __device__ __forceinline__ bool copies() const {
    if constexpr (can_be_copied) return USUAL || operand.memory().wide;
    return false;
  }

  __device__ __forceinline__ void begin(uint32_t *tile, int64_t k) const {
    const int64_t row = ACROSS ? k : first, column = ACROSS ? first : k;
    if constexpr (can_be_copied && transposed) {
      camox_tile_copy_transposed(tile, operand.memory(), row, column);
    } else if constexpr (can_be_copied) {
      if (copies()) camox_tile_copy(tile, operand.memory(), row, column);
    }
  }

  __device__ __forceinline__ void complete(uint32_t *tile, int64_t k) const {
    const int64_t row = ACROSS ? k : first, column = ACROSS ? first : k;
    if (copies()) {
      if constexpr (can_be_copied && transposed && Operand::made)
        camox_tile_make_transposed(tile, operand, row, column);
      else if constexpr (Operand::copied && Operand::made)
        camox_tile_make<USUAL, T>(tile, operand, row, column);
    } else if constexpr (transposed) {
      camox_tile_load_transposed<T>(tile, operand, row, column);
    } else if constexpr (!USUAL || !can_be_copied) {
      camox_tile_load<T>(tile, operand, row, column);
    }
  }
};

/* ---- the product of two tiles ----
   A warp has 32 x 32 of it; element [m][n][e] of a lane is, in both ways to compute it, at row camox_tile_row and column
   camox_tile_column, so that columns of even and odd e are neighbours. */
typedef float camox_tile_sums[2][4][4];

__device__ __forceinline__ int camox_tile_row(int m, int e) {
  const int thread = static_cast<int>(camox_tile_own_thread());
  return thread / (2 * CAMOX_WARP) * 32 + m * 16 + e / 2 * 8 + thread % CAMOX_WARP / 4;
}
__device__ __forceinline__ int camox_tile_column(int n, int e) {
  const int thread = static_cast<int>(camox_tile_own_thread());
  return thread / CAMOX_WARP % 2 * 32 + n * 8 + thread % 4 * 2 + e % 2;
}

__device__ __forceinline__ void camox_tile_clear(camox_tile_sums &sums) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
}

/* Fragments of 16 rows (FIRST: of the first operand) or 16 columns of the product, for 16 of k, or 8 of TF32, at a time: in the
   operand's tile two pieces of 16 rows, or where its rows are k (ACROSS) two pieces of 16 k, transposed on their way. */
template <typename P, bool ACROSS, bool FIRST>
struct camox_tile_fragments {
  const uint32_t *tile;
  unsigned place;

  /* Of rows from `row` of the product's on. */
  __device__ __forceinline__ camox_tile_fragments(const uint32_t *of, unsigned lane, unsigned row) : tile(of) {
    /* lanes 8 ... 15 name the second of four 8 x 8 matrices: the one below the first, or beside it */
    constexpr bool by_rows = FIRST != ACROSS;
    const unsigned down = by_rows ? lane % 16 : lane % 8 + lane / 16 * 8, beside = by_rows ? lane / 16 : lane / 8 % 2;
    place = camox_tile_piece_at(ACROSS ? down : row + down, ACROSS ? row / 8 + beside : beside);
  }

  /* Pieces of a row: those of the first step, exclusive or 2 step, of 4 words each. */
  __device__ __forceinline__ void load(uint32_t (&to)[4], unsigned step) const {
    camox_ldmatrix_x4<ACROSS>(to, tile + (ACROSS ? place + step * 16 * 32 : place ^ step * 8));
    if constexpr (camox_is_tf32<P>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = __float_as_uint(camox_to_tf32(__uint_as_float(to[i])));
    }
  }
};

template <typename P, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void camox_tile_product_mma(camox_tile_sums &sums, const uint32_t *a, const uint32_t *b) {
  const unsigned thread = camox_tile_thread(), lane = thread % CAMOX_WARP, warp = thread / CAMOX_WARP;
  const unsigned row = warp / 2 * 32, column = warp % 2 * 32;
  const camox_tile_fragments<P, A_ACROSS, true> of_a[2] = {{a, lane, row}, {a, lane, row + 16}};
  const camox_tile_fragments<P, B_ACROSS, false> of_b[2] = {{b, lane, column}, {b, lane, column + 16}};
#pragma unroll
  for (unsigned step = 0; step < 4; ++step) {
    uint32_t rows[2][4], columns[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_a[i].load(rows[i], step), of_b[i].load(columns[i], step);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t other[2] = {columns[n / 2][n % 2 * 2], columns[n / 2][n % 2 * 2 + 1]};
        if constexpr (camox_is_tf32<P>) {
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
CAMOX_EMULATOR_OPTIMIZED __device__ __forceinline__ void camox_tile_product_fma(camox_tile_sums &sums, const uint32_t *a,
                                                                                const uint32_t *b) {
  using T = camox_tile_element<P>;
  constexpr int V = 4, words = V * static_cast<int>(sizeof(T)) / 4;
  camox_tile_sums part;
  camox_tile_clear(part);
#pragma unroll 1
  for (int word = 0; word < 32; word += words) {
    T rows[4][V];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      camox_load_shared(
          rows[i], reinterpret_cast<const T *>(a + camox_tile_piece_at(camox_tile_row(i / 2, i % 2 * 2), word / 4) + word % 4));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      T column[V];
      camox_load_shared(
          column, reinterpret_cast<const T *>(b + camox_tile_piece_at(camox_tile_column(j / 2, j % 2), word / 4) + word % 4));
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
struct camox_tile_range {
  int64_t begin, end;
};

template <typename P, bool A_ACROSS, bool B_ACROSS, bool USUAL, int RING, int OPERANDS, typename A, typename B>
__device__ __forceinline__ void camox_tile_steps(camox_tile_sums &sums, camox_tile_ring<RING, OPERANDS> &ring, const A &a,
                                                 int64_t a_first, const B &b, int64_t b_first, camox_tile_range range,
                                                 bool same) {
  const camox_tile_side<P, A_ACROSS, USUAL, A> of_a = {a, a_first};
  const camox_tile_side<P, B_ACROSS, USUAL, B> of_b = {b, b_first};
  const auto begin = [&](int buffer, int64_t k) {
    if (k < range.end) {
      of_a.begin(ring.tiles[buffer][0], k);
      if (!same) of_b.begin(ring.tiles[buffer][OPERANDS - 1], k);
    }
    camox_cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < RING - 1; ++i) begin(i, range.begin + i * camox_tile_depth<P>);
  int buffer = 0, before = RING - 1; /* the step's, and that of the step before, which is free again */
#pragma unroll 1
  for (int64_t k = range.begin; k < range.end; k += camox_tile_depth<P>) {
    uint32_t *const a_tile = ring.tiles[buffer][0], *const b_tile = ring.tiles[buffer][same ? 0 : OPERANDS - 1];
    camox_cp_async_wait<RING - 2>();
    of_a.complete(a_tile, k);
    if (!same) of_b.complete(b_tile, k);
    __syncthreads();
    begin(before, k + (RING - 1) * camox_tile_depth<P>);
    if constexpr (camox_on_tensor_cores<P>) {
      camox_tile_product_mma<P, A_ACROSS && !camox_tile_transposes<P>, B_ACROSS && !camox_tile_transposes<P>>(sums, a_tile,
                                                                                                              b_tile);
    } else {
      camox_tile_product_fma<P>(sums, a_tile, b_tile);
    }
    before = buffer, buffer = buffer == RING - 1 ? 0 : buffer + 1;
  }
}

/* sums += a b^T over the range, rows of a from `a_first`, of b from `b_first` on. ACROSS: k are the rows in memory.
   same: a and b are the same tile. All threads of the block have as many steps. */
template <typename P, bool A_ACROSS, bool B_ACROSS, int RING, int OPERANDS, typename A, typename B>
__device__ __forceinline__ void camox_tile_multiply(camox_tile_sums &sums, camox_tile_ring<RING, OPERANDS> &ring, const A &a,
                                                    int64_t a_first, const B &b, int64_t b_first, camox_tile_range range,
                                                    bool same = OPERANDS == 1) {
  __syncthreads(); /* what the ring held is no longer read */
  if ((sizeof(P) == 4 || camox_on_tensor_cores<P>) && a.usual() && b.usual()) {
    camox_tile_steps<P, A_ACROSS, B_ACROSS, true>(sums, ring, a, a_first, b, b_first, range, same);
  } else {
    camox_tile_steps<P, A_ACROSS, B_ACROSS, false>(sums, ring, a, a_first, b, b_first, range, same);
  }
}

/* What products make, in place of the ring once they are multiplied: [CAMOX_TILE][CAMOX_TILE] floats, whose columns are
   permuted so that pairs as the sums lie, and a column of neighbouring rows, are in different banks. */
#define CAMOX_TILE_STAGE (CAMOX_TILE * CAMOX_TILE)

__device__ __forceinline__ int camox_tile_stage_at(int row, int column) {
  return row * CAMOX_TILE + (column ^ (row % 4 * 8 + row / 4 % 2 * 4));
}

#define CAMOX_TILE_SHARED(buffers, ring, stage) \
  __shared__ camox_tile_ring<buffers> ring;     \
  float *const stage = reinterpret_cast<float *>(&ring)

/* Where the i-th sum of this thread, i even, and the next are in the stage. */
__device__ __forceinline__ int camox_tile_stage_of(int i) {
  return camox_tile_stage_at(camox_tile_row(i / 16, i % 4), camox_tile_column(i / 4 % 4, 0));
}

__device__ __forceinline__ void camox_tile_to_stage(float *stage, const camox_tile_sums &sums) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const float pair[2] = {sums[i / 16][i / 4 % 4][i % 4], sums[i / 16][i / 4 % 4][i % 4 + 1]};
    camox_store_shared(stage + camox_tile_stage_of(i), pair);
  }
}

__device__ __forceinline__ void camox_tile_stage(float *stage, const camox_tile_sums &sums) {
  __syncthreads();
  camox_tile_to_stage(stage, sums);
  __syncthreads();
}

/* V neighbours of a row, from a multiple of V on. */
template <int V>
__device__ __forceinline__ void camox_tile_from_stage(float (&to)[V], const float *stage, int row, int column) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    float part[4];
    camox_load_shared(part, stage + camox_tile_stage_at(row, column + i));
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = part[j];
  }
}

/* The first `rows` and `columns` of the stage to `to`. wide: to and its rows are aligned to 16 bytes, and elements neighbours.
 */
template <int THREADS = CAMOX_TILE_THREADS, typename E>
__device__ __forceinline__ void camox_tile_put(const float *stage, E *to, int64_t row_stride, int64_t column_stride, int rows,
                                               int columns, bool wide) {
  constexpr int V = camox_tile_lanes<E>, across = CAMOX_TILE / V;
#pragma unroll 2
  for (int item = static_cast<int>(threadIdx.x); item < CAMOX_TILE * across; item += THREADS) {
    const int row = item / across, column = item % across * V;
    if (row >= rows || column >= columns) continue;
    float values[V];
    camox_tile_from_stage(values, stage, row, column);
    camox_tile_store(to + row * row_stride + column * column_stride, column_stride, values, columns - column, wide);
  }
}

#endif
