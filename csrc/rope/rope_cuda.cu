/* rope on CUDA. A thread has one vector of pairs of a token and rotates it in up to ROPE_HEADS heads; no shared memory.

     token t     | pairs: rotated vectors        | passing vectors |      one thread each (passing ones are only copied)
       head 0    | (a, b) --> (a cos - b sin, b cos + a sin)
       head 1    |   .          the angles are read once,
       head 2    |   .          the loads of 4 heads are in flight at once

   N is the widest access that all tensors allow: 16 bytes, 8 bytes, or one element with any strides. Interleaved pairs lie in
   one access (ADJACENT); pairs of halves, and single elements, take two.
   The backward to the tables has two steps of fixed order: each thread adds up its pairs over all heads of a token, then a
   thread per column of the tables adds up the tokens of a row. No float atomics: the same bits on every run. */
#include "../common/cuda_util.cuh"
#include "../common/device_errors.h"
#include "rope.h"

#define ROPE_HEADS 4         /* heads of one thread, where there are threads enough without */
#define ROPE_FILL (1 << 14)  /* threads that fill a large GPU */
#define ROPE_SUM_THREADS 128 /* columns of a block that sums a row of the tables */

/* Of a block. The sums of the backward to the tables take so many registers that of blocks of 256 one alone would fit. */
template <bool SUMS>
static constexpr int rope_threads = SUMS ? 128 : 256;

struct rope_plan {
  camox_rope_params p;
  int64_t rotated, vectors; /* of a token and head: accesses (or pairs of them) that are rotated, and all */
  int64_t heads;            /* that one thread serves */
  int64_t chunks;           /* of that many heads */
  int64_t items;            /* threads with work */
  bool copies;              /* what is not rotated has to be copied */
};

/* The row of the tables of token (b,t), or -1 where positions or cu_seqlens give none. */
__device__ __forceinline__ int64_t rope_row(const camox_rope_params &p, int64_t b, int64_t t) {
  int64_t row = t;
  if (p.positions) {
    row = p.positions[b * p.position_stride[0] + t * p.position_stride[1]];
  } else if (p.cu_seqlens) {
    if (p.sequences == 0) return -1;
    const int64_t sequence = camox_rope_sequence(p.cu_seqlens, p.sequences, t);
    if (t < p.cu_seqlens[sequence] || t >= p.cu_seqlens[sequence + 1]) return -1;
    row = t - p.cu_seqlens[sequence];
  }
  return row < 0 || row >= p.table_length ? -1 : row;
}

/* x may be y: not by the read-only path. */
template <int N, typename T>
__device__ __forceinline__ void rope_load(T (&to)[N], const T *p) {
  typedef typename camox_word<N *static_cast<int>(sizeof(T))>::type word;
  const word bits = *reinterpret_cast<const word *>(p);
  __builtin_memcpy(static_cast<void *>(to), &bits, sizeof bits);
}

/* The angles of a thread's pairs, so that y[a] = x[a] cos_a - x[b] sin_a and y[b] = x[b] cos_b + x[a] sin_b. */
template <int PAIRS>
struct rope_angles {
  float cos_a[PAIRS], cos_b[PAIRS], sin_a[PAIRS], sin_b[PAIRS];
};

/* first, second: the columns of the thread's first elements and, for ADJACENT not used, of their partners. */
template <int PAIRS, bool ADJACENT>
__device__ __forceinline__ void rope_read_angles(float (&a)[PAIRS], float (&b)[PAIRS], const float *row, bool per_element,
                                                 int64_t pair, int64_t first, int64_t second) {
  if (!per_element) {
    camox_load_floats<PAIRS>(a, row + pair);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) b[i] = a[i];
  } else if constexpr (ADJACENT) {
    float both[2 * PAIRS];
    camox_load_floats<2 * PAIRS>(both, row + first);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) a[i] = both[2 * i], b[i] = both[2 * i + 1];
  } else {
    camox_load_floats<PAIRS>(a, row + first);
    camox_load_floats<PAIRS>(b, row + second);
  }
}

