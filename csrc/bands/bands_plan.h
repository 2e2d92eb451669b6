/* frequency_bands as a 5x5 stencil: for its kernels and the count of its work items. A pixel's bits depend on the image alone,
   not on its work item. */
#ifndef CAMOX_BANDS_PLAN_H
#define CAMOX_BANDS_PLAN_H

#include "../common/stencil.h"
#include "bands.h"

/* Pixels of the forward, about, that are looked through for those to recompute when one of them has overflowed. */
#define CAMOX_BANDS_RECOMPUTED 65536
/* The backward's flat traversal: its widest row; elements of its window, and how many the pass that reads it lags behind the one
   that fills it, besides the CAMOX_BANDS_REACH rows that it needs. */
#define CAMOX_BANDS_FLAT_WIDTH 128
#define CAMOX_BANDS_WINDOW 2048
#define CAMOX_BANDS_LAG 128

/* From images to outputs: x to the bands, backward the bands' gradients to grad_x. */
static inline camox_stencil bands_stencil(const camox_bands_params *p, int backward) {
  return (camox_stencil){.dtype = p->dtype,
                         .border = CAMOX_BORDER_ZEROS,
                         .channels_last = p->channels_last,
                         .batch = p->batch,
                         .channels = p->channels,
                         .height = p->height,
                         .width = p->width,
                         .reach = CAMOX_BANDS_REACH,
                         .x = backward ? p->bands : &p->x,
                         .map = backward ? &p->grad_x : p->bands,
                         .scratch = p->scratch};
}

#endif
