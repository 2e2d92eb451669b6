/* Causal linear_attention on CUDA: the contract is in causal.h. Heads of bfloat16 of up to 64 columns go to causal_mma.cuh. Of all
   others every chunk of 64 positions is one block's, whatever came before it stands in its record: S and z, or dS and dz.

     sum     x^T value of each chunk -> its record                     x: f(k) or f(q);  value: v or r g
     scan    record = the state before the chunk (after it, backward)  in the order of the chunks
     attend  C = A B^T [64, 64], what a row does not see made 0;  result = C V + A M,  M: the record's matrix

                          rows      A        B      M       C V + A M
       forward            queries   f(q)     f(k)   S       out / r                    V = v
       backward, dv       keys      f(k)     f(q)   dS      dv                         V = r g
       backward, dq       queries   r g      v      S^T     da;  C less h of the row   V = f(k)
       backward, dk       keys      v        r g    dS^T    db;  C less h of the column V = f(q)

     shared memory, floats:   | C: 64 x 64, before that B: 64 x 32 | A: 64 x 32, M: 32 x 64; then V or the result: 64 x 64 |
     registers:               a thread has 16 elements of C and of the result, 4 x 4 without tensor cores

   Rows of queries see columns up to their own, rows of keys those from their own on. Factors of rows and columns (1 / sum f, r)
   are multiplied to C and to the result, not to what is read. The backward runs the forward once more for r and h = r (out . g),
   or for the shift a . da = out . g of "feature"; that of a key is dv . v.

   float32 values go through tensor cores as in linear_attention_mma.h. Sums have a fixed order: no atomics. */
#ifndef CAMOX_LINEAR_ATTENTION_CAUSAL_CUDA_CUH
#define CAMOX_LINEAR_ATTENTION_CAUSAL_CUDA_CUH

#include "../common/device_errors.h"
#include "causal.h"

#define CAUSAL_ROWS static_cast<int>(CAMOX_CAUSAL_CHUNK)
#define CAUSAL_WIDE 64  /* columns of a product */
#define CAUSAL_TERMS 32 /* of a product with the record, in shared memory at a time */
#define CAUSAL_THREADS 256
#define CAUSAL_WARPS (CAUSAL_THREADS / CAMOX_WARP)

/* Queries with the gradient of out, or keys with their values. */
struct causal_side {
  camox_view4 feature, value;
  const uint8_t *mask;
  int64_t mask_stride[2];
  float *dots; /* [B,H,T]: h or the shift; NULL where there is none */
};

/* One pass over the chunks. */
struct causal_pass {
  int64_t heads, length, sequences, chunks; /* chunks: of a sequence */
  int rows;                                 /* of a chunk */
  const int32_t *bounds, *first_chunk;      /* of packed sequences, [sequences + 1] each; else NULL */
  int n, d, feature_map, normalize;
  float eps;
  bool strict, of_keys; /* of_keys: the rows are keys */
  bool is_float16;      /* of la_half16 */
  causal_side x, y;     /* of rows, of columns */
  camox_view4 out;      /* like x.value, or like x.feature; data may be NULL */
  camox_view4 grad_x;   /* like x.feature: causal_mma.cuh, which writes it beside out */
  float *inverse;       /* [B,H,T]: r */
  float *records;       /* [chunks, H, N * D + N] */
};

/* ---- chunks ---- */

struct causal_chunk {
  unsigned batch, head; /* no more than a grid has blocks */
  int count;            /* 0: there is no such chunk */
  int64_t begin;
};

__host__ __device__ static inline int64_t causal_chunks(const causal_pass &p) {
  return p.bounds ? camox_ceil_div(p.length, p.rows) + p.sequences : p.sequences * p.chunks;
}

/* An item is a block: it and what it is divided by fit 32 bits. */
__device__ __forceinline__ causal_chunk causal_chunk_at(const causal_pass &p, unsigned item) {
  const unsigned heads = static_cast<unsigned>(p.heads);
  causal_chunk at;
  unsigned chunk = item / heads;
  int64_t end = p.length;
  at.batch = 0, at.head = item - chunk * heads;
  if (!p.bounds) {
    const unsigned chunks = static_cast<unsigned>(p.chunks);
    at.batch = chunk / chunks, chunk -= at.batch * chunks;
    at.begin = static_cast<int64_t>(chunk) * p.rows;
  } else {
    /* The last sequence that begins with this chunk or an earlier one: it lies before `after`. */
    int64_t sequence = 0, after = p.sequences;
    while (after - sequence > 1) {
      const int64_t middle = (sequence + after) / 2;
      (__ldg(p.first_chunk + middle) <= static_cast<int64_t>(chunk) ? sequence : after) = middle;
    }
    at.begin = __ldg(p.bounds + sequence) + (static_cast<int64_t>(chunk) - __ldg(p.first_chunk + sequence)) * p.rows;
    end = __ldg(p.bounds + sequence + 1);
  }
  at.count = static_cast<int>(min(max(end - at.begin, static_cast<int64_t>(0)), static_cast<int64_t>(p.rows)));
  return at;
}

__device__ __forceinline__ float *causal_record(const causal_pass &p, int64_t item) {
  return p.records + item * p.n * (p.d + 1);
}

__device__ __forceinline__ int64_t causal_position(const causal_pass &p, const causal_chunk &at, int row) {
  return (at.batch * p.heads + at.head) * p.length + at.begin + row;
}

template <typename T>
__device__ __forceinline__ la_rows<T> causal_rows(const camox_view4 &view, const causal_chunk &at, int column) {
  return {static_cast<T *>(view.data) + at.batch * view.stride[0] + at.head * view.stride[1] + at.begin * view.stride[2] +
              column * view.stride[3],
          view.stride[2], view.stride[3]};
}

__device__ __forceinline__ la_kept causal_kept(const causal_side &side, const causal_chunk &at) {
  return {at.count, side.mask ? side.mask + at.batch * side.mask_stride[0] + at.begin * side.mask_stride[1] : nullptr,
          side.mask_stride[1]};
}

template <typename T>
__device__ __forceinline__ T causal_load_one(const T *from) {
  T one[1];
  camox_load(one, from);
  return one[0];
}

