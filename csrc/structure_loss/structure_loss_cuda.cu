/* structure_loss on CUDA.

     images      |             0             |             1             |   contiguous pixels
     work items  |    0    |    1    | 2  |    3    |    4    | 5  |      2048 pixels of an image, a block each; 8192 where a
                                                                         forward has enough of these
     groups      |                            0                    ...      32 images, or more of very many images

     forward     a block adds four sums over its pixels and counts itself in its group; the last block of a group adds the work
                 items of each of its images, of which 8 to 32 threads have every 8th to 32nd, and counts the group; the last
                 block of the last group makes the loss of the batch
     backward    a block makes the gradients of its pixels from the sums of their image
     both        a thread loads two vectors of V pixels at once, V = 4 where all tensors allow it: 16 bytes of float32, 8 of half
                 types; mask and weight are in float32 or in the logits' type

   Of images of few pixels, at most four vectors for each lane, a warp has one: backward, whenever they are so small (and two or
   four warps those of up to twice or four times the size); forward, where there are many

     groups      |        0        |        1        |  ...                 8 images, or more where that would be many groups
     block       |        0        |        1        |  ...                 a warp an image at a time, which it finishes at once
                                                                            the last block adds the groups: the loss

   Sums have an order that follows from the shape, and nothing is added by atomics: fixed bits. */
#include "structure_loss.h"
#include "structure_loss_plan.h"
#define STRUCTURE_MOST_GROUPS 127
#define CAMOX_COUNTERS (STRUCTURE_MOST_GROUPS + 1) /* of each group's blocks, and of the groups */
#include "../common/last_block.cuh"

#define STRUCTURE_THREADS 256
#define STRUCTURE_LANES 4 /* pixels of a vector, of all dtypes: images of 18 x 18 pixels have no whole vectors of eight */
/* Of the forward, where images have this many of them: to begin a work item and to add up the sums of its threads costs as
   many instructions as CAMOX_STRUCTURE_PIXELS do. */
#define STRUCTURE_LONG_ITEM 8192 /* pixels */
#define STRUCTURE_MANY_ITEMS 2048
/* Of a multiprocessor, at least: of its own accord nvcc would have five on sm_90, and spill. */
#define STRUCTURE_BLOCKS (CAMOX_CUDA_ARCH == 750 ? 3 : 4)
#define STRUCTURE_WARPS (STRUCTURE_THREADS / CAMOX_WARP)
#define STRUCTURE_LOADS 4  /* work items of a thread of a group's last block, in flight */
#define STRUCTURE_GROUP 32 /* images whose sums a block adds at once, 8 threads each */
/* An image of at most so many vectors for each lane of a warp has a warp, where images are many: of a block, most threads would
   be idle, and each block waits a microsecond to be counted. */
#define STRUCTURE_WARP_STEPS 4
#define STRUCTURE_MANY_IMAGES 512
#define STRUCTURE_WARP_GROUPS 512 /* blocks of such a forward, at most */

struct structure_args {
  camox_structure_loss_params p;
  int item_pixels;          /* of a work item, at most */
  int64_t per_image, items; /* work items of an image and in all */
  int64_t group_images, groups;
  int lanes_log2; /* of the threads that add the work items of an image */
  int team;       /* of the backward: threads of a work item */
  float smooth;
  float *partial;   /* [items, CAMOX_STRUCTURE_SUMS] */
  float *of_groups; /* [groups, 2]: the totals of each group, where there are several */
  camox_counters counters;
};

/* exp(-|z|), p and p (1 - p) of a logit. */
struct structure_sigmoid {
  float e, p, slope;
};

/* ex2 of t = -|z| log2(e) as rounded, times 1 + d for what the rounding took, d = -|z| - t ln(2): fewer instructions
   than expf. Below 2^-126 e is 0, also that of an infinite z, whose d is NaN. */
__device__ __forceinline__ structure_sigmoid structure_sigmoid_of(float z) {
  const float x = -fabsf(z), t = x * 1.44269504f, power = camox_exp2(t);
  const float e = power > 0.0f ? fmaf(power, fmaf(t, -0.693147181f, x), power) : power;
  const float larger = camox_reciprocal(1.0f + e), smaller = e * larger;
  return {e, z >= 0.0f ? larger : smaller, smaller * larger};
}

