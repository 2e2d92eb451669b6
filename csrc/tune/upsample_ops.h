// upsample_bilinear2d and its backward on the kernels of upsample.h: float32, bfloat16 and float16 images with dense rows, not
// channels_last, to more rows and more columns.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_upsample();
void take_upsample();
int64_t upsample_calls();

}  // namespace camox
