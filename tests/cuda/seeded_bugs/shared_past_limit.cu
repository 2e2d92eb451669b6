/* Sums 64 values by way of dynamic and static shared memory. Seeded bugs: dynamic memory that fills a block's 48 KB, beside
   static memory of 1 the kernel, 2 a function that it calls. */
#include "cuda_util.cuh"

__device__ float shared_past_limit_last(float x) {
  __shared__ float last;
  if (threadIdx.x == 63) last = x;
  __syncthreads();
  return last;
}

template <bool CALLS>
__global__ void shared_past_limit_kernel(const float *x, float *y) {
  CAMOX_DYNAMIC_SHARED(float, sums);
  const int i = static_cast<int>(threadIdx.x);
  float total = 0.0f;
  for (int other = 0; other <= i; ++other) total += x[blockIdx.x * 64 + other];
  sums[i] = total;
  if constexpr (CALLS) {
    total = shared_past_limit_last(sums[i]);
  } else {
    __shared__ float last;
    if (i == 63) last = sums[i];
    __syncthreads();
    total = last;
  }
  if (i == 0) y[blockIdx.x] = total;
}

extern "C" int camox_shared_past_limit(int bug, const float *x, float *y, int blocks) {
  const int bytes = bug ? 48 << 10 : (48 << 10) - 16;
  if (bug == 1)
    CAMOX_LAUNCH((shared_past_limit_kernel<false>), blocks, 64, bytes, nullptr, x, y);
  else
    CAMOX_LAUNCH((shared_past_limit_kernel<true>), blocks, 64, bytes, nullptr, x, y);
  return camox_launch_status();
}
