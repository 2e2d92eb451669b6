/* Causal linear_attention on tensor cores: bfloat16 heads of up to 64 columns, from sm_80 on. The notation is that of causal.h.

   A sequence of a head is cut into segments of whole chunks of 64 positions. A block walks through a segment from chunk to chunk,
   with the state in registers; what came before the segment is its record:

     sum    x^T y of each segment -> its record                   x: f(k) or r f(q);  y: v or g
     scan   record = the state before the segment (after it, backward): causal_cuda.cuh
     walk   of each chunk   C = A B^T, what a row does not see left out;   result = C V + A M;   then M += x^T y

                          rows      A      B      V       M                 a block of 4 warps, a chunk:
       forward            queries   f(q)   f(k)   v       S     out / r     +---------+   rows 0-15   of the result, of S: warp 0
       backward, da       queries   g      v      f(k)    S^T               |\        |   rows 16-31                        warp 1
       backward, dv       keys      f(k)   r f(q) g       dS                |C \      |   ...          columns of C up to those
       backward, db       keys      v      g      r f(q)  dS^T  C less      +---------+   rows 48-63   of the row's warp: 5 of 8
                                                             out . g of the column

     shared memory, 8 KB each:  | x, high | x, low | y | M, high | M, low |, as ldmatrix takes them, straight or transposed
     registers:                 A, of a warp's own rows, straight from memory; C, which is the A of the next product as it lies;
                                M; the next chunk's x and y, which are asked for before M += x^T y and come meanwhile

   Features, C and the state go in as sums of two bfloat16, high and low part, 16 bits of mantissa; q, k, v and g, and features that
   are no more than they, as they are. A sum over the features or positions of a row is one more column of a product, whose other
   factor is 1. The rows of z_t, which the gradient of q needs, are products of f(k) with a triangle of ones. */
#ifndef CAMOX_LINEAR_ATTENTION_CAUSAL_MMA_CUH
#define CAMOX_LINEAR_ATTENTION_CAUSAL_MMA_CUH

#define CAUSAL_MMA_DIM 64 /* columns of features and of values, at most */
#define CAUSAL_MMA_THREADS 128
#define CAUSAL_MMA_BLOCKS 768 /* which fill the largest GPU about twice */
#define CAUSAL_TILE_WORDS (CAUSAL_ROWS * CAUSAL_MMA_DIM / 2)
#define CAUSAL_TILES (CAUSAL_MMA_DIM / 8) /* of 8 columns in an accumulator */
#define CAUSAL_STEPS (CAUSAL_MMA_DIM / 16)

typedef enum { CAUSAL_FORWARD = 0, CAUSAL_QUERY_GRADIENT = 1, CAUSAL_KEY_GRADIENT = 2 } causal_walk;

/* ---- tiles in shared memory: 64 rows of 8 pieces of 16 bytes; piece p of row r lies at place p ^ r % 8 ---- */

/* Features, or the state, of which `low` is what `high` leaves out; NULL where it leaves out nothing. */
struct causal_tile {
  uint32_t *high, *low;
};

struct causal_mma_shared {
  causal_tile x, y, state;
  float *line, *shift; /* z or dz; out . g of a chunk's queries */
};

static constexpr size_t causal_mma_shared_bytes = (5 * CAUSAL_TILE_WORDS + CAUSAL_MMA_DIM + CAUSAL_ROWS) * 4;
static_assert(causal_mma_shared_bytes <= 48 * 1024, "what every GPU gives without being asked");

__device__ __forceinline__ causal_mma_shared causal_mma_shared_in(uint32_t *shared, bool has_low) {
  uint32_t *const x = shared, *const y = x + 2 * CAUSAL_TILE_WORDS, *const state = y + CAUSAL_TILE_WORDS;
  float *const line = reinterpret_cast<float *>(state + 2 * CAUSAL_TILE_WORDS);
  return {{x, has_low ? x + CAUSAL_TILE_WORDS : nullptr},
          {y, nullptr},
          {state, state + CAUSAL_TILE_WORDS},
          line,
          line + CAUSAL_MMA_DIM};
}

__device__ __forceinline__ int causal_tile_word(int row, int piece) { return row * 32 + (piece ^ row % 8) * 4; }

/* B of step k, in fragments: [pair of tiles of 8 columns][tile]. */
typedef uint32_t causal_fragments[CAUSAL_STEPS][2][2];

