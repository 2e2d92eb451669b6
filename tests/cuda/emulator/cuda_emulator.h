/* Compiles the unchanged .cu sources with g++ and runs them on the CPU: every CUDA thread is a fiber, every barrier and warp
   operation a rendezvous of fibers. Stricter than hardware on purpose: a lane that a mask names must take part, a thread must
   not leave before a barrier that others reach, a cp.async lands at its wait and not before.

   CUDA's own headers come first (float16, bfloat16 and vector types are theirs), then the qualifiers are redefined.
   A __shared__ variable is a thread_local of the OS thread that runs the block: all fibers of a block see one copy. It must be
   the only thread_local of its shared object, because the runtime fills that object's TLS block with NaN before each block. */
#ifndef CAMOX_CUDA_EMULATOR_H
#define CAMOX_CUDA_EMULATOR_H

#include <cuda_runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __global__ __attribute__((noinline, noclone))
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__
#define __launch_bounds__(...)
/* Of a function in which kernels spend more time than g++ needs to optimize it. */
#define CAMOX_EMULATOR_OPTIMIZED __attribute__((optimize("O3")))
#define __forceinline__ inline /* not into every kernel: that is most of what there would be to compile */
#define __grid_constant__

/* What a fiber can see of itself; the runtime's fiber begins with it. */
struct camox_emulator_thread {
  uint3 thread_idx, block_idx;
  dim3 block_dim, grid_dim;
};

/* Where in the source a rendezvous stands, and under which name CUDA knows it. */
struct camox_emulator_site {
  const char *what, *file;
  int line;
};

/* A complete warp operation: payload[lane] is what lane deposited, for the lanes of `mask`. */
struct camox_emulator_lanes {
  unsigned mask;
  void *payload[32];
};
typedef void camox_emulator_collective(camox_emulator_lanes *lanes);

struct camox_emulator_launch_info {
  const char *text;
  const void *kernel;
  void (*invoke)(const void *bound);
  const void *bound;
  size_t parameter_bytes;
  int arch;
};

extern "C" {
camox_emulator_thread *camox_emulator_self(void) __attribute__((const));
[[noreturn]] void camox_emulator_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void camox_emulator_fail_lane(int lane, const char *format, ...) __attribute__((format(printf, 2, 3)));
void camox_emulator_launch(const camox_emulator_launch_info *info, dim3 grid, dim3 block, size_t shared_bytes);
int camox_emulator_barrier(int predicate, int operation, const camox_emulator_site *site);
void camox_emulator_warp(unsigned mask, void *payload, camox_emulator_collective *run, const camox_emulator_site *site);
void *camox_emulator_dynamic_shared(void);
int camox_emulator_is_shared(const void *p);
void camox_emulator_cp_async(void *shared, const void *global, int bytes, int valid_bytes, const camox_emulator_site *site);
void camox_emulator_cp_async_commit(void);
void camox_emulator_cp_async_wait(int pending_groups);
void camox_emulator_pause(void);
int64_t camox_emulator_grid_cap(void);
cudaError_t camox_emulator_device_attribute(int *value, enum cudaDeviceAttr attribute, int arch);
}

#define threadIdx (camox_emulator_self()->thread_idx)
#define blockIdx (camox_emulator_self()->block_idx)
#define blockDim (camox_emulator_self()->block_dim)
#define gridDim (camox_emulator_self()->grid_dim)
#define warpSize 32

/* The memory clobber keeps g++ from holding shared memory in registers across a rendezvous. */
#define CAMOX_EMULATOR_FENCE() __asm__ volatile("" ::: "memory")
#define CAMOX_EMULATOR_SITE(what)                                       \
  ([]() -> const camox_emulator_site * {                                \
    static const camox_emulator_site site = {what, __FILE__, __LINE__}; \
    return &site;                                                       \
  }())

static inline int camox_emulator_sync(int predicate, int operation, const camox_emulator_site *site) {
  CAMOX_EMULATOR_FENCE();
  const int result = camox_emulator_barrier(predicate, operation, site);
  CAMOX_EMULATOR_FENCE();
  return result;
}

enum { CAMOX_EMULATOR_COUNT = 0, CAMOX_EMULATOR_AND = 1, CAMOX_EMULATOR_OR = 2 };
#define __syncthreads() ((void)camox_emulator_sync(0, CAMOX_EMULATOR_COUNT, CAMOX_EMULATOR_SITE("__syncthreads()")))
#define __syncthreads_count(p) camox_emulator_sync((p) != 0, CAMOX_EMULATOR_COUNT, CAMOX_EMULATOR_SITE("__syncthreads_count()"))
#define __syncthreads_and(p) camox_emulator_sync((p) != 0, CAMOX_EMULATOR_AND, CAMOX_EMULATOR_SITE("__syncthreads_and()"))
#define __syncthreads_or(p) camox_emulator_sync((p) != 0, CAMOX_EMULATOR_OR, CAMOX_EMULATOR_SITE("__syncthreads_or()"))

