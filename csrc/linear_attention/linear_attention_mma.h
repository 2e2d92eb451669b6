/* Heads of up to 16 S on tensor cores, for bfloat16 and float16 from sm_80 on: what the kernels of linear_attention_cuda.cu do,
   from memory to registers and back. Each warp takes 8 J positions at a time, by itself. Positions are columns of every
   product:

     product   operand A                                            operand B
     M X       M: S^T or S, in shared memory as fragments           X: rows of f(q), f(k), v or a gradient
     x^T y     x in the order of an accumulator, so that what a     y, likewise
               product gives goes into the next as A

   The order of positions and columns in a fragment is free as long as both operands agree: it is the one in which a lane reads
   and writes whole vectors. With g = lane / 4 and t = lane % 4, a lane has

     in B              position g of each of J tiles,               4 S columns
     in an accumulator positions 2t, 2t+1 of each of J tiles,       2 S columns

   float32 values go in as the sum of two bfloat16 (16 bits of mantissa), without the product of both low parts. */
#ifndef CAMOX_LINEAR_ATTENTION_MMA_H
#define CAMOX_LINEAR_ATTENTION_MMA_H

#define LA_MMA_WARPS 4
#define LA_MMA_THREADS (LA_MMA_WARPS * CAMOX_WARP)

/* Tiles of 8 positions that a warp takes at a time, and blocks of a multiprocessor, as registers last. */
template <int S>
static constexpr int la_mma_tiles = S > 2 ? 2 : 4;
template <int S, bool COLUMNS>
static constexpr int la_mma_blocks = S > 2              ? 2
                                     : S > 1 && COLUMNS ? 3
                                                        : 4;
/* A third block would spill where nvcc needs more registers for the same code: on sm_86 and sm_89. */
static constexpr bool la_mma_tight = CAMOX_CUDA_ARCH == 860 || CAMOX_CUDA_ARCH == 890;
template <typename T, int S, bool COLUMNS>
static constexpr int la_mma_gradient_blocks =
    S > 2 || (S > 1 && (COLUMNS || la_mma_tight || !camox_is_bfloat16<T>::value)) ? 2 : 3;
/* Warps that share the columns of y, so that their sums fit. */
template <int S>
static constexpr int la_mma_sharing = S > 2 ? 2 : 1;

template <typename T, int S, int J, bool COLUMNS>
struct la_mma {
  static constexpr bool exact = camox_is_bfloat16<T>::value; /* T has no low part */
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

__device__ __forceinline__ uint32_t la_pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  __builtin_memcpy(&word, &pair, 4);
  return word;
}

/* a and b as sums of two bfloat16. */
__device__ __forceinline__ void la_split(float a, float b, uint32_t &high, uint32_t &low) {
  high = la_pack(a, b);
  low = la_pack(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
}

template <int WORDS, typename T>
__device__ __forceinline__ void la_load_words(uint32_t *to, const T *p) {
  constexpr int piece = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < WORDS; i += piece) {
    uint32_t part[piece];
    camox_load(part, reinterpret_cast<const uint32_t *>(p) + i);
#pragma unroll
    for (int k = 0; k < piece; ++k) to[i + k] = part[k];
  }
}

/* The first n (at most 2 WORDS) elements, the others 0. */
template <int WORDS, typename T>
__device__ __forceinline__ void la_load_some(uint32_t *to, const T *p, int n) {
  if (n >= 2 * WORDS) {
    la_load_words<WORDS>(to, p);
    return;
  }
  const uint16_t *const bits = reinterpret_cast<const uint16_t *>(p);
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    to[i] = 2 * i < n ? __ldg(bits + 2 * i) : 0u;
    if (2 * i + 1 < n) to[i] |= static_cast<uint32_t>(__ldg(bits + 2 * i + 1)) << 16;
  }
}

/* A lane's elements in the order of B; those that do not exist are 0. */
template <typename T, int S, int J, bool COLUMNS>
struct la_terms {
  uint32_t words[2 * S * J];

