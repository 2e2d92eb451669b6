/* Compiled once per instruction set; the body once per element type. */
#include "../common/integers.h"
#include "upsample.h"

#define CAMOX_WITHOUT_F64
#define CAMOX_BODY "../tune/upsample_cpu.inc"
#include "../common/simd_foreach.h"
