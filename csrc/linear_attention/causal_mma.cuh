/* Causal linear_attention on tensor cores: bfloat16 heads of up to 64 columns, from sm_80 on. The notation is that of causal.h.

   A sequence of a head is cut into segments of whole chunks of 64 positions. A block goes through a segment chunk by chunk,
   with the state in registers; what came before the segment is its record:

     sum    x^T y of each segment -> its record                   x: f(k) or r f(q);  y: v or g
     scan   record = the state before the segment (after it, backward): causal_cuda.cuh
     attend of each chunk   C = A B^T, what a row does not see left out;   result = C V + A M;   then M += x^T y

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
#define CAUSAL_MMA_BLOCKS 1024 /* two to four times as many as run at once on the largest GPU */
#define CAUSAL_TILE_WORDS (CAUSAL_ROWS * CAUSAL_MMA_DIM / 2)
#define CAUSAL_TILES (CAUSAL_MMA_DIM / 8) /* of 8 columns in an accumulator */
#define CAUSAL_STEPS (CAUSAL_MMA_DIM / 16)

typedef enum { CAUSAL_FORWARD = 0, CAUSAL_QUERY_GRADIENT = 1, CAUSAL_KEY_GRADIENT = 2 } causal_result;

/* ---- tiles in shared memory: 64 rows of 8 pieces of 16 bytes; piece p of row r lies at place p ^ r % 8 ---- */

/* Features, or the state, of which `low` is what `high` leaves out; or values, which are `high` alone. */
struct causal_tile {
  uint32_t *high, *low;
};

struct causal_mma_shared {
  causal_tile x, y, state;
  float *line, *shift;    /* z or dz; less out . g of a chunk's queries */
  bool low;               /* whether features have a low part: exponentials, and what is weighed */
  unsigned across, along; /* words of a tile that this lane names to ldmatrix: step 0, or pair 0, of rows and of columns */
};

static constexpr size_t causal_mma_shared_bytes = (5 * CAUSAL_TILE_WORDS + CAUSAL_MMA_DIM + CAUSAL_ROWS) * 4;
static_assert(causal_mma_shared_bytes <= 48 * 1024, "what every GPU gives without being asked");

__device__ __forceinline__ unsigned causal_tile_word(unsigned row, unsigned piece) { return row * 32 + (piece ^ row % 8) * 4; }

__device__ __forceinline__ causal_mma_shared causal_mma_shared_in(uint32_t *shared, bool low) {
  uint32_t *const x = shared, *const y = x + 2 * CAUSAL_TILE_WORDS, *const state = y + CAUSAL_TILE_WORDS;
  float *const line = reinterpret_cast<float *>(state + 2 * CAUSAL_TILE_WORDS);
  const unsigned lane = threadIdx.x % CAMOX_WARP;
  return {{x, x + CAUSAL_TILE_WORDS},
          {y, nullptr},
          {state, state + CAUSAL_TILE_WORDS},
          line,
          line + CAUSAL_MMA_DIM,
          low,
          causal_tile_word(lane % 16, lane / 16),
          causal_tile_word(lane % 8 + lane / 16 * 8, lane / 8 % 2)};
}

/* B of step k, in fragments: [pair of tiles of 8 columns][tile]. */
typedef uint32_t causal_fragments[CAUSAL_STEPS][2][2];

/* Those of a pair. ACROSS: the tile's rows are terms; else columns. */
template <bool ACROSS>
__device__ __forceinline__ void causal_load_pair(uint32_t (&b)[2][2], const uint32_t *tile, const causal_mma_shared &shared,
                                                 int k, int pair) {
  uint32_t words[4];
  if (ACROSS)
    camox_ldmatrix_x4<true>(words, tile + k * 512 + (shared.across ^ pair * 8));
  else
    camox_ldmatrix_x4<false>(words, tile + pair * 512 + (shared.along ^ k * 8));
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = words[i];
}

template <bool ACROSS>
__device__ __forceinline__ void causal_load_fragments(causal_fragments &b, const uint32_t *tile,
                                                      const causal_mma_shared &shared, int k) {
#pragma unroll
  for (int pair = 0; pair < CAUSAL_STEPS; ++pair) causal_load_pair<ACROSS>(b[pair], tile, shared, k, pair);
}

/* Sixteen rows and terms of A. */
struct causal_rows16 {
  uint32_t high[4], low[4];
};

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

