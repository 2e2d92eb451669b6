/* Heads of up to 16 S on tensor cores, from sm_80 on: the kernels of linear_attention_cuda.cu, from memory to registers and back.
   Each warp takes 8 J positions at a time, by itself; positions are columns of every product:

     M X      M: S^T or S, in shared memory as fragments; X: rows of f(q), f(k), v or a gradient, as B
     x^T y    x, y in the order of an accumulator, so that the result of one product is the A of the next

   The order of positions and columns in a fragment is free as long as both sides agree: it is the one in which a lane reads
   and writes whole vectors. With g = lane / 4, t = lane % 4 a lane has

     in B                position g of each of J tiles,           4 S columns
     in an accumulator   positions 2t, 2t+1 of each of J tiles,   2 S columns

   Features and the state are float32 and go in as sums of bfloat16, high part first: of two (16 bits of mantissa) where T is a
   half type, of three (24 bits, which is all of them) where T is float. So does T, but for bfloat16, which is one. A product of
   two sums leaves out the products of parts that are below its last bit:

     parts   half: 2    (0,1) (1,0) (0,0)                         of a bfloat16 (1,0) (0,0)
             float: 3   (0,2) (1,1) (2,0) (0,1) (1,0) (0,0)       small ones first

   A lane's tiles on the way from memory lie in shared memory, in a ring: it copies by cp.async what it will read itself, so that
   no warp waits for another one.

     slot 0 | tile t     -> registers -> products, while the next ones are under way; then tile t + 2 steps
     slot 1 | tile t + 1 step                                                                                 */
#ifndef CAMOX_LINEAR_ATTENTION_MMA_H
#define CAMOX_LINEAR_ATTENTION_MMA_H

#include <float.h>

#define LA_MMA_WARPS 4
#define LA_MMA_THREADS (LA_MMA_WARPS * CAMOX_WARP)

/* Tiles of 8 positions that a warp takes at a time, and blocks of a multiprocessor, as registers last. */
template <typename T, int S>
static constexpr int la_mma_tiles = sizeof(T) == 4 || S > 2 ? 2 : 4;
/* Vectors of positions are 8 bytes at least. */
template <typename T, int S, bool COLUMNS>
static constexpr int la_mma_apply_tiles = COLUMNS && S > 2 ? 4 : la_mma_tiles<T, S>;
template <typename T, int S>
static constexpr int la_mma_apply_blocks = S > 2 ? 2 : 4;
/* Whether a gradient's tiles come through a ring: of larger heads a vector of positions is 4 bytes, which cp.async is not for. */
template <int S>
static constexpr bool la_mma_gradient_ring = S <= 2;
/* Beside sums a third block would spill before sm_90, and where low parts take most registers: of float32 and float16 in rows. */
template <typename T, int S, bool COLUMNS, int FUSION>
static constexpr int la_mma_gradient_blocks =
    S > 2 || (S == 2 && FUSION == LA_WITH_SUMS &&
              (CAMOX_CUDA_ARCH < 900 || sizeof(T) == 4 || !(COLUMNS || camox_is_bfloat16<T>::value)))
        ? 2
        : 3;
/* Sums take more registers than the product with the state, and more again where y has a low part too. */
template <typename T, int S, bool COLUMNS>
static constexpr int la_mma_sum_blocks = S > 2                                                                           ? 2
                                         : S == 2 && !(camox_is_bfloat16<T>::value && COLUMNS && CAMOX_CUDA_ARCH != 860) ? 3
                                                                                                                         : 4;
/* Warps that share the columns of y, so that their sums fit. */
template <int S>
static constexpr int la_mma_sharing = S > 2 ? 2 : 1;
/* Slots of a ring: tiles of a warp that are under way; fewer where the state takes most of shared memory. */
#define LA_MMA_SLOTS 2
template <int S>
static constexpr int la_mma_apply_slots = S > 2 ? 1 : LA_MMA_SLOTS;

template <typename T, int S, int J, bool COLUMNS>
struct la_mma {
  static constexpr int parts = sizeof(T) == 4 ? 3 : 2;                        /* of a feature and of the state */
  static constexpr int value_parts = camox_is_bfloat16<T>::value ? 1 : parts; /* of a T */
  static constexpr int positions = 8 * J;

  /* Column of element i (0 to 3) of step s in B. */
  static __device__ __forceinline__ int column(int s, int i, int t) {
    if (COLUMNS) return 16 * s + 2 * t + (i & 1) + 8 * (i >> 1);
    return s / 2 * 2 + 1 < S ? 32 * (s / 2) + 8 * t + 4 * (s % 2) + i : 16 * s + 4 * t + i;
  }
  /* Column of row g + 8 (c % 2) of tile c / 2 of an accumulator. */
  static __device__ __forceinline__ int row(int c, int g) { return COLUMNS ? 8 * c + g : 2 * S * g + c; }
  static __device__ __forceinline__ int position(int j, int g) { return COLUMNS ? J * g + j : 8 * j + g; }
};

/* The low or high half of a word. */
template <typename T>
__device__ __forceinline__ float la_half(uint32_t word, int high) {
  if constexpr (camox_is_bfloat16<T>::value) return __uint_as_float(high ? word & 0xffff0000u : word << 16);
  T value;
  const uint16_t bits = static_cast<uint16_t>(high ? word >> 16 : word);
  __builtin_memcpy(static_cast<void *>(&value), &bits, 2);
  return camox_to_float(value);
}

/* Element i of words. */
template <typename T>
__device__ __forceinline__ float la_element(const uint32_t *words, int i) {
  if constexpr (sizeof(T) == 4)
    return __uint_as_float(words[i]);
  else
    return la_half<T>(words[i / 2], i & 1);
}

/* Element i becomes 0. */
template <typename T>
__device__ __forceinline__ void la_clear_element(uint32_t *words, int i) {
  if constexpr (sizeof(T) == 4)
    words[i] = 0u;
  else
    words[i / 2] &= i & 1 ? 0xffffu : 0xffff0000u;
}

/* Of each word the low or the high half. */
__device__ __forceinline__ uint32_t la_halves(uint32_t low, uint32_t high, int which) {
  return which ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
}

__device__ __forceinline__ uint32_t la_pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  __builtin_memcpy(&word, &pair, 4);
  return word;
}

/* a and b as sums of bfloat16, the highest part first. */
template <int PARTS>
__device__ __forceinline__ void la_split(float a, float b, uint32_t (&parts)[PARTS]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    parts[part] = la_pack(a, b);
    a -= __uint_as_float(parts[part] << 16), b -= __uint_as_float(parts[part] & 0xffff0000u);
  }
}

