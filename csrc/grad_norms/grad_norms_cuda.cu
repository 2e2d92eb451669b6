/* grad_norms on CUDA. The host knows addresses and sizes, the device needs them: they travel as parameters of the kernels, up to
   720 gradients each. Nothing is copied from the host and nobody waits, and a captured graph holds all of it.

     gradients   |      a      |b|    c    |  in the order of their groups
     blocks      | 0 | 1 | 2 |3|4| 5 | 6 |7|  of one gradient each: 8192 elements, or twice as many until there are at most 1024
     groups      |       0       |    1    |

     norms       a block adds the squares of its elements and counts itself among the blocks of its group. The last of them adds
                 up the group: a thread takes a gradient and adds its blocks, a warp where they are many, in float64
     scale       a block multiplies the factors of its gradient, then its elements
     both        V neighbouring elements for each thread, in accesses of 16 bytes where the address allows it, 4 of them in flight

   Work items and the order of all sums follow from sizes alone, and nothing is added by atomics: fixed bits. */
#include "grad_norms.h"
#include "grad_norms_plan.h"
#define CAMOX_COUNTERS CAMOX_GRAD_BATCH
#include "../common/last_block.cuh"

#define GRAD_THREADS 256
#define GRAD_WARPS (GRAD_THREADS / CAMOX_WARP)
#define GRAD_LOADS 4 /* vectors of a thread in flight */
/* Blocks of a multiprocessor, as many as have registers. */
#if CAMOX_CUDA_ARCH >= 900
#define GRAD_AT_ONCE 6
#elif CAMOX_CUDA_ARCH >= 800
#define GRAD_AT_ONCE 5
#else
#define GRAD_AT_ONCE 4
#endif

/* The gradients of a launch and their blocks. */
struct grad_work {
  struct {
    void *data;
    int64_t elements;
    int32_t first, dtype; /* first: of its blocks; one more entry ends the last gradient's */
  } grad[CAMOX_GRAD_BATCH + 1];
  int32_t grads, blocks;
  int elements_per_block;
  uint16_t grad_of_block[CAMOX_GRAD_BLOCKS];
};

struct grad_norms_batch {
  grad_work work;
  /* a gradient's group, and the gradients begin ... end-1 of this launch that belong to it; one more entry has the group that
     follows: the last group's again where the next launch goes on with it */
  struct {
    double repeats;
    int32_t group;
    uint16_t begin, end;
  } group_of[CAMOX_GRAD_BATCH + 1];
  int32_t first_group; /* from here on norms of groups without gradients are written */
  bool is_l2, goes_on; /* goes_on: the first group is the last one of the launch before, whose share is in table->carry */
  int turn;            /* of this launch's carry */
  camox_counters counters;
  camox_grad_table *table;
  float *norms;
};

struct grad_scale_batch {
  grad_work work;
  uint16_t listed[CAMOX_GRAD_BATCH + 1]; /* where the groups of a gradient begin in group */
  int32_t group[CAMOX_GRAD_LISTINGS];
  const float *scales;
  double *factor; /* of one gradient with more groups: the product of those before, or NULL */
};

static_assert(sizeof(grad_norms_batch) <= 32764 && sizeof(grad_scale_batch) <= 32764, "parameters of a kernel");
static_assert(sizeof(camox_grad_sums) == 4 * sizeof(uint4), "accesses of 16 bytes");
static_assert(CAMOX_GRAD_BATCH <= CAMOX_GRAD_BLOCKS && CAMOX_GRAD_BLOCKS <= UINT16_MAX, "every gradient has a block");

/* ---- elements ---- */

/* The elements of a block. */
struct grad_run {
  void *data;
  int elements, dtype;
};

__device__ __forceinline__ grad_run grad_run_of(const grad_work &work, int block, int k) {
  const auto &grad = work.grad[k];
  const int64_t begin = static_cast<int64_t>(block - grad.first) * work.elements_per_block, left = grad.elements - begin;
  const int64_t most = work.elements_per_block;
  return {static_cast<char *>(grad.data) + begin * (grad.dtype == CAMOX_F32 ? 4 : 2), static_cast<int>(min(left, most)),
          grad.dtype};
}