/* Those of a pair. ACROSS: the tile's rows are terms; else columns. */
template <bool ACROSS>
__device__ __forceinline__ void causal_load_pair(uint32_t (&b)[2][2], const uint32_t *tile, int k, int pair) {
  const int lane = causal_lane();
  uint32_t words[4];
  if (ACROSS)
    camox_ldmatrix_x4<true>(words, tile + causal_tile_word(16 * k + lane % 16, 2 * pair + lane / 16));
  else
    camox_ldmatrix_x4<false>(words, tile + causal_tile_word(16 * pair + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = words[i];
}

template <bool ACROSS>
__device__ __forceinline__ void causal_load_fragments(causal_fragments &b, const uint32_t *tile, int k) {
#pragma unroll
  for (int pair = 0; pair < CAUSAL_STEPS; ++pair) causal_load_pair<ACROSS>(b[pair], tile, k, pair);
}

/* Sixteen rows and terms of A; `low` counts where has_low. */
struct causal_rows16 {
  uint32_t high[4], low[4];
};

/* That of 16 rows of a tile's transpose from row 16 m on: the tile's rows are terms. */
__device__ __forceinline__ void causal_transposed(uint32_t (&a)[4], const uint32_t *tile, int k, int m) {
  const int lane = causal_lane();
  camox_ldmatrix_x4<true>(a, tile + causal_tile_word(16 * k + lane % 8 + lane / 16 * 8, 2 * m + lane / 8 % 2));
}

__device__ __forceinline__ void causal_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  camox_mma_m16n8k16<__nv_bfloat16>(d, a, b);
}

typedef float causal_sums[CAUSAL_TILES][4];

__device__ __forceinline__ void causal_clear(causal_sums &sums) {
#pragma unroll
  for (int i = 0; i < 4 * CAUSAL_TILES; ++i) sums[i / 4][i % 4] = 0.0f;
}

__device__ __forceinline__ void causal_mma_row(causal_sums &sums, const uint32_t (&a)[4], const causal_fragments &b) {
#pragma unroll
  for (int n = 0; n < CAUSAL_TILES; ++n) causal_mma(sums[n], a, b[n / 2][n % 2]);
}

/* sums += a B of step k, small terms first. */
template <bool ACROSS>
__device__ __forceinline__ void causal_add_product(causal_sums &sums, const causal_rows16 &a, bool has_low,
                                                   const causal_tile &tile, int k) {
  causal_fragments high, low;
  causal_load_fragments<ACROSS>(high, tile.high, k);
  if (tile.low) causal_load_fragments<ACROSS>(low, tile.low, k);
  if (has_low) causal_mma_row(sums, a.low, high);
  if (tile.low) causal_mma_row(sums, a.high, low);
  causal_mma_row(sums, a.high, high);
}

/* Two tiles of C = A B^T, whose terms are all columns. Parts have sums of their own, so that fewer wait for one another. */
__device__ __forceinline__ void causal_multiply(float (&c)[2][4], const causal_rows16 (&a)[CAUSAL_STEPS], bool has_low,
                                                const causal_tile &tile, int block) {
  float small[2][2][4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k) {
    uint32_t high[2][2], low[2][2];
    causal_load_pair<false>(high, tile.high, k, block);
    if (tile.low) causal_load_pair<false>(low, tile.low, k, block);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      causal_mma(c[n], a[k].high, high[n]);
      if (has_low) causal_mma(small[0][n], a[k].low, high[n]);
      if (tile.low) causal_mma(small[1][n], a[k].high, low[n]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i / 4][i % 4] += small[0][i / 4][i % 4] + small[1][i / 4][i % 4];
}

/* Fragment of B whose first column is 16 numbers of a row from `from` on, and whose others are 0. */
__device__ __forceinline__ void causal_column(uint32_t (&high)[2], uint32_t (&low)[2], const float *from) {
  const int t = causal_lane() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float two[2];
    uint32_t parts[2];
    camox_load_shared(two, from + 2 * t + 8 * i);
    la_split(two[0], two[1], parts);
    high[i] = causal_lane() < 4 ? parts[0] : 0u, low[i] = causal_lane() < 4 ? parts[1] : 0u;
  }
}

__device__ __forceinline__ void causal_add_column(float (&sums)[4], const causal_rows16 &a, bool has_low, const float *from) {
  uint32_t high[2], low[2];
  causal_column(high, low, from);
  if (has_low) causal_mma(sums, a.low, high);
  causal_mma(sums, a.high, low);
  causal_mma(sums, a.high, high);
}

/* Of rows g and g + 8: their sums over all lanes that share them. */
__device__ __forceinline__ void causal_sum_rows(float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) sums[i] = camox_team_sum(sums[i], 4);
}

/* Whether features have a low part; scaled: times r. */
__device__ __forceinline__ bool causal_has_low(const causal_pass &p, bool scaled) {
  return scaled || p.feature_map == CAMOX_FEATURE_ELU1 || p.normalize == CAMOX_NORMALIZE_FEATURE;
}

