// Weights and biases of one element per channel or column, in x's dtype or in the one that x is computed in.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "torch_util.h"

namespace camox {

// A weight or bias for a params struct, whose C check reports a wrong length or stride. CUDA kernels read it as it is. The CPU's
// read the dtype computed in alone: half-precision ones, which are short beside x, are converted once a call.
struct Weights {
  const void* data = nullptr;
  int64_t length, stride;
  bool half;                  // in x's half-precision dtype, which its gradient has to have too
  std::vector<float> floats;  // where converted: what data points to

  template <class AnyTensor>
  Weights(const AnyTensor& v, const AnyTensor& x, const char* op, const char* name)
      : half(v.element_size() == 2 && v.scalar_type() == x.scalar_type()) {
    if (!half) check_real(v, x, 1, op, name);
    if (v.dim() != 1) throw refusal(std::string(op) + ": " + name + " must have 1 dimensions, got " + std::to_string(v.dim()));
    check_device(v, x, op, name);
    data = v.data_ptr(), length = v.size(0), stride = v.stride(0);
#ifndef CAMOX_CUDA_PART
    if (half && v.scalar_type() == torch::headeronly::ScalarType::Half) convert<torch::headeronly::Half>();
    if (half && v.scalar_type() == torch::headeronly::ScalarType::BFloat16) convert<torch::headeronly::BFloat16>();
#endif
  }
  Weights(const Weights&) = delete;

 private:
  template <class Half>
  void convert() {
    const Half* from = static_cast<const Half*>(data);
    floats.resize(length);
    for (int64_t i = 0; i < length; ++i) floats[i] = from[i * stride];
    data = floats.data();
  }
};

// A bias has the dtype of the weight beside it: a call has one flag for both.
inline void check_alike(const Weights& bias, const Weights& weight, const char* op) {
  if (bias.half != weight.half) throw refusal(std::string(op) + ": bias must have the dtype of weight");
}

// An uninitialised contiguous tensor of n elements in the dtype of these weights.
inline Tensor empty_gradient(const Tensor& weights, int64_t n) { return empty_contiguous(weights, dtype_code(weights), 1, &n); }

// Of Python's: as empty_gradient makes it.
template <class AnyTensor>
void check_gradient(const AnyTensor& grad, const AnyTensor& weights, const char* op, const char* name) {
  if (grad.dim() != 1 || grad.size(0) != weights.size(0))
    throw refusal(std::string(op) + ": " + name + " must have the shape of its weight");
  check_dtype_and_device(grad, weights, op, name);
  check_contiguous(grad, op, name);
}

}  // namespace camox
