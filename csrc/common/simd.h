/* The vectors of one kernel body: the build compiles each *_cpu.c once per instruction set and this file picks the width.

   A body is written against `vr`, a vector of VR_LANES `real` (float; double where CAMOX_DTYPE is f64). Arithmetic and
   comparisons use the compiler's vector operators, so every instruction set runs the same IEEE operations in the same
   order. There are two multiply-adds, a * b + c:
     VR(multiply_add)(a, b, c)  may fuse: one instruction, rounded once, where there is one, else two. For long sums, and for
                                products that are exact, such as by a power of two, where the bits are the same everywhere.
     VR(fma)(a, b, c)           must fuse (simd_math.h): rounded once on every instruction set, emulated where it has none.
                                float64, which has only the portable variant, rounds twice.
   `elem` is the type in memory. Include this file with these defined:
     CAMOX_ISA    portable | avx2 | avx512 (by the build)
     CAMOX_DTYPE  f32 | bf16 | f16 | f64   (by simd_foreach.h)                                                          */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CAMOX_PASTE3_(a, b, c) a##_##b##_##c
#define CAMOX_PASTE3(a, b, c) CAMOX_PASTE3_(a, b, c)
/* CAMOX_VARIANT(camox_edge_forward) -> camox_edge_forward_f32_avx2 */
#define CAMOX_VARIANT(name) CAMOX_PASTE3(name, CAMOX_DTYPE, CAMOX_ISA)

#if defined(CAMOX_SIMD_AVX512)
#include "simd_avx512.h"
#elif defined(CAMOX_SIMD_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

CAMOX_DEFINE_FIRST(f32, float, vf32, VF32_LANES)
CAMOX_DEFINE_FIRST(bf16, uint16_t, vf32, VF32_LANES)
CAMOX_DEFINE_FIRST(f16, uint16_t, vf32, VF32_LANES)
#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512)
CAMOX_DEFINE_FIRST(f64, double, vf64, VF64_LANES)
CAMOX_INLINE vf64 vf64_load_n(const double *from, ptrdiff_t n) { return vload_n_f64(from, n); }
CAMOX_INLINE void vf64_store_n(double *to, vf64 value, ptrdiff_t n) { vstore_n_f64(to, value, n); }
#endif
CAMOX_INLINE vf32 vf32_load_n(const float *from, ptrdiff_t n) { return vload_n_f32(from, n); }
CAMOX_INLINE void vf32_store_n(float *to, vf32 value, ptrdiff_t n) { vstore_n_f32(to, value, n); }
#include "simd_stream.h"
