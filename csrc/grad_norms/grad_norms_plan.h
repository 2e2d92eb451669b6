/* How gradients are cut into pieces. */
#ifndef CAMOX_GRAD_NORMS_PLAN_H
#define CAMOX_GRAD_NORMS_PLAN_H

#include "grad_norms.h"

/* Elements of a piece, which a block of a GPU takes, and of the pieces of a work item of the CPU. */
#define CAMOX_GRAD_PIECE 8192
#define CAMOX_GRAD_ITEM 65536

/* What a piece costs beyond its elements, in elements: a gradient of 64 numbers takes as long as one of 500. */
#define CAMOX_GRAD_PIECE_COST 512

static inline int64_t camox_grad_pieces(int64_t elements) { return (elements + CAMOX_GRAD_PIECE - 1) / CAMOX_GRAD_PIECE; }

#endif
