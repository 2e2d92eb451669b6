/* Adds each value's right neighbour; bug 1: reads past the end, 2: writes past it, 3: reads before the start,
   4: leaves a fixed-size array, 5: leaves dynamic shared memory, 6: a 128-bit load off its alignment. */
#include "cuda_util.cuh"

template <int BUG>
__global__ void index_past_end_kernel(const float *x, float *y, int n) {
  CAMOX_DYNAMIC_SHARED(float, tile);
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  float right = BUG == 1 || i + 1 < n ? x[i + 1] : 0.0f;
  if (BUG == 3) right += x[i - 1];
  if (BUG == 4) {
    float window[2] = {x[i], right};
    right = window[i % 3];
  }
  if (BUG == 5)
    tile[threadIdx.x + 1] = right;
  else
    tile[threadIdx.x] = right;
  if (BUG == 6) {
    float four[4];
    camox_load<4>(four, x + i);
    right = four[0];
  }
  y[BUG == 2 ? i + 1 : i] = x[i] + right;
}

extern "C" int camox_index_past_end(int bug, const float *x, float *y, int n) {
  const unsigned grid = camox_grid(camox_ceil_div(n, 32));
  switch (bug) {
    case 0: CAMOX_LAUNCH((index_past_end_kernel<0>), grid, 32, 128, nullptr, x, y, n); break;
    case 1: CAMOX_LAUNCH((index_past_end_kernel<1>), grid, 32, 128, nullptr, x, y, n); break;
    case 2: CAMOX_LAUNCH((index_past_end_kernel<2>), grid, 32, 128, nullptr, x, y, n); break;
    case 3: CAMOX_LAUNCH((index_past_end_kernel<3>), grid, 32, 128, nullptr, x, y, n); break;
    case 4: CAMOX_LAUNCH((index_past_end_kernel<4>), grid, 32, 128, nullptr, x, y, n); break;
    case 5: CAMOX_LAUNCH((index_past_end_kernel<5>), grid, 32, 128, nullptr, x, y, n); break;
    default: CAMOX_LAUNCH((index_past_end_kernel<6>), grid, 32, 128, nullptr, x, y, n); break;
  }
  return camox_launch_status();
}
