/* Rows in memory <-> one row per lane. Included from a kernel body after simd.h.

   V_transpose transposes a block of as many vectors as a vector has lanes: row[i] lane j <-> row[j] lane i. Each step
   interleaves the rows of the block's two halves; after log2(lanes) steps rows have become columns. vload_quads and
   vstore_quads transpose four adjacent elements, from `at` on, of every row at once: fewer and cheaper shuffles, since most
   stay within 16 bytes. vload_groups and vstore_groups, where vectors have 16 lanes, do so for rows that lie four by four next
   to each other: whole vectors are read and written. */
#ifndef CAMOX_SIMD_TRANSPOSE_H
#define CAMOX_SIMD_TRANSPOSE_H

#define CAMOX_DEFINE_TRANSPOSE(V, LANES)                                             \
  CAMOX_INLINE void V##_transpose(V *row) {                                          \
    _Pragma("GCC unroll 4") for (int step = 1; step < (LANES); step *= 2) {          \
      V zipped[LANES];                                                               \
      _Pragma("GCC unroll 8") for (int i = 0; i < (LANES) / 2; ++i) {                \
        zipped[2 * i] = V##_zip_low(row[i], row[i + (LANES) / 2]);                   \
        zipped[2 * i + 1] = V##_zip_high(row[i], row[i + (LANES) / 2]);              \
      }                                                                              \
      _Pragma("GCC unroll 16") for (int i = 0; i < (LANES); ++i) row[i] = zipped[i]; \
    }                                                                                \
  }

CAMOX_DEFINE_TRANSPOSE(vf32, VF32_LANES)
#if VF64_LANES == 2
CAMOX_DEFINE_TRANSPOSE(vf64, VF64_LANES)
#endif

/* The same for each 16 bytes of four vectors, and four elements of every fourth row <-> a vector. */
#if defined(CAMOX_SIMD_AVX512)
typedef __m512 camox_quads;
#define CAMOX_QUADS(name) _mm512_##name
CAMOX_INLINE vf32 vload_quad_f32(const float *const *row, ptrdiff_t at) {
  __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(row[0] + at));
  v = _mm512_insertf32x4(v, _mm_loadu_ps(row[4] + at), 1);
  v = _mm512_insertf32x4(v, _mm_loadu_ps(row[8] + at), 2);
  return (vf32)_mm512_insertf32x4(v, _mm_loadu_ps(row[12] + at), 3);
}
CAMOX_INLINE void vstore_quad_f32(float *const *row, ptrdiff_t at, vf32 v) {
  _mm_storeu_ps(row[0] + at, _mm512_castps512_ps128((__m512)v));
  _mm_storeu_ps(row[4] + at, _mm512_extractf32x4_ps((__m512)v, 1));
  _mm_storeu_ps(row[8] + at, _mm512_extractf32x4_ps((__m512)v, 2));
  _mm_storeu_ps(row[12] + at, _mm512_extractf32x4_ps((__m512)v, 3));
}
#elif defined(CAMOX_SIMD_AVX2)
typedef __m256 camox_quads;
#define CAMOX_QUADS(name) _mm256_##name
CAMOX_INLINE vf32 vload_quad_f32(const float *const *row, ptrdiff_t at) {
  return (vf32)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[0] + at)), _mm_loadu_ps(row[4] + at), 1);
}
CAMOX_INLINE void vstore_quad_f32(float *const *row, ptrdiff_t at, vf32 v) {
  _mm_storeu_ps(row[0] + at, _mm256_castps256_ps128((__m256)v));
  _mm_storeu_ps(row[4] + at, _mm256_extractf128_ps((__m256)v, 1));
}
#else
CAMOX_INLINE vf32 vload_quad_f32(const float *const *row, ptrdiff_t at) { return vf32_load(row[0] + at); }
CAMOX_INLINE void vstore_quad_f32(float *const *row, ptrdiff_t at, vf32 v) { vf32_store(row[0] + at, v); }
#endif

