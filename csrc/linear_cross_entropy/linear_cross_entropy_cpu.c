/* Compiled once per instruction set; the body once per element type. */
#include "linear_cross_entropy.h"

#include "linear_cross_entropy_plan.h"

#define CAMOX_BODY "../linear_cross_entropy/linear_cross_entropy_cpu.inc"
#include "../common/simd_foreach.h"
