// _softmax, _log_softmax and their backward on the kernels of softmax.h: float32, bfloat16 and float16, along a dimension of few
// elements.
#pragma once

#include <cstdint>

namespace camox {

// Why not, or NULL.
const char* put_softmax();
void take_softmax();
int64_t softmax_calls();

}  // namespace camox