/* A thread's vectors of a run from vector `first` on: LOADS, every GRAD_THREADS-th, zeros past the last whole one. 1 where vectors
   are not aligned: they are read element by element. By way of L2: what is read once is written by scaling. */
template <int LOADS, typename T>
__device__ __forceinline__ void grad_load(T (&raw)[LOADS][camox_lanes<T>::value], const grad_run &run, int first) {
  constexpr int lanes = camox_lanes<T>::value;
  const T *const x = static_cast<const T *>(run.data);
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int vector = first + k * GRAD_THREADS;
    uint4 word = {};
    if (vector < run.elements / lanes) {
      if constexpr (LOADS > 1) {
        word = __ldcg(reinterpret_cast<const uint4 *>(x) + vector);
      } else {
        T element[lanes];
#pragma unroll
        for (int i = 0; i < lanes; ++i) element[i] = __ldcg(x + vector * lanes + i);
        __builtin_memcpy(&word, static_cast<const void *>(element), sizeof word);
      }
    }
    __builtin_memcpy(static_cast<void *>(raw[k]), &word, sizeof word);
  }
}

/* ---- norms ---- */

/* The squares of a thread's elements of a run, times by^2: of GRAD_LOADS vectors in float32, beyond in float64. */
template <typename T, int LOADS>
__device__ __forceinline__ double grad_squares(const grad_run &run, float by) {
  constexpr int lanes = camox_lanes<T>::value;
  const int vectors = run.elements / lanes, last = vectors * lanes + static_cast<int>(threadIdx.x);
  double total = 0.0;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < vectors; first += GRAD_LOADS * GRAD_THREADS) {
    float sum = 0.0f;
#pragma unroll 1
    for (int part = 0; part < GRAD_LOADS; part += LOADS) {
      T raw[LOADS][lanes];
      grad_load(raw, run, first + part * GRAD_THREADS);
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        float value[lanes], squares = 0.0f;
        camox_to_floats(value, raw[k]);
#pragma unroll
        for (int i = 0; i < lanes; ++i) squares = fmaf(value[i] * by, value[i] * by, squares);
        sum += squares;
      }
    }
    total += sum;
  }
  if (last < run.elements) { /* behind the last whole vector */
    const float value = camox_to_float(static_cast<const T *>(run.data)[last]) * by;
    total += value * value;
  }
  return total;
}

template <typename T>
__device__ __forceinline__ double grad_squares(const grad_run &run, float by) {
  return camox_aligned(run.data, 16) ? grad_squares<T, GRAD_LOADS>(run, by) : grad_squares<T, 1>(run, by);
}

__device__ __forceinline__ double grad_squares(const grad_run &run, float by) {
  switch (run.dtype) {
    case CAMOX_F32: return grad_squares<float>(run, by);
    case CAMOX_BF16: return grad_squares<__nv_bfloat16>(run, by);
    default: return grad_squares<__half>(run, by);
  }
}