/* sums += A B of step k, small terms first. a_low, b_low: whether they have a low part. */
template <bool ACROSS>
__device__ __forceinline__ void causal_add_product(causal_sums &sums, const causal_rows16 &a, bool a_low, bool b_low,
                                                   const causal_tile &tile, const causal_mma_shared &shared, int k) {
  causal_fragments high;
  causal_load_fragments<ACROSS>(high, tile.high, shared, k);
  if (b_low) {
    causal_fragments low;
    causal_load_fragments<ACROSS>(low, tile.low, shared, k);
    causal_mma_row(sums, a.high, low);
  }
  if (a_low) causal_mma_row(sums, a.low, high);
  causal_mma_row(sums, a.high, high);
}

/* Two tiles of C = A B^T, whose terms are all columns. low: of both; parts have sums of their own, so that fewer wait. */
__device__ __forceinline__ void causal_multiply(float (&c)[2][4], const causal_rows16 (&a)[CAUSAL_STEPS], bool low,
                                                const causal_tile &tile, const causal_mma_shared &shared, int block) {
  uint32_t high[CAUSAL_STEPS][2][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k) causal_load_pair<false>(high[k], tile.high, shared, k, block);
  if (low) {
    float small[2][4] = {};
#pragma unroll
    for (int k = 0; k < CAUSAL_STEPS; ++k) {
      uint32_t b[2][2];
      causal_load_pair<false>(b, tile.low, shared, k, block);
#pragma unroll
      for (int n = 0; n < 2; ++n) causal_mma(c[n], a[k].high, b[n]), causal_mma(small[n], a[k].low, high[k][n]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i / 4][i % 4] += small[i / 4][i % 4];
  }
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k)
#pragma unroll
    for (int n = 0; n < 2; ++n) causal_mma(c[n], a[k].high, high[k][n]);
}

/* sums += A b of step k, b: one column, of 16 numbers from `from` on; the others are 0. */
__device__ __forceinline__ void causal_add_column(float (&sums)[4], const causal_rows16 &a, bool a_low, const float *from) {
  const unsigned lane = threadIdx.x % CAMOX_WARP;
  uint32_t high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float two[2];
    uint32_t parts[2];
    camox_load_shared(two, from + 2 * (lane % 4) + 8 * i);
    la_split(two[0], two[1], parts);
    high[i] = lane < 4 ? parts[0] : 0u, low[i] = lane < 4 ? parts[1] : 0u;
  }
  if (a_low) causal_mma(sums, a.low, high);
  causal_mma(sums, a.high, low);
  causal_mma(sums, a.high, high);
}

/* Of rows g and g + 8: their sums over all lanes that share them. */
__device__ __forceinline__ void causal_sum_rows(float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) sums[i] = camox_team_sum(sums[i], 4);
}

/* 1 / x in one instruction; of 0, which a subnormal number counts as, 0. */
__device__ __forceinline__ float causal_reciprocal(float x) {
  const float reciprocal = camox_reciprocal(x);
  return fabsf(x) < FLT_MIN ? 0.0f : reciprocal;
}