/* log(1 + e) + y for 0 <= e <= 1: the polynomial is log(1 + e) / e to 3e-8 of it. */
__device__ __forceinline__ float structure_log1p_plus(float e, float y) {
  float sum = fmaf(0.00523269456f, e, -0.0295052435f);
  sum = fmaf(sum, e, 0.0782259628f);
  sum = fmaf(sum, e, -0.136632472f);
  sum = fmaf(sum, e, 0.191060081f);
  sum = fmaf(sum, e, -0.24842982f);
  sum = fmaf(sum, e, 0.333190978f);
  sum = fmaf(sum, e, -0.499994934f);
  sum = fmaf(sum, e, 0.99999994f);
  return fmaf(sum, e, y);
}

/* max(log(x), -100), and NaN for what is no probability. */
__device__ __forceinline__ float structure_log(float x) {
  const float log = logf(x);
  return log < -100.0f ? -100.0f : log;
}

/* A work item: its image, its first pixel among those of all images, and how many it has. */
struct structure_item {
  int64_t image, first;
  int pixels;
};

__device__ __forceinline__ structure_item structure_item_of(const structure_args &a, int64_t index) {
  int64_t piece;
  const int64_t image = camox_divide(index, a.per_image, &piece), begin = piece * a.item_pixels;
  const int64_t left = a.p.pixels - begin;
  return {image, image * a.p.pixels + begin, left < a.item_pixels ? static_cast<int>(left) : a.item_pixels};
}

/* V pixels as they lie in memory. Mask and weight are float32, or in the type of the logits, which then fill the first half of
   each: kernels for each of both types would take a third of a megabyte of the wheel. */
template <typename T, int V>
struct structure_pixels {
  T logits[V];
  float mask[V], weight[V];
};

/* Where a thread reads next. */
template <typename T>
struct structure_reader {
  const T *logits;
  const char *mask, *weight;
  bool half_mask;

  __device__ __forceinline__ structure_reader(const structure_args &a, int64_t at)
      : logits(static_cast<const T *>(a.p.logits) + at),
        mask(static_cast<const char *>(a.p.mask)),
        weight(static_cast<const char *>(a.p.weight)),
        half_mask(sizeof(T) == 2 && a.p.half_mask) {
    mask += at * of_mask(), weight += at * of_mask();
  }

  __device__ __forceinline__ int of_mask() const { return half_mask ? 2 : 4; }

  template <int V>
  __device__ __forceinline__ void load_mask(float (&to)[V], const char *from) const {
    if (half_mask) {
      T raw[V];
      camox_load(raw, reinterpret_cast<const T *>(from));
      __builtin_memcpy(to, raw, sizeof raw);
    } else {
      camox_load(to, reinterpret_cast<const float *>(from));
    }
  }

  template <int V>
  __device__ __forceinline__ void load(structure_pixels<T, V> &to, int at) const {
    camox_load(to.logits, logits + at);
    load_mask(to.mask, mask + at * of_mask());
    load_mask(to.weight, weight + at * of_mask());
  }

  __device__ __forceinline__ void advance(int pixels) {
    logits += pixels, mask += pixels * of_mask(), weight += pixels * of_mask();
  }
};

/* Mask or weight of pixels, once they are there. */
template <typename T, int V>
__device__ __forceinline__ void structure_mask_floats(float (&to)[V], const structure_args &a, const float (&loaded)[V]) {
  if (sizeof(T) == 2 && a.p.half_mask) {
    T raw[V];
    __builtin_memcpy(raw, loaded, sizeof raw);
    camox_to_floats(to, raw);
  } else {
    __builtin_memcpy(to, loaded, sizeof to);
  }
}

