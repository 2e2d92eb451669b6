/* short_attention of half types on tensor cores: 17 to 64 tokens, heads of up to 64 columns in whole pieces of 16 bytes. A block
   has one item, a (s,h), at a time, and a warp 16 of its tokens, as queries first, then in the backward as keys.

     shared memory, halves:   q, k, v, (grad): [64][DIM]          (weights, score_grads): [64 queries][64 keys]
     global memory  --cp.async-->  shared memory  --ldmatrix-->  fragments in registers  --mma-->  sums in registers

                                          keys                      a warp's scores, 8 tiles of 16 x 8:
                             +------+------+------+------+          lane 4 g + t has the columns 2 t, 2 t + 1
       queries  16 of warp 0 | k  k |      causal: not   |          of the rows g and g + 8 of every tile
                16 of warp 1 | k  k | k  k |   computed  |
                16 of warp 2 | k  k | k  k | k  k |      |          k: a tile of keys
                16 of warp 3 | k  k | k  k | k  k | k  k |
                             +------+------+------+------+

     forward    scores = q k^T;  weights = softmax in registers, over the four lanes of a row;  out = weights v
     backward   the same weights;  dw = grad v^T;  score_grads = w (dw - sum w dw);  grad_q = score_grads k
                weights and score_grads -> shared memory;  barrier
                grad_k = score_grads^T q and grad_v = weights^T grad, of 16 keys a warp over the queries that see them

   Sums are float32; what the second products take of weights and score_grads is rounded to the half type. scale and 1 / (1 - p)
   are multiplied to the sums. No atomics: the same bits on every run. */
#ifndef CAMOX_SHORT_ATTENTION_MMA_CUH
#define CAMOX_SHORT_ATTENTION_MMA_CUH

#include "../common/large_product.cuh"

#define SA_MMA_TOKENS CAMOX_SHORT_ATTENTION_MAX_LENGTH
#define SA_MMA_ROWS 16 /* tokens of a warp */
#define SA_MMA_THREADS (SA_MMA_TOKENS / SA_MMA_ROWS * CAMOX_WARP)
#define SA_MMA_TILES (SA_MMA_TOKENS / 8) /* of 8 keys */

typedef float sa_mma_scores[SA_MMA_TILES][4];
template <int DIM>
using sa_mma_sums = float[DIM / 8][4];

/* [SA_MMA_TOKENS][DIM] halves in words. */
template <int DIM>
constexpr int sa_mma_words = SA_MMA_TOKENS * DIM / 2;

/* Where a row's piece of 16 bytes lies: the same piece of eight rows is in different banks. */
template <int DIM>
__device__ __forceinline__ unsigned sa_mma_piece_at(unsigned row, unsigned piece) {
  static_assert(DIM == 32 || DIM == 64, "rows of 4 or 8 pieces");
  return DIM == 64 ? camox_tile_piece_at(row, piece) : camox_large_place<DIM, false>(row, piece) * 4;
}

/* ---- shared memory ---- */

__device__ __forceinline__ uint64_t sa_mma_first_bits(int count) { return count > 0 ? UINT64_MAX >> (64 - count) : 0; }

/* Bit j: key j exists and is not padded. All lanes of a warp call. */
__device__ __forceinline__ uint64_t sa_mma_keys(const sa_args &a, const sa_place &item) {
  const int length = static_cast<int>(a.p.length);
  const uint8_t *const padding = sa_padding(a, item);
  if (padding == nullptr) return sa_mma_first_bits(length);
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  uint64_t keys = 0;
  for (int first = 0; first < SA_MMA_TOKENS; first += CAMOX_WARP) {
    const int j = first + lane;
    const bool counts = j < length && __ldg(padding + j * a.p.padding_stride[1]) == 0;
    keys |= static_cast<uint64_t>(__ballot_sync(CAMOX_FULL_MASK, counts)) << first;
  }
  return keys;
}

