/* moe on CUDA.

     choose    LANES threads a row, one alone of up to 8 experts, each with V neighbouring logits as unsigned numbers of the same
               order: K rounds of a maximum over registers and shuffles; the first thread that has it gives the expert
                                                                                     -> K experts and weights
               a block counts the slots of each expert                               -> block_totals [blocks, E]
     place     a block adds up the totals of the blocks before it, then ranks its own slots in their order:

               slots of a block   | warp 0 | warp 1 | ... | warp 31 |     first: how many of each expert, a warp at a time
               next [warps][E]    sums of the warps before                then: position = base[e] + rank
               rank in a warp     votes: lanes below with the same expert

               both have large blocks up to 256 experts: a pass over rows or slots waits for memory once, and a thread loads
               the expert of its first slot before the totals, whose loads are in flight together
     backward  LANES threads a row, as for choosing; gradients of weights reach the threads of their experts by shared memory

     dispatch  a thread: one vector of a row, read once, stored K times
     combine   a thread: one vector of a row = weighted sum of K vectors, 4 of them in flight
     its backward  a warp or a block a row: the row's gradient stays in registers for all K copies (of 16-byte accesses),
                   four of which are in flight; rows of several chunks: a warp a slot adds up their dot products

   A vector is the widest access that all rows allow: 16 bytes, 4 bytes or one element. Placing is one launch with choosing
   where all rows fit a block. Atomics are on integers alone, so the order of all that is written is set by the shape. */
#include "../common/cuda_util.cuh"
#include "../common/device_errors.h"
#include "moe.h"
#include "moe_plan.h"

#define MOE_THREADS 256
#define MOE_WARPS (MOE_THREADS / CAMOX_WARP)
#define MOE_ELEMENTS_PER_THREAD 16 /* elements of a row's gradient that a thread of combine's backward holds */
#define MOE_LOADS 8                /* counts of blocks that a thread has in flight */
#define MOE_MOST_PARTS 32          /* threads that add up an expert's counts */
#define MOE_LARGE_THREADS 1024     /* of a block that routes among at most MOE_LARGE_EXPERTS; more have MOE_THREADS */
#define MOE_LARGE_EXPERTS 256

static_assert(MOE_THREADS * MOE_ELEMENTS_PER_THREAD == CAMOX_MOE_CHUNK, "a block holds a chunk");

__device__ __forceinline__ bool moe_is_valid(const camox_moe_route_params &p, int64_t row) {
  return !p.valid || __ldg(p.valid + row * p.valid_stride) != 0;
}

__device__ __forceinline__ void moe_report(uint32_t *error_word, uint32_t error) {
  if (error_word) atomicOr(error_word, error);
}

template <typename T>
__device__ __forceinline__ float moe_logit(const camox_moe_route_params &p, int64_t row, int64_t expert) {
  return camox_to_float(__ldg(static_cast<const T *>(p.logits) + row * p.logits_stride[0] + expert * p.logits_stride[1]));
}

/* The larger value with the lower index of those that a warp's lanes hold. */
__device__ __forceinline__ void moe_warp_best(float &value, int &index) {
#pragma unroll
  for (int offset = CAMOX_WARP / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(CAMOX_FULL_MASK, value, offset);
    const int other_index = __shfl_xor_sync(CAMOX_FULL_MASK, index, offset);
    if (other > value || (other == value && other_index < index)) value = other, index = other_index;
  }
}

/* Whether it is true in one of a row's threads. */
template <int LANES>
__device__ __forceinline__ bool moe_row_any(bool is_true) {
  const uint32_t votes = __ballot_sync(CAMOX_FULL_MASK, is_true), lanes = CAMOX_FULL_MASK >> (CAMOX_WARP - LANES);
  return (votes >> threadIdx.x % CAMOX_WARP / LANES * LANES & lanes) != 0;
}

/* The first of a row's threads in which it is true, as a lane of the warp. */
template <int LANES>
__device__ __forceinline__ int moe_row_first(bool is_true) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  if (LANES == 1) return lane;
  const uint32_t of_row = CAMOX_FULL_MASK >> (CAMOX_WARP - LANES) << lane / LANES * LANES;
  return __ffs(static_cast<int>(__ballot_sync(CAMOX_FULL_MASK, is_true) & of_row)) - 1;
}

__device__ __forceinline__ float moe_sigmoid(float x) { return camox_reciprocal(1.0f + expf(-x)); }

/* An unsigned number with the order of the logits: the bits of a float have it once those of negative ones are inverted. 0.0
   and -0.0 are equal, NaN is -infinity, and no logit is 0. */
__device__ __forceinline__ uint32_t moe_order_of(float logit) {
  const float value = logit == logit ? logit + 0.0f : -INFINITY;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return bits ^ (sign | 0x80000000u);
}

__device__ __forceinline__ float moe_ordered_logit(uint32_t order) {
  const uint32_t bits = order ^ (order >> 31 ? 0x80000000u : 0xffffffffu);
  float logit;
  __builtin_memcpy(&logit, &bits, sizeof logit);
  return logit;
}

/* Logits of a row from expert `first` on, in accesses of 16 bytes where all rows allow it (`vectors`). What is no expert keeps
   what raw has. */
template <typename T, int VECTORS, int N>
__device__ __forceinline__ void moe_load_raw(T (&raw)[VECTORS][N], const camox_moe_route_params &p, bool vectors, int64_t row,
                                             bool exists, int first) {
  const T *const x = static_cast<const T *>(p.logits) + row * p.logits_stride[0] + first * p.logits_stride[1];
  const int experts = exists ? static_cast<int>(p.num_experts) - first : 0;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (i * N < experts) camox_load(raw[i], x + i * N);
  } else {
#pragma unroll
    for (int v = 0; v < VECTORS * N; ++v)
      if (v < experts) raw[v / N][v % N] = __ldg(x + v * p.logits_stride[1]);
  }
}

/* The same as floats; -infinity of what is no expert. */
template <typename T, int V>
__device__ __forceinline__ void moe_load_row(float (&value)[V], const camox_moe_route_params &p, bool vectors, int64_t row,
                                             bool exists, int first) {
  constexpr int lanes = camox_lanes<T>::value;
  T raw[V / lanes][lanes];
#pragma unroll
  for (int v = 0; v < V; ++v) raw[v / lanes][v % lanes] = camox_from_float<T>(-INFINITY);
  moe_load_raw(raw, p, vectors, row, exists, first);
  camox_to_floats(value, raw[0]);
}

