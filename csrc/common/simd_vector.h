/* Vector types and operations common to every instruction set, from GCC's and Clang's vector extensions.
   The including header sets VF32_BYTES and VF64_BYTES. */
#define VF32_LANES (VF32_BYTES / 4)
#define VF64_LANES (VF64_BYTES / 8)

typedef float vf32 __attribute__((vector_size(VF32_BYTES)));
typedef int32_t vi32 __attribute__((vector_size(VF32_BYTES)));
typedef uint32_t vu32 __attribute__((vector_size(VF32_BYTES)));
typedef uint16_t vu16 __attribute__((vector_size(VF32_BYTES / 2)));
typedef double vf64 __attribute__((vector_size(VF64_BYTES)));
typedef int64_t vi64 __attribute__((vector_size(VF64_BYTES)));

typedef int32_t vf32_mask_t;
typedef int64_t vf64_mask_t;

#define CAMOX_INLINE static inline __attribute__((always_inline, unused))
#define CAMOX_NOINLINE static __attribute__((noinline, unused))
#ifndef CAMOX_CALLED /* long functions: inlined too, unless an instruction set has them called */
#define CAMOX_CALLED CAMOX_INLINE
#endif

/* memcpy is how C spells an unaligned vector access; it compiles to one instruction. */
#define CAMOX_DEFINE_VECTOR(V, I, T, LANES)                                                         \
  CAMOX_INLINE V V##_set1(T value) { return value - (V){0}; }                                       \
  CAMOX_INLINE V V##_load(const T *from) {                                                          \
    V v;                                                                                            \
    memcpy(&v, from, sizeof v);                                                                     \
    return v;                                                                                       \
  }                                                                                                 \
  CAMOX_INLINE void V##_store(T *to, V v) { memcpy(to, &v, sizeof v); }                             \
  CAMOX_INLINE I V##_load_mask(const V##_mask_t *from) {                                            \
    I v;                                                                                            \
    memcpy(&v, from, sizeof v);                                                                     \
    return v;                                                                                       \
  }                                                                                                 \
  CAMOX_INLINE V V##_keep(I mask, V v) { return (V)((I)v & mask); }                                 \
  CAMOX_INLINE V V##_select(I mask, V yes, V no) { return (V)(((I)yes & mask) | ((I)no & ~mask)); } \
  CAMOX_INLINE V V##_abs(V v) { return (V)((I)v & ~(I)V##_set1((T) - 0.0)); }                       \
  /* Lanes are added in index order, the same on every run. */                                      \
  CAMOX_INLINE T V##_sum(V v) {                                                                     \
    T total = 0;                                                                                    \
    for (int lane = 0; lane < (LANES); ++lane) total += v[lane];                                    \
    return total;                                                                                   \
  }                                                                                                 \
  /* 0, 1, 2, ... */                                                                                \
  CAMOX_INLINE I V##_lane(void) {                                                                   \
    static const V##_mask_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};      \
    return V##_load_mask(lane);                                                                     \
  }                                                                                                 \
  /* n in all lanes */                                                                              \
  CAMOX_INLINE I V##_set1_int(int64_t n) { return (I){0} + (V##_mask_t)n; }                         \
  /* Lanes are added as a tree: fewer steps, another fixed order. */                                \
  CAMOX_INLINE T V##_sum_pairs(V v) {                                                               \
    for (int step = (LANES) / 2; step > 0; step /= 2) v += __builtin_shuffle(v, V##_lane() ^ step); \
    return v[0];                                                                                    \
  }

CAMOX_DEFINE_VECTOR(vf32, vi32, float, VF32_LANES)
CAMOX_DEFINE_VECTOR(vf64, vi64, double, VF64_LANES)

/* max and min are b where a or b is NaN, as x86's instructions are, which compilers do not make of these. */
#define CAMOX_DEFINE_MAX(V, I)                                              \
  CAMOX_INLINE V V##_max(V a, V b) { return V##_select((I)(a > b), a, b); } \
  CAMOX_INLINE V V##_min(V a, V b) { return V##_select((I)(a < b), a, b); }

#ifndef CAMOX_OWN_MAX
CAMOX_DEFINE_MAX(vf32, vi32)
#endif
CAMOX_DEFINE_MAX(vf64, vi64)

/* Sets of lanes. keep_lanes makes the lanes outside the set zero, select_lanes takes them from another vector. load_lanes reads
   the set's elements alone where the instruction set has masked loads, else all of them, and makes the other lanes zero.
   lanes_from: lanes first, first + 1, ... of a followed by b. wrapped: an integer below 2 * period, modulo period. */
