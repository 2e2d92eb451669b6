/* What a CUDA kernel found in values that the host cannot see without waiting: bits of one word per device, which kernels set
   with atomicOr and camox_ops.check_errors() reads and clears. The texts are in camox_ops/_cuda.py. */
#ifndef CAMOX_DEVICE_ERRORS_H
#define CAMOX_DEVICE_ERRORS_H

enum {
  CAMOX_ERROR_ROPE_POSITION = 1,
  CAMOX_ERROR_MOE_NAN = 2,
  CAMOX_ERROR_MOE_PLACE = 4,
  CAMOX_ERROR_CROSS_ENTROPY_TARGET = 8,
  CAMOX_ERROR_CU_SEQLENS = 16
};

#endif
