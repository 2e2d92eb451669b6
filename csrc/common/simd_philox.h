/* Dropout masks (philox.h) as vectors, CAMOX_KEEP_ELEMENTS at a time: included from a kernel body after simd.h.

   One call of Philox in every 64-bit lane: a product of 32 x 32 bits fills a lane, and the next product ignores the upper 32
   bits of a lane, so a round is two products, two shifts and four exclusive ors. CAMOX_KEEP_CALL_ORDER assigns the calls to
   the lanes so that unpacking leaves the elements in order. */
#ifndef CAMOX_SIMD_PHILOX_H
#define CAMOX_SIMD_PHILOX_H

#include "philox.h"

#define CAMOX_KEEP_CALLS VF64_LANES
/* Four vectors of float. */
#define CAMOX_KEEP_ELEMENTS (CAMOX_PHILOX_ELEMENTS * CAMOX_KEEP_CALLS)

typedef uint64_t vu64 __attribute__((vector_size(VF64_BYTES)));
typedef uint16_t vu16x2 __attribute__((vector_size(VF32_BYTES)));

/* The keys of all rounds, computed once per tensor. */
typedef struct {
  uint64_t key[CAMOX_PHILOX_ROUNDS][2];
  uint32_t threshold;
} camox_keep_key;

CAMOX_INLINE camox_keep_key camox_keep_key_of(uint64_t seed, uint32_t threshold) {
  camox_keep_key keys = {.threshold = threshold};
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < CAMOX_PHILOX_ROUNDS; ++round) {
    keys.key[round][0] = key0, keys.key[round][1] = key1;
    key0 += CAMOX_PHILOX_W0, key1 += CAMOX_PHILOX_W1;
  }
  return keys;
}

/* camox_keep: which of CAMOX_KEEP_ELEMENTS elements are kept, first half and second half. Below also what each instruction set
   does its own way: the product of the low halves, a ^ b ^ c, and the comparison of the four words of every call. */
#if defined(CAMOX_SIMD_AVX512)
typedef struct {
  __mmask32 half[2];
} camox_keep;
#define CAMOX_KEEP_CALL_ORDER {0, 4, 1, 5, 2, 6, 3, 7}

CAMOX_INLINE vu64 vu64_product(vu64 a, uint32_t b) {
  return (vu64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64((long long)b));
}
CAMOX_INLINE vu64 vu64_xor3(vu64 a, vu64 b, vu64 c) {
  return (vu64)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
CAMOX_INLINE camox_keep camox_keep_compare(const vu64 *word, uint32_t threshold) {
  __m512i first = (__m512i)_mm512_mask_moveldup_ps((__m512)word[0], 0xaaaa, (__m512)word[1]);
  __m512i second = (__m512i)_mm512_mask_moveldup_ps((__m512)word[2], 0xaaaa, (__m512)word[3]);
  __m512i limit = _mm512_set1_epi16((short)threshold);
  camox_keep keep;
  keep.half[0] = _mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(first, second), limit);
  keep.half[1] = _mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(first, second), limit);
  return keep;
}

/* Vector `part` of the elements' values, 0 where they are dropped. */
CAMOX_INLINE vf32 vf32_kept(const camox_keep *keep, int part, vf32 v) {
  /* Without this the compiler makes a masked load of v, which cannot begin before the mask is known. */
  __asm__("" : "+v"(v));
  return (vf32)_mm512_maskz_mov_ps((__mmask16)(keep->half[part / 2] >> (part % 2 * 16)), (__m512)v);
}
#else
typedef struct {
  vu16x2 half[2]; /* all bits of an element that is kept */
} camox_keep;

