/* bias_gelu on CUDA. No shared memory but in the last step.

     forward    a thread: V neighbouring columns of one row     x, bias --16 B--> registers --> y --16 B-->
     backward   a thread: V columns of a band of rows           grad_x of each row; the sums for bias stay in registers
                [band 0: V sums][band 1: V sums] ...            -> partial [bands][columns]
     reduce     a block: 32 columns; its threads add the bands   partial -> shared [slots][32] -> grad_bias, in order

   V is 16 bytes of every tensor where all allow it, else 1. No atomics: the same bits on every run. */
#include "../common/cuda_util.cuh"
#include "../common/philox.cuh"
#include "bias_gelu.h"
#include "bias_gelu_plan.h"

#define BIAS_GELU_THREADS 256
#define BIAS_GELU_REDUCE_COLUMNS 32
#define BIAS_GELU_REDUCE_SLOTS (BIAS_GELU_THREADS / BIAS_GELU_REDUCE_COLUMNS)

struct bias_gelu_args {
  camox_bias_gelu_params p;
  uint32_t threshold;
  float scale;
  int64_t vectors, items, band_rows, bands; /* vectors of a row; items: those of all threads */
};

__device__ __forceinline__ float bias_gelu_broken(float x) {
#ifdef CAMOX_BREAK_BIAS_GELU
  return x + 1e-3f;
#else
  return x;
#endif
}

/* Phi(u), without cancellation on either side. */
__device__ __forceinline__ float bias_gelu_phi(float u) { return 0.5f * erfcf(-0.70710678118654752f * u); }

/* V elements times their factors. */
template <int V>
__device__ __forceinline__ void bias_gelu_drop(float (&v)[V], const bias_gelu_args &a, uint64_t seed, int64_t index) {
  if (a.p.seed == nullptr) return;
  bool keep[V];
  camox_keeps_all(keep, seed, index, a.threshold);
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = keep[i] ? v[i] * a.scale : 0.0f;
}

template <typename T, int V>
__global__ void __launch_bounds__(BIAS_GELU_THREADS) bias_gelu_kernel(const __grid_constant__ bias_gelu_args a) {
  const uint64_t seed = a.p.seed ? static_cast<uint64_t>(__ldg(a.p.seed)) : 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * BIAS_GELU_THREADS + threadIdx.x; item < a.items;
       item += static_cast<int64_t>(gridDim.x) * BIAS_GELU_THREADS) {
    int64_t vector;
    camox_divide(item, a.vectors, &vector);
    float x[V], bias[V];
    camox_load_float(x, static_cast<const T *>(a.p.x) + item * V);
    camox_load_floats(bias, static_cast<const float *>(a.p.bias) + vector * V);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += bias[i], x[i] *= bias_gelu_phi(x[i]);
    bias_gelu_drop(x, a, seed, item * V);
    x[0] = bias_gelu_broken(x[0]);
    camox_store_float(static_cast<T *>(a.p.y) + item * V, x);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(BIAS_GELU_THREADS) bias_gelu_backward_kernel(const __grid_constant__ bias_gelu_args a) {
  const uint64_t seed = a.p.seed ? static_cast<uint64_t>(__ldg(a.p.seed)) : 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * BIAS_GELU_THREADS + threadIdx.x; item < a.items;
       item += static_cast<int64_t>(gridDim.x) * BIAS_GELU_THREADS) {
    int64_t vector;
    const int64_t band = camox_divide(item, a.vectors, &vector), column = vector * V;
    float bias[V], sum[V] = {};
    camox_load_floats(bias, static_cast<const float *>(a.p.bias) + column);
    const int64_t last = min((band + 1) * a.band_rows, a.p.rows);
    [[maybe_unused]] constexpr int rows_at_once = CAMOX_CUDA_ARCH >= 800 ? 2 : 1; /* two spill on sm_75 */
#pragma unroll rows_at_once
    for (int64_t row = band * a.band_rows; row < last; ++row) {
      const int64_t index = row * a.p.columns + column;
      float u[V], grad[V];
      camox_load_float(u, static_cast<const T *>(a.p.x) + index);
      camox_load_float(grad, static_cast<const T *>(a.p.grad) + index);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        u[i] += bias[i];
        grad[i] *= fmaf(u[i] * 0.39894228040143268f, expf(-0.5f * u[i] * u[i]), bias_gelu_phi(u[i]));
      }
      bias_gelu_drop(grad, a, seed, index);
      grad[0] = bias_gelu_broken(grad[0]);
      camox_store_float(static_cast<T *>(a.p.grad_x) + index, grad);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += grad[i];
    }
    camox_put_floats(static_cast<float *>(a.p.partial) + band * a.p.columns + column, sum);
  }
}