/* p and the entropy of V pixels, p in the place of the logits. */
template <int V>
__device__ __forceinline__ void structure_entropy(bool probabilities, float (&z)[V], const float (&m)[V], float (&bce)[V]) {
  if (probabilities) {
#pragma unroll
    for (int i = 0; i < V; ++i) bce[i] = (m[i] - 1.0f) * structure_log(1.0f - z[i]) - m[i] * structure_log(z[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const structure_sigmoid s = structure_sigmoid_of(z[i]);
      const float share = z[i] >= 0.0f ? 1.0f - m[i] : -m[i]; /* not max(z, 0) - z m: of infinite z that is NaN */
      bce[i] = structure_log1p_plus(s.e, z[i] * share);
      z[i] = s.p;
    }
  }
}

/* Adds V pixels to the sums of a thread. */
template <typename T, int V>
__device__ __forceinline__ void structure_add(float (&sum)[CAMOX_STRUCTURE_SUMS], const structure_args &a,
                                              const structure_pixels<T, V> &pixels) {
  float p[V], mask[V], weights[V], bce[V];
  camox_to_floats(p, pixels.logits);
  structure_mask_floats<T>(mask, a, pixels.mask);
  structure_mask_floats<T>(weights, a, pixels.weight);
  structure_entropy(a.p.probabilities, p, mask, bce);
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float weight = weights[i], masked = mask[i] * weight;
    sum[CAMOX_STRUCTURE_WEIGHT] += weight;
    sum[CAMOX_STRUCTURE_BCE] = fmaf(weighted ? weight : 1.0f, bce[i], sum[CAMOX_STRUCTURE_BCE]);
    sum[CAMOX_STRUCTURE_INTER] = fmaf(p[i], masked, sum[CAMOX_STRUCTURE_INTER]);
    sum[CAMOX_STRUCTURE_UNION] += fmaf(p[i], weight, masked);
  }
}

/* The sums of a thread of a work item of THREADS threads; first: the work item's first pixel. */
template <int THREADS, int V, typename T>
__device__ __forceinline__ void structure_add_item(float (&sum)[CAMOX_STRUCTURE_SUMS], const structure_args &a, int64_t first,
                                                   int pixels, int thread) {
  constexpr int step = THREADS * V;
  structure_reader<T> reader(a, first + thread * V);
  for (int remaining = pixels - thread * V; remaining > 0; remaining -= 2 * step) {
    structure_pixels<T, V> now, next; /* their loads wait together */
    reader.load(now, 0);
    if (remaining > step) reader.load(next, step);
    structure_add(sum, a, now);
    if (remaining > step) structure_add(sum, a, next);
    reader.advance(2 * step);
  }
}

/* Over the block, in thread 0. */
__device__ __forceinline__ void structure_block_sums(float (&sum)[CAMOX_STRUCTURE_SUMS],
                                                     float (*scratch)[CAMOX_STRUCTURE_SUMS]) {
#pragma unroll
  for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sum[k] = camox_warp_sum(sum[k]);
  if (threadIdx.x % CAMOX_WARP == 0) camox_put_floats(scratch[threadIdx.x / CAMOX_WARP], sum);
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < STRUCTURE_WARPS; ++warp) {
    float other[CAMOX_STRUCTURE_SUMS];
    camox_get_floats(other, scratch[warp]);
#pragma unroll
    for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sum[k] += other[k];
  }
}

/* Over images: of a thread, a group or the batch. bce is 0 where no mean over the batch needs it. */
struct structure_totals {
  float loss, bce;
};

/* Over the block, in every thread. */
__device__ __forceinline__ structure_totals structure_block_totals(const structure_args &a, structure_totals of_thread,
                                                                   float *scratch) {
  const float loss = camox_block_sum<STRUCTURE_THREADS>(of_thread.loss, scratch);
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
  return {loss, weighted ? 0.0f : camox_block_sum<STRUCTURE_THREADS>(of_thread.bce, scratch)};
}

/* One thread, when the sums of an image are known: its loss, which is added to `total`. */
__device__ __forceinline__ void structure_finish_image(structure_totals &total, const structure_args &a, int64_t image,
                                                       const float (&sum)[CAMOX_STRUCTURE_SUMS]) {
  camox_store(static_cast<float *>(a.p.sums) + image * CAMOX_STRUCTURE_SUMS, sum);
  total.bce += sum[CAMOX_STRUCTURE_BCE];
  /* 1 - (I+s)/(U-I+s), of which a small U would leave no digits; U-2I is exact where I is about U/2 */
  const float inter = sum[CAMOX_STRUCTURE_INTER], rest = sum[CAMOX_STRUCTURE_UNION] - inter;
  float of_image = (rest - inter) / (rest + a.smooth);
  if (a.p.bce == CAMOX_BCE_WEIGHTED) of_image += sum[CAMOX_STRUCTURE_BCE] / sum[CAMOX_STRUCTURE_WEIGHT];
#ifdef CAMOX_BREAK_STRUCTURE_LOSS
  of_image += 1e-3f;
#endif
  total.loss += of_image;
  if (a.p.reduction == CAMOX_REDUCE_NONE) static_cast<float *>(a.p.loss)[image] = of_image;
}

