/* How a (B,C,H,W) picture is cut into tiles for kernels that look at neighbouring pixels.

   A tile is a strip of rows by a run of columns by a run of channels. In memory order a row of a tile is one line of
   columns * channels elements in which a step of one column is `channels` elements: 1 for contiguous pictures, whose
   tiles hold one channel, and up to CAMOX_TILE_CHANNELS for channels_last. One stencil body serves both.

   Narrow contiguous pictures, whose rows would leave vectors half empty, are `flat` instead: a tile is a strip of whole
   rows that is walked as one run across row ends, with masks where a neighbour lies in another row.                  */
#ifndef CAMOX_STENCIL_H
#define CAMOX_STENCIL_H

#include <stdint.h>

#include "integers.h"

/* A tile's line stays small enough that the rows a stencil keeps lie in the L1 cache. */
#define CAMOX_TILE_ELEMENTS 2048
#define CAMOX_TILE_CHANNELS 128
#define CAMOX_TILE_ROWS 64
/* Flat tiles: widest row, and elements of a strip. */
#define CAMOX_FLAT_WIDTH 512
#define CAMOX_FLAT_ELEMENTS 4096
/* Planes up to this many pixels are crossed so often that every vector looks for their first and last rows. */
#define CAMOX_FLAT_SMALL_PLANE 256
/* The most tensors that a walk writes. */
#define CAMOX_WALK_OUTPUTS 4
/* Elements of a flat strip with `halo` more rows above and below and room to read a vector before and past the ends. */
#define CAMOX_FLAT_SIZE(halo) (CAMOX_FLAT_ELEMENTS + 2 * (halo) * CAMOX_FLAT_WIDTH + 32)
/* Elements of one line with up to `halo` more columns on both sides and room to read a whole vector past the end. */
#define CAMOX_LINE_SIZE(halo) (CAMOX_TILE_ELEMENTS + 2 * (halo) * CAMOX_TILE_CHANNELS + 16)

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
  if (t.tile_channels > most_channels) /* equal parts, in whole vectors */
    t.tile_channels = camox_ceil_div(camox_ceil_div(channels, camox_ceil_div(channels, most_channels)), 16) * 16;
  t.tile_columns = t.flat ? width : camox_min_i64(width, elements / t.tile_channels);
  /* A picture up to half as high again as a strip stays whole: each cut loads its border rows twice. */
  t.tile_rows = height <= CAMOX_TILE_ROWS * 3 / 2 ? height : CAMOX_TILE_ROWS;
  if (t.flat) {
    int64_t most = CAMOX_FLAT_ELEMENTS / width;
    t.tile_rows = camox_ceil_div(height, camox_ceil_div(height, most));
  }
  t.row_tiles = camox_ceil_div(height, t.tile_rows);
  t.column_tiles = camox_ceil_div(width, t.tile_columns);
  t.channel_tiles = camox_ceil_div(channels, t.tile_channels);
  t.units = batch * t.channel_tiles * t.row_tiles * t.column_tiles;
  return t;
}

static inline camox_tiling camox_tiling_of(int channels_last, int64_t batch, int64_t channels, int64_t height, int64_t width) {
  return camox_tiling_within(channels_last, batch, channels, height, width, CAMOX_TILE_ELEMENTS, CAMOX_TILE_CHANNELS);
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

#endif
