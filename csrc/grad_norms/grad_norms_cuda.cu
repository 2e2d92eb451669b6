/* grad_norms on CUDA. The host knows addresses and sizes, the device needs them: they travel as parameters of small kernels,
   some 800 gradients each, which write a table in device memory. Nothing is copied from the host and nobody waits, and a
   captured graph holds all of it.

     table kernels   gradients (parameters)  ->  | piece 0 | piece 1 | ... | piece n |   address, size, gradient; 8192 elements
     main kernel     a block takes a piece: norms add its squares, scale multiplies it; V neighbouring elements for each
                     thread, in accesses of 16 bytes where the address allows it, 4 of them in flight
     norms           a warp takes a gradient and adds its pieces, then a warp a group and adds its gradients, in float64
     scale           before the main kernel: a thread takes a gradient and multiplies the factors of its groups

   Work items and the order of all sums follow from sizes alone, and there are no atomics: fixed bits. */
#include "../common/cuda_util.cuh"
#include "grad_norms.h"
#include "grad_norms_plan.h"

#define GRAD_THREADS 256
#define GRAD_WARPS (GRAD_THREADS / CAMOX_WARP)
#define GRAD_LOADS 4 /* of a thread in flight */
/* Gradients and listings that fit into a kernel's parameters, 32 KiB less 4 bytes from CUDA 12.1 on: most models have fewer, so
   that one small kernel knows them all. In the emulator few, so that its tests have several batches. */
#ifdef CAMOX_CUDA_EMULATOR
#define GRAD_PARAMETERS 4096
#else
#define GRAD_PARAMETERS 32764
#endif
#define GRAD_BATCH ((GRAD_PARAMETERS - 128) / 40)
#define GRAD_LISTINGS ((GRAD_PARAMETERS - 128) / 8)

struct grad_table {
  camox_grad_device_piece *piece; /* [pieces] */
  double *partial;                /* [pieces]: sums of squares */
  int64_t *first;                 /* [count + 1]: pieces */
  double *number;                 /* [count]: repeats, then norms or their squares; scale: factors */
  int32_t *group;                 /* [count] */
  int64_t pieces, count, groups;
};

struct grad_batch {
  grad_table table;
  int64_t begin, count; /* gradients */
  struct {
    void *data;
    int64_t elements, first;
    double repeats;
    int32_t group, dtype;
  } grad[GRAD_BATCH];
};

struct grad_listings {
  double *number;
  const float *scales;
  int64_t count;
  camox_grad_listing listing[GRAD_LISTINGS];
};

static_assert(sizeof(grad_batch) <= GRAD_PARAMETERS && sizeof(grad_listings) <= GRAD_PARAMETERS, "parameters of a kernel");

/* A block takes a gradient of the batch. */
__global__ void __launch_bounds__(GRAD_THREADS) grad_norms_table_kernel(const __grid_constant__ grad_batch batch) {
  const grad_table &table = batch.table;
  for (int64_t k = blockIdx.x; k < batch.count; k += gridDim.x) {
    const auto &grad = batch.grad[k];
    const int64_t i = batch.begin + k, pieces = camox_grad_pieces(grad.elements);
    const int64_t bytes = CAMOX_GRAD_PIECE * (grad.dtype == CAMOX_F32 ? 4 : 2);
    for (int64_t piece = threadIdx.x; piece < pieces; piece += GRAD_THREADS) {
      camox_grad_device_piece &to = table.piece[grad.first + piece];
      to.data = static_cast<char *>(grad.data) + piece * bytes;
      to.elements = static_cast<int32_t>(min(static_cast<int64_t>(CAMOX_GRAD_PIECE), grad.elements - piece * CAMOX_GRAD_PIECE));
      to.grad_and_dtype = static_cast<int32_t>(4 * i + grad.dtype);
    }
    if (threadIdx.x == 0) {
      table.first[i] = grad.first;
      table.number[i] = grad.repeats;
      table.group[i] = grad.group;
      if (i + 1 == table.count) table.first[i + 1] = table.pieces;
    }
  }
}

/* ---- norms ---- */

/* A thread's elements of a piece from `first` on: GRAD_LOADS vectors, one of each thread of the block side by side. By way of L2:
   what is read once is written by scaling. */
template <typename T>
struct grad_vectors {
  static constexpr int lanes = camox_lanes<T>::value, apart = GRAD_THREADS * lanes, step = GRAD_LOADS * apart;
  T raw[GRAD_LOADS][lanes];
  int begin, elements;
  bool aligned;

  __device__ __forceinline__ grad_vectors(const camox_grad_device_piece &piece, int first)
      : begin(first + static_cast<int>(threadIdx.x) * lanes), elements(piece.elements), aligned(camox_aligned(piece.data, 16)) {
    const T *const x = static_cast<const T *>(piece.data) + begin;
#pragma unroll
    for (int k = 0; k < GRAD_LOADS; ++k) {
      if (aligned && left(k) >= lanes) {
        const uint4 word = __ldcg(reinterpret_cast<const uint4 *>(x + k * apart));
        __builtin_memcpy(static_cast<void *>(raw[k]), &word, sizeof word);
      } else {
#pragma unroll
        for (int i = 0; i < lanes; ++i) raw[k][i] = i < left(k) ? x[k * apart + i] : camox_from_float<T>(0.0f);
      }
    }
  }
  /* Elements from vector k on; 0 or less: there is none. */
  __device__ __forceinline__ int left(int k) const { return elements - begin - k * apart; }
};