/* Which rows and columns of a chunk a lane, or thread, has: those of an accumulator and of A. */
struct causal_place {
  unsigned g, t;
  __device__ __forceinline__ causal_place() : g(threadIdx.x % CAMOX_WARP / 4), t(threadIdx.x % 4) {}
};

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

  __device__ __forceinline__ void load(const causal_pass &p, const float *record) {
    const causal_place at;
    clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * causal_warp() + static_cast<int>(at.g) + 8 * half;
      const float *const line_place = record + p.n * p.d + row, *const place = record + row * p.d + 2 * at.t;
      if (row >= p.n) continue;
#pragma unroll
      for (int n = 0; n < CAUSAL_TILES; ++n) {
        float two[2] = {0.0f, 0.0f};
        if (8 * n < p.d) camox_load(two, place + 8 * n);
        s[n][2 * half] = two[0], s[n][2 * half + 1] = two[1];
      }
      if (p.normalize == CAMOX_NORMALIZE_SUM && at.t == 0) line[2 * half] = __ldg(line_place);
    }
  }

  __device__ __forceinline__ void store(const causal_pass &p, float *record) const {
    const causal_place at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * causal_warp() + static_cast<int>(at.g) + 8 * half;
      float *const line_place = record + p.n * p.d + row, *const place = record + row * p.d + 2 * at.t;
      if (row >= p.n) continue;
#pragma unroll
      for (int n = 0; n < CAUSAL_TILES; ++n) {
        const float two[2] = {s[n][2 * half], s[n][2 * half + 1]};
        if (8 * n < p.d) camox_store(place + 8 * n, two);
      }
      if (p.normalize == CAMOX_NORMALIZE_SUM && at.t == 0) *line_place = line[2 * half];
    }
  }

  __device__ __forceinline__ void put(const causal_mma_shared &shared) const {
    const causal_place at;
    const unsigned row = threadIdx.x / CAMOX_WARP * 16 + at.g;
#pragma unroll
    for (unsigned half = 0; half < 2; ++half)
#pragma unroll
      for (unsigned n = 0; n < CAUSAL_TILES; ++n) {
        uint32_t parts[2];
        la_split(s[n][2 * half], s[n][2 * half + 1], parts);
        const unsigned word = (row + 8 * half) * 32 + ((at.g * 4 + at.t) ^ n * 4);
        shared.state.high[word] = parts[0], shared.state.low[word] = parts[1];
      }
    if (at.t == 0) shared.line[row] = line[0], shared.line[row + 8] = line[2];
  }

  /* M += x^T y of a chunk, and the line with it; scaled: line -= (out . g) x. */
  __device__ __forceinline__ void add(const causal_pass &p, const causal_mma_shared &shared, bool scaled) {
    const unsigned along = shared.along ^ threadIdx.x / CAMOX_WARP * 8;
#pragma unroll 2
    for (int k = 0; k < CAUSAL_ROWS / 16; ++k) {
      causal_rows16 a; /* of x^T: rows of the tile are terms */
      camox_ldmatrix_x4<true>(a.high, shared.x.high + k * 512 + along);
      if (shared.low) camox_ldmatrix_x4<true>(a.low, shared.x.low + k * 512 + along);
      causal_add_product<true>(s, a, shared.low, false, shared.y, shared, k);
      if (scaled) {
        causal_add_column(line, a, true, shared.shift + 16 * k);
      } else if (p.normalize == CAMOX_NORMALIZE_SUM) {
        const uint32_t ones = threadIdx.x % CAMOX_WARP < 4 ? 0x3f803f80u : 0u, column[2] = {ones, ones};
        if (shared.low) causal_mma(line, a.low, column);
        causal_mma(line, a.high, column);
      }
    }
  }
};

/* ---- what a chunk's state adds: x and y ---- */

/* A chunk on its way: a thread has a piece of four rows each, and with 7 neighbours whole rows. A warp's 16 rows have a number
   in each of its lanes: in lanes 0 to 15 what features are multiplied by, in the others out . g. scaled: y is g, and x is r f(q). */
template <typename T>
struct causal_next {
  static constexpr int rows = CAUSAL_ROWS * 8 / CAUSAL_MMA_THREADS, lanes = 8, step = CAUSAL_ROWS / rows;
  T x[rows][lanes], y[rows][lanes];
  float number;
  uint32_t dropped;

  /* The row whose number this lane has, and the lane that has those of a thread's row i. */
  static __device__ __forceinline__ int row_of_lane() {
    return causal_warp() * (CAMOX_WARP / lanes) + causal_lane() % rows + causal_lane() / rows % rows * step;
  }
  static __device__ __forceinline__ int lane_of_row(int i) { return rows * i + causal_lane() / lanes; }

  /* Rows from `first` of the segment on. */
  __device__ __forceinline__ void load(const causal_pass &p, const causal_chunk &at, int first, bool scaled) {
    const int piece = static_cast<int>(threadIdx.x % 8), thread_row = first + static_cast<int>(threadIdx.x / 8);
    load_pieces(x, causal_rows<const T>(p.y.feature, at, lanes * piece), thread_row, lanes * piece < p.n ? at.count : 0);
    load_pieces(y, causal_rows<const T>(p.y.value, at, lanes * piece), thread_row, lanes * piece < p.d ? at.count : 0);
    const int row = first + row_of_lane();
    const bool exists = row < at.count, is_scale = causal_lane() < CAMOX_WARP / 2;
    const la_kept kept = causal_kept(p.y, at);
    dropped = !exists ? 1u : kept.mask ? __ldg(kept.mask + row * kept.step) : 0u;
    number = is_scale ? 1.0f : 0.0f;
    if (exists && scaled) number = __ldg((is_scale ? p.inverse : p.y.dots) + causal_position(p, at, row));
  }

