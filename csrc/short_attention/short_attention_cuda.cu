/* short_attention on CUDA. Longer sequences of half types are those of short_attention_mma.cuh; here, for all others, a block has
   some consecutive (s,h), its items, and a thread one token of an item. Neighbours in a warp are neighbouring items, whose heads
   lie side by side in memory.

     shared memory, floats:  | q [items][T][pitch] | k | v | (grad) | weights [items][T][row] | (score_grads) |
                               staged with 16 B loads where an item fits, else read where they lie
     forward, a thread:      row i of weights = softmax(q_i k^T), then out_i = row v, SA_CHUNK columns in registers at a time
     backward, a thread:     rows i of weights and score_grads, then grad_q_i; barrier;
                             columns j of both: grad_k_j and grad_v_j over the tokens that attend to j

   No atomics: the same bits on every run. */
#include "../common/cuda_util.cuh"
#include "../common/philox.cuh"
#include "short_attention.h"

#define SA_THREADS 128
#define SA_SHARED (48 << 10) /* bytes a block has without asking for more */
#define SA_NEIGHBOURS 8      /* threads whose accesses of 16 bytes are one of all banks */
#define SA_CHUNK 16
#define SA_KEYS 4 /* scores of a thread at a time */

struct sa_args {
  camox_short_attention_params p;
  uint32_t threshold;
  float kept;
  int64_t items, groups;
  int group;            /* items of a block */
  int pitch, item_size; /* floats of a staged row and of a staged item */
  int row, weights;     /* floats of a token's weights and of an item's, odd so that neighbouring items are in other banks */
};

/* Sequence and head of an item. */
struct sa_place {
  int64_t s, h;
};

__device__ __forceinline__ sa_place sa_place_of(const sa_args &a, int64_t item) {
  sa_place place;
  place.s = camox_divide(item, a.p.heads, &place.h);
  return place;
}

__device__ __forceinline__ int64_t sa_offset(const camox_view4 &view, const sa_place &item) {
  return item.s * view.stride[0] + item.h * view.stride[2];
}

__device__ __forceinline__ const uint8_t *sa_padding(const sa_args &a, const sa_place &item) {
  return a.p.padding ? a.p.padding + item.s * a.p.padding_stride[0] : nullptr;
}

#include "short_attention_mma.cuh"

/* Elements one by one, of the dtype of the call: kernels that access them so are for odd strides and sizes, and there is one of
   each for all dtypes. */
__device__ __forceinline__ float sa_get(const void *data, int64_t at, int dtype) {
  if (dtype == CAMOX_F32) return __ldg(static_cast<const float *>(data) + at);
  if (dtype == CAMOX_F16) return camox_to_float(__ldg(static_cast<const __half *>(data) + at));
  return camox_to_float(__ldg(static_cast<const __nv_bfloat16 *>(data) + at));
}

__device__ __forceinline__ void sa_put(void *data, int64_t at, float x, int dtype) {
  if (dtype == CAMOX_F32)
    static_cast<float *>(data)[at] = x;
  else if (dtype == CAMOX_F16)
    static_cast<__half *>(data)[at] = camox_from_float<__half>(x);
  else
    static_cast<__nv_bfloat16 *>(data)[at] = camox_from_float<__nv_bfloat16>(x);
}

/* The rows of one item of one tensor. */
template <bool STAGED>
struct sa_rows {
  const float *shared;
  const void *global;
  int64_t first;          /* element of `global` */
  const uint8_t *padding; /* of keys and values that are not staged, may be null: tokens that count as zeros */
  int64_t token, inner, padding_step;
  int pitch, dim, dtype;

  /* Whether token t counts as zeros whatever it holds; staged tokens are zeros then. */
  __device__ __forceinline__ bool ignored(int t) const {
    return !STAGED && padding != nullptr && __ldg(padding + t * padding_step) != 0;
  }