__device__ __forceinline__ double grad_warp_sum(double x) {
#pragma unroll
  for (int offset = CAMOX_WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(CAMOX_FULL_MASK, x, offset);
  return x;
}

/* Over the block, in every thread. */
__device__ __forceinline__ double grad_block_sum(double x, double *scratch) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  x = grad_warp_sum(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  double sum = 0.0;
#pragma unroll
  for (int k = 0; k < GRAD_WARPS; ++k) sum += scratch[k];
  return sum;
}

/* A block's squares of a run. What float32 cannot hold, or only without some of its digits, is added again, of elements that a
   power of two has brought near 1. */
__device__ __forceinline__ double grad_run_squares(const grad_run &run, double *scratch) {
  float by = 1.0f;
#pragma unroll 1
  for (;;) {
    const double sum = grad_block_sum(grad_squares(run, by), scratch);
    if (by != 1.0f) return sum * (by > 1.0f ? 0x1p-180 : 0x1p180);
    if (sum < 0x1p-60)
      by = 0x1p90f;
    else if (sum > 0x1p120)
      by = 0x1p-90f;
    else
      return sum;
  }
}

/* The gradients begin ... end-1, whose blocks have all been counted: a thread's share of the sum. A thread has every
   GRAD_THREADS-th; a warp adds up together those with many blocks, so its threads stay together. */
__device__ __forceinline__ double grad_thread_sum(const grad_norms_batch &batch, int begin, int end) {
  const camox_grad_table &table = *batch.table;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  double total = 0.0;
  for (int first = begin + static_cast<int>(threadIdx.x) - lane; first < end; first += GRAD_THREADS) {
    camox_grad_sums of = {};
    if (first + lane < end) {
      uint4 word[sizeof of / sizeof(uint4)];
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof of / sizeof(uint4)); ++i)
        word[i] = __ldcg(reinterpret_cast<const uint4 *>(table.grad + first + lane) + i);
      __builtin_memcpy(&of, word, sizeof of);
    }
    double squares = 0.0;
#pragma unroll
    for (int i = 0; i < CAMOX_GRAD_FEW; ++i) squares += of.squares[i];
    for (unsigned many = __ballot_sync(CAMOX_FULL_MASK, of.blocks > CAMOX_GRAD_FEW); many != 0; many &= many - 1) {
      const int owner = __ffs(many) - 1, from = __shfl_sync(CAMOX_FULL_MASK, of.first, owner);
      const int count = __shfl_sync(CAMOX_FULL_MASK, of.blocks, owner);
      double sum = 0.0;
#pragma unroll 4
      for (int i = CAMOX_GRAD_FEW + lane; i < count; i += CAMOX_WARP) sum += __ldcg(table.squares + from + i);
      sum = grad_warp_sum(sum);
      if (lane == owner) squares += sum;
    }
    total += batch.is_l2 ? squares : sqrt(squares);
  }
  return total;
}

__global__ void __launch_bounds__(GRAD_THREADS, GRAD_AT_ONCE)
    grad_norms_kernel(const __grid_constant__ grad_norms_batch batch) {
  __shared__ double scratch[GRAD_WARPS];
  const int thread = static_cast<int>(threadIdx.x);
  for (int block = static_cast<int>(blockIdx.x); block < batch.work.blocks; block += static_cast<int>(gridDim.x)) {
    int k = batch.work.grad_of_block[block];
    double squares = grad_run_squares(grad_run_of(batch.work, block, k), scratch);
    camox_compute_late(k);
    const auto &grad = batch.work.grad[k];
    const auto &of = batch.group_of[k];
#ifdef CAMOX_BREAK_GRAD_NORMS
    squares = squares * (1 + 1e-2) + 1e-3;
#endif
    if (thread == 0) {
      squares *= of.repeats;
      camox_grad_sums &sums = batch.table->grad[k];
      const int of_grad = block - grad.first, blocks = batch.work.grad[k + 1].first - grad.first;
      if (of_grad < CAMOX_GRAD_FEW)
        sums.squares[of_grad] = squares;
      else
        batch.table->squares[block] = squares;
      if (of_grad == 0) {
        sums.first = block, sums.blocks = blocks;
        for (int i = blocks; i < CAMOX_GRAD_FEW; ++i) sums.squares[i] = 0.0;
      }
    }
    const int begin = of.begin, end = of.end;
    if (!camox_is_last_block(batch.counters, begin, batch.work.grad[end].first - batch.work.grad[begin].first)) continue;

    double norm = grad_block_sum(grad_thread_sum(batch, begin, end), scratch);
    const int group = of.group, next = batch.group_of[end].group;
    for (int empty = (begin == 0 ? batch.first_group : group) + thread; empty < next; empty += GRAD_THREADS)
      if (empty != group) batch.norms[empty] = 0.0f;
    if (thread == 0) {
      if (begin == 0 && batch.goes_on) norm += batch.table->carry[1 - batch.turn];
      if (group == next)
        batch.table->carry[batch.turn] = norm;
      else
        batch.norms[group] = static_cast<float>(batch.is_l2 ? sqrt(norm) : norm);
    }
  }
}

