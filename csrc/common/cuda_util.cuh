/* What every .cu of the library stands on: launches, 128-bit accesses, conversions, fixed-order reductions, cp.async and
   tensor-core steps. One source for nvcc and for the CUDA emulator (tests/cuda/emulator), which defines CAMOX_CUDA_EMULATOR.
   CAMOX_CUDA_ARCH is __CUDA_ARCH__ in nvcc's device passes, the tested architecture in the emulator, 0 in nvcc's host pass. */
#ifndef CAMOX_CUDA_UTIL_CUH
#define CAMOX_CUDA_UTIL_CUH

#include <stdint.h>

#if defined(CAMOX_CUDA_EMULATOR)
#define CAMOX_CUDA_ARCH CAMOX_EMULATED_ARCH
#include "cuda_emulator.h"
#else
#define CAMOX_EMULATOR_OPTIMIZED /* nvcc optimizes every function */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#if defined(__CUDA_ARCH__)
#define CAMOX_CUDA_ARCH __CUDA_ARCH__
#else
#define CAMOX_CUDA_ARCH 0
#endif
#endif

#define CAMOX_WARP 32
#define CAMOX_FULL_MASK 0xffffffffu

/* CAMOX_LAUNCH((kernel<T, 4>), grid, block, shared_bytes, stream, args...); then `return camox_launch_status();`
   CAMOX_DYNAMIC_SHARED(float, tile); declares `float *tile`, 16-byte aligned, on the launch's dynamic shared memory. */
#if defined(CAMOX_CUDA_EMULATOR)
#define CAMOX_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), camox_emulator_launch_kernel(#kernel, kernel, dim3(grid), dim3(block), size_t(shared_bytes), __VA_ARGS__))
#define CAMOX_DYNAMIC_SHARED(type, name) type *const name = static_cast<type *>(camox_emulator_dynamic_shared())
#else
#define CAMOX_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (kernel)<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
extern __shared__ __align__(16) unsigned char camox_dynamic_shared[];
#define CAMOX_DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(camox_dynamic_shared)
#endif

/* Whether the device has tensor cores of bfloat16 and cp.async, and whether kernels of those are compiled at all: the emulator
   runs one architecture, and nvcc's host code must not depend on the device's. */
#if defined(CAMOX_CUDA_EMULATOR)
static constexpr bool camox_may_be_sm80 = CAMOX_CUDA_ARCH >= 800;
static inline bool camox_device_is_sm80(void) { return camox_may_be_sm80; }
#else
static constexpr bool camox_may_be_sm80 = true;
static inline bool camox_device_is_sm80(void) {
  int device = 0, generation = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  return cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && generation >= 8;
}
#endif

/* Clears the error it returns, so a failed launch is reported once, by the call that made it. */
static inline int camox_launch_status(void) { return static_cast<int>(cudaGetLastError()); }

template <typename A, typename B>
__host__ __device__ constexpr int64_t camox_ceil_div(A a, B b) {
  return (static_cast<int64_t>(a) + b - 1) / b;
}

/* Blocks for `items` of work: grid.x alone, which reaches 2^31-1, and the kernel strides over the rest in 64 bits:
   for (int64_t i = blockIdx.x; i < items; i += gridDim.x). 0 items: launch nothing. The emulator lowers the cap to run the
   stride.
 */
static inline unsigned camox_grid(int64_t items) {
#if defined(CAMOX_CUDA_EMULATOR)
  const int64_t cap = camox_emulator_grid_cap();
#else
  const int64_t cap = INT32_MAX;
#endif
  return static_cast<unsigned>(items < cap ? items : cap);
}

/* Where a kernel's blocks run: multiprocessors, and blocks of the kernel that each holds at once. With less than `busy` blocks
   it waits for memory, and takes as long as with those: half of what it can hold, and 8 warps, two for each scheduler. */
struct camox_places {
  int64_t processors, blocks, busy;
  int64_t all() const { return processors * blocks; }
};

template <typename Kernel>
static inline camox_places camox_places_of(Kernel *kernel, int threads, size_t shared_bytes = 0) {
  int device = 0, processors = 0, blocks = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void *>(kernel), threads, shared_bytes) !=
          cudaSuccess ||
      blocks == 0)
    return {1, 1, 1}; /* the launch will report why */
  const int half = (blocks + 1) / 2, warps = static_cast<int>(camox_ceil_div(8 * CAMOX_WARP, threads));
  return {processors, blocks, half > warps ? half : warps < blocks ? warps : blocks};
}