/* The same of any dtype, for a kernel so long that one has to serve all. Both half types are loaded by the same code. */
template <int V>
__device__ __forceinline__ void moe_load_row_of_any(float (&value)[V], const camox_moe_route_params &p, bool vectors,
                                                    int64_t row, bool exists, int first) {
  if (p.dtype == CAMOX_F32) {
    moe_load_row<float>(value, p, vectors, row, exists, first);
    return;
  }
  uint16_t raw[V / 8][8];
#pragma unroll
  for (int v = 0; v < V; ++v) raw[v / 8][v % 8] = p.dtype == CAMOX_BF16 ? 0xff80 : 0xfc00; /* -infinity */
  moe_load_raw(raw, p, vectors, row, exists, first);
  if (p.dtype == CAMOX_BF16)
    camox_to_floats(value, reinterpret_cast<const __nv_bfloat16 *>(raw[0]));
  else
    camox_to_floats(value, reinterpret_cast<const __half *>(raw[0]));
}

/* The K experts of one row and their weights. Thread `lane` of the row holds the logits of V experts from lane * V on, and keeps
   choices lane + v * LANES. */
template <int LANES, int V>
__device__ __forceinline__ void moe_choose_row(const camox_moe_route_params &p, bool vectors, int64_t row, bool exists,
                                               int lane, int *counts) {
  float value[V], kept[V] = {}, largest = -INFINITY, sum = 0.0f;
  uint32_t order[V]; /* 0 of what is no expert, or chosen */
  bool is_nan = false;
  const bool valid = exists && moe_is_valid(p, row); /* loaded before the logits are converted, which waits for them */
  moe_load_row_of_any(value, p, vectors, row, exists, lane * V);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    order[v] = lane * V + v < static_cast<int>(p.num_experts) ? moe_order_of(value[v]) : 0;
    largest = fmaxf(largest, value[v]);
    is_nan |= value[v] != value[v];
  }
  is_nan = moe_row_any<LANES>(is_nan && valid);
  if (is_nan && lane == 0) moe_report(p.error_word, CAMOX_ERROR_MOE_NAN);
  largest = camox_team_max(largest, LANES);
  if (p.score == CAMOX_MOE_SOFTMAX_TOPK) {
#pragma unroll
    for (int v = 0; v < V; ++v) sum += expf(value[v] - largest);
  }
  const int top_k = static_cast<int>(p.top_k);
  float *const weights = static_cast<float *>(p.weights) + row * top_k;
  int64_t *const experts = p.experts + row * top_k;
  for (int first = 0; first < top_k; first += LANES) {
    uint32_t order_of_choice = 0;
    int choice = 0;
#pragma unroll 1
    for (int k = 0; k < LANES && first + k < top_k; ++k) {
      uint32_t own = order[0];
#pragma unroll
      for (int v = 1; v < V; ++v) own = order[v] > own ? order[v] : own;
      uint32_t best = own;
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) {
        const uint32_t other = __shfl_xor_sync(CAMOX_FULL_MASK, best, offset);
        best = other > best ? other : best;
      }
      const int first_with_best = moe_row_first<LANES>(own == best);
      bool is_left = first_with_best == static_cast<int>(threadIdx.x) % CAMOX_WARP;
      int expert = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) { /* the lowest of several */
        const bool is_best = order[v] == best;
        if (is_left && is_best) order[v] = 0, expert = v;
        is_left = is_left && !is_best;
      }
      expert += lane * V;
      if (LANES > 1) expert = __shfl_sync(CAMOX_FULL_MASK, expert, first_with_best);
      if (lane == k) order_of_choice = best, choice = expert;
    }
    if (first + lane >= top_k) continue;
    const float logit = moe_ordered_logit(order_of_choice);
    const float weight = p.score == CAMOX_MOE_SIGMOID_TOPK ? moe_sigmoid(logit) : expf(logit - largest);
    if (p.score == CAMOX_MOE_TOPK_SOFTMAX) sum += weight;
#pragma unroll
    for (int v = 0; v < V; ++v) kept[v] = first == v * LANES ? weight : kept[v];
    if (exists) {
      experts[first + lane] = choice;
      if (valid) atomicAdd(counts + choice, 1);
    }
  }
  float scale = p.score == CAMOX_MOE_SIGMOID_TOPK ? 1.0f : 1.0f / camox_team_sum(sum, LANES);
  if (is_nan) scale = nanf("");
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int k = lane + v * LANES;
    if (!exists || k >= top_k) break;
    weights[k] = valid ? kept[v] * scale : 0.0f;
  }
}

/* What placing needs of each expert. */
struct moe_shared {
  int64_t *base; /* [E]: its offset and how many slots of earlier blocks chose it */
  int *limit;    /* [E]: how many more of its slots the capacity allows */
  int *next;     /* [warps][E]: how many slots of this block, in stretches before the warp's, chose it */
  int64_t *sums; /* [parts][2][E], before next takes its place: the expert's slots in earlier blocks, and in all */
};

/* Threads of a block that chooses, counts or places. */
static unsigned moe_route_threads(int64_t experts) { return experts <= MOE_LARGE_EXPERTS ? MOE_LARGE_THREADS : MOE_THREADS; }

/* Threads of a block that add up the counts of one expert, each those of every parts-th block. */
__host__ __device__ static inline int moe_parts(int threads, int experts) {
  const int parts = threads / experts;
  return parts < 1 ? 1 : parts < MOE_MOST_PARTS ? parts : MOE_MOST_PARTS;
}

/* Bytes of next or sums for each expert. */
__host__ __device__ static inline int moe_scratch_bytes(int threads, int experts) {
  const int next = threads / CAMOX_WARP * static_cast<int>(sizeof(int));
  const int sums = moe_parts(threads, experts) * 2 * static_cast<int>(sizeof(int64_t));
  return next > sums ? next : sums;
}

__device__ __forceinline__ moe_shared moe_shared_of(unsigned char *memory, int experts) {
  int64_t *const base = reinterpret_cast<int64_t *>(memory), *const sums = base + experts;
  unsigned char *const limit = memory + (sizeof *base + moe_scratch_bytes(static_cast<int>(blockDim.x), experts)) * experts;
  return {base, reinterpret_cast<int *>(limit), reinterpret_cast<int *>(sums), sums};
}

static size_t moe_shared_bytes(int64_t experts) {
  const int threads = static_cast<int>(moe_route_threads(experts));
  return static_cast<size_t>(experts) * (sizeof(int64_t) + sizeof(int) + moe_scratch_bytes(threads, static_cast<int>(experts)));
}