/* Pieces of 4, 2 or 1 words in which a vector is loaded. */
template <int WORDS>
static constexpr int la_piece = WORDS % 4 == 0   ? 4
                                : WORDS % 2 == 0 ? 2
                                                 : 1;

template <int WORDS, typename T>
__device__ __forceinline__ void la_load_words(uint32_t *to, const T *p) {
  constexpr int piece = la_piece<WORDS>;
#pragma unroll
  for (int i = 0; i < WORDS; i += piece) {
    uint32_t part[piece];
    camox_load(part, reinterpret_cast<const uint32_t *>(p) + i);
#pragma unroll
    for (int k = 0; k < piece; ++k) to[i + k] = part[k];
  }
}

/* Where a lane's vectors go: into registers. Zeros where a vector does not exist; WHOLE: all do, and nothing is to be looked at. */
template <bool WHOLE>
struct la_to_registers {
  uint32_t *words;

  template <int WORDS, typename T>
  __device__ __forceinline__ void put(int first, const T *p, bool exists) const {
#pragma unroll
    for (int i = 0; i < WORDS && !WHOLE; ++i) words[first + i] = 0u;
    if (WHOLE || exists) la_load_words<WORDS>(words + first, p);
  }
};

/* Or into a slot of the warp's ring: a piece of each lane side by side. One of 4 bytes, which cp.async in csrc/common does not
   copy, at once. */
struct la_to_slot {
  uint32_t *slot;

  template <int WORDS, typename T>
  __device__ __forceinline__ void put(int first, const T *p, bool exists) const {
    constexpr int piece = la_piece<WORDS>;
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
#pragma unroll
    for (int i = 0; i < WORDS; i += piece) {
      uint32_t *const to = slot + (first + i) * CAMOX_WARP + lane * piece;
      const uint32_t *const from = reinterpret_cast<const uint32_t *>(p) + i;
      if constexpr (piece == 4)
        camox_cp_async_16(to, from, exists ? 16 : 0);
      else if constexpr (piece == 2)
        camox_cp_async_8(to, from, exists ? 8 : 0);
      else
        *to = exists ? __ldg(from) : 0u;
    }
  }
};

/* A lane's words out of a slot. VECTOR: those of a vector. */
template <int VECTOR, int WORDS>
__device__ __forceinline__ void la_take(uint32_t (&words)[WORDS], const uint32_t *slot) {
  constexpr int piece = la_piece<VECTOR>;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
#pragma unroll
  for (int i = 0; i < WORDS; i += piece) {
    uint32_t part[piece];
    camox_load_shared(part, slot + i * CAMOX_WARP + lane * piece);
#pragma unroll
    for (int k = 0; k < piece; ++k) words[i + k] = part[k];
  }
}

/* One head of a tensor in memory. The step along its vectors is 1 and the other one fits 32 bits, so that a lane computes an
   address from that of its first element in one multiplication. */
template <typename T, bool COLUMNS>
struct la_lines {
  T *base;
  int step; /* from a column (COLUMNS) or a position to the next */

  __device__ __forceinline__ T *address(int64_t position, int column) const {
    return COLUMNS ? base + position + static_cast<int64_t>(step) * column : base + position * step + column;
  }
  /* Addresses are computed tile by tile: of all columns they would take more registers than there are. */
  __device__ __forceinline__ la_lines at(int64_t position, int column = 0) const {
    la_lines lines = {address(position, column), step};
    camox_compute_late(lines.step);
    return lines;
  }
};

/* A lane's elements in the order of B; those that do not exist are 0. */
template <typename T, int S, int J, bool COLUMNS>
struct la_terms {
  typedef la_mma<T, S, J, COLUMNS> mma;
  static constexpr int vector = (COLUMNS ? J : S > 1 ? 8 : 4) * static_cast<int>(sizeof(T)) / 4; /* words of a vector */
  static constexpr int size = S * J * static_cast<int>(sizeof(T));
  uint32_t words[size];

  __device__ __forceinline__ void load(const la_lines<const T, COLUMNS> &from, int columns, int valid, bool whole) {
    if (COLUMNS && whole) /* a row is one look at one or two vectors, a column one at each of many */
      put_all(la_to_registers<true>{words}, from, columns, valid);
    else
      put_all(la_to_registers<false>{words}, from, columns, valid);
  }
  static __device__ __forceinline__ void copy(uint32_t *slot, const la_lines<const T, COLUMNS> &from, int columns, int valid) {
    put_all(la_to_slot{slot}, from, columns, valid);
  }
  __device__ __forceinline__ void take(const uint32_t *slot) { la_take<vector>(words, slot); }

  template <typename To>
  static __device__ __forceinline__ void put_all(const To &to, const la_lines<const T, COLUMNS> &from, int columns, int valid) {
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
    const la_lines<const T, COLUMNS> first = from.at(mma::position(0, g), mma::column(0, 0, t));
    if constexpr (COLUMNS) {
      const int remaining = J * g < valid ? columns - mma::column(0, 0, t) : 0;
#pragma unroll
      for (int i = 0; i < 4 * S; ++i) {
        const int column = mma::column(i / 4, i % 4, 0);
        to.template put<vector>(i * vector, first.address(0, column), column < remaining);
      }
    } else {
      constexpr int vectors = S > 1 ? S / 2 : 1; /* of a position */
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int i = 0; i < vectors; ++i)
          to.template put<vector>((j * vectors + i) * vector, first.address(8 * j, 32 * i), 8 * j + g < valid);
    }
  }
  /* Elements 2 k and 2 k + 1 of step s, halves, as bfloat16. */
  __device__ __forceinline__ uint32_t pair(int j, int s, int k) const {
    if (!COLUMNS) return words[(j * S + s) * 2 + k];
    return la_halves(words[((4 * s + 2 * k) * J + j) / 2], words[((4 * s + 2 * k + 1) * J + j) / 2], j & 1);
  }
  static __device__ __forceinline__ int index(int j, int s, int i) {
    return COLUMNS ? (4 * s + i) * J + j : (j * S + s) * 4 + i;
  }
  __device__ __forceinline__ float get(int j, int s, int i) const { return la_element<T>(words, index(j, s, i)); }
};

/* A lane's elements in the order of an accumulator: row c % 2 of tile c / 2, position 2t + i of tile j. Of H warps that share
   the columns each has 2 S / H of the 2 S rows. */