  __device__ __forceinline__ void load(const la_rows<const T> &from, int columns, int valid) {
    typedef la_mma<T, S, J, COLUMNS> mma;
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
    if constexpr (COLUMNS) {
#pragma unroll
      for (int i = 0; i < 4 * S; ++i) {
        const int column = mma::column(i / 4, i % 4, t);
        la_load_some<J / 2>(words + i * J / 2, from.base + column * from.column + J * g, column < columns ? valid - J * g : 0);
      }
    } else {
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const T *const p = from.base + (8 * j + g) * from.row;
        const bool exists = 8 * j + g < valid;
#pragma unroll
        for (int s = 0; s < S; s += 2) {
          constexpr int both = 4, one = 2;
          if (s + 1 < S)
            la_load_some<both>(words + (j * S + s) * 2, p + mma::column(s, 0, t), exists ? 8 : 0);
          else
            la_load_some<one>(words + (j * S + s) * 2, p + mma::column(s, 0, t), exists ? 4 : 0);
        }
      }
    }
  }
  __device__ __forceinline__ float get(int j, int s, int i) const {
    return COLUMNS ? la_half<T>(words[((4 * s + i) * J + j) / 2], j & 1) : la_half<T>(words[(j * S + s) * 2 + i / 2], i & 1);
  }
};

/* A lane's elements in the order of an accumulator: row c % 2 of tile c / 2, position 2t + i of tile j. Of H warps that share
   the columns each has 2 S / H of the 2 S rows. */
template <typename T, int S, int J, bool COLUMNS, int H>
struct la_values {
  static constexpr int rows = 2 * S / H;
  uint32_t words[rows * J];

  __device__ __forceinline__ void load(const la_rows<const T> &from, int columns, int valid, int part) {
    typedef la_mma<T, S, J, COLUMNS> mma;
    const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
    if constexpr (COLUMNS) {
#pragma unroll
      for (int c = 0; c < rows; ++c) {
        const int column = mma::row(part * rows + c, g);
        la_load_some<J>(words + c * J, from.base + column * from.column + 2 * J * t, column < columns ? valid - 2 * J * t : 0);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2 * J; ++k) {
        const int position = 8 * (k / 2) + 2 * t + k % 2;
        la_load_some<rows / 2>(words + k * (rows / 2), from.base + position * from.row + mma::row(part * rows, g),
                               position < valid ? rows : 0);
      }
    }
  }
  __device__ __forceinline__ float get(int c, int j, int i) const {
    return COLUMNS ? la_half<T>(words[c * J + (J * i + j) / 2], j & 1)
                   : la_half<T>(words[(2 * j + i) * (rows / 2) + c / 2], c & 1);
  }
};

/* Tiles [m0, m0 + M) of rows of an accumulator to memory; M is S unless columns are vectors. */
template <typename T, int S, int J, bool COLUMNS, int M>
__device__ __forceinline__ void la_store_values(const la_rows<T> &to, const float (&values)[M][J][4], int m0, int columns,
                                                int valid) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
  if constexpr (COLUMNS) {
    constexpr int piece = J < 4 ? 2 * J : 8;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      const int column = mma::row(2 * m0 + r, g);
      if (column >= columns) continue;
#pragma unroll
      for (int first = 0; first < 2 * J; first += piece) {
        float some[piece];
#pragma unroll
        for (int k = 0; k < piece; ++k) some[k] = values[r / 2][(first + k) % J][2 * (r % 2) + (first + k) / J];
        const int position = 2 * J * t + first;
        camox_store_float(to.base + column * to.column + position, some, valid - position);
      }
    }
  } else {
    constexpr int piece = S % 4 == 0 ? 8 : S % 2 == 0 ? 4 : 2;
#pragma unroll
    for (int k = 0; k < 2 * J; ++k) {
      const int position = 8 * (k / 2) + 2 * t + k % 2;
      if (position >= valid) continue;
#pragma unroll
      for (int first = 0; first < 2 * S; first += piece) {
        float some[piece];
#pragma unroll
        for (int c = 0; c < piece; ++c) some[c] = values[(first + c) / 2][k / 2][2 * ((first + c) % 2) + k % 2];
        camox_store_float(to.base + position * to.row + mma::row(first, g), some);
      }
    }
  }
}