  /* TOGETHER: rows at a time: more hide latency, fewer leave registers. */
  template <int TOGETHER>
  __device__ __forceinline__ void put(const causal_pass &p, const causal_mma_shared &shared, bool scaled) const {
    const unsigned piece = threadIdx.x % 8, word = causal_tile_word(threadIdx.x / 8, piece);
#pragma unroll
    for (int first = 0; first < rows; first += TOGETHER) {
      float f[TOGETHER * lanes];
      bool counts[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        float of_row[lanes];
        camox_to_floats(of_row, x[first + i]);
#pragma unroll
        for (int k = 0; k < lanes; ++k) f[lanes * i + k] = of_row[k];
        counts[i] = __shfl_sync(CAMOX_FULL_MASK, dropped, lane_of_row(first + i)) == 0u;
      }
      la_apply_feature_map<T>(f, p.feature_map);
#pragma unroll
      for (int i = 0; i < TOGETHER * lanes; ++i)
        if (!counts[i / lanes] || lanes * static_cast<int>(piece) >= p.n) f[i] = 0.0f;
      if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          float sum = 0.0f;
#pragma unroll
          for (int k = 0; k < lanes; ++k) sum += f[lanes * i + k];
          const float factor = causal_reciprocal(camox_team_sum(sum, 8));
#pragma unroll
          for (int k = 0; k < lanes; ++k) f[lanes * i + k] *= factor;
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const float factor = scaled ? __shfl_sync(CAMOX_FULL_MASK, number, lane_of_row(first + i)) : 1.0f;
        const unsigned to = word + (first + i) * step * 32;
        uint32_t high[4], low[4], values[4];
        __builtin_memcpy(values, static_cast<const void *>(y[first + i]), sizeof values);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t parts[2];
          la_split(f[lanes * i + 2 * k] * factor, f[lanes * i + 2 * k + 1] * factor, parts);
          high[k] = parts[0], low[k] = parts[1];
          if (!counts[i]) values[k] = 0u;
        }
        camox_store_shared(shared.x.high + to, high);
        if (shared.low) camox_store_shared(shared.x.low + to, low);
        camox_store_shared(shared.y.high + to, values);
      }
    }
    if (scaled && causal_lane() >= CAMOX_WARP / 2) shared.shift[row_of_lane()] = -number;
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

/* Rows g and g + 8 of 16 of a chunk in the order of A, which is that of an accumulator: word i of step s is row i % 2, tile
   2 s + i / 2. Of keys those that do not count are 0; what is computed of queries that do not exist is not stored. */
template <typename T, bool OF_KEYS>
struct causal_own {
  uint32_t words[CAUSAL_STEPS][4];
  uint32_t dropped[2];

  __device__ __forceinline__ bool drops(int half) const { return OF_KEYS && dropped[half] != 0u; }

  /* Rows from `first` of the segment on. */
  __device__ __forceinline__ void load(const la_rows<const T> &from, const la_kept &kept, int first, int columns) {
    const causal_place at;
    const int row = first + static_cast<int>(at.g);
    const T *const line[2] = {from.base + row * from.row + 2 * at.t, from.base + (row + 8) * from.row + 2 * at.t};
    const int exists[2] = {row < kept.valid ? columns : 0, row + 8 < kept.valid ? columns : 0};
#pragma unroll
    for (int i = 0; i < 2 && OF_KEYS; ++i)
      dropped[i] = row + 8 * i >= kept.valid ? 1u : kept.mask ? __ldg(kept.mask + (row + 8 * i) * kept.step) : 0u;
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
    for (int i = 0; i < 4 * CAUSAL_STEPS; ++i) a[i / 4].high[i % 4] = drops(i % 2) ? 0u : words[i / 4][i % 4];
  }

  /* The features: two of each word. */
  __device__ __forceinline__ void features(float (&f)[8 * CAUSAL_STEPS], const causal_pass &p) const {
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i) f[i] = la_half<T>(words[i / 8][i / 2 % 4], i % 2);
    la_apply_feature_map<T>(f, p.feature_map);
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i)
      if (drops(i / 2 % 2) || 8 * (i / 4) >= p.n) f[i] = 0.0f;
  }

  /* 1 / sum f of each row. */
  static __device__ __forceinline__ void weights(float (&weight)[2], const float (&f)[8 * CAUSAL_STEPS]) {
    weight[0] = weight[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i) weight[i / 2 % 2] += f[i];
    causal_sum_rows(weight);
    weight[0] = causal_reciprocal(weight[0]), weight[1] = causal_reciprocal(weight[1]);
  }

  /* The weighed features as A. */
  __device__ __forceinline__ void factor(causal_rows16 (&a)[CAUSAL_STEPS], const causal_pass &p) const {
    float f[8 * CAUSAL_STEPS];
    features(f, p);
    if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
      float weight[2];
      weights(weight, f);
#pragma unroll
      for (int i = 0; i < 8 * CAUSAL_STEPS; ++i) f[i] *= weight[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < 4 * CAUSAL_STEPS; ++i) {
      uint32_t parts[2];
      la_split(f[2 * i], f[2 * i + 1], parts);
      a[i / 4].high[i % 4] = parts[0], a[i / 4].low[i % 4] = parts[1];
    }
  }
};

