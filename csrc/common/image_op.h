/* Ops of one image and one image of its shape, y = f(a pixel and its eight neighbours): what they share. The op itself is a
   formula, <op>.inc, which the CPU's kernels (image_op.inc) and the GPU's (image_op.cuh) are made from; image_bind.h binds
   them. An op with more images, more outputs or a larger window has a struct and kernels of its own, as edge_maps.      */
#ifndef CAMOX_IMAGE_OP_H
#define CAMOX_IMAGE_OP_H

#include "isa.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  camox_dtype dtype;
  camox_border border;
  int channels_last; /* y and grad_x have stride 1 over C, else over W */
  double number;     /* the op's own, such as an eps; 0 in an op that has none */
  int64_t batch, channels, height, width;
  camox_view4 x;      /* any strides; backward too */
  camox_view4 y;      /* forward: what is written; backward: the incoming gradient, any strides */
  camox_view4 grad_x; /* backward: what is written */
  void *scratch;      /* CPU: CAMOX_STENCIL_SCRATCH bytes of this thread alone, aligned to 64 bytes */
} camox_image_params;

typedef void camox_image_kernel(const camox_image_params *p, int64_t begin, int64_t end);

/* What can be wrong with a forward (backward = 0) or backward call of any of these ops; messages begin with `op`. */
int camox_image_check(const char *op, const camox_image_params *p, int backward);

/* The work is cut into this many independent work items, by shape alone, so any number of threads gives the same bits. */
int64_t camox_image_items(const camox_image_params *p);

/* An op's check, which calls the one above; its kernels for a dtype and an instruction set; its launchers: 0 or a cudaError_t.
 */
#define CAMOX_DECLARE_IMAGE_OP(op)                                             \
  int camox_##op##_check(const camox_image_params *p, int backward);           \
  camox_image_kernel *camox_##op##_forward(camox_dtype dtype, camox_isa isa);  \
  camox_image_kernel *camox_##op##_backward(camox_dtype dtype, camox_isa isa); \
  int camox_##op##_cuda(const camox_image_params *p, void *stream);            \
  int camox_##op##_backward_cuda(const camox_image_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