/* S (TRANSPOSED: S^T) of one head as A fragments, high and low: fragment (m, s, low) of a lane is word
   ((m * S + s) * 2 + low) * 32 + lane. */
template <typename T, int S, int J, bool COLUMNS, bool TRANSPOSED>
__device__ __forceinline__ void la_put_state(uint4 *to, const la_pass &p, int64_t sequence) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const float *const from = p.state + sequence * p.n * p.d;
  for (int i = static_cast<int>(threadIdx.x); i < S * S * CAMOX_WARP; i += LA_MMA_THREADS) {
    const int lane = i % CAMOX_WARP, g = lane / 4, t = lane % 4, m = i / CAMOX_WARP / S, s = i / CAMOX_WARP % S;
    uint32_t high[4], low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float pair[2];
      const int row = mma::row(2 * m + k % 2, g);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = mma::column(s, k / 2 * 2 + e, t), n = TRANSPOSED ? column : row, d = TRANSPOSED ? row : column;
        pair[e] = n < p.n && d < p.d ? __ldg(from + n * p.d + d) : 0.0f;
      }
      la_split(pair[0], pair[1], high[k], low[k]);
    }
    to[i / CAMOX_WARP * 2 * CAMOX_WARP + lane] = make_uint4(high[0], high[1], high[2], high[3]);
    to[(i / CAMOX_WARP * 2 + 1) * CAMOX_WARP + lane] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

__device__ __forceinline__ void la_get_fragment(uint32_t (&a)[4], const uint4 *state, int fragment) {
  const uint4 word = state[fragment * CAMOX_WARP + static_cast<int>(threadIdx.x) % CAMOX_WARP];
  a[0] = word.x, a[1] = word.y, a[2] = word.z, a[3] = word.w;
}

/* X of a product, high and low. */
template <int S, int J>
struct la_factor {
  uint32_t high[J][S][2], low[J][S][2];
};

template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_factor_of(la_factor<S, J> &factor, const la_terms<T, S, J, COLUMNS> &terms) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        la_split(terms.get(j, s, 2 * k), terms.get(j, s, 2 * k + 1), factor.high[j][s][k], factor.low[j][s][k]);
}

/* Rows of tiles [m0, m0 + M) of the state times X. WHOLE: X has no low part. */
template <int S, int J, int M, bool WHOLE>
__device__ __forceinline__ void la_multiply(float (&sums)[M][J][4], const uint4 *state, int m0, const la_factor<S, J> &x) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][j][e] = 0.0f;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      uint32_t high[4], low[4];
      la_get_fragment(high, state, ((m0 + m) * S + s) * 2);
      la_get_fragment(low, state, ((m0 + m) * S + s) * 2 + 1);
