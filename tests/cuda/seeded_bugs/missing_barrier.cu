/* Reverses each block's 64 values through shared memory; with the bug: no barrier between writing and reading. */
#include "cuda_util.cuh"

template <bool BUG>
__global__ void missing_barrier_kernel(const float *x, float *y) {
  __shared__ float tile[64];
  const int i = static_cast<int>(threadIdx.x);
  tile[i] = x[blockIdx.x * 64 + i];
  if (!BUG) __syncthreads();
  y[blockIdx.x * 64 + i] = tile[63 - i];
}

extern "C" int camox_missing_barrier(int bug, const float *x, float *y, int blocks) {
  if (bug)
    CAMOX_LAUNCH((missing_barrier_kernel<true>), blocks, 64, 0, nullptr, x, y);
  else
    CAMOX_LAUNCH((missing_barrier_kernel<false>), blocks, 64, 0, nullptr, x, y);
  return camox_launch_status();
}
