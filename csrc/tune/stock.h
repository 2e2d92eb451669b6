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

// Below: functions of PyTorch's C++ library by their symbols, which name the types of all arguments.

// As such a function returns one: at::Tensor is one pointer, which its receiver owns.
struct StockTensor {
  void* impl;
  StockTensor(const StockTensor&) = delete;
  ~StockTensor() {}  // not trivial, as at::Tensor's: so it comes back in the caller's memory
};

// std::optional<at::Tensor> in libstdc++'s layout: a tensor that is passed, and of which nothing is owned.
struct StockOptional {
  void* impl = nullptr;
  bool given = false;
  explicit StockOptional(const OptionalTensor& tensor)
      : impl(tensor ? *reinterpret_cast<void**>(tensor->get()) : nullptr), given(tensor.has_value()) {}
};

// c10::ArrayRef<int64_t>
struct StockNumbers {
  const int64_t* data;
  size_t size;
};

// Where that library has a symbol, or NULL. Python asks the dynamic linker: dlsym is one of glibc 2.34 when linked with that or a
// newer one, and wheels serve older systems.
inline void* (*address_in_torch)(const char* symbol);

inline Tensor owned(const StockTensor& made) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  *reinterpret_cast<void**>(handle) = made.impl;  // a handle is the address of an at::Tensor, here of one that owns nothing
  return Tensor(handle);
}

}  // namespace camox
