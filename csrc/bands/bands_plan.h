/* The work items of frequency_bands on the CPU. A pixel's bits depend on the image alone, not on its work item.

   flat    all tensors have contiguous planes of at most CAMOX_BANDS_FLAT_WIDTH columns: a work item is some planes, or some
           rows of one plane, traversed as one run of elements
   tiled   all others: the tiles of stencil.h                                                                          */
#ifndef CAMOX_BANDS_PLAN_H
#define CAMOX_BANDS_PLAN_H

#include "../common/stencil.h"
#include "bands.h"

#define CAMOX_BANDS_FLAT_WIDTH 128
/* Most elements of a work item of rows and of one of planes; the buffer of either, with a border and a vector past the end. */
#define CAMOX_BANDS_FLAT_ROWS 8192
#define CAMOX_BANDS_FLAT_PLANES 4096
#define CAMOX_BANDS_FLAT_SIZE \
  (CAMOX_BANDS_FLAT_ROWS + 16 * CAMOX_BANDS_FLAT_WIDTH + 2 * CAMOX_BANDS_REACH * CAMOX_BANDS_FLAT_WIDTH + 32)
/* A row of a tile as it is computed: the backward has two dozen on the stack of its thread, which may be small. */
#define CAMOX_BANDS_ROW_BYTES 8192
/* How far ahead of its loads a flat traversal prefetches. */
#define CAMOX_BANDS_PREFETCH_BYTES 2048
/* Elements of the flat backward's window, and how many the pass that reads it lags behind the one that fills it, besides the
   CAMOX_BANDS_REACH rows that it needs. */
#define CAMOX_BANDS_WINDOW 2048
#define CAMOX_BANDS_LAG 128

typedef struct {
  int64_t items;
  int flat;
  camox_tiling tiling;      /* tiled */
  int64_t block;            /* flat: elements that are contiguous in every tensor */
  int64_t block_items;      /* work items of a block */
  int64_t span, span_items; /* elements and work items of a plane that is divided, or of the planes of one work item and 1 */
  int64_t elements;         /* of a work item at most */
} camox_bands_plan;

/* Elements [begin, end) of a block. */
typedef struct {
  int64_t block, begin, end;
} camox_bands_item;

/* Whether the planes of an element of the batch are contiguous. */
static inline int camox_bands_dense(const camox_bands_params *p, const camox_view4 *view) {
  return view->data == NULL || ((p->width == 1 || view->stride[3] == 1) && (p->height == 1 || view->stride[2] == p->width) &&
                                (p->channels == 1 || view->stride[1] == p->height * p->width));
}

static inline camox_bands_plan camox_bands_plan_of(const camox_bands_params *p) {
  /* Lanes count the positions in a plane in 32 bits. */
  camox_bands_plan plan = {.flat = !p->channels_last && p->width <= CAMOX_BANDS_FLAT_WIDTH && p->height < 1 << 23};
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return plan;
  int64_t plane = p->height * p->width, blocks = 1;
  plan.block = p->batch * p->channels * plane;
  for (int i = 0; i < CAMOX_BANDS_MAPS + 2; ++i) {
    const camox_view4 *view = i < CAMOX_BANDS_MAPS ? &p->bands[i] : i == CAMOX_BANDS_MAPS ? &p->x : &p->grad_x;
    plan.flat &= camox_bands_dense(p, view);
    if (view->data && p->batch > 1 && view->stride[0] != p->channels * plane) blocks = p->batch;
  }
  if (!plan.flat) {
    plan.tiling = camox_tiling_of(p->channels_last, p->batch, p->channels, p->height, p->width);
    camox_tiling *t = &plan.tiling;
    t->flat = 0;
    int64_t most = CAMOX_BANDS_ROW_BYTES / (p->dtype == CAMOX_F64 ? 8 : 4) / t->tile_channels;
    t->tile_columns = camox_min_i64(t->width, most);
    t->column_tiles = camox_ceil_div(t->width, t->tile_columns);
    t->units = plan.items = p->batch * t->channel_tiles * t->row_tiles * t->column_tiles;
    return plan;
  }
  plan.block /= blocks;
  /* After items of a multiple of 16 elements the vectors of the next item are aligned. */
  int64_t aligned = 16;
  for (int64_t n = plane <= CAMOX_BANDS_FLAT_PLANES ? plane : p->width; aligned > 1 && n % 2 == 0; n /= 2) aligned /= 2;
  if (plane <= CAMOX_BANDS_FLAT_PLANES) {
    int64_t planes = CAMOX_BANDS_FLAT_PLANES / plane;
    plan.elements = plan.span = (planes > aligned ? planes / aligned * aligned : planes) * plane;
    plan.span_items = 1;
  } else {
    int64_t rows = camox_ceil_div(p->height, camox_ceil_div(plane, CAMOX_BANDS_FLAT_ROWS));
    plan.elements = camox_ceil_div(rows, aligned) * aligned * p->width;
    plan.span = plane;
    plan.span_items = camox_ceil_div(plane, plan.elements);
  }
  plan.block_items = camox_ceil_div(plan.block, plan.span) * plan.span_items;
  plan.items = blocks * plan.block_items;
  return plan;
}

static inline camox_bands_item camox_bands_item_at(const camox_bands_plan *plan, int64_t item) {
  int64_t index = item % plan->block_items, span = index / plan->span_items * plan->span;
  int64_t begin = span + index % plan->span_items * plan->elements;
  int64_t end = camox_min_i64(camox_min_i64(begin + plan->elements, span + plan->span), plan->block);
  return (camox_bands_item){item / plan->block_items, begin, end};
}

#endif
