// aten::convolution and its backward. Depthwise convolutions run on the kernels of depthwise.h: float32 images that are
// contiguous, stride 1, no dilation, square windows of 3, 5, 7, 9 or 11. Those with windows of one pixel run as the products of
// pointwise.h: float32 images that are contiguous, stride 1, no padding, one group.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_convolution();
void take_convolution();
int64_t convolution_calls();

const char* put_pointwise();
void take_pointwise();
int64_t pointwise_calls();

}  // namespace camox