/* Two tiles of C as A. */
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
template <bool OF_KEYS>
__device__ __forceinline__ bool causal_sees_near(const causal_pass &p, int half, int j) {
  const int row = static_cast<int>(causal_place().g) + 8 * half;
  return (OF_KEYS ? j - row : row - j) >= (p.strict ? 1 : 0);
}

template <bool OF_KEYS>
__device__ __forceinline__ void causal_hide(float (&c)[2][4], const causal_pass &p) {
  const int t = static_cast<int>(causal_place().t);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (!causal_sees_near<OF_KEYS>(p, e / 2 % 2, 8 * (e / 4) + 2 * t + e % 2)) c[e / 4][e % 4] = 0.0f;
}

/* Whether 16 rows of a tile are finite; all lanes of a warp ask. */
__device__ __forceinline__ bool causal_is_finite(const uint32_t *tile, int block) {
  uint32_t carry = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4];
    camox_load_shared(words, tile + block * 512 + (i * CAMOX_WARP + threadIdx.x % CAMOX_WARP) * 4);
    /* An exponent of ones, and one more: a carry into the sign. */
#pragma unroll
    for (int k = 0; k < 4; ++k) carry |= (words[k] & 0x7f807f80u) + 0x00800080u;
  }
  return !__any_sync(CAMOX_FULL_MASK, (carry & 0x80008000u) != 0u);
}

/* sums += c V of the block on the diagonal, term by term: what V has that is not finite, times a zero of C, would reach rows
   that do not see it. */
template <bool OF_KEYS>
__device__ __forceinline__ void causal_add_seen(causal_sums &sums, const float (&c)[2][4], const causal_tile &tile,
                                                bool has_low, int block, const causal_pass &p) {
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
      const unsigned word = causal_tile_word(16 * block + j, n) + t;
      const uint32_t high = tile.high[word], low = has_low ? tile.low[word] : 0u;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = la_half<__nv_bfloat16>(high, e % 2) + la_half<__nv_bfloat16>(low, e % 2);
        if (causal_sees_near<OF_KEYS>(p, e / 2, j)) sums[n][e] = fmaf(score[e / 2], value, sums[n][e]);
      }
    }
  }
}

/* sums += C V, of block `block` of 16 columns of C. has_low: whether V has a low part. */
template <bool OF_KEYS>
__device__ __forceinline__ void causal_add_scores(causal_sums &sums, const float (&c)[2][4], const causal_tile &tile,
                                                  bool has_low, const causal_mma_shared &shared, int block, bool on_diagonal,
                                                  const causal_pass &p) {
  if (on_diagonal && !causal_is_finite(tile.high, block)) return causal_add_seen<OF_KEYS>(sums, c, tile, has_low, block, p);
  causal_add_product<true>(sums, causal_scores(c), true, has_low, tile, shared, block);
}

/* A block of ones, on the diagonal of those that a row sees, as A. */
__device__ __forceinline__ void causal_ones(uint32_t (&a)[4], bool on_diagonal, const causal_pass &p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 8 * (i / 2) + 2 * static_cast<int>(causal_place().t);
    const bool first = !on_diagonal || causal_sees_near<false>(p, i % 2, column);
    const bool second = !on_diagonal || causal_sees_near<false>(p, i % 2, column + 1);
    a[i] = (first ? 0x3f80u : 0u) | (second ? 0x3f800000u : 0u);
  }
}

/* u += C f(k) of a block, and z += f(k) of what each row sees of it. */
__device__ __forceinline__ void causal_add_keys(causal_sums &u, causal_sums &z, const float (&c)[2][4],
                                                const causal_mma_shared &shared, int block, bool on_diagonal,
                                                const causal_pass &p) {
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  if (on_diagonal && !causal_is_finite(shared.x.high, block)) {
    const float ones[2][4] = {{1.0f, 1.0f, 1.0f, 1.0f}, {1.0f, 1.0f, 1.0f, 1.0f}};
    causal_add_seen<false>(u, c, shared.x, shared.low, block, p);
    if (sum) causal_add_seen<false>(z, ones, shared.x, shared.low, block, p);
    return;
  }
  const causal_rows16 a = causal_scores(c);
  uint32_t ones[4];
  causal_ones(ones, on_diagonal, p);
  causal_fragments high;
  causal_load_fragments<true>(high, shared.x.high, shared, block);
  if (shared.low) {
    causal_fragments low;
    causal_load_fragments<true>(low, shared.x.low, shared, block);
    causal_mma_row(u, a.high, low);
    if (sum) causal_mma_row(z, ones, low);
  }
  causal_mma_row(u, a.low, high);
  causal_mma_row(u, a.high, high);
  if (sum) causal_mma_row(z, ones, high);
}