template <typename T, int S, int J, bool COLUMNS, int H>
struct la_values {
  typedef la_mma<T, S, J, COLUMNS> mma;
  static constexpr int rows = 2 * S / H;
  static constexpr int vector = (COLUMNS ? 2 * J : rows) * static_cast<int>(sizeof(T)) / 4; /* words of a vector */
  static constexpr int size = rows * J * static_cast<int>(sizeof(T)) / 2;
  uint32_t words[size];

  __device__ __forceinline__ void load(const la_lines<const T, COLUMNS> &from, int columns, int valid, int part, bool whole) {
    if (COLUMNS && whole)
      put_all(la_to_registers<true>{words}, from, columns, valid, part);
    else
      put_all(la_to_registers<false>{words}, from, columns, valid, part);
  }
  static __device__ __forceinline__ void copy(uint32_t *slot, const la_lines<const T, COLUMNS> &from, int columns, int valid,
                                              int part) {
    put_all(la_to_slot{slot}, from, columns, valid, part);
  }
  __device__ __forceinline__ void take(const uint32_t *slot) { la_take<vector>(words, slot); }

  template <typename To>
  static __device__ __forceinline__ void put_all(const To &to, const la_lines<const T, COLUMNS> &from, int columns, int valid,
                                                 int part) {
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
    const la_lines<const T, COLUMNS> first = from.at(mma::position(0, 2 * t), mma::row(part * rows, g));
    if constexpr (COLUMNS) {
      const int remaining = 2 * J * t < valid ? columns - mma::row(part * rows, g) : 0;
#pragma unroll
      for (int c = 0; c < rows; ++c)
        to.template put<vector>(c * vector, first.address(0, mma::row(c, 0)), mma::row(c, 0) < remaining);
    } else {
#pragma unroll
      for (int k = 0; k < 2 * J; ++k) {
        const int position = 8 * (k / 2) + k % 2;
        to.template put<vector>(k * vector, first.address(position, 0), position + 2 * t < valid);
      }
    }
  }
  /* Both positions of tile j, halves, as bfloat16. */
  __device__ __forceinline__ uint32_t pair(int c, int j) const {
    return COLUMNS ? la_halves(words[c * J + j / 2], words[c * J + (J + j) / 2], j & 1)
                   : la_halves(words[2 * j * (rows / 2) + c / 2], words[(2 * j + 1) * (rows / 2) + c / 2], c & 1);
  }
  static __device__ __forceinline__ int index(int c, int j, int i) {
    return COLUMNS ? c * 2 * J + J * i + j : (2 * j + i) * rows + c;
  }
  __device__ __forceinline__ float get(int c, int j, int i) const { return la_element<T>(words, index(c, j, i)); }
};

/* Tiles [m0, m0 + M) of rows of an accumulator to memory; M is S unless columns are vectors. */
template <typename T, int S, int J, bool COLUMNS, int M>
__device__ __forceinline__ void la_store_values(const la_lines<T, COLUMNS> &to, const float (&values)[M][J][4], int m0,
                                                int columns, int valid) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
  const la_lines<T, COLUMNS> first_of_lane = to.at(mma::position(0, 2 * t), mma::row(0, g));
  if constexpr (COLUMNS) {
    constexpr int most = 16 / static_cast<int>(sizeof(T)), piece = 2 * J < most ? 2 * J : most;
#pragma unroll
    for (int first = 0; first < 2 * J; first += piece) {
      const int remaining = 2 * J * t + first < valid ? columns - g : 0;
#pragma unroll
      for (int r = 0; r < 2 * M; ++r) {
        const int row = mma::row(2 * m0 + r, 0);
        if (row >= remaining) continue;
        float some[piece];
#pragma unroll
        for (int k = 0; k < piece; ++k) some[k] = values[r / 2][(first + k) % J][2 * (r % 2) + (first + k) / J];
        camox_store_float(first_of_lane.address(first, row), some);
      }
    }
  } else {
    constexpr int most = 16 / static_cast<int>(sizeof(T)), piece = 2 * S < most ? 2 * S : most;
#pragma unroll
    for (int k = 0; k < 2 * J; ++k) {
      const int position = 8 * (k / 2) + k % 2;
      if (position + 2 * t >= valid) continue;
#pragma unroll
      for (int first = 0; first < 2 * S; first += piece) {
        float some[piece];
#pragma unroll
        for (int c = 0; c < piece; ++c) some[c] = values[(first + c) / 2][k / 2][2 * ((first + c) % 2) + k % 2];
        camox_store_float(first_of_lane.address(position, mma::row(first, 0)), some);
      }
    }
  }
}

/* Of one state, 16 bytes each. */
template <typename T, int S>
static constexpr int la_mma_fragments = la_mma<T, S, 2, false>::parts * S * S * CAMOX_WARP;

/* S (transposed: S^T) of one head as A fragments of all parts: fragment (m, s, part) of a lane is word
   ((m * S + s) * parts + part) * 32 + lane. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_put_state(uint4 *to, const la_pass &p, const float *from, bool transposed) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  for (int i = static_cast<int>(threadIdx.x); i < S * S * CAMOX_WARP; i += LA_MMA_THREADS) {
    const int lane = i % CAMOX_WARP, g = lane / 4, t = lane % 4, m = i / CAMOX_WARP / S, s = i / CAMOX_WARP % S;
    uint32_t a[4][mma::parts];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float pair[2];
      const int row = mma::row(2 * m + k % 2, g);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = mma::column(s, k / 2 * 2 + e, t), n = transposed ? column : row, d = transposed ? row : column;
        pair[e] = n < p.n && d < p.d ? from[n * p.d + d] : 0.0f;
      }
      la_split(pair[0], pair[1], a[k]);
    }
#pragma unroll
    for (int part = 0; part < mma::parts; ++part)
      to[(i / CAMOX_WARP * mma::parts + part) * CAMOX_WARP + lane] = make_uint4(a[0][part], a[1][part], a[2][part], a[3][part]);
  }
}

__device__ __forceinline__ void la_get_fragment(uint32_t (&a)[4], const uint4 *state, int fragment) {
  const uint4 word = state[fragment * CAMOX_WARP + static_cast<int>(threadIdx.x) % CAMOX_WARP];
  a[0] = word.x, a[1] = word.y, a[2] = word.z, a[3] = word.w;
}

/* X of a product in parts. */
template <int S, int J, int PARTS>
struct la_factor {
  uint32_t part[J][S][2][PARTS];

  __device__ __forceinline__ void get(uint32_t (&b)[2], int j, int s, int which) const {
    b[0] = part[j][s][0][which], b[1] = part[j][s][1][which];
  }
};

