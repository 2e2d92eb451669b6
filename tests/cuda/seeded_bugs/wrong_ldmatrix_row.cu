/* Loads 32 rows of 8 halves as four matrices, transposed or not, and writes each lane's words; bug 1: lane 9 names a row off
   its alignment, 2: rows in global memory. */
#include "cuda_util.cuh"

template <bool TRANSPOSED, int BUG>
__global__ void wrong_ldmatrix_row_kernel(const uint16_t *x, uint32_t *y) {
  __shared__ __align__(16) uint16_t rows[33][8];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) rows[lane][i] = x[lane * 8 + i];
  __syncthreads();
  uint32_t words[4];
  camox_ldmatrix_x4<TRANSPOSED>(words, BUG == 2 ? x + lane * 8 : &rows[lane][BUG == 1 && lane == 9 ? 4 : 0]);
  for (int i = 0; i < 4; ++i) y[i * 32 + lane] = words[i];
}

extern "C" int camox_wrong_ldmatrix_row(int bug, int transposed, const uint16_t *x, uint32_t *y) {
  if (bug == 1)
    CAMOX_LAUNCH((wrong_ldmatrix_row_kernel<false, 1>), 1, 32, 0, nullptr, x, y);
  else if (bug == 2)
    CAMOX_LAUNCH((wrong_ldmatrix_row_kernel<false, 2>), 1, 32, 0, nullptr, x, y);
  else if (transposed)
    CAMOX_LAUNCH((wrong_ldmatrix_row_kernel<true, 0>), 1, 32, 0, nullptr, x, y);
  else
    CAMOX_LAUNCH((wrong_ldmatrix_row_kernel<false, 0>), 1, 32, 0, nullptr, x, y);
  return camox_launch_status();
}