/* grad_bias: each thread adds every BIAS_GELU_REDUCE_SLOTS-th band's share of a column, then the block adds those. */
__global__ void __launch_bounds__(BIAS_GELU_THREADS) bias_gelu_reduce_kernel(const __grid_constant__ bias_gelu_args a) {
  __shared__ float sums[BIAS_GELU_REDUCE_SLOTS][BIAS_GELU_REDUCE_COLUMNS];
  const int lane = static_cast<int>(threadIdx.x) % BIAS_GELU_REDUCE_COLUMNS;
  const int slot = static_cast<int>(threadIdx.x) / BIAS_GELU_REDUCE_COLUMNS;
  for (int64_t block = blockIdx.x; block * BIAS_GELU_REDUCE_COLUMNS < a.p.columns; block += gridDim.x) {
    const int64_t column = block * BIAS_GELU_REDUCE_COLUMNS + lane;
    float total = 0.0f;
    if (column < a.p.columns) {
#pragma unroll 4
      for (int64_t band = slot; band < a.bands; band += BIAS_GELU_REDUCE_SLOTS)
        total += __ldg(static_cast<const float *>(a.p.partial) + band * a.p.columns + column);
    }
    sums[slot][lane] = total;
    __syncthreads();
    if (slot == 0 && column < a.p.columns) {
      for (int other = 1; other < BIAS_GELU_REDUCE_SLOTS; ++other) total += sums[other][lane];
      static_cast<float *>(a.p.grad_bias)[column] = total;
    }
    __syncthreads();
  }
}

/* ---- launchers ---- */

static bool bias_gelu_fits(const camox_bias_gelu_params *p, int lanes, int element) {
  bool fits = p->columns % lanes == 0 && camox_aligned(p->bias, 16) && camox_aligned(p->partial, 16);
  const void *const pointers[] = {p->x, p->y, p->grad, p->grad_x};
  for (const void *pointer : pointers) fits = fits && camox_aligned(pointer, lanes * element);
  return fits;
}

template <typename T, int V>
static void bias_gelu_launch(bias_gelu_args a, bool backward, void *stream) {
  a.vectors = a.p.columns / V;
  a.items = a.vectors * (backward ? a.bands : a.p.rows);
  const unsigned grid = camox_grid(camox_ceil_div(a.items, BIAS_GELU_THREADS));
  if (backward)
    CAMOX_LAUNCH((bias_gelu_backward_kernel<T, V>), grid, BIAS_GELU_THREADS, 0, stream, a);
  else
    CAMOX_LAUNCH((bias_gelu_kernel<T, V>), grid, BIAS_GELU_THREADS, 0, stream, a);
}

template <typename T>
static void bias_gelu_launch_widest(const bias_gelu_args &a, bool backward, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  if (bias_gelu_fits(&a.p, lanes, static_cast<int>(sizeof(T))))
    bias_gelu_launch<T, lanes>(a, backward, stream);
  else
    bias_gelu_launch<T, 1>(a, backward, stream);
}

static bias_gelu_args bias_gelu_args_of(const camox_bias_gelu_params *p) {
  bias_gelu_args a = {};
  a.p = *p;
  a.threshold = camox_dropout_threshold(p->p);
  a.scale = static_cast<float>(camox_dropout_scale(a.threshold));
  a.band_rows = camox_bias_gelu_item_rows(p->columns), a.bands = camox_ceil_div(p->rows, a.band_rows);
  return a;
}

static int bias_gelu_run(const bias_gelu_args &a, bool backward, void *stream) {
  if (a.p.rows * a.p.columns == 0) return cudaSuccess;
  switch (a.p.dtype) {
    case CAMOX_F32: bias_gelu_launch_widest<float>(a, backward, stream); break;
    case CAMOX_BF16: bias_gelu_launch_widest<__nv_bfloat16>(a, backward, stream); break;
    case CAMOX_F16: bias_gelu_launch_widest<__half>(a, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_bias_gelu_cuda(const camox_bias_gelu_params *p, void *stream) {
  return bias_gelu_run(bias_gelu_args_of(p), false, stream);
}

extern "C" int camox_bias_gelu_backward_cuda(const camox_bias_gelu_params *p, void *stream) {
  const bias_gelu_args a = bias_gelu_args_of(p);
  const int error = bias_gelu_run(a, true, stream);
  if (error != cudaSuccess || p->columns == 0) return error;
  CAMOX_LAUNCH(bias_gelu_reduce_kernel, camox_grid(camox_ceil_div(p->columns, BIAS_GELU_REDUCE_COLUMNS)), BIAS_GELU_THREADS, 0,
               stream, a);
  return camox_launch_status();
}