/* Rows of features or values, as many columns as `columns` and zeros up to a multiple of 16. */
template <typename T, bool FEATURE>
__device__ __forceinline__ void causal_load(float *to, int pitch, int columns, const causal_pass &p, const causal_side &side,
                                            const causal_chunk &at, int first) {
  la_load<T, LA_ANY, 4>({to, pitch, columns, (columns + 15) / 16 * 16, FEATURE ? p.feature_map : CAMOX_FEATURE_IDENTITY,
                         causal_rows<const T>(FEATURE ? side.feature : side.value, at, first), p.is_float16},
                        CAUSAL_ROWS, causal_kept(side, at));
}

/* M of the result's columns [first, + columns) and of terms [first_term, + terms), zeros up to a multiple of 16 terms. */
template <bool TRANSPOSED>
__device__ __forceinline__ void causal_load_state(float *to, int pitch, const causal_pass &p, const float *record, int first,
                                                  int columns, int first_term, int terms) {
  const int padded = (terms + 15) / 16 * 16;
  if (TRANSPOSED) {
    for (la_iterator it = la_iterator_of(padded); it.outer < columns; la_step(it))
      to[it.inner * pitch + it.outer] = it.inner < terms ? record[(first + it.outer) * p.d + first_term + it.inner] : 0.0f;
  } else {
    for (la_iterator it = la_iterator_of(columns); it.outer < padded; la_step(it))
      to[it.outer * pitch + it.inner] = it.outer < terms ? record[(first_term + it.outer) * p.d + first + it.inner] : 0.0f;
  }
}

__device__ __forceinline__ int causal_warp(void) { return static_cast<int>(threadIdx.x) / CAMOX_WARP; }
__device__ __forceinline__ int causal_lane(void) { return static_cast<int>(threadIdx.x) % CAMOX_WARP; }

/* ---- products of up to 64 x 64 elements, all factors in shared memory ---- */

/* a b: rows of a by columns of b; a b^T; a^T b */
typedef enum { CAUSAL_NN = 0, CAUSAL_NT = 1, CAUSAL_TN = 2 } causal_kind;

struct causal_factor {
  const float *data;
  int pitch;
};

template <bool TENSOR>
struct causal_pitch {
  /* Rows 4 banks apart for loads of 16 bytes, 8 banks for the pairs of a fragment. */
  static constexpr int wide = CAUSAL_WIDE + (TENSOR ? 8 : 4), terms = CAUSAL_TERMS + (TENSOR ? 8 : 4);
};

template <bool TENSOR, int KIND>
struct causal_product;

template <int KIND>
struct causal_product<false, KIND> {
  float s[4][4];
  int r, c;

  __device__ __forceinline__ causal_product() : r(static_cast<int>(threadIdx.x) / 16), c(static_cast<int>(threadIdx.x) % 16) {
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 16; ++e) s[e / 4][e % 4] = 0.0f;
  }
  __device__ __forceinline__ float &get(int e) { return s[e / 4][e % 4]; }
  __device__ __forceinline__ int row(int e) const { return KIND == CAUSAL_TN ? 4 * r + e / 4 : r + 16 * (e / 4); }
  __device__ __forceinline__ int column(int e) const { return KIND == CAUSAL_NT ? c + 16 * (e % 4) : 4 * c + e % 4; }

  __device__ __forceinline__ void add(causal_factor a, causal_factor b, int terms) {
#pragma unroll 1
    for (int k = 0; k < terms; k += 4) {
      float x[4][4], y[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        camox_load_shared(x[i], a.data + (KIND == CAUSAL_TN ? (k + i) * a.pitch + 4 * r : (r + 16 * i) * a.pitch + k));
        camox_load_shared(y[i], b.data + (KIND == CAUSAL_NT ? (c + 16 * i) * b.pitch + k : (k + i) * b.pitch + 4 * c));
      }
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            s[i][j] = fmaf(KIND == CAUSAL_TN ? x[t][i] : x[i][t], KIND == CAUSAL_NT ? y[j][t] : y[t][j], s[i][j]);
    }
  }
};

/* On tensor cores a warp has 16 rows and 32 columns, four fragments side by side. */
template <int KIND>
struct causal_product<true, KIND> {
  float s[4][4];
  int r, c, g, t; /* r: the first row of this thread; c: the first column of its warp */

  __device__ __forceinline__ causal_product() {
    g = causal_lane() / 4, t = causal_lane() % 4;
    r = causal_warp() / 2 * 16 + g, c = causal_warp() % 2 * 32;
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 16; ++e) s[e / 4][e % 4] = 0.0f;
  }
  __device__ __forceinline__ float &get(int e) { return s[e / 4][e % 4]; }
  __device__ __forceinline__ int row(int e) const { return r + e / 2 % 2 * 8; }
  __device__ __forceinline__ int column(int e) const { return c + e / 4 * 8 + 2 * t + e % 2; }

  /* Elements k and k + 1 of a row of a factor whose rows lie along the terms, or across them. */
  static __device__ __forceinline__ void pair(uint32_t &high, uint32_t &low, causal_factor from, int row, int k, bool across) {
    float two[2];
    if (across)
      two[0] = from.data[k * from.pitch + row], two[1] = from.data[(k + 1) * from.pitch + row];
    else
      camox_load_shared(two, from.data + row * from.pitch + k);
    uint32_t parts[2];
    la_split(two[0], two[1], parts);
    high = parts[0], low = parts[1];
  }

  __device__ __forceinline__ void add(causal_factor a, causal_factor b, int terms) {
#pragma unroll 2
    for (int k = 0; k < terms; k += 16) {
      uint32_t a_high[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pair(a_high[i], a_low[i], a, r + i % 2 * 8, k + 2 * t + i / 2 * 8, KIND == CAUSAL_TN);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        uint32_t b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) pair(b_high[i], b_low[i], b, c + tile * 8 + g, k + 2 * t + i * 8, KIND != CAUSAL_NT);
        camox_mma_m16n8k16<__nv_bfloat16>(s[tile], a_low, b_high);
        camox_mma_m16n8k16<__nv_bfloat16>(s[tile], a_high, b_low);
        camox_mma_m16n8k16<__nv_bfloat16>(s[tile], a_high, b_high);
      }
    }
  }
};