/* base and limit of this block, from the counts of all; how many copies there are in all. */
__device__ int64_t moe_scan(const camox_moe_route_params &p, const moe_shared &shared, int64_t block, int64_t blocks) {
  __shared__ int64_t copies;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int experts = static_cast<int>(p.num_experts), parts = moe_parts(threads, experts);
#pragma unroll 1 /* here and in placing's other loops, which mostly go round once: it is in many kernels */
  for (int item = thread; item < experts * parts; item += threads) {
    const int part = item / experts, e = item - part * experts;
    int64_t before = 0, all = 0;
#pragma unroll 1
    for (int first = part; first < static_cast<int>(blocks); first += MOE_LOADS * parts) {
      int count[MOE_LOADS];
#pragma unroll
      for (int i = 0; i < MOE_LOADS; ++i) {
        const int b = first + i * parts;
        count[i] = b < static_cast<int>(blocks) ? p.block_totals[b * experts + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < MOE_LOADS; ++i) {
        all += count[i];
        if (first + i * parts < static_cast<int>(block)) before += count[i];
      }
    }
    shared.sums[2 * part * experts + e] = before, shared.sums[(2 * part + 1) * experts + e] = all;
  }
  __syncthreads();
  if (thread < CAMOX_WARP) {
    int64_t carry = 0;
#pragma unroll 1
    for (int first = 0; first < experts; first += CAMOX_WARP) {
      const int e = first + thread;
      int64_t before = 0, count = 0;
      if (e < experts)
#pragma unroll 8
        for (int part = 0; part < parts; ++part)
          before += shared.sums[2 * part * experts + e], count += shared.sums[(2 * part + 1) * experts + e];
      if (p.capacity >= 0 && count > p.capacity) count = p.capacity;
      int64_t end = count;
#pragma unroll
      for (int offset = 1; offset < CAMOX_WARP; offset *= 2) {
        const int64_t other = __shfl_up_sync(CAMOX_FULL_MASK, end, offset);
        if (thread >= offset) end += other;
      }
      if (e < experts) {
        const int64_t free_slots = p.capacity < 0 ? INT32_MAX : p.capacity - before, offset = carry + end - count;
        shared.base[e] = offset + before;
        shared.limit[e] = static_cast<int>(free_slots < 0 ? 0 : free_slots < INT32_MAX ? free_slots : INT32_MAX);
        if (block == 0) p.counts[e] = count, p.offsets[e] = offset;
      }
      carry += __shfl_sync(CAMOX_FULL_MASK, end, CAMOX_WARP - 1);
    }
    if (thread == 0) {
      copies = carry;
      if (block == 0) p.offsets[experts] = carry;
    }
  }
  __syncthreads();
  return copies;
}

/* False only where the caller chose the experts. */
__device__ __forceinline__ bool moe_is_expert(const camox_moe_route_params &p, int64_t expert) {
  return expert >= 0 && expert < p.num_experts;
}

/* Lanes of the warp that hold the same expert; -1 is one too. */
__device__ __forceinline__ uint32_t moe_alike(int expert, int experts) {
  uint32_t alike = CAMOX_FULL_MASK;
  for (int bit = 1; bit < 2 * experts; bit *= 2) {
    const bool set = expert & bit;
    const uint32_t votes = __ballot_sync(CAMOX_FULL_MASK, set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}

/* Places of this block's slots, once all blocks have counted theirs; ends with a barrier. */
__device__ void moe_place(const camox_moe_route_params &p, unsigned char *memory, int64_t block, int64_t blocks,
                          int64_t block_rows) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % CAMOX_WARP, warp = thread / CAMOX_WARP;
  const int threads = static_cast<int>(blockDim.x), warps = threads / CAMOX_WARP, experts = static_cast<int>(p.num_experts);
  const int64_t begin = block * block_rows * p.top_k, remaining = p.rows * p.top_k - begin, most = block_rows * p.top_k;
  const int slots = static_cast<int>(remaining < most ? remaining : most);
  const int stretch = (slots + threads - 1) / threads * CAMOX_WARP;
  const int first = warp * stretch, last = min(first + stretch, slots);
  const moe_shared shared = moe_shared_of(memory, experts);
  int *const next = shared.next + warp * experts;
  /* Of the block's slot; -1 of one without a copy, whose expert exists nevertheless unless the caller chose another. */
  const auto load_expert = [&](int slot, bool *exists) {
    if (slot >= last) return -1;
    int64_t k;
    if (p.valid && !moe_is_valid(p, camox_divide(begin + slot, p.top_k, &k))) return -1;
    const int64_t expert = p.experts[begin + slot];
    *exists = moe_is_expert(p, expert);
    return *exists ? static_cast<int>(expert) : -1;
  };
  bool first_exists = true;
  const int first_expert = load_expert(first + lane, &first_exists); /* before the scan waits for memory; often the only one */
  const auto expert_of = [&](int slot, bool *exists) {
    if (slot >= first + CAMOX_WARP) return load_expert(slot, exists);
    *exists = first_exists;
    return first_expert;
  };
  const int64_t copies = moe_scan(p, shared, block, blocks);
#pragma unroll 1
  for (int64_t place = copies + block * threads + thread; place < p.rows * p.top_k; place += blocks * threads)
    p.order[place] = -1;
#pragma unroll 1
  for (int i = thread; i < warps * experts; i += threads) shared.next[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int slot = first + lane; slot < last; slot += CAMOX_WARP) {
    bool exists;
    const int expert = expert_of(slot, &exists);
    if (expert >= 0) atomicAdd(next + expert, 1);
  }
  __syncthreads();
#pragma unroll 1
  for (int e = thread; e < experts; e += threads) {
    int sum = 0;
#pragma unroll 1
    for (int w = 0; w < warps; w += MOE_WARPS) { /* MOE_WARPS at a time: shared memory answers late */
      int count[MOE_WARPS];
#pragma unroll
      for (int i = 0; i < MOE_WARPS; ++i) count[i] = shared.next[(w + i) * experts + e];
#pragma unroll
      for (int i = 0; i < MOE_WARPS; ++i) shared.next[(w + i) * experts + e] = sum, sum += count[i];
    }
  }
  __syncthreads();
  for (int base = first; base < last; base += CAMOX_WARP) {
    bool exists = true;
    const int expert = expert_of(base + lane, &exists);
    const uint32_t alike = moe_alike(expert, experts);
    const int preceding = __popc(alike & ((1u << lane) - 1u)), rank = expert < 0 ? 0 : next[expert] + preceding;
    __syncwarp();
    if (expert >= 0 && preceding == 0) next[expert] += __popc(alike);
    __syncwarp();
    if (base + lane >= last) continue;
    const int64_t slot = begin + base + lane;
    if (expert >= 0 && rank < shared.limit[expert]) {
      const int64_t position = shared.base[expert] + rank;
      p.position[slot] = position, p.order[position] = slot;
    } else {
      p.position[slot] = exists ? -1 : p.rows * p.top_k; /* beyond all places: combine makes its row NaN */
      if (p.weights) static_cast<float *>(p.weights)[slot] = 0.0f;
    }
  }
  __syncthreads();
}

template <int LANES, int V>
__global__ void __launch_bounds__(LANES *V <= MOE_LARGE_EXPERTS ? MOE_LARGE_THREADS : MOE_THREADS, 1)
    moe_choose_kernel(const __grid_constant__ camox_moe_route_params p, bool vectors) {
  CAMOX_DYNAMIC_SHARED(unsigned char, memory);
  int *const counts = reinterpret_cast<int *>(memory);
  const int64_t blocks = camox_moe_cuda_blocks(&p), block_rows = camox_moe_cuda_block_rows(&p);
  const int groups = static_cast<int>(blockDim.x) / LANES;
  const int group = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    for (int64_t e = threadIdx.x; e < p.num_experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const int64_t begin = block * block_rows, end = begin + block_rows < p.rows ? begin + block_rows : p.rows;
    for (int64_t row = begin; row < end; row += groups)
      moe_choose_row<LANES, V>(p, vectors, row + group, row + group < end, lane, counts);
    __syncthreads();
    /* what follows, the next block's zeros or placing, leaves an expert's count to the thread that has it here */
    for (int64_t e = threadIdx.x; e < p.num_experts; e += blockDim.x) p.block_totals[block * p.num_experts + e] = counts[e];
  }
  if (blocks == 1) moe_place(p, memory, 0, 1, block_rows);
}

/* moe_choose_kernel for experts that the caller chose: a thread a slot counts them. */
__global__ void __launch_bounds__(MOE_LARGE_THREADS, 1) moe_count_kernel(const __grid_constant__ camox_moe_route_params p) {
  CAMOX_DYNAMIC_SHARED(unsigned char, memory);
  int *const counts = reinterpret_cast<int *>(memory);
  const int64_t blocks = camox_moe_cuda_blocks(&p), block_rows = camox_moe_cuda_block_rows(&p);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    for (int64_t e = threadIdx.x; e < p.num_experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const int64_t begin = block * block_rows, end = begin + block_rows < p.rows ? begin + block_rows : p.rows;
    for (int64_t slot = begin * p.top_k + threadIdx.x; slot < end * p.top_k; slot += blockDim.x) {
      if (!moe_is_valid(p, slot / p.top_k)) continue;
      if (moe_is_expert(p, p.experts[slot]))
        atomicAdd(counts + p.experts[slot], 1);
      else
        moe_report(p.error_word, CAMOX_ERROR_MOE_PLACE);
    }
    __syncthreads();
    /* what follows, the next block's zeros or placing, leaves an expert's count to the thread that has it here */
    for (int64_t e = threadIdx.x; e < p.num_experts; e += blockDim.x) p.block_totals[block * p.num_experts + e] = counts[e];
  }
  if (blocks == 1) moe_place(p, memory, 0, 1, block_rows);
}

/* blocks, block_rows: what camox_moe_cuda_blocks and camox_moe_cuda_block_rows divide for. */
__global__ void __launch_bounds__(MOE_LARGE_THREADS, 1)
    moe_place_kernel(const __grid_constant__ camox_moe_route_params p, int64_t blocks, int64_t block_rows) {
  CAMOX_DYNAMIC_SHARED(unsigned char, memory);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) moe_place(p, memory, block, blocks, block_rows);
}

/* Bits of what shared memory has for an expert that the row did not choose: -0.0, which no gradient is there, as 0 is added. */
#define MOE_NOT_CHOSEN 0x80000000u

/* LANES threads a row, of which thread `lane` has V experts from lane * V on:

     logits, choices, gradients of weights     loaded at once, so that a thread waits for memory once
     gradients -> of_expert [row][expert]      from the thread of the choice to that of the expert
     sums over the row's threads               -> grad_logits

   All threads of a warp go through the loop as often. */
template <int LANES, int V, typename T>
__global__ void __launch_bounds__(MOE_THREADS)
    moe_route_backward_kernel(const __grid_constant__ camox_moe_route_params p, bool vectors) {
  constexpr int groups = MOE_THREADS / LANES, together = LANES == 1 ? 2 : 1; /* together: choices of a thread at a time */
  __shared__ __align__(16) float of_experts[groups][LANES * V + 4];          /* rows begin in different banks */
  const int group = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
  const int columns = static_cast<int>(p.num_experts), top_k = static_cast<int>(p.top_k);
  const bool over_all = p.score == CAMOX_MOE_SOFTMAX_TOPK, softmax = p.score != CAMOX_MOE_SIGMOID_TOPK;
  float *const of_expert = of_experts[group];
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < p.rows;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t row = first + group;
    const bool exists = row < p.rows;
    const int choices = exists ? top_k : 0;
    const float *const grad = static_cast<const float *>(p.grad) + row * top_k;
    const int64_t *const experts = p.experts + row * top_k, *const position = p.position + row * top_k;
    float value[V];
    moe_load_row<T>(value, p, vectors, row, exists, lane * V);
    /* as on the CPU: without the gradient of the best expert the sums cancel less */
    float best = 0.0f;
    if (exists && softmax && !over_all) {
      const float given = __ldg(grad);
      best = __ldg(position) < 0 ? 0.0f : given;
    }
    float gradient[V]; /* where all experts share the sum, 0 for those that were not chosen */
#pragma unroll
    for (int v = 0; v < V; ++v) gradient[v] = over_all ? 0.0f : -0.0f;
    camox_put_floats(of_expert + lane * V, gradient);
    __syncwarp();
    bool any = false, outside = false;
#pragma unroll 1
    for (int k = lane; k < choices; k += together * LANES) {
      int64_t expert[together], place[together];
      float given[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int choice = k + i * LANES < choices ? k + i * LANES : k;
        expert[i] = __ldg(experts + choice), place[i] = __ldg(position + choice), given[i] = __ldg(grad + choice);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const float number = (place[i] < 0 ? 0.0f : given[i]) - best + 0.0f;
        any |= place[i] >= 0;
        if (moe_is_expert(p, expert[i]))
          of_expert[expert[i]] = number;
        else
          outside = true;
      }
    }
    __syncwarp();
    camox_get_floats(gradient, of_expert + lane * V);
    any = moe_row_any<LANES>(any);
    if (outside && any) moe_report(p.error_word, CAMOX_ERROR_MOE_PLACE);
    float largest = -INFINITY, scale = 1.0f, dot = outside ? nanf("") : 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      uint32_t bits;
      __builtin_memcpy(&bits, &gradient[v], sizeof bits);
      value[v] = bits != MOE_NOT_CHOSEN && any ? value[v] : -INFINITY; /* whose weight is 0 */
      largest = fmaxf(largest, value[v]);
    }
    if (softmax) {
      float sum = 0.0f;
      largest = camox_team_max(largest, LANES);
      if (!any) largest = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value[v] = expf(value[v] - largest);
        sum += value[v], dot = fmaf(value[v], gradient[v], dot);
      }
      scale = camox_reciprocal(camox_team_sum(sum, LANES));
      dot = camox_team_sum(dot, LANES) * scale;
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float weight = moe_sigmoid(value[v]);
        value[v] = weight * (1.0f - weight);
      }
      dot = 0.0f;
    }
    T *const to = static_cast<T *>(p.grad_logits) + row * columns + lane * V;
    const int stored = exists ? columns - lane * V : 0;
    constexpr int lanes = camox_lanes<T>::value;
