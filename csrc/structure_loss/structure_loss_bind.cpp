// Schemas and entries of structure_loss.
#include "../common/torch_util.h"
#include "structure_loss.h"

namespace {

using namespace camox;

// The options of both directions.
struct StructureOptions {
  int64_t bce;
  double smooth;
  bool probabilities;
  int64_t reduction;
};

// half: whether y has to have x's half-precision dtype, and not the one that x is computed in.
void check_companion(const Tensor& y, const Tensor& x, bool half, const char* op, const char* name) {
  if (half) {
    check_dtype_and_device(y, x, op, name);
    check_image(y, op, name);
  } else {
    check_real(y, x, 4, op, name);
  }
  for (int64_t d = 0; d < 4; ++d)
    if (y.size(d) != x.size(d))
      throw refusal(std::string(op) + ": " + name + " has size " + std::to_string(y.size(d)) + " in dimension " +
                    std::to_string(d) + ", logits " + std::to_string(x.size(d)));
}

// logits, mask and weight are contiguous already.
camox_structure_loss_params params_of(const Tensor& logits, const Tensor& mask, const Tensor& weight,
                                      const StructureOptions& options, const char* op) {
  camox_structure_loss_params p{};
  p.dtype = dtype_of(logits, op);
  p.half_mask = mask.element_size() == 2 && mask.scalar_type() == logits.scalar_type();
  check_companion(mask, logits, p.half_mask, op, "mask");
  check_companion(weight, logits, p.half_mask, op, "weight");
  p.bce = code_of(options.bce, CAMOX_BCE_MEAN, op, "bce");
  p.reduction = code_of(options.reduction, CAMOX_REDUCE_NONE, op, "reduction");
  p.smooth = options.smooth, p.probabilities = options.probabilities;
  p.images = logits.size(0) * logits.size(1), p.pixels = logits.size(2) * logits.size(3);
  p.logits = logits.data_ptr(), p.mask = mask.data_ptr(), p.weight = weight.data_ptr();
  check(camox_structure_loss_check(&p, op));
  return p;
}

std::tuple<Tensor, Tensor> structure_loss(const Tensor& given_logits, const Tensor& given_mask, const Tensor& given_weight,
                                          int64_t bce, double smooth, bool probabilities, int64_t reduction) {
  check_image(given_logits, "structure_loss", "logits");
  Tensor logits = as_contiguous(given_logits), mask = as_contiguous(given_mask), weight = as_contiguous(given_weight);
  camox_structure_loss_params p = params_of(logits, mask, weight, {bce, smooth, probabilities, reduction}, "structure_loss");
  const int64_t items = camox_structure_loss_items(&p);
  Tensor partial = empty_real(logits, {items, CAMOX_STRUCTURE_PARTIAL}),
         sums = empty_real(logits, {p.images, CAMOX_STRUCTURE_SUMS});
  Tensor loss =
      p.reduction == CAMOX_REDUCE_NONE ? empty_real(logits, {logits.size(0), logits.size(1)}) : empty_real(logits, {});
  p.partial = partial.data_ptr(), p.sums = sums.data_ptr(), p.loss = loss.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_structure_loss_cuda, p, logits, "structure_loss");
#else
  const camox_isa isa = camox_isa_current();
  run(camox_structure_loss_forward(p.dtype, isa), p, items, items > 0 ? logits.numel() / items : 0);
  check(camox_structure_loss_check_mask(&p));
  camox_structure_loss_finish(p.dtype, isa)(&p, 0, 1);
#endif
  return {loss, sums};
}

Tensor structure_loss_backward(const Tensor& given_grad, const Tensor& given_logits, const Tensor& given_mask,
                               const Tensor& given_weight, const Tensor& given_sums, int64_t bce, double smooth,
                               bool probabilities, int64_t reduction) {
  const char* op = "structure_loss_backward";
  check_image(given_logits, op, "logits");
  Tensor grad = as_contiguous(given_grad), logits = as_contiguous(given_logits), mask = as_contiguous(given_mask),
         weight = as_contiguous(given_weight), sums = as_contiguous(given_sums);
  camox_structure_loss_params p = params_of(logits, mask, weight, {bce, smooth, probabilities, reduction}, op);
  check_real(grad, logits, p.reduction == CAMOX_REDUCE_NONE ? 2 : 0, op, "grad");
  check_real(sums, logits, 2, op, "sums");
  if (grad.numel() != (p.reduction == CAMOX_REDUCE_NONE ? p.images : 1))
    throw refusal(std::string(op) + ": grad must have the shape of the loss, got " + std::to_string(grad.numel()) +
                  " elements");
  if (sums.size(0) != p.images || sums.size(1) != CAMOX_STRUCTURE_SUMS)
    throw refusal(std::string(op) + ": sums must have shape (" + std::to_string(p.images) + ", 4), got (" +
                  std::to_string(sums.size(0)) + ", " + std::to_string(sums.size(1)) + ")");
  Tensor grad_logits = empty_contiguous(logits);
  p.grad = grad.data_ptr(), p.sums = sums.data_ptr(), p.grad_logits = grad_logits.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch(camox_structure_loss_backward_cuda, p, logits, op);
#else
  const int64_t items = camox_structure_loss_items(&p);
  run(camox_structure_loss_backward(p.dtype, camox_isa_current()), p, items, items > 0 ? logits.numel() / items : 0);
#endif
  return grad_logits;
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "structure_loss(Tensor logits, Tensor mask, Tensor weight, int bce, float smooth, bool probabilities, int reduction) "
      "-> (Tensor, Tensor)");
  m.def(
      "structure_loss_backward(Tensor grad, Tensor logits, Tensor mask, Tensor weight, Tensor sums, int bce, float smooth, "
      "bool probabilities, int reduction) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("structure_loss", TORCH_BOX(&structure_loss));
  m.impl("structure_loss_backward", TORCH_BOX(&structure_loss_backward));
}