/* One block, when the sums of all work items of the images [begin, end) are known: the sums and the loss of each image. */
__device__ __forceinline__ structure_totals structure_finish_images(const structure_args &a, int64_t begin, int64_t end,
                                                                    float *scratch) {
  const int lanes = 1 << a.lanes_log2, thread = static_cast<int>(threadIdx.x), lane = thread & (lanes - 1);
  structure_totals total = {};
  for (int64_t first = begin; first < end; first += STRUCTURE_THREADS >> a.lanes_log2) {
    const int64_t image = first + (thread >> a.lanes_log2);
    const int items = image < end ? static_cast<int>(a.per_image) : 0;
    const uint4 *const partial = reinterpret_cast<const uint4 *>(a.partial) + image * a.per_image;
    float sum[CAMOX_STRUCTURE_SUMS] = {};
    for (int item = lane; item < items; item += STRUCTURE_LOADS * lanes) {
      uint4 word[STRUCTURE_LOADS] = {};
#pragma unroll
      for (int i = 0; i < STRUCTURE_LOADS; ++i)
        if (item + i * lanes < items) word[i] = __ldcg(partial + item + i * lanes);
#pragma unroll
      for (int i = 0; i < STRUCTURE_LOADS; ++i) {
        float of_item[CAMOX_STRUCTURE_SUMS];
        __builtin_memcpy(of_item, &word[i], sizeof of_item);
#pragma unroll
        for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sum[k] += of_item[k];
      }
    }
    for (int other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
      for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sum[k] += __shfl_xor_sync(CAMOX_FULL_MASK, sum[k], other);
    }
    if (lane > 0 || image >= end) continue;
    structure_finish_image(total, a, image, sum);
  }
  return structure_block_totals(a, total, scratch);
}

/* One block, when the totals of all groups are known. */
__device__ __forceinline__ structure_totals structure_add_groups(const structure_args &a, float *scratch) {
  structure_totals total = {};
#pragma unroll 2
  for (int64_t group = threadIdx.x; group < a.groups; group += STRUCTURE_THREADS) {
    const float2 of_group = __ldcg(reinterpret_cast<const float2 *>(a.of_groups) + group);
    total.loss += of_group.x;
    total.bce += of_group.y;
  }
  return structure_block_totals(a, total, scratch);
}

/* One block, once all images are finished: the entropy's mean where it is over the batch, and the loss of the batch. */
__device__ __forceinline__ void structure_finish_batch(const structure_args &a, structure_totals total) {
  float *const loss = static_cast<float *>(a.p.loss);
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
  const float images = static_cast<float>(a.p.images), bce = total.bce / (images * static_cast<float>(a.p.pixels));
  if (a.p.reduction == CAMOX_REDUCE_NONE) {
    for (int64_t image = threadIdx.x; image < a.p.images && !weighted; image += STRUCTURE_THREADS)
      loss[image] = __ldcg(loss + image) + bce;
    return;
  }
  if (threadIdx.x > 0) return;
  if (!weighted && a.p.images > 0) total.loss += bce * images;
  loss[0] = a.p.reduction == CAMOX_REDUCE_MEAN ? total.loss / images : total.loss;
}

/* V before T: kernels of <element, lanes> promise stores of vectors too (scripts/cuda_budget.py), and this one stores sums. */
template <int V, typename T>
__global__ void __launch_bounds__(STRUCTURE_THREADS, STRUCTURE_BLOCKS)
    structure_loss_kernel(const __grid_constant__ structure_args a) {
  __shared__ __align__(16) float scratch[STRUCTURE_WARPS][CAMOX_STRUCTURE_SUMS];
  for (int64_t index = blockIdx.x; index < a.items; index += gridDim.x) {
    const structure_item item = structure_item_of(a, index);
    float sum[CAMOX_STRUCTURE_SUMS] = {};
    structure_add_item<STRUCTURE_THREADS, V, T>(sum, a, item.first, item.pixels, static_cast<int>(threadIdx.x));
    structure_block_sums(sum, scratch);
    if (threadIdx.x == 0) camox_store(a.partial + index * CAMOX_STRUCTURE_SUMS, sum);

    int64_t place;
    const int64_t group = camox_divide(item.image, a.group_images, &place), begin = item.image - place;
    const int64_t end = begin + a.group_images < a.p.images ? begin + a.group_images : a.p.images;
    if (!camox_is_last_block(a.counters, static_cast<int>(group), (end - begin) * a.per_image)) continue;
    structure_totals total = structure_finish_images(a, begin, end, scratch[0]);
    if (a.groups > 1) {
      const float of_group[2] = {total.loss, total.bce};
      if (threadIdx.x == 0) camox_store(a.of_groups + group * 2, of_group);
      if (!camox_is_last_block(a.counters, static_cast<int>(a.groups), a.groups)) continue;
      total = structure_add_groups(a, scratch[0]);
    }
    structure_finish_batch(a, total);
  }
}

