/* Compiled once per instruction set; the body once per element type. */
#include "causal_plan.h"

#define CAMOX_BODY "../linear_attention/causal_cpu.inc"
#include "../common/simd_foreach.h"
