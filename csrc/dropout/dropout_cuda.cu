/* dropout, sparse_gate and dropout_add_layer_norm on CUDA: the masks of the CPU, bit for bit (common/philox.h).

     elementwise   a thread: `items` times V neighbours along the output's innermost dimension, 16 B an access (or 1 element);
                   all its loads, then all its stores. Neighbours in row-major order share a call of Philox (8 elements).
     norm          x, residual --16 B--> s; sum -> mean -> squares of s - mean -> normalise, store
       short rows  a team of 4 to 32 lanes a row, s in registers:     lane    0 1 2 3 | 0 1 2 3 | 0 1 2 3
                                                                      team 0  v v v v | v v v v | v v v      a row of 11 vectors
                                                                      team 1  v v v v | v v v v | v v v      the next
       others      a warp (WIDE: a block) a row, s in shared memory, each thread its own elements, without barriers; computed
                   again where a row is too long for 48 KB
     backward      as the forward; a block has a band of rows, whose sums for weight and bias are a lane's own (short rows) or
                   lie in shared [teams][2][width], and go to partial [bands]
                   then common/row_sums.cuh         partial -> grad_weight, grad_bias, in order

   No atomics: the same bits on every run. */
#include "../common/philox.cuh"
#include "../common/row_sums.cuh"
#include "../common/weights.cuh"
#include "dropout.h"
#include "dropout_plan.h"

#include <float.h>

#define DROPOUT_THREADS 256
#define DROPOUT_BLOCKS 3 /* of them a multiprocessor must hold: at most 80 registers a thread */
#define DROPOUT_WARPS (DROPOUT_THREADS / CAMOX_WARP)
#define DROPOUT_SHARED (48 << 10) /* bytes a block has without asking for more, static and dynamic together */

struct dropout; /* tells the budget whose kernel of row_sums.cuh it is */

enum dropout_op { DROPOUT_PLAIN, DROPOUT_GATE, DROPOUT_GATE_BACKWARD };

/* The plan of the CPU's kernels with its dimensions in the order of memory. */
struct dropout_args {
  int dims;
  bool aligned;    /* every access of V elements is one word */
  bool neighbours; /* the V elements follow each other in the row-major order, from a multiple of V on */
  uint32_t threshold;
  float scale;
  const int64_t *seed;
  int64_t elements;
  int64_t size[CAMOX_DROPOUT_DIMS];
  int64_t logical[CAMOX_DROPOUT_DIMS]; /* distance in the row-major order */
  camox_dropout_view view[CAMOX_DROPOUT_VIEWS];
};

__device__ __forceinline__ float dropout_broken(float x) {
#ifdef CAMOX_BREAK_DROPOUT
  return x + 1e-3f;
#else
  return x;
#endif
}

/* A NaN is neither open nor shut and lets the gradient pass, as in torch. */
__device__ __forceinline__ float dropout_open(float x) { return x < 0.0f ? 0.0f : x; }
__device__ __forceinline__ float dropout_where_open(float gate, float x) { return gate <= 0.0f ? 0.0f : x; }

/* V elements of a thread: where they are, and what was read. FLAT: all tensors lie in the row-major order without gaps. */
template <typename T, int V, bool FLAT>
struct dropout_item {
  int64_t index, left; /* in the row-major order; elements up to the last */
  int64_t offset[FLAT ? 1 : CAMOX_DROPOUT_VIEWS];
  T x[V], y[V], grad[V]; /* as they are in memory: to convert one would be to wait for it before the next is asked for */
};

template <typename T, int V, bool FLAT>
__device__ __forceinline__ T *dropout_at(const dropout_args &a, const dropout_item<T, V, FLAT> &item, int view) {
  return static_cast<T *>(a.view[view].data) + (FLAT ? item.index : item.offset[FLAT ? 0 : view]);
}

/* V elements, or those that are left. */
template <typename T, int V>
__device__ __forceinline__ void dropout_load(T (&to)[V], const T *p, int64_t left, bool aligned) {
  if (aligned && left >= V) {
    camox_load<V>(to, p);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = i < left ? __ldg(p + i) : camox_from_float<T>(0.0f);
  }
}

template <typename T, int V, bool FLAT, int WHAT>
__device__ __forceinline__ void dropout_fetch(dropout_item<T, V, FLAT> &item, const dropout_args &a, int64_t first) {
  item.left = a.elements - first; /* only a tensor of one dimension ends within a thread's elements */
  item.index = first;
  if constexpr (!FLAT) {
    int64_t remaining = first;
    item.index = 0;
#pragma unroll
    for (int view = 0; view < CAMOX_DROPOUT_VIEWS; ++view) item.offset[view] = 0;
#pragma unroll 1 /* each dimension waits for the division before it */
    for (int d = a.dims - 1; d >= 0; --d) {
      int64_t coordinate = remaining;
      if (d > 0) remaining = camox_divide(remaining, a.size[d], &coordinate);
      item.index += coordinate * a.logical[d];
#pragma unroll
      for (int view = 0; view < CAMOX_DROPOUT_VIEWS; ++view) item.offset[view] += coordinate * a.view[view].stride[d];
    }
  }
  dropout_load(item.x, dropout_at(a, item, CAMOX_DROPOUT_X), item.left, a.aligned);
  if constexpr (WHAT != DROPOUT_PLAIN) dropout_load(item.y, dropout_at(a, item, CAMOX_DROPOUT_Y), item.left, a.aligned);
  if constexpr (WHAT == DROPOUT_GATE_BACKWARD)
    dropout_load(item.grad, dropout_at(a, item, CAMOX_DROPOUT_GRAD), item.left, a.aligned);
}

