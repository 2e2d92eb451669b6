// Schemas and entries of dropout, sparse_gate and dropout_add_layer_norm.
#include "../common/torch_util.h"
#include "../common/weights_bind.h"
#include "dropout.h"

namespace {

using namespace camox;

#ifdef CAMOX_CUDA_PART
#define CAMOX_DROPOUT_COMPUTE(kernel, p, x, op) launch(kernel##_cuda, p, x, op)
#else
#define CAMOX_DROPOUT_COMPUTE(kernel, p, x, op) compute(kernel, p, x)

void compute(camox_dropout_kernel* variant(camox_dtype, camox_isa), const camox_dropout_params& p, const Tensor& x) {
  int64_t items = camox_dropout_items(&p);
  run(variant(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
}
#endif

void check_same(const Tensor& y, const Tensor& x, const char* op, const char* name) {
  if (!have_one_shape(y, x)) throw refusal(std::string(op) + ": " + name + " must have the shape of x");
  check_dtype_and_device(y, x, op, name);
}

camox_dropout_params dropout_params(const Tensor& x, const OptionalTensor& seed, double probability, const char* op) {
  camox_dropout_params p{};
  p.dtype = dtype_of(x, op);
  p.dims = static_cast<int>(x.dim());
  p.p = probability;
  p.seed = seed_of(seed, x, op);
  for (int d = 0; d < p.dims && d < CAMOX_DROPOUT_DIMS; ++d) p.size[d] = x.size(d);
  check(camox_dropout_check(&p, op));
  return p;
}

void set_view(camox_dropout_params& p, int which, const Tensor& x) {
  p.view[which].data = x.data_ptr();
  for (int d = 0; d < p.dims; ++d) p.view[which].stride[d] = x.stride(d);
}

Tensor dropout(const Tensor& x, const Tensor& seed, double probability) {
  camox_dropout_params p = dropout_params(x, seed, probability, "dropout");
  Tensor out = empty_as(x);
  set_view(p, CAMOX_DROPOUT_X, x);
  set_view(p, CAMOX_DROPOUT_OUT, out);
  CAMOX_DROPOUT_COMPUTE(camox_dropout, p, x, "dropout");
  return out;
}

Tensor sparse_gate(const Tensor& x, const Tensor& y, OptionalTensor seed, double probability) {
  camox_dropout_params p = dropout_params(x, seed, probability, "sparse_gate");
  check_same(y, x, "sparse_gate", "y");
  Tensor out = empty_as(x);
  set_view(p, CAMOX_DROPOUT_X, x);
  set_view(p, CAMOX_DROPOUT_Y, y);
  set_view(p, CAMOX_DROPOUT_OUT, out);
  CAMOX_DROPOUT_COMPUTE(camox_sparse_gate, p, x, "sparse_gate");
  return out;
}

std::tuple<Tensor, Tensor> sparse_gate_backward(const Tensor& grad, const Tensor& x, const Tensor& y, OptionalTensor seed,
                                                double probability) {
  camox_dropout_params p = dropout_params(x, seed, probability, "sparse_gate_backward");
  check_same(y, x, "sparse_gate_backward", "y");
  check_same(grad, x, "sparse_gate_backward", "grad");
  Tensor grad_x = empty_as(x), grad_y = empty_as(y);
  set_view(p, CAMOX_DROPOUT_X, x);
  set_view(p, CAMOX_DROPOUT_Y, y);
  set_view(p, CAMOX_DROPOUT_GRAD, grad);
  set_view(p, CAMOX_DROPOUT_OUT, grad_x);
  set_view(p, CAMOX_DROPOUT_OUT_Y, grad_y);
  CAMOX_DROPOUT_COMPUTE(camox_sparse_gate_backward, p, x, "sparse_gate_backward");
  return {grad_x, grad_y};
}

// x and residual are contiguous.
camox_dropout_norm_params norm_params(const Tensor& x, const Tensor& residual, const Weights& weight,
                                      const OptionalTensor& seed, double probability, const char* op) {
  if (x.dim() < 1) throw refusal(std::string(op) + ": x must have at least 1 dimension, got 0");
  check_same(residual, x, op, "residual");
  camox_dropout_norm_params p{};
  p.dtype = dtype_of(x, op);
  p.p = probability;
  p.eps = 1;
  p.seed = seed_of(seed, x, op);
  p.width = x.size(x.dim() - 1);
  p.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) p.rows *= x.size(d);
  p.x = x.data_ptr(), p.residual = residual.data_ptr();
  p.weight = {weight.data, weight.length, weight.stride};
  p.half_weights = weight.half;
  return p;
}

std::tuple<Tensor, Tensor> dropout_add_layer_norm(const Tensor& given_x, const Tensor& given_residual, const Tensor& weight,
                                                  const Tensor& bias, OptionalTensor seed, double probability, double eps) {
  const char* op = "dropout_add_layer_norm";
  Tensor x = as_contiguous(given_x), residual = as_contiguous(given_residual);
  const Weights weights(weight, x, op, "weight"), biases(bias, x, op, "bias");
  check_alike(biases, weights, op);
  camox_dropout_norm_params p = norm_params(x, residual, weights, seed, probability, op);
  p.eps = eps;
  p.bias = {biases.data, biases.length, biases.stride};
  check(camox_dropout_norm_check(&p, false));
  Tensor y = empty_contiguous(x), stats = empty_real(x, {2, p.rows});
  p.y = y.data_ptr();
  p.stats = stats.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_dropout_norm_cuda, p, x, op);
#else
  int64_t items = camox_dropout_norm_items(&p);
  run(camox_dropout_norm(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
#endif
  return {y, stats};
}

// grad_x is empty where nothing is dropped: it is grad_residual then.
std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(const Tensor& given_grad, const Tensor& given_x,
                                                                           const Tensor& given_residual, const Tensor& weight,
                                                                           const Tensor& given_stats, OptionalTensor seed,
                                                                           double probability) {
  const char* op = "dropout_add_layer_norm_backward";
  Tensor grad = as_contiguous(given_grad), x = as_contiguous(given_x), residual = as_contiguous(given_residual),
         stats = as_contiguous(given_stats);
  const Weights weights(weight, x, op, "weight");
  camox_dropout_norm_params p = norm_params(x, residual, weights, seed, probability, op);
  check(camox_dropout_norm_check(&p, true));
  check_same(grad, x, op, "grad");
  check_real(stats, x, 2, op, "stats");
  if (stats.size(0) != 2 || stats.size(1) != p.rows)
    throw refusal(std::string(op) + ": stats must have shape (2, " + std::to_string(p.rows) + "), got (" +
                  std::to_string(stats.size(0)) + ", " + std::to_string(stats.size(1)) + ")");
  const int64_t none = 0;
  Tensor grad_x = p.seed ? empty_contiguous(x) : empty_contiguous(x, dtype_code(x), 1, &none),
         grad_residual = empty_contiguous(x);
  Tensor grad_weight = empty_gradient(weight, p.width), grad_bias = empty_gradient(weight, p.width);
  int64_t items = camox_dropout_norm_items(&p);
  Tensor partial = empty_real(x, {items, 2, p.width});
  p.grad = grad.data_ptr();
  p.stats = stats.data_ptr();
  p.grad_x = p.seed ? grad_x.data_ptr() : nullptr;
  p.grad_residual = grad_residual.data_ptr();
  p.partial = partial.data_ptr();
  p.grad_weight = grad_weight.data_ptr(), p.grad_bias = grad_bias.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_dropout_norm_backward_cuda, p, x, op);
#else
  camox_isa isa = camox_isa_current();
  run(camox_dropout_norm_backward(p.dtype, isa), p, items, items > 0 ? x.numel() / items : 0);
  run(camox_dropout_norm_reduce(p.dtype, isa), p, p.width, 2 * items);
#endif
  return {grad_x, grad_residual, grad_weight, grad_bias};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("dropout(Tensor x, Tensor seed, float p) -> Tensor");
  m.def("sparse_gate(Tensor x, Tensor y, Tensor? seed, float p) -> Tensor");
  m.def("sparse_gate_backward(Tensor grad, Tensor x, Tensor y, Tensor? seed, float p) -> (Tensor, Tensor)");
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? seed, float p, float eps) "
      "-> (Tensor, Tensor)");
  m.def(
      "dropout_add_layer_norm_backward(Tensor grad, Tensor x, Tensor residual, Tensor weight, Tensor stats, Tensor? seed, "
      "float p) -> (Tensor, Tensor, Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("sparse_gate", TORCH_BOX(&sparse_gate));
  m.impl("sparse_gate_backward", TORCH_BOX(&sparse_gate_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
}