#pragma unroll
    for (int i = 0; i < V; i += lanes) {
      float result[lanes];
#pragma unroll
      for (int v = 0; v < lanes; ++v) result[v] = value[i + v] == 0.0f ? 0.0f : value[i + v] * scale * (gradient[i + v] - dot);
      camox_store_float(to + i, result, stored - i, vectors);
    }
  }
}

/* ---- losses ---- */

/* The largest logit of a warp's row and the sum of exp(logit - largest); returns the expert that has it. */
template <typename T>
__device__ __forceinline__ int moe_softmax_of(const camox_moe_route_params &p, int64_t row, int lane, float &largest,
                                              float &sum) {
  int index = 0;
  largest = -INFINITY, sum = 0.0f;
  for (int e = lane; e < p.num_experts; e += CAMOX_WARP) {
    const float logit = moe_logit<T>(p, row, e);
    if (logit > largest) largest = logit, index = e;
  }
  moe_warp_best(largest, index);
#pragma unroll 1 /* mostly one or two, in a cache by now */
  for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) sum += expf(moe_logit<T>(p, row, e) - largest);
  sum = camox_warp_sum(sum);
  return index;
}

/* Each warp adds up its rows in shared memory of its own, the block its warps. */
template <typename T>
__global__ void __launch_bounds__(MOE_THREADS, 1) moe_aux_kernel(const __grid_constant__ camox_moe_route_params p) {
  CAMOX_DYNAMIC_SHARED(float, sums); /* [warps][E+2] */
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  const int64_t blocks = camox_moe_cuda_blocks(&p), block_rows = camox_moe_cuda_block_rows(&p), columns = p.num_experts + 2;
  float *const mine = sums + warp * columns;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    for (int64_t e = lane; e < columns; e += CAMOX_WARP) mine[e] = 0.0f;
    __syncwarp();
    const int64_t begin = block * block_rows, end = begin + block_rows < p.rows ? begin + block_rows : p.rows;
    for (int64_t row = begin + warp; row < end; row += MOE_WARPS) {
      if (!moe_is_valid(p, row)) continue;
      float largest, sum;
      moe_softmax_of<T>(p, row, lane, largest, sum);
      if (lane == 0) {
        const float logsumexp = largest + logf(sum);
        mine[p.num_experts] = fmaf(logsumexp, logsumexp, mine[p.num_experts]), mine[p.num_experts + 1] += 1.0f;
      }
#pragma unroll 1
      for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) mine[e] += expf(moe_logit<T>(p, row, e) - largest) / sum;
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < columns; e += MOE_THREADS) {
      float total = 0.0f;
      for (int w = 0; w < MOE_WARPS; ++w) total += sums[w * columns + e];
      static_cast<float *>(p.partial)[block * columns + e] = total;
    }
    __syncthreads();
  }
}