template <typename T, int V, bool FLAT, int WHAT>
__device__ __forceinline__ void dropout_finish(const dropout_item<T, V, FLAT> &item, const dropout_args &a, uint64_t seed) {
  bool keep[V];
  if (a.seed == nullptr) {
#pragma unroll
    for (int i = 0; i < V; ++i) keep[i] = true;
  } else if (FLAT || a.neighbours) {
    camox_keeps_all(keep, seed, item.index, a.threshold);
  } else {
    /* A bit each, so that the calls of Philox can be a loop: V copies of them are long code. */
    uint32_t kept = 0;
#pragma unroll 2
    for (int i = 0; i < V; ++i)
      if (camox_keeps(seed, item.index + i * a.logical[a.dims - 1], a.threshold)) kept |= 1u << i;
#pragma unroll
    for (int i = 0; i < V; ++i) keep[i] = (kept >> i & 1) != 0;
  }
  float x[V], y[V], grad[V], out[V], out_y[V];
  camox_to_floats(x, item.x);
  if constexpr (WHAT != DROPOUT_PLAIN) camox_to_floats(y, item.y);
  if constexpr (WHAT == DROPOUT_GATE_BACKWARD) camox_to_floats(grad, item.grad);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (WHAT == DROPOUT_PLAIN) {
      out[i] = keep[i] ? x[i] * a.scale : 0.0f;
    } else if constexpr (WHAT == DROPOUT_GATE) {
      out[i] = keep[i] ? dropout_open(x[i]) * dropout_open(y[i]) * a.scale : 0.0f;
    } else {
      const float g = grad[i] * a.scale;
      out[i] = keep[i] ? dropout_where_open(x[i], g * dropout_open(y[i])) : 0.0f;
      out_y[i] = keep[i] ? dropout_where_open(y[i], g * dropout_open(x[i])) : 0.0f;
    }
  }
  out[0] = dropout_broken(out[0]);
  camox_store_float(dropout_at(a, item, CAMOX_DROPOUT_OUT), out, item.left, a.aligned);
  if constexpr (WHAT == DROPOUT_GATE_BACKWARD)
    camox_store_float(dropout_at(a, item, CAMOX_DROPOUT_OUT_Y), out_y, item.left, a.aligned);
}

/* Items of a thread that are read before the first is finished: fewer would not keep memory busy. */
template <bool FLAT, int WHAT>
struct dropout_items {
  static constexpr int value = FLAT && WHAT != DROPOUT_GATE_BACKWARD ? 2 : 1;
};

template <typename T, int V, bool FLAT, int WHAT>
__global__ void __launch_bounds__(DROPOUT_THREADS, DROPOUT_BLOCKS) dropout_kernel(const __grid_constant__ dropout_args a) {
  constexpr int items = dropout_items<FLAT, WHAT>::value, per_block = DROPOUT_THREADS * items * V;
  const uint64_t seed = a.seed ? static_cast<uint64_t>(__ldg(a.seed)) : 0;
  for (int64_t block = blockIdx.x; block * per_block < a.elements; block += gridDim.x) {
    const int64_t first = block * per_block + static_cast<int64_t>(threadIdx.x) * V;
    dropout_item<T, V, FLAT> item[items];
#pragma unroll
    for (int i = 0; i < items; ++i)
      if (first + i * DROPOUT_THREADS * V < a.elements)
        dropout_fetch<T, V, FLAT, WHAT>(item[i], a, first + i * DROPOUT_THREADS * V);
#pragma unroll
    for (int i = 0; i < items; ++i)
      if (first + i * DROPOUT_THREADS * V < a.elements) dropout_finish<T, V, FLAT, WHAT>(item[i], a, seed);
  }
}

/* ---- rows ---- */

struct norm_args {
  camox_dropout_norm_params p;
  uint32_t threshold; /* without a seed 0, */
  float drop_scale;   /* and 1 */
  float eps, inverse; /* 1 / width */
  bool cached;        /* shared memory holds what a thread has computed of its elements */
  int team;           /* lanes of a short row: a power of two */
  int64_t band_rows, bands;
};

/* residual + drop(x) */
__device__ __forceinline__ float norm_sum(float x, float residual, bool keep, const norm_args &a) {
  return keep ? fmaf(x, a.drop_scale, residual) : residual;
}

