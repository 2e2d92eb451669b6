// Schemas and entries of bias_gelu.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "../common/weights_bind.h"
#include "bias_gelu.h"

namespace {

using namespace camox;

// x is contiguous.
template <class AnyTensor>
camox_bias_gelu_params params_of(const AnyTensor& x, const Weights& bias, const std::optional<AnyTensor>& seed,
                                 double probability, const char* op) {
  if (x.dim() < 1) throw refusal(std::string(op) + ": x must have at least 1 dimension, got 0");
  camox_bias_gelu_params p{};
  p.dtype = dtype_of(x, op);
  p.p = probability;
  p.columns = x.size(x.dim() - 1);
  p.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) p.rows *= x.size(d);
  p.x = x.data_ptr();
  p.bias = bias.data, p.bias_length = bias.length, p.bias_stride = bias.stride;
  p.half_bias = bias.half;
  p.seed = seed_of(seed, x, op);
  check(camox_bias_gelu_check(&p));
  return p;
}

template <class AnyTensor>
void check_grad(const AnyTensor& grad, const AnyTensor& x) {
  if (!have_one_shape(grad, x)) throw refusal("bias_gelu_backward: grad must have the shape of x");
  check_dtype_and_device(grad, x, "bias_gelu_backward", "grad");
}

template <class AnyTensor>
void forward(camox_bias_gelu_params& p, const AnyTensor& x, const AnyTensor& y) {
  p.y = y.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_bias_gelu_cuda, p, x, "bias_gelu");
#else
  const int64_t items = camox_bias_gelu_items(&p);
  run(camox_bias_gelu_forward(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
#endif
}

template <class AnyTensor>
void backward(camox_bias_gelu_params& p, const AnyTensor& grad, const AnyTensor& x, const AnyTensor& grad_x,
              const AnyTensor& grad_bias) {
  const int64_t items = camox_bias_gelu_items(&p);
  p.grad = grad.data_ptr();
  p.grad_x = grad_x.data_ptr(), p.grad_bias = grad_bias.data_ptr();
#ifdef CAMOX_CUDA_PART
  const Tensor partial = empty_real(x, {items, p.columns});
  p.partial = partial.data_ptr();
  launch(camox_bias_gelu_backward_cuda, p, x, "bias_gelu_backward");
#else
  const camox_isa isa = camox_isa_current();
  const AlignedMemory partial(items * p.columns * (p.dtype == CAMOX_F64 ? sizeof(double) : sizeof(float)));
  p.partial = partial.get();
  run(camox_bias_gelu_backward(p.dtype, isa), p, items, items > 0 ? x.numel() / items : 0);
  run(camox_bias_gelu_reduce(p.dtype, isa), p, p.columns, items);
#endif
}

Tensor bias_gelu(const Tensor& given, const Tensor& bias, OptionalTensor seed, double probability) {
  const Tensor x = as_contiguous(given);
  const Weights biases(bias, x, "bias_gelu", "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, "bias_gelu");
  Tensor y = empty_contiguous(x);
  forward(p, x, y);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& given_grad, const Tensor& given, const Tensor& bias,
                                              OptionalTensor seed, double probability) {
  const char* op = "bias_gelu_backward";
  check_grad(given_grad, given);
  const Tensor x = as_contiguous(given);
  const Weights biases(bias, x, op, "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, op);
  Tensor grad_x = empty_contiguous(x), grad_bias = empty_gradient(bias, p.columns);
  backward(p, as_contiguous(given_grad), x, grad_x, grad_bias);
  return {grad_x, grad_bias};
}

#ifndef CAMOX_CUDA_PART
// An output that Python made.
void check_output_like(const Described& y, const Described& x, const char* op) {
  if (!have_one_shape(y, x)) throw refusal(std::string(op) + ": the output must have the shape of x");
  check_dtype_and_device(y, x, op, "the output");
  check_contiguous(y, op, "the output");
  use_huge_pages(y);
}

void bias_gelu_into(const Described& x, const Described& bias, const std::optional<Described>& seed, double probability,
                    const Described& y) {
  const char* op = "bias_gelu";
  check_contiguous(x, op, "x");
  const Weights biases(bias, x, op, "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, op);
  check_output_like(y, x, op);
  forward(p, x, y);
}

void bias_gelu_backward_into(const Described& grad, const Described& x, const Described& bias,
                             const std::optional<Described>& seed, double probability, const Described& grad_x,
                             const Described& grad_bias) {
  const char* op = "bias_gelu_backward";
  check_grad(grad, x);
  check_contiguous(grad, op, "grad");
  check_contiguous(x, op, "x");
  const Weights biases(bias, x, op, "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, op);
  check_output_like(grad_x, x, op);
  check_gradient(grad_bias, bias, op, "grad_bias");
  backward(p, grad, x, grad_x, grad_bias);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(bias_gelu_into)
CAMOX_DIRECT(bias_gelu_backward_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("bias_gelu(Tensor x, Tensor bias, Tensor? seed, float p) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, Tensor? seed, float p) -> (Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}