/* The sum of the squares of a piece's elements times `by`, in every thread of the block. */
template <typename T>
__device__ __forceinline__ float grad_squares(const camox_grad_device_piece &piece, float by, float *scratch) {
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < piece.elements; first += grad_vectors<T>::step) {
    const grad_vectors<T> x(piece, first);
#pragma unroll
    for (int k = 0; k < GRAD_LOADS; ++k) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < x.lanes; ++i) {
        const float value = camox_to_float(x.raw[k][i]) * by;
        squares += value * value;
      }
      sum += squares;
    }
  }
  return camox_block_sum<GRAD_THREADS>(sum, scratch);
}

__device__ __forceinline__ float grad_squares_of(const camox_grad_device_piece &piece, float by, float *scratch) {
  switch (piece.grad_and_dtype & 3) {
    case CAMOX_F32: return grad_squares<float>(piece, by, scratch);
    case CAMOX_BF16: return grad_squares<__nv_bfloat16>(piece, by, scratch);
    default: return grad_squares<__half>(piece, by, scratch);
  }
}

/* Squares that float32 cannot hold, or only without some of their digits, are added again, those of elements that a power of
   two has brought near 1. */
__global__ void __launch_bounds__(GRAD_THREADS) grad_norms_kernel(const __grid_constant__ grad_table table) {
  __shared__ float scratch[GRAD_WARPS];
  for (int64_t index = blockIdx.x; index < table.pieces; index += gridDim.x) {
    const camox_grad_device_piece piece = table.piece[index];
    double sum = grad_squares_of(piece, 1.0f, scratch);
    if (sum < 0x1p-60)
      sum = grad_squares_of(piece, 0x1p90f, scratch) * 0x1p-180;
    else if (sum > 0x1p120)
      sum = grad_squares_of(piece, 0x1p-90f, scratch) * 0x1p180;
#ifdef CAMOX_BREAK_GRAD_NORMS
    sum = sum * (1 + 1e-2) + 1e-3;
#endif
    if (threadIdx.x == 0) table.partial[index] = sum;
  }
}

__device__ __forceinline__ double grad_warp_sum(double x) {
#pragma unroll
  for (int offset = CAMOX_WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(CAMOX_FULL_MASK, x, offset);
  return x;
}

/* A warp takes a gradient. */
__global__ void __launch_bounds__(GRAD_THREADS) grad_norms_total_kernel(const __grid_constant__ grad_table table, bool is_l2) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * GRAD_WARPS + warp; i < table.count;
       i += static_cast<int64_t>(gridDim.x) * GRAD_WARPS) {
    double sum = 0.0;
    for (int64_t k = table.first[i] + lane; k < table.first[i + 1]; k += CAMOX_WARP) sum += table.partial[k];
    sum = grad_warp_sum(sum);
    if (lane == 0) {
      const double squares = sum * table.number[i];
      table.number[i] = is_l2 ? squares : sqrt(squares);
    }
  }
}

/* A warp takes a group. */
__global__ void __launch_bounds__(GRAD_THREADS)
    grad_norms_group_kernel(const __grid_constant__ grad_table table, bool is_l2, float *norms) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t group = static_cast<int64_t>(blockIdx.x) * GRAD_WARPS + warp; group < table.groups;
       group += static_cast<int64_t>(gridDim.x) * GRAD_WARPS) {
    double sum = 0.0;
    for (int64_t i = lane; i < table.count; i += CAMOX_WARP)
      if (table.group[i] == group) sum += table.number[i];
    sum = grad_warp_sum(sum);
    if (lane == 0) norms[group] = static_cast<float>(is_l2 ? sqrt(sum) : sum);
  }
}

/* ---- scaling ---- */

/* The thread of a gradient's first listing of the batch multiplies the factors of all of them. */
__global__ void __launch_bounds__(GRAD_THREADS) scale_grads_factors_kernel(const __grid_constant__ grad_listings batch) {
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * GRAD_THREADS + threadIdx.x; k < batch.count;
       k += static_cast<int64_t>(gridDim.x) * GRAD_THREADS) {
    const int32_t grad = batch.listing[k].grad;
    if (k > 0 && batch.listing[k - 1].grad == grad) continue;
    double factor = batch.number[grad];
    for (int64_t j = k; j < batch.count && batch.listing[j].grad == grad; ++j)
      factor *= static_cast<double>(__ldg(batch.scales + batch.listing[j].group));
    batch.number[grad] = factor;
  }
}