/* s of V elements. */
template <typename T, int V>
__device__ __forceinline__ void norm_sums(float (&s)[V], const norm_args &a, uint64_t seed, int64_t index) {
  float x[V];
  camox_load_float(x, static_cast<const T *>(a.p.x) + index);
  camox_load_float(s, static_cast<const T *>(a.p.residual) + index);
  bool keep[V];
  if (a.p.seed) camox_keeps_all(keep, seed, index, a.threshold);
#pragma unroll
  for (int i = 0; i < V; ++i) s[i] = norm_sum(x[i], s[i], a.p.seed == nullptr || keep[i], a);
}

/* The sum over the threads of a row. */
template <bool WIDE>
__device__ __forceinline__ float norm_team_sum(float x, float *scratch) {
  if constexpr (WIDE)
    return camox_block_sum<DROPOUT_THREADS>(x, scratch);
  else
    return camox_warp_sum(x);
}

/* Rounded before it is subtracted from anything, as it is when it is saved: nvcc would make one instruction of product and
   difference. */
__device__ __forceinline__ float norm_mean(float total, const norm_args &a) { return __fmul_rn(total, a.inverse); }

__device__ __forceinline__ float norm_scale(float variance, const norm_args &a) {
  return camox_rsqrt((variance < 0.0f ? 0.0f : variance) + a.eps);
}

template <typename T, int V, bool WIDE>
__global__ void __launch_bounds__(DROPOUT_THREADS, DROPOUT_BLOCKS) dropout_norm_kernel(const __grid_constant__ norm_args a) {
  constexpr int team = WIDE ? DROPOUT_THREADS : CAMOX_WARP, teams = DROPOUT_THREADS / team;
  CAMOX_DYNAMIC_SHARED(float, shared);
  __shared__ float scratch[DROPOUT_WARPS];
  const camox_dropout_norm_params &p = a.p;
  const int lane = static_cast<int>(threadIdx.x) % team, slot = static_cast<int>(threadIdx.x) / team;
  const uint64_t seed = p.seed ? static_cast<uint64_t>(__ldg(p.seed)) : 0;
  float *const cache = shared + slot * p.width, *const stats = static_cast<float *>(p.stats);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * teams + slot; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * teams) {
    const int64_t start = row * p.width;
    float total = 0.0f, first = 0.0f;
    for (int64_t i = lane * V; i < p.width; i += team * V) {
      float s[V];
      norm_sums<T>(s, a, seed, start + i);
      if (i == 0) first = s[0];
#pragma unroll
      for (int j = 0; j < V; ++j) total += s[j];
      if (a.cached) camox_put_floats(cache + i, s);
    }
    const float mean = norm_mean(norm_team_sum<WIDE>(total, scratch), a);
    /* differences to the mean; their own mean is what rounding took from it, and is subtracted again */
    float mean_correction = 0.0f, squares = 0.0f;
    for (int64_t i = lane * V; i < p.width; i += team * V) {
      float s[V];
      if (a.cached)
        camox_get_floats(s, cache + i);
      else
        norm_sums<T>(s, a, seed, start + i);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float difference = s[j] - mean;
        mean_correction += difference;
        squares += difference * difference;
      }
    }
    mean_correction = norm_team_sum<WIDE>(mean_correction, scratch) * a.inverse;
    const float variance = norm_team_sum<WIDE>(squares, scratch) * a.inverse - mean_correction * mean_correction;
    const float scale = norm_scale(variance, a);
    if (lane == 0) stats[row] = (mean - first) + mean_correction, stats[p.rows + row] = scale;
    for (int64_t i = lane * V; i < p.width; i += team * V) {
      float s[V], w[V], b[V], y[V];
      if (a.cached)
        camox_get_floats(s, cache + i);
      else
        norm_sums<T>(s, a, seed, start + i);
      camox_load_affine<T>(w, b, p.weight.data, p.bias.data, i, p.half_weights);
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = ((s[j] - mean) - mean_correction) * scale * w[j] + b[j];
      y[0] = dropout_broken(y[0]);
      camox_store_float(static_cast<T *>(p.y) + start + i, y);
    }
  }
}

/* The sums of a block's teams, [teams][2][width] in shared memory, added up in order. */
__device__ __forceinline__ void norm_add_teams(float *partial, const float *team_sums, int teams, int64_t width) {
  __syncthreads();
  for (int64_t i = threadIdx.x; i < 2 * width; i += DROPOUT_THREADS) {
    float total = 0.0f;
    for (int t = 0; t < teams; ++t) total += team_sums[t * 2 * width + i];
    partial[i] = total;
  }
  __syncthreads();
}

/* Vectors, or single elements, of a short row that a lane keeps in registers; in the backward of grad, z and two sums each. */
#define NORM_VECTORS 4
#define NORM_BACKWARD_VECTORS 2
/* Blocks that a multiprocessor must hold: at most 128 registers a thread, or 64 of single elements, which load less at once. */
template <int V>
static constexpr int norm_blocks = V == 1 ? 4 : 2;

