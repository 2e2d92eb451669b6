// avg_pool2d and its backward at stride 1, on the kernels of box_mean (../box/box.h).
//
//   windows   odd, with every padding that PyTorch takes, zeros outside the image counted or not, no divisor_override, no ceil_mode
//   dtypes    float32, bfloat16, float16; 3 or 4 dimensions, any strides
//   cost      a window costs PyTorch its area for every output, box_mean the same for every input whatever the window: PyTorch's
//             kernel runs where windows are small, or outputs few because a large window has no padding
//
// avg_pool1d, and the gradients of both, call these two operators.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_avg_pool2d();
void take_avg_pool2d();
int64_t avg_pool2d_calls();

}  // namespace camox