static inline void camox_emulator_collect(unsigned mask, void *payload, camox_emulator_collective *run,
                                          const camox_emulator_site *site) {
  CAMOX_EMULATOR_FENCE();
  camox_emulator_warp(mask, payload, run, site);
  CAMOX_EMULATOR_FENCE();
}

static inline int camox_emulator_lane(void) {
  const camox_emulator_thread *t = camox_emulator_self();
  return (t->thread_idx.x + t->block_dim.x * (t->thread_idx.y + t->block_dim.y * t->thread_idx.z)) & 31;
}

static inline void camox_emulator_no_exchange(camox_emulator_lanes *) {}
#define CAMOX_EMULATOR_SYNCWARP(mask) \
  camox_emulator_collect(mask, nullptr, camox_emulator_no_exchange, CAMOX_EMULATOR_SITE("__syncwarp()"))
#define __syncwarp(...) CAMOX_EMULATOR_SYNCWARP(0xffffffffu __VA_OPT__(&(__VA_ARGS__)))

struct camox_emulator_shuffle_payload {
  uint64_t in, out;
  int source;
};

void camox_emulator_shuffle_run(camox_emulator_lanes *lanes);

template <typename T>
static inline T camox_emulator_shuffle(unsigned mask, T value, int source, const camox_emulator_site *site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  camox_emulator_shuffle_payload payload = {0, 0, source};
  memcpy(&payload.in, &value, sizeof(T));
  camox_emulator_collect(mask, &payload, camox_emulator_shuffle_run, site);
  memcpy(static_cast<void *>(&value), &payload.out, sizeof(T));
  return value;
}

/* Source lanes as the PTX ISA gives them for shfl.sync; a lane out of its segment keeps its own value. */
static inline int camox_emulator_source_idx(int lane, int from, int width) {
  return (lane & ~(width - 1)) | (from & (width - 1));
}
static inline int camox_emulator_source_up(int lane, int delta, int width) {
  return lane - delta < (lane & ~(width - 1)) ? lane : lane - delta;
}
static inline int camox_emulator_source_down(int lane, int delta, int width) {
  return (lane & (width - 1)) + delta >= width ? lane : lane + delta;
}
static inline int camox_emulator_source_xor(int lane, int bits, int width) {
  return (lane ^ bits) > (lane | (width - 1)) ? lane : lane ^ bits;
}

/* Of a device of the architecture that the kernels are compiled for. */
#define cudaDeviceGetAttribute(value, attribute, device) \
  ((void)(device), camox_emulator_device_attribute(value, attribute, CAMOX_EMULATED_ARCH))

#define CAMOX_EMULATOR_WIDTH_(unused, width, ...) width
#define CAMOX_EMULATOR_SHUFFLE(how, name, mask, value, by, ...)                                                        \
  camox_emulator_shuffle(                                                                                              \
      mask, value,                                                                                                     \
      camox_emulator_source_##how(camox_emulator_lane(), by, CAMOX_EMULATOR_WIDTH_(0 __VA_OPT__(, ) __VA_ARGS__, 32)), \
      CAMOX_EMULATOR_SITE(name))
