/* Compiled once per instruction set, of which only AVX-512 has a kernel: that for CPUs with AVX512-BF16. */
#include "gemm.h"

#define CAMOX_BODY "../common/gemm.inc"
#include "../common/simd_foreach.h"

#if defined(CAMOX_SIMD_AVX512)
#include "gemm_cpu.inc"
#endif