/* ---- the state ---- */

/* Rows 16 w + g and + 8 of M and, in the lanes whose t is 0, of the line. */
struct causal_state {
  causal_sums s;
  float line[4];

  __device__ __forceinline__ void clear() {
    causal_clear(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) line[i] = 0.0f;
  }

  /* Calls visit(place of two numbers in a record, tile, half of the tile) */
  template <typename Visit>
  static __device__ __forceinline__ void each(const causal_pass &p, const Visit &visit) {
    const int g = causal_lane() / 4, t = causal_lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * causal_warp() + g + 8 * half;
#pragma unroll
      for (int n = 0; n < CAUSAL_TILES; ++n)
        if (row < p.n && 8 * n < p.d) visit(row * p.d + 8 * n + 2 * t, n, half);
    }
  }

  __device__ __forceinline__ void load(const causal_pass &p, const float *record) {
    clear();
    each(p, [&](int place, int n, int half) {
      float two[2];
      camox_load(two, record + place);
      s[n][2 * half] = two[0], s[n][2 * half + 1] = two[1];
    });
    const int row = 16 * causal_warp() + causal_lane() / 4;
    if (p.normalize != CAMOX_NORMALIZE_SUM || causal_lane() % 4 != 0) return;
    if (row < p.n) line[0] = record[p.n * p.d + row];
    if (row + 8 < p.n) line[2] = record[p.n * p.d + row + 8];
  }

  __device__ __forceinline__ void store(const causal_pass &p, float *record) const {
    each(p, [&](int place, int n, int half) {
      const float two[2] = {s[n][2 * half], s[n][2 * half + 1]};
      camox_store(record + place, two);
    });
    const int row = 16 * causal_warp() + causal_lane() / 4;
    if (p.normalize != CAMOX_NORMALIZE_SUM || causal_lane() % 4 != 0) return;
    if (row < p.n) record[p.n * p.d + row] = line[0];
    if (row + 8 < p.n) record[p.n * p.d + row + 8] = line[2];
  }

  __device__ __forceinline__ void put(const causal_mma_shared &shared) const {
    const int g = causal_lane() / 4, t = causal_lane() % 4, row = 16 * causal_warp() + g;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < CAUSAL_TILES; ++n) {
        uint32_t parts[2];
        la_split(s[n][2 * half], s[n][2 * half + 1], parts);
        const int word = causal_tile_word(row + 8 * half, n) + t;
        shared.state.high[word] = parts[0], shared.state.low[word] = parts[1];
      }
    if (t == 0) shared.line[row] = line[0], shared.line[row + 8] = line[2];
  }

  /* M += x^T y of a chunk, and the line with it; shifted: line -= (out . g) x. */
  __device__ __forceinline__ void add(const causal_pass &p, const causal_mma_shared &shared, bool shifted) {
    const int warp = causal_warp();
    const bool has_low = shared.x.low != nullptr;
    if (16 * warp >= p.n) return;
#pragma unroll 2
    for (int k = 0; k < CAUSAL_ROWS / 16; ++k) {
      causal_rows16 a;
      causal_transposed(a.high, shared.x.high, k, warp);
      if (has_low) causal_transposed(a.low, shared.x.low, k, warp);
      causal_add_product<true>(s, a, has_low, shared.y, k);
      if (p.normalize == CAMOX_NORMALIZE_SUM) {
        const uint32_t ones = causal_lane() < 4 ? 0x3f803f80u : 0u, column[2] = {ones, ones};
        if (shifted) {
          causal_add_column(line, a, has_low, shared.shift + 16 * k);
        } else {
          if (has_low) causal_mma(line, a.low, column);
          causal_mma(line, a.high, column);
        }
      }
    }
  }
};

/* ---- what a chunk's state adds: x and y ---- */

/* A chunk on its way: a thread has a piece of four rows each, and with 7 neighbours whole rows. scaled: y is g, and x is r f(q). */
template <typename T>
struct causal_next {
  static constexpr int rows = CAUSAL_ROWS * 8 / CAUSAL_MMA_THREADS, lanes = 8, step = CAUSAL_ROWS / rows;
  T x[rows][lanes], y[rows][lanes];
  float scale[rows], shift[rows];
  uint32_t dropped[rows];

