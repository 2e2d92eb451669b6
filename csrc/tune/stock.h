// PyTorch's own operators, called where a replacement does not serve.
#pragma once

#include "../common/torch_util.h"

namespace camox {

// What lists every argument of the operator; its result is stack[0]. Its error comes on as a RuntimeError of the same words.
inline void call_stock(const char* name, const char* overload, StableIValue* stack) {
  if (torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS) return;
  throw std::runtime_error(torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace()
                                                                      : std::string(name) + " failed");
}

}  // namespace camox