/* The copy of an item's tokens begins; those whose bit is not set become zeros, as a weight of 0 does not silence a NaN. */
template <typename T, int DIM>
__device__ __forceinline__ void sa_mma_copy(uint32_t *tile, const sa_args &a, const camox_view4 &view, const sa_place &item,
                                            uint64_t tokens) {
  constexpr unsigned pieces = DIM / 8;
  const unsigned piece = threadIdx.x % pieces, dim_pieces = static_cast<unsigned>(a.p.dim) / 8;
  const T *const from = static_cast<const T *>(view.data) + sa_offset(view, item);
#pragma unroll
  for (unsigned i = 0; i < SA_MMA_ROWS * pieces / CAMOX_WARP; ++i) {
    const unsigned row = (threadIdx.x + i * blockDim.x) / pieces;
    const bool exists = piece < dim_pieces && (tokens >> row & 1) != 0;
    camox_cp_async_16(tile + sa_mma_piece_at<DIM>(row, piece), exists ? from + row * view.stride[1] + piece * 8 : from,
                      exists ? 16 : 0);
  }
}

/* ---- products ---- */

/* scores = x y^T of 16 rows of x from `row` on and the first `tiles` tiles of y, an even number. */
template <typename T, int DIM>
__device__ __forceinline__ void sa_mma_multiply(sa_mma_scores &scores, const uint32_t *x, const uint32_t *y, unsigned row,
                                                int tiles) {
  const unsigned lane = threadIdx.x % CAMOX_WARP;
#pragma unroll
  for (int i = 0; i < SA_MMA_TILES * 4; ++i) scores[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (unsigned piece = 0; piece < DIM / 8; piece += 2) {
    uint32_t rows[4];
    camox_ldmatrix_x4<false>(rows, x + sa_mma_piece_at<DIM>(row + lane % 16, piece + lane / 16));
#pragma unroll
    for (int n = 0; n < SA_MMA_TILES; n += 2) {
      if (n >= tiles) continue;
      uint32_t keys[4];
      camox_ldmatrix_x4<false>(keys, y + sa_mma_piece_at<DIM>(n * 8 + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2));
      const uint32_t first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
      camox_mma_m16n8k16<T>(scores[n], rows, first);
      camox_mma_m16n8k16<T>(scores[n + 1], rows, second);
    }
  }
}

/* sums += factors y, of 16 rows of y from `row` on. */
template <typename T, int DIM>
__device__ __forceinline__ void sa_mma_add(sa_mma_sums<DIM> &sums, const uint32_t (&factors)[4], const uint32_t *y,
                                           unsigned row) {
  const unsigned lane = threadIdx.x % CAMOX_WARP;
#pragma unroll
  for (unsigned n = 0; n < DIM / 8; n += 2) {
    uint32_t columns[4];
    camox_ldmatrix_x4<true>(columns, y + sa_mma_piece_at<DIM>(row + lane % 16, n + lane / 16));
    const uint32_t first[2] = {columns[0], columns[1]}, second[2] = {columns[2], columns[3]};
    camox_mma_m16n8k16<T>(sums[n], factors, first);
    camox_mma_m16n8k16<T>(sums[n + 1], factors, second);
  }
}

template <int DIM>
__device__ __forceinline__ void sa_mma_clear(sa_mma_sums<DIM> &sums) {
#pragma unroll
  for (int i = 0; i < DIM / 2; ++i) sums[i / 4][i % 4] = 0.0f;
}

template <typename T>
__device__ __forceinline__ uint32_t sa_mma_pair(float first, float second) {
  const float pair[2] = {first, second};
  T rounded[2];
  camox_round(rounded, pair);
  uint32_t word;
  __builtin_memcpy(&word, static_cast<const void *>(rounded), sizeof word);
  return word;
}

/* Two tiles of 8 columns as the first factor of a product over these 16. */
template <typename T>
__device__ __forceinline__ void sa_mma_round(uint32_t (&to)[4], const float (&first)[4], const float (&second)[4]) {
  to[0] = sa_mma_pair<T>(first[0], first[1]), to[1] = sa_mma_pair<T>(first[2], first[3]);
  to[2] = sa_mma_pair<T>(second[0], second[1]), to[3] = sa_mma_pair<T>(second[2], second[3]);
}

/* The same pairs to [64][64] halves in shared memory: rows from `row` on, columns of `tile` and the next. */
__device__ __forceinline__ void sa_mma_store(uint32_t *to, const uint32_t (&pairs)[4], unsigned row, unsigned tile) {
  const unsigned lane = threadIdx.x % CAMOX_WARP;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) to[camox_tile_piece_at(row + i % 2 * 8 + lane / 4, tile + i / 2) + lane % 4] = pairs[i];
}