#if defined(CAMOX_QUADS)
CAMOX_INLINE void vf32_transpose_quads(vf32 *v) {
  typedef __typeof__(CAMOX_QUADS(castps_pd)((camox_quads)v[0])) pairs;
  pairs low01 = (pairs)CAMOX_QUADS(unpacklo_ps)((camox_quads)v[0], (camox_quads)v[1]);
  pairs high01 = (pairs)CAMOX_QUADS(unpackhi_ps)((camox_quads)v[0], (camox_quads)v[1]);
  pairs low23 = (pairs)CAMOX_QUADS(unpacklo_ps)((camox_quads)v[2], (camox_quads)v[3]);
  pairs high23 = (pairs)CAMOX_QUADS(unpackhi_ps)((camox_quads)v[2], (camox_quads)v[3]);
  v[0] = (vf32)CAMOX_QUADS(unpacklo_pd)(low01, low23);
  v[1] = (vf32)CAMOX_QUADS(unpackhi_pd)(low01, low23);
  v[2] = (vf32)CAMOX_QUADS(unpacklo_pd)(high01, high23);
  v[3] = (vf32)CAMOX_QUADS(unpackhi_pd)(high01, high23);
}
#else
CAMOX_INLINE void vf32_transpose_quads(vf32 *v) { vf32_transpose(v); }
#endif

/* Lane i of the result is the sum of the lanes of v[i], one vector per lane; v is overwritten. */
#if defined(CAMOX_QUADS)
CAMOX_INLINE vf32 vf32_sums(vf32 *v) {
  _Pragma("GCC unroll 4") for (int i = 0; i < VF32_LANES; i += 4) {
    vf32_transpose_quads(v + i);
    v[i] = (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3]);
  }
#if defined(CAMOX_SIMD_AVX512)
  for (int i = 0; i < 16; i += 8) {
    __m512 a = (__m512)v[i], b = (__m512)v[i + 4];
    v[i] = (vf32)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  __m512 a = (__m512)v[0], b = (__m512)v[8];
  return (vf32)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#else
  __m256 a = (__m256)v[0], b = (__m256)v[4];
  return (vf32)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#endif
}
#else
CAMOX_INLINE vf32 vf32_sums(vf32 *v) {
  vf32_transpose(v);
  return (v[0] + v[1]) + (v[2] + v[3]);
}
#endif
#if VF64_LANES == 2
CAMOX_INLINE vf64 vf64_sums(vf64 *v) {
  vf64_transpose(v);
  return v[0] + v[1];
}
#endif

#define CAMOX_DEFINE_HALF_QUAD(S)                                                        \
  CAMOX_INLINE vf32 vload_quad_##S(const uint16_t *const *row, ptrdiff_t at) {           \
    uint64_t quad[VF32_LANES / 4];                                                       \
    for (int i = 0; i < VF32_LANES / 4; ++i) memcpy(quad + i, row[4 * i] + at, 8);       \
    uint16_t halves[VF32_LANES];                                                         \
    memcpy(halves, quad, sizeof halves);                                                 \
    return vload_##S(halves);                                                            \
  }                                                                                      \
  CAMOX_INLINE void vstore_quad_##S(uint16_t *const *row, ptrdiff_t at, vf32 v) {        \
    uint16_t halves[VF32_LANES];                                                         \
    vstore_##S(halves, v);                                                               \
    for (int i = 0; i < VF32_LANES / 4; ++i) memcpy(row[4 * i] + at, halves + 4 * i, 8); \
  }
CAMOX_DEFINE_HALF_QUAD(bf16)
CAMOX_DEFINE_HALF_QUAD(f16)

/* count, a constant of at most 3, times four elements. */
#define CAMOX_DEFINE_QUADS(S, T)                                                                                          \
  CAMOX_INLINE void vload_quads_##S(vf32 *to, const T *const *row, ptrdiff_t at, int count) {                             \
    vf32 v[3][4];                                                                                                         \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) _Pragma("GCC unroll 3") for (int k = 0; k < count; ++k) v[k][i] = \
        vload_quad_##S(row + i, at + 4 * k);                                                                              \
    _Pragma("GCC unroll 3") for (int k = 0; k < count; ++k) {                                                             \
      vf32_transpose_quads(v[k]);                                                                                         \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) to[4 * k + i] = v[k][i];                                        \
    }                                                                                                                     \
  }                                                                                                                       \
  CAMOX_INLINE void vstore_quads_##S(T *const *row, ptrdiff_t at, const vf32 *from, int count) {                          \
    vf32 v[3][4];                                                                                                         \
    _Pragma("GCC unroll 3") for (int k = 0; k < count; ++k) {                                                             \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) v[k][i] = from[4 * k + i];                                      \
      vf32_transpose_quads(v[k]);                                                                                         \
    }                                                                                                                     \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) _Pragma("GCC unroll 3") for (int k = 0; k < count; ++k)           \
        vstore_quad_##S(row + i, at + 4 * k, v[k][i]);                                                                    \
  }
