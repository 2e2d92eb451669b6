/* Sums a warp; bug 1: half of the lanes named by the mask take no part, 2: a shuffle reads a lane outside the mask,
   3: a barrier that half of the threads never reach, 4: a thread spins on a value that nobody writes. */
#include "cuda_util.cuh"

template <int BUG>
__global__ void divergent_shuffle_kernel(const float *x, volatile float *y) {
  const int lane = static_cast<int>(threadIdx.x);
  float sum = x[lane];
  if (BUG == 1) {
    if (lane < 16) sum = camox_warp_sum(sum);
  } else if (BUG == 2) {
    if (lane < 16) sum += __shfl_sync(0x0000ffffu, sum, lane + 16);
  } else if (BUG == 3) {
    if (lane < 16) __syncthreads();
  } else if (BUG == 4) {
    while (y[0] != 1.0f) continue;
  } else {
    sum = camox_warp_sum(sum);
  }
  if (lane == 0) y[0] = sum;
}

extern "C" int camox_divergent_shuffle(int bug, const float *x, float *y) {
  switch (bug) {
    case 0: CAMOX_LAUNCH((divergent_shuffle_kernel<0>), 1, 32, 0, nullptr, x, y); break;
    case 1: CAMOX_LAUNCH((divergent_shuffle_kernel<1>), 1, 32, 0, nullptr, x, y); break;
    case 2: CAMOX_LAUNCH((divergent_shuffle_kernel<2>), 1, 32, 0, nullptr, x, y); break;
    case 3: CAMOX_LAUNCH((divergent_shuffle_kernel<3>), 1, 32, 0, nullptr, x, y); break;
    default: CAMOX_LAUNCH((divergent_shuffle_kernel<4>), 1, 32, 0, nullptr, x, y); break;
  }
  return camox_launch_status();
}