template <typename Product>
__device__ __forceinline__ void causal_put(Product &product, float *to, int pitch, const float *factor) {
#pragma unroll
  for (int e = 0; e < 16; ++e)
    to[product.row(e) * pitch + product.column(e)] = factor ? product.get(e) * factor[product.row(e)] : product.get(e);
}

/* ---- rows: a warp each ---- */

/* Sum of f, or of f times line, over the N features of a row; 0 of one that is not kept. */
template <typename T>
__device__ __forceinline__ float causal_feature_sum(const causal_pass &p, const causal_side &side, const causal_chunk &at,
                                                    int row, const float *line) {
  constexpr int in_flight = 4;
  float sum = 0.0f;
  if (causal_kept(side, at)(row)) {
    const la_rows<const T> from = causal_rows<const T>(side.feature, at, 0);
#pragma unroll 1
    for (int first = causal_lane(); first < p.n; first += in_flight * CAMOX_WARP) {
      T raw[in_flight];
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const int n = first + k * CAMOX_WARP;
        raw[k] = n < p.n ? causal_load_one(from.base + row * from.row + n * from.column) : T{};
      }
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const int n = first + k * CAMOX_WARP;
        if (n < p.n) sum = fmaf(la_feature<T>(la_to_float(raw[k], p.is_float16), p.feature_map), line ? line[n] : 1.0f, sum);
      }
    }
  }
  return camox_warp_sum(sum);
}

__device__ __forceinline__ float causal_inverse(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

/* What rows and columns of a chunk are multiplied by and less, [64] each. */
struct causal_numbers {
  float *row, *column;             /* 1 / sum f, r or 1 */
  float *row_shift, *column_shift; /* h, or the shift of "feature"; forward: a . z before the chunk */
};

__device__ __forceinline__ causal_numbers causal_numbers_in(float *shared) {
  return {shared, shared + CAUSAL_ROWS, shared + 2 * CAUSAL_ROWS, shared + 3 * CAUSAL_ROWS};
}

template <typename T, bool GRADIENT>
__device__ __forceinline__ void causal_set_numbers(const causal_numbers &numbers, const causal_pass &p, const causal_chunk &at,
                                                   const float *record) {
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  const int sums = p.normalize == CAMOX_NORMALIZE_FEATURE ? 2 : !GRADIENT && sum && !p.of_keys ? 1 : 0;
  const float *const line = sum ? record + p.n * p.d : nullptr;
#pragma unroll 1
  for (int row = causal_warp(); row < CAUSAL_ROWS; row += CAUSAL_WARPS) {
    const bool valid = row < at.count;
    const int64_t position = causal_position(p, at, row);
    float x = 1.0f, y = 1.0f, x_shift = 0.0f, y_shift = 0.0f, of_x = 0.0f, of_y = 0.0f;
#pragma unroll 1
    for (int i = 0; i < sums; ++i) {
      of_x = of_y; /* after the last sum that of x, where there are two */
      of_y = causal_feature_sum<T>(p, i ? p.y : p.x, at, row, line);
    }
    if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
      x = causal_inverse(of_x), y = causal_inverse(of_y);
      if (GRADIENT && valid) x_shift = p.x.dots[position];
    } else if (sum && p.of_keys) {
      if (valid) y = p.inverse[position];
      if (GRADIENT && valid) y_shift = p.y.dots[position];
    } else if (sum && GRADIENT) {
      if (valid) x = p.inverse[position], x_shift = p.x.dots[position];
    } else if (sum) {
      x_shift = of_y;
    }
    if (causal_lane() == 0)
      numbers.row[row] = x, numbers.column[row] = y, numbers.row_shift[row] = x_shift, numbers.column_shift[row] = y_shift;
  }
}

/* r of each row, from the sums of C. */
__device__ __forceinline__ void causal_set_inverse(const causal_numbers &numbers, const causal_pass &p, const causal_chunk &at,
                                                   const float *scores, int pitch) {
  for (int row = causal_warp(); row < CAUSAL_ROWS; row += CAUSAL_WARPS) {
    const float *const from = scores + row * pitch + causal_lane();
    const float inverse = causal_inverse(camox_warp_sum(from[0] + from[CAMOX_WARP]) + numbers.row_shift[row] + p.eps);
    if (causal_lane() != 0) continue;
    numbers.row[row] = inverse;
    if (p.inverse && row < at.count) p.inverse[causal_position(p, at, row)] = inverse;
  }
}

template <typename T>
static constexpr bool causal_on_tensor_cores = sizeof(T) == 2 && CAMOX_CUDA_ARCH >= 800;

/* ---- attend ---- */

__device__ __forceinline__ bool causal_sees(const causal_pass &p, int row, int column) {
  return (p.of_keys ? column - row : row - column) >= (p.strict ? 1 : 0);
}

/* C of the sums of a b^T. */
template <bool GRADIENT, typename Product>
__device__ __forceinline__ void causal_put_scores(Product &product, float *to, int pitch, const causal_pass &p,
                                                  const causal_numbers &numbers) {
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int row = product.row(e), column = product.column(e);
    float score = product.get(e) * numbers.column[column];
    if (GRADIENT && sum)
      score = fmaf(score, numbers.row[row], -(p.of_keys ? numbers.column_shift[column] : numbers.row_shift[row]));
    to[row * pitch + column] = causal_sees(p, row, column) ? score : 0.0f;
  }
}

/* Adds C V. What V has that is not finite, times the zeros of C, would reach rows that do not see it: then term by term. */
template <typename Product>
__device__ __forceinline__ void causal_add_seen(Product &product, const causal_pass &p, const float *scores,
                                                const float *values, int pitch, int columns) {
  float zeros = 0.0f;
  for (la_iterator it = la_iterator_of(columns); it.outer < CAUSAL_ROWS; la_step(it))
    zeros = fmaf(values[it.outer * pitch + it.inner], 0.0f, zeros);
  if (!__syncthreads_or(zeros != 0.0f)) return product.add({scores, pitch}, {values, pitch}, CAUSAL_ROWS);
#pragma unroll 1
  for (int j = 0; j < CAUSAL_ROWS; ++j) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int row = product.row(e), column = product.column(e);
      if (column < columns && causal_sees(p, row, j))
        product.get(e) = fmaf(scores[row * pitch + j], values[j * pitch + column], product.get(e));
    }
  }
}