/* Word i of lane t of four -> word t of lane i. */
__device__ __forceinline__ void sa_mma_transpose(uint32_t (&words)[4]) {
  const unsigned lane = threadIdx.x;
#pragma unroll
  for (unsigned step = 1; step < 4; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(CAMOX_FULL_MASK, upper ? words[i] : words[i + step], step);
      words[i] = upper ? other : words[i];
      words[i + step] = upper ? words[i + step] : other;
    }
  }
}

/* Rows from `row` on of an item's output: sums times the factor of the lane's two rows. The lanes of a row exchange their pairs,
   so that each has 16 bytes to store. */
template <typename T, int DIM>
__device__ __forceinline__ void sa_mma_put(const sa_args &a, const camox_view4 &view, const sa_place &item, unsigned row,
                                           sa_mma_sums<DIM> &sums, const float (&factor)[2]) {
  const unsigned lane = threadIdx.x % CAMOX_WARP, length = static_cast<unsigned>(a.p.length);
  const unsigned dim_pieces = static_cast<unsigned>(a.p.dim) / 8;
  T *const to = static_cast<T *>(view.data) + sa_offset(view, item);
#ifdef CAMOX_BREAK_SHORT_ATTENTION
  sums[0][0] += 1e-3f;
#endif
#pragma unroll
  for (unsigned half = 0; half < 2; ++half) {
    const unsigned token = row + half * 8 + lane / 4;
#pragma unroll
    for (unsigned first = 0; first < DIM / 8; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i)
        words[i] = sa_mma_pair<T>(sums[first + i][half * 2] * factor[half], sums[first + i][half * 2 + 1] * factor[half]);
      sa_mma_transpose(words);
      const unsigned piece = first + lane % 4;
      if (token >= length || piece >= dim_pieces) continue;
      T piece_of_row[8];
      __builtin_memcpy(static_cast<void *>(piece_of_row), words, sizeof words);
      camox_store(to + token * view.stride[1] + piece * 8, piece_of_row);
    }
  }
}

/* ---- weights ---- */

/* Which keys a row counts, and of those which dropout keeps, for the two rows of a lane: bit 8 n is that of its first column
   of tile n. */
struct sa_mma_masks {
  uint64_t seen[2], kept[2];
};

/* Whether element e of tile n is in the mask. */
__device__ __forceinline__ bool sa_mma_has(const uint64_t (&mask)[2], int n, int e) {
  return (mask[e / 2] >> (n * 8 + e % 2) & 1) != 0;
}

/* Bit j: dropout keeps weight `first` + j, of the first `tiles` tiles of a row. Its four lanes have every fourth tile each. */
__device__ __forceinline__ uint64_t sa_mma_kept(const sa_args &a, uint64_t seed, int64_t first, int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  uint64_t kept = 0;
#pragma unroll 1
  for (int n = lane; n < tiles; n += 4) {
    const int64_t index = first + n * 8;
    const int offset = static_cast<int>(index % CAMOX_PHILOX_ELEMENTS);
    uint32_t bits = 0;
    /* lengths that are no multiple of 8 have a tile's weights in two groups */
#pragma unroll 1
    for (int i = 0; i <= (offset != 0); ++i) {
      const camox_philox_words words = camox_philox_group(seed, static_cast<uint64_t>(index) / CAMOX_PHILOX_ELEMENTS + i);
#pragma unroll
      for (int j = 0; j < CAMOX_PHILOX_ELEMENTS; ++j)
        bits |= static_cast<uint32_t>(camox_word_keeps(words.word[j / 2], j % 2, a.threshold)) << (i * 8 + j);
    }
    kept |= static_cast<uint64_t>(bits >> offset & 0xff) << (n * 8);
  }
  kept |= __shfl_xor_sync(CAMOX_FULL_MASK, kept, 1);
  return kept | __shfl_xor_sync(CAMOX_FULL_MASK, kept, 2);
}

__device__ __forceinline__ sa_mma_masks sa_mma_masks_of(const sa_args &a, int64_t item, uint64_t keys, unsigned row,
                                                        int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, length = static_cast<int>(a.p.length);
  const uint64_t seed = a.p.seed ? static_cast<uint64_t>(__ldg(a.p.seed)) : 0;
  sa_mma_masks masks;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = static_cast<int>(row) + half * 8 + lane / 4;
    const uint64_t seen = i >= length ? 0 : a.p.causal ? keys & sa_mma_first_bits(i + 1) : keys;
    const uint64_t kept = a.p.seed ? sa_mma_kept(a, seed, (item * length + i) * length, tiles) : UINT64_MAX;
    masks.seen[half] = seen >> (lane % 4 * 2), masks.kept[half] = (seen & kept) >> (lane % 4 * 2);
  }
  return masks;
}

