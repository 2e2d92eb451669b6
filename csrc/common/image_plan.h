/* The params of an op of one image as a 3x3 stencil: for its kernels and for whoever asks how many work items there are. */
#ifndef CAMOX_IMAGE_PLAN_H
#define CAMOX_IMAGE_PLAN_H

#include "image_op.h"
#include "stencil.h"

static inline camox_stencil camox_image_stencil(const camox_image_params *p) {
  return (camox_stencil)CAMOX_STENCIL_OF(p, &p->y);
}

#endif
