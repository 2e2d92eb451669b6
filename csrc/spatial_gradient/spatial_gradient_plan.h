/* spatial_gradient as a 3x3 stencil: for its kernels and for whoever asks how many work items there are. */
#ifndef CAMOX_SPATIAL_GRADIENT_PLAN_H
#define CAMOX_SPATIAL_GRADIENT_PLAN_H

#include "../common/stencil.h"
#include "spatial_gradient.h"

static inline camox_stencil gradient_stencil(const camox_spatial_gradient_params *p) {
  return (camox_stencil){.dtype = p->dtype,
                         .border = p->border,
                         .channels_last = p->channels_last,
                         .batch = p->batch,
                         .channels = p->channels,
                         .height = p->height,
                         .width = p->width,
                         .x = &p->x,
                         .map = p->gradient,
                         .grad_x = &p->grad_x};
}

#endif
