/* Compiled once per instruction set; the body once per element type. */
#include "rope.h"

#include "rope_plan.h"

#define CAMOX_BODY "../rope/rope_cpu.inc"
#include "../common/simd_foreach.h"