  /* Rows from `first` of the segment on. */
  __device__ __forceinline__ void load(const causal_pass &p, const causal_chunk &at, int first, bool scaled) {
    const int piece = static_cast<int>(threadIdx.x) % 8, thread_row = first + static_cast<int>(threadIdx.x) / 8;
    const la_kept keys = causal_kept(p.y, at);
    const int64_t position = causal_position(p, at, thread_row);
    load_pieces(x, causal_rows<const T>(p.y.feature, at, lanes * piece), thread_row, lanes * piece < p.n ? at.count : 0);
    load_pieces(y, causal_rows<const T>(p.y.value, at, lanes * piece), thread_row, lanes * piece < p.d ? at.count : 0);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = thread_row + i * step;
      dropped[i] = row >= at.count ? 1u : keys.mask ? __ldg(keys.mask + row * keys.step) : 0u;
      const bool has_numbers = scaled && row < at.count;
      scale[i] = has_numbers ? __ldg(p.inverse + position + i * step) : 1.0f;
      shift[i] = has_numbers ? __ldg(p.y.dots + position + i * step) : 0.0f;
    }
  }

  __device__ __forceinline__ void put(const causal_pass &p, const causal_mma_shared &shared, bool scaled) const {
    const int piece = static_cast<int>(threadIdx.x) % 8, thread_row = static_cast<int>(threadIdx.x) / 8;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = thread_row + i * step, word = causal_tile_word(row, piece);
      float f[lanes];
      camox_to_floats(f, x[i]);
      la_apply_feature_map<T>(f, p.feature_map);
#pragma unroll
      for (int k = 0; k < lanes; ++k)
        if (dropped[i] != 0u || lanes * piece >= p.n) f[k] = 0.0f;
      float factor = scale[i];
      if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < lanes; ++k) sum += f[k];
        factor = causal_inverse(camox_team_sum(sum, 8));
      }
      if (shared.x.low) { /* weighed, or of exponentials */
        uint32_t high[4], low[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t parts[2];
          la_split(f[2 * k] * factor, f[2 * k + 1] * factor, parts);
          high[k] = parts[0], low[k] = parts[1];
        }
        camox_store_shared(shared.x.high + word, high);
        camox_store_shared(shared.x.low + word, low);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = la_pack(f[2 * k], f[2 * k + 1]);
        camox_store_shared(shared.x.high + word, words);
      }
      uint32_t values[4];
      __builtin_memcpy(values, static_cast<const void *>(y[i]), sizeof values);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (dropped[i] != 0u) values[k] = 0u;
      camox_store_shared(shared.y.high + word, values);
      if (scaled && piece == 0) shared.shift[row] = -shift[i];
    }
  }

 private:
  static __device__ __forceinline__ void load_pieces(T (&to)[rows][lanes], const la_rows<const T> &from, int row, int count) {
    const T *piece = from.base + row * from.row;
#pragma unroll
    for (int i = 0; i < rows; ++i, piece += step * from.row) {
#pragma unroll
      for (int k = 0; k < lanes; ++k) to[i][k] = camox_from_float<T>(0.0f);
      if (row + i * step < count) camox_load<lanes>(to[i], piece);
    }
  }
};

/* ---- a warp's own rows ---- */

/* Rows 16 w + g and + 8 of a chunk in the order of A, which is that of an accumulator: word i of step s is row i % 2, tile
   2 s + i / 2. */
template <typename T>
struct causal_own {
  uint32_t words[CAUSAL_STEPS][4];
  uint32_t dropped[2];

  __device__ __forceinline__ void load(const la_rows<const T> &from, const la_kept &kept, int first, int columns) {
    const int g = causal_lane() / 4, t = causal_lane() % 4, row = first + 16 * causal_warp() + g;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      dropped[i] = row + 8 * i >= kept.valid ? 1u : kept.mask ? __ldg(kept.mask + (row + 8 * i) * kept.step) : 0u;
    const T *const line[2] = {from.base + row * from.row + 2 * t, from.base + (row + 8) * from.row + 2 * t};
    const int exists[2] = {row < kept.valid ? columns : 0, row + 8 < kept.valid ? columns : 0};
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 16 * s + 8 * (i / 2);
        words[s][i] = 0u;
        if (column < exists[i % 2]) words[s][i] = __ldg(reinterpret_cast<const uint32_t *>(line[i % 2] + column));
      }
  }

  /* The values as A. */
  __device__ __forceinline__ void values(causal_rows16 (&a)[CAUSAL_STEPS]) const {
#pragma unroll
    for (int i = 0; i < 4 * CAUSAL_STEPS; ++i) a[i / 4].high[i % 4] = dropped[i % 2] ? 0u : words[i / 4][i % 4];
  }

  /* The features of step s: two of each word. */
  __device__ __forceinline__ void features(float (&f)[8], int s, const causal_pass &p) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = la_half<T>(words[s][i / 2], i % 2);
    la_apply_feature_map<T>(f, p.feature_map);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (dropped[i / 2 % 2] != 0u || 16 * s + 8 * (i / 4) >= p.n) f[i] = 0.0f;
  }

  /* 1 / sum f of each row with "feature", else 1. */
  __device__ __forceinline__ void weights(float (&weight)[2], const causal_pass &p) const {
    weight[0] = weight[1] = 1.0f;
    if (p.normalize != CAMOX_NORMALIZE_FEATURE) return;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s) {
      float f[8];
      features(f, s, p);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i / 2 % 2] += f[i];
    }
    causal_sum_rows(sums);
    weight[0] = causal_inverse(sums[0]), weight[1] = causal_inverse(sums[1]);
  }

  /* The weighed features as A. */
  __device__ __forceinline__ void factor(causal_rows16 (&a)[CAUSAL_STEPS], const causal_pass &p) const {
    float weight[2];
    weights(weight, p);
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s) {
      float f[8];
      features(f, s, p);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t parts[2];
        la_split(f[2 * i] * weight[i % 2], f[2 * i + 1] * weight[i % 2], parts);
        a[s].high[i] = parts[0], a[s].low[i] = parts[1];
      }
    }
  }
};

