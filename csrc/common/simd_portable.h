/* 16-byte vectors that any CPU with GCC or Clang has (SSE2 on x86-64, NEON on arm64). */
#define VF32_BYTES 16
#define VF64_BYTES 16
#ifndef __FP_FAST_FMAF
/* Without FMA a single gelu or conversion of halves takes a hundred instructions and more: inlined for every row and tail, they
   were two fifths of the kernels' code. */
#define CAMOX_CALLED CAMOX_NOINLINE
#endif
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

CAMOX_INLINE vu32 vu32_select(vi32 mask, vu32 yes, vu32 no) { return (yes & (vu32)mask) | (no & ~(vu32)mask); }

CAMOX_CALLED vf32 vload_f16(const uint16_t *from) {
  vu16 half;
  memcpy(&half, from, sizeof half);
  const vu32 word = __builtin_convertvector(half, vu32), magnitude = (word & 0x7fffu) << 13;
  const vi32 bits = (vi32)magnitude;
  /* below 2^-14 the mantissa without its leading 1 */
  const vu32 subnormal = (vu32)((vf32)(magnitude + (113u << 23)) - 0x1p-14f);
  const vu32 special = (magnitude + (224u << 23)) | ((vu32)(bits > 0x0f800000) & 0x400000u);
  vu32 value = vu32_select(bits < 0x00800000, subnormal, magnitude + (112u << 23));
  value = vu32_select(bits >= 0x0f800000, special, value);
  return (vf32)(value | (word & 0x8000u) << 16);
}

CAMOX_CALLED void vstore_f16(uint16_t *to, vf32 value) {
  const vu32 sign = ((vu32)value >> 16) & 0x8000u, magnitude = (vu32)value & 0x7fffffffu;
  const vi32 bits = (vi32)magnitude;
  const vu32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const vu32 subnormal = (vu32)((vf32)magnitude + 0.5f) - 0x3f000000u; /* adding 0.5 rounds at 2^-24 */
  vu32 word = vu32_select(bits < 0x38800000, subnormal, normal);
  word = vu32_select(bits >= 0x477ff000, (vu32){} + 0x7c00u, word); /* rounds past 65504 */
  word = vu32_select(bits > 0x7f800000, ((magnitude >> 13) & 0x3ffu) | 0x7e00u, word);
  const vu16 half = __builtin_convertvector(word | sign, vu16);
  memcpy(to, &half, sizeof half);
}

CAMOX_DEFINE_PARTIAL(f32, float, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(bf16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(f16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(f64, double, vf64, VF64_LANES)