  /* Elements d ... d+3 of token t, 0 from dim on; d is a multiple of 4. */
  __device__ __forceinline__ void get(float (&x)[4], int t, int d) const {
    if constexpr (STAGED) {
      camox_get_floats(x, shared + t * pitch + d);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = d + i < dim ? sa_get(global, first + t * token + (d + i) * inner, dtype) : 0.0f;
    }
  }
};

/* The tokens of the block's items -> shared memory, V elements an access: q, k, v and in the backward grad, each a.group items.
   Keys and values of padded tokens become zeros: a weight of 0 does not silence a NaN. */
template <typename T, int V, bool BACKWARD>
__device__ __forceinline__ void sa_stage(float *to, const sa_args &a, int64_t first, int items) {
  constexpr int tensors = BACKWARD ? 4 : 3;
  const camox_view4 *const views[] = {&a.p.q, &a.p.k, &a.p.v, &a.p.grad};
  const int length = static_cast<int>(a.p.length), dim = static_cast<int>(a.p.dim), vectors = a.pitch / V;
  for (int i = static_cast<int>(threadIdx.x); i < vectors * items * length; i += SA_THREADS) {
    const int d = i % vectors * V, row_index = i / vectors, item = row_index % items, t = row_index / items;
    const sa_place place = sa_place_of(a, first + item);
    const uint8_t *const padding = sa_padding(a, place);
    const bool padded = padding != nullptr && __ldg(padding + t * a.p.padding_stride[1]) != 0;
    const int column = d < dim ? d : 0;
    T x[tensors][V];
    float single[tensors] = {};
    /* no branch between the loads of vectors, so that all are under way at once */
#pragma unroll
    for (int k = 0; k < tensors; ++k) {
      const camox_view4 &view = *views[k];
      const int64_t at = sa_offset(view, place) + t * view.stride[1];
      if constexpr (V > 1)
        camox_load(x[k], static_cast<const T *>(view.data) + at + column);
      else
        single[k] = sa_get(view.data, at + column * view.stride[3], a.p.dtype);
    }
#pragma unroll
    for (int k = 0; k < tensors; ++k) {
      const bool exists = d < dim && !(padded && (k == 1 || k == 2));
      float values[V];
#pragma unroll
      for (int c = 0; c < V; ++c) values[c] = !exists ? 0.0f : V > 1 ? camox_to_float(x[k][c]) : single[k];
      camox_put_floats(to + (k * a.group + item) * a.item_size + t * a.pitch + d, values);
    }
  }
}

template <bool STAGED>
__device__ __forceinline__ sa_rows<STAGED> sa_rows_of(const sa_args &a, const float *staged, const camox_view4 &view,
                                                      int64_t first, int item, bool keys) {
  sa_rows<STAGED> rows = {};
  rows.pitch = a.pitch, rows.dim = static_cast<int>(a.p.dim);
  if constexpr (STAGED) {
    rows.shared = staged + item * a.item_size;
  } else {
    const sa_place place = sa_place_of(a, first + item);
    rows.global = view.data, rows.first = sa_offset(view, place), rows.dtype = a.p.dtype;
    rows.token = view.stride[1], rows.inner = view.stride[3];
    rows.padding = keys ? sa_padding(a, place) : nullptr, rows.padding_step = a.p.padding_stride[1];
  }
  return rows;
}

/* to[j] = x[i] . y[j] for j < keys, 0 for an ignored y[j] */
template <bool STAGED>
__device__ __forceinline__ void sa_dot_products(float *to, const sa_rows<STAGED> &x, int i, const sa_rows<STAGED> &y,
                                                int keys) {
  for (int j = 0; j < keys; j += SA_KEYS) {
    float sum[SA_KEYS] = {};
    for (int d = 0; d < x.dim; d += 4) {
      float own[4];
      x.get(own, i, d);
#pragma unroll
      for (int key = 0; key < SA_KEYS; ++key) {
        float other[4];
        y.get(other, min(j + key, keys - 1), d);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[key] = fmaf(own[c], other[c], sum[key]);
      }
    }
#pragma unroll
    for (int key = 0; key < SA_KEYS; ++key)
      if (j + key < keys) to[j + key] = y.ignored(j + key) ? 0.0f : sum[key];
  }
}