/* Two tiles of C, where a row does not see a column 0, as A. */
__device__ __forceinline__ causal_rows16 causal_scores(const float (&c)[2][4]) {
  causal_rows16 a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t parts[2];
    la_split(c[i / 2][2 * (i % 2)], c[i / 2][2 * (i % 2) + 1], parts);
    a.high[i] = parts[0], a.low[i] = parts[1];
  }
  return a;
}

/* Of the block of 16 x 16 elements of C on its diagonal: whether row g + 8 half sees column j. */
__device__ __forceinline__ bool causal_sees_near(const causal_pass &p, int half, int j) {
  return causal_sees(p, causal_lane() / 4 + 8 * half, j);
}

__device__ __forceinline__ void causal_hide(float (&c)[2][4], const causal_pass &p) {
  const int t = causal_lane() % 4;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (!causal_sees_near(p, e / 2 % 2, 8 * (e / 4) + 2 * t + e % 2)) c[e / 4][e % 4] = 0.0f;
}

/* Whether 16 rows of a tile are finite; all lanes of a warp ask. */
__device__ __forceinline__ bool causal_is_finite(const uint32_t *tile, int block) {
  uint32_t carry = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4];
    camox_load_shared(words, tile + block * 16 * 32 + (i * CAMOX_WARP + causal_lane()) * 4);
    /* An exponent of ones, and one more: a carry into the sign. */
#pragma unroll
    for (int k = 0; k < 4; ++k) carry |= (words[k] & 0x7f807f80u) + 0x00800080u;
  }
  return !__any_sync(CAMOX_FULL_MASK, (carry & 0x80008000u) != 0u);
}

/* sums += c V of the block on the diagonal, term by term: what V has that is not finite, times a zero of C, would reach rows
   that do not see it. */
__device__ __forceinline__ void causal_add_seen(causal_sums &sums, const float (&c)[2][4], const causal_tile &tile, int block,
                                                const causal_pass &p) {
  const int lane = causal_lane(), t = lane % 4;
#pragma unroll 1
  for (int j = 0; j < 16; ++j) {
    float score[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = j % 2 ? c[0][2 * half + 1] : c[0][2 * half], second = j % 2 ? c[1][2 * half + 1] : c[1][2 * half];
      score[half] = __shfl_sync(CAMOX_FULL_MASK, j < 8 ? first : second, lane - t + j % 8 / 2);
    }
#pragma unroll
    for (int n = 0; n < CAUSAL_TILES; ++n) {
      const int word = causal_tile_word(16 * block + j, n) + t;
      const uint32_t high = tile.high[word], low = tile.low ? tile.low[word] : 0u;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = la_half<__nv_bfloat16>(high, e % 2) + la_half<__nv_bfloat16>(low, e % 2);
        if (causal_sees_near(p, e / 2, j)) sums[n][e] = fmaf(score[e / 2], value, sums[n][e]);
      }
    }
  }
}

/* sums += C V, of block `block` of 16 columns of C. */
__device__ __forceinline__ void causal_add_scores(causal_sums &sums, const float (&c)[2][4], const causal_tile &tile, int block,
                                                  const causal_pass &p) {
  if (block == causal_warp() && !causal_is_finite(tile.high, block)) return causal_add_seen(sums, c, tile, block, p);
  causal_add_product<true>(sums, causal_scores(c), true, tile, block);
}

