/* Two-stage cp.async copy of x into y; bug 1: waits for one group too few, bug 2: does not wait at all. */
#include "cuda_util.cuh"

template <int BUG>
__global__ void missing_cp_async_wait_kernel(const float *x, float *y, int stages) {
  CAMOX_DYNAMIC_SHARED(float, ring);
  const int i = static_cast<int>(threadIdx.x);
  camox_cp_async_16(ring + 4 * i, x + 4 * i, 16);
  camox_cp_async_commit();
  for (int stage = 0; stage < stages; ++stage) {
    const int next = stage + 1;
    if (next < stages) camox_cp_async_16(ring + next % 2 * 128 + 4 * i, x + next * 128 + 4 * i, 16);
    camox_cp_async_commit();
    if (BUG == 0) camox_cp_async_wait<1>();
    if (BUG == 1) camox_cp_async_wait<2>();
    __syncthreads();
    for (int j = i; j < 128; j += 32) y[stage * 128 + j] = ring[stage % 2 * 128 + j];
    __syncthreads();
  }
  if (BUG == 1) camox_cp_async_wait<0>();
}

extern "C" int camox_missing_cp_async_wait(int bug, const float *x, float *y, int stages) {
  const int bytes = 2 * 128 * static_cast<int>(sizeof(float));
  if (bug == 0) CAMOX_LAUNCH((missing_cp_async_wait_kernel<0>), 1, 32, bytes, nullptr, x, y, stages);
  if (bug == 1) CAMOX_LAUNCH((missing_cp_async_wait_kernel<1>), 1, 32, bytes, nullptr, x, y, stages);
  if (bug == 2) CAMOX_LAUNCH((missing_cp_async_wait_kernel<2>), 1, 32, bytes, nullptr, x, y, stages);
  return camox_launch_status();
}
