/* How tensors are divided into work items: for the counts of work items, the kernels and the CUDA launchers. */
#ifndef CAMOX_DROPOUT_PLAN_H
#define CAMOX_DROPOUT_PLAN_H

#include <string.h>

#include "dropout.h"

/* Elements of a work item: a multiple of the blocks of all instruction sets. */
#define CAMOX_DROPOUT_TILE 16384
/* Shorter rows are traversed in row-major order, longer ones in tiles: some elements of each row of a plane, then the next. */
#define CAMOX_DROPOUT_LONG_ROW 256
#define CAMOX_DROPOUT_ROW_TILE 256

/* dims, size and view: the same elements in the fewest dimensions. A work item is one tile, `tile` of the `length` elements of
   each of the `rows` rows of one of the `planes` planes. */
typedef struct {
  int dims;
  int contiguous; /* every view has one dimension of stride 1 */
  int adjacent;   /* long rows have stride 1 in every view */
  int64_t size[CAMOX_DROPOUT_DIMS];
  camox_dropout_view view[CAMOX_DROPOUT_VIEWS];
  int64_t elements, planes, rows, length, tile, tiles, items;
} camox_dropout_plan;

static inline int camox_dropout_mergeable(const camox_dropout_params *p, const int64_t outer[CAMOX_DROPOUT_VIEWS], int dim) {
  for (int v = 0; v < CAMOX_DROPOUT_VIEWS; ++v)
    if (p->view[v].data && outer[v] != p->view[v].stride[dim] * p->size[dim]) return 0;
  return 1;
}

static inline camox_dropout_plan camox_dropout_plan_of(const camox_dropout_params *p) {
  camox_dropout_plan plan;
  memset(&plan, 0, sizeof plan);
  plan.elements = 1;
  for (int d = 0; d < p->dims; ++d) {
    plan.elements *= p->size[d];
    if (p->size[d] == 1) continue;
    int64_t outer[CAMOX_DROPOUT_VIEWS];
    for (int v = 0; v < CAMOX_DROPOUT_VIEWS; ++v) outer[v] = plan.dims > 0 ? plan.view[v].stride[plan.dims - 1] : 0;
    int merged = plan.dims > 0 && camox_dropout_mergeable(p, outer, d);
    if (!merged) plan.size[plan.dims++] = 1;
    plan.size[plan.dims - 1] *= p->size[d];
    for (int v = 0; v < CAMOX_DROPOUT_VIEWS; ++v) plan.view[v].stride[plan.dims - 1] = p->view[v].stride[d];
  }
  if (plan.dims == 0) {
    plan.dims = 1, plan.size[0] = 1;
    for (int v = 0; v < CAMOX_DROPOUT_VIEWS; ++v) plan.view[v].stride[0] = 1;
  }
  int stride_1 = 1;
  for (int v = 0; v < CAMOX_DROPOUT_VIEWS; ++v) {
    plan.view[v].data = p->view[v].data;
    stride_1 = stride_1 && (p->view[v].data == NULL || plan.view[v].stride[plan.dims - 1] == 1);
  }
  plan.contiguous = stride_1 && plan.dims == 1;
  if (plan.elements == 0) return plan;
  plan.planes = plan.rows = 1, plan.length = plan.elements, plan.tile = CAMOX_DROPOUT_TILE;
  if (plan.dims > 1 && plan.size[plan.dims - 1] >= CAMOX_DROPOUT_LONG_ROW) {
    plan.length = plan.size[plan.dims - 1], plan.rows = plan.size[plan.dims - 2];
    plan.planes = plan.elements / (plan.rows * plan.length);
    plan.adjacent = stride_1;
    if (!stride_1) plan.tile = CAMOX_DROPOUT_ROW_TILE;
  }
  plan.tiles = (plan.length + plan.tile - 1) / plan.tile;
  plan.items = plan.planes * plan.tiles;
  return plan;
}

/* ---- rows of dropout_add_layer_norm ---- */

/* Elements of a work item, and its fewest and most rows, whose gradients of weight and bias it adds one by one. */
#define CAMOX_DROPOUT_NORM_ELEMENTS 16384
#define CAMOX_DROPOUT_NORM_LEAST_ROWS 16
#define CAMOX_DROPOUT_NORM_MOST_ROWS 32

static inline int64_t camox_dropout_norm_item_rows(int64_t width) {
  int64_t rows = width > 0 ? CAMOX_DROPOUT_NORM_ELEMENTS / width : CAMOX_DROPOUT_NORM_MOST_ROWS;
  if (rows < CAMOX_DROPOUT_NORM_LEAST_ROWS) return CAMOX_DROPOUT_NORM_LEAST_ROWS;
  return rows < CAMOX_DROPOUT_NORM_MOST_ROWS ? rows : CAMOX_DROPOUT_NORM_MOST_ROWS;
}

#endif