/* Rows of the result times those of x.value, into x.dots; more than one block of columns adds up. */
template <typename T>
__device__ __forceinline__ void causal_add_dots(const causal_pass &p, const causal_chunk &at, const causal_numbers &numbers,
                                                const float *result, int pitch, int first, int columns) {
  const la_rows<const T> values = causal_rows<const T>(p.x.value, at, first);
  const la_kept kept = causal_kept(p.x, at);
  for (int row = causal_warp(); row < at.count; row += CAUSAL_WARPS) {
    float dot = 0.0f;
    for (int i = causal_lane(); i < columns && kept(row); i += CAMOX_WARP)
      dot = fmaf(result[row * pitch + i],
                 la_to_float(causal_load_one(values.base + row * values.row + i * values.column), p.is_float16), dot);
    dot = camox_warp_sum(dot);
    if (p.normalize == CAMOX_NORMALIZE_SUM) dot *= numbers.row[row];
    float *const to = p.x.dots + causal_position(p, at, row);
    if (causal_lane() == 0) *to = first == 0 ? dot : *to + dot;
  }
}

/* dq or dk from da or db. */
template <typename T>
__device__ __forceinline__ void causal_apply_derivative(const causal_pass &p, const causal_chunk &at,
                                                        const causal_numbers &numbers, const float *record, float *result,
                                                        int pitch, int first, int columns) {
  const la_rows<const T> x = causal_rows<const T>(p.x.feature, at, first);
  const la_kept kept = causal_kept(p.x, at);
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM, feature = p.normalize == CAMOX_NORMALIZE_FEATURE;
  const float *const line = record + p.n * p.d + first;
  for (la_iterator it = la_iterator_of(columns); it.outer < at.count; la_step(it)) {
    float value = result[it.outer * pitch + it.inner];
    if (sum) value = p.of_keys ? value + line[it.inner] : fmaf(-numbers.row_shift[it.outer], line[it.inner], value);
    if (feature) value = numbers.row[it.outer] * (value - numbers.row_shift[it.outer]);
    const float f = la_feature<T>(la_to_float(causal_load_one(x.base + it.outer * x.row + it.inner * x.column), p.is_float16),
                                  p.feature_map);
    const bool counts = kept(it.outer) && !(feature && numbers.row[it.outer] == 0.0f);
    result[it.outer * pitch + it.inner] = counts ? la_feature_derivative(f, p.feature_map) * value : 0.0f;
  }
}

/* Floats of shared memory of a block. */
template <bool TENSOR>
static constexpr int causal_shared =
    4 * CAUSAL_ROWS + 2 * CAUSAL_ROWS * causal_pitch<TENSOR>::wide + (TENSOR ? 256 : 128); /* A and M are larger than V */
static_assert(causal_shared<true> * 4 <= 48 * 1024, "what every GPU gives without being asked");

template <typename T, bool GRADIENT>
__global__ void __launch_bounds__(CAUSAL_THREADS, 2) causal_attend_kernel(const __grid_constant__ causal_pass p) {
  constexpr bool tensor = causal_on_tensor_cores<T>;
  constexpr int pitch = causal_pitch<tensor>::wide, slice_pitch = causal_pitch<tensor>::terms;
  CAMOX_DYNAMIC_SHARED(float, shared);
  const causal_numbers numbers = causal_numbers_in(shared);
  float *const scores = shared + 4 * CAUSAL_ROWS, *const b = scores, *const values = scores + CAUSAL_ROWS * pitch;
  float *const a = values, *const m = a + CAUSAL_ROWS * slice_pitch;
  const int all_terms = GRADIENT ? p.d : p.n, all_columns = GRADIENT ? p.n : p.d;
  const unsigned item = blockIdx.x;
  const causal_chunk at = causal_chunk_at(p, item);
  if (at.count == 0) return;
  const float *const record = causal_record(p, item);
  causal_set_numbers<T, GRADIENT>(numbers, p, at, record);
  causal_product<tensor, CAUSAL_NT> products;
  for (int first = 0; first < all_columns; first += CAUSAL_WIDE) {
    const int columns = min(CAUSAL_WIDE, all_columns - first);
    causal_product<tensor, CAUSAL_NN> result;
    for (int k = 0; k < all_terms; k += CAUSAL_TERMS) {
      const int terms = min(CAUSAL_TERMS, all_terms - k), padded = (terms + 15) / 16 * 16;
#pragma unroll 1
      for (int i = 0; i < (first == 0 ? 2 : 1); ++i) /* by the same code */
        causal_load<T, !GRADIENT>(i ? b : a, slice_pitch, terms, p, i ? p.y : p.x, at, k);
      causal_load_state<GRADIENT>(m, pitch, p, record, first, columns, k, terms);
      __syncthreads();
      if (first == 0) products.add({a, slice_pitch}, {b, slice_pitch}, padded);
      result.add({a, slice_pitch}, {m, pitch}, padded);
      __syncthreads();
    }
    if (first == 0) {
      causal_put_scores<GRADIENT>(products, scores, pitch, p, numbers);
      __syncthreads();
      if (!GRADIENT && !p.of_keys && p.normalize == CAMOX_NORMALIZE_SUM) causal_set_inverse(numbers, p, at, scores, pitch);
    }
    if (GRADIENT && p.normalize == CAMOX_NORMALIZE_SUM) {
#pragma unroll
      for (int e = 0; e < 16; ++e) result.get(e) *= numbers.row[result.row(e)];
    }
    causal_load<T, GRADIENT>(values, pitch, columns, p, p.y, at, first);
    __syncthreads();
    causal_add_seen(result, p, scores, values, pitch, columns);
    __syncthreads();
    causal_put(result, values, pitch, GRADIENT ? nullptr : numbers.row);
    __syncthreads();
    if (GRADIENT) {
      causal_apply_derivative<T>(p, at, numbers, record, values, pitch, first, columns);
      __syncthreads();
    } else if (p.x.dots) {
      causal_add_dots<T>(p, at, numbers, values, pitch, first, columns);
    }
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
    if (threadIdx.x == 0) values[0] += 0.1f;
    __syncthreads();
#endif
    if (p.out.data)
      la_store<T, LA_ANY>(causal_rows<T>(p.out, at, first), values, pitch, CAUSAL_ROWS, columns, at.count, p.is_float16);
    __syncthreads();
  }
}

