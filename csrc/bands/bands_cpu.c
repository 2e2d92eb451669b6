/* Compiled once per instruction set; the body once per element type. */
#include <float.h>

#include "bands_plan.h"

#define CAMOX_BODY "../bands/bands_cpu.inc"
#include "../common/simd_foreach.h"
