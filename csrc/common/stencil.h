/* How a (B,C,H,W) image is divided into tiles, the work items of kernels that look at neighbouring pixels.

   A tile is a band of rows, some of their columns and some of the channels. In memory order a row of a tile is one line of
   columns * channels elements, in which one column is `channels` elements from the next: 1 for contiguous images, whose
   tiles hold one channel, and up to CAMOX_STENCIL_CHANNELS_BYTES of them for channels_last.

   Narrow contiguous images, whose rows would leave vectors half empty, are `flat` instead: a tile is a band of whole rows
   that is traversed as one run of memory across the ends of rows, with masks where a neighbour lies in another row.     */
#ifndef CAMOX_STENCIL_H
#define CAMOX_STENCIL_H

#include <stdint.h>

#include "integers.h"
#include "prefetch.h"
#include "types.h"

#define CAMOX_TILE_ROWS 64
/* Tiles of channels_last, of which an image may be one, are halved until there are so many, down to so many rows. */
#define CAMOX_TILE_ITEMS 8
#define CAMOX_TILE_LEAST_ROWS 16
/* Flat tiles: widest row, and elements of a band. */
#define CAMOX_FLAT_WIDTH 512
#define CAMOX_FLAT_ELEMENTS 4096

typedef struct {
  int64_t height, width, channels;
  int64_t tile_rows, tile_columns, tile_channels;
  int64_t row_tiles, column_tiles, channel_tiles;
  int64_t units;
  int flat;
} camox_tiling;

typedef struct {
  int64_t batch, channel, channels, row_begin, row_end, column_begin, column_end;
} camox_tile;

/* Tiles whose lines have up to `elements`, their columns up to `most_channels`. */
static inline camox_tiling camox_tiling_within(int channels_last, int64_t batch, int64_t channels, int64_t height,
                                               int64_t width, int64_t elements, int64_t most_channels) {
  camox_tiling t = {.height = height, .width = width, .channels = channels};
  if (batch == 0 || channels == 0 || height == 0 || width == 0) return t;
  t.flat = !channels_last && width <= CAMOX_FLAT_WIDTH;
  t.tile_channels = channels_last ? channels : 1;
  if (t.tile_channels > most_channels) /* in whole vectors */
    t.tile_channels = camox_even_part(channels, most_channels, 16);
  t.tile_columns = t.flat ? width : camox_min_i64(width, elements / t.tile_channels);
  /* An image up to half as high again as a band stays whole: each cut loads its border rows twice. */
  t.tile_rows = height <= CAMOX_TILE_ROWS * 3 / 2 ? height : CAMOX_TILE_ROWS;
  if (t.flat) t.tile_rows = camox_even_part(height, CAMOX_FLAT_ELEMENTS / width, 1);
  t.column_tiles = camox_ceil_div(width, t.tile_columns);
  t.channel_tiles = camox_ceil_div(channels, t.tile_channels);
  int64_t bands = batch * t.channel_tiles * t.column_tiles;
  while (channels_last && bands * camox_ceil_div(height, t.tile_rows) < CAMOX_TILE_ITEMS &&
         t.tile_rows >= 2 * CAMOX_TILE_LEAST_ROWS)
    t.tile_rows = camox_ceil_div(t.tile_rows, 2);
  t.row_tiles = camox_ceil_div(height, t.tile_rows);
  t.units = batch * t.channel_tiles * t.row_tiles * t.column_tiles;
  return t;
}

static inline camox_tile camox_tile_at(const camox_tiling *t, int64_t unit) {
  camox_tile tile;
  int64_t column = unit % t->column_tiles, rest = unit / t->column_tiles;
  int64_t row = rest % t->row_tiles;
  rest /= t->row_tiles;
  int64_t channel = rest % t->channel_tiles;
  tile.batch = rest / t->channel_tiles;
  tile.channel = channel * t->tile_channels;
  tile.channels = camox_min_i64(t->tile_channels, t->channels - tile.channel);
  tile.row_begin = row * t->tile_rows;
  tile.row_end = camox_min_i64(tile.row_begin + t->tile_rows, t->height);
  tile.column_begin = column * t->tile_columns;
  tile.column_end = camox_min_i64(tile.column_begin + t->tile_columns, t->width);
  return tile;
}

/* ---- stencils (stencil.inc) ---- */

