/* box: means over windows of any odd size, at stride 1, and what is made of one such mean.

   x (B,C,H,W), a window of h by w pixels around each pixel, both odd, of any size up to the image and beyond:
     MEAN              y = sum / (h w): avg_pool2d(x, (h, w), 1, (h/2, w/2)), zeros outside the image counted
     COUNTED           y = sum / pixels of the window that lie in the image: the same with count_include_pad=False
     COUNTED_ADJOINT   y = sum of x / pixels of the window around each x: the backward of COUNTED; MEAN is its own backward
     STRUCTURE_WEIGHT  y = 1 + gain |MEAN - x|
   sums      No term is ever subtracted: each sum has at most log2(w) + h roundings, none of them of what lies outside its
             window. So sums do not drift, a large mean costs no more digits than it must, and a NaN or an infinity stays in the
             windows that hold it.
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store.
   backward  linear, so nothing is saved; STRUCTURE_WEIGHT has no gradient.
   errors    CAMOX_INVALID_ARGUMENT: a window that is even or not positive, a gain that is not finite, unknown kind or dtype, a
             negative size, an output that is neither dense rows nor channels_last, margins that leave no pixel.
   source    avg_pool2d as PyTorch documents it; the weight of F3Net's loss, src/train.py of weijun88/F3Net at eecace3. */
#ifndef CAMOX_BOX_H
#define CAMOX_BOX_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CAMOX_BOX_MEAN = 0,
  CAMOX_BOX_COUNTED = 1,
  CAMOX_BOX_COUNTED_ADJOINT = 2,
  CAMOX_BOX_STRUCTURE_WEIGHT = 3
} camox_box_kind;

typedef struct {
  camox_dtype dtype;
  camox_box_kind kind;
  int channels_last; /* y has stride 1 over C, else over W */
  int64_t batch, channels, height, width;
  int64_t window_height, window_width;
  double gain;      /* STRUCTURE_WEIGHT alone */
  camox_view4 x, y; /* x: any strides */
  /* CPU: rows and columns at each side of the image that x or y lacks, which then begins with pixel (margin[0], margin[1]):
     zeros take the place of x's, y's are not computed. With less padding than half a window avg_pool2d has such an output. */
  int64_t x_margin[2], y_margin[2];
  /* CPU: camox_box_scratch(p) bytes for each thread, aligned to a vector. */
  void *scratch;
  /* CUDA, NULL where camox_box_is_one_launch: sums along rows [B,C,H,W] in float32, in the order of y; running sums in
     the same order, which are y itself where that is float32. */
  float *row_sums, *running_sums;
} camox_box_params;

/* Validates all arguments; nothing has been written when it fails. */
int camox_box_check(const camox_box_params *p, const char *op);

/* Work items, by shape alone, so any number of threads gives the same bits; and bytes of scratch that each thread needs. */
int64_t camox_box_items(const camox_box_params *p);
size_t camox_box_scratch(const camox_box_params *p);

typedef void camox_box_kernel(const camox_box_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set, for every kind. */
camox_box_kernel *camox_box_forward(camox_dtype dtype, camox_isa isa);

/* The radius of a window along a side of the image: one that reaches beyond both its ends sums what a smaller one sums. */
static inline int64_t camox_box_clipped(int64_t window, int64_t side) { return window / 2 < side - 1 ? window / 2 : side - 1; }

/* CUDA: the largest radius of windows that take one launch. Rings of rows, and tiles of rows of any width, then fit the 64 KiB of
   shared memory that a block may have on every GPU from sm_75 on. */
#define CAMOX_BOX_RING_RADIUS 30

/* CUDA: the same in channels_last, where a thread has one column, and a tile each column that its windows reach. */
#define CAMOX_BOX_RING_RADIUS_CHANNELS_LAST 15

/* CUDA: whether one launch sums along rows and columns, without the buffers of two. */
static inline int camox_box_is_one_launch(const camox_box_params *p) {
  const int64_t radius_y = camox_box_clipped(p->window_height, p->height);
  const int64_t radius_x = camox_box_clipped(p->window_width, p->width);
  const int64_t largest = p->channels_last ? CAMOX_BOX_RING_RADIUS_CHANNELS_LAST : CAMOX_BOX_RING_RADIUS;
  return radius_y <= largest && radius_x > 0 && radius_x <= largest && p->height <= INT32_MAX / 2 && p->width <= INT32_MAX / 2;
}

/* Host wrapper of the CUDA kernels: 0 or a cudaError_t. */
int camox_box_cuda(const camox_box_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