/* Blocks of a launch that the multiprocessor with the most of them runs; its last ones count as what keeps it busy at least. */
static inline int64_t camox_busiest(const camox_places &places, int64_t blocks) {
  const int64_t at_once = places.all();
  const int64_t remaining = camox_ceil_div(blocks % at_once, places.processors);
  const int64_t last = remaining == 0 ? 0 : remaining < places.busy ? places.busy : remaining;
  return blocks / at_once * places.blocks + last;
}

/* ---- conversions ---- */
__device__ __forceinline__ float camox_to_float(float x) { return x; }
__device__ __forceinline__ float camox_to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float camox_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
struct camox_is_bfloat16 {
  static constexpr bool value = false;
};
template <>
struct camox_is_bfloat16<__nv_bfloat16> {
  static constexpr bool value = true;
};

/* N elements as float. A pair of bfloat16 is one word, whose halves are the upper halves of floats: element by element nvcc
   takes two instructions for the second. */
template <int N, typename T>
__device__ __forceinline__ void camox_to_floats(float (&to)[N], const T *from) {
  if constexpr (camox_is_bfloat16<T>::value && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      uint32_t pair;
      __builtin_memcpy(&pair, static_cast<const void *>(from + i), sizeof pair);
      const uint32_t low = pair << 16, high = pair & 0xffff0000u;
      __builtin_memcpy(&to[i], &low, sizeof low);
      __builtin_memcpy(&to[i + 1], &high, sizeof high);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = camox_to_float(from[i]);
  }
}

template <typename T>
__device__ __forceinline__ T camox_from_float(float x);
template <>
__device__ __forceinline__ float camox_from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half camox_from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 camox_from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <bool CONDITION, typename A, typename B>
struct camox_select {
  typedef A type;
};
template <typename A, typename B>
struct camox_select<false, A, B> {
  typedef B type;
};

/* ---- vector accesses ---- */
template <int BYTES>
struct camox_word;
template <>
struct camox_word<16> {
  typedef uint4 type;
};
template <>
struct camox_word<8> {
  typedef uint2 type;
};
template <>
struct camox_word<4> {
  typedef uint32_t type;
};
template <>
struct camox_word<2> {
  typedef uint16_t type;
};

/* How many T one 128-bit access moves. */
template <typename T>
struct camox_lanes {
  static constexpr int value = 16 / static_cast<int>(sizeof(T));
};

__host__ __device__ static inline bool camox_aligned(const void *p, int bytes) {
  return (reinterpret_cast<uintptr_t>(p) & static_cast<uintptr_t>(bytes - 1)) == 0;
}

/* N elements in one access; p must be aligned to all of them. Loads take the read-only path:
   nobody may write *p while the kernel runs. */
template <int N, typename T>
__device__ __forceinline__ void camox_load(T (&to)[N], const T *p) {
  typedef typename camox_word<N *static_cast<int>(sizeof(T))>::type word;
  const word bits = __ldg(reinterpret_cast<const word *>(p));
  __builtin_memcpy(static_cast<void *>(to), &bits, sizeof bits);
}

/* One store to global memory. As plain C++ nvcc may split a 16-byte store into four; the emulator, which has no inline
   assembly, stores in C++ and checks alignment and bounds. */
__device__ __forceinline__ void camox_store_word(uint16_t *p, uint16_t word) { *p = word; }
__device__ __forceinline__ void camox_store_word(uint32_t *p, uint32_t word) { *p = word; }
__device__ __forceinline__ void camox_store_word(uint2 *p, uint2 word) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
  *p = word;
#else
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(word.x), "r"(word.y) : "memory");
#endif
}
__device__ __forceinline__ void camox_store_word(uint4 *p, uint4 word) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
  *p = word;
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
#endif
}

template <int N, typename T>
__device__ __forceinline__ void camox_store(T *p, const T (&from)[N]) {
  typedef typename camox_word<N *static_cast<int>(sizeof(T))>::type word;
  word bits;
  __builtin_memcpy(&bits, static_cast<const void *>(from), sizeof bits);
  camox_store_word(reinterpret_cast<word *>(p), bits);
}

/* The same between registers and shared memory, whose contents other threads of the block write. */
template <int N, typename T>
__device__ __forceinline__ void camox_store_shared(T *p, const T (&from)[N]) {
  typedef typename camox_word<N *static_cast<int>(sizeof(T))>::type word;
  word bits;
  __builtin_memcpy(&bits, static_cast<const void *>(from), sizeof bits);
  *reinterpret_cast<word *>(p) = bits;
}

