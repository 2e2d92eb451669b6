// Schemas and entries of layer_norm2d.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "../common/weights_bind.h"
#include "norm2d.h"

namespace {

using namespace camox;

template <class AnyTensor>
camox_norm2d_params norm2d_params(const AnyTensor& x, const Weights& weight, const Weights& bias, double eps, int64_t groups,
                                  int64_t activation) {
  check_alike(bias, weight, "layer_norm2d");
  check_image(x, "layer_norm2d", "x");
  camox_norm2d_params p{};
  p.dtype = dtype_of(x, "layer_norm2d");
  p.activation = code_of(activation, CAMOX_ACT_SILU, "layer_norm2d", "activation");
  p.eps = eps;
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  p.groups = groups;
  p.x = view4(x);
  p.weight = {weight.data, weight.length, weight.stride};
  p.bias = {bias.data, bias.length, bias.stride};
  p.half_weights = weight.half;
  check(camox_norm2d_check(&p));
  return p;
}

// Numbers that backward needs of each pixel and group.
int64_t saved(const camox_norm2d_params& p) {
#ifdef CAMOX_CUDA_PART
  return 2;
#else
  return p.activation == CAMOX_ACT_NONE ? 1 : 2;
#endif
}

template <class AnyTensor>
void check_saved(const AnyTensor& stats, const AnyTensor& x, const camox_norm2d_params& p, int64_t batch) {
  check_real(stats, x, 5, "layer_norm2d_backward", "stats");
  const std::array<int64_t, 5> expected = {saved(p), batch, p.groups, p.height, p.width};
  for (int64_t d = 0; d < 5; ++d)
    if (stats.size(d) != expected[d])
      throw refusal("layer_norm2d_backward: stats has size " + std::to_string(stats.size(d)) + " in dimension " +
                    std::to_string(d) + ", expected " + std::to_string(expected[d]));
}

// ---- checks before anything is written ----

template <class AnyTensor>
camox_norm2d_params forward_params(const AnyTensor& x, const Weights& weight, const Weights& bias,
                                   const std::optional<AnyTensor>& residual, double eps, int64_t groups, int64_t activation) {
  camox_norm2d_params p = norm2d_params(x, weight, bias, eps, groups, activation);
  if (residual.has_value()) {
    check_like(*residual, x, p.channels, "layer_norm2d", "residual");
    p.residual = view4(*residual);
  }
  return p;
}

template <class AnyTensor>
camox_norm2d_params backward_params(const AnyTensor& grad, const AnyTensor& x, const Weights& weight, const Weights& bias,
                                    const AnyTensor& stats, double eps, int64_t groups, int64_t activation) {
  camox_norm2d_params p = norm2d_params(x, weight, bias, eps, groups, activation);
  check_like(grad, x, p.channels, "layer_norm2d_backward", "grad");
  check_saved(stats, x, p, p.batch);
  p.grad = view4(grad);
  return p;
}

// ---- with outputs ----

template <class AnyTensor>
void forward(camox_norm2d_params& p, const AnyTensor& x, bool save, const AnyTensor& y, const AnyTensor& stats) {
  p.y = view4(y);
  p.stats = save ? stats.data_ptr() : nullptr;
#ifdef CAMOX_CUDA_PART
  launch(camox_norm2d_cuda, p, x, "layer_norm2d");
#else
  const int64_t items = camox_norm2d_items(&p);
  run_with_scratch(camox_norm2d_forward(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0,
                   CAMOX_NORM2D_SCRATCH);
#endif
}

template <class AnyTensor>
void backward(camox_norm2d_params& p, const AnyTensor& x, const AnyTensor& stats, const AnyTensor& grad_x,
              const AnyTensor& grad_weight, const AnyTensor& grad_bias) {
  p.stats = stats.data_ptr();
  p.grad_x = view4(grad_x);
  p.grad_weight = grad_weight.data_ptr();
  p.grad_bias = grad_bias.data_ptr();
#ifdef CAMOX_CUDA_PART
  const Tensor partial = empty_real(x, {camox_norm2d_cuda_items(&p), 2, p.channels});
  p.partial = partial.data_ptr();
  launch(camox_norm2d_backward_cuda, p, x, "layer_norm2d");
#else
  const int64_t items = camox_norm2d_items(&p);
  const camox_isa isa = camox_isa_current();
  const AlignedMemory partial(items * 2 * p.channels * (p.dtype == CAMOX_F64 ? sizeof(double) : sizeof(float)));
  p.partial = partial.get();
  run_with_scratch(camox_norm2d_backward(p.dtype, isa), p, items, items > 0 ? x.numel() / items : 0, CAMOX_NORM2D_SCRATCH);
  run(camox_norm2d_reduce(p.dtype, isa), p, p.channels, 2 * items);
#endif
}

// ---- as operators ----

std::tuple<Tensor, Tensor> layer_norm2d(const Tensor& x, const Tensor& weight, const Tensor& bias, OptionalTensor residual,
                                        double eps, int64_t groups, int64_t activation, bool save) {
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = forward_params(x, weights, biases, residual, eps, groups, activation);
  Tensor y = empty_image(x, p.channels, is_channels_last(x));
  Tensor stats = empty_real(x, {saved(p), save ? p.batch : 0, p.groups, p.height, p.width});
  forward(p, x, save, y, stats);
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm2d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                         const Tensor& bias, const Tensor& stats, double eps, int64_t groups,
                                                         int64_t activation) {
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = backward_params(grad, x, weights, biases, stats, eps, groups, activation);
  Tensor grad_x = empty_image(x, p.channels, is_channels_last(x));
  Tensor grad_weight = empty_gradient(weight, p.channels), grad_bias = empty_gradient(bias, p.channels);
  backward(p, x, as_contiguous(stats), grad_x, grad_weight, grad_bias);
  return {grad_x, grad_weight, grad_bias};
}

// ---- past the dispatcher ----

#ifndef CAMOX_CUDA_PART
void layer_norm2d_into(const Described& x, const Described& weight, const Described& bias,
                       const std::optional<Described>& residual, double eps, int64_t groups, int64_t activation, bool save,
                       const Described& y, const Described& stats) {
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = forward_params(x, weights, biases, residual, eps, groups, activation);
  check_output(y, x, p.channels, "layer_norm2d");
  check_saved(stats, x, p, save ? p.batch : 0);
  check_contiguous(stats, "layer_norm2d", "stats");
  forward(p, x, save, y, stats);
}

void layer_norm2d_backward_into(const Described& grad, const Described& x, const Described& weight, const Described& bias,
                                const Described& stats, double eps, int64_t groups, int64_t activation, const Described& grad_x,
                                const Described& grad_weight, const Described& grad_bias) {
  const char* op = "layer_norm2d_backward";
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = backward_params(grad, x, weights, biases, stats, eps, groups, activation);
  check_output(grad_x, x, p.channels, op);
  check_contiguous(stats, op, "stats");
  check_gradient(grad_weight, weight, op, "grad_weight");
  check_gradient(grad_bias, bias, op, "grad_bias");
  backward(p, x, stats, grad_x, grad_weight, grad_bias);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(layer_norm2d_into)
CAMOX_DIRECT(layer_norm2d_backward_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "layer_norm2d(Tensor x, Tensor weight, Tensor bias, Tensor? residual, float eps, int groups, int activation, "
      "bool save) -> (Tensor, Tensor)");
  m.def(
      "layer_norm2d_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor stats, float eps, int groups, "
      "int activation) -> (Tensor, Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("layer_norm2d", TORCH_BOX(&layer_norm2d));
  m.impl("layer_norm2d_backward", TORCH_BOX(&layer_norm2d_backward));
}