/* scores -> e^(scale score - the row's largest), 0 for keys that do not count; inverse: of the sums of the lane's two rows,
   0 for a row without keys. */
__device__ __forceinline__ void sa_mma_softmax(sa_mma_scores &scores, float (&inverse)[2], const sa_args &a,
                                               const sa_mma_masks &masks, int tiles) {
  const float scale = static_cast<float>(a.p.scale * 1.4426950408889634); /* e^x = 2^(x log2 e) */
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -3.402823466e38f, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < SA_MMA_TILES; n += 2) {
      if (n >= tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float &score = scores[n + i / 2][half * 2 + i % 2];
        score = sa_mma_has(masks.seen, n + i / 2, half * 2 + i % 2) ? score * scale : -INFINITY;
        largest = fmaxf(largest, score);
      }
    }
    largest = camox_team_max(largest, 4);
#pragma unroll
    for (int n = 0; n < SA_MMA_TILES; n += 2) {
      if (n >= tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float &score = scores[n + i / 2][half * 2 + i % 2];
        score = camox_exp2(score - largest);
        sum += score;
      }
    }
    sum = camox_team_sum(sum, 4);
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
  }
}

/* Of the block; from one lane, as nvcc would take branches on it for those of each lane, and guard every shuffle after them. */
__device__ __forceinline__ unsigned sa_mma_warp(void) { return __shfl_sync(CAMOX_FULL_MASK, threadIdx.x / CAMOX_WARP, 0); }

/* Tiles of keys that the warp's queries see. */
__device__ __forceinline__ int sa_mma_tiles_of(const sa_args &a, unsigned warp) {
  return static_cast<int>(a.p.causal ? warp + 1 : blockDim.x / CAMOX_WARP) * (SA_MMA_ROWS / 8);
}

/* ---- kernels ---- */

template <typename T, int DIM>
__global__ void __launch_bounds__(SA_MMA_THREADS, 5) short_attention_mma_kernel(const __grid_constant__ sa_args a) {
  if constexpr (camox_on_tensor_cores<T>) {
    __shared__ __align__(16) uint32_t q[sa_mma_words<DIM>], k[sa_mma_words<DIM>], v[sa_mma_words<DIM>];
    const unsigned warp = sa_mma_warp(), row = warp * SA_MMA_ROWS;
    const int tiles = sa_mma_tiles_of(a, warp);
    for (int64_t item = blockIdx.x; item < a.items; item += gridDim.x) {
      const sa_place place = sa_place_of(a, item);
      const uint64_t keys = sa_mma_keys(a, place);
      __syncthreads(); /* the item before is no longer read */
      sa_mma_copy<T, DIM>(q, a, a.p.q, place, sa_mma_first_bits(static_cast<int>(a.p.length)));
      sa_mma_copy<T, DIM>(k, a, a.p.k, place, keys);
      sa_mma_copy<T, DIM>(v, a, a.p.v, place, keys);
      camox_cp_async_commit();
      const sa_mma_masks masks = sa_mma_masks_of(a, item, keys, row, tiles);
      camox_cp_async_wait<0>();
      __syncthreads();
      sa_mma_scores weights;
      float inverse[2];
      sa_mma_multiply<T, DIM>(weights, q, k, row, tiles);
      sa_mma_softmax(weights, inverse, a, masks, tiles);
      sa_mma_sums<DIM> out;
      sa_mma_clear<DIM>(out);
#pragma unroll
      for (int n = 0; n < SA_MMA_TILES; n += 2) {
        if (n >= tiles) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float &weight = weights[n + i / 4][i % 4];
          if (!sa_mma_has(masks.kept, n + i / 4, i % 4)) weight = 0.0f;
        }
        uint32_t factors[4];
        sa_mma_round<T>(factors, weights[n], weights[n + 1]);
        sa_mma_add<T, DIM>(out, factors, v, n * 8);
      }
      const float factor[2] = {inverse[0] * a.kept, inverse[1] * a.kept};
      sa_mma_put<T, DIM>(a, a.p.out, place, row, out, factor);
    }
  }
}