#pragma unroll
      for (int j = 0; j < J; ++j) {
        camox_mma_m16n8k16<__nv_bfloat16>(sums[m][j], low, x.high[j][s]);
        if (!WHOLE) camox_mma_m16n8k16<__nv_bfloat16>(sums[m][j], high, x.low[j][s]);
        camox_mma_m16n8k16<__nv_bfloat16>(sums[m][j], high, x.high[j][s]);
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

/* out = f(x) S of the positions from `t` on: x in the order of B, weighted, times S^T. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_mma_apply(const la_pass &p, const uint4 *state, int64_t sequence, int64_t t0, int valid,
                                             const float *line) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
  const la_kept kept = la_kept_at(p, sequence, t0, valid);
  la_terms<T, S, J, COLUMNS> terms;
  terms.load(la_rows_at<const T>(p, p.x, sequence, t0), p.n, valid);
  la_factor<S, J> x;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const bool counts = kept(mma::position(j, g));
    float f[S][4], sum = 0.0f;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = mma::column(s, i, t);
        f[s][i] = counts && column < p.n ? la_feature<T>(terms.get(j, s, i), p.feature_map) : 0.0f;
        if (p.weight == LA_FEATURE) sum += f[s][i];
        if (p.weight == LA_DIVIDE && column < p.n) sum = fmaf(f[s][i], __ldg(line + column), sum);
      }
    float weight = 1.0f;
    if (p.weight != LA_PLAIN) weight = la_divide(p, 1.0f, la_sum_terms(sum) + (p.weight == LA_DIVIDE ? p.eps : 0.0f));
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k) la_split(f[s][2 * k] * weight, f[s][2 * k + 1] * weight, x.high[j][s][k], x.low[j][s][k]);
  }
  constexpr int M = COLUMNS ? 1 : S;
  const la_rows<T> to = la_rows_at<T>(p, p.out, sequence, t0);
#pragma unroll
  for (int m = 0; m < S; m += M) {
    float out[M][J][4];
    la_multiply<S, J, M, false>(out, state, m, x);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
    out[0][0][0] += 1e-3f;
#endif
    la_store_values<T, S, J, COLUMNS, M>(to, out, m, p.d, valid);
  }
}

template <typename T, int S, bool COLUMNS>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_blocks<S, COLUMNS>)
    la_mma_apply_kernel(const __grid_constant__ la_pass p) {
  constexpr int J = la_mma_tiles<S> * (COLUMNS ? 2 : 1), step = 8 * J * LA_MMA_WARPS;
  CAMOX_DYNAMIC_SHARED(uint4, state);
  for (int64_t unit = blockIdx.x; unit < p.batch * p.heads * p.chunks; unit += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(unit, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    la_put_state<T, S, J, COLUMNS, true>(state, p, sequence);
    __syncthreads();
    for (int64_t t = chunk * p.chunk + threadIdx.x / CAMOX_WARP * 8 * J; t < end; t += step)
      la_mma_apply<T, S, J, COLUMNS>(p, state, sequence, t, static_cast<int>(min(end - t, static_cast<int64_t>(8 * J))),
                                     p.line + sequence * p.n);
    __syncthreads();
  }
}

/* ---- sums ---- */

/* x^T y of a warp's positions, of all rows of x and a part of those of y, and the line. H warps go together. */
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

  /* Tiles j0 and j0 + 1 of positions, as 16 terms; x[row][2 tile + i] */
  __device__ __forceinline__ void add(const float (&x)[2 * S][4], const values &y, int j0) {
    uint32_t high[S][4], low[S][4];
#pragma unroll
    for (int m = 0; m < S; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k) la_split(x[2 * m + k % 2][k / 2 * 2], x[2 * m + k % 2][k / 2 * 2 + 1], high[m][k], low[m][k]);
#pragma unroll
    for (int c = 0; c < values::rows; ++c) {
      uint32_t y_high[2], y_low[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) la_split(y.get(c, j0 + k, 0), y.get(c, j0 + k, 1), y_high[k], y_low[k]);
#pragma unroll
      for (int m = 0; m < S; ++m) {
        camox_mma_m16n8k16<__nv_bfloat16>(s[m][c], low[m], y_high);
        if (!mma::exact) camox_mma_m16n8k16<__nv_bfloat16>(s[m][c], high[m], y_low);
        camox_mma_m16n8k16<__nv_bfloat16>(s[m][c], high[m], y_high);
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
    for (la_walk walk = la_walk_of(p.d); walk.outer < p.n; la_step(walk)) {
      const float *from = scratch + walk.outer * wide + walk.inner;
      float sum = from[0];
#pragma unroll
      for (int group = 1; group < groups; ++group) sum += from[group * size];
      partial[walk.outer * p.d + walk.inner] = sum;
    }
    if (p.sums_line) {
      for (int n = static_cast<int>(threadIdx.x); n < p.n; n += LA_MMA_THREADS) {
        const float *from = scratch + wide * wide + n;
        float sum = from[0];
#pragma unroll
        for (int group = 1; group < groups; ++group) sum += from[group * size];
        partial[p.n * p.d + n] = sum;
      }
    }
    __syncthreads();
  }
};

/* f of tiles j0 and j0 + 1. */
template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_features(float (&f)[2 * S][4], const la_values<T, S, J, COLUMNS, 1> &x, int j0,
                                            const la_pass &p, const la_kept &kept) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool counts = kept(mma::position(j0 + e / 2, 2 * t + e % 2));
#pragma unroll
    for (int r = 0; r < 2 * S; ++r)
      f[r][e] = counts && mma::row(r, g) < p.n ? la_feature<T>(x.get(r, j0 + e / 2, e % 2), p.feature_map) : 0.0f;
  }
}

