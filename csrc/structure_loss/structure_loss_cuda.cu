/* structure_loss on CUDA: a block has a work item, 2048 pixels of an image, and adds its four sums in a fixed order; one block
   then adds the work items of each image, of which eight threads have every eighth, and makes the loss. Backward: V neighbouring pixels for each thread,
   from the sums of their image. V elements of every tensor are accessed in 16 bytes at once where all allow it. No atomics:
   fixed bits. */
#include "../common/cuda_util.cuh"
#include "structure_loss.h"
#include "structure_loss_plan.h"

#define STRUCTURE_THREADS 256
#define STRUCTURE_WARPS (STRUCTURE_THREADS / CAMOX_WARP)
#define STRUCTURE_LANES 8 /* threads that add the work items of an image */

struct structure_args {
  camox_structure_loss_params p;
  int64_t per_image, items, vectors; /* work items of an image and in all; vectors of an image */
  float smooth;
};

/* p and 1 - p of a logit, and exp(-|z|). */
struct structure_sigmoid {
  float p, rest, e;
};

__device__ __forceinline__ structure_sigmoid structure_sigmoid_of(float z) {
  const float e = expf(-fabsf(z)), larger = 1.0f / (1.0f + e), smaller = e * larger;
  return z >= 0.0f ? structure_sigmoid{larger, smaller, e} : structure_sigmoid{smaller, larger, e};
}

/* max(log(x), -100), and NaN for what is no probability. */
__device__ __forceinline__ float structure_log(float x) {
  const float log = logf(x);
  return log < -100.0f ? -100.0f : log;
}

/* V pixels: logits, mask, weight. */
template <typename T, int V>
__device__ __forceinline__ void structure_load(const structure_args &a, int64_t at, float (&z)[V], float (&m)[V],
                                               float (&w)[V]) {
  camox_load_float(z, static_cast<const T *>(a.p.logits) + at);
  camox_load_floats(m, static_cast<const float *>(a.p.mask) + at);
  camox_load_floats(w, static_cast<const float *>(a.p.weight) + at);
}

/* V before T: kernels of <element, lanes> promise stores of vectors too (scripts/cuda_budget.py), and this one stores sums. */
template <int V, typename T>
__global__ void __launch_bounds__(STRUCTURE_THREADS) structure_loss_kernel(const __grid_constant__ structure_args a) {
  __shared__ float scratch[STRUCTURE_WARPS];
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
  for (int64_t index = blockIdx.x; index < a.items; index += gridDim.x) {
    int64_t piece;
    const int64_t image = camox_divide(index, a.per_image, &piece), begin = piece * CAMOX_STRUCTURE_PIXELS;
    const int64_t end = min(begin + CAMOX_STRUCTURE_PIXELS, a.p.pixels);
    float sum[CAMOX_STRUCTURE_SUMS] = {};
    for (int64_t pixel = begin + static_cast<int64_t>(threadIdx.x) * V; pixel < end; pixel += STRUCTURE_THREADS * V) {
      float z[V], m[V], w[V];
      structure_load<T>(a, image * a.p.pixels + pixel, z, m, w);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float p = z[i], bce;
        if (a.p.probabilities) {
          bce = (m[i] - 1.0f) * structure_log(1.0f - p) - m[i] * structure_log(p);
        } else {
          const structure_sigmoid s = structure_sigmoid_of(z[i]);
          p = s.p, bce = (z[i] < 0.0f ? -(z[i] * m[i]) : z[i] * (1.0f - m[i])) + log1pf(s.e);
        }
        sum[CAMOX_STRUCTURE_WEIGHT] += w[i];
        sum[CAMOX_STRUCTURE_BCE] += weighted ? w[i] * bce : bce;
        sum[CAMOX_STRUCTURE_INTER] += p * m[i] * w[i];
        sum[CAMOX_STRUCTURE_UNION] += (p + m[i]) * w[i];
      }
    }
#pragma unroll
    for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) {
      const float total = camox_block_sum<STRUCTURE_THREADS>(sum[k], scratch);
      if (threadIdx.x == 0) static_cast<float *>(a.p.partial)[index * CAMOX_STRUCTURE_PARTIAL + k] = total;
    }
  }
}

