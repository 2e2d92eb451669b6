/* How short_attention cuts its work: shared by the units' count and the kernels. */
#ifndef CAMOX_SHORT_ATTENTION_PLAN_H
#define CAMOX_SHORT_ATTENTION_PLAN_H

#include "short_attention.h"

/* Consecutive (s,h) of a unit: a multiple of every vector's lanes. */
#define CAMOX_SHORT_ATTENTION_ITEMS 32

/* What the walk with one item a lane holds at most: T, T D and T T. */
#define CAMOX_SA_LANES_LENGTH 16
#define CAMOX_SA_LANES_ELEMENTS 256
#define CAMOX_SA_LANES_WEIGHTS (CAMOX_SA_LANES_LENGTH * CAMOX_SA_LANES_LENGTH)

static inline int camox_short_attention_by_lanes(const camox_short_attention_params *p) {
  return p->length <= CAMOX_SA_LANES_LENGTH && p->length * p->dim <= CAMOX_SA_LANES_ELEMENTS;
}

#endif
