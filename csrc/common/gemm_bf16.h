/* gemm_nn for bfloat16 on CPUs with AVX512-BF16, whose instruction adds two products to each float32 lane. Included after
   gemm.inc by the AVX-512 variant of a kernel; functions with CAMOX_AVX512_BF16 may run only where camox_isa_has_avx512_bf16().

   An element of A and B is a pair: two bfloat16 in 32 bits that are neighbours along k, the lower k in the lower half.

     A [rows, depth]:    (a[i,0] a[i,1])  (a[i,2] a[i,3])  ...     as rows of bfloat16 lie in memory
     B [depth, columns]: (b[0,j] b[1,j])                           two rows interleaved: bf16_pair, or 32-bit transposes of B^T
                         (b[2,j] b[3,j])  ...

   sizes and strides along k count pairs. C and its epilogue are float32. */
#ifndef CAMOX_GEMM_BF16_H
#define CAMOX_GEMM_BF16_H

#define CAMOX_AVX512_BF16 __attribute__((target("avx512bf16")))

/* Lane i: (low[i], high[i]), rounded to nearest even. */
CAMOX_AVX512_BF16 CAMOX_INLINE vu32 bf16_pair(vf32 low, vf32 high) {
  static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (vu32)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}

CAMOX_INLINE void bf16_store_pairs(uint32_t *to, vu32 value) { _mm512_storeu_si512(to, (__m512i)value); }

CAMOX_AVX512_BF16 CAMOX_INLINE vf32 bf16_multiply_add(vf32 a, vf32 b, vf32 c) {
  return (vf32)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

#define GEMM(name) bf16_##name
#define GEMM_C(name) vf32_##name
#define gemm_operand uint32_t
#define gemm_vector vf32
#define GEMM_LANES VF32_LANES
#define GEMM_LOAD(from) ((vf32)_mm512_loadu_si512(from))
#define GEMM_BROADCAST(x) ((vf32)_mm512_set1_epi32((int)(x)))
#define GEMM_MULTIPLY_ADD(a, b, c) bf16_multiply_add(a, b, c)
#define GEMM_TARGET CAMOX_AVX512_BF16
#include "gemm_nn.inc"
#undef GEMM
#undef GEMM_C
#undef gemm_operand
#undef gemm_vector
#undef GEMM_LANES
#undef GEMM_LOAD
#undef GEMM_BROADCAST
#undef GEMM_MULTIPLY_ADD
#undef GEMM_TARGET

#endif