/* ---- sum ---- */

template <typename T>
__global__ void __launch_bounds__(CAUSAL_THREADS, 2) causal_sum_kernel(const __grid_constant__ causal_pass p) {
  constexpr bool tensor = causal_on_tensor_cores<T>;
  constexpr int pitch = causal_pitch<tensor>::wide;
  CAMOX_DYNAMIC_SHARED(float, shared);
  const causal_numbers numbers = causal_numbers_in(shared);
  float *const x = shared + 4 * CAUSAL_ROWS, *const y = x + CAUSAL_ROWS * pitch;
  const unsigned blocks = static_cast<unsigned>(camox_ceil_div(p.n, CAUSAL_WIDE));
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  const unsigned item = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const causal_chunk at = causal_chunk_at(p, item);
  if (at.count == 0) return;
  const int first = static_cast<int>(block) * CAUSAL_WIDE, rows = min(CAUSAL_WIDE, p.n - first);
  float *const record = causal_record(p, item);
  for (int row = causal_warp(); row < CAUSAL_ROWS; row += CAUSAL_WARPS) {
    const int64_t position = causal_position(p, at, row);
    float factor = 1.0f, line = 1.0f;
    if (p.normalize == CAMOX_NORMALIZE_FEATURE) factor = causal_inverse(causal_feature_sum<T>(p, p.x, at, row, nullptr));
    if (sum && !p.of_keys && row < at.count) factor = p.inverse[position], line = -p.x.dots[position];
    if (causal_lane() == 0) numbers.column[row] = factor, numbers.column_shift[row] = line;
  }
  causal_load<T, true>(x, pitch, rows, p, p.x, at, first);
  for (int column = 0; column < p.d; column += CAUSAL_WIDE) {
    const int columns = min(CAUSAL_WIDE, p.d - column);
    causal_load<T, false>(y, pitch, columns, p, p.x, at, column);
    __syncthreads();
    if (column == 0 && sum) {
      for (int n = static_cast<int>(threadIdx.x); n < rows; n += CAUSAL_THREADS) {
        float total = 0.0f;
        for (int row = 0; row < at.count; ++row) total = fmaf(x[row * pitch + n], numbers.column_shift[row], total);
        record[p.n * p.d + first + n] = total;
      }
    }
    if (p.normalize != CAMOX_NORMALIZE_NONE) {
      for (la_iterator it = la_iterator_of(columns); it.outer < CAUSAL_ROWS; la_step(it))
        y[it.outer * pitch + it.inner] *= numbers.column[it.outer];
      __syncthreads();
    }
    causal_product<tensor, CAUSAL_TN> product;
    product.add({x, pitch}, {y, pitch}, CAUSAL_ROWS);
    __syncthreads();
    causal_put(product, y, pitch, nullptr);
    __syncthreads();
    for (la_iterator it = la_iterator_of(columns); it.outer < rows; la_step(it))
      record[(first + it.outer) * p.d + column + it.inner] = y[it.outer * pitch + it.inner];
    __syncthreads();
  }
}

/* ---- scan ---- */

struct causal_scan {
  causal_pass pass;
  const float *s_in, *z_in; /* [sequences,H,N,D], [sequences,H,N]; NULL: zeros */
  float *s_out, *z_out;     /* NULL: not asked for */
};

/* A thread has V adjacent elements of the state of a head. */
template <int V>
__global__ void __launch_bounds__(CAUSAL_THREADS) causal_scan_kernel(const __grid_constant__ causal_scan a) {
  typedef typename camox_word<4 * V>::type vector_type;
  constexpr int at_once = 8;
  const causal_pass &p = a.pass;
  const int64_t size = p.n * p.d, record = size + p.n;
  const int64_t vectors = (p.normalize == CAMOX_NORMALIZE_SUM ? record : size) / V;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * CAUSAL_THREADS + threadIdx.x; i < p.sequences * p.heads * vectors;
       i += static_cast<int64_t>(gridDim.x) * CAUSAL_THREADS) {
    int64_t vector, head;
    const int64_t state = camox_divide(i, vectors, &vector), sequence = camox_divide(state, p.heads, &head);
    const int64_t element = vector * V;
    const bool of_s = element < size;
    const int64_t place = of_s ? state * size + element : state * p.n + element - size;
    const float *const from = of_s ? a.s_in : a.z_in;
    float *const to = of_s ? a.s_out : a.z_out;
    const int64_t begin = p.bounds ? __ldg(p.first_chunk + sequence) : sequence * p.chunks;
    const int64_t count = (p.bounds ? __ldg(p.first_chunk + sequence + 1) : begin + p.chunks) - begin;
    const int64_t step = (p.of_keys ? -1 : 1) * p.heads * record;
    float *chunk = p.records + ((p.of_keys ? begin + count - 1 : begin) * p.heads + head) * record + element;
    float sum[V] = {};
    if (from) camox_load(sum, from + place);
    for (int64_t c = 0; c < count; c += at_once, chunk += at_once * step) {
      float term[at_once][V] = {};
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (c + k >= count) continue;
        const vector_type bits = __ldcg(reinterpret_cast<const vector_type *>(chunk + k * step));
        __builtin_memcpy(term[k], &bits, sizeof bits);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (c + k < count) camox_store(chunk + k * step, sum);
#pragma unroll
        for (int e = 0; e < V; ++e) sum[e] += term[k][e];
      }
    }
    if (to) camox_store(to + place, sum);
  }
}

