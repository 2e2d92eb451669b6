// native_batch_norm in training on the kernels of batch_norm.h: contiguous float32 images.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_batch_norm();
void take_batch_norm();
int64_t batch_norm_calls();

}  // namespace camox
