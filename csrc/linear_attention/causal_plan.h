/* The buffers of a head in scratch, which fit an L2 cache together for heads of up to 128: rows of a chunk, the same transposed,
   two triangles and the state. */
#ifndef CAMOX_LINEAR_ATTENTION_CAUSAL_PLAN_H
#define CAMOX_LINEAR_ATTENTION_CAUSAL_PLAN_H

#include "../common/integers.h"
#include "causal.h"

enum {
  CAMOX_CAUSAL_LANES = 16, /* the longest vector of any instruction set */
  /* Rows are longer by one vector, so that they do not compete for the same cache sets. */
  CAMOX_CAUSAL_GAP = 16,
  CAMOX_CAUSAL_PITCH = CAMOX_CAUSAL_CHUNK + CAMOX_CAUSAL_GAP
};

typedef enum {
  CAUSAL_Q,         /* a [chunk, N] */
  CAUSAL_K,         /* b [chunk, N] */
  CAUSAL_Z,         /* z_t [chunk, N] */
  CAUSAL_GRAD_A,    /* da or db [chunk, N] */
  CAUSAL_V,         /* [chunk, D] */
  CAUSAL_G,         /* r g [chunk, D] */
  CAUSAL_OUT,       /* out or dv [chunk, D] */
  CAUSAL_K_COLUMNS, /* b [N, chunk] */
  CAUSAL_V_COLUMNS, /* [D, chunk] */
  CAUSAL_QK,        /* a b^T [chunk, chunk] */
  CAUSAL_GV,        /* r g v^T [chunk, chunk] */
  CAUSAL_S,         /* S or dS [N, D] */
  CAUSAL_S_COLUMNS, /* S^T or dS^T [D, N] */
  CAUSAL_STATE_Z,   /* z or dz [N] */
  CAUSAL_BUFFERS
} camox_causal_buffer;

static inline int64_t camox_causal_padded(int64_t dim) { return camox_round_up(dim, CAMOX_CAUSAL_LANES); }
static inline int64_t camox_causal_pitch(int64_t dim) { return camox_causal_padded(dim) + CAMOX_CAUSAL_GAP; }

/* Where each buffer begins, in reals; returns where the last one ends. */
static inline int64_t camox_causal_plan(int64_t key_dim, int64_t value_dim, int64_t begin[CAUSAL_BUFFERS]) {
  const int64_t keys = camox_causal_pitch(key_dim), values = camox_causal_pitch(value_dim);
  int64_t end = 0;
  for (int buffer = 0; buffer < CAUSAL_BUFFERS; ++buffer) {
    int64_t size = 0;
    switch ((camox_causal_buffer)buffer) {
      case CAUSAL_Q:
      case CAUSAL_K:
      case CAUSAL_Z:
      case CAUSAL_GRAD_A: size = CAMOX_CAUSAL_CHUNK * keys; break;
      case CAUSAL_V:
      case CAUSAL_G:
      case CAUSAL_OUT: size = CAMOX_CAUSAL_CHUNK * values; break;
      case CAUSAL_K_COLUMNS: size = keys * CAMOX_CAUSAL_PITCH; break;
      case CAUSAL_V_COLUMNS: size = values * CAMOX_CAUSAL_PITCH; break;
      case CAUSAL_QK:
      case CAUSAL_GV: size = CAMOX_CAUSAL_CHUNK * CAMOX_CAUSAL_PITCH; break;
      case CAUSAL_S:
      case CAUSAL_S_COLUMNS: size = keys * values; break;
      case CAUSAL_STATE_Z: size = keys; break;
      case CAUSAL_BUFFERS: break;
    }
    begin[buffer] = end;
    end += size;
  }
  return end;
}
#endif
