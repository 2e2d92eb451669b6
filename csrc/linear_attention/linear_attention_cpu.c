/* Compiled once per instruction set; the body once per element type. */
#include "linear_attention.h"

#define CAMOX_BODY "../linear_attention/linear_attention_cpu.inc"
#include "../common/simd_foreach.h"
