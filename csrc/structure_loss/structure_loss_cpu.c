/* Compiled once per instruction set; the body once per element type. */
#include "structure_loss.h"

#include "structure_loss_plan.h"

#define CAMOX_BODY "../structure_loss/structure_loss_cpu.inc"
#include "../common/simd_foreach.h"