/* One thread's elements of one head: the N of one access, or those and their N partners. */
template <typename T, int N, bool ADJACENT>
struct rope_raw {
  T first[N], second[ADJACENT ? 1 : N];
};

template <typename T, int N, bool ADJACENT>
__device__ __forceinline__ void rope_fetch(rope_raw<T, N, ADJACENT> &raw, const T *row, int64_t first, int64_t second) {
  rope_load<N>(raw.first, row + first);
  if constexpr (!ADJACENT) rope_load<N>(raw.second, row + second);
}

template <typename T, int N, bool ADJACENT, int PAIRS>
__device__ __forceinline__ void rope_pairs(float (&a)[PAIRS], float (&b)[PAIRS], const rope_raw<T, N, ADJACENT> &raw) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    a[i] = camox_to_float(raw.first[ADJACENT ? 2 * i : i]);
    b[i] = camox_to_float(ADJACENT ? raw.first[ADJACENT ? 2 * i + 1 : 0] : raw.second[ADJACENT ? 0 : i]);
  }
}

template <typename T, int N, bool ADJACENT, int PAIRS>
__device__ __forceinline__ void rope_put(T *row, int64_t first, int64_t second, const float (&a)[PAIRS],
                                         const float (&b)[PAIRS], const rope_angles<PAIRS> &angles) {
  float rotated_a[PAIRS], rotated_b[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    rotated_a[i] = fmaf(a[i], angles.cos_a[i], -b[i] * angles.sin_a[i]);
    rotated_b[i] = fmaf(b[i], angles.cos_b[i], a[i] * angles.sin_b[i]);
#ifdef CAMOX_BREAK_ROPE
    rotated_a[i] += 1e-3f;
#endif
  }
  if constexpr (ADJACENT) {
    float both[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) both[2 * i] = rotated_a[i], both[2 * i + 1] = rotated_b[i];
    camox_store_float(row + first, both);
  } else {
    camox_store_float(row + first, rotated_a);
    camox_store_float(row + second, rotated_b);
  }
}

/* The N passing elements at `first` of `heads` heads, NaN where the token has no row of the tables. */
template <typename T, int N>
__device__ __forceinline__ void rope_pass(const T *x, T *y, int64_t x_step, int64_t y_step, int64_t x_first, int64_t y_first,
                                          int64_t heads, bool lost) {
  for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {
    T raw[N];
    rope_load<N>(raw, x + x_first);
    if (lost) {
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i] = camox_from_float<T>(nanf(""));
    }
    camox_store<N>(y + y_first, raw);
  }
}

/* SUMS: the backward to the tables, where a thread serves all heads of its token. Without the bound of one block ptxas spills
   on sm_75 to fit more of those. Of the others three or four blocks fit by a bound of two, where one would make it two. */
