/* d[16][8] = a[16][16] * b[16][8] on one warp's tensor core; with the bug: the A fragment's second and third register swapped.
 */
#include "cuda_util.cuh"

template <typename T>
__device__ uint32_t pair(const T *first, const T *second) {
  uint16_t low, high;
  __builtin_memcpy(&low, static_cast<const void *>(first), 2);
  __builtin_memcpy(&high, static_cast<const void *>(second), 2);
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

template <typename T, bool BUG>
__global__ void wrong_mma_fragment_kernel(const T *a, const T *b, float *d) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const T *row = a + 16 * g + 2 * t, *row8 = row + 16 * 8;
  uint32_t fa[4] = {pair(row, row + 1), pair(row8, row8 + 1), pair(row + 8, row + 9), pair(row8 + 8, row8 + 9)};
  if (BUG) {
    const uint32_t swapped = fa[1];
    fa[1] = fa[2];
    fa[2] = swapped;
  }
  const T *column = b + 8 * (2 * t) + g;
  const uint32_t fb[2] = {pair(column, column + 8), pair(column + 64, column + 72)};
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  camox_mma_m16n8k16<T>(sum, fa, fb);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
}

extern "C" int camox_wrong_mma_fragment(int bug, int bfloat16, const void *a, const void *b, float *d) {
  const __half *ha = static_cast<const __half *>(a), *hb = static_cast<const __half *>(b);
  const __nv_bfloat16 *ba = static_cast<const __nv_bfloat16 *>(a), *bb = static_cast<const __nv_bfloat16 *>(b);
  if (bfloat16 && bug)
    CAMOX_LAUNCH((wrong_mma_fragment_kernel<__nv_bfloat16, true>), 1, 32, 0, nullptr, ba, bb, d);
  else if (bfloat16)
    CAMOX_LAUNCH((wrong_mma_fragment_kernel<__nv_bfloat16, false>), 1, 32, 0, nullptr, ba, bb, d);
  else if (bug)
    CAMOX_LAUNCH((wrong_mma_fragment_kernel<__half, true>), 1, 32, 0, nullptr, ha, hb, d);
  else
    CAMOX_LAUNCH((wrong_mma_fragment_kernel<__half, false>), 1, 32, 0, nullptr, ha, hb, d);
  return camox_launch_status();
}