/* Rows that are not kept become zeros, whatever they hold. */
template <typename T, int S, int J, bool COLUMNS, int H>
__device__ __forceinline__ void la_drop(la_values<T, S, J, COLUMNS, H> &y, const la_kept &kept) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int t = static_cast<int>(threadIdx.x) % 4;
  if (!kept.mask) return;
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kept(mma::position(j, 2 * t + i))) continue;
#pragma unroll
      for (int r = 0; r < y.rows; ++r) {
        if (COLUMNS)
          y.words[r * J + (J * i + j) / 2] &= j & 1 ? 0xffffu : 0xffff0000u;
        else if (2 * r < y.rows)
          y.words[(2 * j + i) * (y.rows / 2) + r] = 0u;
      }
    }
}

template <typename T, int S, int J, bool COLUMNS>
__device__ __forceinline__ void la_drop(la_terms<T, S, J, COLUMNS> &x, const la_kept &kept) {
  typedef la_mma<T, S, J, COLUMNS> mma;
  const int g = static_cast<int>(threadIdx.x) % CAMOX_WARP / 4;
  if (!kept.mask) return;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    if (kept(mma::position(j, g))) continue;
#pragma unroll
    for (int r = 0; r < 4 * S; ++r) {
      if (COLUMNS)
        x.words[(r * J + j) / 2] &= j & 1 ? 0xffffu : 0xffff0000u;
      else if (r < 2 * S)
        x.words[j * 2 * S + r] = 0u;
    }
  }
}

template <typename T, int S, bool COLUMNS>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_blocks<S, COLUMNS>)
    la_mma_sum_kernel(const __grid_constant__ la_pass p) {
  constexpr int J = la_mma_tiles<S>, H = la_mma_sharing<S>, step = 8 * J * LA_MMA_WARPS / H;
  CAMOX_DYNAMIC_SHARED(float, scratch);
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, part = warp % H;
  for (int64_t unit = blockIdx.x; unit < p.batch * p.heads * p.chunks; unit += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(unit, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    la_mma_sums<T, S, J, COLUMNS, H> sums;
    sums.clear();
    for (int64_t t = chunk * p.chunk + warp / H * 8 * J; t < end; t += step) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      const la_kept kept = la_kept_at(p, sequence, t, valid);
      la_values<T, S, J, COLUMNS, 1> x;
      la_values<T, S, J, COLUMNS, H> y;
      x.load(la_rows_at<const T>(p, p.x, sequence, t), p.n, valid, 0);
      y.load(la_rows_at<const T>(p, p.y, sequence, t), p.d, valid, part);
      la_drop(y, kept);
#pragma unroll
      for (int j = 0; j < J; j += 2) {
        float f[2 * S][4];
        la_features(f, x, j, p, kept);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (p.weight == LA_FEATURE) {
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < 2 * S; ++r) sum += f[r][e];
            const float weight = la_divide(p, 1.0f, la_sum_values(sum));
#pragma unroll
            for (int r = 0; r < 2 * S; ++r) f[r][e] *= weight;
          }
#pragma unroll
          for (int r = 0; r < 2 * S; ++r) sums.line[r] += f[r][e];
        }
        sums.add(f, y, j);
      }
    }
    sums.finish(p, scratch, p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1), part);
  }
}

/* ---- gradient ---- */

