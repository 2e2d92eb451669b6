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

// PyTorch's operators that write to a given tensor are not replaced and give an empty one the size and strides of their result.
inline Tensor call_stock_into_empty(const Tensor& like, const char* name, const char* overload, StableIValue* stack, size_t out) {
  const int64_t nothing = 0;
  stack[out] = torch::stable::detail::from(empty_contiguous(like, dtype_code(like), 1, &nothing));
  call_stock(name, overload, stack);
  return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

}  // namespace camox