/* Scores -> weights of one token, in place; zeros past the keys. */
__device__ __forceinline__ void sa_softmax(float *row, const sa_args &a, const sa_place &place, int keys) {
  const uint8_t *const padding = sa_padding(a, place);
  const int length = static_cast<int>(a.p.length);
  const float scale = static_cast<float>(a.p.scale);
  float largest = -3.402823466e38f, sum = 0.0f;
  for (int j = 0; j < keys; ++j) {
    const bool counts = padding == nullptr || __ldg(padding + j * a.p.padding_stride[1]) == 0;
    row[j] = counts ? row[j] * scale : -INFINITY;
    largest = fmaxf(largest, row[j]);
  }
  for (int j = 0; j < keys; ++j) {
    row[j] = expf(row[j] - largest);
    sum += row[j];
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int j = 0; j < length; ++j) row[j] = j < keys ? row[j] * inverse : 0.0f;
}

/* The dropout factors of one token's weights, with one call of Philox for those that share it. */
struct sa_factors {
  uint64_t seed, group;
  camox_philox_words words;

  __device__ __forceinline__ float at(const sa_args &a, int64_t index) {
    if (a.p.seed == nullptr) return 1.0f;
    const uint64_t needed = static_cast<uint64_t>(index) / CAMOX_PHILOX_ELEMENTS;
    if (needed != group) group = needed, words = camox_philox_group(seed, group);
    return camox_philox_pick(words, static_cast<int>(index % CAMOX_PHILOX_ELEMENTS)) >= a.threshold ? a.kept : 0.0f;
  }
};

__device__ __forceinline__ sa_factors sa_factors_of(const sa_args &a) {
  sa_factors factors = {};
  factors.seed = a.p.seed ? static_cast<uint64_t>(__ldg(a.p.seed)) : 0;
  factors.group = UINT64_MAX;
  return factors;
}

