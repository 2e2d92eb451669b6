/* Compiled once per instruction set; the body once per element type. */
#include "bias_gelu.h"

#include "bias_gelu_plan.h"

#define CAMOX_BODY "../bias_gelu/bias_gelu_cpu.inc"
#include "../common/simd_foreach.h"