#if defined(CAMOX_SIMD_AVX2)
#define CAMOX_KEEP_CALL_ORDER {0, 2, 1, 3}
CAMOX_INLINE vu64 vu64_product(vu64 a, uint32_t b) {
  return (vu64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((long long)b));
}
CAMOX_INLINE void camox_keep_unpack(vu64 first, vu64 second, vu16x2 *bits) {
  bits[0] = (vu16x2)_mm256_unpacklo_epi64((__m256i)first, (__m256i)second);
  bits[1] = (vu16x2)_mm256_unpackhi_epi64((__m256i)first, (__m256i)second);
}
CAMOX_INLINE vf32 vf32_kept(const camox_keep *keep, int part, vf32 v) {
  __m256i half = (__m256i)keep->half[part / 2];
  __m128i quarter = part % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half);
  return (vf32)_mm256_and_ps((__m256)v, (__m256)_mm256_cvtepi16_epi32(quarter));
}
#else
#define CAMOX_KEEP_CALL_ORDER {0, 1}
CAMOX_INLINE vu64 vu64_product(vu64 a, uint32_t b) { return (a & 0xffffffffu) * b; }
CAMOX_INLINE void camox_keep_unpack(vu64 first, vu64 second, vu16x2 *bits) {
  bits[0] = (vu16x2)__builtin_shuffle(first, second, (vi64){0, 2});
  bits[1] = (vu16x2)__builtin_shuffle(first, second, (vi64){1, 3});
}
CAMOX_INLINE vf32 vf32_kept(const camox_keep *keep, int part, vf32 v) {
  vi32 mask = {0};
  for (int lane = 0; lane < VF32_LANES; ++lane) mask[lane] = (int16_t)keep->half[part / 2][part % 2 * VF32_LANES + lane];
  return vf32_keep(mask, v);
}
CAMOX_INLINE vf64 vf64_kept(const camox_keep *keep, int part, vf64 v) {
  vi64 mask = {0};
  for (int lane = 0; lane < VF64_LANES; ++lane) mask[lane] = (int16_t)keep->half[part / 4][part % 4 * VF64_LANES + lane];
  return vf64_keep(mask, v);
}
#endif

CAMOX_INLINE vu64 vu64_xor3(vu64 a, vu64 b, vu64 c) { return a ^ b ^ c; }

CAMOX_INLINE camox_keep camox_keep_compare(const vu64 *word, uint32_t threshold) {
  camox_keep keep;
  vu16x2 bits[2], limit = (uint16_t)threshold - (vu16x2){0};
  vu64 low = (vu64){0} + 0xffffffffu;
  camox_keep_unpack((word[0] & low) | word[1] << 32, (word[2] & low) | word[3] << 32, bits);
  for (int half = 0; half < 2; ++half) keep.half[half] = (vu16x2)(bits[half] >= limit);
  return keep;
}
#endif

/* Elements [index, index + CAMOX_KEEP_ELEMENTS), index a multiple of CAMOX_KEEP_ELEMENTS. */
CAMOX_INLINE camox_keep camox_keep_of(const camox_keep_key *keys, uint64_t index) {
  static const uint64_t call_order[CAMOX_KEEP_CALLS] = CAMOX_KEEP_CALL_ORDER;
  uint64_t group = index / CAMOX_PHILOX_ELEMENTS;
  vu64 call, word[4];
  memcpy(&call, call_order, sizeof call);
  word[0] = call + group; /* the low half does not overflow: group is a multiple of the lanes */
  word[1] = (vu64){0} + (group >> 32);
  word[2] = word[3] = (vu64){0};
#pragma GCC unroll 7
  for (int round = 0; round < CAMOX_PHILOX_ROUNDS; ++round) {
    vu64 a = vu64_product(word[0], CAMOX_PHILOX_M0), b = vu64_product(word[2], CAMOX_PHILOX_M1);
    word[0] = vu64_xor3(b >> 32, word[1], (vu64){0} + keys->key[round][0]);
    word[2] = vu64_xor3(a >> 32, word[3], (vu64){0} + keys->key[round][1]);
    word[1] = b;
    word[3] = a;
  }
  return camox_keep_compare(word, keys->threshold);
}

/* All elements are kept. */
CAMOX_INLINE camox_keep camox_keep_all(void) {
  camox_keep keep;
  memset(&keep, 0xff, sizeof keep);
  return keep;
}

/* The factors of elements [first, first + count), scale or 0 -> where the factor of `first` lies in the buffer, which must have
   room for count + 2 CAMOX_KEEP_ELEMENTS: full blocks are written. */
#define CAMOX_DEFINE_FACTORS(V, T)                                                                                       \
  CAMOX_INLINE const T *V##_keep_factors(const camox_keep_key *keys, T scale, int64_t first, int64_t count, T *buffer) { \
    const int64_t begin = first - first % CAMOX_KEEP_ELEMENTS, lanes = (int64_t)(sizeof(V) / sizeof(T));                 \
    for (int64_t block = begin; block < first + count; block += CAMOX_KEEP_ELEMENTS) {                                   \
      const camox_keep keep = camox_keep_of(keys, (uint64_t)block);                                                      \
      for (int part = 0; part < CAMOX_KEEP_ELEMENTS / lanes; ++part)                                                     \
        V##_store(buffer + (block - begin) + part * lanes, V##_kept(&keep, part, V##_set1(scale)));                      \
    }                                                                                                                    \
    return buffer + (first - begin);                                                                                     \
  }

CAMOX_DEFINE_FACTORS(vf32, float)
#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512)
CAMOX_DEFINE_FACTORS(vf64, double)
#endif

#endif