/* Columns of token t of an item: sum_j weight[j * step] rows[j], SA_CHUNK at a time. */
template <typename T, int V, bool STAGED>
__device__ __forceinline__ void sa_combine(const sa_args &a, const camox_view4 &view, int64_t item, int t, const float *weight,
                                           int step, const sa_rows<STAGED> &rows) {
  const int length = static_cast<int>(a.p.length);
  const int64_t to = sa_offset(view, sa_place_of(a, item)) + t * view.stride[1];
  for (int first = 0; first < rows.dim; first += SA_CHUNK) {
    float sum[SA_CHUNK / 4][4] = {};
    for (int j = 0; j < length; ++j) {
      if (rows.ignored(j)) continue;
      const float w = weight[j * step];
#pragma unroll
      for (int k = 0; k < SA_CHUNK / 4; ++k) {
        if (first + 4 * k >= rows.dim) continue;
        float x[4];
        rows.get(x, j, first + 4 * k);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[k][c] = fmaf(w, x[c], sum[k][c]);
      }
    }
#ifdef CAMOX_BREAK_SHORT_ATTENTION
    sum[0][0] += 1e-3f;
#endif
#pragma unroll
    for (int k = 0; k < SA_CHUNK / 4; ++k) {
      const int d = first + 4 * k;
      if (d >= rows.dim) continue;
      if constexpr (V > 1) {
        camox_store_float(static_cast<T *>(view.data) + to + d, sum[k]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (d + c < rows.dim) sa_put(view.data, to + (d + c) * view.stride[3], sum[k][c], a.p.dtype);
      }
    }
  }
}

/* Blocks of a multiprocessor, 0: as nvcc finds them. Elsewhere it would have too many, and spill. */
template <bool STAGED>
static constexpr int sa_blocks = !STAGED                                             ? 3
                                 : CAMOX_CUDA_ARCH == 750 || CAMOX_CUDA_ARCH >= 1000 ? 5
                                                                                     : 0;

template <typename T, int V, bool STAGED>
__global__ void __launch_bounds__(SA_THREADS, sa_blocks<STAGED>) short_attention_kernel(const __grid_constant__ sa_args a) {
  CAMOX_DYNAMIC_SHARED(float, shared);
  const int length = static_cast<int>(a.p.length), tensor = STAGED ? a.group * a.item_size : 0;
  float *const staged_q = shared, *const staged_k = shared + tensor, *const staged_v = shared + 2 * tensor;
  float *const weights = shared + 3 * tensor;
  for (int64_t block = blockIdx.x; block < a.groups; block += gridDim.x) {
    const int64_t first = block * a.group;
    const int items = static_cast<int>(min(static_cast<int64_t>(a.group), a.items - first));
    if constexpr (STAGED) {
      __syncthreads();
      sa_stage<T, V, false>(shared, a, first, items);
      __syncthreads();
    }
    for (int token = static_cast<int>(threadIdx.x); token < items * length; token += SA_THREADS) {
      const int item = token % items, i = token / items, keys = a.p.causal ? i + 1 : length;
      float *const row = weights + item * a.weights + i * a.row;
      const sa_rows<STAGED> q = sa_rows_of<STAGED>(a, staged_q, a.p.q, first, item, false);
      const sa_rows<STAGED> k = sa_rows_of<STAGED>(a, staged_k, a.p.k, first, item, true);
      const sa_rows<STAGED> v = sa_rows_of<STAGED>(a, staged_v, a.p.v, first, item, true);
      sa_dot_products(row, q, i, k, keys);
      sa_softmax(row, a, sa_place_of(a, first + item), keys);
      sa_factors factors = sa_factors_of(a);
      const int64_t index = ((first + item) * length + i) * length;
      if (a.p.seed)
        for (int j = 0; j < keys; ++j) row[j] *= factors.at(a, index + j);
      sa_combine<T, V>(a, a.p.out, first + item, i, row, 1, v);
    }
  }
}

template <typename T, int V, bool STAGED>
__global__ void __launch_bounds__(SA_THREADS, sa_blocks<STAGED>)
    short_attention_backward_kernel(const __grid_constant__ sa_args a) {
  CAMOX_DYNAMIC_SHARED(float, shared);
  const int length = static_cast<int>(a.p.length), tensor = STAGED ? a.group * a.item_size : 0;
  float *const staged_q = shared, *const staged_k = shared + tensor, *const staged_v = shared + 2 * tensor;
  float *const staged_grad = shared + 3 * tensor;
  float *const weights = shared + 4 * tensor, *const score_grads = weights + a.group * a.weights;
  for (int64_t block = blockIdx.x; block < a.groups; block += gridDim.x) {
    const int64_t first = block * a.group;
    const int items = static_cast<int>(min(static_cast<int64_t>(a.group), a.items - first));
    __syncthreads();
    if constexpr (STAGED) {
      sa_stage<T, V, true>(shared, a, first, items);
      __syncthreads();
    }
    for (int token = static_cast<int>(threadIdx.x); token < items * length; token += SA_THREADS) {
      const int item = token % items, i = token / items, keys = a.p.causal ? i + 1 : length;
      float *const row = weights + item * a.weights + i * a.row;
      float *const score_grad = score_grads + item * a.weights + i * a.row;
      const sa_rows<STAGED> q = sa_rows_of<STAGED>(a, staged_q, a.p.q, first, item, false);
      const sa_rows<STAGED> k = sa_rows_of<STAGED>(a, staged_k, a.p.k, first, item, true);
      const sa_rows<STAGED> v = sa_rows_of<STAGED>(a, staged_v, a.p.v, first, item, true);
      const sa_rows<STAGED> grad = sa_rows_of<STAGED>(a, staged_grad, a.p.grad, first, item, false);
      sa_dot_products(row, q, i, k, keys);
      sa_dot_products(score_grad, grad, i, v, keys);
      sa_softmax(row, a, sa_place_of(a, first + item), keys);
      sa_factors factors = sa_factors_of(a);
      const int64_t index = ((first + item) * length + i) * length;
      const float scale = static_cast<float>(a.p.scale);
      float mean = 0.0f;
      uint64_t kept = 0; /* bit j: weight j is */
      for (int j = 0; j < keys; ++j) {
        const float factor = factors.at(a, index + j);
        kept |= static_cast<uint64_t>(factor != 0.0f) << j;
        score_grad[j] *= factor;
        mean = fmaf(row[j], score_grad[j], mean);
      }
      for (int j = 0; j < length; ++j) {
        score_grad[j] = j < keys ? row[j] * (score_grad[j] - mean) * scale : 0.0f;
        row[j] = kept >> j & 1 ? row[j] * a.kept : 0.0f;
      }
      sa_combine<T, V>(a, a.p.grad_q, first + item, i, score_grad, 1, k);
    }
    __syncthreads();
    for (int token = static_cast<int>(threadIdx.x); token < items * length; token += SA_THREADS) {
      const int item = token % items, j = token / items;
      const sa_rows<STAGED> q = sa_rows_of<STAGED>(a, staged_q, a.p.q, first, item, false);
      const sa_rows<STAGED> grad = sa_rows_of<STAGED>(a, staged_grad, a.p.grad, first, item, false);
      sa_combine<T, V>(a, a.p.grad_k, first + item, j, score_grads + item * a.weights + j, a.row, q);
      sa_combine<T, V>(a, a.p.grad_v, first + item, j, weights + item * a.weights + j, a.row, grad);
    }
  }
}

/* ---- launchers ---- */

static bool sa_view_fits(const camox_short_attention_params *p, const camox_view4 &view, int lanes, int element) {
  const int64_t sizes[3] = {p->sequences, p->length, p->heads};
  if (view.stride[3] != 1 || !camox_aligned(view.data, lanes * element)) return false;
  for (int i = 0; i < 3; ++i)
    if (sizes[i] > 1 && view.stride[i] % lanes != 0) return false;
  return true;
}

/* Whether every row can be accessed `lanes` elements at a time. */
static bool sa_fits(const camox_short_attention_params *p, bool backward, int lanes, int element) {
  if (p->dim % lanes != 0) return false;
  const camox_view4 forward_views[] = {p->q, p->k, p->v, p->out};
  const camox_view4 backward_views[] = {p->q, p->k, p->v, p->grad, p->grad_q, p->grad_k, p->grad_v};
  bool fits = true;
  if (backward)
    for (const camox_view4 &view : backward_views) fits = fits && sa_view_fits(p, view, lanes, element);
  else
    for (const camox_view4 &view : forward_views) fits = fits && sa_view_fits(p, view, lanes, element);
  return fits;
}

static sa_args sa_args_of(const camox_short_attention_params *p) {
  sa_args a = {};
  a.p = *p;
  a.threshold = camox_dropout_threshold(p->p);
  a.kept = p->seed ? static_cast<float>(camox_dropout_scale(a.threshold)) : 1.0f;
  a.items = p->sequences * p->heads;
  return a;
}

/* Bytes of shared memory that a block has if it asks for them. */
static int64_t sa_most_shared(void) {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return SA_SHARED;
  return bytes;
}

/* How many items a block takes and the bytes that they need; whether they are staged. */
static int64_t sa_plan(sa_args *a, bool backward, bool *staged) {
  /* Neighbouring threads have the same token of neighbouring items, or of few long ones neighbouring tokens: their rows must
     be in different banks then. */
  const bool few = a->p.length > SA_THREADS / SA_NEIGHBOURS;
  a->row = static_cast<int>(few ? a->p.length | 1 : a->p.length);
  a->weights = static_cast<int>(a->p.length * a->row) | 1;
  const int64_t weights = (backward ? 2 : 1) * static_cast<int64_t>(a->weights), tensors = backward ? 4 : 3;
  const int64_t multiple_of_4 = camox_ceil_div(a->p.dim, 4) * 4;
  const int64_t pitch = few && multiple_of_4 % 8 == 0 ? multiple_of_4 + 4 : multiple_of_4;
  int64_t item_size = a->p.length * pitch;
  while (item_size % 32 != 4) item_size += 4;
  int64_t floats = tensors * item_size + weights;
  *staged = floats * 4 <= SA_SHARED || floats * 4 <= sa_most_shared();
  if (!*staged) floats = weights;
  a->pitch = *staged ? static_cast<int>(pitch) : 0;
  a->item_size = *staged ? static_cast<int>(item_size) : 0;
  const int64_t fit = SA_SHARED / 4 / floats, threads = SA_THREADS / a->p.length;
  a->group = static_cast<int>(fit < threads ? fit : threads);
  if (a->group < 1) a->group = 1;
  a->groups = camox_ceil_div(a->items, a->group);
  return a->group * floats * 4;
}

typedef void sa_kernel(sa_args);

template <typename T, int V, bool STAGED>
static void sa_launch(const sa_args &a, bool backward, int64_t bytes, void *stream) {
  sa_kernel *const kernel = backward ? short_attention_backward_kernel<T, V, STAGED> : short_attention_kernel<T, V, STAGED>;
  if (bytes > SA_SHARED) /* a failure makes the launch fail, which is reported */
    cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(bytes));
  CAMOX_LAUNCH(kernel, camox_grid(a.groups), SA_THREADS, bytes, stream, a);
}