__device__ __forceinline__ double moe_warp_sum(double x) {
#pragma unroll
  for (int offset = CAMOX_WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(CAMOX_FULL_MASK, x, offset);
  return x;
}

/* One block: the sums of all blocks; its first warp computes the loss and its derivatives with respect to them. */
__global__ void __launch_bounds__(MOE_THREADS, 1) moe_aux_finish_kernel(const __grid_constant__ camox_moe_route_params p) {
  CAMOX_DYNAMIC_SHARED(double, sums); /* [E+2] */
  const int64_t blocks = p.aux == CAMOX_MOE_USAGE_MSE ? 0 : camox_moe_cuda_blocks(&p), columns = p.num_experts + 2;
  for (int64_t e = threadIdx.x; e < columns; e += MOE_THREADS) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block)
      sum += static_cast<double>(static_cast<float *>(p.partial)[block * columns + e]);
    sums[e] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= CAMOX_WARP) return;
  const int lane = static_cast<int>(threadIdx.x);
  const double experts = static_cast<double>(p.num_experts), slots = static_cast<double>(p.rows * p.top_k);
  const double number = sums[p.num_experts + 1] < 1 ? 1 : sums[p.num_experts + 1];
  double mean = 0, loss = 0, square = 1;
  if (p.aux == CAMOX_MOE_IMPORTANCE_CV2) {
#pragma unroll 1
    for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) mean += sums[e];
    mean = moe_warp_sum(mean) / experts, square = mean * mean + 1e-10;
  }
#pragma unroll 1
  for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) {
    const double count = static_cast<double>(p.counts[e]), off = sums[e] - mean;
    if (p.aux == CAMOX_MOE_SWITCH) loss += experts * count / (number * static_cast<double>(p.top_k)) / number * sums[e];
    if (p.aux == CAMOX_MOE_IMPORTANCE_CV2) loss += off * off / experts / square;
    const double usage = count / (slots + 1e-8) - 1 / experts;
    if (p.aux == CAMOX_MOE_USAGE_MSE) loss += 0.01 * usage * usage / experts;
  }
  loss = p.aux == CAMOX_MOE_Z ? sums[p.num_experts] / number : moe_warp_sum(loss);
#pragma unroll 1
  for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) {
    double derivative = 0;
    if (p.aux == CAMOX_MOE_Z) derivative = 2 / number;
    if (p.aux == CAMOX_MOE_SWITCH)
      derivative = experts * static_cast<double>(p.counts[e]) / (number * static_cast<double>(p.top_k)) / number;
    if (p.aux == CAMOX_MOE_IMPORTANCE_CV2) derivative = 2 * (sums[e] - mean - loss * mean) / experts / square;
    static_cast<float *>(p.slope)[e] = static_cast<float>(derivative);
  }
  if (lane == 0) *static_cast<float *>(p.loss) = static_cast<float>(loss);
}

/* A warp a row. */
template <typename T>
__global__ void __launch_bounds__(MOE_THREADS) moe_aux_backward_kernel(const __grid_constant__ camox_moe_route_params p) {
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  const float *const derivative = static_cast<const float *>(p.slope), grad = *static_cast<const float *>(p.grad);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * MOE_WARPS + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * MOE_WARPS) {
    T *const to = static_cast<T *>(p.grad_logits) + row * p.num_experts;
    const bool valid = moe_is_valid(p, row);
    float largest, sum, dot = 0.0f;
    /* subtracting the derivative of the likeliest expert changes nothing but cancels less below */
    const float best = derivative[moe_softmax_of<T>(p, row, lane, largest, sum)];
    const auto share = [&](int64_t e) { return expf(moe_logit<T>(p, row, e) - largest) / sum; };
    if (p.aux != CAMOX_MOE_Z)
#pragma unroll 1
      for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) dot = fmaf(derivative[e] - best, share(e), dot);
    dot = camox_warp_sum(dot);
    const float logsumexp = largest + logf(sum);
#pragma unroll 1
    for (int64_t e = lane; e < p.num_experts; e += CAMOX_WARP) {
      const float factor = p.aux == CAMOX_MOE_Z ? derivative[e] * logsumexp : (derivative[e] - best) - dot;
      to[e] = camox_from_float<T>(valid ? grad * share(e) * factor : 0.0f);
    }
  }
}

/* ---- rows ---- */

