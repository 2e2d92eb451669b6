// upsample_bilinear2d, upsample_nearest2d, _upsample_nearest_exact2d and their backward on the kernels of upsample.h: float32,
// bfloat16 and float16 images with dense rows, not channels_last; bilinear to more rows and more columns, nearest by whole
// factors up to 8.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_upsample_bilinear();
void take_upsample_bilinear();
int64_t upsample_bilinear_calls();

const char* put_upsample_nearest();
void take_upsample_nearest();
int64_t upsample_nearest_calls();

}  // namespace camox