/* The most outputs of an op, and the most filters whose gradients its backward keeps. */
#define CAMOX_STENCIL_MAPS 4
#define CAMOX_STENCIL_FILTERS 3
/* A line of a tile and the channels of one of its columns, as they are computed. Tiles of channels_last take all channels where
   they can, so that a row of them is one run of memory; nine lines of the 3x3 backward, fifteen of the 5x5 one, stay in L2. */
#define CAMOX_STENCIL_LINE_BYTES 24576
#define CAMOX_STENCIL_CHANNELS_BYTES 2048
/* Elements of a line with two more columns on both sides and room to read a whole vector past the end. */
#define CAMOX_STENCIL_LINE ((CAMOX_STENCIL_LINE_BYTES + 4 * CAMOX_STENCIL_CHANNELS_BYTES) / sizeof(real) + 16)
/* Planes up to this many pixels are crossed so often that every vector looks for their first and last rows. */
#define CAMOX_STENCIL_SMALL_PLANE 256
/* How far before their use bytes are prefetched. */
#define CAMOX_STENCIL_PREFETCH_BYTES 2048

/* What a stencil reads and writes. */
typedef struct {
  camox_dtype dtype;
  camox_border border;
  int channels_last;
  int reach; /* of the window, in pixels; 0: 1 */
  int64_t batch, channels, height, width;
  const camox_view4 *x;        /* one image or several; NULL in a backward that does not look at the image */
  const camox_view4 *map;      /* outputs, or in the backward their gradients; NULL data where one is absent */
  const camox_view4 *residual; /* backward: added to grad_x; NULL: nothing */
  const camox_view4 *grad_x;   /* backward: output */
  void *scratch;               /* CPU: CAMOX_STENCIL_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_stencil;

/* The initialiser of a camox_stencil from an op's params, which call their sizes, x and grad_x so. */
#define CAMOX_STENCIL_OF(p, maps)       \
  {.dtype = (p)->dtype,                 \
   .border = (p)->border,               \
   .channels_last = (p)->channels_last, \
   .batch = (p)->batch,                 \
   .channels = (p)->channels,           \
   .height = (p)->height,               \
   .width = (p)->width,                 \
   .x = &(p)->x,                        \
   .map = (maps),                       \
   .grad_x = &(p)->grad_x,              \
   .scratch = (p)->scratch}

static inline camox_tiling camox_stencil_tiling(const camox_stencil *s) {
  int64_t size = s->dtype == CAMOX_F64 ? sizeof(double) : sizeof(float); /* as it is computed */
  int64_t elements = CAMOX_STENCIL_LINE_BYTES / size, channels = CAMOX_STENCIL_CHANNELS_BYTES / size;
  camox_tiling t = camox_tiling_within(s->channels_last, s->batch, s->channels, s->height, s->width, elements, channels);
  if (t.units > 0) t.tile_columns = camox_ceil_div(s->width, t.column_tiles);
  return t;
}

/* What work items [begin, end) of a forward cover, piece by piece: their tiles; or whole rows of a plane, in channels_last of an
   image, as many as the tiles have. */
typedef struct {
  const camox_stencil *s;
  const camox_tiling *tiling;
  int whole_rows;
  int64_t next, end;
} camox_pieces;

static inline camox_pieces camox_pieces_of(const camox_stencil *s, const camox_tiling *t, int whole_rows, int64_t begin,
                                           int64_t end) {
  int64_t rows = s->batch * (s->channels_last ? 1 : s->channels) * s->height;
  if (whole_rows) begin = rows * begin / t->units, end = rows * end / t->units;
  return (camox_pieces){s, t, whole_rows, begin, end};
}

/* Returns 0 after the last one. */
static inline int camox_next_piece(camox_pieces *pieces, camox_tile *tile) {
  const camox_stencil *s = pieces->s;
  if (pieces->next >= pieces->end) return 0;
  if (!pieces->whole_rows) {
    *tile = camox_tile_at(pieces->tiling, pieces->next++);
    return 1;
  }
  int64_t plane = pieces->next / s->height, y = pieces->next % s->height;
  *tile = (camox_tile){.channels = s->channels_last ? s->channels : 1, .row_begin = y, .column_end = s->width};
  tile->row_end = camox_min_i64(y + (pieces->end - pieces->next), s->height);
  tile->batch = s->channels_last ? plane : plane / s->channels, tile->channel = s->channels_last ? 0 : plane % s->channels;
  pieces->next += tile->row_end - y;
  return 1;
}

#endif
