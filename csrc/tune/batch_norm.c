#include "batch_norm.h"

#include "../common/kernel_table.h"

CAMOX_F32_KERNEL_TABLE(camox_batch_norm_kernel, camox_batch_norm, camox_batch_norm_kernel)
