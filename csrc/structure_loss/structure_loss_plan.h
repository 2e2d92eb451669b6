/* How images are divided into work items: for the kernels and for whoever asks how many items there are. */
#ifndef CAMOX_STRUCTURE_LOSS_PLAN_H
#define CAMOX_STRUCTURE_LOSS_PLAN_H

#include "structure_loss.h"

/* Pixels of a work item, a multiple of every vector. A block of a GPU has fewer, so that a batch of eight masks of 352 x 352
   fills its multiprocessors more than once. */
#if defined(CAMOX_CUDA_PART) || defined(__CUDACC__) || defined(CAMOX_CUDA_EMULATOR)
#define CAMOX_STRUCTURE_PIXELS 2048
#else
#define CAMOX_STRUCTURE_PIXELS 8192
#endif

static inline int64_t camox_structure_items_per_image(const camox_structure_loss_params *p) {
  return (p->pixels + CAMOX_STRUCTURE_PIXELS - 1) / CAMOX_STRUCTURE_PIXELS;
}

#endif
