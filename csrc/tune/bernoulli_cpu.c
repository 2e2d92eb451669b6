/* Compiled once per instruction set; the body once per element type. */
#include "bernoulli.h"

#include "../common/integers.h"

#define CAMOX_BODY "../tune/bernoulli_cpu.inc"
#include "../common/simd_foreach.h"
