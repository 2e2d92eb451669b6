/* Compiled once per instruction set; the body once per element type. */
#include "edge_plan.h"

#define CAMOX_BODY "../edge/edge_cpu.inc"
#include "../common/simd_foreach.h"
