// Schemas and entries of edge_maps.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "edge.h"

namespace {

using namespace camox;

template <class AnyTensor>
camox_edge_params edge_params(const AnyTensor& x, double eps, int64_t border) {
  check_image(x, "edge_maps", "x");
  camox_edge_params p{};
  p.dtype = dtype_of(x, "edge_maps");
  p.border = code_of(border, CAMOX_BORDER_REFLECT, "edge_maps", "border");
  p.channels_last = is_channels_last(x);
  p.eps = eps;
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  p.x = view4(x);
  return p;
}

template <class AnyTensor>
using Grads = std::array<const std::optional<AnyTensor>*, CAMOX_EDGE_MAPS>;

template <class AnyTensor>
void set_grads(camox_edge_params& p, const AnyTensor& x, const Grads<AnyTensor>& grads) {
  constexpr std::array<const char*, CAMOX_EDGE_MAPS> names = {"grad_sobel", "grad_laplacian", "grad_gradient", "grad_input"};
  for (int map = 0; map < CAMOX_EDGE_MAPS; ++map) {
    if (!grads[map]->has_value()) continue;
    check_like(grads[map]->value(), x, p.channels, "edge_maps_backward", names[map]);
    p.maps[map] = view4(grads[map]->value());
  }
}

template <class AnyTensor>
void compute(const camox_edge_params& p, const AnyTensor& x, bool backward) {
  check(camox_edge_check(&p, backward));
#ifdef CAMOX_CUDA_PART
  launch(backward ? camox_edge_backward_cuda : camox_edge_cuda, p, x, "edge_maps");
#else
  int64_t items = camox_edge_items(&p);
  camox_isa isa = camox_isa_current();
  run_with_scratch(backward ? camox_edge_backward(p.dtype, isa) : camox_edge_forward(p.dtype, isa), p, items,
                   items > 0 ? x.numel() / items : 0, CAMOX_STENCIL_SCRATCH);
#endif
}

std::tuple<Tensor, Tensor, Tensor> edge_maps(const Tensor& x, double eps, int64_t border) {
  camox_edge_params p = edge_params(x, eps, border);
  std::array<Tensor, 3> maps;
  for (int map = 0; map < 3; ++map) {
    maps[map] = empty_image(x, p.channels, p.channels_last);
    p.maps[map] = view4(maps[map]);
  }
  compute(p, x, false);
  return {maps[0], maps[1], maps[2]};
}

// The four maps are channel ranges of one (B,4C,H,W) tensor.
Tensor edge_maps_stacked(const Tensor& x, double eps, int64_t border) {
  camox_edge_params p = edge_params(x, eps, border);
  Tensor out = empty_image(x, CAMOX_EDGE_MAPS * p.channels, p.channels_last);
  set_channel_ranges(p.maps, out);
  compute(p, x, false);
  return out;
}

Tensor edge_maps_backward(const Tensor& x, OptionalTensor grad_sobel, OptionalTensor grad_laplacian,
                          OptionalTensor grad_gradient, OptionalTensor grad_input, double eps, int64_t border) {
  camox_edge_params p = edge_params(x, eps, border);
  set_grads<Tensor>(p, x, {&grad_sobel, &grad_laplacian, &grad_gradient, &grad_input});
  Tensor grad_x = empty_image(x, p.channels, p.channels_last);
  p.grad_x = view4(grad_x);
  compute(p, x, true);
  return grad_x;
}

#ifndef CAMOX_CUDA_PART
void edge_maps_into(const Described& x, double eps, int64_t border, const Described& sobel, const Described& laplacian,
                    const Described& gradient) {
  camox_edge_params p = edge_params(x, eps, border);
  const std::array<const Described*, 3> maps = {&sobel, &laplacian, &gradient};
  for (int map = 0; map < 3; ++map) {
    check_output(*maps[map], x, p.channels, "edge_maps");
    p.maps[map] = view4(*maps[map]);
  }
  compute(p, x, false);
}

void edge_maps_stacked_into(const Described& x, double eps, int64_t border, const Described& out) {
  camox_edge_params p = edge_params(x, eps, border);
  check_output(out, x, CAMOX_EDGE_MAPS * p.channels, "edge_maps_stacked");
  set_channel_ranges(p.maps, out);
  compute(p, x, false);
}

void edge_maps_backward_into(const Described& x, const std::optional<Described>& grad_sobel,
                             const std::optional<Described>& grad_laplacian, const std::optional<Described>& grad_gradient,
                             const std::optional<Described>& grad_input, double eps, int64_t border, const Described& grad_x) {
  camox_edge_params p = edge_params(x, eps, border);
  set_grads<Described>(p, x, {&grad_sobel, &grad_laplacian, &grad_gradient, &grad_input});
  check_output(grad_x, x, p.channels, "edge_maps_backward");
  p.grad_x = view4(grad_x);
  compute(p, x, true);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(edge_maps_into)
CAMOX_DIRECT(edge_maps_stacked_into)
CAMOX_DIRECT(edge_maps_backward_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("edge_maps(Tensor x, float eps, int border) -> (Tensor, Tensor, Tensor)");
  m.def("edge_maps_stacked(Tensor x, float eps, int border) -> Tensor");
  m.def(
      "edge_maps_backward(Tensor x, Tensor? grad_sobel, Tensor? grad_laplacian, Tensor? grad_gradient, "
      "Tensor? grad_input, float eps, int border) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("edge_maps", TORCH_BOX(&edge_maps));
  m.impl("edge_maps_stacked", TORCH_BOX(&edge_maps_stacked));
  m.impl("edge_maps_backward", TORCH_BOX(&edge_maps_backward));
}