template <typename T, int N, bool ADJACENT, bool SUMS>
__global__ void __launch_bounds__(rope_threads<SUMS>, SUMS ? 1 : 2) rope_kernel(const __grid_constant__ rope_plan plan) {
  constexpr int PAIRS = ADJACENT ? N / 2 : N;
  const camox_rope_params &p = plan.p;
  const bool per_element = p.table_columns != p.rotary_dim / 2;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * rope_threads<SUMS> + threadIdx.x; item < plan.items;
       item += static_cast<int64_t>(gridDim.x) * rope_threads<SUMS>) {
    int64_t vector, t, chunk;
    int64_t b = camox_divide(item, plan.vectors, &vector);
    b = camox_divide(b, p.length, &t);
    b = camox_divide(b, plan.chunks, &chunk);
    const int64_t h = chunk * plan.heads, heads = min(plan.heads, p.heads - h);
    const int64_t row = rope_row(p, b, t);
    const bool lost = row < 0;
    if (lost && vector == 0 && h == 0 && p.error_word) atomicOr(p.error_word, static_cast<uint32_t>(CAMOX_ERROR_ROPE_POSITION));
    const T *x = static_cast<const T *>(p.x.data) + b * p.x.stride[0] + h * p.x.stride[1] + t * p.x.stride[2];
    T *y = static_cast<T *>(p.y.data) + b * p.y.stride[0] + h * p.y.stride[1] + t * p.y.stride[2];
    if (vector >= plan.rotated) {
      const int64_t element = p.rotary_dim + (vector - plan.rotated) * N;
      if (plan.copies || lost)
        rope_pass<T, N>(x, y, p.x.stride[1], p.y.stride[1], element * p.x.stride[3], element * p.y.stride[3], heads, lost);
      continue;
    }
    const int64_t pair = vector * PAIRS, first = p.interleaved ? 2 * pair : pair;
    const int64_t second = p.interleaved ? first + 1 : first + p.rotary_dim / 2;
    rope_angles<PAIRS> angles;
    if (lost) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) angles.cos_a[i] = angles.cos_b[i] = angles.sin_a[i] = angles.sin_b[i] = nanf("");
    } else {
      const float *const cosines = static_cast<const float *>(p.cos) + row * p.table_columns;
      const float *const sines = static_cast<const float *>(p.sin) + row * p.table_columns;
      rope_read_angles<PAIRS, ADJACENT>(angles.cos_a, angles.cos_b, cosines, per_element, pair, first, second);
      rope_read_angles<PAIRS, ADJACENT>(angles.sin_a, angles.sin_b, sines, per_element, pair, first, second);
    }
    if (p.transposed) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const float own = angles.sin_a[i];
        angles.sin_a[i] = -angles.sin_b[i], angles.sin_b[i] = -own;
      }
    }
    const int64_t x_first = first * p.x.stride[3], x_second = second * p.x.stride[3];
    const int64_t y_first = first * p.y.stride[3], y_second = second * p.y.stride[3];
    if constexpr (!SUMS) {
      for (int64_t begin = 0; begin < heads; begin += ROPE_HEADS) {
        rope_raw<T, N, ADJACENT> raw[ROPE_HEADS];
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; ++k)
          if (begin + k < heads) rope_fetch(raw[k], x + (begin + k) * p.x.stride[1], x_first, x_second);
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; ++k) {
          if (begin + k >= heads) continue;
          float a[PAIRS], b_[PAIRS];
          rope_pairs(a, b_, raw[k]);
          rope_put<T, N, ADJACENT>(y + (begin + k) * p.y.stride[1], y_first, y_second, a, b_, angles);
        }
      }
    } else {
      const T *input = static_cast<const T *>(p.input.data) + b * p.input.stride[0] + t * p.input.stride[2];
      const int64_t input_first = first * p.input.stride[3], input_second = second * p.input.stride[3];
      rope_angles<PAIRS> sums = {};
      for (int64_t k = 0; k < heads; ++k) {
        rope_raw<T, N, ADJACENT> raw_grad, raw_input;
        rope_fetch(raw_grad, x + k * p.x.stride[1], x_first, x_second);
        rope_fetch(raw_input, input + k * p.input.stride[1], input_first, input_second);
        float grad_a[PAIRS], grad_b[PAIRS], a[PAIRS], b_[PAIRS];
        rope_pairs(grad_a, grad_b, raw_grad);
        rope_pairs(a, b_, raw_input);
        rope_put<T, N, ADJACENT>(y + k * p.y.stride[1], y_first, y_second, grad_a, grad_b, angles);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          sums.cos_a[i] = fmaf(grad_a[i], a[i], sums.cos_a[i]);
          sums.cos_b[i] = fmaf(grad_b[i], b_[i], sums.cos_b[i]);
          /* of a forward that was itself transposed the gradient and the input change places */
          sums.sin_a[i] = fmaf(p.transposed ? -grad_a[i] : grad_b[i], p.transposed ? b_[i] : -a[i], sums.sin_a[i]);
          sums.sin_b[i] = fmaf(p.transposed ? grad_b[i] : grad_a[i], p.transposed ? a[i] : b_[i], sums.sin_b[i]);
        }
      }
      float *const cosines = p.partial + (b * p.length + t) * p.table_columns;
      float *const sines = cosines + p.batch * p.length * p.table_columns;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        if (per_element) {
          const int64_t column_a = ADJACENT ? first + 2 * i : first + i, column_b = ADJACENT ? column_a + 1 : second + i;
          cosines[column_a] = sums.cos_a[i], cosines[column_b] = sums.cos_b[i];
          sines[column_a] = sums.sin_a[i], sines[column_b] = sums.sin_b[i];
        } else {
          cosines[pair + i] = sums.cos_a[i] + sums.cos_b[i], sines[pair + i] = sums.sin_a[i] + sums.sin_b[i];
        }
      }
    }
  }
}

