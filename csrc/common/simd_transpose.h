/* A square block of one vector a lane turned over: row[i] lane j <-> row[j] lane i. Every step deals the rows of the block's
   two halves like cards; after log2(lanes) steps rows have become columns. Included from a kernel body after simd.h. */
#ifndef CAMOX_SIMD_TRANSPOSE_H
#define CAMOX_SIMD_TRANSPOSE_H

#define CAMOX_DEFINE_TRANSPOSE(V, LANES)                                                   \
  CAMOX_INLINE void V##_transpose(V *row) {                                                \
    _Pragma("GCC unroll 4") for (int step = 1; step < (LANES); step *= 2) {                \
      V dealt[LANES];                                                                      \
      _Pragma("GCC unroll 8") for (int i = 0; i < (LANES) / 2; ++i) {                      \
        dealt[2 * i] = V##_zip_low(row[i], row[i + (LANES) / 2]);                          \
        dealt[2 * i + 1] = V##_zip_high(row[i], row[i + (LANES) / 2]);                     \
      }                                                                                    \
      _Pragma("GCC unroll 16") for (int i = 0; i < (LANES); ++i) row[i] = dealt[i];        \
    }                                                                                      \
  }

CAMOX_DEFINE_TRANSPOSE(vf32, VF32_LANES)
#if VF64_LANES == 2
CAMOX_DEFINE_TRANSPOSE(vf64, VF64_LANES)
#endif

#endif