/* One block: STRUCTURE_LANES threads add the work items of an image, the first of them makes its loss. */
__global__ void __launch_bounds__(STRUCTURE_THREADS) structure_loss_finish_kernel(const __grid_constant__ structure_args a) {
  __shared__ float scratch[STRUCTURE_WARPS];
  float *const loss = static_cast<float *>(a.p.loss), *const sums = static_cast<float *>(a.p.sums);
  float of_batch = 0.0f, total = 0.0f;
  const int lane = static_cast<int>(threadIdx.x) % STRUCTURE_LANES, group = static_cast<int>(threadIdx.x) / STRUCTURE_LANES;
  for (int64_t first = 0; first < a.p.images; first += STRUCTURE_THREADS / STRUCTURE_LANES) {
    const int64_t image = first + group, items = image < a.p.images ? a.per_image : 0;
    float sum[CAMOX_STRUCTURE_SUMS] = {};
#pragma unroll 4
    for (int64_t item = lane; item < items; item += STRUCTURE_LANES) {
#pragma unroll
      for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k)
        sum[k] += static_cast<const float *>(a.p.partial)[(image * a.per_image + item) * CAMOX_STRUCTURE_PARTIAL + k];
    }
#pragma unroll
    for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) {
#pragma unroll
      for (int other = STRUCTURE_LANES / 2; other > 0; other /= 2) sum[k] += __shfl_xor_sync(CAMOX_FULL_MASK, sum[k], other);
    }
    if (lane > 0 || image >= a.p.images) continue;
#pragma unroll
    for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sums[image * CAMOX_STRUCTURE_SUMS + k] = sum[k];
    of_batch += sum[CAMOX_STRUCTURE_BCE];
    float of_image =
        1.0f - (sum[CAMOX_STRUCTURE_INTER] + a.smooth) / (sum[CAMOX_STRUCTURE_UNION] - sum[CAMOX_STRUCTURE_INTER] + a.smooth);
    if (a.p.bce == CAMOX_BCE_WEIGHTED) of_image += sum[CAMOX_STRUCTURE_BCE] / sum[CAMOX_STRUCTURE_WEIGHT];
#ifdef CAMOX_BREAK_STRUCTURE_LOSS
    of_image += 1e-3f;
#endif
    total += of_image;
    if (a.p.reduction == CAMOX_REDUCE_NONE) loss[image] = of_image;
  }
  const float images = static_cast<float>(a.p.images);
  const float bce = camox_block_sum<STRUCTURE_THREADS>(of_batch, scratch) / (images * static_cast<float>(a.p.pixels));
  total = camox_block_sum<STRUCTURE_THREADS>(total, scratch);
  if (a.p.reduction == CAMOX_REDUCE_NONE) {
    for (int64_t image = threadIdx.x; image < a.p.images && a.p.bce == CAMOX_BCE_MEAN; image += STRUCTURE_THREADS)
      loss[image] += bce;
  } else if (threadIdx.x == 0) {
    if (a.p.bce == CAMOX_BCE_MEAN && a.p.images > 0) total += bce * images;
    loss[0] = a.p.reduction == CAMOX_REDUCE_MEAN ? total / images : total;
  }
}

__device__ __forceinline__ float structure_grad_of(const structure_args &a, int64_t image) {
  const float *const grad = static_cast<const float *>(a.p.grad);
  if (a.p.reduction == CAMOX_REDUCE_NONE) return __ldg(grad + image);
  return a.p.reduction == CAMOX_REDUCE_MEAN ? __ldg(grad) / static_cast<float>(a.p.images) : __ldg(grad);
}

