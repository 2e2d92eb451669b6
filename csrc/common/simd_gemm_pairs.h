/* Products of bfloat16 matrices that lie in cache, by AVX-512 BF16: two multiply-adds a float32 lane. Included after simd.h by
   the AVX-512 variant; what has CAMOX_PAIRS runs only where camox_isa_has_avx512_bf16() says so. A pair is two neighbours of
   the summed index in 32 bits, the first in the low half: two columns of a row as they lie in memory, or two rows put together.
 */
#ifndef CAMOX_SIMD_GEMM_PAIRS_H
#define CAMOX_SIMD_GEMM_PAIRS_H

#define CAMOX_PAIRS __attribute__((target("avx512bf16")))
#define PAIRS_ROWS 8
#define PAIRS_VECTORS 3
#define PAIRS_DEPTH 64

/* Lane i: (low[i], high[i]) rounded to nearest even. */
CAMOX_PAIRS CAMOX_INLINE vu32 pairs_of(vf32 low, vf32 high) {
  static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (vu32)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}

CAMOX_INLINE vu32 pairs_load(const uint32_t *from) { return (vu32)_mm512_loadu_si512(from); }
CAMOX_INLINE void pairs_store(uint32_t *to, vu32 value) { _mm512_storeu_si512(to, (__m512i)value); }

CAMOX_PAIRS CAMOX_INLINE void pairs_block(float *restrict c, int64_t c_pitch, const uint32_t *a, int64_t a_row, int64_t a_pair,
                                          const uint32_t *b, int64_t b_pitch, int64_t rows, int64_t depth, int vectors,
                                          int add) {
  const uint32_t *from[PAIRS_ROWS];
  for (int64_t m = 0; m < PAIRS_ROWS; ++m) from[m] = a + (m < rows ? m : rows - 1) * a_row;
  __m512 sum[PAIRS_ROWS][PAIRS_VECTORS];
  for (int m = 0; m < PAIRS_ROWS; ++m)
    for (int n = 0; n < vectors; ++n) sum[m][n] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh part[PAIRS_VECTORS];
    for (int n = 0; n < vectors; ++n) part[n] = (__m512bh)_mm512_loadu_si512(b + k * b_pitch + n * VF32_LANES);
    for (int m = 0; m < PAIRS_ROWS; ++m) {
      const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)from[m][k * a_pair]);
      for (int n = 0; n < vectors; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], factor, part[n]);
    }
  }
  for (int64_t m = 0; m < (rows < PAIRS_ROWS ? rows : PAIRS_ROWS); ++m)
    for (int n = 0; n < vectors; ++n) {
      float *to = c + m * c_pitch + n * VF32_LANES;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[m][n]) : sum[m][n]);
    }
}

/* c[i,n] = (add ? c[i,n] : 0) + sum over k < depth of both products of a[i*a_row + k*a_pair] and b[k,n], for i < rows; columns
   is a multiple of 16. */
CAMOX_PAIRS static inline __attribute__((unused)) void gemm_pairs(float *restrict c, int64_t c_pitch, const uint32_t *a,
                                                                  int64_t a_row, int64_t a_pair, const uint32_t *b,
                                                                  int64_t b_pitch, int64_t rows, int64_t columns, int64_t depth,
                                                                  int add) {
  int64_t k = 0;
  do {
    const int64_t count = depth - k < PAIRS_DEPTH ? depth - k : PAIRS_DEPTH;
    const int more = add || k > 0;
    for (int64_t n = 0; n < columns;) {
      const int64_t left = (columns - n) / VF32_LANES;
      const int vectors = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; /* one vector alone waits for its own sums */
      for (int64_t i = 0; i < rows; i += PAIRS_ROWS) {
        float *to = c + i * c_pitch + n;
        const uint32_t *from = a + i * a_row + k * a_pair, *with = b + k * b_pitch + n;
        if (vectors == 3)
          pairs_block(to, c_pitch, from, a_row, a_pair, with, b_pitch, rows - i, count, 3, more);
        else if (vectors == 2)
          pairs_block(to, c_pitch, from, a_row, a_pair, with, b_pitch, rows - i, count, 2, more);
        else
          pairs_block(to, c_pitch, from, a_row, a_pair, with, b_pitch, rows - i, count, 1, more);
      }
      n += vectors * VF32_LANES;
    }
    k += PAIRS_DEPTH;
  } while (k < depth);
}

#endif
