// Schemas and entries of layer_norm2d.
#include "../common/torch_util.h"
#include "../common/weights_bind.h"
#include "norm2d.h"

namespace {

using namespace camox;

camox_norm2d_params norm2d_params(const Tensor& x, const Weights& weight, const Weights& bias, double eps, int64_t groups,
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

// Shares of grad_weight and grad_bias that the kernels leave in `partial`, at most.
int64_t shares(const camox_norm2d_params& p) {
#ifdef CAMOX_CUDA_PART
  return camox_norm2d_cuda_items(&p);
#else
  return camox_norm2d_items(&p);
#endif
}

// Numbers that backward needs of each pixel and group.
int64_t saved(const camox_norm2d_params& p) {
#ifdef CAMOX_CUDA_PART
  return 2;
#else
  return p.activation == CAMOX_ACT_NONE ? 1 : 2;
#endif
}

void compute(const camox_norm2d_params& p, const Tensor& x, bool backward) {
#ifdef CAMOX_CUDA_PART
  launch(backward ? camox_norm2d_backward_cuda : camox_norm2d_cuda, p, x, "layer_norm2d");
#else
  int64_t items = camox_norm2d_items(&p);
  camox_isa isa = camox_isa_current();
  run_with_scratch(backward ? camox_norm2d_backward(p.dtype, isa) : camox_norm2d_forward(p.dtype, isa), p, items,
                   items > 0 ? x.numel() / items : 0, CAMOX_NORM2D_SCRATCH);
  if (backward) run(camox_norm2d_reduce(p.dtype, isa), p, p.channels, 2 * items);
#endif
}

std::tuple<Tensor, Tensor> layer_norm2d(const Tensor& x, const Tensor& weight, const Tensor& bias, OptionalTensor residual,
                                        double eps, int64_t groups, int64_t activation, bool save) {
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = norm2d_params(x, weights, biases, eps, groups, activation);
  if (residual.has_value()) {
    check_like(*residual, x, p.channels, "layer_norm2d", "residual");
    p.residual = view4(*residual);
  }
  Tensor y = empty_image(x, p.channels, is_channels_last(x));
  Tensor stats = empty_real(x, {saved(p), save ? p.batch : 0, p.groups, p.height, p.width});
  p.y = view4(y);
  p.stats = save ? stats.data_ptr() : nullptr;
  compute(p, x, false);
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm2d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                         const Tensor& bias, const Tensor& stats, double eps, int64_t groups,
                                                         int64_t activation) {
  const Weights weights(weight, x, "layer_norm2d", "weight"), biases(bias, x, "layer_norm2d", "bias");
  camox_norm2d_params p = norm2d_params(x, weights, biases, eps, groups, activation);
  check_like(grad, x, p.channels, "layer_norm2d_backward", "grad");
  check_real(stats, x, 5, "layer_norm2d_backward", "stats");
  const std::array<int64_t, 5> expected = {saved(p), p.batch, p.groups, p.height, p.width};
  for (int64_t d = 0; d < 5; ++d)
    if (stats.size(d) != expected[d])
      throw refusal("layer_norm2d_backward: stats has size " + std::to_string(stats.size(d)) + " in dimension " +
                    std::to_string(d) + ", expected " + std::to_string(expected[d]));
  Tensor packed_stats = as_contiguous(stats);
  Tensor grad_x = empty_image(x, p.channels, is_channels_last(x));
  Tensor grad_weight = empty_gradient(weight, p.channels), grad_bias = empty_gradient(bias, p.channels);
  Tensor partial = empty_real(x, {shares(p), 2, p.channels});
  p.grad = view4(grad);
  p.grad_x = view4(grad_x);
  p.stats = packed_stats.data_ptr();
  p.partial = partial.data_ptr();
  p.grad_weight = grad_weight.data_ptr();
  p.grad_bias = grad_bias.data_ptr();
  compute(p, x, true);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
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