/* The forward of many small images: a block has a group of images, each of its warps one at a time. */
template <int V, typename T>
__global__ void __launch_bounds__(STRUCTURE_THREADS, STRUCTURE_BLOCKS)
    structure_loss_warps_kernel(const __grid_constant__ structure_args a) {
  __shared__ float scratch[STRUCTURE_WARPS];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % CAMOX_WARP, pixels = static_cast<int>(a.p.pixels);
  for (int64_t group = blockIdx.x; group < a.groups; group += gridDim.x) {
    const int64_t begin = group * a.group_images, end = min(begin + a.group_images, a.p.images);
    structure_totals total = {};
    for (int64_t image = begin + thread / CAMOX_WARP; image < end; image += STRUCTURE_WARPS) {
      float sum[CAMOX_STRUCTURE_SUMS] = {};
      structure_add_item<CAMOX_WARP, V, T>(sum, a, image * a.p.pixels, pixels, lane);
#pragma unroll
      for (int k = 0; k < CAMOX_STRUCTURE_SUMS; ++k) sum[k] = camox_warp_sum(sum[k]);
      if (lane == 0) structure_finish_image(total, a, image, sum);
    }
    total = structure_block_totals(a, total, scratch);
    const float of_group[2] = {total.loss, total.bce};
    if (thread == 0) camox_store(a.of_groups + group * 2, of_group);
    if (!camox_is_last_block(a.counters, 0, a.groups)) continue;
    structure_finish_batch(a, structure_add_groups(a, scratch));
  }
}

__device__ __forceinline__ float structure_grad_of(const structure_args &a, int64_t image) {
  const float *const grad = static_cast<const float *>(a.p.grad);
  if (a.p.reduction == CAMOX_REDUCE_NONE) return __ldg(grad + image);
  return a.p.reduction == CAMOX_REDUCE_MEAN ? __ldg(grad) / static_cast<float>(a.p.images) : __ldg(grad);
}

/* The gradient of the mean of the entropy over the batch. */
__device__ __forceinline__ float structure_grad_of_mean(const structure_args &a, float *scratch) {
  const float images = static_cast<float>(a.p.images), pixels = images * static_cast<float>(a.p.pixels);
  if (a.p.reduction != CAMOX_REDUCE_NONE) return structure_grad_of(a, 0) * images / pixels;
  float of_grads = 0.0f;
  for (int64_t image = threadIdx.x; image < a.p.images; image += STRUCTURE_THREADS) of_grads += structure_grad_of(a, image);
  return camox_block_sum<STRUCTURE_THREADS>(of_grads, scratch) / pixels;
}

/* The factors of an image's gradient: bce (p-m), times w where it is weighted, and w (base - slope m) p (1-p). */
struct structure_factors {
  float bce, base, slope;
};

__device__ __forceinline__ structure_factors structure_factors_of(const structure_args &a, int64_t image, float of_mean) {
  float sum[CAMOX_STRUCTURE_SUMS];
  camox_load_floats(sum, static_cast<const float *>(a.p.sums) + image * CAMOX_STRUCTURE_SUMS);
  const float grad = structure_grad_of(a, image);
  const float below = sum[CAMOX_STRUCTURE_UNION] - sum[CAMOX_STRUCTURE_INTER] + a.smooth;
  const float base = grad * ((sum[CAMOX_STRUCTURE_INTER] + a.smooth) / below) / below;
  return {a.p.bce == CAMOX_BCE_WEIGHTED ? grad / sum[CAMOX_STRUCTURE_WEIGHT] : of_mean, base, base + grad / below};
}

