// Schemas and entries of box_mean and structure_weight.
#include "../common/torch_util.h"
#include "box.h"

namespace {

using namespace camox;

struct BoxCall {
  const char* op;
  const char* name;  // of x in messages
  camox_box_kind kind;
  int64_t window_height, window_width;
  double gain;
  bool channels_last;
};

Tensor box(const Tensor& x, const BoxCall& call) {
  check_image(x, call.op, call.name);
  camox_box_params p{};
  p.dtype = dtype_of(x, call.op);
  p.kind = call.kind;
  p.channels_last = call.channels_last;
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  p.window_height = call.window_height, p.window_width = call.window_width;
  p.gain = call.gain;
  Tensor y = empty_image(x, p.channels, call.channels_last);
  p.x = view4(x), p.y = view4(y);
  check(camox_box_check(&p, call.op));
#ifdef CAMOX_CUDA_PART
  std::vector<Tensor> buffers;
  auto sums_like_y = [&] {
    const int64_t size[4] = {p.batch, p.channels, p.height, p.width};
    buffers.push_back(empty_strided(x, aoti_torch_dtype_float32(), 4, size, p.y.stride));
    return static_cast<float*>(buffers.back().data_ptr());
  };
  if (!camox_box_is_one_launch(&p)) {
    p.row_sums = sums_like_y();
    p.running_sums = p.dtype == CAMOX_F32 ? static_cast<float*>(y.data_ptr()) : sums_like_y();
  }
  launch(camox_box_cuda, p, x, call.op);
#else
  const int64_t items = camox_box_items(&p);
  run_with_scratch(camox_box_forward(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0,
                   camox_box_scratch(&p));
#endif
  return y;
}

Tensor box_mean(const Tensor& x, int64_t window_height, int64_t window_width, bool count_include_pad) {
  check_image(x, "box_mean", "x");
  return box(x, {"box_mean", "x", count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED, window_height, window_width, 0,
                 is_channels_last(x)});
}

// The op is linear, so backward has the gradient alone: x's memory format is handed over.
Tensor box_mean_backward(const Tensor& grad, int64_t window_height, int64_t window_width, bool count_include_pad,
                         bool channels_last) {
  return box(grad, {"box_mean_backward", "grad", count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED_ADJOINT, window_height,
                    window_width, 0, channels_last});
}

Tensor structure_weight(const Tensor& mask, int64_t window_height, int64_t window_width, double gain) {
  check_image(mask, "structure_weight", "mask");
  return box(mask, {"structure_weight", "mask", CAMOX_BOX_STRUCTURE_WEIGHT, window_height, window_width, gain,
                    is_channels_last(mask)});
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("box_mean(Tensor x, int window_height, int window_width, bool count_include_pad) -> Tensor");
  m.def(
      "box_mean_backward(Tensor grad, int window_height, int window_width, bool count_include_pad, bool channels_last) "
      "-> Tensor");
  m.def("structure_weight(Tensor mask, int window_height, int window_width, float gain) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("box_mean", TORCH_BOX(&box_mean));
  m.impl("box_mean_backward", TORCH_BOX(&box_mean_backward));
  m.impl("structure_weight", TORCH_BOX(&structure_weight));
}
