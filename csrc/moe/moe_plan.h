/* How the CPU cuts the rows, by shape alone. */
#ifndef CAMOX_MOE_PLAN_H
#define CAMOX_MOE_PLAN_H

#include "moe.h"

/* Rows of a block: enough to be worth a histogram, and at most MOST_BLOCKS blocks, so that scanning them stays cheap. */
#define CAMOX_MOE_BLOCK_ROWS 128
#define CAMOX_MOE_MOST_BLOCKS 1024

static inline int64_t camox_moe_block_rows(const camox_moe_route_params *p) {
  int64_t rows = (p->rows + CAMOX_MOE_MOST_BLOCKS - 1) / CAMOX_MOE_MOST_BLOCKS;
  return rows > CAMOX_MOE_BLOCK_ROWS ? rows : CAMOX_MOE_BLOCK_ROWS;
}

/* Elements of a row that are worked on at a time: those of all K copies stay in an L2 cache. */
#define CAMOX_MOE_CHUNK 4096

#endif