#define __shfl_sync(mask, value, by, ...) CAMOX_EMULATOR_SHUFFLE(idx, "__shfl_sync()", mask, value, by, ##__VA_ARGS__)
#define __shfl_up_sync(mask, value, by, ...) CAMOX_EMULATOR_SHUFFLE(up, "__shfl_up_sync()", mask, value, by, ##__VA_ARGS__)
#define __shfl_down_sync(mask, value, by, ...) \
  CAMOX_EMULATOR_SHUFFLE(down, "__shfl_down_sync()", mask, value, by, ##__VA_ARGS__)
#define __shfl_xor_sync(mask, value, by, ...) CAMOX_EMULATOR_SHUFFLE(xor, "__shfl_xor_sync()", mask, value, by, ##__VA_ARGS__)

struct camox_emulator_vote_payload {
  uint64_t in, out;
};

template <typename Fold>
static inline void camox_emulator_fold(camox_emulator_lanes *lanes, uint64_t start, Fold fold) {
  uint64_t total = start;
  for (int lane = 0; lane < 32; ++lane)
    if (lanes->mask >> lane & 1)
      total = fold(total, static_cast<camox_emulator_vote_payload *>(lanes->payload[lane])->in, lane);
  for (int lane = 0; lane < 32; ++lane)
    if (lanes->mask >> lane & 1) static_cast<camox_emulator_vote_payload *>(lanes->payload[lane])->out = total;
}

static inline void camox_emulator_ballot_run(camox_emulator_lanes *lanes) {
  camox_emulator_fold(lanes, 0, [](uint64_t a, uint64_t b, int lane) { return a | (b << lane); });
}

static inline unsigned camox_emulator_ballot(unsigned mask, bool predicate, const camox_emulator_site *site) {
  camox_emulator_vote_payload payload = {predicate, 0};
  camox_emulator_collect(mask, &payload, camox_emulator_ballot_run, site);
  return static_cast<unsigned>(payload.out);
}
#define __ballot_sync(mask, p) camox_emulator_ballot(mask, (p) != 0, CAMOX_EMULATOR_SITE("__ballot_sync()"))
#define __any_sync(mask, p) (camox_emulator_ballot(mask, (p) != 0, CAMOX_EMULATOR_SITE("__any_sync()")) != 0)
#define __all_sync(mask, p) (camox_emulator_ballot(mask, (p) == 0, CAMOX_EMULATOR_SITE("__all_sync()")) == 0)

template <typename T>
static inline T camox_emulator_reduce(unsigned mask, T value, camox_emulator_collective *run, const camox_emulator_site *site) {
  static_assert(std::is_same_v<T, unsigned> || std::is_same_v<T, int>);
  camox_emulator_vote_payload payload = {static_cast<uint64_t>(static_cast<int64_t>(value)), 0};
  camox_emulator_collect(mask, &payload, run, site);
  return static_cast<T>(payload.out);
}

#define CAMOX_EMULATOR_REDUCTION(name, start, expression)                                                  \
  static inline void camox_emulator_reduce_##name(camox_emulator_lanes *lanes) {                           \
    camox_emulator_fold(lanes, start, [](uint64_t a, uint64_t b, int) -> uint64_t { return expression; }); \
  }
CAMOX_EMULATOR_REDUCTION(add, 0, a + b)
CAMOX_EMULATOR_REDUCTION(and, ~uint64_t(0), a &b)
CAMOX_EMULATOR_REDUCTION(or, 0, a | b)
CAMOX_EMULATOR_REDUCTION(xor, 0, a ^ b)
CAMOX_EMULATOR_REDUCTION(min, uint64_t(INT64_MAX), int64_t(a) < int64_t(b) ? a : b)
CAMOX_EMULATOR_REDUCTION(max, uint64_t(INT64_MIN), int64_t(a) > int64_t(b) ? a : b)
#undef CAMOX_EMULATOR_REDUCTION
#define __reduce_add_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_add, CAMOX_EMULATOR_SITE("__reduce_add_sync()"))
#define __reduce_min_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_min, CAMOX_EMULATOR_SITE("__reduce_min_sync()"))
#define __reduce_max_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_max, CAMOX_EMULATOR_SITE("__reduce_max_sync()"))
#define __reduce_and_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_and, CAMOX_EMULATOR_SITE("__reduce_and_sync()"))
#define __reduce_or_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_or, CAMOX_EMULATOR_SITE("__reduce_or_sync()"))
#define __reduce_xor_sync(mask, v) \
  camox_emulator_reduce(mask, v, camox_emulator_reduce_xor, CAMOX_EMULATOR_SITE("__reduce_xor_sync()"))

/* Atomics are real ones: blocks run on several OS threads. The value converts to the type that is stored. */
template <typename T>
struct camox_emulator_identity {
  using type = T;
};
template <typename T>
using camox_emulator_same = typename camox_emulator_identity<T>::type;
template <typename T, typename Change>
static inline T camox_emulator_atomic(T *address, Change change) {
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static_assert(sizeof(Word) == sizeof(T));
  Word *word = reinterpret_cast<Word *>(address), old_bits = __atomic_load_n(word, __ATOMIC_SEQ_CST), new_bits;
  T old_value;
  do {
    memcpy(static_cast<void *>(&old_value), &old_bits, sizeof(T));
    const T new_value = change(old_value);
    memcpy(&new_bits, &new_value, sizeof(T));
  } while (!__atomic_compare_exchange_n(word, &old_bits, new_bits, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old_value;
}
template <typename T>
static inline T atomicAdd(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return T(a + v); });
}
template <typename T>
static inline T atomicSub(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return T(a - v); });
}
template <typename T>
static inline T atomicMax(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return a < v ? v : a; });
}
template <typename T>
static inline T atomicMin(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return v < a ? v : a; });
}
template <typename T>
static inline T atomicAnd(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return T(a & v); });
}
template <typename T>
static inline T atomicOr(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return T(a | v); });
}
template <typename T>
static inline T atomicXor(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return T(a ^ v); });
}
template <typename T>
static inline T atomicExch(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T) { return v; });
}
template <typename T>
static inline T atomicInc(T *p, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return a >= v ? T(0) : T(a + 1); });
}
template <typename T>
static inline T atomicCAS(T *p, camox_emulator_same<T> expected, camox_emulator_same<T> v) {
  return camox_emulator_atomic(p, [=](T a) { return memcmp(&a, &expected, sizeof(T)) == 0 ? v : a; });
}

