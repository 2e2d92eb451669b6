/* The blocks and chunks that are moe's work items, by shape alone. */
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

/* CUDA: thread blocks, each of which adds up the counts of all before it: about two per multiprocessor. */
#define CAMOX_MOE_CUDA_MOST_BLOCKS 264

static CAMOX_ANYWHERE inline int64_t camox_moe_cuda_block_rows(const camox_moe_route_params *p) {
  int64_t rows = (p->rows + CAMOX_MOE_CUDA_MOST_BLOCKS - 1) / CAMOX_MOE_CUDA_MOST_BLOCKS;
  return rows > CAMOX_MOE_BLOCK_ROWS ? rows : CAMOX_MOE_BLOCK_ROWS;
}

/* At least one: counts are written without rows too. */
static CAMOX_ANYWHERE inline int64_t camox_moe_cuda_blocks(const camox_moe_route_params *p) {
  int64_t rows = camox_moe_cuda_block_rows(p);
  return p->rows > rows ? (p->rows + rows - 1) / rows : 1;
}

/* Elements of a chunk of a row: those of all K copies stay in an L2 cache. */
#define CAMOX_MOE_CHUNK 4096

static CAMOX_ANYWHERE inline int64_t camox_moe_chunks(const camox_moe_rows_params *p) {
  return p->row_size <= CAMOX_MOE_CHUNK ? 1 : (p->row_size + CAMOX_MOE_CHUNK - 1) / CAMOX_MOE_CHUNK;
}

#endif
