/* Checks and the table of variants. */
#include "norm2d.h"

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "norm2d_plan.h"

static const char OP[] = "layer_norm2d";

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_norm2d_kernel, camox_norm2d_forward, camox_norm2d_forward_kernel)
CAMOX_KERNEL_TABLE(camox_norm2d_kernel, camox_norm2d_backward, camox_norm2d_backward_kernel)
CAMOX_KERNEL_TABLE(camox_norm2d_kernel, camox_norm2d_reduce, camox_norm2d_reduce_kernel)

int64_t camox_norm2d_items(const camox_norm2d_params *p) { return camox_norm2d_plan_of(p).items; }
#endif

int camox_norm2d_check(const camox_norm2d_params *p) {
  const int64_t size[4] = {p->batch, p->channels, p->height, p->width};
  CAMOX_REQUIRE(camox_check_dtype(OP, (int)p->dtype));
  if ((int)p->activation < 0 || p->activation >= CAMOX_ACT_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown activation code %d", OP, (int)p->activation);
  CAMOX_REQUIRE(camox_check_eps(OP, p->dtype, p->eps));
  CAMOX_REQUIRE(camox_check_sizes(OP, "x", size, 4));
  if (p->groups < 1 || p->channels % p->groups != 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: groups must be >= 1 and divide the %lld channels of x, got %lld", OP,
                      (long long)p->channels, (long long)p->groups);
  CAMOX_REQUIRE(camox_check_affine(OP, "weight", "channel", p->channels, p->weight.length, p->weight.stride));
  return camox_check_affine(OP, "bias", "channel", p->channels, p->bias.length, p->bias.stride);
}
