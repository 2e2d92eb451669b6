// Schemas and entries of frequency_bands.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "bands.h"

namespace {

using namespace camox;

template <class AnyTensor>
camox_bands_params bands_params(const AnyTensor& x, const char* name) {
  check_image(x, "frequency_bands", name);
  camox_bands_params p{};
  p.dtype = dtype_of(x, "frequency_bands");
  p.channels_last = is_channels_last(x);
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  return p;
}

template <class AnyTensor>
using Grads = std::array<const std::optional<AnyTensor>*, CAMOX_BANDS_MAPS>;

// The first gradient that is given.
template <class AnyTensor>
const AnyTensor& first_of(const Grads<AnyTensor>& grads) {
  for (const std::optional<AnyTensor>* grad : grads)
    if (grad->has_value()) return **grad;
  throw refusal("frequency_bands_backward: at least one gradient must be given");
}

// The op is linear, so backward has the gradients alone: x's memory format is handed over.
template <class AnyTensor>
camox_bands_params backward_params(const Grads<AnyTensor>& grads, bool channels_last) {
  constexpr std::array<const char*, CAMOX_BANDS_MAPS> names = {"grad_low", "grad_mid", "grad_high", "grad_input"};
  const AnyTensor& like = first_of(grads);
  camox_bands_params p{};
  for (int band = 0; band < CAMOX_BANDS_MAPS; ++band) {
    if (!grads[band]->has_value()) continue;
    const AnyTensor& grad = grads[band]->value();
    if (&grad == &like) {
      p = bands_params(grad, names[band]);
      p.channels_last = channels_last;
    }
    check_like(grad, like, p.channels, "frequency_bands_backward", names[band]);
    p.bands[band] = view4(grad);
  }
  return p;
}

// `like` has the device of everything in p.
template <class AnyTensor>
void compute(const camox_bands_params& p, const AnyTensor& like, bool backward) {
  check(camox_bands_check(&p, backward));
#ifdef CAMOX_CUDA_PART
  launch(backward ? camox_bands_backward_cuda : camox_bands_cuda, p, like, "frequency_bands");
#else
  int64_t items = camox_bands_items(&p);
  camox_isa isa = camox_isa_current();
  run_with_scratch(backward ? camox_bands_backward(p.dtype, isa) : camox_bands_forward(p.dtype, isa), p, items,
                   items > 0 ? like.numel() / items : 0, CAMOX_STENCIL_SCRATCH);
#endif
}

std::tuple<Tensor, Tensor, Tensor> frequency_bands(const Tensor& x) {
  camox_bands_params p = bands_params(x, "x");
  p.x = view4(x);
  std::array<Tensor, 3> bands;
  for (int band = 0; band < 3; ++band) {
    bands[band] = empty_image(x, p.channels, p.channels_last);
    p.bands[band] = view4(bands[band]);
  }
  compute(p, x, false);
  return {bands[0], bands[1], bands[2]};
}

// The three bands and x are channel ranges of one (B,4C,H,W) tensor.
Tensor frequency_bands_stacked(const Tensor& x) {
  camox_bands_params p = bands_params(x, "x");
  p.x = view4(x);
  Tensor out = empty_image(x, CAMOX_BANDS_MAPS * p.channels, p.channels_last);
  set_channel_ranges(p.bands, out);
  compute(p, x, false);
  return out;
}

Tensor frequency_bands_backward(OptionalTensor grad_low, OptionalTensor grad_mid, OptionalTensor grad_high,
                                OptionalTensor grad_input, bool channels_last) {
  const Grads<Tensor> grads = {&grad_low, &grad_mid, &grad_high, &grad_input};
  camox_bands_params p = backward_params(grads, channels_last);
  const Tensor& like = first_of(grads);
  Tensor grad_x = empty_image(like, p.channels, channels_last);
  p.grad_x = view4(grad_x);
  compute(p, like, true);
  return grad_x;
}

#ifndef CAMOX_CUDA_PART
void frequency_bands_into(const Described& x, const Described& low, const Described& mid, const Described& high) {
  camox_bands_params p = bands_params(x, "x");
  p.x = view4(x);
  const std::array<const Described*, 3> bands = {&low, &mid, &high};
  for (int band = 0; band < 3; ++band) {
    check_output(*bands[band], x, p.channels, "frequency_bands");
    p.bands[band] = view4(*bands[band]);
  }
  compute(p, x, false);
}

void frequency_bands_stacked_into(const Described& x, const Described& out) {
  camox_bands_params p = bands_params(x, "x");
  p.x = view4(x);
  check_output(out, x, CAMOX_BANDS_MAPS * p.channels, "frequency_bands_stacked");
  set_channel_ranges(p.bands, out);
  compute(p, x, false);
}

void frequency_bands_backward_into(const std::optional<Described>& grad_low, const std::optional<Described>& grad_mid,
                                   const std::optional<Described>& grad_high, const std::optional<Described>& grad_input,
                                   bool channels_last, const Described& grad_x) {
  const Grads<Described> grads = {&grad_low, &grad_mid, &grad_high, &grad_input};
  camox_bands_params p = backward_params(grads, channels_last);
  check_output(grad_x, first_of(grads), p.channels, "frequency_bands_backward");
  p.grad_x = view4(grad_x);
  compute(p, first_of(grads), true);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(frequency_bands_into)
CAMOX_DIRECT(frequency_bands_stacked_into)
CAMOX_DIRECT(frequency_bands_backward_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("frequency_bands(Tensor x) -> (Tensor, Tensor, Tensor)");
  m.def("frequency_bands_stacked(Tensor x) -> Tensor");
  m.def(
      "frequency_bands_backward(Tensor? grad_low, Tensor? grad_mid, Tensor? grad_high, Tensor? grad_input, "
      "bool channels_last) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("frequency_bands", TORCH_BOX(&frequency_bands));
  m.impl("frequency_bands_stacked", TORCH_BOX(&frequency_bands_stacked));
  m.impl("frequency_bands_backward", TORCH_BOX(&frequency_bands_backward));
}