template <int N, typename T>
__device__ __forceinline__ void camox_load_shared(T (&to)[N], const T *p) {
  typedef typename camox_word<N *static_cast<int>(sizeof(T))>::type word;
  const word bits = *reinterpret_cast<const word *>(p);
  __builtin_memcpy(static_cast<void *>(to), &bits, sizeof bits);
}

/* N floats in pieces of up to 16 bytes, to which p is aligned: from global memory, read only; to and from shared memory, where
   piece k lies k * step pieces from p. */
template <int N>
static constexpr int camox_piece = N < 4 ? N : 4;

template <int N>
__device__ __forceinline__ void camox_load_floats(float (&to)[N], const float *p) {
#pragma unroll
  for (int i = 0; i < N; i += camox_piece<N>) {
    float part[camox_piece<N>];
    camox_load(part, p + i);
#pragma unroll
    for (int j = 0; j < camox_piece<N>; ++j) to[i + j] = part[j];
  }
}

template <int N>
__device__ __forceinline__ void camox_put_floats(float *p, const float (&from)[N], int step = 1) {
#pragma unroll
  for (int i = 0; i < N; i += camox_piece<N>) {
    float part[camox_piece<N>];
#pragma unroll
    for (int j = 0; j < camox_piece<N>; ++j) part[j] = from[i + j];
    camox_store_shared(p + i * step, part);
  }
}

template <int N>
__device__ __forceinline__ void camox_get_floats(float (&to)[N], const float *p, int step = 1) {
#pragma unroll
  for (int i = 0; i < N; i += camox_piece<N>) {
    float part[camox_piece<N>];
    camox_load_shared(part, p + i * step);
#pragma unroll
    for (int j = 0; j < camox_piece<N>; ++j) to[i + j] = part[j];
  }
}

/* N floats rounded to T, packed two at a time where T is a half type. */
template <int N, typename T>
__device__ __forceinline__ void camox_round(T (&to)[N], const float (&from)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      if constexpr (camox_is_bfloat16<T>::value) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
        to[i] = __low2bfloat16(pair), to[i + 1] = __high2bfloat16(pair);
      } else {
        const __half2 pair = __floats2half2_rn(from[i], from[i + 1]);
        to[i] = __low2half(pair), to[i + 1] = __high2half(pair);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = camox_from_float<T>(from[i]);
  }
}

/* N floats to memory; a tail (n < N) or an address off the alignment goes element by element. */
template <int N, typename T>
__device__ __forceinline__ void camox_store_float(T *p, const float (&from)[N], int64_t n = N, bool aligned = true) {
  T rounded[N];
  camox_round(rounded, from);
  if (aligned && n >= N) {
    camox_store<N>(p, rounded);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < n) p[i] = rounded[i];
  }
}

/* N elements as float; those from n on are not touched in memory and become `fill`. */
template <int N, typename T>
__device__ __forceinline__ void camox_load_float(float (&to)[N], const T *p, int64_t n = N, bool aligned = true,
                                                 float fill = 0.0f) {
  if (aligned && n >= N) {
    T raw[N];
    camox_load<N>(raw, p);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = camox_to_float(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = i < n ? camox_to_float(__ldg(p + i)) : fill;
  }
}

/* n / d and its remainder for n >= 0, d > 0: 64-bit division costs a GPU some hundred instructions, so 32 bits where they do.
 */
__device__ __forceinline__ int64_t camox_divide(int64_t n, int64_t d, int64_t *remainder) {
  if (((n | d) >> 32) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
    *remainder = static_cast<int64_t>(static_cast<uint32_t>(n) - quotient * static_cast<uint32_t>(d));
    return static_cast<int64_t>(quotient);
  }
  const int64_t quotient = n / d;
  *remainder = n - quotient * d;
  return quotient;
}

/* One instruction and 1 or 2 ulp each, where the exact function takes ten and a branch. Subnormals count as 0: keep x, and what
   camox_exp2 gives, >= FLT_MIN. */
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
#define CAMOX_APPROXIMATE(name, instruction, exact) \
  __device__ __forceinline__ float name(float x) { return exact; }
#else
#define CAMOX_APPROXIMATE(name, instruction, exact)                \
  __device__ __forceinline__ float name(float x) {                 \
    float y;                                                       \
    asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                                      \
  }
#endif
CAMOX_APPROXIMATE(camox_sqrt, "sqrt", sqrtf(x))
CAMOX_APPROXIMATE(camox_rsqrt, "rsqrt", 1.0f / sqrtf(x))
CAMOX_APPROXIMATE(camox_exp2, "ex2", exp2f(x))
CAMOX_APPROXIMATE(camox_reciprocal, "rcp", 1.0f / x)
#undef CAMOX_APPROXIMATE

/* What follows from x is computed where it is used from here on: nvcc would compute it before the loop around, and hold it in
   registers that the loop needs. */
__device__ __forceinline__ void camox_compute_late(int &x) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
  (void)x;
#else
  asm volatile("" : "+r"(x));
#endif
}
/* x itself is computed here, once: nvcc would compute it again in each branch that uses it. */
__device__ __forceinline__ void camox_compute_late(float &x) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
  (void)x;
