// Convolutions with windows of one pixel, float32, and their gradients, as products of matrices.
//
//   formula   y[n] = w x[n] + bias
//   backward  dx[n] = w^T dy[n];  dw = sum over n of dy[n] x[n]^T;  of the bias: the sum of dy
//   shapes    x (images, inputs, positions), w (outputs, inputs), y (images, outputs, positions), bias (outputs), all contiguous
//   source    torch.nn.functional.conv1d, conv2d and conv3d with a window of one pixel.
//
// PyTorch's kernels (oneDNN) reorder such images into blocks of 16 channels, and their results back. Products read and write
// them where they lie.
#pragma once

#include <cstdint>

namespace camox {

struct PointwiseSizes {
  int64_t images, inputs, outputs, positions;
};

// bias may be NULL.
void pointwise(const PointwiseSizes& sizes, const float* x, const float* w, const float* bias, float* y);
void pointwise_gradient_of_x(const PointwiseSizes& sizes, const float* dy, const float* w, float* dx);
// dw or d_bias may be NULL.
void pointwise_gradient_of_weights(const PointwiseSizes& sizes, const float* x, const float* dy, float* dw, float* d_bias);

}  // namespace camox
