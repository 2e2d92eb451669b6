/* How short_attention is divided into work items, and which of its two ways computes them. */
#ifndef CAMOX_SHORT_ATTENTION_PLAN_H
#define CAMOX_SHORT_ATTENTION_PLAN_H

#include "short_attention.h"

/* Problems of a work item, consecutive (s,h): a multiple of every vector's lanes. */
#define CAMOX_SHORT_ATTENTION_PROBLEMS 32

/* The largest T, T D and T T that are computed with one problem per lane. */
#define CAMOX_SA_LANES_LENGTH 16
#define CAMOX_SA_LANES_ELEMENTS 256
#define CAMOX_SA_LANES_WEIGHTS (CAMOX_SA_LANES_LENGTH * CAMOX_SA_LANES_LENGTH)

static inline int camox_short_attention_by_lanes(const camox_short_attention_params *p) {
  return p->length <= CAMOX_SA_LANES_LENGTH && p->length * p->dim <= CAMOX_SA_LANES_ELEMENTS;
}

#endif
