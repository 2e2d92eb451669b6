// PyTorch's own operators, called where a replacement does not serve.
#pragma once

#include "../common/torch_util.h"

namespace camox {

// An error comes on as a RuntimeError of the same words.
inline void check_stock(AOTITorchError error, const char* name) {
  if (error == AOTI_TORCH_SUCCESS) return;
  throw std::runtime_error(torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace()
                                                                      : std::string(name) + " failed");
}

// stack: every argument of the operator, and after the call its result.
inline void call_stock(const char* name, const char* overload, StableIValue* stack) {
  check_stock(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION), name);
}

}  // namespace camox
