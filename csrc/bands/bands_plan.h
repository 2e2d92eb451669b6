/* How the CPU cuts frequency_bands into independent units. A pixel's bits depend on the image alone, not on its unit.

   flat   every tensor has dense planes, one after the other, no wider than CAMOX_BANDS_FLAT_WIDTH: a unit is some whole
          planes, or whole rows of one plane, walked as one run of elements.
   lines  else: the tiles of stencil.h.                                                                                 */
#ifndef CAMOX_BANDS_PLAN_H
#define CAMOX_BANDS_PLAN_H

#include "../common/stencil.h"
#include "bands.h"

#define CAMOX_BANDS_FLAT_WIDTH 128
/* Planes of so few elements that most vectors have a pixel which lacks a row above or below. */
#define CAMOX_BANDS_SMALL 128
/* Elements of a unit of rows, and of one of planes, at most; and with a border and room to read a vector past the end. */
#define CAMOX_BANDS_FLAT_ROWS 8192
#define CAMOX_BANDS_FLAT_PLANES 4096
#define CAMOX_BANDS_FLAT_SIZE \
  (CAMOX_BANDS_FLAT_ROWS + 16 * CAMOX_BANDS_FLAT_WIDTH + 2 * CAMOX_BANDS_REACH * CAMOX_BANDS_FLAT_WIDTH + 32)
/* Of a tile's line as it is computed; the backward keeps two dozen on the stack of a thread, which may be small. */
#define CAMOX_BANDS_LINE_BYTES 8192
/* Bytes ahead of a walk that are asked for. */
#define CAMOX_BANDS_AHEAD 2048
/* Elements of the backward's window, and how far behind the walk that fills it the one that reads it stays, besides the
   BANDS_REACH rows that it needs. */
#define CAMOX_BANDS_WINDOW 2048
#define CAMOX_BANDS_LAG 128

typedef struct {
  int64_t units;
  int flat;
  camox_tiling tiling;      /* of lines */
  int64_t block;            /* flat: elements that lie one after the other in every tensor */
  int64_t block_units;      /* units of a block */
  int64_t part, part_units; /* elements and units of a plane that is cut, or of a unit of planes and 1 */
  int64_t elements;         /* of a unit at most */
} camox_bands_cut;

/* Elements [begin, end) of a block. */
typedef struct {
  int64_t block, begin, end;
} camox_bands_unit;

/* Whether the planes of an element of the batch are dense and lie one after the other. */
static inline int camox_bands_dense(const camox_bands_params *p, const camox_view4 *view) {
  return view->data == NULL || ((p->width == 1 || view->stride[3] == 1) && (p->height == 1 || view->stride[2] == p->width) &&
                                (p->channels == 1 || view->stride[1] == p->height * p->width));
}

static inline camox_bands_cut camox_bands_cut_of(const camox_bands_params *p) {
  /* Lanes count the positions in a plane in 32 bits. */
  camox_bands_cut cut = {.flat = !p->channels_last && p->width <= CAMOX_BANDS_FLAT_WIDTH && p->height < 1 << 23};
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return cut;
  int64_t plane = p->height * p->width, blocks = 1;
  cut.block = p->batch * p->channels * plane;
  for (int i = 0; i < CAMOX_BANDS_MAPS + 2; ++i) {
    const camox_view4 *view = i < CAMOX_BANDS_MAPS ? &p->bands[i] : i == CAMOX_BANDS_MAPS ? &p->x : &p->grad_x;
    cut.flat &= camox_bands_dense(p, view);
    if (view->data && p->batch > 1 && view->stride[0] != p->channels * plane) blocks = p->batch;
  }
  if (!cut.flat) {
    cut.tiling = camox_tiling_of(p->channels_last, p->batch, p->channels, p->height, p->width);
    camox_tiling *t = &cut.tiling;
    t->flat = 0;
    int64_t most = CAMOX_BANDS_LINE_BYTES / (p->dtype == CAMOX_F64 ? 8 : 4) / t->tile_channels;
    t->tile_columns = camox_min_i64(t->width, most);
    t->column_tiles = camox_ceil_div(t->width, t->tile_columns);
    t->units = cut.units = p->batch * t->channel_tiles * t->row_tiles * t->column_tiles;
    return cut;
  }
  cut.block /= blocks;
  /* Units of a multiple of 16 elements leave the next one's vectors aligned. */
  int64_t whole = 16;
  for (int64_t n = plane <= CAMOX_BANDS_FLAT_PLANES ? plane : p->width; whole > 1 && n % 2 == 0; n /= 2) whole /= 2;
  if (plane <= CAMOX_BANDS_FLAT_PLANES) {
    int64_t planes = CAMOX_BANDS_FLAT_PLANES / plane;
    cut.elements = cut.part = (planes > whole ? planes / whole * whole : planes) * plane;
    cut.part_units = 1;
  } else {
    int64_t rows = camox_ceil_div(p->height, camox_ceil_div(plane, CAMOX_BANDS_FLAT_ROWS));
    cut.elements = camox_ceil_div(rows, whole) * whole * p->width;
    cut.part = plane;
    cut.part_units = camox_ceil_div(plane, cut.elements);
  }
  cut.block_units = camox_ceil_div(cut.block, cut.part) * cut.part_units;
  cut.units = blocks * cut.block_units;
  return cut;
}

static inline camox_bands_unit camox_bands_unit_at(const camox_bands_cut *cut, int64_t unit) {
  int64_t index = unit % cut->block_units, part = index / cut->part_units * cut->part;
  int64_t begin = part + index % cut->part_units * cut->elements;
  int64_t end = camox_min_i64(camox_min_i64(begin + cut->elements, part + cut->part), cut->block);
  return (camox_bands_unit){unit / cut->block_units, begin, end};
}

#endif
