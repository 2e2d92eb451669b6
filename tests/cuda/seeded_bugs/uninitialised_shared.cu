/* Sums a block's values into shared memory; with the bug: the accumulator is never set to zero. */
#include "cuda_util.cuh"

template <bool BUG>
__global__ void uninitialised_shared_kernel(const float *x, float *y) {
  __shared__ float total;
  if (!BUG && threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  atomicAdd(&total, x[blockIdx.x * 64 + threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}

extern "C" int camox_uninitialised_shared(int bug, const float *x, float *y, int blocks) {
  if (bug)
    CAMOX_LAUNCH((uninitialised_shared_kernel<true>), blocks, 64, 0, nullptr, x, y);
  else
    CAMOX_LAUNCH((uninitialised_shared_kernel<false>), blocks, 64, 0, nullptr, x, y);
  return camox_launch_status();
}
