/* structure_loss: F3Net's loss, weighted binary cross entropy plus weighted IoU, of every image of one channel.

   logits z, mask m and weight w (B,C,H,W); p = sigmoid(z), or z itself where it holds probabilities; sums over H and W:
     bce = max(z,0) - z m + log(1 + exp(-|z|))      of probabilities: -m max(log p, -100) - (1-m) max(log(1-p), -100)
     inter = sum(w p m)    union = sum(w (p + m))    smooth s
     loss[b,c] = B + 1 - (inter + s) / (union - inter + s)
     B = sum(w bce) / sum(w)                         WEIGHTED
       = mean(bce) over the whole batch              MEAN: what reduce='none', a string that is true, does in public copies
   reduction over B and C: NONE, MEAN, SUM
   backward  with D = union - inter + s, N = inter + s and g the gradient of loss[b,c]:
                 dp = g w (N (1-m) / D^2 - m / D)
                 dz = g w (p-m) / sum(w) + dp p (1-p)
             MEAN: sum(g) (p-m) / number of pixels in the place of the first term
             of probabilities: dp + the first term / max(p (1-p), 1e-12)
   dtypes    logits float32, bfloat16, float16 computed in float32, float64 in float64; mask and weight in the dtype
             computed in or both in that of the logits, sums and loss in the dtype computed in. All tensors are contiguous.
   saved     logits, mask, weight and four sums per image. No gradient to mask and weight.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype, bce or reduction, smooth negative or not finite, a negative size; a mask
             that leaves [0, 1] by more than rounding (CPU alone).
   source    src/train.py of weijun88/F3Net at eecace3; MyTrain.py of DengPingFan/PraNet at 95f12bd; MyTrain_Val.py of
             GewelsJI/SINet-V2 at 5b9844c. */
#ifndef CAMOX_STRUCTURE_LOSS_H
#define CAMOX_STRUCTURE_LOSS_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_BCE_WEIGHTED = 0, CAMOX_BCE_MEAN = 1 } camox_bce;
typedef enum { CAMOX_REDUCE_MEAN = 0, CAMOX_REDUCE_SUM = 1, CAMOX_REDUCE_NONE = 2 } camox_reduction;

/* The sums of an image, and of a work item; the latter followed by the least and the largest element of the mask. */
enum {
  CAMOX_STRUCTURE_WEIGHT = 0, /* sum(w) */
  CAMOX_STRUCTURE_BCE = 1,    /* sum(w bce), or sum(bce) */
  CAMOX_STRUCTURE_INTER = 2,
  CAMOX_STRUCTURE_UNION = 3,
  CAMOX_STRUCTURE_SUMS = 4,
  CAMOX_STRUCTURE_LEAST = 4,
  CAMOX_STRUCTURE_LARGEST = 5,
  CAMOX_STRUCTURE_PARTIAL = 6
};

typedef struct {
  camox_dtype dtype;
  camox_bce bce;
  camox_reduction reduction;
  int probabilities;
  int half_mask; /* beside half-precision logits: mask and weight are in their dtype. Else in the dtype computed in. */
  double smooth;
  int64_t images, pixels;    /* B C, H W */
  const void *logits;        /* [images, pixels] */
  const void *mask, *weight; /* [images, pixels] */
  void *partial;             /* [items, CAMOX_STRUCTURE_PARTIAL], in the dtype computed in, like all that follows but
                                grad_logits */
  void *sums;                /* [images, CAMOX_STRUCTURE_SUMS]; forward writes, backward reads */
  void *loss;                /* forward: [images], or one number where it is reduced */
  const void *grad;          /* backward: the incoming gradient, as loss */
  void *grad_logits;         /* backward: [images, pixels] */
} camox_structure_loss_params;

/* Validates all arguments; nothing has been written when it fails. */
int camox_structure_loss_check(const camox_structure_loss_params *p, const char *op);

/* After the forward kernel: whether the mask lies in [0, 1]. */
int camox_structure_loss_check_mask(const camox_structure_loss_params *p);

/* Work items, by shape alone, so any number of threads gives the same bits. */
int64_t camox_structure_loss_items(const camox_structure_loss_params *p);

typedef void camox_structure_loss_kernel(const camox_structure_loss_params *p, int64_t begin, int64_t end);

/* The variant for this dtype on this instruction set. */
camox_structure_loss_kernel *camox_structure_loss_forward(camox_dtype dtype, camox_isa isa);
camox_structure_loss_kernel *camox_structure_loss_backward(camox_dtype dtype, camox_isa isa);
/* After forward, over the one work item 0: sums and loss from the partial sums, in a fixed order. */
camox_structure_loss_kernel *camox_structure_loss_finish(camox_dtype dtype, camox_isa isa);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. */
int camox_structure_loss_cuda(const camox_structure_loss_params *p, void *stream);
int camox_structure_loss_backward_cuda(const camox_structure_loss_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
