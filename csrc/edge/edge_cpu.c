/* Compiled once per instruction set; the body once per element type. */
#include "edge_plan.h"

/* From so many bytes read and written on they come from memory, and this many bytes ahead of their use is early enough. */
#define EDGE_FAR ((int64_t)12 << 20)
#define EDGE_AHEAD 2048

static int edge_is_far(const camox_edge_params *p) {
  int64_t element = p->dtype == CAMOX_F64 ? 8 : p->dtype == CAMOX_F32 ? 4 : 2;
  return (CAMOX_EDGE_MAPS * element) * p->batch * p->channels * p->height * p->width >= EDGE_FAR;
}

#define CAMOX_BODY "../edge/edge_cpu.inc"
#include "../common/simd_foreach.h"
