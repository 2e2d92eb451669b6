/* Batch normalisation in training, float32, for PyTorch's native_batch_norm.

   formula   y = (x - mean) invstd weight + bias,  invstd = 1 / sqrt(var + eps), 0 where var and eps are 0;  mean and var, divided
             by the number n of values, over all images and positions of a channel
             running_mean = (1 - momentum) running_mean + momentum mean;  running_var the same with n / (n - 1) var
   sums      in double, in an order that the sizes alone determine
   shapes    x, y (B,C,...) contiguous; all others (C)
   source    torch.nn.functional.batch_norm with training=True. */
#ifndef CAMOX_TUNE_BATCH_NORM_H
#define CAMOX_TUNE_BATCH_NORM_H

#include <stdint.h>

#include "../common/isa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t images, channels, plane;   /* plane: the positions of one channel of one image */
  int64_t bands;                     /* of the images * plane values of a channel: (channel, band) is a work item */
  const float *x, *weight, *bias;    /* weight, bias: may be NULL, 1 and 0 */
  float *y, *mean, *invstd;          /* results */
  float *running_mean, *running_var; /* may be NULL */
  double momentum, eps;
  double *sums; /* [channels, bands, 2] */
  int adds_up;  /* what a call does: adds up the values of its bands, */
  int writes;   /* and then, where all bands of the channel are added up, writes the results */
} camox_batch_norm_params;

/* Work items [begin, end). */
typedef void camox_batch_norm_kernel(const camox_batch_norm_params *p, int64_t begin, int64_t end);
camox_batch_norm_kernel *camox_batch_norm(camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
