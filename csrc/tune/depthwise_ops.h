// Depthwise convolutions and their gradients on the kernels of depthwise.h: float32 images that are contiguous, stride 1, no
// dilation, square windows of 3, 5, 7, 9 or 11.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_convolution();
void take_convolution();
int64_t convolution_calls();

}  // namespace camox