/* A lane's vectors of a short row: vector k is at first + k * step in the tensors and at place + k * step in the row. */
template <int VECTORS>
struct norm_row {
  int place, step;
  int64_t first;
  bool exists[VECTORS]; /* false behind the row's end, and in all of a row that does not exist */
};

template <int V, int VECTORS>
__device__ __forceinline__ norm_row<VECTORS> norm_row_at(const norm_args &a, int64_t row, int lane) {
  norm_row<VECTORS> at = {lane * V, a.team * V, row * a.p.width + lane * V, {}};
  const int width = row < a.p.rows ? static_cast<int>(a.p.width) : 0;
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) at.exists[k] = at.place + k * at.step < width;
  return at;
}

/* Vectors that do not exist become zeros. */
template <typename T, int V, int VECTORS>
__device__ __forceinline__ void norm_row_load(T (&to)[VECTORS][V], const void *from, const norm_row<VECTORS> &at) {
  const T *p = static_cast<const T *>(from) + at.first;
#pragma unroll
  for (int k = 0; k < VECTORS; ++k, p += at.step) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[k][j] = camox_from_float<T>(0.0f);
    if (at.exists[k]) camox_load<V>(to[k], p);
  }
}

/* s of a lane's elements, and the words that decide which of x are kept. All calls of Philox have one key, and are made
   together so that its rounds' keys are computed once. */
template <typename T, int V, int VECTORS>
__device__ __forceinline__ void norm_row_sums(float (&s)[VECTORS][V], uint32_t (&words)[VECTORS][camox_keep_size<V>],
                                              const norm_args &a, uint64_t seed, const norm_row<VECTORS> &at) {
  T x[VECTORS][V], residual[VECTORS][V];
  norm_row_load(x, a.p.x, at);
  norm_row_load(residual, a.p.residual, at);
#pragma unroll
  for (int k = 0; k < VECTORS; ++k)
#pragma unroll
    for (int i = 0; i < camox_keep_size<V>; ++i) words[k][i] = 0;
  if (a.p.seed) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) camox_keep_words<V>(words[k], seed, at.first + k * at.step);
  }
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    float value[V];
    camox_to_floats(value, x[k]);
    camox_to_floats(s[k], residual[k]);
#pragma unroll
    for (int j = 0; j < V; ++j) s[k][j] = norm_sum(value[j], s[k][j], camox_word_keeps(words[k][j / 2], j % 2, a.threshold), a);
  }
}

/* N sums over the lanes of a row. */
template <int N>
__device__ __forceinline__ void norm_row_totals(float (&sums)[N], int team) {
  for (int offset = team / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += __shfl_xor_sync(CAMOX_FULL_MASK, sums[i], offset);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(DROPOUT_THREADS, norm_blocks<V>)
    dropout_norm_short_kernel(const __grid_constant__ norm_args a) {
  constexpr int vectors = NORM_VECTORS;
  const camox_dropout_norm_params &p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & (a.team - 1), teams = DROPOUT_THREADS / a.team;
  const uint64_t seed = p.seed ? static_cast<uint64_t>(__ldg(p.seed)) : 0;
  float *const stats = static_cast<float *>(p.stats);
  /* all lanes of a warp take part in the sums, those without a row too */
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * teams; base < p.rows;
       base += static_cast<int64_t>(gridDim.x) * teams) {
    const int64_t row = base + static_cast<int>(threadIdx.x) / a.team;
    const norm_row<vectors> at = norm_row_at<V, vectors>(a, row, lane);
    float s[vectors][V];
    uint32_t words[vectors][camox_keep_size<V>];
    norm_row_sums<T>(s, words, a, seed, at);
    const float first = s[0][0];
    float total[1] = {};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < V; ++j) sum += s[k][j];
      total[0] += sum; /* 0 of vectors that do not exist */
    }
    norm_row_totals(total, a.team);
    const float mean = norm_mean(total[0], a);
    /* differences to the mean; their own mean is what rounding took from it, and is subtracted again */
    float totals[2] = {};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        s[k][j] -= mean;
        sum += s[k][j];
        squares = fmaf(s[k][j], s[k][j], squares);
      }
      if (at.exists[k]) totals[0] += sum, totals[1] += squares;
    }
    norm_row_totals(totals, a.team);
    const float mean_correction = totals[0] * a.inverse;
    const float scale = norm_scale(totals[1] * a.inverse - mean_correction * mean_correction, a);
    if (lane == 0 && row < p.rows) stats[row] = (mean - first) + mean_correction, stats[p.rows + row] = scale;
    const float shift = -mean_correction * scale;
    T *y = static_cast<T *>(p.y) + at.first;
