// Schemas and entries of spatial_gradient.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "spatial_gradient.h"

namespace {

using namespace camox;

template <class AnyTensor>
camox_spatial_gradient_params gradient_params(const AnyTensor& x, const char* name, double side, double middle,
                                              int64_t border) {
  check_image(x, "spatial_gradient", name);
  camox_spatial_gradient_params p{};
  p.dtype = dtype_of(x, "spatial_gradient");
  p.border = code_of(border, CAMOX_BORDER_REFLECT, "spatial_gradient", "border");
  p.channels_last = is_channels_last(x);
  p.side = side, p.middle = middle;
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  return p;
}

// `like` has the device of everything in p.
template <class AnyTensor>
void compute(const camox_spatial_gradient_params& p, const AnyTensor& like, bool backward) {
  check(camox_spatial_gradient_check(&p, backward));
#ifdef CAMOX_CUDA_PART
  launch(backward ? camox_spatial_gradient_backward_cuda : camox_spatial_gradient_cuda, p, like, "spatial_gradient");
#else
  int64_t items = camox_spatial_gradient_items(&p);
  camox_isa isa = camox_isa_current();
  run_with_scratch(backward ? camox_spatial_gradient_backward(p.dtype, isa) : camox_spatial_gradient_forward(p.dtype, isa), p,
                   items, items > 0 ? like.numel() / items : 0, CAMOX_STENCIL_SCRATCH);
#endif
}

std::tuple<Tensor, Tensor> spatial_gradient(const Tensor& x, double side, double middle, int64_t border) {
  camox_spatial_gradient_params p = gradient_params(x, "x", side, middle, border);
  p.x = view4(x);
  Tensor gx = empty_image(x, p.channels, p.channels_last), gy = empty_image(x, p.channels, p.channels_last);
  p.gradient[0] = view4(gx), p.gradient[1] = view4(gy);
  compute(p, x, false);
  return {gx, gy};
}

template <class AnyTensor>
const AnyTensor& given_gradient(const std::optional<AnyTensor>& grad_gx, const std::optional<AnyTensor>& grad_gy) {
  if (!grad_gx.has_value() && !grad_gy.has_value())
    throw refusal("spatial_gradient_backward: at least one gradient must be given");
  return grad_gx.has_value() ? *grad_gx : *grad_gy;
}

// The op is linear, so backward has the gradients alone: x's memory format is handed over.
template <class AnyTensor>
camox_spatial_gradient_params backward_params(const std::optional<AnyTensor>& grad_gx, const std::optional<AnyTensor>& grad_gy,
                                              double side, double middle, int64_t border, bool channels_last) {
  const AnyTensor& like = given_gradient(grad_gx, grad_gy);
  camox_spatial_gradient_params p = gradient_params(like, grad_gx.has_value() ? "grad_gx" : "grad_gy", side, middle, border);
  p.channels_last = channels_last;
  if (grad_gx.has_value()) p.gradient[0] = view4(*grad_gx);
  if (grad_gy.has_value()) {
    check_like(*grad_gy, like, p.channels, "spatial_gradient_backward", "grad_gy");
    p.gradient[1] = view4(*grad_gy);
  }
  return p;
}

Tensor spatial_gradient_backward(OptionalTensor grad_gx, OptionalTensor grad_gy, double side, double middle, int64_t border,
                                 bool channels_last) {
  const Tensor& like = given_gradient(grad_gx, grad_gy);
  camox_spatial_gradient_params p = backward_params(grad_gx, grad_gy, side, middle, border, channels_last);
  Tensor grad_x = empty_image(like, p.channels, channels_last);
  p.grad_x = view4(grad_x);
  compute(p, like, true);
  return grad_x;
}

#ifndef CAMOX_CUDA_PART
void spatial_gradient_into(const Described& x, double side, double middle, int64_t border, const Described& gx,
                           const Described& gy) {
  camox_spatial_gradient_params p = gradient_params(x, "x", side, middle, border);
  p.x = view4(x);
  check_output(gx, x, p.channels, "spatial_gradient");
  check_output(gy, x, p.channels, "spatial_gradient");
  p.gradient[0] = view4(gx), p.gradient[1] = view4(gy);
  compute(p, x, false);
}

void spatial_gradient_backward_into(const std::optional<Described>& grad_gx, const std::optional<Described>& grad_gy,
                                    double side, double middle, int64_t border, bool channels_last, const Described& grad_x) {
  camox_spatial_gradient_params p = backward_params(grad_gx, grad_gy, side, middle, border, channels_last);
  const Described& like = given_gradient(grad_gx, grad_gy);
  check_output(grad_x, like, p.channels, "spatial_gradient_backward");
  p.grad_x = view4(grad_x);
  compute(p, like, true);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(spatial_gradient_into)
CAMOX_DIRECT(spatial_gradient_backward_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("spatial_gradient(Tensor x, float side, float middle, int border) -> (Tensor, Tensor)");
  m.def(
      "spatial_gradient_backward(Tensor? grad_gx, Tensor? grad_gy, float side, float middle, int border, "
      "bool channels_last) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("spatial_gradient", TORCH_BOX(&spatial_gradient));
  m.impl("spatial_gradient_backward", TORCH_BOX(&spatial_gradient_backward));
}
