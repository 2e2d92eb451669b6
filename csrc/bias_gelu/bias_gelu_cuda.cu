/* bias_gelu on CUDA.

     forward    a thread: V adjacent columns of one row     x, bias --16 B--> registers --> y --16 B-->

     backward   a block: a band of rows, up to 256 * V columns
                  `across` threads along the columns
                  +------+------+------+
                  | V    | V    | V    |  row i              grad_x of each row is stored; a thread's sums for the bias stay
                  | V    | V    | V    |  row i + 1          in registers until the band ends
                  +------+------+------+  `down` rows at once
                                -> shared [down][across * V] -> one row of partial [bands][columns]
                then common/row_sums.cuh: partial -> grad_bias

   V is 16 bytes of every tensor where all allow it, else 1. No atomics: the same bits on every run. */
#include "../common/gelu.cuh"
#include "../common/philox.cuh"
#include "../common/row_sums.cuh"
#include "../common/weights.cuh"
#include "bias_gelu.h"
#include "bias_gelu_plan.h"

#define BIAS_GELU_THREADS 256

struct bias_gelu; /* tells the budget whose kernel of row_sums.cuh it is */

struct bias_gelu_args {
  camox_bias_gelu_params p;
  uint32_t threshold;
  float scale;
  int64_t vectors, items;          /* of a row; of all threads, or in the backward blocks with work */
  int across, down;                /* backward: threads of a block along the columns, and rows that it has at once */
  int64_t slabs, band_rows, bands; /* blocks side by side; rows of a block */
};