/* The gradients of V pixels. */
template <typename T, int V>
__device__ __forceinline__ void structure_store_gradients(T *to, const structure_args &a, const structure_factors &f,
                                                          const structure_pixels<T, V> &pixels) {
  const bool weighted = a.p.bce == CAMOX_BCE_WEIGHTED;
  float z[V], mask[V], weight[V];
  camox_to_floats(z, pixels.logits);
  structure_mask_floats<T>(mask, a, pixels.mask);
  structure_mask_floats<T>(weight, a, pixels.weight);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float m = mask[i], w = weight[i];
    const float bce = weighted ? f.bce * w : f.bce, iou = w * (f.base - f.slope * m);
    if (a.p.probabilities) {
      const float product = z[i] * (1.0f - z[i]);
      z[i] = bce * (z[i] - m) * camox_reciprocal(product < 1e-12f ? 1e-12f : product) + iou;
    } else {
      const structure_sigmoid s = structure_sigmoid_of(z[i]);
      z[i] = bce * (s.p - m) + iou * s.slope;
    }
  }
#ifdef CAMOX_BREAK_STRUCTURE_LOSS
  z[0] += 1e-3f;
#endif
  camox_store_float(to, z);
}

/* V before T, as above: a vector of half types is stored by 8 bytes. */
template <int V, typename T>
__global__ void __launch_bounds__(STRUCTURE_THREADS, STRUCTURE_BLOCKS)
    structure_loss_backward_kernel(const __grid_constant__ structure_args a) {
  __shared__ float scratch[STRUCTURE_WARPS];
  const float of_mean = a.p.bce == CAMOX_BCE_WEIGHTED ? 0.0f : structure_grad_of_mean(a, scratch);
  const int team = a.team, step = team * V, lane = static_cast<int>(threadIdx.x) & (team - 1);
  const int64_t teams = STRUCTURE_THREADS / team, first = blockIdx.x * teams + static_cast<int>(threadIdx.x) / team;
  for (int64_t index = first; index < a.items; index += gridDim.x * teams) {
    const structure_item item = structure_item_of(a, index);
    const structure_factors factors = structure_factors_of(a, item.image, of_mean);
    structure_reader<T> reader(a, item.first + lane * V);
    T *to = static_cast<T *>(a.p.grad_logits) + item.first + lane * V;
    for (int remaining = item.pixels - lane * V; remaining > 0; remaining -= 2 * step) {
      structure_pixels<T, V> now, next; /* their loads wait together */
      reader.load(now, 0);
      if (remaining > step) reader.load(next, step);
      structure_store_gradients(to, a, factors, now);
      if (remaining > step) structure_store_gradients(to + step, a, factors, next);
      reader.advance(2 * step);
      to += 2 * step;
    }
  }
}

/* ---- launchers ---- */

static bool structure_fits(const camox_structure_loss_params *p) {
  const int element = p->dtype == CAMOX_F32 ? 4 : 2, of_mask = p->half_mask ? 2 : 4;
  return p->pixels % STRUCTURE_LANES == 0 && camox_aligned(p->mask, STRUCTURE_LANES * of_mask) &&
         camox_aligned(p->weight, STRUCTURE_LANES * of_mask) && camox_aligned(p->logits, STRUCTURE_LANES * element) &&
         camox_aligned(p->grad_logits, STRUCTURE_LANES * element);
}

/* Pixels of an image of which a warp has at most STRUCTURE_WARP_STEPS steps. */
static int64_t structure_warp_pixels(const camox_structure_loss_params *p) {
  return CAMOX_WARP * STRUCTURE_WARP_STEPS * (structure_fits(p) ? STRUCTURE_LANES : 1);
}

enum structure_direction { STRUCTURE_FORWARD, STRUCTURE_FORWARD_WARPS, STRUCTURE_BACKWARD };

template <int V, typename T>
static void structure_launch(const structure_args &a, structure_direction direction, void *stream) {
  if (direction == STRUCTURE_FORWARD)
    CAMOX_LAUNCH((structure_loss_kernel<V, T>), camox_grid(a.items), STRUCTURE_THREADS, 0, stream, a);
  else if (direction == STRUCTURE_FORWARD_WARPS)
    CAMOX_LAUNCH((structure_loss_warps_kernel<V, T>), camox_grid(a.groups), STRUCTURE_THREADS, 0, stream, a);
  else
    CAMOX_LAUNCH((structure_loss_backward_kernel<V, T>), camox_grid(camox_ceil_div(a.items, STRUCTURE_THREADS / a.team)),
                 STRUCTURE_THREADS, 0, stream, a);
}

