// CAMOX_BIND_IMAGE_OP(op): schemas and entries of an op of one image (image_op.h), whose functions are found by its name:
//   <op>(Tensor x, float number, int border) -> Tensor
//   <op>_backward(Tensor x, Tensor grad, float number, int border) -> Tensor
#pragma once

#include "image_op.h"
#include "torch_util.h"

namespace camox {

struct ImageOp {
  const char* name;
  int (*check)(const camox_image_params*, int);
#ifdef CAMOX_CUDA_PART
  int (*forward)(const camox_image_params*, void*);
  int (*backward)(const camox_image_params*, void*);
#else
  camox_image_kernel* (*forward)(camox_dtype, camox_isa);
  camox_image_kernel* (*backward)(camox_dtype, camox_isa);
#endif
};

// One result of x's shape and memory format: y, or, of a gradient, grad_x.
inline Tensor image_op(const ImageOp& op, const Tensor& x, const Tensor* grad, double number, int64_t border) {
  check_image(x, op.name, "x");
  camox_image_params p{};
  p.dtype = dtype_of(x, op.name);
  p.border = code_of(border, CAMOX_BORDER_REFLECT, op.name, "border");
  p.channels_last = is_channels_last(x);
  p.number = number;
  p.batch = x.size(0), p.channels = x.size(1), p.height = x.size(2), p.width = x.size(3);
  p.x = view4(x);
  Tensor made = empty_image(x, p.channels, p.channels_last);
  (grad ? p.grad_x : p.y) = view4(made);
  if (grad) {
    check_like(*grad, x, p.channels, op.name, "grad");
    p.y = view4(*grad);
  }
  check(op.check(&p, grad != nullptr));
  const auto which = grad ? op.backward : op.forward;
#ifdef CAMOX_CUDA_PART
  launch(which, p, x, op.name);
#else
  const int64_t items = camox_image_items(&p);
  run_with_scratch(which(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0, CAMOX_STENCIL_SCRATCH);
#endif
  return made;
}

}  // namespace camox

#ifdef CAMOX_CUDA_PART
#define CAMOX_IMAGE_OP_(op) {#op, camox_##op##_check, camox_##op##_cuda, camox_##op##_backward_cuda}
#define CAMOX_IMAGE_SCHEMAS_(op)
#else
#define CAMOX_IMAGE_OP_(op) {#op, camox_##op##_check, camox_##op##_forward, camox_##op##_backward}
#define CAMOX_IMAGE_SCHEMAS_(op)                                                       \
  STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {                                        \
    m.def(#op "(Tensor x, float number, int border) -> Tensor");                       \
    m.def(#op "_backward(Tensor x, Tensor grad, float number, int border) -> Tensor"); \
  }
#endif

#define CAMOX_BIND_IMAGE_OP(op)                                                                                   \
  namespace {                                                                                                     \
  constexpr camox::ImageOp of_##op = CAMOX_IMAGE_OP_(op);                                                         \
  camox::Tensor op##_forward(const camox::Tensor& x, double number, int64_t border) {                             \
    return camox::image_op(of_##op, x, nullptr, number, border);                                                  \
  }                                                                                                               \
  camox::Tensor op##_backward(const camox::Tensor& x, const camox::Tensor& grad, double number, int64_t border) { \
    return camox::image_op(of_##op, x, &grad, number, border);                                                    \
  }                                                                                                               \
  }                                                                                                               \
  CAMOX_IMAGE_SCHEMAS_(op)                                                                                        \
  STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {                                                        \
    m.impl(#op, TORCH_BOX(&op##_forward));                                                                        \
    m.impl(#op "_backward", TORCH_BOX(&op##_backward));                                                           \
  }