template <typename T, int S, int J, bool COLUMNS, int PARTS>
__device__ __forceinline__ void la_factor_of(la_factor<S, J, PARTS> &factor, const la_terms<T, S, J, COLUMNS> &terms) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if constexpr (PARTS == 1)
          factor.part[j][s][k][0] = terms.pair(j, s, k);
        else
          la_split(terms.get(j, s, 2 * k), terms.get(j, s, 2 * k + 1), factor.part[j][s][k]);
}

/* Rows of tiles [m0, m0 + M) of the state, in PARTS, times X. */
template <int PARTS, int S, int J, int M, int X_PARTS>
__device__ __forceinline__ void la_multiply(float (&sums)[M][J][4], const uint4 *state, int m0,
                                            const la_factor<S, J, X_PARTS> &x) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][j][e] = 0.0f;
#pragma unroll
    for (int below = PARTS - 1; below >= 0; --below) /* parts of both factors that are below their first ones */
#pragma unroll
      for (int s = 0; s < S; ++s)
#pragma unroll
        for (int part = 0; part <= below; ++part) {
          if (below - part >= X_PARTS) continue;
          uint32_t a[4];
          la_get_fragment(a, state, ((m0 + m) * S + s) * PARTS + part);
#pragma unroll
          for (int j = 0; j < J; ++j) {
            uint32_t b[2];
            x.get(b, j, s, below - part);
            camox_mma_m16n8k16<__nv_bfloat16>(sums[m][j], a, b);
          }
        }
  }
}

/* Sum over the lanes that share a position: in B, in an accumulator. */
__device__ __forceinline__ float la_sum_terms(float x) {
  x += __shfl_xor_sync(CAMOX_FULL_MASK, x, 1);
  return x + __shfl_xor_sync(CAMOX_FULL_MASK, x, 2);
}
__device__ __forceinline__ float la_sum_values(float x) {
#pragma unroll
  for (int other = 4; other < CAMOX_WARP; other *= 2) x += __shfl_xor_sync(CAMOX_FULL_MASK, x, other);
  return x;
}

/* One head of a pass: what stays the same while a block goes over its positions. */
template <typename T, bool COLUMNS>
struct la_head {
  la_lines<const T, COLUMNS> x, y;
  la_lines<T, COLUMNS> grad_x, out;
  la_kept kept;
  __device__ __forceinline__ la_head(const la_pass &p, const la_sequence &at)
      : x(lines(la_rows_at<const T>(p.x, at, 0))),
        y(lines(la_rows_at<const T>(p.y, at, 0))),
        grad_x(lines(la_rows_at<T>(p.grad_x, at, 0))),
        out(lines(la_rows_at<T>(p.out, at, 0))),
        kept(la_kept_at(p, at, 0, 0)) {}
  template <typename E>
  static __device__ __forceinline__ la_lines<E, COLUMNS> lines(const la_rows<E> &rows) {
    return {rows.base, static_cast<int>(COLUMNS ? rows.column : rows.row)};
  }
};

/* Whether a tile has all its positions and columns. */
template <int S, int J>
__device__ __forceinline__ bool la_is_whole(const la_pass &p, int valid) {
  return valid == 8 * J && p.n == 16 * S && p.d == 16 * S;
}

/* The state of one head and its line, which may be NULL. */
struct la_head_state {
  const float *s, *line;
};

/* Whether a kernel of this size has room in shared memory for a state that it adds up. */
template <int S>
static constexpr bool la_mma_adds_chunks = S <= 2;

/* Of one head: as it lies in memory, or the sums of its chunks, to shared memory, which the block of the first chunk writes to
   memory too. */
template <bool ADDS>
__device__ __forceinline__ la_head_state la_state_of(const la_pass &p, int64_t sequence, int64_t chunk, float *sums) {
  if (!ADDS || p.state) return {p.state + sequence * p.n * p.d, p.line ? p.line + sequence * p.n : nullptr};
  const la_state_args &a = p.added;
  const int size = a.n * a.d, row = size + a.n, elements = a.z ? row : size;
  const float *const from = a.partial + sequence * a.stored * row;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += LA_MMA_THREADS) {
    float parts[LA_ADDED_CHUNKS];
#pragma unroll
    for (int k = 0; k < LA_ADDED_CHUNKS; ++k) parts[k] = k < a.chunks ? __ldg(from + k * row + i) : 0.0f;
    double sum = la_initial(a, sequence, i);
#pragma unroll
    for (int k = 0; k < LA_ADDED_CHUNKS; ++k) sum += static_cast<double>(parts[k]);
    sums[i] = static_cast<float>(sum);
    if (chunk == 0) *la_state_element(a, sequence, i) = sums[i];
  }
  __syncthreads();
  return {sums, a.z ? sums + size : nullptr};
}

/* What the features of each column are multiplied by before they are added up, 0 past the last one, to shared memory. */
__device__ __forceinline__ void la_put_line(float *to, const la_pass &p, const float *line, int columns) {
  const int n = static_cast<int>(threadIdx.x); /* columns are fewer than a block's threads */
  if (n < columns) to[n] = n >= p.n ? 0.0f : p.weight == LA_FEATURE ? 1.0f : line ? line[n] : 0.0f;
}

/* f of all `x`, in place. The map is looked at once: elements have no branches. */
template <typename T, int N>
__device__ __forceinline__ void la_apply_feature_map(float (&x)[N], int map) {
  if (map == CAMOX_FEATURE_ELU1) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exponential = la_exp(x[i], T());
      x[i] = x[i] > 0.0f ? x[i] + 1.0f : exponential;
    }
  } else if (map == CAMOX_FEATURE_RELU) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
  }
}

/* 1 / b; for LA_FEATURE of 0 it is 0. Of halves one instruction, without a branch, to which a subnormal number is 0. */
template <typename T>
__device__ __forceinline__ float la_reciprocal(const la_pass &p, float b) {
  if (sizeof(T) == 4) return la_divide(p, 1.0f, b);
  const float reciprocal = camox_reciprocal(b);
  return (p.weight == LA_FEATURE) & (fabsf(b) < FLT_MIN) ? 0.0f : reciprocal;
}

/* out = f(x) S of the positions from `t0` on: x in the order of B, weighted, times S^T. Columns past the last one meet zeros of
   S^T and of the line. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_mma_apply(const la_terms<T, S, J, COLUMNS> &terms, const la_pass &p, const uint4 *state,
                                             const la_head<T, COLUMNS> &head, int64_t t0, int valid, const float *line) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
  const la_kept kept = head.kept.at(t0, valid);
  float f[J * 4 * S]; /* of all tiles, step by step: of one after the other each would wait for its sum */
