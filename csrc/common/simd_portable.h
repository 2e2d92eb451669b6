/* 16-byte vectors that any CPU with GCC or Clang has (SSE2 on x86-64, NEON on arm64). */
#define VF32_BYTES 16
#define VF64_BYTES 16
#include "simd_vector.h"

CAMOX_INLINE vf32 vf32_sqrt(vf32 v) {
  for (int lane = 0; lane < VF32_LANES; ++lane) v[lane] = sqrtf(v[lane]);
  return v;
}

CAMOX_INLINE vf64 vf64_sqrt(vf64 v) {
  for (int lane = 0; lane < VF64_LANES; ++lane) v[lane] = sqrt(v[lane]);
  return v;
}

CAMOX_INLINE vf32 vf32_multiply_add(vf32 a, vf32 b, vf32 c) { return a * b + c; }
CAMOX_INLINE vf64 vf64_multiply_add(vf64 a, vf64 b, vf64 c) { return a * b + c; }

/* Whether a lane of a mask is set. */
CAMOX_INLINE int vf32_any(vi32 mask) {
  int32_t any = 0;
  for (int lane = 0; lane < VF32_LANES; ++lane) any |= mask[lane];
  return any != 0;
}

CAMOX_INLINE int vf64_any(vi64 mask) {
  int64_t any = 0;
  for (int lane = 0; lane < VF64_LANES; ++lane) any |= mask[lane];
  return any != 0;
}

CAMOX_INLINE vf32 vload_f16(const uint16_t *from) {
  vf32 v;
  for (int lane = 0; lane < VF32_LANES; ++lane) v[lane] = to_real_f16(from[lane]);
  return v;
}

CAMOX_INLINE void vstore_f16(uint16_t *to, vf32 value) {
  for (int lane = 0; lane < VF32_LANES; ++lane) to[lane] = from_real_f16(value[lane]);
}

CAMOX_DEFINE_PARTIAL(f32, float, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(bf16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(f16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(f64, double, vf64, VF64_LANES)