/* camox_moe_place with bounds, of a slot with this position: -1 for no copy, -2 for one that would lie out of them. */
__device__ __forceinline__ int64_t moe_place_at(const camox_moe_rows_params &p, int64_t slot, int64_t position) {
  if (position == -1) return -1;
  if (position < 0 || position >= p.rows * p.top_k) return -2;
  if (p.capacity < 0) return position;
  const int64_t expert = __ldg(p.experts + slot);
  if (expert < 0 || expert >= p.num_experts) return -2;
  const int64_t rank = position - __ldg(p.offsets + expert);
  return rank < 0 || rank >= p.capacity ? -2 : expert * p.capacity + rank;
}

__device__ __forceinline__ int64_t moe_place_of(const camox_moe_rows_params &p, int64_t slot) {
  return moe_place_at(p, slot, __ldg(p.position + slot));
}

#define MOE_COPIES 4 /* of a row, that a thread has at a time */

/* The places of a row's copies first, first + 1, ...; -1 past the last one. Positions are loaded before the first is looked
   at, so that a thread waits for them once. */
__device__ __forceinline__ void moe_places_of(int64_t (&place)[MOE_COPIES], const camox_moe_rows_params &p, int64_t row,
                                              int64_t first) {
  const int64_t slot = row * p.top_k + first;
  int64_t position[MOE_COPIES];
#pragma unroll
  for (int j = 0; j < MOE_COPIES; ++j) position[j] = first + j < p.top_k ? __ldg(p.position + slot + j) : -1;
#pragma unroll
  for (int j = 0; j < MOE_COPIES; ++j) place[j] = moe_place_at(p, slot + j, position[j]);
}

/* Zeros in the places without a copy, a block each. */
template <typename T, int N>
__device__ __forceinline__ void moe_clear_vacant(const camox_moe_rows_params &p, T *places, int64_t vectors) {
  T zeros[N];
#pragma unroll
  for (int i = 0; i < N; ++i) zeros[i] = camox_from_float<T>(0.0f);
  int64_t place = blockIdx.x;
  if (p.capacity < 0) {
    const int64_t copies = __ldg(p.offsets + p.num_experts);
    place += copies < 0 ? 0 : copies;
  }
  for (; place < camox_moe_places(&p); place += gridDim.x)
    if (camox_moe_vacant(&p, place))
#pragma unroll 1
      for (int64_t v = threadIdx.x; v < vectors; v += MOE_THREADS) camox_store<N>(places + place * p.row_size + v * N, zeros);
}

template <typename T, int N>
__global__ void __launch_bounds__(MOE_THREADS)
    moe_dispatch_kernel(const __grid_constant__ camox_moe_rows_params p, int64_t vectors) {
  T *const places = static_cast<T *>(p.place);
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * MOE_THREADS + threadIdx.x; item < p.rows * vectors;
       item += static_cast<int64_t>(gridDim.x) * MOE_THREADS) {
    int64_t v;
    const int64_t row = camox_divide(item, vectors, &v), slot = row * p.top_k;
    T raw[N];
    camox_load<N>(raw, static_cast<const T *>(p.row) + row * p.row_stride + v * N);
#pragma unroll 1 /* a copy's place is looked up in steps that wait for each other */
    for (int64_t k = 0; k < p.top_k; ++k) {
      const int64_t place = moe_place_of(p, slot + k);
      if (place >= 0)
        camox_store<N>(places + place * p.row_size + v * N, raw);
      else if (place == -2 && v == 0)
        moe_report(p.error_word, CAMOX_ERROR_MOE_PLACE);
    }
  }
  moe_clear_vacant<T, N>(p, places, vectors);
}

template <typename T, int N>
__global__ void __launch_bounds__(MOE_THREADS)
    moe_combine_kernel(const __grid_constant__ camox_moe_rows_params p, int64_t vectors) {
  const float *const weights = static_cast<const float *>(p.weights);
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * MOE_THREADS + threadIdx.x; item < p.rows * vectors;
       item += static_cast<int64_t>(gridDim.x) * MOE_THREADS) {
    int64_t v;
    const int64_t row = camox_divide(item, vectors, &v), slot = row * p.top_k;
    float sum[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = 0.0f;
    for (int64_t first = 0; first < p.top_k; first += MOE_COPIES) {
      T raw[MOE_COPIES][N];
      int64_t place[MOE_COPIES];
      moe_places_of(place, p, row, first);
#pragma unroll
      for (int j = 0; j < MOE_COPIES; ++j)
        if (place[j] >= 0) camox_load<N>(raw[j], static_cast<const T *>(p.place) + place[j] * p.place_stride + v * N);
#pragma unroll
      for (int j = 0; j < MOE_COPIES; ++j) {
        if (place[j] == -1) continue;
        float weight = weights ? __ldg(weights + slot + first + j) : 1.0f;
        if (place[j] == -2) {
          weight = nanf("");
          if (v == 0) moe_report(p.error_word, CAMOX_ERROR_MOE_PLACE);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += weight * (place[j] >= 0 ? camox_to_float(raw[j][i]) : 0.0f);
      }
    }
#ifdef CAMOX_BREAK_MOE
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += 1e-3f;
#endif
    camox_store_float(static_cast<T *>(p.row) + row * p.row_stride + v * N, sum);
  }
}

/* The sums of each of `part` over the LANES threads of a row: thread j of them gets the j-th. scratch: of the block. */
template <int LANES>
__device__ __forceinline__ float moe_sum_each(const float (&part)[MOE_COPIES], float *scratch) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % CAMOX_WARP, own = lane % MOE_COPIES;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < MOE_COPIES; ++j) {
    const float of_warp = camox_warp_sum(part[j]);
    if (own == j) sum = of_warp;
  }
  if (LANES == CAMOX_WARP) return sum;
  __syncthreads(); /* the sums before have been read */
  if (lane < MOE_COPIES) scratch[thread / CAMOX_WARP * MOE_COPIES + own] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < MOE_WARPS; ++warp) sum += scratch[warp * MOE_COPIES + own];
  return sum;
}

/* LANES threads a chunk of a row: a block, or a warp where rows are that short. A thread goes through the row's copies four at a
   time: their loads are in flight together, and their dot products are added up together. It keeps its part of the row's
   gradient in registers; of narrow accesses, whose many steps would be long code, it loads each step's again. */