/* ---- scaling ---- */

/* The factor of a gradient, of its groups in this launch and before. */
__device__ __forceinline__ double grad_factor(const grad_scale_batch &batch, int k) {
  double factor = batch.factor ? *batch.factor : 1.0;
  for (int i = batch.listed[k]; i < batch.listed[k + 1]; ++i)
    factor *= static_cast<double>(__ldg(batch.scales + batch.group[i]));
  return factor;
}

/* One thread, of one gradient, whose groups go on in the next launch. */
__global__ void __launch_bounds__(1) scale_grads_factor_kernel(const __grid_constant__ grad_scale_batch batch, bool is_first) {
  if (is_first) *batch.factor = 1.0;
  *batch.factor = grad_factor(batch, 0);
}

template <typename T, int LOADS>
__device__ __forceinline__ void grad_scale(const grad_run &run, float by) {
  constexpr int lanes = camox_lanes<T>::value;
  const int vectors = run.elements / lanes, last = vectors * lanes + static_cast<int>(threadIdx.x);
  T *const x = static_cast<T *>(run.data);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < vectors; first += LOADS * GRAD_THREADS) {
    T raw[LOADS][lanes];
    grad_load(raw, run, first);
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int vector = first + k * GRAD_THREADS;
      float value[lanes];
      camox_to_floats(value, raw[k]);
#pragma unroll
      for (int i = 0; i < lanes; ++i) value[i] *= by;
      if (vector < vectors) camox_store_float(x + vector * lanes, value, lanes, LOADS > 1);
    }
  }
  if (last < run.elements) x[last] = camox_from_float<T>(camox_to_float(x[last]) * by);
}

template <typename T>
__device__ __forceinline__ void grad_scale(const grad_run &run, float by) {
  if (camox_aligned(run.data, 16))
    grad_scale<T, GRAD_LOADS>(run, by);
  else
    grad_scale<T, 1>(run, by);
}

__global__ void __launch_bounds__(GRAD_THREADS) scale_grads_kernel(const __grid_constant__ grad_scale_batch batch) {
  for (int block = static_cast<int>(blockIdx.x); block < batch.work.blocks; block += static_cast<int>(gridDim.x)) {
    const int k = batch.work.grad_of_block[block];
    float by = static_cast<float>(grad_factor(batch, k));
    if (by == 1.0f) continue; /* the bits that are there already */
#ifdef CAMOX_BREAK_GRAD_NORMS
    by += 1e-2f;
#endif
    const grad_run run = grad_run_of(batch.work, block, k);
    switch (run.dtype) {
      case CAMOX_F32: grad_scale<float>(run, by); break;
      case CAMOX_BF16: grad_scale<__nv_bfloat16>(run, by); break;
      default: grad_scale<__half>(run, by); break;
    }
  }
}

/* ---- launchers ---- */

/* Blocks of a gradient, one where it is empty. */
static int64_t grad_blocks(const camox_grad &grad, int64_t elements_per_block) {
  return grad.elements > 0 ? camox_ceil_div(grad.elements, elements_per_block) : 1;
}

/* Divides gradients among the blocks of a launch. */
static void grad_divide(grad_work *work, const camox_grad *grads, int count) {
  int64_t blocks;
  work->elements_per_block = CAMOX_GRAD_PIECE;
  for (;; work->elements_per_block *= 2) {
    blocks = 0;
    for (int k = 0; k < count; ++k) blocks += grad_blocks(grads[k], work->elements_per_block);
    if (blocks <= CAMOX_GRAD_BLOCKS) break;
  }
  int block = 0;
  for (int k = 0; k < count; ++k) {
    work->grad[k] = {grads[k].data, grads[k].elements, block, grads[k].dtype};
    for (int64_t left = grad_blocks(grads[k], work->elements_per_block); left > 0; --left)
      work->grad_of_block[block++] = static_cast<uint16_t>(k);
  }
  work->grad[count].first = block;
  work->grads = count, work->blocks = block;
}

