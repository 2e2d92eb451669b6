/* How edge_maps is cut into tiles, by its kernels and by whoever asks how many there are. */
#ifndef CAMOX_EDGE_PLAN_H
#define CAMOX_EDGE_PLAN_H

#include "../common/stencil.h"
#include "edge.h"

/* A line of a tile and the channels of one of its columns, in the type that is computed in: backward keeps about twenty
   such lines on the stack, of which a thread may have little. */
#define EDGE_LINE_BYTES 6144
#define EDGE_CHANNELS_BYTES 512
/* Elements of one line with `halo` more columns on both sides and room to read a whole vector past the end. */
#define EDGE_LINE_SIZE(halo) ((EDGE_LINE_BYTES + 2 * (halo) * EDGE_CHANNELS_BYTES) / sizeof(real) + 16)

static inline camox_tiling edge_tiling(const camox_edge_params *p) {
  int64_t size = p->dtype == CAMOX_F64 ? sizeof(double) : sizeof(float);
  return camox_tiling_within(p->channels_last, p->batch, p->channels, p->height, p->width, EDGE_LINE_BYTES / size,
                             EDGE_CHANNELS_BYTES / size);
}

#endif
