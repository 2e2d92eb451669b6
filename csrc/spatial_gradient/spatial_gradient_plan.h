/* spatial_gradient as a 3x3 stencil: for its kernels and the count of its work items. */
#ifndef CAMOX_SPATIAL_GRADIENT_PLAN_H
#define CAMOX_SPATIAL_GRADIENT_PLAN_H

#include "../common/stencil.h"
#include "spatial_gradient.h"

static inline camox_stencil gradient_stencil(const camox_spatial_gradient_params *p) {
  return (camox_stencil)CAMOX_STENCIL_OF(p, p->gradient);
}

#endif