template <typename T>
static void structure_launch_dtype(const structure_args &a, structure_direction direction, void *stream) {
  if (structure_fits(&a.p))
    structure_launch<STRUCTURE_LANES, T>(a, direction, stream);
  else
    structure_launch<1, T>(a, direction, stream);
}

static structure_args structure_args_of(const camox_structure_loss_params *p, int item_pixels) {
  structure_args a = {};
  a.p = *p;
  a.item_pixels = item_pixels;
  a.per_image = camox_ceil_div(p->pixels, item_pixels);
  a.items = p->images * a.per_image;
  a.smooth = static_cast<float>(p->smooth);
  return a;
}

static int structure_run(const structure_args &a, structure_direction direction, void *stream) {
  switch (a.p.dtype) {
    case CAMOX_F32: structure_launch_dtype<float>(a, direction, stream); break;
    case CAMOX_BF16: structure_launch_dtype<__nv_bfloat16>(a, direction, stream); break;
    case CAMOX_F16: structure_launch_dtype<__half>(a, direction, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

/* Without images, whose sum is 0, or without pixels, whose means are 0 / 0: NaN, which four bytes 0xff are. */
static int structure_run_empty(const camox_structure_loss_params *p, void *stream) {
  const int64_t losses = p->reduction == CAMOX_REDUCE_NONE ? p->images : 1;
  const int loss = p->images == 0 && p->reduction == CAMOX_REDUCE_SUM ? 0 : 0xff;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  (void)cudaMemsetAsync(p->loss, loss, static_cast<size_t>(losses) * sizeof(float), on);
  (void)cudaMemsetAsync(p->sums, 0, static_cast<size_t>(p->images) * CAMOX_STRUCTURE_SUMS * sizeof(float), on);
  return camox_launch_status();
}

extern "C" int camox_structure_loss_cuda(const camox_structure_loss_params *given, void *stream) {
  camox_structure_loss_params own = *given, *p = &own;
  p->grad_logits = nullptr; /* its alignment does not count */
  const bool many = p->images * camox_ceil_div(p->pixels, STRUCTURE_LONG_ITEM) >= STRUCTURE_MANY_ITEMS;
  structure_args a = structure_args_of(p, many ? STRUCTURE_LONG_ITEM : CAMOX_STRUCTURE_PIXELS);
  if (a.items == 0) return structure_run_empty(p, stream);
  const bool warps = p->images >= STRUCTURE_MANY_IMAGES && p->pixels <= structure_warp_pixels(p);
  a.lanes_log2 = p->images <= 8 ? 5 : p->images <= 16 ? 4 : 3;
  const int64_t least = warps ? STRUCTURE_WARPS : STRUCTURE_GROUP, most = warps ? STRUCTURE_WARP_GROUPS : STRUCTURE_MOST_GROUPS;
  const int64_t rounds = camox_ceil_div(p->images, least * most);
  a.group_images = least * (rounds > 1 ? rounds : 1);
  a.groups = camox_ceil_div(p->images, a.group_images);
  /* partial has CAMOX_STRUCTURE_PARTIAL numbers for each work item, two more than the sums: room for the totals of the groups,
     which have 32 work items and more each where there are several, and at its end for the counters of a captured launch.
     Warps leave no partial sums, and their groups are 8 images and more. */
  a.partial = static_cast<float *>(p->partial);
  a.of_groups = a.partial + (warps ? 0 : a.items * CAMOX_STRUCTURE_SUMS);
  const int counters = !warps && a.groups > 1 ? static_cast<int>(a.groups) + 1 : 1;
  uint32_t *const counts = static_cast<uint32_t *>(p->partial) + a.items * CAMOX_STRUCTURE_PARTIAL - counters;
  a.counters = camox_counters_on(stream, counts, counters);
  return structure_run(a, warps ? STRUCTURE_FORWARD_WARPS : STRUCTURE_FORWARD, stream);
}

extern "C" int camox_structure_loss_backward_cuda(const camox_structure_loss_params *p, void *stream) {
  structure_args a = structure_args_of(p, CAMOX_STRUCTURE_PIXELS);
  a.team = CAMOX_WARP;
  for (int64_t pixels = structure_warp_pixels(p); pixels < p->pixels && a.team < STRUCTURE_THREADS; pixels *= 2) a.team *= 2;
  return a.items > 0 ? structure_run(a, STRUCTURE_BACKWARD, stream) : cudaSuccess;
}