/* Rows of a result to memory, those that exist: two lanes exchange a pair each, so that a row's sectors are written whole. */
template <typename T>
__device__ __forceinline__ void causal_store_own(const la_rows<T> &to, const causal_sums &sums, int first, int count,
                                                 int columns) {
  const int g = causal_lane() / 4, t = causal_lane() % 4, row = first + 16 * causal_warp() + g;
  const bool odd = t % 2 != 0;
#pragma unroll
  for (int n = 0; n < CAUSAL_STEPS; ++n) {
    if (16 * n >= columns) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t left = la_pack(sums[2 * n][2 * half], sums[2 * n][2 * half + 1]);
      const uint32_t right = la_pack(sums[2 * n + 1][2 * half], sums[2 * n + 1][2 * half + 1]);
      const uint32_t other = __shfl_xor_sync(CAMOX_FULL_MASK, odd ? left : right, 1);
      const uint32_t words[2] = {odd ? other : left, odd ? right : other};
      const int column = 16 * n + (odd ? 8 : 0) + 2 * (t - t % 2);
      if (row + 8 * half < count && column < columns)
        camox_store(reinterpret_cast<uint32_t *>(to.base + (row + 8 * half) * to.row + column), words);
    }
  }
}

/* dq or dk of da or db, in place. */
template <typename T>
__device__ __forceinline__ void causal_own_derivative(causal_sums &sums, const causal_own<T> &own, const causal_pass &p) {
  float weight[2], dot[2] = {0.0f, 0.0f};
  own.weights(weight, p);
  if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s) {
      float f[8];
      own.features(f, s, p);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot[i / 2 % 2] = fmaf(weight[i / 2 % 2] * f[i], sums[2 * s + i / 4][i % 4], dot[i / 2 % 2]);
    }
    causal_sum_rows(dot);
#pragma unroll
    for (int i = 0; i < 4 * CAUSAL_TILES; ++i) sums[i / 4][i % 4] = weight[i / 2 % 2] * (sums[i / 4][i % 4] - dot[i / 2 % 2]);
  }
  if (p.feature_map != CAMOX_FEATURE_IDENTITY) {
    const int map = p.feature_map == CAMOX_FEATURE_ELU1 ? CAMOX_FEATURE_ELU1 : CAMOX_FEATURE_RELU;
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s) {
      float f[8];
      own.features(f, s, p);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[2 * s + i / 4][i % 4] *= la_feature_derivative(f[i], map);
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * CAUSAL_TILES; ++i)
    if (own.dropped[i / 2 % 2] != 0u || weight[i / 2 % 2] == 0.0f) sums[i / 4][i % 4] = 0.0f;
}

/* ---- a chunk's rows ---- */

/* out of a chunk's queries. */
template <typename T>
__device__ __forceinline__ void causal_forward_rows(const causal_pass &p, const causal_chunk &at, int first,
                                                    const causal_mma_shared &shared, const causal_own<T> &q) {
  const int warp = causal_warp();
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM, has_low = causal_has_low(p, false);
  causal_sums out;
  float divisors[2] = {0.0f, 0.0f}, of_state[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  causal_rows16 a[CAUSAL_STEPS];
  q.factor(a, p);
  causal_clear(out);
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k) {
    causal_add_product<true>(out, a[k], has_low, shared.state, k);
    if (sum) causal_add_column(of_state, a[k], has_low, shared.line + 16 * k);
  }
#pragma unroll 1
  for (int block = 0; block <= warp; ++block) {
    float c[2][4];
    causal_multiply(c, a, has_low, shared.x, block);
    if (block == warp) causal_hide(c, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) divisors[i / 2 % 2] += c[i / 4][i % 4];
    causal_add_scores(out, c, shared.y, block, p);
  }
  if (sum) {
    divisors[0] += of_state[0], divisors[1] += of_state[2]; /* of_state's other columns are 0 */
    causal_sum_rows(divisors);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float r = causal_inverse(divisors[half] + p.eps);
#pragma unroll
      for (int i = 0; i < 2 * CAUSAL_TILES; ++i) out[i / 2][2 * half + i % 2] *= r;
    }
  }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  out[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.out, at, 0), out, first, at.count, p.d);
}

/* A block of ones, on the diagonal of those that the row sees, as A. */
__device__ __forceinline__ void causal_ones(uint32_t (&a)[4], bool on_diagonal, const causal_pass &p) {
  const int t = causal_lane() % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 8 * (i / 2) + 2 * t;
    const bool first = !on_diagonal || causal_sees_near(p, i % 2, column);
    const bool second = !on_diagonal || causal_sees_near(p, i % 2, column + 1);
    a[i] = (first ? 0x3f80u : 0u) | (second ? 0x3f800000u : 0u);
  }
}