template <typename T>
static void sa_launch_widest(const sa_args &args, bool backward, void *stream) {
  sa_args a = args;
  bool staged;
  const int64_t bytes = sa_plan(&a, backward, &staged);
  if (!staged)
    sa_launch<float, 1, false>(a, backward, bytes, stream);
  else if (sa_fits(&a.p, backward, 4, static_cast<int>(sizeof(T))))
    sa_launch<T, 4, true>(a, backward, bytes, stream);
  else
    sa_launch<float, 1, true>(a, backward, bytes, stream);
}

template <typename T, int DIM>
static void sa_launch_mma(const sa_args &a, bool backward, void *stream) {
  const auto kernel = backward ? short_attention_mma_backward_kernel<T, DIM> : short_attention_mma_kernel<T, DIM>;
  const int threads = static_cast<int>(camox_ceil_div(a.p.length, SA_MMA_ROWS)) * CAMOX_WARP;
  CAMOX_LAUNCH(kernel, camox_grid(a.items), threads, 0, stream, a);
}

template <typename T>
static void sa_launch_half(const sa_args &a, bool backward, void *stream) {
  constexpr bool on_sm75 = !camox_is_bfloat16<T>::value;
  if constexpr (camox_may_be_sm80 || on_sm75) {
    if (a.p.length > SA_MMA_ROWS && a.p.dim <= 64 && sa_fits(&a.p, backward, 8, 2) && (on_sm75 || camox_device_is_sm80())) {
      if (a.p.dim <= 32)
        sa_launch_mma<T, 32>(a, backward, stream);
      else
        sa_launch_mma<T, 64>(a, backward, stream);
      return;
    }
  }
  sa_launch_widest<T>(a, backward, stream);
}

static int sa_run(const camox_short_attention_params *p, bool backward, void *stream) {
  if (p->sequences * p->length * p->heads * p->dim == 0) return cudaSuccess;
  const sa_args a = sa_args_of(p);
  switch (p->dtype) {
    case CAMOX_F32: sa_launch_widest<float>(a, backward, stream); break;
    case CAMOX_BF16: sa_launch_half<__nv_bfloat16>(a, backward, stream); break;
    case CAMOX_F16: sa_launch_half<__half>(a, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_short_attention_cuda(const camox_short_attention_params *p, void *stream) {
  return sa_run(p, false, stream);
}

extern "C" int camox_short_attention_backward_cuda(const camox_short_attention_params *p, void *stream) {
  return sa_run(p, true, stream);
}
