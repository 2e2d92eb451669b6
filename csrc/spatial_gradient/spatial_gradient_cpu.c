/* Compiled once per instruction set; the body once per element type. */
#include "spatial_gradient_plan.h"

#define CAMOX_BODY "../spatial_gradient/spatial_gradient_cpu.inc"
#include "../common/simd_foreach.h"