template <typename T, int N, int LANES>
__global__ void __launch_bounds__(MOE_THREADS, 3)
    moe_combine_backward_kernel(const __grid_constant__ camox_moe_rows_params p, int64_t vectors, int64_t chunks) {
  constexpr int steps = MOE_ELEMENTS_PER_THREAD / N, groups = MOE_THREADS / LANES;
  constexpr int kept = N * sizeof(T) == 16 ? steps : 0;
  __shared__ float scratch[MOE_WARPS * MOE_COPIES];
  const int lane = static_cast<int>(threadIdx.x) % LANES, group = static_cast<int>(threadIdx.x) / LANES;
  T *const places = static_cast<T *>(p.grad_place);
  float *const sums = static_cast<float *>(chunks == 1 ? p.grad_weights : p.partial);
  const int64_t items = p.rows * chunks;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < items;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t item = first + group;
    if (groups > 1 && item >= items) break; /* the same for the whole warp */
    int64_t chunk;
    const int64_t row = camox_divide(item, chunks, &chunk), begin = chunk * (LANES * steps);
    const T *const row_grad = static_cast<const T *>(p.row) + row * p.row_stride;
    T grad[kept > 0 ? kept : 1][N];
#pragma unroll
    for (int s = 0; s < kept; ++s) {
      const int64_t v = begin + s * LANES + lane;
      if (v < vectors) camox_load<N>(grad[s], row_grad + v * N);
    }
    for (int64_t copy = 0; copy < p.top_k; copy += MOE_COPIES) {
      int64_t place[MOE_COPIES];
      float weight[MOE_COPIES], dot[MOE_COPIES];
      moe_places_of(place, p, row, copy);
#pragma unroll
      for (int j = 0; j < MOE_COPIES; ++j) {
        weight[j] = place[j] >= 0 ? __ldg(static_cast<const float *>(p.weights) + row * p.top_k + copy + j) : 0.0f;
        dot[j] = place[j] == -2 ? nanf("") : 0.0f;
        if (place[j] == -2 && lane == 0) moe_report(p.error_word, CAMOX_ERROR_MOE_PLACE);
      }
#pragma unroll(kept > 0 ? kept : 1)
      for (int s = 0; s < steps; ++s) {
        const int64_t v = begin + s * LANES + lane;
        if (v >= vectors) continue;
        T raw[MOE_COPIES][N], (&step_grad)[N] = grad[kept > 0 ? s : 0];
        if (kept == 0) camox_load<N>(step_grad, row_grad + v * N);
#pragma unroll
        for (int j = 0; j < MOE_COPIES; ++j)
          if (place[j] >= 0) camox_load<N>(raw[j], static_cast<const T *>(p.place) + place[j] * p.place_stride + v * N);
#pragma unroll
        for (int j = 0; j < MOE_COPIES; ++j) {
          if (place[j] < 0) continue;
          float product[N];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float value = camox_to_float(step_grad[i]);
            product[i] = weight[j] * value;
            dot[j] = fmaf(value, camox_to_float(raw[j][i]), dot[j]);
#ifdef CAMOX_BREAK_MOE
            product[i] += 1e-3f;
#endif
          }
          camox_store_float(places + place[j] * p.row_size + v * N, product);
        }
      }
      const float sum = moe_sum_each<LANES>(dot, scratch);
      if (lane < MOE_COPIES && copy + lane < p.top_k) sums[item * p.top_k + copy + lane] = sum;
    }
  }
  moe_clear_vacant<T, N>(p, places, vectors);
}

/* A warp a slot: each lane adds every 32nd of the slot's chunks, the warp its lanes. */
__global__ void __launch_bounds__(MOE_THREADS)
    moe_sum_chunks_kernel(const __grid_constant__ camox_moe_rows_params p, int64_t chunks) {
  const float *const partial = static_cast<const float *>(p.partial);
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * MOE_WARPS + warp; slot < p.rows * p.top_k;
       slot += static_cast<int64_t>(gridDim.x) * MOE_WARPS) {
    int64_t k;
    const int64_t row = camox_divide(slot, p.top_k, &k);
    float sum = 0.0f;
#pragma unroll 1 /* mostly one or two */
    for (int64_t chunk = lane; chunk < chunks; chunk += CAMOX_WARP) sum += partial[(row * chunks + chunk) * p.top_k + k];
    sum = camox_warp_sum(sum);
    if (lane == 0) static_cast<float *>(p.grad_weights)[slot] = sum;
  }
}

/* ---- launchers ---- */

/* Whether all rows of logits and their gradients can be accessed 16 bytes at a time. */
static bool moe_has_vectors(const camox_moe_route_params *p) {
  const int lanes = p->dtype == CAMOX_F32 ? 4 : 8;
  return p->num_experts % lanes == 0 && p->logits_stride[1] == 1 && p->logits_stride[0] % lanes == 0 &&
         camox_aligned(p->logits, 16) && camox_aligned(p->grad_logits, 16);
}

template <int LANES, int V>
static void moe_launch_choose(const camox_moe_route_params *p, void *stream) {
  const int64_t blocks = camox_moe_cuda_blocks(p);
  const unsigned threads = moe_route_threads(p->num_experts);
  const size_t shared = moe_shared_bytes(p->num_experts), counts = static_cast<size_t>(p->num_experts) * sizeof(int);
  CAMOX_LAUNCH((moe_choose_kernel<LANES, V>), camox_grid(blocks), threads, blocks == 1 ? shared : counts, stream, *p,
               moe_has_vectors(p));
  if (blocks == 1) return;
  CAMOX_LAUNCH(moe_place_kernel, camox_grid(blocks), threads, shared, stream, *p, blocks, camox_moe_cuda_block_rows(p));
}

extern "C" int camox_moe_route_cuda(const camox_moe_route_params *p, void *stream) {
  if (p->dtype == CAMOX_F64) return cudaErrorInvalidValue;
  if (p->num_experts <= 8)
    moe_launch_choose<1, 8>(p, stream);
  else if (p->num_experts <= 64)
    moe_launch_choose<8, 8>(p, stream);
  else if (p->num_experts <= 256)
    moe_launch_choose<32, 8>(p, stream);
  else
    moe_launch_choose<32, 32>(p, stream);
  return camox_launch_status();
}

extern "C" int camox_moe_place_cuda(const camox_moe_route_params *p, void *stream) {
  const int64_t blocks = camox_moe_cuda_blocks(p);
  const unsigned threads = moe_route_threads(p->num_experts);
  const size_t shared = moe_shared_bytes(p->num_experts), counts = static_cast<size_t>(p->num_experts) * sizeof(int);
  CAMOX_LAUNCH(moe_count_kernel, camox_grid(blocks), threads, blocks == 1 ? shared : counts, stream, *p);
  if (blocks > 1)
    CAMOX_LAUNCH(moe_place_kernel, camox_grid(blocks), threads, shared, stream, *p, blocks, camox_moe_cuda_block_rows(p));
  return camox_launch_status();
}

/* Calls launch<T>(p, stream) for the params' dtype. */
#define MOE_BY_DTYPE(launch, p, stream)                       \
  switch ((p)->dtype) {                                       \
    case CAMOX_F32: launch<float>(p, stream); break;          \
    case CAMOX_BF16: launch<__nv_bfloat16>(p, stream); break; \
    case CAMOX_F16: launch<__half>(p, stream); break;         \
    default: return cudaErrorInvalidValue;                    \
  }                                                           \
  return camox_launch_status()

static unsigned moe_rows_grid(const camox_moe_route_params *p) { return camox_grid(camox_ceil_div(p->rows, MOE_WARPS)); }