#pragma unroll
  for (int i = 0; i < J * 4 * S; ++i) f[i] = terms.get(i / (4 * S), i / 4 % S, i % 4);
  la_apply_feature_map<T>(f, p.feature_map);
  if (kept.mask) {
#pragma unroll
    for (int j = 0; j < J; ++j) {
      if (kept(mma::position(j, g))) continue;
#pragma unroll
      for (int i = 0; i < 4 * S; ++i) f[j * 4 * S + i] = 0.0f; /* also in the place of a NaN */
    }
  }
  if (p.weight != LA_PLAIN) {
    float sums[J] = {};
#pragma unroll
    for (int i = 0; i < J * 4 * S; ++i)
      sums[i / (4 * S)] = fmaf(f[i], line[mma::column(i / 4 % S, i % 4, t)], sums[i / (4 * S)]);
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const float weight = la_reciprocal<T>(p, la_sum_terms(sums[j]) + (p.weight == LA_DIVIDE ? p.eps : 0.0f));
#pragma unroll
      for (int i = 0; i < 4 * S; ++i) f[j * 4 * S + i] *= weight;
    }
  }
  la_factor<S, J, mma::parts> x;
#pragma unroll
  for (int i = 0; i < J * 4 * S; i += 2) la_split(f[i], f[i + 1], x.part[i / (4 * S)][i / 4 % S][i / 2 % 2]);
  constexpr int M = COLUMNS ? 1 : S;
  const la_lines<T, COLUMNS> to = head.out.at(t0);
#pragma unroll
  for (int m = 0; m < S; m += M) {
    float out[M][J][4];
    la_multiply<mma::parts>(out, state, m, x);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
    out[0][0][0] += 1e-3f;
#endif
    la_store_values<T, S, J, COLUMNS, M>(to, out, m, p.d, valid);
  }
}

/* f of four positions, each over its sum. Of the lanes g of a position each pair adds up the sum g / 2, in fewer exchanges than
   all of them all sums, and divides once. */
template <typename T, int S>
__device__ __forceinline__ void la_divide_by_sums(float (&f)[2 * S][4], const la_pass &p) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < 8 * S; ++i) sums[i % 4] += f[i / 4][i % 4];
#pragma unroll
  for (int half = 2; half > 0; half /= 2) {
    const bool upper = g & 2 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = upper ? sums[i] : sums[i + half];
      sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(CAMOX_FULL_MASK, other, 8 * half);
    }
  }
  const float weight = la_reciprocal<T>(p, sums[0] + __shfl_xor_sync(CAMOX_FULL_MASK, sums[0], 4));
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float of_position = __shfl_sync(CAMOX_FULL_MASK, weight, 8 * e + t);
#pragma unroll
    for (int r = 0; r < 2 * S; ++r) f[r][e] *= of_position;
  }
}

/* Words of the rings of a block. */
template <typename T, int S, bool COLUMNS>
static constexpr int la_mma_apply_ring =
    la_mma_apply_slots<S> * la_terms<T, S, la_mma_apply_tiles<T, S, COLUMNS>, COLUMNS>::size * LA_MMA_THREADS;

/* out = f(q) S / (f(q) . z + eps). A block has a chunk of a head, a warp of it takes tiles of 8 J positions, each by itself:

     chunk   | warp 0 | warp 1 | warp 2 | warp 3 | warp 0 | ...
     tile    ring -> q -> f(q) / (f(q) . z + eps) as B, in registers -> times S^T -> out

   In shared memory: S^T as fragments, z, the warps' rings; the state where this kernel adds up the chunks. */
template <typename T, int S, bool COLUMNS>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_apply_blocks<T, S>)
    la_mma_apply_kernel(const __grid_constant__ la_pass p) {
  constexpr int J = la_mma_apply_tiles<T, S, COLUMNS>, step = 8 * J * LA_MMA_WARPS, slots = la_mma_apply_slots<S>;
  typedef la_terms<T, S, J, COLUMNS> terms_type;
  constexpr int slot_words = terms_type::size * CAMOX_WARP;
  CAMOX_DYNAMIC_SHARED(uint4, state);
  float *const line = reinterpret_cast<float *>(state + la_mma_fragments<T, S>);
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  uint32_t *const rings = reinterpret_cast<uint32_t *>(line + 16 * S), *const ring = rings + warp * slots * slot_words;
  float *const sums = reinterpret_cast<float *>(rings + la_mma_apply_ring<T, S, COLUMNS>);
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks; item += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(item, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    const la_head<T, COLUMNS> head(p, la_sequence_at(p, sequence));
    const auto copy = [&](int64_t t, uint32_t *slot) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      if (valid > 0) terms_type::copy(slot, head.x.at(t), p.n, valid);
      camox_cp_async_commit();
    };
    const int64_t first = chunk * p.chunk + warp * 8 * J;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) copy(first + slot * step, ring + slot * slot_words);
    const la_head_state of_head = la_state_of<la_mma_adds_chunks<S>>(p, sequence, chunk, sums);
    la_put_state<T, S, J, COLUMNS>(state, p, of_head.s, true);
    la_put_line(line, p, of_head.line, 16 * S);
    __syncthreads();
    uint32_t *slot = ring;
    for (int64_t t = first; t < end; t += step) {
      terms_type terms;
      camox_cp_async_wait<slots - 1>();
      terms.take(slot);
      copy(t + slots * step, slot);
      slot = slot + slot_words < ring + slots * slot_words ? slot + slot_words : ring;
      la_mma_apply(terms, p, state, head, t, static_cast<int>(min(end - t, static_cast<int64_t>(8 * J))), line);
    }
    __syncthreads();
  }
}

/* ---- sums ---- */

