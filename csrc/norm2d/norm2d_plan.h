/* The blocks of pixels that are norm2d's work items: for their count and the kernels. */
#ifndef CAMOX_NORM2D_PLAN_H
#define CAMOX_NORM2D_PLAN_H

#include "../common/integers.h"
#include "norm2d.h"

/* Most pixels of a block, and most elements of a group's block: x, its gradient and d then stay in the L2 cache. */
#define CAMOX_NORM2D_PIXELS 1024
#define CAMOX_NORM2D_ELEMENTS 65536
/* Blocks are halved, down to so many pixels and elements, until there are this many work items. */
#define CAMOX_NORM2D_LEAST_PIXELS 64
#define CAMOX_NORM2D_ITEMS 8
#define CAMOX_NORM2D_LEAST_ELEMENTS 8192

typedef struct {
  int64_t pixels, block, blocks, items, group_channels;
} camox_norm2d_plan;

static inline camox_norm2d_plan camox_norm2d_plan_of(const camox_norm2d_params *p) {
  camox_norm2d_plan plan = {.pixels = p->height * p->width, .group_channels = p->channels / p->groups};
  if (p->batch == 0 || p->channels == 0 || plan.pixels == 0) return plan;
  int64_t most = CAMOX_NORM2D_ELEMENTS / plan.group_channels;
  if (most > CAMOX_NORM2D_PIXELS) most = CAMOX_NORM2D_PIXELS;
  most -= most % 16; /* whole vectors of the widest instruction set */
  if (most < 16) most = 16;
  int64_t blocks = camox_ceil_div(plan.pixels, most);
  while (p->batch * blocks < CAMOX_NORM2D_ITEMS && plan.pixels / (2 * blocks) >= CAMOX_NORM2D_LEAST_PIXELS &&
         plan.pixels * p->channels / (2 * blocks) >= CAMOX_NORM2D_LEAST_ELEMENTS)
    blocks *= 2;
  plan.block = camox_round_up(camox_ceil_div(plan.pixels, blocks), 16);
  plan.blocks = camox_ceil_div(plan.pixels, plan.block);
  plan.items = p->batch * plan.blocks;
  return plan;
}

#endif