#pragma unroll
    for (int k = 0; k < vectors; ++k, y += at.step) {
      if (!at.exists[k]) continue;
      float w[V], b[V];
      camox_load_affine<T>(w, b, p.weight.data, p.bias.data, at.place + k * at.step, p.half_weights);
#pragma unroll
      for (int j = 0; j < V; ++j) b[j] = fmaf(fmaf(s[k][j], scale, shift), w[j], b[j]);
      b[0] = dropout_broken(b[0]);
      camox_store_float(y, b);
    }
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(DROPOUT_THREADS, norm_blocks<V>)
    dropout_norm_short_backward_kernel(const __grid_constant__ norm_args a) {
  constexpr int vectors = NORM_BACKWARD_VECTORS;
  CAMOX_DYNAMIC_SHARED(float, shared);
  const camox_dropout_norm_params &p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & (a.team - 1), teams = DROPOUT_THREADS / a.team;
  const int slot = static_cast<int>(threadIdx.x) / a.team, first_lane = static_cast<int>(threadIdx.x) % CAMOX_WARP - lane;
  const uint64_t seed = p.seed ? static_cast<uint64_t>(__ldg(p.seed)) : 0;
  const float *const stats = static_cast<const float *>(p.stats);
  for (int64_t band = blockIdx.x; band < a.bands; band += gridDim.x) {
    float weight_sum[vectors][V] = {}, bias_sum[vectors][V] = {};
    const int64_t last = min((band + 1) * a.band_rows, p.rows);
    for (int64_t base = band * a.band_rows; base < last; base += teams) {
      const int64_t row = base + slot; /* a band is a multiple of the teams, the last ends with the rows */
      const norm_row<vectors> at = norm_row_at<V, vectors>(a, row, lane);
      T grads[vectors][V];
      norm_row_load(grads, p.grad, at);
      float z[vectors][V], d[vectors][V];
      uint32_t words[vectors][camox_keep_size<V>];
      norm_row_sums<T>(z, words, a, seed, at);
      const float first = __shfl_sync(CAMOX_FULL_MASK, z[0][0], first_lane);
      float scale = 0.0f, shift = 0.0f;
      if (row < p.rows) scale = __ldg(stats + p.rows + row), shift = -__ldg(stats + row) * scale;
      float totals[2] = {}; /* of d, of d * z; of vectors that do not exist the gradient is 0, and so is all that follows */
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        float grad[V];
        camox_to_floats(grad, grads[k]);
#pragma unroll
        for (int j = 0; j < V; ++j) d[k][j] = 0.0f;
        if (at.exists[k]) camox_load_weights<T>(d[k], p.weight.data, at.place + k * at.step, p.half_weights);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          z[k][j] = fmaf(z[k][j] - first, scale, shift);
          weight_sum[k][j] = fmaf(grad[j], z[k][j], weight_sum[k][j]);
          bias_sum[k][j] += grad[j];
          d[k][j] *= grad[j];
          totals[0] += d[k][j], totals[1] = fmaf(d[k][j], z[k][j], totals[1]);
        }
      }
      norm_row_totals(totals, a.team);
      const float d_mean = totals[0] * a.inverse, dz_mean = totals[1] * a.inverse;
      T *grad_residual = static_cast<T *>(p.grad_residual) + at.first, *grad_x = static_cast<T *>(p.grad_x) + at.first;
#pragma unroll
      for (int k = 0; k < vectors; ++k, grad_residual += at.step, grad_x += at.step) {
        if (!at.exists[k]) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) d[k][j] = fmaf(-z[k][j], dz_mean, d[k][j] - d_mean) * scale;
        d[k][0] = dropout_broken(d[k][0]);
        camox_store_float(grad_residual, d[k]);
        if (p.grad_x == nullptr) continue;
#pragma unroll
        for (int j = 0; j < V; ++j)
          d[k][j] = camox_word_keeps(words[k][j / 2], j % 2, a.threshold) ? d[k][j] * a.drop_scale : 0.0f;
        camox_store_float(grad_x, d[k]);
      }
    }
    float *sums = shared + slot * 2 * p.width + lane * V;
#pragma unroll
    for (int k = 0; k < vectors; ++k, sums += a.team * V) {
      if ((lane + k * a.team) * V >= p.width) continue;
      camox_put_floats(sums, weight_sum[k]);
      camox_put_floats(sums + p.width, bias_sum[k]);
    }
    norm_add_teams(static_cast<float *>(p.partial) + band * 2 * p.width, shared, teams, p.width);
  }
}

/* d = grad * weight of V elements; grad and weight too. */
template <typename T, int V>
__device__ __forceinline__ void norm_gradient(float (&grad)[V], float (&d)[V], const camox_dropout_norm_params &p,
                                              int64_t start, int64_t i) {
  camox_load_float(grad, static_cast<const T *>(p.grad) + start + i);
  camox_load_weights<T>(d, p.weight.data, i, p.half_weights);
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] *= grad[j];
}