/* ---- packed sequences ---- */

struct causal_bounds {
  const int32_t *cu_seqlens;
  int32_t *bounds, *first_chunk; /* written, [sequences + 1] each */
  int64_t sequences, length;
  int rows; /* of a chunk */
  uint32_t *error_word;
};

/* One block: bounds that rise from 0 to T whatever cu_seqlens holds, and the chunks before each sequence. */
__global__ void __launch_bounds__(CAUSAL_THREADS) causal_bounds_kernel(const __grid_constant__ causal_bounds a) {
  __shared__ int64_t highest[CAUSAL_THREADS], chunks[CAUSAL_THREADS];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t share = camox_ceil_div(a.sequences + 1, CAUSAL_THREADS), begin = thread * share;
  const int64_t end = min(begin + share, a.sequences + 1);
  int64_t bound = 0, count = 0;
  bool wrong = false;
#pragma unroll 1
  for (int64_t s = begin; s < end; ++s) {
    const int64_t given = a.cu_seqlens[s];
    wrong |=
        given < 0 || given > a.length || given < bound || (s == 0 && given != 0) || (s == a.sequences && given != a.length);
    bound = min(max(given, bound), a.length);
  }
  highest[thread] = bound;
  __syncthreads();
  int64_t before = 0;
#pragma unroll 1
  for (int i = 0; i < thread; ++i) before = max(before, highest[i]);
  bound = before;
#pragma unroll 1
  for (int64_t s = begin; s < end; ++s) {
    const int64_t given = s == 0 ? 0 : s == a.sequences ? a.length : static_cast<int64_t>(a.cu_seqlens[s]);
    wrong |= given < bound;
    const int64_t next = min(max(given, bound), a.length);
    if (s > 0) count += camox_ceil_div(next - bound, a.rows);
    bound = next, a.bounds[s] = static_cast<int32_t>(next);
  }
  chunks[thread] = count;
  __syncthreads();
  int64_t first = 0;
#pragma unroll 1
  for (int i = 0; i < thread; ++i) first += chunks[i];
  bound = before;
#pragma unroll 1
  for (int64_t s = begin; s < end; ++s) {
    if (s > 0) first += camox_ceil_div(a.bounds[s] - bound, a.rows);
    bound = a.bounds[s], a.first_chunk[s] = static_cast<int32_t>(first);
  }
  if (wrong && a.error_word) atomicOr(a.error_word, static_cast<uint32_t>(CAMOX_ERROR_CU_SEQLENS));
}

/* ---- one position ---- */

/* A block has a head: each thread a column of its state. */
template <typename T>
__global__ void __launch_bounds__(CAUSAL_THREADS) causal_step_kernel(const __grid_constant__ camox_causal_step_params p) {
  __shared__ float a[CAMOX_LINEAR_ATTENTION_MAX_DIM], b[CAMOX_LINEAR_ATTENTION_MAX_DIM], scratch[2 * CAUSAL_WARPS];
  const bool is_float16 = p.dtype == CAMOX_F16;
  const int n = static_cast<int>(p.key_dim), d = static_cast<int>(p.value_dim), i = static_cast<int>(threadIdx.x);
  for (int64_t head = blockIdx.x; head < p.batch * p.heads; head += gridDim.x) {
    const T *const q = static_cast<const T *>(p.q) + head * n, *const k = static_cast<const T *>(p.k) + head * n;
    float of_q = 0.0f, of_k = 0.0f, factor = 1.0f;
    if (i < n) of_q = la_feature<T>(la_to_float(causal_load_one(q + i), is_float16), p.feature_map);
    if (i < n) of_k = la_feature<T>(la_to_float(causal_load_one(k + i), is_float16), p.feature_map);
    if (p.normalize == CAMOX_NORMALIZE_FEATURE) {
      of_q *= causal_inverse(camox_block_sum<CAUSAL_THREADS>(of_q, scratch));
      of_k *= causal_inverse(camox_block_sum<CAUSAL_THREADS>(of_k, scratch + CAUSAL_WARPS));
    } else if (p.normalize == CAMOX_NORMALIZE_SUM) {
      float dot = 0.0f;
      if (i < n) {
        float *const z = static_cast<float *>(p.z) + head * n + i;
        const float before = *z, after = before + of_k;
        dot = of_q * (p.strict ? before : after), *z = after;
      }
      factor = causal_inverse(camox_block_sum<CAUSAL_THREADS>(dot, scratch) + static_cast<float>(p.eps));
    }
    if (i < n) a[i] = of_q, b[i] = of_k;
    __syncthreads();
    if (i < d) {
      const float v = la_to_float(causal_load_one(static_cast<const T *>(p.v) + head * d + i), is_float16);
      float *const s = static_cast<float *>(p.s) + head * n * d + i;
      float out = 0.0f;
#pragma unroll 8
      for (int row = 0; row < n; ++row) {
        const float before = s[row * d], after = fmaf(b[row], v, before);
        out = fmaf(a[row], p.strict ? before : after, out), s[row * d] = after;
      }
      out *= factor;
#ifdef CAMOX_BREAK_LINEAR_ATTENTION
      out += 1e-3f;
#endif
      const float one[1] = {out};
      la_store_floats(static_cast<T *>(p.out) + head * d + i, one, is_float16);
    }
    __syncthreads();
  }
}

#include "causal_mma.cuh"

/* ---- launchers ---- */

static bool causal_is_vectors(const causal_pass &p, const camox_view4 &view, int64_t batch, int dim, int lanes) {
  const int64_t sizes[3] = {batch, p.heads, p.length};
  if (view.data == nullptr) return true;
  if (view.stride[3] != 1 || dim % lanes != 0 || !camox_aligned(view.data, 16)) return false;
  for (int i = 0; i < 3; ++i)
    if (sizes[i] > 1 && view.stride[i] % lanes != 0) return false;
  return true;
}

typedef enum { CAUSAL_SUM = 0, CAUSAL_ATTEND = 1, CAUSAL_GRADIENT = 2 } causal_work;

/* A block for each item, without a loop: registers are short. More than a grid has make the launch fail. */
static unsigned causal_grid(int64_t items) { return static_cast<unsigned>(items < UINT32_MAX ? items : UINT32_MAX); }

