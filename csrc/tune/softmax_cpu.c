/* Compiled once per instruction set; the body once per element type. */
#include "softmax.h"

#include "../common/integers.h"

#define CAMOX_WITHOUT_F64
#define CAMOX_BODY "../tune/softmax_cpu.inc"
#include "../common/simd_foreach.h"
