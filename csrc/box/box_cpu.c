/* Compiled once per instruction set; the body once per element type. */
#include "box.h"
#include "box_plan.h"

#define CAMOX_BODY "../box/box_cpu.inc"
#include "../common/simd_foreach.h"
