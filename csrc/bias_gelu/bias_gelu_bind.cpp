// Schemas and entries of bias_gelu.
#include "../common/torch_util.h"
#include "../common/weights_bind.h"
#include "bias_gelu.h"

namespace {

using namespace camox;

// x is contiguous.
camox_bias_gelu_params params_of(const Tensor& x, const Weights& bias, const OptionalTensor& seed, double probability,
                                 const char* op) {
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

#ifndef CAMOX_CUDA_PART
void compute(camox_bias_gelu_kernel* variant(camox_dtype, camox_isa), const camox_bias_gelu_params& p, const Tensor& x) {
  const int64_t items = camox_bias_gelu_items(&p);
  run(variant(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
}
#endif

Tensor bias_gelu(const Tensor& given, const Tensor& bias, OptionalTensor seed, double probability) {
  const Tensor x = as_contiguous(given);
  const Weights biases(bias, x, "bias_gelu", "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, "bias_gelu");
  Tensor y = empty_contiguous(x);
  p.y = y.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_bias_gelu_cuda, p, x, "bias_gelu");
#else
  compute(camox_bias_gelu_forward, p, x);
#endif
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& given_grad, const Tensor& given, const Tensor& bias,
                                              OptionalTensor seed, double probability) {
  const char* op = "bias_gelu_backward";
  bool same = given_grad.dim() == given.dim();
  for (int64_t d = 0; same && d < given.dim(); ++d) same = given_grad.size(d) == given.size(d);
  if (!same) throw refusal("bias_gelu_backward: grad must have the shape of x");
  check_dtype_and_device(given_grad, given, op, "grad");
  const Tensor x = as_contiguous(given), grad = as_contiguous(given_grad);
  const Weights biases(bias, x, op, "bias");
  camox_bias_gelu_params p = params_of(x, biases, seed, probability, op);
  Tensor grad_x = empty_contiguous(x), grad_bias = empty_gradient(bias, p.columns);
  Tensor partial = empty_real(x, {camox_bias_gelu_items(&p), p.columns});
  p.grad = grad.data_ptr();
  p.grad_x = grad_x.data_ptr(), p.grad_bias = grad_bias.data_ptr(), p.partial = partial.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_bias_gelu_backward_cuda, p, x, op);
#else
  compute(camox_bias_gelu_backward, p, x);
  run(camox_bias_gelu_reduce(p.dtype, camox_isa_current()), p, p.columns, camox_bias_gelu_items(&p));
#endif
  return {grad_x, grad_bias};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("bias_gelu(Tensor x, Tensor bias, Tensor? seed, float p) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, Tensor? seed, float p) -> (Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}