#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_system() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __nanosleep(ns) ((void)(ns), camox_emulator_pause())
#define __trap() camox_emulator_fail("__trap()")
#define __builtin_assume(condition) ((void)0)

/* Cache hints are plain accesses here. */
template <typename T>
static inline T __ldg(const T *p) {
  return *p;
}
template <typename T>
static inline T __ldcs(const T *p) {
  return *p;
}
template <typename T>
static inline T __ldcg(const T *p) {
  return *p;
}
template <typename T>
static inline T __ldca(const T *p) {
  return *p;
}
template <typename T>
static inline T __ldlu(const T *p) {
  return *p;
}
template <typename T>
static inline void __stcs(T *p, T v) {
  *p = v;
}
template <typename T>
static inline void __stcg(T *p, T v) {
  *p = v;
}
template <typename T>
static inline void __stwt(T *p, T v) {
  *p = v;
}
static inline size_t __cvta_generic_to_shared(const void *p) { return reinterpret_cast<size_t>(p); }

template <typename A, typename B>
static inline constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(b) < C(a) ? C(b) : C(a);
}
template <typename A, typename B>
static inline constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(b) : C(a);
}

/* CUDA's fast functions: here correctly rounded ones, so an error bound must leave room for the device's. */
static inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __frsqrt_rn(float x) { return rsqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
/* The glibc names of these are declared, so the calls go through macros. */
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
static inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
template <typename To, typename From>
static inline To camox_emulator_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
static inline int __float_as_int(float x) { return camox_emulator_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return camox_emulator_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return camox_emulator_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return camox_emulator_bits<float>(x); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
}
static inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
static inline int __float2int_rd(float x) { return int(floorf(x)); }
static inline int __float2int_rz(float x) { return int(x); }
static inline float __int2float_rn(int x) { return float(x); }
static inline float __uint2float_rn(unsigned x) { return float(x); }

template <typename... P, typename... A>
static inline void camox_emulator_launch_kernel(const char *text, void (*kernel)(P...), dim3 grid, dim3 block,
                                                size_t shared_bytes, A &&...args) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel takes exactly its parameters");
  struct bound {
    void (*kernel)(P...);
    std::tuple<P...> args;
  } const b = {kernel, std::tuple<P...>(static_cast<P>(args)...)};
  const camox_emulator_launch_info info = {text,
                                           reinterpret_cast<const void *>(kernel),
                                           [](const void *p) {
                                             const bound *q = static_cast<const bound *>(p);
                                             std::apply(q->kernel, q->args);
                                           },
                                           &b,
                                           sizeof(std::tuple<P...>),
                                           CAMOX_EMULATED_ARCH};
  camox_emulator_launch(&info, grid, block, shared_bytes);
}

/* ldmatrix.x4: lanes 8i ... 8i+7 name the rows of the i-th matrix. */
struct camox_emulator_ldmatrix_payload {
  const void *row;
  uint32_t *to;
};

template <bool TRANSPOSED>
void camox_emulator_ldmatrix_run(camox_emulator_lanes *lanes);

static inline void camox_emulator_ldmatrix(uint32_t *to, const void *row, bool transposed, const camox_emulator_site *site) {
  camox_emulator_ldmatrix_payload payload = {row, to};
  camox_emulator_collect(~0u, &payload, transposed ? camox_emulator_ldmatrix_run<true> : camox_emulator_ldmatrix_run<false>,
                         site);
}

/* Tensor-core steps, with the fragments that cuda_util.cuh describes. */
template <typename T>
struct camox_emulator_mma_payload {
  const uint32_t *a, *b;
  float *d;
};

template <typename T, int K>
void camox_emulator_mma_run(camox_emulator_lanes *lanes);
void camox_emulator_mma_run_tf32(camox_emulator_lanes *lanes);

template <typename T, int K>
static inline void camox_emulator_mma(float *d, const uint32_t *a, const uint32_t *b, const camox_emulator_site *site) {
  camox_emulator_mma_payload<T> payload = {a, b, d};
  camox_emulator_collect(~0u, &payload, camox_emulator_mma_run<T, K>, site);
}

#endif