__device__ __forceinline__ float bias_gelu_broken(float x) {
#ifdef CAMOX_BREAK_BIAS_GELU
  return x + 1e-3f;
#else
  return x;
#endif
}

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
    camox_load_weights<T>(bias, a.p.bias, vector * V, a.p.half_bias);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = camox_gelu<T>(x[i] + bias[i]);
    bias_gelu_drop(x, a, seed, item * V);
    x[0] = bias_gelu_broken(x[0]);
    camox_store_float(static_cast<T *>(a.p.y) + item * V, x);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(BIAS_GELU_THREADS) bias_gelu_backward_kernel(const __grid_constant__ bias_gelu_args a) {
  __shared__ __align__(16) float sums[BIAS_GELU_THREADS * V];
  const uint64_t seed = a.p.seed ? static_cast<uint64_t>(__ldg(a.p.seed)) : 0;
  const int thread = static_cast<int>(threadIdx.x), outer = thread / a.across, inner = thread - outer * a.across;
  for (int64_t item = blockIdx.x; item < a.items; item += gridDim.x) {
    int64_t slab;
    const int64_t band = camox_divide(item, a.slabs, &slab), first = slab * a.across * V, column = first + inner * V;
    const int64_t last = min((band + 1) * a.band_rows, a.p.rows);
    if (outer < a.down && column < a.p.columns) {
      float bias[V], sum[V] = {};
      camox_load_weights<T>(bias, a.p.bias, column, a.p.half_bias);
      [[maybe_unused]] constexpr int rows_at_once = CAMOX_CUDA_ARCH >= 800 ? 2 : 1; /* two spill on sm_75 */
#pragma unroll rows_at_once
      for (int64_t row = band * a.band_rows + outer; row < last; row += a.down) {
        const int64_t index = row * a.p.columns + column;
        float u[V], grad[V];
        camox_load_float(u, static_cast<const T *>(a.p.x) + index);
        camox_load_float(grad, static_cast<const T *>(a.p.grad) + index);
#pragma unroll
        for (int i = 0; i < V; ++i) grad[i] = camox_gelu_grad<false>(grad[i], u[i] + bias[i]);
        bias_gelu_drop(grad, a, seed, index);
        grad[0] = bias_gelu_broken(grad[0]);
        camox_store_float(static_cast<T *>(a.p.grad_x) + index, grad);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += grad[i];
      }
      camox_put_floats(sums + thread * V, sum);
    }
    __syncthreads();
    const int width = a.across * V;
    for (int i = thread; i < width && first + i < a.p.columns; i += BIAS_GELU_THREADS) {
      float total = 0.0f;
      for (int row = 0; row < a.down; ++row) total += sums[row * width + i];
      static_cast<float *>(a.p.partial)[band * a.p.columns + first + i] = total;
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

/* Of the backward: for so many bands as run at once, since more would only leave more partial sums to add up. partial has a row
   for each work item of the CPU, so bands are at least as long. */
static int64_t bias_gelu_band_rows(const camox_bias_gelu_params &p, int64_t bands) {
  const int64_t least = camox_bias_gelu_item_rows(p.columns), rows = camox_ceil_div(p.rows, bands > 0 ? bands : 1);
  return rows > least ? rows : least;
}

template <typename T, int V>
static void bias_gelu_launch(bias_gelu_args *a, bool backward, void *stream) {
  a->vectors = a->p.columns / V;
  if (!backward) {
    a->items = a->vectors * a->p.rows;
    const unsigned grid = camox_grid(camox_ceil_div(a->items, BIAS_GELU_THREADS));
    CAMOX_LAUNCH((bias_gelu_kernel<T, V>), grid, BIAS_GELU_THREADS, 0, stream, *a);
    return;
  }
  const int64_t at_once = camox_places_of(bias_gelu_backward_kernel<T, V>, BIAS_GELU_THREADS).all();
  int64_t across = a->vectors < BIAS_GELU_THREADS ? a->vectors : BIAS_GELU_THREADS;
  a->band_rows = bias_gelu_band_rows(a->p, at_once / camox_ceil_div(a->vectors, across));
  a->bands = camox_ceil_div(a->p.rows, a->band_rows);
  while (across >= 2 * CAMOX_WARP && camox_ceil_div(a->vectors, across) * a->bands < at_once / 2) across = (across + 1) / 2;
  a->across = static_cast<int>(across), a->down = BIAS_GELU_THREADS / a->across;
  a->slabs = camox_ceil_div(a->vectors, across);
  if (a->down > a->band_rows) a->down = static_cast<int>(a->band_rows);
  a->items = a->slabs * a->bands;
  CAMOX_LAUNCH((bias_gelu_backward_kernel<T, V>), camox_grid(a->items), BIAS_GELU_THREADS, 0, stream, *a);
}

template <typename T>
static void bias_gelu_launch_widest(bias_gelu_args *a, bool backward, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  if (bias_gelu_fits(&a->p, lanes, static_cast<int>(sizeof(T))))
    bias_gelu_launch<T, lanes>(a, backward, stream);
  else
    bias_gelu_launch<T, 1>(a, backward, stream);
}

static bias_gelu_args bias_gelu_args_of(const camox_bias_gelu_params *p) {
  bias_gelu_args a = {};
  a.p = *p;
  a.threshold = camox_dropout_threshold(p->p);
  a.scale = static_cast<float>(camox_dropout_scale(a.threshold));
  return a;
}

static int bias_gelu_run(bias_gelu_args *a, bool backward, void *stream) {
  if (a->p.rows * a->p.columns == 0) return cudaSuccess;
  switch (a->p.dtype) {
    case CAMOX_F32: bias_gelu_launch_widest<float>(a, backward, stream); break;
    case CAMOX_BF16: bias_gelu_launch_widest<__nv_bfloat16>(a, backward, stream); break;
    case CAMOX_F16: bias_gelu_launch_widest<__half>(a, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_bias_gelu_cuda(const camox_bias_gelu_params *p, void *stream) {
  bias_gelu_args a = bias_gelu_args_of(p);
  return bias_gelu_run(&a, false, stream);
}

extern "C" int camox_bias_gelu_backward_cuda(const camox_bias_gelu_params *p, void *stream) {
  bias_gelu_args a = bias_gelu_args_of(p);
  const int error = bias_gelu_run(&a, true, stream);
  if (error != cudaSuccess || p->columns == 0) return error;
  camox_row_sums sums = {static_cast<const float *>(p->partial), a.bands, p->columns, p->columns, {},
                         p->half_bias ? p->dtype : CAMOX_F32};
  sums.out[0] = p->grad_bias;
  camox_launch_row_sums<bias_gelu>(sums, stream);
  return camox_launch_status();
}
