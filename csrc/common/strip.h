/* Strips: tiles that are small enough to lie in the cache whole, copied there as `real` with their border around them.

   A strip's rows are `pitch` reals apart. Each holds columns * channels pixels (see stencil.h) from the 64-byte boundary
   `lead` on, with `reach` columns before and after them, so that a kernel walks down or along a strip without a test. */
#ifndef CAMOX_STRIP_H
#define CAMOX_STRIP_H

#include <stddef.h>

#include "stencil.h"

/* A strip with its border: two of them lie on the stack, of which a thread may have little. */
#define CAMOX_STRIP_BYTES 49152
/* The longest row of a contiguous strip; columns and channels of a channels_last one. */
#define CAMOX_STRIP_WIDTH 512
#define CAMOX_STRIP_COLUMNS 16
#define CAMOX_STRIP_CHANNELS 32
/* The longest row with one column of border. */
#define CAMOX_STRIP_PITCH 640

typedef struct {
  int64_t lead, pitch;
} camox_strip;

static inline int64_t camox_strip_round(int64_t n) { return (n + 15) & ~(int64_t)15; }

static inline camox_strip camox_strip_of(const camox_tiling *t, int64_t reach) {
  int64_t lead = camox_strip_round(reach * t->tile_channels);
  return (camox_strip){lead, 2 * lead + camox_strip_round(t->tile_columns * t->tile_channels)};
}

static inline camox_tiling camox_strip_tiling_of(int channels_last, int64_t batch, int64_t channels, int64_t height,
                                                 int64_t width, int64_t reach, size_t real_size) {
  camox_tiling t = {.height = height, .width = width, .channels = channels};
  if (batch == 0 || channels == 0 || height == 0 || width == 0) return t;
  t.tile_channels = channels_last ? camox_min_i64(channels, CAMOX_STRIP_CHANNELS) : 1;
  t.tile_columns = camox_min_i64(width, channels_last ? CAMOX_STRIP_COLUMNS : CAMOX_STRIP_WIDTH);
  int64_t size = CAMOX_STRIP_BYTES / (int64_t)real_size;
  int64_t most = camox_max_i64(size / camox_strip_of(&t, reach).pitch - 2 * reach, 1);
  t.tile_rows = camox_ceil_div(height, camox_ceil_div(height, most));
  t.row_tiles = camox_ceil_div(height, t.tile_rows);
  t.column_tiles = camox_ceil_div(width, t.tile_columns);
  t.channel_tiles = camox_ceil_div(channels, t.tile_channels);
  t.units = batch * t.channel_tiles * t.row_tiles * t.column_tiles;
  return t;
}

#endif