/* The sums of the tokens of one row of the tables and ROPE_SUM_THREADS columns, in the order of the tokens; in float64, as they
   may be a hundred thousand. */
__global__ void __launch_bounds__(ROPE_SUM_THREADS)
    rope_sum_kernel(const __grid_constant__ camox_rope_params p, int64_t groups, int64_t blocks) {
  __shared__ uint32_t found[ROPE_SUM_THREADS / CAMOX_WARP];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t tokens = p.batch * p.length;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    int64_t group;
    const int64_t row = camox_divide(block, groups, &group), column = group * ROPE_SUM_THREADS + thread;
    const bool writes = column < p.table_columns;
    double cosine = 0.0, sine = 0.0;
    const auto add = [&](int64_t token) {
      if (!writes) return;
      cosine += static_cast<double>(p.partial[token * p.table_columns + column]);
      sine += static_cast<double>(p.partial[(tokens + token) * p.table_columns + column]);
    };
    if (p.positions) {
      for (int64_t base = 0; base < tokens; base += ROPE_SUM_THREADS) {
        int64_t t;
        const int64_t token = base + thread, b = camox_divide(token, p.length, &t);
        const uint32_t votes = __ballot_sync(CAMOX_FULL_MASK, token < tokens && rope_row(p, b, t) == row);
        __syncthreads();
        if (thread % CAMOX_WARP == 0) found[thread / CAMOX_WARP] = votes;
        __syncthreads();
        for (int warp = 0; warp < ROPE_SUM_THREADS / CAMOX_WARP; ++warp)
          for (uint32_t left = found[warp]; left != 0; left &= left - 1)
            add(base + warp * CAMOX_WARP + __ffs(static_cast<int>(left)) - 1);
      }
    } else if (p.cu_seqlens) {
      for (int64_t s = 0; s < p.sequences; ++s) {
        const int64_t token = p.cu_seqlens[s] + row;
        if (token >= 0 && token < p.cu_seqlens[s + 1] && token < tokens) add(token);
      }
    } else if (row < p.length && writes) {
      const int64_t sines = tokens * p.table_columns, step = p.length * p.table_columns;
      const float *from = p.partial + row * p.table_columns + column;
#pragma unroll 8
      for (int64_t b = 0; b < p.batch; ++b, from += step)
        cosine += static_cast<double>(from[0]), sine += static_cast<double>(from[sines]);
    }
    if (writes) {
      static_cast<float *>(p.grad_cos)[row * p.table_columns + column] = static_cast<float>(cosine);
      static_cast<float *>(p.grad_sin)[row * p.table_columns + column] = static_cast<float>(sine);
    }
  }
}

/* ---- launchers ---- */

static bool rope_view_fits(const camox_rope_params *p, const camox_view4 &view, int lanes, int element) {
  const int64_t sizes[3] = {p->batch, p->heads, p->length};
  if (view.stride[3] != 1 || !camox_aligned(view.data, lanes * element)) return false;
  for (int i = 0; i < 3; ++i)
    if (sizes[i] > 1 && view.stride[i] % lanes != 0) return false;
  return true;
}