#else
  asm volatile("" : "+f"(x));
#endif
}

/* ---- reductions: one order for one block size, so the same bits on every run ---- */
/* Over the lanes of a team: 1, 2, 4, ... 32 adjacent ones, of a warp whose lanes all call. */
__device__ __forceinline__ float camox_team_sum(float x, int team) {
  for (int offset = team / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(CAMOX_FULL_MASK, x, offset);
  return x;
}

__device__ __forceinline__ float camox_team_max(float x, int team) {
  for (int offset = team / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(CAMOX_FULL_MASK, x, offset));
  return x;
}

__device__ __forceinline__ float camox_warp_sum(float x) { return camox_team_sum(x, CAMOX_WARP); }
__device__ __forceinline__ float camox_warp_max(float x) { return camox_team_max(x, CAMOX_WARP); }

/* Sum over a block of THREADS (x only, a multiple of 32), returned to every thread. scratch: THREADS / 32 floats of shared
   memory; the first barrier protects what the previous use left there. */
template <int THREADS>
__device__ __forceinline__ float camox_block_sum(float x, float *scratch) {
  static_assert(THREADS % CAMOX_WARP == 0 && THREADS <= 1024, "whole warps");
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  x = camox_warp_sum(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return camox_warp_sum(lane < THREADS / CAMOX_WARP ? scratch[lane] : 0.0f);
}

/* ---- cp.async: 16 or 8 bytes from global to shared memory; only the first valid_bytes are read, the rest become zeros ----
   sm_75 has none: the copy is made at once, and commit and wait are empty. */
#if defined(CAMOX_CUDA_EMULATOR) && CAMOX_CUDA_ARCH >= 800
#define camox_cp_async_16(shared, global, valid_bytes) \
  camox_emulator_cp_async(shared, global, 16, valid_bytes, CAMOX_EMULATOR_SITE("cp.async"))
#define camox_cp_async_8(shared, global, valid_bytes) \
  camox_emulator_cp_async(shared, global, 8, valid_bytes, CAMOX_EMULATOR_SITE("cp.async"))
static inline void camox_cp_async_commit(void) { camox_emulator_cp_async_commit(); }
template <int PENDING>
static inline void camox_cp_async_wait(void) {
  camox_emulator_cp_async_wait(PENDING);
}
#else
template <int BYTES>
__device__ __forceinline__ void camox_cp_async(void *shared, const void *global, int valid_bytes) {
#if CAMOX_CUDA_ARCH >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) /* past L1, which smaller copies pass through */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid_bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(valid_bytes), "n"(BYTES)
                 : "memory");
#else
  if (valid_bytes == BYTES) {
    typedef typename camox_word<BYTES>::type word;
    *static_cast<word *>(shared) = *static_cast<const word *>(global);
  } else {
    for (int i = 0; i < BYTES; ++i)
      static_cast<unsigned char *>(shared)[i] = i < valid_bytes ? static_cast<const unsigned char *>(global)[i] : 0;
  }
#endif
}
__device__ __forceinline__ void camox_cp_async_16(void *shared, const void *global, int valid_bytes) {
  camox_cp_async<16>(shared, global, valid_bytes);
}
__device__ __forceinline__ void camox_cp_async_8(void *shared, const void *global, int valid_bytes) {
  camox_cp_async<8>(shared, global, valid_bytes);
}
__device__ __forceinline__ void camox_cp_async_commit(void) {
#if CAMOX_CUDA_ARCH >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Returns once at most PENDING of this thread's latest groups are still under way; other threads need a barrier as well. */
template <int PENDING>
__device__ __forceinline__ void camox_cp_async_wait(void) {
#if CAMOX_CUDA_ARCH >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
#endif

/* ---- ldmatrix: four 8 x 8 matrices of 16-bit elements from shared memory. Lanes 8i ... 8i+7 name the rows of the i-th, 16
   bytes each. With g = lane / 4, t = lane % 4 a lane gets in to[i] columns 2t, 2t+1 of row g; TRANSPOSED rows 2t, 2t+1 of
   column g ---- */
template <bool TRANSPOSED>
__device__ __forceinline__ void camox_ldmatrix_x4(uint32_t (&to)[4], const void *row) {
#if defined(CAMOX_CUDA_EMULATOR)
  camox_emulator_ldmatrix(to, row, TRANSPOSED, CAMOX_EMULATOR_SITE("ldmatrix"));
#elif CAMOX_CUDA_ARCH > 0
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
#endif
}

/* float32 as TF32 has it, whose ten bits of mantissa tensor cores take: the nearest, ties away from 0. */
__device__ __forceinline__ float camox_to_tf32(float x) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH < 800
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0x1000u) & 0xffffe000u;
  __builtin_memcpy(&x, &bits, sizeof bits);
#else
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  x = __uint_as_float(bits);
#endif
  return x;
}

/* ---- tensor cores: d = a * b + d, float32 sums, fragments as the PTX ISA lays them out. With g = lane / 4, t = lane % 4:
   a[0], a[1]: rows g, g+8 of columns 2t, 2t+1;  a[2], a[3]: the same of columns 2t+8, 2t+9 (k16 only)
   b[0]: rows 2t, 2t+1 of column g;  b[1]: rows 2t+8, 2t+9 (k16 only)
   d[0], d[1]: row g, columns 2t, 2t+1;  d[2], d[3]: row g+8
   Of TF32, m16n8k8: a[0], a[1]: rows g, g+8 of column t;  a[2], a[3]: of column t+4;  b[0], b[1]: rows t, t+4 of column g ----
 */
template <typename T>
__device__ __forceinline__ void camox_mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  static_assert(sizeof(T) == 2, "float16 or bfloat16");
#if defined(CAMOX_CUDA_EMULATOR)
  if (CAMOX_CUDA_ARCH < 800 && !std::is_same_v<T, __half>) camox_emulator_fail("sm_75 has no bfloat16 mma");
  camox_emulator_mma<T, 8>(d, a, b, CAMOX_EMULATOR_SITE("mma.m16n8k8"));
#elif CAMOX_CUDA_ARCH > 0
  if constexpr (!camox_is_bfloat16<T>::value) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  } else {
#if CAMOX_CUDA_ARCH >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#else
    __trap();
#endif
  }