template <typename T>
__device__ __forceinline__ void grad_scale(const camox_grad_device_piece &piece, float by) {
#pragma unroll 1
  for (int first = 0; first < piece.elements; first += grad_vectors<T>::step) {
    const grad_vectors<T> x(piece, first);
    T *const to = static_cast<T *>(piece.data) + x.begin;
#pragma unroll
    for (int k = 0; k < GRAD_LOADS; ++k) {
      float v[x.lanes];
#pragma unroll
      for (int i = 0; i < x.lanes; ++i) v[i] = camox_to_float(x.raw[k][i]) * by;
      camox_store_float(to + k * x.apart, v, x.left(k), x.aligned);
    }
  }
}

__global__ void __launch_bounds__(GRAD_THREADS) scale_grads_kernel(const __grid_constant__ grad_table table) {
  for (int64_t index = blockIdx.x; index < table.pieces; index += gridDim.x) {
    const camox_grad_device_piece piece = table.piece[index];
    float by = static_cast<float>(table.number[piece.grad_and_dtype >> 2]);
    if (by == 1.0f) continue; /* the bits that are there already */
#ifdef CAMOX_BREAK_GRAD_NORMS
    by += 1e-2f;
#endif
    switch (piece.grad_and_dtype & 3) {
      case CAMOX_F32: grad_scale<float>(piece, by); break;
      case CAMOX_BF16: grad_scale<__nv_bfloat16>(piece, by); break;
      default: grad_scale<__half>(piece, by); break;
    }
  }
}

/* ---- launchers ---- */

static grad_table grad_table_of(const camox_grad_norms_params *p) {
  grad_table table = {};
  table.pieces = p->pieces, table.count = p->count, table.groups = p->groups;
  table.piece = static_cast<camox_grad_device_piece *>(p->table);
  table.partial = reinterpret_cast<double *>(table.piece + p->pieces);
  table.first = reinterpret_cast<int64_t *>(table.partial + p->pieces);
  table.number = reinterpret_cast<double *>(table.first + p->count + 1);
  table.group = reinterpret_cast<int32_t *>(table.number + p->count);
  return table;
}

static int grad_write_table(const camox_grad_norms_params *p, const grad_table &table, void *stream) {
  grad_batch batch = {};
  batch.table = table;
  int64_t first = 0;
  for (int64_t i = 0; i < p->count; ++i) {
    const camox_grad &grad = p->grads[i];
    if (grad.dtype == CAMOX_F64) return cudaErrorInvalidValue;
    auto &to = batch.grad[batch.count++];
    to.data = grad.data, to.elements = grad.elements, to.first = first, to.repeats = grad.repeats;
    to.group = static_cast<int32_t>(grad.group), to.dtype = grad.dtype;
    first += camox_grad_pieces(grad.elements);
    if (batch.count < GRAD_BATCH && i + 1 < p->count) continue;
    CAMOX_LAUNCH(grad_norms_table_kernel, camox_grid(batch.count), GRAD_THREADS, 0, stream, batch);
    batch.begin = i + 1, batch.count = 0;
  }
  return camox_launch_status();
}

static unsigned grad_warps_grid(int64_t warps) { return camox_grid(camox_ceil_div(warps, GRAD_WARPS)); }

extern "C" int camox_grad_norms_cuda(const camox_grad_norms_params *p, void *stream) {
  if (p->groups == 0) return cudaSuccess;
  const grad_table table = grad_table_of(p);
  const int error = grad_write_table(p, table, stream);
  if (error != cudaSuccess) return error;
  const bool is_l2 = p->reduce == CAMOX_GROUP_L2;
  if (p->pieces > 0) CAMOX_LAUNCH(grad_norms_kernel, camox_grid(p->pieces), GRAD_THREADS, 0, stream, table);
  if (p->count > 0) CAMOX_LAUNCH(grad_norms_total_kernel, grad_warps_grid(p->count), GRAD_THREADS, 0, stream, table, is_l2);
  CAMOX_LAUNCH(grad_norms_group_kernel, grad_warps_grid(p->groups), GRAD_THREADS, 0, stream, table, is_l2,
               static_cast<float *>(p->norms));
  return camox_launch_status();
}

extern "C" int camox_scale_grads_cuda(const camox_grad_norms_params *p, void *stream) {
  if (p->pieces == 0) return cudaSuccess;
  const grad_table table = grad_table_of(p);
  const int error = grad_write_table(p, table, stream);
  if (error != cudaSuccess) return error;
  grad_listings batch = {};
  batch.number = table.number, batch.scales = p->scales;
  for (int64_t i = 0; i < p->listings; ++i) {
    batch.listing[batch.count++] = p->listing[i];
    if (batch.count < GRAD_LISTINGS && i + 1 < p->listings) continue;
    CAMOX_LAUNCH(scale_grads_factors_kernel, camox_grid(camox_ceil_div(batch.count, GRAD_THREADS)), GRAD_THREADS, 0, stream,
                 batch);
    batch.count = 0;
  }
  CAMOX_LAUNCH(scale_grads_kernel, camox_grid(p->pieces), GRAD_THREADS, 0, stream, table);
  return camox_launch_status();
}