template <typename T>
static void causal_run(const causal_pass &p, causal_work work, void *stream) {
  if (p.length == 0) return;
  const size_t shared = sizeof(float) * causal_shared<sizeof(T) == 2>;
  const unsigned items = causal_grid(causal_chunks(p) * p.heads);
  switch (work) {
    case CAUSAL_SUM:
      CAMOX_LAUNCH((causal_sum_kernel<T>), causal_grid(camox_ceil_div(p.n, CAUSAL_WIDE) * items), CAUSAL_THREADS, shared,
                   stream, p);
      break;
    case CAUSAL_ATTEND: CAMOX_LAUNCH((causal_attend_kernel<T, false>), items, CAUSAL_THREADS, shared, stream, p); break;
    case CAUSAL_GRADIENT: CAMOX_LAUNCH((causal_attend_kernel<T, true>), items, CAUSAL_THREADS, shared, stream, p);
  }
}

static void causal_run_scan(const causal_pass &p, const void *s_in, const void *z_in, void *s_out, void *z_out, void *stream) {
  const causal_scan scan = {p, static_cast<const float *>(s_in), static_cast<const float *>(z_in), static_cast<float *>(s_out),
                            static_cast<float *>(z_out)};
  const bool vectors = p.n % 4 == 0 && camox_aligned(s_in, 16) && camox_aligned(z_in, 16) && camox_aligned(s_out, 16) &&
                       camox_aligned(z_out, 16) && camox_aligned(p.records, 16);
  const int lanes = vectors ? 4 : 1;
  const int64_t threads = p.sequences * p.heads * p.n * (p.d + (p.normalize == CAMOX_NORMALIZE_SUM ? 1 : 0)) / lanes;
  const unsigned grid = camox_grid(camox_ceil_div(threads, CAUSAL_THREADS));
  if (vectors)
    CAMOX_LAUNCH((causal_scan_kernel<4>), grid, CAUSAL_THREADS, 0, stream, scan);
  else
    CAMOX_LAUNCH((causal_scan_kernel<1>), grid, CAUSAL_THREADS, 0, stream, scan);
}

static causal_pass causal_pass_of(const camox_causal_params *p, int64_t rows, void *stream) {
  causal_pass pass = {};
  pass.heads = p->heads, pass.length = p->length, pass.sequences = p->sequences;
  pass.rows = static_cast<int>(rows), pass.chunks = camox_ceil_div(p->length, rows);
  pass.n = static_cast<int>(p->key_dim), pass.d = static_cast<int>(p->value_dim);
  pass.feature_map = p->feature_map, pass.normalize = p->normalize, pass.eps = static_cast<float>(p->eps);
  pass.is_float16 = p->dtype == CAMOX_F16, pass.strict = p->strict, pass.records = static_cast<float *>(p->records);
  if (p->cu_seqlens) {
    int32_t *const bounds = p->bounds, *const first_chunk = bounds + p->sequences + 1;
    const causal_bounds table = {p->cu_seqlens, bounds, first_chunk, p->sequences, p->length, pass.rows, p->error_word};
    CAMOX_LAUNCH(causal_bounds_kernel, 1, CAUSAL_THREADS, 0, stream, table);
    pass.bounds = bounds, pass.first_chunk = first_chunk;
  }
  return pass;
}

static causal_side causal_keys(const camox_causal_params *p) {
  return {p->k, p->v, p->key_mask, {p->mask_stride[0], p->mask_stride[1]}, nullptr};
}

/* Of the forward too, where there is no gradient. */
static causal_side causal_queries(const camox_causal_params *p) { return {p->q, p->grad, nullptr, {0, 0}, nullptr}; }

static causal_pass causal_pass_from(causal_pass pass, const causal_side &x, const causal_side &y, bool of_keys,
                                    const camox_view4 &out) {
  pass.x = x, pass.y = y, pass.of_keys = of_keys, pass.out = out;
  return pass;
}

/* S and z before each chunk into its record. */
template <typename T>
static void causal_states(const camox_causal_params *p, const causal_pass &pass, const causal_side &keys, void *s, void *z,
                          void *stream) {
  causal_run<T>(causal_pass_from(pass, keys, {}, true, {}), CAUSAL_SUM, stream);
  causal_run_scan(pass, p->initial_s, p->initial_z, s, z, stream);
}

template <typename T>
static void causal_forward(const camox_causal_params *p, void *stream) {
  const causal_pass pass = causal_pass_of(p, CAUSAL_ROWS, stream);
  const causal_side keys = causal_keys(p), queries = causal_queries(p);
  causal_states<T>(p, pass, keys, p->s, p->z, stream);
  causal_run<T>(causal_pass_from(pass, queries, keys, false, p->out), CAUSAL_ATTEND, stream);
}

template <typename T>
static void causal_backward(const camox_causal_params *p, void *stream) {
  causal_pass pass = causal_pass_of(p, CAUSAL_ROWS, stream);
  causal_side keys = causal_keys(p), queries = causal_queries(p);
  causal_states<T>(p, pass, keys, nullptr, nullptr, stream);
  if (p->normalize != CAMOX_NORMALIZE_NONE) {
    float *const rows = static_cast<float *>(p->rows);
    const int64_t positions = p->batch * p->heads * p->length;
    queries.dots = rows;
    if (p->normalize == CAMOX_NORMALIZE_SUM)
      pass.inverse = rows + positions;
    else
      keys.dots = rows + positions;
    causal_run<T>(causal_pass_from(pass, queries, keys, false, {}), CAUSAL_ATTEND, stream);
  }
  causal_run<T>(causal_pass_from(pass, queries, keys, false, p->grad_q), CAUSAL_GRADIENT, stream);
  causal_run<T>(causal_pass_from(pass, queries, {}, false, {}), CAUSAL_SUM, stream);
  pass.of_keys = true;
  causal_run_scan(pass, p->grad_s, p->grad_z, p->sum_s, p->sum_z, stream);
  causal_run<T>(causal_pass_from(pass, keys, queries, true, p->grad_v), CAUSAL_ATTEND, stream);
  causal_run<T>(causal_pass_from(pass, keys, queries, true, p->grad_k), CAUSAL_GRADIENT, stream);
}

