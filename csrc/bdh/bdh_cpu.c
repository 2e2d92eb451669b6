/* Compiled once per instruction set; the body once per element type. */
#include "bdh.h"

#include "bdh_plan.h"

#define CAMOX_BODY "../bdh/bdh_cpu.inc"
#include "../common/simd_foreach.h"

#if defined(CAMOX_SIMD_AVX512)
#include "bdh_avx512_bf16.inc"
#endif