/* u += C f(k), of the block `block`, and z += f(k) of what each row sees of it. */
__device__ __forceinline__ void causal_add_keys(causal_sums &u, causal_sums &z, const float (&c)[2][4], const causal_tile &tile,
                                                int block, const causal_pass &p) {
  const bool on_diagonal = block == causal_warp(), sum = p.normalize == CAMOX_NORMALIZE_SUM;
  if (on_diagonal && !causal_is_finite(tile.high, block)) {
    const float ones[2][4] = {{1.0f, 1.0f, 1.0f, 1.0f}, {1.0f, 1.0f, 1.0f, 1.0f}};
    causal_add_seen(u, c, tile, block, p);
    if (sum) causal_add_seen(z, ones, tile, block, p);
    return;
  }
  const causal_rows16 a = causal_scores(c);
  uint32_t ones[4];
  causal_ones(ones, on_diagonal, p);
  causal_fragments part;
  if (tile.low) {
    causal_load_fragments<true>(part, tile.low, block);
    causal_mma_row(u, a.high, part);
    if (sum) causal_mma_row(z, ones, part);
  }
  causal_load_fragments<true>(part, tile.high, block);
  causal_mma_row(u, a.low, part);
  if (sum) causal_mma_row(z, ones, part);
  causal_mma_row(u, a.high, part);
}

/* dq of a chunk's queries; with "sum" r and out . g of each. */
template <typename T>
__device__ __forceinline__ void causal_query_rows(const causal_pass &p, const causal_chunk &at, int first,
                                                  const causal_mma_shared &shared, const causal_own<T> &q,
                                                  const causal_own<T> &grad) {
  const int warp = causal_warp(), g = causal_lane() / 4, t = causal_lane() % 4;
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  causal_sums u, z; /* S_t g, and z_t */
  {
    causal_rows16 a[CAUSAL_STEPS];
    grad.values(a);
    causal_clear(u);
#pragma unroll
    for (int k = 0; k < CAUSAL_STEPS; ++k) causal_add_product<false>(u, a[k], false, shared.state, k);
#pragma unroll
    for (int i = 0; i < 4 * CAUSAL_TILES; ++i) z[i / 4][i % 4] = shared.line[i / 4 * 8 + 2 * t + i % 2];
#pragma unroll 1
    for (int block = 0; block <= warp; ++block) {
      float c[2][4];
      causal_multiply(c, a, false, shared.y, block);
      if (block == warp) causal_hide(c, p);
      causal_add_keys(u, z, c, shared.x, block, p);
    }
  }
  if (sum) {
    float of_z[2] = {0.0f, 0.0f}, of_u[2] = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < CAUSAL_STEPS; ++s) {
      float f[8];
      q.features(f, s, p);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        of_z[i / 2 % 2] = fmaf(f[i], z[2 * s + i / 4][i % 4], of_z[i / 2 % 2]);
        of_u[i / 2 % 2] = fmaf(f[i], u[2 * s + i / 4][i % 4], of_u[i / 2 % 2]);
      }
    }
    causal_sum_rows(of_z);
    causal_sum_rows(of_u);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * warp + g + 8 * half;
      const float r = causal_inverse(of_z[half] + p.eps), dot = r * of_u[half];
#pragma unroll
      for (int i = 0; i < 2 * CAUSAL_TILES; ++i) {
        float &value = u[i / 2][2 * half + i % 2];
        value = r * fmaf(-dot, z[i / 2][2 * half + i % 2], value);
      }
      if (t == 0 && row < at.count) {
        p.inverse[causal_position(p, at, row)] = r;
        p.x.dots[causal_position(p, at, row)] = dot;
      }
    }
  }
  causal_own_derivative(u, q, p);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  u[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.grad_x, at, 0), u, first, at.count, p.n);
}

/* dk and dv of a chunk's keys. */
template <typename T>
__device__ __forceinline__ void causal_key_rows(const causal_pass &p, const causal_chunk &at, int first,
                                                const causal_mma_shared &shared, const causal_own<T> &k,
                                                const causal_own<T> &v) {
  const int warp = causal_warp(), t = causal_lane() % 4;
  const int blocks = static_cast<int>(camox_ceil_div(min(at.count - first, CAUSAL_ROWS), 16));
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM, has_low = causal_has_low(p, false);
  causal_rows16 a[CAUSAL_STEPS];
  causal_sums result;
  v.values(a);
#pragma unroll
  for (int i = 0; i < 4 * CAUSAL_TILES; ++i) result[i / 4][i % 4] = sum ? shared.line[i / 4 * 8 + 2 * t + i % 2] : 0.0f;
#pragma unroll
  for (int step = 0; step < CAUSAL_STEPS; ++step) causal_add_product<false>(result, a[step], false, shared.state, step);
#pragma unroll 1
  for (int block = warp; block < blocks; ++block) {
    float c[2][4];
    causal_multiply(c, a, false, shared.y, block);
    if (sum) {
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i / 4][i % 4] += shared.shift[16 * block + 8 * (i / 4) + 2 * t + i % 2];
    }
    if (block == warp) causal_hide(c, p);
    causal_add_scores(result, c, shared.x, block, p);
  }
  causal_own_derivative(result, k, p);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  result[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.grad_x, at, 0), result, first, at.count, p.n);

  k.factor(a, p);
  causal_clear(result);