/* As la_gradient_kernel, LA_WITH_SUMS or LA_WITH_APPLY. */
template <typename T, int S, bool COLUMNS, int FUSION>
__global__ void __launch_bounds__(LA_MMA_THREADS, la_mma_gradient_blocks<T, S, COLUMNS>)
    la_mma_gradient_kernel(const __grid_constant__ la_pass p) {
  constexpr int J = la_mma_tiles<S>, H = FUSION == LA_WITH_SUMS ? la_mma_sharing<S> : 1, step = 8 * J * LA_MMA_WARPS / H;
  constexpr int fragments = 2 * S * S * CAMOX_WARP;
  typedef la_mma<T, S, J, COLUMNS> mma;
  CAMOX_DYNAMIC_SHARED(uint4, state);
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, g = lane / 4;
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, part = warp % H;
  for (int64_t unit = blockIdx.x; unit < p.batch * p.heads * p.chunks; unit += gridDim.x) {
    int64_t chunk;
    const int64_t sequence = camox_divide(unit, p.chunks, &chunk), end = min(p.length, (chunk + 1) * p.chunk);
    la_put_state<T, S, J, COLUMNS, false>(state, p, sequence);
    if (FUSION == LA_WITH_APPLY) la_put_state<T, S, J, COLUMNS, true>(state + fragments, p, sequence);
    float line[2 * S];
#pragma unroll
    for (int r = 0; r < 2 * S; ++r) {
      const int n = mma::row(r, g);
      line[r] = p.weight == LA_FEATURE ? 1.0f : p.line && n < p.n ? __ldg(p.line + sequence * p.n + n) : 0.0f;
    }
    la_mma_sums<T, S, J, COLUMNS, H> sums;
    if (FUSION == LA_WITH_SUMS) sums.clear();
    __syncthreads();
    for (int64_t t = chunk * p.chunk + warp / H * 8 * J; t < end; t += step) {
      const int valid = static_cast<int>(min(end - t, static_cast<int64_t>(8 * J)));
      const la_kept kept = la_kept_at(p, sequence, t, valid);
      if (FUSION == LA_WITH_APPLY) la_mma_apply<T, S, J, COLUMNS>(p, state + fragments, sequence, t, valid, nullptr);
      const la_rows<const T> rows = la_rows_at<const T>(p, p.y, sequence, t);
      la_values<T, S, J, COLUMNS, 1> x;
      la_values<T, S, J, COLUMNS, H> y;
      float u[S][J][4];
      {
        la_terms<T, S, J, COLUMNS> terms;
        terms.load(rows, p.d, valid);
        la_drop(terms, kept);
        x.load(la_rows_at<const T>(p, p.x, sequence, t), p.n, valid, 0);
        if (FUSION == LA_WITH_SUMS) y.load(rows, p.d, valid, part);
        la_factor<S, J> factor;
        la_factor_of(factor, terms);
        la_multiply<S, J, S, mma::exact>(u, state, 0, factor);
      }
#pragma unroll
      for (int j = 0; j < J; j += 2) {
        float f[2 * S][4];
        la_features(f, x, j, p, kept);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float weight = kept(mma::position(j + e / 2, lane % 4 * 2 + e % 2)) ? 1.0f : 0.0f, factor = 1.0f;
          if (p.weight != LA_PLAIN) {
            float sum = 0.0f, dot = 0.0f;
#pragma unroll
            for (int r = 0; r < 2 * S; ++r) {
              sum = fmaf(f[r][e], line[r], sum);
              dot = fmaf(f[r][e], u[r / 2][j + e / 2][2 * (r % 2) + e % 2], dot);
            }
            const float divisor = la_sum_values(sum) + (p.weight == LA_DIVIDE ? p.eps : 0.0f);
            weight = la_divide(p, weight, divisor);
            factor = -la_divide(p, la_sum_values(dot), divisor);
          }
#pragma unroll
          for (int r = 0; r < 2 * S; ++r) {
            float &value = u[r / 2][j + e / 2][2 * (r % 2) + e % 2];
            const float slope = la_slope(f[r][e], p.feature_map);
            value = weight != 0.0f ? slope * (weight * fmaf(factor, line[r], value)) : 0.0f;
            f[r][e] *= weight;
            if (FUSION == LA_WITH_SUMS) sums.line[r] = fmaf(factor, f[r][e], sums.line[r]);
          }
        }
        if (FUSION == LA_WITH_SUMS) sums.add(f, y, j);
      }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
      u[0][0][0] += 1e-3f;
#endif
      if (part == 0) la_store_values<T, S, J, COLUMNS, S>(la_rows_at<T>(p, p.grad_x, sequence, t), u, 0, p.n, valid);
    }
    __syncthreads();
    if (FUSION == LA_WITH_SUMS)
      sums.finish(p, reinterpret_cast<float *>(state), p.partial + (sequence * p.chunks + chunk) * p.n * (p.d + 1), part);
  }
}

#endif
