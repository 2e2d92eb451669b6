#include "bernoulli.h"

#include "../common/kernel_table.h"

CAMOX_KERNEL_TABLE(camox_bernoulli_kernel, camox_bernoulli, camox_bernoulli_kernel)