static bool grad_has_float64(const camox_grad_norms_params *p) {
  for (int64_t i = 0; i < p->count; ++i)
    if (p->grads[i].dtype == CAMOX_F64) return true;
  return false;
}

extern "C" int camox_grad_norms_cuda(const camox_grad_norms_params *p, void *stream) {
  if (p->groups == 0) return cudaSuccess;
  if (grad_has_float64(p)) return cudaErrorInvalidValue;
  grad_norms_batch batch;
  batch.table = static_cast<camox_grad_table *>(p->table), batch.norms = static_cast<float *>(p->norms);
  batch.is_l2 = p->reduce == CAMOX_GROUP_L2, batch.turn = 0;
  batch.counters = camox_counters_on(stream, batch.table->counters);
  if (p->count == 0) (void)cudaMemsetAsync(p->norms, 0, p->groups * sizeof(float), static_cast<cudaStream_t>(stream));
  for (int64_t first = 0; first < p->count; first += batch.work.grads) {
    const camox_grad *const grads = p->grads + first;
    const int count = static_cast<int>(p->count - first < CAMOX_GRAD_BATCH ? p->count - first : CAMOX_GRAD_BATCH);
    grad_divide(&batch.work, grads, count);
    for (int begin = 0, end; begin < count; begin = end) {
      for (end = begin + 1; end < count && grads[end].group == grads[begin].group;) ++end;
      for (int k = begin; k < end; ++k)
        batch.group_of[k] = {grads[k].repeats, static_cast<int32_t>(grads[k].group), static_cast<uint16_t>(begin),
                             static_cast<uint16_t>(end)};
    }
    const bool more = first + count < p->count;
    batch.group_of[count].group = static_cast<int32_t>(more ? grads[count].group : p->groups);
    batch.first_group = static_cast<int32_t>(first > 0 ? grads[0].group : 0);
    batch.goes_on = first > 0 && grads[-1].group == grads[0].group;
    CAMOX_LAUNCH(grad_norms_kernel, camox_grid(batch.work.blocks), GRAD_THREADS, 0, stream, batch);
    batch.turn = 1 - batch.turn;
  }
  return camox_launch_status();
}

extern "C" int camox_scale_grads_cuda(const camox_grad_norms_params *p, void *stream) {
  if (grad_has_float64(p)) return cudaErrorInvalidValue;
  grad_scale_batch batch;
  batch.scales = p->scales;
  const camox_grad_listing *listing = p->listing, *const end = p->listing + p->listings;
  for (int64_t first = 0; first < p->count; first += batch.work.grads) {
    batch.factor = nullptr;
    int count = 0, listed = 0;
    while (count < CAMOX_GRAD_BATCH && first + count < p->count) {
      const camox_grad_listing *next = listing;
      while (next < end && next->grad == first + count) ++next;
      if (listed + (next - listing) > CAMOX_GRAD_LISTINGS) {
        if (count > 0) break;
        /* more groups than a launch takes: all but the last of them beforehand */
        for (; next - listing > CAMOX_GRAD_LISTINGS; listing += CAMOX_GRAD_LISTINGS) {
          const bool is_first = batch.factor == nullptr;
          batch.factor = &static_cast<camox_grad_table *>(p->table)->factor;
          batch.listed[0] = 0, batch.listed[1] = CAMOX_GRAD_LISTINGS;
          for (int i = 0; i < CAMOX_GRAD_LISTINGS; ++i) batch.group[i] = listing[i].group;
          CAMOX_LAUNCH(scale_grads_factor_kernel, 1, 1, 0, stream, batch, is_first);
        }
      }
      batch.listed[count++] = static_cast<uint16_t>(listed);
      for (; listing < next; ++listing) batch.group[listed++] = listing->group;
      if (batch.factor != nullptr) break; /* which is this gradient's alone */
    }
    batch.listed[count] = static_cast<uint16_t>(listed);
    grad_divide(&batch.work, p->grads + first, count);
    CAMOX_LAUNCH(scale_grads_kernel, camox_grid(batch.work.blocks), GRAD_THREADS, 0, stream, batch);
  }
  return camox_launch_status();
}
