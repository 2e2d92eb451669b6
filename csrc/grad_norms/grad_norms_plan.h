/* How gradients are cut into pieces. */
#ifndef CAMOX_GRAD_NORMS_PLAN_H
#define CAMOX_GRAD_NORMS_PLAN_H

#include "grad_norms.h"

/* Elements of a piece, which a block of a GPU takes, and of the pieces of a work item of the CPU. */
#define CAMOX_GRAD_PIECE 8192
#define CAMOX_GRAD_ITEM 65536

/* What a piece costs beyond its elements, in elements: a gradient of 64 numbers takes as long as one of 500. */
#define CAMOX_GRAD_PIECE_COST 512

#define CAMOX_GRAD_MOST 0x1fffffff /* gradients of a call */

/* What fits into the parameters of a kernel, 32 KiB less 4 bytes from CUDA 12.1 on: gradients, blocks, and of scale groups that
   the gradients are listed with. Most models have fewer gradients, so that one kernel knows them all. In the emulator few, so
   that its tests have several launches. */
#ifdef CAMOX_CUDA_EMULATOR
#define CAMOX_GRAD_BATCH 40
#define CAMOX_GRAD_BLOCKS 48
#define CAMOX_GRAD_LISTINGS 60
#else
#define CAMOX_GRAD_BATCH 720
#define CAMOX_GRAD_BLOCKS 1024
#define CAMOX_GRAD_LISTINGS 2800
#endif

/* Of a gradient: what the threads of CUDA's last block load at once, four times 16 bytes. */
#define CAMOX_GRAD_FEW 7
struct camox_grad_sums {
  double squares[CAMOX_GRAD_FEW]; /* of its first blocks; 0 where it has fewer */
  int32_t first, blocks;          /* of its blocks */
};

/* CUDA's memory of a call, on the device. */
typedef struct {
  struct camox_grad_sums grad[CAMOX_GRAD_BATCH];
  double squares[CAMOX_GRAD_BLOCKS]; /* of blocks that are not among their gradient's first */
  double factor;                     /* scale: of one gradient */
  double carry[2]; /* norms: of the group that a launch leaves unfinished; launches take turns, as one may read and write */
  uint32_t counters[CAMOX_GRAD_BATCH];
} camox_grad_table;

static inline int64_t camox_grad_pieces(int64_t elements) { return (elements + CAMOX_GRAD_PIECE - 1) / CAMOX_GRAD_PIECE; }

#endif