/* Rows of a result to memory, those that exist: two lanes exchange a pair each, so that a row's sectors are written whole. */
template <typename T>
__device__ __forceinline__ void causal_store_own(const la_rows<T> &to, const causal_sums &sums, int first, int count,
                                                 int columns) {
  const causal_place at;
  const int row = first + static_cast<int>(at.g), odd = at.t % 2, column = odd * 8 + 2 * static_cast<int>(at.t - at.t % 2);
  T *const line[2] = {to.base + row * to.row + column, to.base + (row + 8) * to.row + column};
  const int exists[2] = {row < count ? columns - column : 0, row + 8 < count ? columns - column : 0};
#pragma unroll
  for (int n = 0; n < CAUSAL_STEPS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t left = la_pack(sums[2 * n][2 * half], sums[2 * n][2 * half + 1]);
      const uint32_t right = la_pack(sums[2 * n + 1][2 * half], sums[2 * n + 1][2 * half + 1]);
      const uint32_t other = __shfl_xor_sync(CAMOX_FULL_MASK, odd ? left : right, 1);
      const uint32_t words[2] = {odd ? other : left, odd ? right : other};
      if (16 * n < exists[half]) camox_store(reinterpret_cast<uint32_t *>(line[half] + 16 * n), words);
    }
}

/* dq or dk of da or db, in place. */
template <bool OF_KEYS, typename T>
__device__ __forceinline__ void causal_own_derivative(causal_sums &sums, const causal_own<T, OF_KEYS> &own,
                                                      const causal_pass &p) {
  float f[8 * CAUSAL_STEPS], weight[2] = {1.0f, 1.0f};
  own.features(f, p);
  if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
    float dot[2] = {0.0f, 0.0f};
    own.weights(weight, f);
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i)
      dot[i / 2 % 2] = fmaf(weight[i / 2 % 2] * f[i], sums[i / 4][i % 4], dot[i / 2 % 2]);
    causal_sum_rows(dot);
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i) sums[i / 4][i % 4] = weight[i / 2 % 2] * (sums[i / 4][i % 4] - dot[i / 2 % 2]);
  }
  if (p.feature_map != CAMOX_FEATURE_IDENTITY) {
    const bool elu1 = p.feature_map == CAMOX_FEATURE_ELU1;
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i)
      sums[i / 4][i % 4] *= la_feature_derivative(f[i], elu1 ? CAMOX_FEATURE_ELU1 : CAMOX_FEATURE_RELU);
  }
#pragma unroll
  for (int i = 0; i < 8 * CAUSAL_STEPS; ++i)
    if (own.drops(i / 2 % 2) || weight[i / 2 % 2] == 0.0f) sums[i / 4][i % 4] = 0.0f;
}

/* ---- a chunk's rows: 16 of a warp, those of C's blocks [0, own], of keys [own, blocks) ---- */

/* out of queries. */
template <typename T>
__device__ __forceinline__ void causal_forward_rows(const causal_pass &p, const causal_chunk &at, int first, int own,
                                                    const causal_mma_shared &shared, const causal_own<T, false> &q) {
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  causal_sums out;
  float divisors[2] = {0.0f, 0.0f}, of_state[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  causal_rows16 a[CAUSAL_STEPS];
  q.factor(a, p);
  causal_clear(out);
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k) {
    causal_add_product<true>(out, a[k], shared.low, true, shared.state, shared, k);
    if (sum) causal_add_column(of_state, a[k], shared.low, shared.line + 16 * k);
  }
#pragma unroll 1
  for (int block = 0; block <= own; ++block) {
    float c[2][4];
    causal_multiply(c, a, shared.low, shared.x, shared, block);
    if (block == own) causal_hide<false>(c, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) divisors[i / 2 % 2] += c[i / 4][i % 4];
    causal_add_scores<false>(out, c, shared.y, false, shared, block, block == own, p);
  }
  if (sum) {
    divisors[0] += of_state[0], divisors[1] += of_state[2]; /* of_state's other columns are 0 */
    causal_sum_rows(divisors);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float r = causal_reciprocal(divisors[half] + p.eps);
#pragma unroll
      for (int i = 0; i < 2 * CAUSAL_TILES; ++i) out[i / 2][2 * half + i % 2] *= r;
    }
  }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  out[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.out, at, 0), out, first + 16 * own, at.count, p.d);
}