template <typename T, int DIM>
__global__ void __launch_bounds__(SA_MMA_THREADS) short_attention_mma_backward_kernel(const __grid_constant__ sa_args a) {
  if constexpr (camox_on_tensor_cores<T>) {
    __shared__ __align__(16) uint32_t q[sa_mma_words<DIM>], k[sa_mma_words<DIM>], v[sa_mma_words<DIM>], grad[sa_mma_words<DIM>];
    __shared__ __align__(16) uint32_t weights[sa_mma_words<SA_MMA_TOKENS>], score_grads[sa_mma_words<SA_MMA_TOKENS>];
    const unsigned lane = threadIdx.x % CAMOX_WARP, warp = sa_mma_warp(), row = warp * SA_MMA_ROWS;
    const int tiles = sa_mma_tiles_of(a, warp);
    const float scale = static_cast<float>(a.p.scale);
    for (int64_t item = blockIdx.x; item < a.items; item += gridDim.x) {
      const sa_place place = sa_place_of(a, item);
      const uint64_t keys = sa_mma_keys(a, place), tokens = sa_mma_first_bits(static_cast<int>(a.p.length));
      __syncthreads(); /* the item before is no longer read */
      sa_mma_copy<T, DIM>(q, a, a.p.q, place, tokens);
      sa_mma_copy<T, DIM>(k, a, a.p.k, place, keys);
      sa_mma_copy<T, DIM>(v, a, a.p.v, place, keys);
      sa_mma_copy<T, DIM>(grad, a, a.p.grad, place, tokens);
      camox_cp_async_commit();
      const sa_mma_masks masks = sa_mma_masks_of(a, item, keys, row, tiles);
      camox_cp_async_wait<0>();
      __syncthreads();

      sa_mma_scores w, dw;
      float inverse[2], mean[2] = {};
      sa_mma_multiply<T, DIM>(w, q, k, row, tiles);
      sa_mma_softmax(w, inverse, a, masks, tiles);
      sa_mma_multiply<T, DIM>(dw, grad, v, row, tiles);
#pragma unroll
      for (int n = 0; n < SA_MMA_TILES; n += 2) {
        if (n >= tiles) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int half = i % 4 / 2;
          float &weight = w[n + i / 4][i % 4], &weight_grad = dw[n + i / 4][i % 4];
          weight *= inverse[half];
          weight_grad = sa_mma_has(masks.kept, n + i / 4, i % 4) ? weight_grad * a.kept : 0.0f;
          mean[half] = fmaf(weight, weight_grad, mean[half]);
        }
      }
      mean[0] = camox_team_sum(mean[0], 4), mean[1] = camox_team_sum(mean[1], 4);

      sa_mma_sums<DIM> sums;
      sa_mma_clear<DIM>(sums);
#pragma unroll
      for (int n = 0; n < SA_MMA_TILES; n += 2) {
        if (n >= tiles) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float &weight = w[n + i / 4][i % 4], &score_grad = dw[n + i / 4][i % 4];
          score_grad = weight * (score_grad - mean[i % 4 / 2]);
          if (!sa_mma_has(masks.kept, n + i / 4, i % 4)) weight = 0.0f;
        }
        uint32_t pairs[4];
        sa_mma_round<T>(pairs, w[n], w[n + 1]);
        sa_mma_store(weights, pairs, row, n);
        sa_mma_round<T>(pairs, dw[n], dw[n + 1]);
        sa_mma_store(score_grads, pairs, row, n);
        sa_mma_add<T, DIM>(sums, pairs, k, n * 8);
      }
      const float scales[2] = {scale, scale}, kept[2] = {a.kept, a.kept};
      sa_mma_put<T, DIM>(a, a.p.grad_q, place, row, sums, scales);
      __syncthreads();

      sa_mma_sums<DIM> grad_v;
      sa_mma_clear<DIM>(sums), sa_mma_clear<DIM>(grad_v);
#pragma unroll 1
      for (unsigned query = a.p.causal ? row : 0; query < blockDim.x / 2; query += SA_MMA_ROWS) {
        const unsigned at = camox_tile_piece_at(query + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2);
        uint32_t factors[4];
        camox_ldmatrix_x4<true>(factors, score_grads + at);
        sa_mma_add<T, DIM>(sums, factors, q, query);
        camox_ldmatrix_x4<true>(factors, weights + at);
        sa_mma_add<T, DIM>(grad_v, factors, grad, query);
      }
      sa_mma_put<T, DIM>(a, a.p.grad_k, place, row, sums, scales);
      sa_mma_put<T, DIM>(a, a.p.grad_v, place, row, grad_v, kept);
    }
  }
}

#endif
