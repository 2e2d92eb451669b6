/* The rows of a work item: for the count of work items, the kernels and the CUDA launchers. */
#ifndef CAMOX_BIAS_GELU_PLAN_H
#define CAMOX_BIAS_GELU_PLAN_H

#include "bias_gelu.h"

/* Elements of a work item, and its fewest and most rows. Fewer rows round less: a work item adds their gradients one by one. */
#define CAMOX_BIAS_GELU_ELEMENTS 16384
#define CAMOX_BIAS_GELU_LEAST_ROWS 16
#define CAMOX_BIAS_GELU_MOST_ROWS 32

static inline int64_t camox_bias_gelu_item_rows(int64_t columns) {
  int64_t rows = columns > 0 ? CAMOX_BIAS_GELU_ELEMENTS / columns : CAMOX_BIAS_GELU_MOST_ROWS;
  if (rows < CAMOX_BIAS_GELU_LEAST_ROWS) return CAMOX_BIAS_GELU_LEAST_ROWS;
  return rows < CAMOX_BIAS_GELU_MOST_ROWS ? rows : CAMOX_BIAS_GELU_MOST_ROWS;
}

#endif