#define CAMOX_DEFINE_LANES(V, I, T, LANES)                                                                    \
  typedef I V##_lanes_t;                                                                                      \
  CAMOX_INLINE V##_lanes_t V##_lanes_below(I a, I b) { return a < b; }                                        \
  CAMOX_INLINE I V##_wrapped(I v, I period) { return v - ((v >= period) & period); }                          \
  CAMOX_INLINE V V##_keep_lanes(V##_lanes_t lanes, V v) { return V##_keep(lanes, v); }                        \
  CAMOX_INLINE V V##_select_lanes(V##_lanes_t lanes, V yes, V no) { return V##_select(lanes, yes, no); }      \
  CAMOX_INLINE V V##_load_lanes(V##_lanes_t lanes, const T *from) { return V##_keep(lanes, V##_load(from)); } \
  CAMOX_INLINE V V##_lanes_from(V##_lanes_t lanes, V a, V b, int first) {                                     \
    return V##_keep(lanes, __builtin_shuffle(a, b, V##_lane() + first));                                      \
  }                                                                                                           \
  CAMOX_INLINE int V##_any_lane(V##_lanes_t lanes) {                                                          \
    int any = 0;                                                                                              \
    for (int i = 0; i < (LANES); ++i) any |= lanes[i] != 0;                                                   \
    return any;                                                                                               \
  }

#ifndef CAMOX_OWN_LANES
CAMOX_DEFINE_LANES(vf32, vi32, float, VF32_LANES)
#endif
CAMOX_DEFINE_LANES(vf64, vi64, double, VF64_LANES)

#include "simd_pairs.h"

CAMOX_INLINE float to_real_f32(float value) { return value; }
CAMOX_INLINE float from_real_f32(float value) { return value; }
CAMOX_INLINE double to_real_f64(double value) { return value; }
CAMOX_INLINE double from_real_f64(double value) { return value; }

CAMOX_INLINE float to_real_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

/* Round to nearest even; every NaN becomes 0x7fc0, as in torch. */
CAMOX_INLINE uint16_t from_real_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0u;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

CAMOX_INLINE float to_real_f16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
  uint32_t exponent = (value >> 10) & 0x1fu, mantissa = value & 0x3ffu;
  uint32_t bits;
  float result;
  if (exponent == 0) { /* zero and subnormals: mantissa * 2^-24 is exact */
    result = (float)mantissa * 0x1p-24f;
    memcpy(&bits, &result, sizeof bits);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | mantissa << 13;
    if (exponent == 31 && mantissa != 0) bits |= 0x400000u;
  }
  memcpy(&result, &bits, sizeof result);
  return result;
}

CAMOX_INLINE uint16_t from_real_f16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds past 65504 */
  if (bits < 0x38800000u) {                                   /* subnormal: adding 0.5 rounds at 2^-24 */
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  return (uint16_t)(sign | ((bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13));
}

#ifndef CAMOX_OWN_BF16
CAMOX_INLINE vf32 vload_bf16(const uint16_t *from) {
  vu16 v;
  memcpy(&v, from, sizeof v);
  return (vf32)(__builtin_convertvector(v, vu32) << 16);
}

CAMOX_INLINE void vstore_bf16(uint16_t *to, vf32 value) {
  vu32 bits = (vu32)value, is_nan = (vu32)(value != value);
  vu32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  vu16 v = __builtin_convertvector(((rounded & ~is_nan) | (0x7fc00000u & is_nan)) >> 16, vu16);
  memcpy(to, &v, sizeof v);
}
#endif

CAMOX_INLINE vf32 vload_f32(const float *from) { return vf32_load(from); }
CAMOX_INLINE void vstore_f32(float *to, vf32 value) { vf32_store(to, value); }
CAMOX_INLINE vf64 vload_f64(const double *from) { return vf64_load(from); }
CAMOX_INLINE void vstore_f64(double *to, vf64 value) { vf64_store(to, value); }

CAMOX_CALLED vf32 vload_f16(const uint16_t *from);
CAMOX_CALLED void vstore_f16(uint16_t *to, vf32 value);

/* The first n lanes: loads fill the others with zero, stores write n elements. vload_part and vstore_part take 0 <= n < lanes,
   vload_n and vstore_n any n >= 0, from lanes on as a full vector. Instruction sets with masked accesses define the former;
   others call them, as a row has one end: inlined they took a sixth of the time to compile AVX2's kernels. */
#define CAMOX_DEFINE_PARTIAL(S, T, V, LANES)                         \
  CAMOX_NOINLINE V vload_part_##S(const T *from, ptrdiff_t n) {      \
    T buffer[LANES] = {0};                                           \
    for (ptrdiff_t i = 0; i < n; ++i) buffer[i] = from[i];           \
    return vload_##S(buffer);                                        \
  }                                                                  \
  CAMOX_NOINLINE void vstore_part_##S(T *to, V value, ptrdiff_t n) { \
    T buffer[LANES];                                                 \
    vstore_##S(buffer, value);                                       \
    for (ptrdiff_t i = 0; i < n; ++i) to[i] = buffer[i];             \
  }

/* Likely: else loops over whole vectors would keep their registers in memory for the call. */
#define CAMOX_DEFINE_FIRST(S, T, V, LANES)                                                \
  CAMOX_INLINE V vload_n_##S(const T *from, ptrdiff_t n) {                                \
    return __builtin_expect(n >= (LANES), 1) ? vload_##S(from) : vload_part_##S(from, n); \
  }                                                                                       \
  CAMOX_INLINE void vstore_n_##S(T *to, V value, ptrdiff_t n) {                           \
    if (__builtin_expect(n >= (LANES), 1))                                                \
      vstore_##S(to, value);                                                              \
    else                                                                                  \
      vstore_part_##S(to, value, n);                                                      \
  }
