// avg_pool2d and its backward at stride 1, on the kernels of box_mean (../box/box.h).
//
//   windows   odd, with every padding that PyTorch takes, zeros outside the image counted or not, no divisor_override, no ceil_mode
//   dtypes    float32, bfloat16, float16; 3 or 4 dimensions, any strides
//   cost      a window costs PyTorch its area for every output, box_mean the same for every input whatever the window: PyTorch's
//             kernel runs where windows are small, or outputs few because a large window has no padding
//
// avg_pool1d, and the gradients of both, call these two operators.
//
// max_pool2d, values and indices, on the kernel of max_pool.h. Its backward, which reads the indices, stays PyTorch's.
//
//   windows   any, with every stride and padding that PyTorch takes, ceil_mode or not, no dilation
//   dtypes    float32, bfloat16, float16; 3 or 4 dimensions, dense rows, not channels_last
//   cost      a window costs PyTorch its area and a few mispredicted branches, the kernel its height and its width
//
// max_pool1d calls this operator where gradients are wanted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/torch_util.h"

namespace camox {

inline bool is_pooled_type(const Tensor& x) {
  using torch::headeronly::ScalarType;
  const ScalarType type = x.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

// (C,H,W) is an image of a batch of one.
inline camox_view4 image_view(const Tensor& x) {
  camox_view4 view{x.data_ptr(), {0, 0, 0, 0}};
  const auto strides = x.strides();
  std::copy(strides.begin(), strides.end(), view.stride + 4 - x.dim());
  return view;
}

// put: why not, or NULL.
const char* put_avg_pool2d();
void take_avg_pool2d();
int64_t avg_pool2d_calls();

const char* put_max_pool2d();
void take_max_pool2d();
int64_t max_pool2d_calls();

}  // namespace camox