/* x^T y of a warp's positions, of all rows of x and a part of those of y, and the line. H warps share them. */
template <typename T, int S, int J, bool COLUMNS, int H>
struct la_mma_sums {
  typedef la_mma<T, S, J, COLUMNS> mma;
  typedef la_values<T, S, J, COLUMNS, H> values;
  float s[S][values::rows][4], line[2 * S];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < S; ++m) {
      line[2 * m] = line[2 * m + 1] = 0.0f;
#pragma unroll
      for (int c = 0; c < values::rows; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][c][e] = 0.0f;
    }
  }

  /* Tiles j0 and j0 + 1 of positions, as 16 terms; x[row][2 tile + i]. Tensor cores cut off what lies below the last bit of a
     sum: float32's are added up here, 16 terms at a time. */
  __device__ __forceinline__ void add(const float (&x)[2 * S][4], const values &y, int j0) {
    constexpr bool fresh = sizeof(T) == 4;
    uint32_t x_parts[S][4][mma::parts];
#pragma unroll
    for (int m = 0; m < S; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k) la_split(x[2 * m + k % 2][k / 2 * 2], x[2 * m + k % 2][k / 2 * 2 + 1], x_parts[m][k]);
#pragma unroll
    for (int c = 0; c < values::rows; ++c) {
      uint32_t y_parts[2][mma::value_parts];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (mma::value_parts == 1)
          y_parts[k][0] = y.pair(c, j0 + k);
        else
          la_split(y.get(c, j0 + k, 0), y.get(c, j0 + k, 1), y_parts[k]);
      }
#pragma unroll
      for (int m = 0; m < S; ++m) {
        float sum[4] = {};
        float (&to)[4] = fresh ? sum : s[m][c];
#pragma unroll
        for (int below = mma::parts - 1; below >= 0; --below)
#pragma unroll
          for (int part = 0; part <= below; ++part) {
            if (below - part >= mma::value_parts) continue;
            const uint32_t (&xs)[4][mma::parts] = x_parts[m];
            const uint32_t a[4] = {xs[0][part], xs[1][part], xs[2][part], xs[3][part]};
            const uint32_t b[2] = {y_parts[0][below - part], y_parts[1][below - part]};
            camox_mma_m16n8k16<__nv_bfloat16>(to, a, b);
          }
#pragma unroll
        for (int e = 0; e < 4 && fresh; ++e) s[m][c][e] += sum[e];
      }
    }
  }

  /* Adds up the warps in rising order and writes the chunk's part; shared memory is free and stays so. */
  __device__ __forceinline__ void finish(const la_pass &p, float *scratch, float *partial, int part) {
    constexpr int wide = 16 * S, size = wide * (wide + 1), groups = LA_MMA_WARPS / H;
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
    float *const mine = scratch + static_cast<int>(threadIdx.x) / CAMOX_WARP / H * size;
#pragma unroll
    for (int r = 0; r < 2 * S; ++r) {
      const int row = mma::row(r, g);
#pragma unroll
      for (int c = 0; c < values::rows; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          mine[row * wide + mma::row(part * values::rows + c, 2 * t + i)] = s[r / 2][c][2 * (r % 2) + i];
      const float sum = la_sum_terms(line[r]);
      if (t == 0 && part == 0) mine[wide * wide + row] = sum;
    }
    __syncthreads();
#pragma unroll 2
    for (la_iterator it = la_iterator_of(p.d); it.outer < p.n; la_step(it)) {
      const float *from = scratch + it.outer * wide + it.inner;
      float sum = from[0];
#pragma unroll
      for (int group = 1; group < groups; ++group) sum += from[group * size];
      partial[it.outer * p.d + it.inner] = sum;
    }
    const int n = static_cast<int>(threadIdx.x); /* columns are fewer than a block's threads */
    if (p.sums_line && n < p.n) {
      const float *from = scratch + wide * wide + n;
      float sum = from[0];
#pragma unroll
      for (int group = 1; group < groups; ++group) sum += from[group * size];
      partial[p.n * p.d + n] = sum;
    }
    __syncthreads();
  }
};

/* Which of a lane's positions in an accumulator are kept: bit 2 j + i is that of 2t + i of tile j. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ unsigned la_kept_values(const la_kept &kept) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < 2 * J; ++k)
    if (kept(la_mma<T, S, J, COLUMNS>::position(k / 2, 2 * t + k % 2))) bits |= 1u << k;
  return bits;
}

/* f of tiles j0 and j0 + 1; of positions that are not kept and of columns past the last one it is 0. all: none is. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_features(float (&f)[2 * S][4], const la_values<T, S, J, COLUMNS, 1> &x, int j0,
                                            const la_pass &p, unsigned kept, bool all) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int g = static_cast<int>(threadIdx.x) % CAMOX_WARP / 4;
  float values[8 * S];
#pragma unroll
  for (int i = 0; i < 8 * S; ++i) values[i] = x.get(i / 4, j0 + i % 4 / 2, i % 2);
  la_apply_feature_map<T>(values, p.feature_map);
#pragma unroll
  for (int i = 0; i < 8 * S; ++i) f[i / 4][i % 4] = values[i];
  if (all) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool counts = kept >> (2 * j0 + e) & 1;
#pragma unroll
    for (int r = 0; r < 2 * S; ++r)
      if (!counts || mma::row(r, g) >= p.n) f[r][e] = 0.0f;
  }
}

/* Positions that are not kept become zeros, whatever they hold. */
template <typename T, int S, int J, bool COLUMNS, int H>
__device__ __forceinline__ void la_drop(la_values<T, S, J, COLUMNS, H> &y, unsigned kept) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kept >> (2 * j + i) & 1) continue;
#pragma unroll
      for (int c = 0; c < y.rows; ++c) la_clear_element<T>(y.words, y.index(c, j, i));
    }
}

template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_drop(la_terms<T, S, J, COLUMNS> &x, const la_kept &kept) {
  const int g = static_cast<int>(threadIdx.x) % CAMOX_WARP / 4;
  if (!kept.mask) return;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    if (kept(la_mma<T, S, J, COLUMNS>::position(j, g))) continue;
#pragma unroll
    for (int i = 0; i < 4 * S; ++i) la_clear_element<T>(x.words, x.index(j, i / 4, i % 4));
  }
}

template <typename T, int S, bool COLUMNS>
static constexpr int la_mma_sum_ring = LA_MMA_SLOTS * LA_MMA_THREADS *
                                       (la_values<T, S, la_mma_tiles<T, S>, COLUMNS, 1>::size +
                                        la_values<T, S, la_mma_tiles<T, S>, COLUMNS, la_mma_sharing<S>>::size);

/* A chunk's part of S = f(k)^T v and z. A block has a chunk of a head; H warps share tiles of 8 J positions and the columns of v:

     chunk   | warps 0 to H - 1 | the next H | ...
     tile    ring -> k, v in the order of an accumulator -> f(k) as A, v as B, in registers -> sums of 16 S x 16 S / H, in registers

   The sums of the warps are added in shared memory, where the rings lay, at the end, in rising order. */
