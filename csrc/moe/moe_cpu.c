/* Compiled once per instruction set; the body once per element type. */
#include "moe.h"

#include "moe_plan.h"

#define CAMOX_BODY "../moe/moe_cpu.inc"
#include "../common/simd_foreach.h"