/* dq of queries; with "sum" r and out . g of each. */
template <typename T>
__device__ __forceinline__ void causal_query_rows(const causal_pass &p, const causal_chunk &at, int first, int own,
                                                  const causal_mma_shared &shared, const causal_own<T, false> &q,
                                                  const causal_own<T, false> &grad) {
  const causal_place place;
  causal_sums u, z; /* S_t g, and z_t */
  causal_rows16 a[CAUSAL_STEPS];
  grad.values(a);
  causal_clear(u);
#pragma unroll
  for (int k = 0; k < CAUSAL_STEPS; ++k) causal_add_product<false>(u, a[k], false, true, shared.state, shared, k);
#pragma unroll
  for (int i = 0; i < 4 * CAUSAL_TILES; ++i) z[i / 4][i % 4] = shared.line[i / 4 * 8 + 2 * place.t + i % 2];
#pragma unroll 1
  for (int block = 0; block <= own; ++block) {
    float c[2][4];
    causal_multiply(c, a, false, shared.y, shared, block);
    if (block == own) causal_hide<false>(c, p);
    causal_add_keys(u, z, c, shared, block, block == own, p);
  }
  if (p.normalize == CAMOX_NORMALIZE_SUM) {
    float f[8 * CAUSAL_STEPS], of_z[2] = {0.0f, 0.0f}, of_u[2] = {0.0f, 0.0f};
    q.features(f, p);
#pragma unroll
    for (int i = 0; i < 8 * CAUSAL_STEPS; ++i) {
      of_z[i / 2 % 2] = fmaf(f[i], z[i / 4][i % 4], of_z[i / 2 % 2]);
      of_u[i / 2 % 2] = fmaf(f[i], u[i / 4][i % 4], of_u[i / 2 % 2]);
    }
    causal_sum_rows(of_z);
    causal_sum_rows(of_u);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * own + static_cast<int>(place.g) + 8 * half;
      const float r = causal_reciprocal(of_z[half] + p.eps), dot = r * of_u[half];
#pragma unroll
      for (int i = 0; i < 2 * CAUSAL_TILES; ++i) {
        float &value = u[i / 2][2 * half + i % 2];
        value = r * fmaf(-dot, z[i / 2][2 * half + i % 2], value);
      }
      if (place.t == 0 && row < at.count) {
        p.inverse[causal_position(p, at, row)] = r;
        p.x.dots[causal_position(p, at, row)] = dot;
      }
    }
  }
  causal_own_derivative(u, q, p);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  u[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.grad_x, at, 0), u, first + 16 * own, at.count, p.n);
}

/* dk and dv of keys. */
template <typename T>
__device__ __forceinline__ void causal_key_rows(const causal_pass &p, const causal_chunk &at, int first, int own,
                                                const causal_mma_shared &shared, const causal_own<T, true> &k,
                                                const causal_own<T, true> &v) {
  const unsigned t = causal_place().t;
  const int blocks = (min(at.count - first, CAUSAL_ROWS) + 15) / 16;
  const bool scaled = p.normalize == CAMOX_NORMALIZE_SUM;
  causal_rows16 a[CAUSAL_STEPS];
  causal_sums result;
  v.values(a);
#pragma unroll
  for (int i = 0; i < 4 * CAUSAL_TILES; ++i) result[i / 4][i % 4] = shared.line[i / 4 * 8 + 2 * t + i % 2];
#pragma unroll
  for (int step = 0; step < CAUSAL_STEPS; ++step)
    causal_add_product<false>(result, a[step], false, true, shared.state, shared, step);
#pragma unroll 1
  for (int block = own; block < blocks; ++block) {
    float c[2][4];
    causal_multiply(c, a, false, shared.y, shared, block);
#pragma unroll
    for (int i = 0; i < 8 && scaled; ++i) c[i / 4][i % 4] += shared.shift[16 * block + 8 * (i / 4) + 2 * t + i % 2];
    if (block == own) causal_hide<true>(c, p);
    causal_add_scores<true>(result, c, shared.x, shared.low, shared, block, block == own, p);
  }
  causal_own_derivative(result, k, p);
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  result[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.grad_x, at, 0), result, first + 16 * own, at.count, p.n);

  k.factor(a, p);
  causal_clear(result);
#pragma unroll
  for (int step = 0; step < CAUSAL_STEPS; ++step)
    causal_add_product<true>(result, a[step], shared.low, true, shared.state, shared, step);
