/* Compiled once per instruction set; the body once per element type. */
#include "dropout.h"

#include "dropout_plan.h"

#define CAMOX_BODY "../dropout/dropout_cpu.inc"
#include "../common/simd_foreach.h"
