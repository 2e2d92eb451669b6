/* edge_maps as a 3x3 stencil: for its kernels and the count of its work items. */
#ifndef CAMOX_EDGE_PLAN_H
#define CAMOX_EDGE_PLAN_H

#include "../common/stencil.h"
#include "edge.h"

static inline camox_stencil edge_stencil(const camox_edge_params *p) { return (camox_stencil)CAMOX_STENCIL_OF(p, p->maps); }

#endif
