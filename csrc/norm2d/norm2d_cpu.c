/* Compiled once per instruction set; the body once per element type. */
#include "norm2d.h"

#include "norm2d_plan.h"

#define CAMOX_BODY "../norm2d/norm2d_cpu.inc"
#include "../common/simd_foreach.h"