template <typename T, int V>
__global__ void __launch_bounds__(STRUCTURE_THREADS) structure_loss_backward_kernel(const __grid_constant__ structure_args a) {
  __shared__ float scratch[STRUCTURE_WARPS];
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
  float of_grads = 0.0f;
  if (!weighted) {
    for (int64_t image = threadIdx.x; image < a.p.images; image += STRUCTURE_THREADS) of_grads += structure_grad_of(a, image);
    of_grads = camox_block_sum<STRUCTURE_THREADS>(of_grads, scratch);
    of_grads /= static_cast<float>(a.p.images) * static_cast<float>(a.p.pixels);
  }
  const int64_t items = a.p.images * a.vectors;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * STRUCTURE_THREADS + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * STRUCTURE_THREADS) {
    int64_t vector;
    const int64_t image = camox_divide(item, a.vectors, &vector);
    float sum[CAMOX_STRUCTURE_SUMS], z[V], m[V], w[V];
    camox_load_floats(sum, static_cast<const float *>(a.p.sums) + image * CAMOX_STRUCTURE_SUMS);
    structure_load<T>(a, item * V, z, m, w);
    const float grad = structure_grad_of(a, image), below = sum[CAMOX_STRUCTURE_UNION] - sum[CAMOX_STRUCTURE_INTER] + a.smooth;
    const float base = grad * ((sum[CAMOX_STRUCTURE_INTER] + a.smooth) / below) / below, slope = base + grad / below;
    const float of_bce = weighted ? grad / sum[CAMOX_STRUCTURE_WEIGHT] : of_grads;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float bce = weighted ? of_bce * w[i] : of_bce, iou = w[i] * (base - slope * m[i]);
      if (a.p.probabilities) {
        const float product = z[i] * (1.0f - z[i]);
        z[i] = bce * (z[i] - m[i]) / (product < 1e-12f ? 1e-12f : product) + iou;
      } else {
        const structure_sigmoid s = structure_sigmoid_of(z[i]);
        z[i] = bce * (s.p - m[i]) + iou * (s.p * s.rest);
      }
    }
#ifdef CAMOX_BREAK_STRUCTURE_LOSS
    z[0] += 1e-3f;
#endif
    camox_store_float(static_cast<T *>(a.p.grad_logits) + item * V, z);
  }
}

/* ---- launchers ---- */

static bool structure_fits(const camox_structure_loss_params *p, int lanes, int element) {
  return p->pixels % lanes == 0 && camox_aligned(p->mask, 16) && camox_aligned(p->weight, 16) &&
         camox_aligned(p->logits, lanes * element) && camox_aligned(p->grad_logits, lanes * element);
}

template <typename T, int V>
static void structure_launch(structure_args a, bool backward, void *stream) {
  a.vectors = a.p.pixels / V;
  if (backward) {
    const unsigned grid = camox_grid(camox_ceil_div(a.p.images * a.vectors, STRUCTURE_THREADS));
    CAMOX_LAUNCH((structure_loss_backward_kernel<T, V>), grid, STRUCTURE_THREADS, 0, stream, a);
  } else {
    CAMOX_LAUNCH((structure_loss_kernel<V, T>), camox_grid(a.items), STRUCTURE_THREADS, 0, stream, a);
  }
}

template <typename T>
static void structure_launch_widest(const structure_args &a, bool backward, void *stream) {
  constexpr int lanes = camox_lanes<T>::value;
  if (structure_fits(&a.p, lanes, static_cast<int>(sizeof(T))))
    structure_launch<T, lanes>(a, backward, stream);
  else
    structure_launch<T, 1>(a, backward, stream);
}

static structure_args structure_args_of(const camox_structure_loss_params *p) {
  structure_args a = {};
  a.p = *p;
  a.per_image = camox_structure_items_per_image(p);
  a.items = p->images * a.per_image;
  a.smooth = static_cast<float>(p->smooth);
  return a;
}

static int structure_run(const structure_args &a, bool backward, void *stream) {
  if (a.items == 0) return cudaSuccess;
  switch (a.p.dtype) {
    case CAMOX_F32: structure_launch_widest<float>(a, backward, stream); break;
    case CAMOX_BF16: structure_launch_widest<__nv_bfloat16>(a, backward, stream); break;
    case CAMOX_F16: structure_launch_widest<__half>(a, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_structure_loss_cuda(const camox_structure_loss_params *p, void *stream) {
  const structure_args a = structure_args_of(p);
  const int error = structure_run(a, false, stream);
  if (error != cudaSuccess) return error;
  CAMOX_LAUNCH(structure_loss_finish_kernel, 1, STRUCTURE_THREADS, 0, stream, a);
  return camox_launch_status();
}

extern "C" int camox_structure_loss_backward_cuda(const camox_structure_loss_params *p, void *stream) {
  return structure_run(structure_args_of(p), true, stream);
}