/* A block has a band of rows, so that its sums for weight and bias need no other block. */
template <typename T, int V, bool WIDE>
__global__ void __launch_bounds__(DROPOUT_THREADS, WIDE &&V == 8 ? DROPOUT_BLOCKS - 1 : DROPOUT_BLOCKS)
    dropout_norm_backward_kernel(const __grid_constant__ norm_args a) {
  constexpr int team = WIDE ? DROPOUT_THREADS : CAMOX_WARP, teams = DROPOUT_THREADS / team;
  CAMOX_DYNAMIC_SHARED(float, shared);
  __shared__ float scratch[DROPOUT_WARPS];
  const camox_dropout_norm_params &p = a.p;
  const int lane = static_cast<int>(threadIdx.x) % team, slot = static_cast<int>(threadIdx.x) / team;
  const uint64_t seed = p.seed ? static_cast<uint64_t>(__ldg(p.seed)) : 0;
  const float *const stats = static_cast<const float *>(p.stats);
  float *const cache = shared + slot * p.width, *const team_sums = shared + teams * p.width;
  for (int64_t band = blockIdx.x; band < a.bands; band += gridDim.x) {
    float *const partial = static_cast<float *>(p.partial) + band * 2 * p.width;
    float *const sums = a.cached ? team_sums + slot * 2 * p.width : partial;
    const float zero[V] = {};
    for (int64_t i = lane * V; i < p.width; i += team * V)
      camox_put_floats(sums + i, zero), camox_put_floats(sums + p.width + i, zero);
    const int64_t last = min((band + 1) * a.band_rows, p.rows);
    for (int64_t row = band * a.band_rows + slot; row < last; row += teams) {
      const int64_t start = row * p.width;
      float first[1];
      norm_sums<T>(first, a, seed, start);
      const float offset = __ldg(stats + row), scale = __ldg(stats + p.rows + row);
      float d_mean = 0.0f, dz_mean = 0.0f;
      for (int64_t i = lane * V; i < p.width; i += team * V) {
        float z[V], grad[V], d[V], weight_sum[V], bias_sum[V];
        norm_sums<T>(z, a, seed, start + i);
        norm_gradient<T>(grad, d, p, start, i);
        camox_get_floats(weight_sum, sums + i);
        camox_get_floats(bias_sum, sums + p.width + i);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          z[j] = ((z[j] - first[0]) - offset) * scale;
          weight_sum[j] += grad[j] * z[j], bias_sum[j] += grad[j];
          d_mean += d[j], dz_mean += d[j] * z[j];
        }
        camox_put_floats(sums + i, weight_sum);
        camox_put_floats(sums + p.width + i, bias_sum);
        if (a.cached) camox_put_floats(cache + i, z);
      }
      d_mean = norm_team_sum<WIDE>(d_mean, scratch) * a.inverse;
      dz_mean = norm_team_sum<WIDE>(dz_mean, scratch) * a.inverse;
      for (int64_t i = lane * V; i < p.width; i += team * V) {
        float z[V], grad[V], d[V];
        if (a.cached) {
          camox_get_floats(z, cache + i);
        } else {
          norm_sums<T>(z, a, seed, start + i);
#pragma unroll
          for (int j = 0; j < V; ++j) z[j] = ((z[j] - first[0]) - offset) * scale;
        }
        norm_gradient<T>(grad, d, p, start, i);
#pragma unroll
        for (int j = 0; j < V; ++j) d[j] = ((d[j] - d_mean) - z[j] * dz_mean) * scale;
        d[0] = dropout_broken(d[0]);
        camox_store_float(static_cast<T *>(p.grad_residual) + start + i, d);
        if (p.grad_x) {
          bool keep[V];
          camox_keeps_all(keep, seed, start + i, a.threshold);
#pragma unroll
          for (int j = 0; j < V; ++j) d[j] = keep[j] ? d[j] * a.drop_scale : 0.0f;
          camox_store_float(static_cast<T *>(p.grad_x) + start + i, d);
        }
      }
    }
    if (a.cached) norm_add_teams(partial, team_sums, teams, p.width);
  }
}

/* ---- launchers ---- */

