/* 64-byte vectors: AVX-512 F, BW, VL, DQ. */
#include <immintrin.h>

#define VF32_BYTES 64
#define VF64_BYTES 64
#define CAMOX_OWN_MAX
#define CAMOX_OWN_BF16
#define CAMOX_OWN_LANES
#include "simd_vector.h"

typedef __mmask16 vf32_lanes_t;
CAMOX_INLINE vf32_lanes_t vf32_lanes_below(vi32 a, vi32 b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
CAMOX_INLINE vi32 vf32_wrapped(vi32 v, vi32 period) { return (vi32)_mm512_min_epu32((__m512i)v, (__m512i)(v - period)); }
/* As integers, which compilers join with the shift or the mask that made them. */
CAMOX_INLINE vf32 vf32_keep_lanes(vf32_lanes_t lanes, vf32 v) { return (vf32)_mm512_maskz_mov_epi32(lanes, (__m512i)v); }
CAMOX_INLINE vf32 vf32_select_lanes(vf32_lanes_t lanes, vf32 yes, vf32 no) {
  return (vf32)_mm512_mask_blend_ps(lanes, (__m512)no, (__m512)yes);
}
CAMOX_INLINE vf32 vf32_load_lanes(vf32_lanes_t lanes, const float *from) { return (vf32)_mm512_maskz_loadu_ps(lanes, from); }
CAMOX_INLINE int vf32_any_lane(vf32_lanes_t lanes) { return lanes != 0; }
/* `first` is a constant, which an inline function's argument is not without optimisation. */
#define vf32_lanes_from(lanes, a, b, first) ((vf32)_mm512_maskz_alignr_epi32(lanes, (__m512i)(b), (__m512i)(a), first))
#define vf32_from(a, b, first) ((vf32)_mm512_alignr_epi32((__m512i)(b), (__m512i)(a), first)) /* the same, all lanes */

CAMOX_INLINE vf32 vf32_sqrt(vf32 v) { return (vf32)_mm512_sqrt_ps((__m512)v); }
CAMOX_INLINE vf32 vf32_max(vf32 a, vf32 b) { return (vf32)_mm512_max_ps((__m512)a, (__m512)b); }
CAMOX_INLINE vf32 vf32_min(vf32 a, vf32 b) { return (vf32)_mm512_min_ps((__m512)a, (__m512)b); }

CAMOX_INLINE vf32 vf32_multiply_add(vf32 a, vf32 b, vf32 c) { return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

CAMOX_INLINE vf32 vf32_shift_up(vf32 a, vf32 b) { return (vf32)_mm512_alignr_epi32((__m512i)b, (__m512i)a, 15); }
CAMOX_INLINE vf32 vf32_shift_down(vf32 a, vf32 b) { return (vf32)_mm512_alignr_epi32((__m512i)b, (__m512i)a, 1); }
CAMOX_INLINE vf32 vf32_keep_shift_up(vf32_lanes_t lanes, vf32 a, vf32 b) {
  return (vf32)_mm512_maskz_alignr_epi32(lanes, (__m512i)b, (__m512i)a, 15);
}
CAMOX_INLINE vf32 vf32_keep_shift_down(vf32_lanes_t lanes, vf32 a, vf32 b) {
  return (vf32)_mm512_maskz_alignr_epi32(lanes, (__m512i)b, (__m512i)a, 1);
}

/* Whether a lane of a mask is set. */
CAMOX_INLINE int vf32_any(vi32 mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }

CAMOX_INLINE vf32 vload_f16(const uint16_t *from) { return (vf32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

CAMOX_INLINE __m256i vf32_to_f16(vf32 value) {
  return _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Words as the upper halves of lanes, and back: one instruction where widening and a shift are two. */
CAMOX_INLINE vf32 vf32_of_bf16(__m256i words) {
  static const uint16_t place[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                     0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  return (vf32)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, _mm512_loadu_si512(place), _mm512_castsi256_si512(words));
}

CAMOX_INLINE __m256i vf32_upper_halves(__m512i lanes) {
  static const uint16_t place[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_loadu_si512(place), lanes));
}

CAMOX_INLINE __m256i vf32_to_bf16(vf32 value) {
  __m512i bits = (__m512i)value;
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  __mmask16 is_number = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_ORD_Q);
  return vf32_upper_halves(_mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), is_number, rounded, odd));
}

CAMOX_INLINE __mmask16 vf32_mask(ptrdiff_t n) { return (__mmask16)((1u << n) - 1u); }

CAMOX_INLINE vf32 vload_part_f32(const float *from, ptrdiff_t n) { return (vf32)_mm512_maskz_loadu_ps(vf32_mask(n), from); }

CAMOX_INLINE void vstore_part_f32(float *to, vf32 value, ptrdiff_t n) {
  _mm512_mask_storeu_ps(to, vf32_mask(n), (__m512)value);
}

CAMOX_INLINE void vstore_bf16(uint16_t *to, vf32 value) { _mm256_storeu_si256((__m256i *)to, vf32_to_bf16(value)); }
CAMOX_INLINE void vstore_f16(uint16_t *to, vf32 value) { _mm256_storeu_si256((__m256i *)to, vf32_to_f16(value)); }

CAMOX_INLINE void vstore_part_bf16(uint16_t *to, vf32 value, ptrdiff_t n) {
  _mm256_mask_storeu_epi16(to, vf32_mask(n), vf32_to_bf16(value));
}

CAMOX_INLINE void vstore_part_f16(uint16_t *to, vf32 value, ptrdiff_t n) {
  _mm256_mask_storeu_epi16(to, vf32_mask(n), vf32_to_f16(value));
}

CAMOX_INLINE vf32 vload_bf16(const uint16_t *from) { return vf32_of_bf16(_mm256_loadu_si256((const __m256i *)from)); }

CAMOX_INLINE vf32 vload_part_bf16(const uint16_t *from, ptrdiff_t n) {
  return vf32_of_bf16(_mm256_maskz_loadu_epi16(vf32_mask(n), from));
}

CAMOX_INLINE vf32 vload_part_f16(const uint16_t *from, ptrdiff_t n) {
  return (vf32)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vf32_mask(n), from));
}