CAMOX_DEFINE_QUADS(f32, float)
CAMOX_DEFINE_QUADS(bf16, uint16_t)
CAMOX_DEFINE_QUADS(f16, uint16_t)

#if VF32_LANES == 16
/* 16 bytes number s of v[g] <-> 16 bytes number g of v[s] */
CAMOX_INLINE void vf32_exchange_quads(vf32 *v) {
  const __m512 low01 = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0x44);
  const __m512 high01 = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0xee);
  const __m512 low23 = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0x44);
  const __m512 high23 = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0xee);
  v[0] = (vf32)_mm512_shuffle_f32x4(low01, low23, 0x88);
  v[1] = (vf32)_mm512_shuffle_f32x4(low01, low23, 0xdd);
  v[2] = (vf32)_mm512_shuffle_f32x4(high01, high23, 0x88);
  v[3] = (vf32)_mm512_shuffle_f32x4(high01, high23, 0xdd);
}

/* Four groups of four rows of `count` (a constant of at most 4) times four elements, the rows of a group next to each other:
   row i of group g <-> lane 4 g + i. quad[count i + k] holds the elements from 4 k on of row i of each group. */
#define CAMOX_DEFINE_GROUPS(S, T)                                                                                     \
  CAMOX_INLINE void vload_groups_##S(vf32 *to, const T *const *group, ptrdiff_t at, int count) {                      \
    vf32 quad[16];                                                                                                    \
    _Pragma("GCC unroll 4") for (int m = 0; m < count; ++m) {                                                         \
      _Pragma("GCC unroll 4") for (int g = 0; g < 4; ++g) quad[4 * m + g] = vload_##S(group[g] + at + 16 * m);        \
      vf32_exchange_quads(quad + 4 * m);                                                                              \
    }                                                                                                                 \
    _Pragma("GCC unroll 4") for (int k = 0; k < count; ++k) {                                                         \
      vf32 v[4];                                                                                                      \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) v[i] = quad[count * i + k];                                 \
      vf32_transpose_quads(v);                                                                                        \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) to[4 * k + i] = v[i];                                       \
    }                                                                                                                 \
  }                                                                                                                   \
  CAMOX_INLINE void vstore_groups_##S(T *const *group, ptrdiff_t at, const vf32 *from, int count, int non_temporal) { \
    vf32 quad[16];                                                                                                    \
    _Pragma("GCC unroll 4") for (int k = 0; k < count; ++k) {                                                         \
      vf32 v[4];                                                                                                      \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) v[i] = from[4 * k + i];                                     \
      vf32_transpose_quads(v);                                                                                        \
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) quad[count * i + k] = v[i];                                 \
    }                                                                                                                 \
    _Pragma("GCC unroll 4") for (int m = 0; m < count; ++m) {                                                         \
      vf32_exchange_quads(quad + 4 * m);                                                                              \
      _Pragma("GCC unroll 4") for (int g = 0; g < 4; ++g) {                                                           \
        if (non_temporal)                                                                                             \
          vstream_##S(group[g] + at + 16 * m, quad[4 * m + g]);                                                       \
        else                                                                                                          \
          vstore_##S(group[g] + at + 16 * m, quad[4 * m + g]);                                                        \
      }                                                                                                               \
    }                                                                                                                 \
  }
CAMOX_DEFINE_GROUPS(f32, float)
CAMOX_DEFINE_GROUPS(bf16, uint16_t)
CAMOX_DEFINE_GROUPS(f16, uint16_t)
#endif

#endif
