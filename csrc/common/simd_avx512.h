/* 64-byte vectors: AVX-512 F, BW, VL, DQ. */
#include <immintrin.h>

#define VF32_BYTES 64
#define VF64_BYTES 64
#include "simd_vector.h"

CAMOX_INLINE vf32 vf32_sqrt(vf32 v) { return (vf32)_mm512_sqrt_ps((__m512)v); }

CAMOX_INLINE vf32 vf32_exact_fma(vf32 a, vf32 b, vf32 c) { return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

CAMOX_INLINE vf32 vload_f16(const uint16_t *from) {
  return (vf32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

CAMOX_INLINE void vstore_f16(uint16_t *to, vf32 value) {
  _mm256_storeu_si256((__m256i *)to,
                      _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

CAMOX_INLINE __mmask16 vf32_mask(ptrdiff_t n) { return (__mmask16)((1u << n) - 1u); }

CAMOX_INLINE vf32 vload_part_f32(const float *from, ptrdiff_t n) {
  return (vf32)_mm512_maskz_loadu_ps(vf32_mask(n), from);
}

CAMOX_INLINE void vstore_part_f32(float *to, vf32 value, ptrdiff_t n) {
  _mm512_mask_storeu_ps(to, vf32_mask(n), (__m512)value);
}

#define CAMOX_DEFINE_MASKED_HALF(S)                                                     \
  CAMOX_INLINE vf32 vload_part_##S(const uint16_t *from, ptrdiff_t n) {                 \
    uint16_t buffer[VF32_LANES];                                                        \
    _mm256_storeu_si256((__m256i *)buffer, _mm256_maskz_loadu_epi16(vf32_mask(n), from)); \
    return vload_##S(buffer);                                                           \
  }                                                                                     \
  CAMOX_INLINE void vstore_part_##S(uint16_t *to, vf32 value, ptrdiff_t n) {            \
    uint16_t buffer[VF32_LANES];                                                        \
    vstore_##S(buffer, value);                                                          \
    _mm256_mask_storeu_epi16(to, vf32_mask(n), _mm256_loadu_si256((const __m256i *)buffer)); \
  }

CAMOX_DEFINE_MASKED_HALF(bf16)
CAMOX_DEFINE_MASKED_HALF(f16)
