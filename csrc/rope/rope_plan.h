/* The tiles of tokens that are rope's work items: for their count and the kernels. */
#ifndef CAMOX_ROPE_PLAN_H
#define CAMOX_ROPE_PLAN_H

#include "rope.h"

#define CAMOX_ROPE_TILE 64   /* tokens of a tile at most */
#define CAMOX_ROPE_SUMMED 16 /* tokens whose products with all heads are added up before they go to float64 */

/* A head's rows of a tile are about 16 KiB, so that its rows of the tables stay in the L1 cache from head to head. */
static inline int64_t camox_rope_tile(const camox_rope_params *p) {
  int64_t tokens = 4096 / (p->dim > 0 ? p->dim : 1);
  return tokens < 1 ? 1 : tokens > CAMOX_ROPE_TILE ? CAMOX_ROPE_TILE : tokens;
}

/* The row of the tables of token (b,t). sequence: on entry a sequence at or before the token's own, on return its own. */
static inline int64_t camox_rope_row(const camox_rope_params *p, int64_t b, int64_t t, int64_t *sequence) {
  if (p->positions) return p->positions[b * p->position_stride[0] + t * p->position_stride[1]];
  if (!p->cu_seqlens) return t;
  while (p->cu_seqlens[*sequence + 1] <= t) ++*sequence;
  return t - p->cu_seqlens[*sequence];
}

#endif