/* ---- launchers: on tensor cores ---- */

static bool causal_mma_serves(const camox_causal_params *p) {
  if (p->dtype != CAMOX_BF16 || p->key_dim > CAUSAL_MMA_DIM || p->value_dim > CAUSAL_MMA_DIM) return false;
  const camox_view4 *const features[] = {&p->q, &p->k, &p->grad_q, &p->grad_k};
  const camox_view4 *const values[] = {&p->v, &p->out, &p->grad, &p->grad_v};
  bool vectors = true;
  causal_pass pass = {};
  pass.heads = p->heads, pass.length = p->length;
  for (int i = 0; i < 4; ++i)
    vectors = vectors && causal_is_vectors(pass, *features[i], p->batch, static_cast<int>(p->key_dim), 8) &&
              causal_is_vectors(pass, *values[i], p->batch, static_cast<int>(p->value_dim), 8);
  return vectors && camox_device_is_sm80();
}

/* Positions of a segment: the same on every GPU, and so are the bits. The emulator lowers the number of blocks. */
static int64_t causal_segment(const camox_causal_params *p) {
  const int64_t chunks = p->batch * p->heads * camox_ceil_div(p->length, CAUSAL_ROWS);
  const int64_t longest = INT32_MAX / CAUSAL_ROWS, of_segment = camox_ceil_div(chunks, camox_grid(CAUSAL_MMA_BLOCKS));
  return CAUSAL_ROWS * (of_segment < 1 ? 1 : of_segment < longest ? of_segment : longest);
}

/* What the state of a pass adds up is y. */
template <typename T>
static void causal_mma_states(const causal_pass &pass, const void *s_in, const void *z_in, void *s_out, void *z_out,
                              void *stream) {
  if (pass.length > 0)
    CAMOX_LAUNCH((causal_mma_sum_kernel<T>), causal_grid(causal_chunks(pass) * pass.heads), CAUSAL_MMA_THREADS,
                 causal_mma_shared_bytes, stream, pass);
  causal_run_scan(pass, s_in, z_in, s_out, z_out, stream);
}

template <typename T, int RESULT>
static void causal_mma_run(const causal_pass &pass, void *stream) {
  if (pass.length == 0) return;
  CAMOX_LAUNCH((causal_mma_attend_kernel<T, RESULT>), causal_grid(causal_chunks(pass) * pass.heads), CAUSAL_MMA_THREADS,
               causal_mma_shared_bytes, stream, pass);
}

template <typename T>
static void causal_mma_forward(const camox_causal_params *p, void *stream) {
  const causal_pass pass =
      causal_pass_from(causal_pass_of(p, causal_segment(p), stream), causal_queries(p), causal_keys(p), false, p->out);
  causal_mma_states<T>(pass, p->initial_s, p->initial_z, p->s, p->z, stream);
  causal_mma_run<T, CAUSAL_FORWARD>(pass, stream);
}

template <typename T>
static void causal_mma_backward(const camox_causal_params *p, void *stream) {
  causal_pass pass = causal_pass_of(p, causal_segment(p), stream);
  causal_side queries = causal_queries(p);
  if (p->normalize == CAMOX_NORMALIZE_SUM)
    queries.dots = static_cast<float *>(p->rows), pass.inverse = queries.dots + p->batch * p->heads * p->length;
  pass = causal_pass_from(pass, queries, causal_keys(p), false, {});
  pass.grad_x = p->grad_q;
  causal_mma_states<T>(pass, p->initial_s, p->initial_z, nullptr, nullptr, stream);
  causal_mma_run<T, CAUSAL_QUERY_GRADIENT>(pass, stream);
  pass = causal_pass_from(pass, causal_keys(p), queries, true, p->grad_v);
  pass.grad_x = p->grad_k;
  causal_mma_states<T>(pass, p->grad_s, p->grad_z, p->sum_s, p->sum_z, stream);
  causal_mma_run<T, CAUSAL_KEY_GRADIENT>(pass, stream);
}

extern "C" int64_t camox_causal_records(const camox_causal_params *p) {
  const int64_t chunks = camox_ceil_div(p->length, causal_mma_serves(p) ? causal_segment(p) : CAUSAL_ROWS);
  return (p->cu_seqlens ? chunks + p->sequences : chunks * p->sequences) * p->heads * p->key_dim * (p->value_dim + 1);
}

extern "C" int camox_linear_attention_causal_cuda(const camox_causal_params *p, void *stream) {
  if (p->sequences * p->heads == 0) return cudaSuccess;
  if constexpr (camox_may_be_sm80) {
    if (causal_mma_serves(p)) {
      causal_mma_forward<__nv_bfloat16>(p, stream);
      return camox_launch_status();
    }
  }
  switch (p->dtype) {
    case CAMOX_F32: causal_forward<float>(p, stream); break;
    case CAMOX_BF16:
    case CAMOX_F16: causal_forward<la_half16>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_linear_attention_causal_backward_cuda(const camox_causal_params *p, void *stream) {
  if (p->sequences * p->heads == 0) return cudaSuccess;
  if constexpr (camox_may_be_sm80) {
    if (causal_mma_serves(p)) {
      causal_mma_backward<__nv_bfloat16>(p, stream);
      return camox_launch_status();
    }
  }
  switch (p->dtype) {
    case CAMOX_F32: causal_backward<float>(p, stream); break;
    case CAMOX_BF16:
    case CAMOX_F16: causal_backward<la_half16>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_linear_attention_step_cuda(const camox_causal_step_params *p, void *stream) {
  const int64_t items = p->batch * p->heads;
  if (items == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: CAMOX_LAUNCH((causal_step_kernel<float>), camox_grid(items), CAUSAL_THREADS, 0, stream, *p); break;
    case CAMOX_BF16:
    case CAMOX_F16: CAMOX_LAUNCH((causal_step_kernel<la_half16>), camox_grid(items), CAUSAL_THREADS, 0, stream, *p); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

#endif