#pragma unroll
  for (int step = 0; step < CAUSAL_STEPS; ++step) causal_add_product<true>(result, a[step], has_low, shared.state, step);
#pragma unroll 1
  for (int block = warp; block < blocks; ++block) {
    float c[2][4];
    causal_multiply(c, a, has_low, shared.x, block);
    if (block == warp) causal_hide(c, p);
    causal_add_scores(result, c, shared.y, block, p);
  }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  result[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.out, at, 0), result, first, at.count, p.d);
}

/* ---- kernels ---- */

/* SCALED: y is g, and x is r f(q). */
template <typename T, bool SCALED>
__global__ void __launch_bounds__(CAUSAL_MMA_THREADS, 4) causal_mma_sum_kernel(const __grid_constant__ causal_pass p) {
  CAMOX_DYNAMIC_SHARED(uint32_t, memory);
  const causal_chunk at = causal_chunk_at(p, blockIdx.x);
  if (at.count == 0) return;
  const causal_mma_shared shared = causal_mma_shared_in(memory, causal_has_low(p, SCALED));
  causal_state state;
  causal_next<T> next;
  state.clear();
  next.load(p, at, 0, SCALED);
#pragma unroll 1
  for (int first = 0; first < at.count; first += CAUSAL_ROWS) {
    next.put(p, shared, SCALED);
    __syncthreads();
    next.load(p, at, first + CAUSAL_ROWS, SCALED);
    state.add(p, shared, SCALED);
    __syncthreads();
  }
  state.store(p, causal_record(p, blockIdx.x));
}

/* Blocks of a multiprocessor, as registers last. */
template <int WALK>
static constexpr int causal_walk_blocks = WALK == CAUSAL_FORWARD ? 3 : 2;

template <typename T, int WALK>
__global__ void __launch_bounds__(CAUSAL_MMA_THREADS, causal_walk_blocks<WALK>)
    causal_mma_walk_kernel(const __grid_constant__ causal_pass p) {
  constexpr bool of_keys = WALK == CAUSAL_KEY_GRADIENT;
  CAMOX_DYNAMIC_SHARED(uint32_t, memory);
  const causal_chunk at = causal_chunk_at(p, blockIdx.x);
  if (at.count == 0) return;
  const bool scaled = of_keys && p.normalize == CAMOX_NORMALIZE_SUM;
  const causal_mma_shared shared = causal_mma_shared_in(memory, causal_has_low(p, scaled));
  causal_state state;
  causal_next<T> next;
  causal_own<T> features, values; /* of x */
  const auto load = [&](int first) {
    next.load(p, at, first, scaled);
    features.load(causal_rows<const T>(p.x.feature, at, 0), causal_kept(p.x, at), first, p.n);
    if (WALK != CAUSAL_FORWARD) values.load(causal_rows<const T>(p.x.value, at, 0), causal_kept(p.x, at), first, p.d);
  };
  const int last = (at.count - 1) / CAUSAL_ROWS * CAUSAL_ROWS;
  state.load(p, causal_record(p, blockIdx.x));
  load(of_keys ? last : 0);
#pragma unroll 1
  for (int walked = 0; walked <= last; walked += CAUSAL_ROWS) {
    const int first = of_keys ? last - walked : walked;
    state.put(shared);
    next.put(p, shared, scaled);
    __syncthreads();
    if (WALK == CAUSAL_FORWARD) causal_forward_rows(p, at, first, shared, features);
    if (WALK == CAUSAL_QUERY_GRADIENT) causal_query_rows(p, at, first, shared, features, values);
    if (WALK == CAUSAL_KEY_GRADIENT) causal_key_rows(p, at, first, shared, features, values);
    if (walked == last) break;
    load(of_keys ? first - CAUSAL_ROWS : first + CAUSAL_ROWS);
    state.add(p, shared, scaled);
    __syncthreads();
  }
}

#endif