template <typename T, int S, bool COLUMNS>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_sum_blocks<T, S, COLUMNS>)
    la_mma_sum_kernel(const __grid_constant__ la_pass p) {
  constexpr int J = la_mma_tiles<T, S>, H = la_mma_sharing<S>, step = 8 * J * LA_MMA_WARPS / H, slots = LA_MMA_SLOTS;
  typedef la_values<T, S, J, COLUMNS, 1> x_type;
  typedef la_values<T, S, J, COLUMNS, H> y_type;
  constexpr int x_words = x_type::size * CAMOX_WARP, slot_words = x_words + y_type::size * CAMOX_WARP;
  CAMOX_DYNAMIC_SHARED(float, scratch);
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, part = warp % H;
  uint32_t *const ring = reinterpret_cast<uint32_t *>(scratch) + warp * slots * slot_words;
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks; item += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(item, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    const la_head<T, COLUMNS> head(p, la_sequence_at(p, sequence));
    const auto copy = [&](int64_t t, uint32_t *slot) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      if (valid > 0) {
        x_type::copy(slot, head.x.at(t), p.n, valid, 0);
        y_type::copy(slot + x_words, head.y.at(t), p.d, valid, part);
      }
      camox_cp_async_commit();
    };
    const int64_t first = chunk * p.chunk + warp / H * 8 * J;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) copy(first + slot * step, ring + slot * slot_words);
    la_mma_sums<T, S, J, COLUMNS, H> sums;
    sums.clear();
    uint32_t *slot = ring;
    for (int64_t t = first; t < end; t += step) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      const bool whole = la_is_whole<S, J>(p, valid), all = whole && !head.kept.mask;
      const unsigned kept = all ? ~0u : la_kept_values<T, S, J, COLUMNS>(head.kept.at(t, valid));
      x_type x;
      y_type y;
      camox_cp_async_wait<slots - 1>();
      x.take(slot);
      y.take(slot + x_words);
      copy(t + slots * step, slot);
      slot = slot + slot_words < ring + slots * slot_words ? slot + slot_words : ring;
      if (head.kept.mask) la_drop(y, kept);
#pragma unroll
      for (int j = 0; j < J; j += 2) {
        float f[2 * S][4];
        la_features(f, x, j, p, kept, all);
        if (p.weight == LA_FEATURE) la_divide_by_sums<T, S>(f, p);
        if (p.sums_line) {
#pragma unroll
          for (int i = 0; i < 8 * S; ++i) sums.line[i / 4] += f[i / 4][i % 4];
        }
        sums.add(f, y, j);
      }
    }
    __syncthreads();
    sums.finish(p, scratch, p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1), part);
  }
}

/* ---- gradient ---- */

/* 1 / divisor and -dot / divisor of four positions, sums: this lane's parts of the divisors, then those of the dots. Of the
   lanes g of a position each adds up the sum g, in fewer exchanges than all of them all sums, and divides once:

     lane g         0       1       2       3       4     5     6     7
     adds up     sum 0   sum 1   sum 2   sum 3   dot 0 dot 1 dot 2 dot 3
     divides         1       1       1       1  -dot 0   ...               by sum g % 4 */
__device__ __forceinline__ void la_gradient_weights(float (&weight)[4], float (&factor)[4], float (&sums)[8],
                                                    const la_pass &p) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = g & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = upper ? sums[i] : sums[i + half];
      sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(CAMOX_FULL_MASK, other, 4 * half);
    }
  }
  const float divisor = __shfl_sync(CAMOX_FULL_MASK, sums[0], lane % 16) + (p.weight == LA_DIVIDE ? p.eps : 0.0f);
  const float quotient = la_divide(p, g < 4 ? 1.0f : -sums[0], divisor);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    weight[e] = __shfl_sync(CAMOX_FULL_MASK, quotient, 4 * e + t);
    factor[e] = __shfl_sync(CAMOX_FULL_MASK, quotient, 4 * (e + 4) + t);
  }
}

/* Tiles j and j + 1 of u, times f'(x). The map is looked at once: elements have no branches. */
template <int S, int J>
__device__ __forceinline__ void la_apply_derivative(float (&u)[S][J][4], int j, const float (&f)[2 * S][4], int map) {
  if (map == CAMOX_FEATURE_IDENTITY) return;
  const bool elu1 = map == CAMOX_FEATURE_ELU1;
#pragma unroll
  for (int r = 0; r < 2 * S; ++r)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      u[r / 2][j + e / 2][2 * (r % 2) + e % 2] *=
          la_feature_derivative(f[r][e], elu1 ? CAMOX_FEATURE_ELU1 : CAMOX_FEATURE_RELU);
}

/* What a lane reads of a tile for its gradients, and one slot of it. */
template <typename T, int S, bool COLUMNS, int FUSION>
struct la_mma_gradient_tile {
  static constexpr int J = la_mma_tiles<T, S>, H = FUSION == LA_WITH_SUMS ? la_mma_sharing<S> : 1;
  la_terms<T, S, J, COLUMNS> terms;    /* y as B */
  la_values<T, S, J, COLUMNS, 1> x;    /* x in the order of an accumulator */
  la_values<T, S, J, COLUMNS, H> y;    /* LA_WITH_SUMS: y in that order */
  la_terms<T, S, J, COLUMNS> features; /* LA_WITH_APPLY: x as B */
  static constexpr int x_place = sizeof(terms) / 4 * CAMOX_WARP, last_place = x_place + sizeof(x) / 4 * CAMOX_WARP;
  static constexpr int slot_words = last_place + (FUSION == LA_WITH_SUMS ? sizeof(y) : sizeof(features)) / 4 * CAMOX_WARP;
};

template <typename T, int S, bool COLUMNS, int FUSION>
static constexpr int la_mma_gradient_ring_words =
    la_mma_gradient_ring<S> ? LA_MMA_WARPS * la_mma_gradient_tile<T, S, COLUMNS, FUSION>::slot_words : 0;

/* LA_WITH_SUMS: the gradient of q, and a chunk's part of dS and dz. LA_WITH_APPLY: the gradients of k and v. Blocks, warps and
   tiles are those of la_mma_sum_kernel; of a tile

     LA_WITH_APPLY    out = f(x) S, as la_mma_apply_kernel, before all else
     u = S y^T        y as B
     f = f(x)         x in the order of an accumulator, which is that of u: what follows is element by element
     weight, factor   of each position, from sums over the lanes that share it
     grad_x           f' weight (u + factor line)
     LA_WITH_SUMS     dS += (f weight)^T y, y in the order of an accumulator

   In shared memory: the state as fragments, for LA_WITH_APPLY transposed too, the line, the warps' rings of one slot, which holds
   y and x in each order that they are read in; the state where this kernel adds up the chunks. */