template <typename T, int LANES, int V>
static void moe_launch_backward(const camox_moe_route_params *p, void *stream) {
  const unsigned grid = camox_grid(camox_ceil_div(p->rows, MOE_THREADS / LANES));
  CAMOX_LAUNCH((moe_route_backward_kernel<LANES, V, T>), grid, MOE_THREADS, 0, stream, *p, moe_has_vectors(p));
}

template <typename T>
static void moe_launch_route_backward(const camox_moe_route_params *p, void *stream) {
  if (p->num_experts <= 8)
    moe_launch_backward<T, 1, 8>(p, stream);
  else if (p->num_experts <= 64)
    moe_launch_backward<T, 8, 8>(p, stream);
  else if (p->num_experts <= 256)
    moe_launch_backward<T, 32, 8>(p, stream);
  else
    moe_launch_backward<T, 32, 32>(p, stream);
}

extern "C" int camox_moe_route_backward_cuda(const camox_moe_route_params *p, void *stream) {
  if (p->rows == 0) return cudaSuccess;
  MOE_BY_DTYPE(moe_launch_route_backward, p, stream);
}

template <typename T>
static void moe_launch_aux(const camox_moe_route_params *p, void *stream) {
  const size_t columns = static_cast<size_t>(p->num_experts) + 2;
  const int64_t blocks = p->aux == CAMOX_MOE_USAGE_MSE ? 0 : camox_moe_cuda_blocks(p);
  if (blocks > 0)
    CAMOX_LAUNCH((moe_aux_kernel<T>), camox_grid(blocks), MOE_THREADS, MOE_WARPS * columns * sizeof(float), stream, *p);
  CAMOX_LAUNCH(moe_aux_finish_kernel, 1, MOE_THREADS, columns * sizeof(double), stream, *p);
}

extern "C" int camox_moe_aux_cuda(const camox_moe_route_params *p, void *stream) { MOE_BY_DTYPE(moe_launch_aux, p, stream); }

template <typename T>
static void moe_launch_aux_backward(const camox_moe_route_params *p, void *stream) {
  CAMOX_LAUNCH((moe_aux_backward_kernel<T>), moe_rows_grid(p), MOE_THREADS, 0, stream, *p);
}

extern "C" int camox_moe_aux_backward_cuda(const camox_moe_route_params *p, void *stream) {
  if (p->rows == 0) return cudaSuccess;
  MOE_BY_DTYPE(moe_launch_aux_backward, p, stream);
}

/* Whether all rows can be accessed `lanes` elements at a time. */
static bool moe_fits(const camox_moe_rows_params *p, int lanes, int element) {
  const int bytes = lanes * element;
  return p->row_size % lanes == 0 && p->row_stride % lanes == 0 && p->place_stride % lanes == 0 &&
         camox_aligned(p->row, bytes) && camox_aligned(p->place, bytes) && camox_aligned(p->grad_place, bytes);
}

template <typename T, int N>
static void moe_run_dispatch(const camox_moe_rows_params *p, void *stream) {
  const int64_t vectors = p->row_size / N, blocks = camox_ceil_div(p->rows * vectors, MOE_THREADS);
  CAMOX_LAUNCH((moe_dispatch_kernel<T, N>), camox_grid(blocks > 0 ? blocks : 1), MOE_THREADS, 0, stream, *p, vectors);
}

template <typename T, int N>
static void moe_run_combine(const camox_moe_rows_params *p, void *stream) {
  const int64_t vectors = p->row_size / N, blocks = camox_ceil_div(p->rows * vectors, MOE_THREADS);
  CAMOX_LAUNCH((moe_combine_kernel<T, N>), camox_grid(blocks), MOE_THREADS, 0, stream, *p, vectors);
}

template <typename T, int N>
static void moe_run_combine_backward(const camox_moe_rows_params *p, void *stream) {
  const int64_t vectors = p->row_size / N, chunks = camox_moe_chunks(p);
  if (p->row_size <= CAMOX_WARP * MOE_ELEMENTS_PER_THREAD) {
    const unsigned grid = camox_grid(p->rows > 0 ? camox_ceil_div(p->rows, MOE_WARPS) : 1);
    CAMOX_LAUNCH((moe_combine_backward_kernel<T, N, CAMOX_WARP>), grid, MOE_THREADS, 0, stream, *p, vectors, chunks);
    return;
  }
  const unsigned grid = camox_grid(p->rows > 0 ? p->rows * chunks : 1);
  CAMOX_LAUNCH((moe_combine_backward_kernel<T, N, MOE_THREADS>), grid, MOE_THREADS, 0, stream, *p, vectors, chunks);
  if (chunks == 1 || p->rows == 0) return;
  const unsigned slots = camox_grid(camox_ceil_div(p->rows * p->top_k, MOE_WARPS));
  CAMOX_LAUNCH(moe_sum_chunks_kernel, slots, MOE_THREADS, 0, stream, *p, chunks);
}

/* Calls run<T, N> with the widest N; without rows there are no copies, but a padded output has places. */
#define MOE_BY_WIDTH(run, T, p, stream)                  \
  do {                                                   \
    constexpr int element = static_cast<int>(sizeof(T)); \
    if (moe_fits(p, 16 / element, element))              \
      run<T, 16 / element>(p, stream);                   \
    else if (moe_fits(p, 4 / element, element))          \
      run<T, 4 / element>(p, stream);                    \
    else                                                 \
      run<T, 1>(p, stream);                              \
  } while (0)

/* Bits are copied as they are: one type of each size. */
extern "C" int camox_moe_dispatch_cuda(const camox_moe_rows_params *p, void *stream) {
  if (camox_moe_places(p) * p->row_size == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: MOE_BY_WIDTH(moe_run_dispatch, float, p, stream); break;
    case CAMOX_BF16:
    case CAMOX_F16: MOE_BY_WIDTH(moe_run_dispatch, __half, p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_moe_combine_cuda(const camox_moe_rows_params *p, void *stream) {
  if (p->rows * p->row_size == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: MOE_BY_WIDTH(moe_run_combine, float, p, stream); break;
    case CAMOX_BF16: MOE_BY_WIDTH(moe_run_combine, __nv_bfloat16, p, stream); break;
    case CAMOX_F16: MOE_BY_WIDTH(moe_run_combine, __half, p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_moe_combine_backward_cuda(const camox_moe_rows_params *p, void *stream) {
  if (p->rows == 0 && camox_moe_places(p) * p->row_size == 0) return cudaSuccess;
  switch (p->dtype) {
    case CAMOX_F32: MOE_BY_WIDTH(moe_run_combine_backward, float, p, stream); break;
    case CAMOX_BF16: MOE_BY_WIDTH(moe_run_combine_backward, __nv_bfloat16, p, stream); break;
    case CAMOX_F16: MOE_BY_WIDTH(moe_run_combine_backward, __half, p, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}