#endif
}

/* Operands from camox_to_tf32; needs sm_80. */
__device__ __forceinline__ void camox_mma_tf32_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if CAMOX_CUDA_ARCH > 0 && CAMOX_CUDA_ARCH < 800
#if defined(CAMOX_CUDA_EMULATOR)
  camox_emulator_fail("sm_75 has no TF32 mma");
#else
  __trap();
#endif
  (void)d, (void)a, (void)b;
#elif defined(CAMOX_CUDA_EMULATOR)
  camox_emulator_mma_payload<float> payload = {a, b, d};
  camox_emulator_collect(CAMOX_FULL_MASK, &payload, camox_emulator_mma_run_tf32, CAMOX_EMULATOR_SITE("mma.m16n8k8.tf32"));
#elif CAMOX_CUDA_ARCH > 0
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* sm_75 makes it of two m16n8k8; bfloat16 needs sm_80. */
template <typename T>
__device__ __forceinline__ void camox_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if CAMOX_CUDA_ARCH > 0 && CAMOX_CUDA_ARCH < 800
  const uint32_t low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]}, first[1] = {b[0]}, second[1] = {b[1]};
  camox_mma_m16n8k8<T>(d, low, first);
  camox_mma_m16n8k8<T>(d, high, second);
#elif defined(CAMOX_CUDA_EMULATOR)
  camox_emulator_mma<T, 16>(d, a, b, CAMOX_EMULATOR_SITE("mma.m16n8k16"));
#elif CAMOX_CUDA_ARCH > 0
  if constexpr (camox_is_bfloat16<T>::value)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#endif
