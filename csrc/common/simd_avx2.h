/* 32-byte vectors: AVX2 with F16C. Products and sums are fused only by VR(multiply_add) and VR(fma). */
#include <immintrin.h>

#define VF32_BYTES 32
#define VF64_BYTES 32
#define CAMOX_OWN_MAX
#define CAMOX_OWN_BF16
#include "simd_vector.h"

CAMOX_INLINE vf32 vf32_sqrt(vf32 v) { return (vf32)_mm256_sqrt_ps((__m256)v); }
CAMOX_INLINE vf32 vf32_max(vf32 a, vf32 b) { return (vf32)_mm256_max_ps((__m256)a, (__m256)b); }
CAMOX_INLINE vf32 vf32_min(vf32 a, vf32 b) { return (vf32)_mm256_min_ps((__m256)a, (__m256)b); }

CAMOX_INLINE vf32 vf32_multiply_add(vf32 a, vf32 b, vf32 c) { return (vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

/* Whether a lane of a mask is set. */
CAMOX_INLINE int vf32_any(vi32 mask) { return _mm256_movemask_ps((__m256)mask) != 0; }

CAMOX_INLINE vf32 vload_f16(const uint16_t *from) { return (vf32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

CAMOX_INLINE void vstore_f16(uint16_t *to, vf32 value) {
  _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* In fewer instructions than compilers make of vector types, which widen and pack each half of a vector by itself. */
CAMOX_INLINE vf32 vload_bf16(const uint16_t *from) {
  return (vf32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}

CAMOX_INLINE void vstore_bf16(uint16_t *to, vf32 value) {
  const vu32 bits = (vu32)value, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const __m256 is_nan = _mm256_cmp_ps((__m256)value, (__m256)value, _CMP_UNORD_Q);
  const __m256i words =
      _mm256_srli_epi32((__m256i)_mm256_blendv_ps((__m256)rounded, (__m256)((vu32){} + 0x7fc00000u), is_nan), 16);
  _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

CAMOX_INLINE __m256i vf32_mask(ptrdiff_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

CAMOX_INLINE vf32 vload_part_f32(const float *from, ptrdiff_t n) { return (vf32)_mm256_maskload_ps(from, vf32_mask(n)); }

CAMOX_INLINE void vstore_part_f32(float *to, vf32 value, ptrdiff_t n) { _mm256_maskstore_ps(to, vf32_mask(n), (__m256)value); }

CAMOX_DEFINE_PARTIAL(bf16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_PARTIAL(f16, uint16_t, vf32, VF32_LANES)
