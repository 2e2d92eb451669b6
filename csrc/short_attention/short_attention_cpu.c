/* Compiled once per instruction set; the body once per element type. */
#include "short_attention.h"

#include <stdlib.h>

#include "short_attention_plan.h"

#define CAMOX_BODY "../short_attention/short_attention_cpu.inc"
#include "../common/simd_foreach.h"
