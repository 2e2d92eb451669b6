/* How gradients are cut into pieces. */
#ifndef CAMOX_GRAD_NORMS_PLAN_H
#define CAMOX_GRAD_NORMS_PLAN_H

#include "grad_norms.h"

/* Elements of a piece, which a block of a GPU takes, and of the pieces of a work item of the CPU. */
#define CAMOX_GRAD_PIECE 8192
#define CAMOX_GRAD_ITEM 65536

/* What a piece costs beyond its elements, in elements: a gradient of 64 numbers takes as long as one of 500. */
#define CAMOX_GRAD_PIECE_COST 512

/* CUDA's table of the device: the pieces, 16 bytes and a sum of squares each; of each gradient its first piece, a number and
   its group. */
typedef struct {
  void *data;
  int32_t elements;
  int32_t grad_and_dtype; /* 4 grad + dtype */
} camox_grad_device_piece;

#define CAMOX_GRAD_MOST 0x1fffffff /* gradients that grad_and_dtype can number */

CAMOX_ANYWHERE static inline int64_t camox_grad_pieces(int64_t elements) {
  return (elements + CAMOX_GRAD_PIECE - 1) / CAMOX_GRAD_PIECE;
}

#endif