/* Dimensions in the order of memory of what is written; `lanes` elements at a time, or 1 where a tensor does not allow it. */
static dropout_args dropout_args_of(const camox_dropout_params *p, int element, int lanes, bool *wide) {
  const camox_dropout_plan plan = camox_dropout_plan_of(p);
  dropout_args a = {};
  a.dims = plan.dims;
  a.threshold = camox_dropout_threshold(p->p);
  a.scale = p->seed ? static_cast<float>(camox_dropout_scale(a.threshold)) : 1.0f;
  a.seed = p->seed;
  a.elements = plan.elements;
  int order[CAMOX_DROPOUT_DIMS];
  int64_t logical[CAMOX_DROPOUT_DIMS], step = 1;
  for (int d = plan.dims - 1; d >= 0; --d) logical[d] = step, step *= plan.size[d];
  const int64_t *written = plan.view[CAMOX_DROPOUT_OUT].stride;
  for (int d = 0; d < plan.dims; ++d) {
    int at = d;
    for (; at > 0 && written[order[at - 1]] < written[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  bool fits = plan.dims == 1 || plan.size[order[plan.dims - 1]] % lanes == 0;
  a.aligned = true;
  for (int view = 0; view < CAMOX_DROPOUT_VIEWS; ++view) {
    a.view[view].data = plan.view[view].data;
    if (plan.view[view].data == nullptr) continue;
    for (int d = 0; d < plan.dims; ++d) {
      const int64_t stride = plan.view[view].stride[order[d]];
      a.view[view].stride[d] = stride;
      if (d == plan.dims - 1)
        fits = fits && stride == 1;
      else
        a.aligned = a.aligned && stride % lanes == 0;
    }
    a.aligned = a.aligned && camox_aligned(plan.view[view].data, lanes * element);
  }
  for (int d = 0; d < plan.dims; ++d) a.size[d] = plan.size[order[d]], a.logical[d] = logical[order[d]];
  a.neighbours = a.logical[plan.dims - 1] == 1;
  *wide = fits;
  return a;
}

template <typename T, int V, bool FLAT, int WHAT>
static void dropout_launch(const dropout_args &a, void *stream) {
  constexpr int per_block = DROPOUT_THREADS * V * dropout_items<FLAT, WHAT>::value;
  CAMOX_LAUNCH((dropout_kernel<T, V, FLAT, WHAT>), camox_grid(camox_ceil_div(a.elements, per_block)), DROPOUT_THREADS, 0,
               stream, a);
}

template <typename T, int WHAT>
static void dropout_launch_widest(const camox_dropout_params *p, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  bool wide;
  dropout_args a = dropout_args_of(p, static_cast<int>(sizeof(T)), lanes, &wide);
  if (!wide) {
    a.aligned = true;
    dropout_launch<T, 1, false, WHAT>(a, stream);
  } else if (a.dims == 1) {
    dropout_launch<T, lanes, true, WHAT>(a, stream);
  } else {
    dropout_launch<T, lanes, false, WHAT>(a, stream);
  }
}

template <int WHAT>
static int dropout_run(const camox_dropout_params *p, void *stream) {
  for (int d = 0; d < p->dims; ++d)
    if (p->size[d] == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: dropout_launch_widest<float, WHAT>(p, stream); break;
    case CAMOX_BF16: dropout_launch_widest<__nv_bfloat16, WHAT>(p, stream); break;
    case CAMOX_F16: dropout_launch_widest<__half, WHAT>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_dropout_cuda(const camox_dropout_params *p, void *stream) { return dropout_run<DROPOUT_PLAIN>(p, stream); }
extern "C" int camox_sparse_gate_cuda(const camox_dropout_params *p, void *stream) {
  return dropout_run<DROPOUT_GATE>(p, stream);
}
extern "C" int camox_sparse_gate_backward_cuda(const camox_dropout_params *p, void *stream) {
  return dropout_run<DROPOUT_GATE_BACKWARD>(p, stream);
}

static bool norm_aligned(const camox_dropout_norm_params *p, int lanes, int element) {
  const void *const pointers[] = {p->x, p->residual, p->y, p->grad, p->grad_x, p->grad_residual};
  bool aligned = p->width % lanes == 0;
  for (const void *pointer : pointers) aligned = aligned && camox_aligned(pointer, lanes * element);
  for (const void *pointer : {p->weight.data, p->bias.data, static_cast<const void *>(p->partial)})
    aligned = aligned && camox_aligned(pointer, 16);
  return aligned;
}

/* Bands of the backward: as many as run at once, since more would only leave more partial sums to add up; as many rows for each
   team of a block. partial has a row for each work item of the CPU, so bands are at least as long. */
static void norm_set_bands(norm_args *a, int64_t teams, const camox_places &places) {
  const int64_t wanted = camox_ceil_div(a->p.rows, places.all()), least = camox_dropout_norm_item_rows(a->p.width);
  a->band_rows = camox_ceil_div(wanted > least ? wanted : least, teams) * teams;
  a->bands = camox_ceil_div(a->p.rows, a->band_rows);
}

/* The longest rows of a warp: in registers, and in its share of a block's memory. */
template <int V, bool BACKWARD>
constexpr int64_t norm_short_width = CAMOX_WARP * V * (BACKWARD ? NORM_BACKWARD_VECTORS : NORM_VECTORS);
template <bool BACKWARD>
constexpr int64_t norm_warp_width = DROPOUT_SHARED / (DROPOUT_WARPS * static_cast<int64_t>(sizeof(float)) * (BACKWARD ? 3 : 1));

template <typename T, int V, bool BACKWARD>
static void norm_launch_short(norm_args *a, void *stream) {
  for (a->team = 4; a->team * norm_short_width<V, BACKWARD> < a->p.width * CAMOX_WARP;) a->team *= 2;
  const int teams = DROPOUT_THREADS / a->team;
  if constexpr (BACKWARD) {
    const int64_t shared = teams * 2 * a->p.width * static_cast<int64_t>(sizeof(float));
    norm_set_bands(a, teams, camox_places_of(dropout_norm_short_backward_kernel<T, V>, DROPOUT_THREADS, shared));
    CAMOX_LAUNCH((dropout_norm_short_backward_kernel<T, V>), camox_grid(a->bands), DROPOUT_THREADS, shared, stream, *a);
  } else {
    CAMOX_LAUNCH((dropout_norm_short_kernel<T, V>), camox_grid(camox_ceil_div(a->p.rows, teams)), DROPOUT_THREADS, 0, stream,
                 *a);
  }
}

/* A warp or a block a row, with 1 or 3 floats of shared memory an element. */
template <typename T, int V, bool WIDE, bool BACKWARD>
static void norm_launch(norm_args *a, int64_t shared, void *stream) {
  constexpr int teams = WIDE ? 1 : DROPOUT_WARPS;
  if constexpr (BACKWARD) {
    norm_set_bands(a, teams, camox_places_of(dropout_norm_backward_kernel<T, V, WIDE>, DROPOUT_THREADS, shared));
    CAMOX_LAUNCH((dropout_norm_backward_kernel<T, V, WIDE>), camox_grid(a->bands), DROPOUT_THREADS, shared, stream, *a);
  } else {
    CAMOX_LAUNCH((dropout_norm_kernel<T, V, WIDE>), camox_grid(camox_ceil_div(a->p.rows, teams)), DROPOUT_THREADS, shared,
                 stream, *a);
  }
}

template <typename T, int V, bool BACKWARD>
static void norm_launch_by_width(norm_args *a, void *stream) {
  const int64_t bytes = a->p.width * (BACKWARD ? 3 : 1) * static_cast<int64_t>(sizeof(float));
  const int64_t scratch = DROPOUT_WARPS * static_cast<int64_t>(sizeof(float)); /* static memory, which only wide kernels have */
  a->cached = bytes + scratch <= DROPOUT_SHARED;
  if (a->p.width <= norm_short_width<V, BACKWARD>) return norm_launch_short<T, V, BACKWARD>(a, stream);
  if constexpr (V == 1 || norm_short_width<V, BACKWARD> < norm_warp_width<BACKWARD>)
    if (a->p.width <= norm_warp_width<BACKWARD>) return norm_launch<T, V, false, BACKWARD>(a, bytes * DROPOUT_WARPS, stream);
  norm_launch<T, V, true, BACKWARD>(a, a->cached ? bytes : 0, stream);
}

template <typename T, bool BACKWARD>
static void norm_launch_widest(norm_args *a, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  if (norm_aligned(&a->p, lanes, static_cast<int>(sizeof(T))))
    norm_launch_by_width<T, lanes, BACKWARD>(a, stream);
  else
    norm_launch_by_width<T, 1, BACKWARD>(a, stream);
}

template <bool BACKWARD>
static int norm_run(const camox_dropout_norm_params *p, void *stream) {
  if (p->width == 0) return cudaSuccess;
  norm_args a = {};
  a.p = *p;
  a.threshold = p->seed ? camox_dropout_threshold(p->p) : 0;
  a.drop_scale = static_cast<float>(camox_dropout_scale(a.threshold));
  a.eps = p->eps > FLT_MIN ? static_cast<float>(p->eps) : FLT_MIN;
  a.inverse = 1.0f / static_cast<float>(p->width);
  if (p->rows > 0) {
    switch (p->dtype) {
      case CAMOX_F32: norm_launch_widest<float, BACKWARD>(&a, stream); break;
      case CAMOX_BF16: norm_launch_widest<__nv_bfloat16, BACKWARD>(&a, stream); break;
      case CAMOX_F16: norm_launch_widest<__half, BACKWARD>(&a, stream); break;
      default: return cudaErrorInvalidValue;
    }
  }
  if constexpr (BACKWARD) {
    camox_row_sums sums = {static_cast<const float *>(p->partial), a.bands, 2 * p->width, p->width, {}, CAMOX_F32};
    sums.out[0] = p->grad_weight, sums.out[1] = p->grad_bias, sums.dtype = p->half_weights ? p->dtype : CAMOX_F32;
    camox_launch_row_sums<dropout>(sums, stream);
  }
  return camox_launch_status();
}

extern "C" int camox_dropout_norm_cuda(const camox_dropout_norm_params *p, void *stream) {
  camox_dropout_norm_params forward = *p;
  forward.grad = forward.grad_x = forward.grad_residual = forward.partial = nullptr; /* not looked at, whatever they hold */
  return norm_run<false>(&forward, stream);
}

extern "C" int camox_dropout_norm_backward_cuda(const camox_dropout_norm_params *p, void *stream) {
  camox_dropout_norm_params backward = *p;
  backward.y = nullptr;
  return norm_run<true>(&backward, stream);
}