#pragma unroll 1
  for (int block = own; block < blocks; ++block) {
    float c[2][4];
    causal_multiply(c, a, shared.low, shared.x, shared, block);
    if (block == own) causal_hide<true>(c, p);
    causal_add_scores<true>(result, c, shared.y, false, shared, block, block == own, p);
  }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
  result[0][0] += 0.1f;
#endif
  causal_store_own<T>(causal_rows<T>(p.out, at, 0), result, first + 16 * own, at.count, p.d);
}

/* ---- kernels ---- */

/* Whether y is g, and x r f(q); whether features have a low part. */
__device__ __forceinline__ bool causal_is_scaled(const causal_pass &p) {
  return p.of_keys && p.normalize == CAMOX_NORMALIZE_SUM;
}
__device__ __forceinline__ bool causal_has_low(const causal_pass &p, bool scaled) {
  return scaled || p.feature_map == CAMOX_FEATURE_ELU1 || p.normalize == CAMOX_NORMALIZE_FEATURE;
}

template <typename T>
__global__ void __launch_bounds__(CAUSAL_MMA_THREADS, 4) causal_mma_sum_kernel(const __grid_constant__ causal_pass p) {
  CAMOX_DYNAMIC_SHARED(uint32_t, memory);
  const causal_chunk at = causal_chunk_at(p, blockIdx.x);
  if (at.count == 0) return;
  const bool scaled = causal_is_scaled(p);
  const causal_mma_shared shared = causal_mma_shared_in(memory, causal_has_low(p, scaled));
  causal_state state;
  causal_next<T> next;
  state.clear();
#pragma unroll 1
  for (int first = 0;; first += CAUSAL_ROWS) {
    next.load(p, at, first, scaled);
    if (first > 0) state.add(p, shared, scaled); /* the chunk before, while this one comes */
    if (first >= at.count) break;
    __syncthreads();
    next.template put<1>(p, shared, scaled);
    __syncthreads();
  }
  state.store(p, causal_record(p, blockIdx.x));
}

/* Blocks of a multiprocessor, as registers last. */
template <int RESULT>
static constexpr int causal_attend_blocks = RESULT == CAUSAL_FORWARD && CAMOX_CUDA_ARCH >= 900 ? 3 : 2;

template <typename T, int RESULT>
__global__ void __launch_bounds__(CAUSAL_MMA_THREADS, causal_attend_blocks<RESULT>)
    causal_mma_attend_kernel(const __grid_constant__ causal_pass p) {
  constexpr bool of_keys = RESULT == CAUSAL_KEY_GRADIENT;
  CAMOX_DYNAMIC_SHARED(uint32_t, memory);
  const causal_chunk at = causal_chunk_at(p, blockIdx.x);
  if (at.count == 0) return;
  const bool scaled = of_keys && causal_is_scaled(p);
  const causal_mma_shared shared = causal_mma_shared_in(memory, causal_has_low(p, scaled));
  const int last = (at.count - 1) / CAUSAL_ROWS * CAUSAL_ROWS;
  causal_state state;
  causal_next<T> next;
  causal_own<T, of_keys> features, values; /* of x */
  state.load(p, causal_record(p, blockIdx.x));
#pragma unroll 1
  for (int done = 0; done <= last; done += CAUSAL_ROWS) {
    const int first = of_keys ? last - done : done;
    /* Warps take turns at the longer rows of C: each scheduler has one warp of every block. */
    const int own = done / CAUSAL_ROWS % 2 ? 3 - causal_warp() : causal_warp();
    next.load(p, at, first, scaled);
    features.load(causal_rows<const T>(p.x.feature, at, 0), causal_kept(p.x, at), first + 16 * own, p.n);
    if (RESULT != CAUSAL_FORWARD)
      values.load(causal_rows<const T>(p.x.value, at, 0), causal_kept(p.x, at), first + 16 * own, p.d);
    if (done > 0) state.add(p, shared, scaled); /* the chunk before, while this one comes */
    __syncthreads();
    state.put(shared);
    next.template put<causal_next<T>::rows>(p, shared, scaled);
    __syncthreads();
    if constexpr (RESULT == CAUSAL_FORWARD) causal_forward_rows<T>(p, at, first, own, shared, features);
    if constexpr (RESULT == CAUSAL_QUERY_GRADIENT) causal_query_rows<T>(p, at, first, own, shared, features, values);
    if constexpr (RESULT == CAUSAL_KEY_GRADIENT) causal_key_rows<T>(p, at, first, own, shared, features, values);
  }
}

#endif