/* Whether everything can be accessed `lanes` elements at a time. */
static bool rope_fits(const camox_rope_params *p, bool sums, int lanes, int element) {
  const int64_t side =
      p->interleaved ? p->rotary_dim : p->rotary_dim / 2; /* elements that lie side by side and are rotated alike */
  if (side % lanes != 0 || (p->dim - p->rotary_dim) % lanes != 0) return false;
  const int angles = p->interleaved && p->table_columns != p->rotary_dim ? lanes / 2 : lanes, table = angles < 4 ? angles : 4;
  if (p->table_columns % table != 0 || !camox_aligned(p->cos, 4 * table) || !camox_aligned(p->sin, 4 * table)) return false;
  return rope_view_fits(p, p->x, lanes, element) && rope_view_fits(p, p->y, lanes, element) &&
         (!sums || rope_view_fits(p, p->input, lanes, element));
}

static rope_plan rope_plan_of(const camox_rope_params *p, bool sums, int lanes, bool adjacent) {
  rope_plan plan = {};
  plan.p = *p;
  plan.rotated = p->rotary_dim / 2 / (adjacent ? lanes / 2 : lanes);
  plan.vectors = plan.rotated + (p->dim - p->rotary_dim) / lanes;
  const int64_t tokens = p->batch * p->length * plan.vectors;
  const bool many = tokens * camox_ceil_div(p->heads, ROPE_HEADS) >= ROPE_FILL;
  plan.heads = sums ? p->heads : many ? ROPE_HEADS : 1;
  plan.chunks = camox_ceil_div(p->heads, plan.heads);
  plan.items = tokens * plan.chunks;
  plan.copies = p->x.data != p->y.data;
  return plan;
}

template <typename T, int N, bool ADJACENT, bool SUMS>
static void rope_launch(const camox_rope_params *p, void *stream) {
  const rope_plan plan = rope_plan_of(p, SUMS, N, ADJACENT);
  const unsigned grid = camox_grid(camox_ceil_div(plan.items, rope_threads<SUMS>));
  CAMOX_LAUNCH((rope_kernel<T, N, ADJACENT, SUMS>), grid, rope_threads<SUMS>, 0, stream, plan);
}

template <typename T, bool SUMS>
static void rope_launch_widest(const camox_rope_params *p, void *stream) {
  constexpr int element = static_cast<int>(sizeof(T)), widest = 16 / element, middle = 8 / element;
  const bool wide = rope_fits(p, SUMS, widest, element), half = rope_fits(p, SUMS, middle, element);
  if (wide && p->interleaved)
    rope_launch<T, widest, true, SUMS>(p, stream);
  else if (wide)
    rope_launch<T, widest, false, SUMS>(p, stream);
  else if (half && p->interleaved)
    rope_launch<T, middle, true, SUMS>(p, stream);
  else if (half)
    rope_launch<T, middle, false, SUMS>(p, stream);
  else
    rope_launch<T, 1, false, SUMS>(p, stream);
}

template <bool SUMS>
static int rope_run(const camox_rope_params *p, void *stream) {
  if (p->batch * p->heads * p->length * p->dim == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: rope_launch_widest<float, SUMS>(p, stream); break;
    case CAMOX_BF16: rope_launch_widest<__nv_bfloat16, SUMS>(p, stream); break;
    case CAMOX_F16: rope_launch_widest<__half, SUMS>(p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_rope_cuda(const camox_rope_params *p, void *stream) { return rope_run<false>(p, stream); }

extern "C" int camox_rope_backward_cuda(const camox_rope_params *p, void *stream) {
  camox_rope_params sums = *p;
  /* without heads nothing is added to any token: no token, then */
  if (p->heads * p->dim == 0) sums.batch = 0, sums.positions = nullptr, sums.cu_seqlens = nullptr;
  const int error = rope_run<true>(p, stream);
  if (error != cudaSuccess || p->table_length * p->table_columns == 0) return error;
  const int64_t groups = camox_ceil_div(p->table_columns, ROPE_SUM_THREADS), blocks = p->table_length * groups;
  CAMOX_LAUNCH(rope_sum_kernel, camox_grid(blocks), ROPE_SUM_THREADS, 0, stream, sums, groups, blocks);
  return camox_launch_status();
}
