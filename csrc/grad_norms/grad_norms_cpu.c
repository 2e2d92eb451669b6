/* Compiled once per instruction set; the body once per element type. */
#include "grad_norms.h"

#define CAMOX_BODY "../grad_norms/grad_norms_cpu.inc"
#include "../common/simd_foreach.h"