template <typename T, int S, bool COLUMNS, int FUSION>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_gradient_blocks<T, S, COLUMNS, FUSION>)
    la_mma_gradient_kernel(const __grid_constant__ la_pass p) {
  typedef la_mma_gradient_tile<T, S, COLUMNS, FUSION> tile;
  constexpr int J = tile::J, H = tile::H, step = 8 * J * LA_MMA_WARPS / H;
  constexpr int fragments = la_mma_fragments<T, S>;
  constexpr bool has_ring = la_mma_gradient_ring<S>;
  typedef la_mma<T, S, J, COLUMNS> mma;
  CAMOX_DYNAMIC_SHARED(uint4, state);
  float *const line = reinterpret_cast<float *>(state + (FUSION == LA_WITH_APPLY ? 2 : 1) * fragments);
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4;
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, part = warp % H;
  uint32_t *const rings = reinterpret_cast<uint32_t *>(line + 16 * S), *const slot = rings + warp * tile::slot_words;
  float *const added = reinterpret_cast<float *>(rings + la_mma_gradient_ring_words<T, S, COLUMNS, FUSION>);
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * p.chunks; item += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(item, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    const la_head<T, COLUMNS> head(p, la_sequence_at(p, sequence));
    const auto copy = [&](int64_t t) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      if (valid > 0) {
        decltype(tile::terms)::copy(slot, head.y.at(t), p.d, valid);
        decltype(tile::x)::copy(slot + tile::x_place, head.x.at(t), p.n, valid, 0);
        if constexpr (FUSION == LA_WITH_SUMS)
          decltype(tile::y)::copy(slot + tile::last_place, head.y.at(t), p.d, valid, part);
        else
          decltype(tile::features)::copy(slot + tile::last_place, head.x.at(t), p.n, valid);
      }
      camox_cp_async_commit();
    };
    const int64_t first = chunk * p.chunk + warp / H * 8 * J;
    if constexpr (has_ring) copy(first);
    const la_head_state of_head =
        la_state_of < FUSION == LA_WITH_APPLY && la_mma_adds_chunks < S >> (p, sequence, chunk, added);
#pragma unroll 1
    for (int i = 0; i < (FUSION == LA_WITH_APPLY ? 2 : 1); ++i)
      la_put_state<T, S, J, COLUMNS>(state + i * fragments, p, of_head.s, i == 1);
    la_put_line(line, p, of_head.line, 16 * S);
    la_mma_sums<T, S, J, COLUMNS, H> sums;
    if (FUSION == LA_WITH_SUMS) sums.clear();
    __syncthreads();
    for (int64_t t = first; t < end; t += step) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      const la_kept kept = FUSION == LA_WITH_SUMS ? la_kept{valid, nullptr, 0} : head.kept.at(t, valid); /* q has no mask */
      const bool whole = la_is_whole<S, J>(p, valid), all = whole && !kept.mask;
      const unsigned kept_values = all ? ~0u : la_kept_values<T, S, J, COLUMNS>(kept);
      la_terms<T, S, J, COLUMNS> terms;
      la_values<T, S, J, COLUMNS, 1> x;
      la_values<T, S, J, COLUMNS, H> y;
      {
        la_terms<T, S, J, COLUMNS> features;
        if constexpr (has_ring) {
          camox_cp_async_wait<0>();
          terms.take(slot);
          x.take(slot + tile::x_place);
          if (FUSION == LA_WITH_SUMS) y.take(slot + tile::last_place);
          if (FUSION == LA_WITH_APPLY) features.take(slot + tile::last_place);
          copy(t + step);
        } else {
          if (FUSION == LA_WITH_APPLY) features.load(head.x.at(t), p.n, valid, whole);
        }
        if (FUSION == LA_WITH_APPLY) la_mma_apply(features, p, state + fragments, head, t, valid, line);
      }
      if constexpr (!has_ring) {
        terms.load(head.y.at(t), p.d, valid, whole);
        x.load(head.x.at(t), p.n, valid, 0, whole);
        if (FUSION == LA_WITH_SUMS) y.load(head.y.at(t), p.d, valid, part, whole);
      }
      float u[S][J][4];
      {
        la_drop(terms, kept);
        la_factor<S, J, mma::value_parts> factor;
        la_factor_of(factor, terms);
        la_multiply<mma::parts>(u, state, 0, factor);
      }
#pragma unroll
      for (int j = 0; j < J; j += 2) {
        float f[2 * S][4], weight[4] = {1.0f, 1.0f, 1.0f, 1.0f}, factor[4] = {1.0f, 1.0f, 1.0f, 1.0f}, of_line[2 * S];
        la_features(f, x, j, p, kept_values, all);
#pragma unroll
        for (int r = 0; r < 2 * S; ++r) of_line[r] = line[mma::row(r, g)];
        if (p.weight != LA_PLAIN) {
          float parts[8] = {};
#pragma unroll
          for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int r = 0; r < 2 * S; ++r) {
              parts[e] = fmaf(f[r][e], of_line[r], parts[e]);
              parts[4 + e] = fmaf(f[r][e], u[r / 2][j + e / 2][2 * (r % 2) + e % 2], parts[4 + e]);
            }
          la_gradient_weights(weight, factor, parts, p);
        }
        if (!all) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!(kept_values >> (2 * j + e) & 1)) weight[e] = 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int r = 0; r < 2 * S; ++r) {
            float &value = u[r / 2][j + e / 2][2 * (r % 2) + e % 2];
            value = weight[e] != 0.0f ? weight[e] * fmaf(factor[e], of_line[r], value) : 0.0f;
          }
        la_apply_derivative<S, J>(u, j, f, p.feature_map);
        if (FUSION == LA_WITH_SUMS) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int r = 0; r < 2 * S; ++r) {
              f[r][e] *= weight[e];
              sums.line[r] = fmaf(factor[e], f[r][e], sums.line[r]);
            }
          sums.add(f, y, j);
        }
      }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
      u[0][0][0] += 1e-3f;
#endif
      if (part == 0) la_store_values<T, S, J, COLUMNS, S>(head.grad_x.at(t), u, 0, p.n, valid);
    }
    __syncthreads();
    if (FUSION == LA_WITH_SUMS)
      sums.finish(p, reinterpret_cast<float *>(state), p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1), part);
  }
}

#endif
