// Schemas and entries of grad_group_norms and scale_grads_.
#include <algorithm>

#include "../common/torch_util.h"
#include "grad_norms.h"
#include "grad_norms_plan.h"

namespace {

using namespace camox;
using torch::headeronly::ScalarType;

std::string text(int64_t value) { return std::to_string(value); }

std::string nth_grad(size_t i) { return "grads[" + text(static_cast<int64_t>(i)) + "]"; }

// ---- gradients as runs of memory ----

struct Dimension {
  int64_t size, stride;
  bool operator==(const Dimension& other) const { return size == other.size && stride == other.stride; }
};

// Where the elements of a tensor lie, without the dimensions that do not say: those of size 1 or stride 0.
struct Memory {
  std::vector<Dimension> dimensions;  // the innermost last; none for a tensor whose elements lie side by side
  int64_t elements = 1;               // at different addresses
  double repeats = 1;                 // elements of the tensor at each address
};

Memory memory_of(const Tensor& x) {
  Memory memory;
  if (x.is_contiguous()) {
    memory.elements = x.numel();
    return memory;
  }
  auto sizes = x.sizes(), strides = x.strides();
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (strides[d] == 0)
      memory.repeats *= static_cast<double>(sizes[d]);
    else if (sizes[d] != 1)
      memory.dimensions.push_back({sizes[d], strides[d]}), memory.elements *= sizes[d];
  }
  auto is_outer = [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; };
  std::stable_sort(memory.dimensions.begin(), memory.dimensions.end(), is_outer);
  int64_t inside = 1;
  for (size_t d = memory.dimensions.size(); d-- > 0; inside *= memory.dimensions[d].size)
    if (memory.dimensions[d].stride != inside) return memory;
  memory.dimensions.clear();
  return memory;
}

// The elements of x side by side: where they lie, or in a copy, which has to live as long as they are used.
camox_grad run_of(const Tensor& x, const Memory& memory, camox_dtype dtype, std::vector<Tensor>& copies) {
  if (memory.dimensions.empty()) return {x.data_ptr(), memory.elements, memory.repeats, 1, 0, dtype};
  copies.push_back(torch::stable::contiguous(x));
  return {copies.back().data_ptr(), x.numel(), 1, 1, 0, dtype};
}

void check_lists(const std::vector<Tensor>& grads, const std::vector<int64_t>& groups, const char* op) {
  if (grads.empty()) throw refusal(std::string(op) + ": grads must not be empty");
  if (grads.size() != groups.size())
    throw refusal(std::string(op) + ": grads and groups must have the same length, got " +
                  text(static_cast<int64_t>(grads.size())) + " and " + text(static_cast<int64_t>(groups.size())));
  const bool on_cpu = grads[0].is_cpu();
  for (size_t i = 0; i < grads.size(); ++i)
    if (grads[i].is_cpu() != on_cpu || (!on_cpu && grads[i].get_device_index() != grads[0].get_device_index()))
      throw refusal(std::string(op) + ": " + nth_grad(i) + " must be on the device of grads[0]");
}

#ifdef CAMOX_CUDA_PART
Tensor device_table(const Tensor& like) {
  const int64_t bytes = static_cast<int64_t>(camox_grad_norms_table_bytes());
  return empty_contiguous(like, aoti_torch_dtype_uint8(), 1, &bytes);
}
#else
// The division of the gradients into pieces and work items, which p points to.
struct Plan {
  std::vector<camox_grad_piece> piece;
  std::vector<int64_t> item;

  explicit Plan(camox_grad_norms_params& p) {
    p.pieces = camox_grad_norms_pieces(&p);
    piece.resize(p.pieces), item.resize(p.pieces + 1);
    p.items = camox_grad_norms_plan(&p, piece.data(), item.data());
    p.piece = piece.data(), p.item = item.data();
  }
};
#endif

// ---- norms ----

// The list is released as soon as it is read, while it is in the caches: the caller has it too.
Tensor grad_group_norms(std::vector<Tensor>& grads, const std::vector<int64_t>& groups, int64_t num_groups, int64_t reduce) {
  const char* op = "grad_group_norms";
  check_lists(grads, groups, op);
  std::vector<camox_grad> found;
  std::vector<Tensor> copies;
  found.reserve(grads.size());
  camox_grad_norms_params p{};
  p.reduce = code_of(reduce, CAMOX_GROUP_L2, op, "reduce");
  p.norms_dtype = CAMOX_F32;
  for (size_t i = 0; i < grads.size(); ++i) {
    const camox_dtype dtype = dtype_of(grads[i], op);
    if (dtype == CAMOX_F64) p.norms_dtype = CAMOX_F64;
    found.push_back(run_of(grads[i], memory_of(grads[i]), dtype, copies));
    found.back().group = groups[i];
  }
  const Tensor first = grads[0];
  grads.clear();
  p.count = static_cast<int64_t>(groups.size()), p.groups = num_groups, p.grads = found.data();
  check(camox_grad_norms_check(&p, op));
  const int32_t dtype = p.norms_dtype == CAMOX_F64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  Tensor norms = empty_contiguous(first, dtype, 1, &num_groups);
  p.norms = norms.data_ptr();
#ifdef CAMOX_CUDA_PART
  std::stable_sort(found.begin(), found.end(), [](const camox_grad& a, const camox_grad& b) { return a.group < b.group; });
  const Tensor table = device_table(first);
  p.table = table.data_ptr();
  launch(camox_grad_norms_cuda, p, first, op);
#else
  const Plan plan(p);
  std::vector<double> partial(p.pieces), sum(num_groups);
  p.partial = partial.data();
  run(camox_grad_norms_sums, p, p.items, CAMOX_GRAD_ITEM);
  camox_grad_norms_finish(&p, sum.data());
#endif
  return norms;
}

// ---- scaling ----

// A tensor of the list and its group.
struct Target {
  int64_t gapped;  // the number of a tensor whose elements do not lie side by side, or -1
  Memory memory;
  camox_dtype dtype;
  uintptr_t begin, end;  // of its addresses
  int64_t group;

  bool is_memory_of(const Target& other) const {
    return begin == other.begin && end == other.end && dtype == other.dtype && memory.dimensions == other.memory.dimensions;
  }
};

// gapped: tensors whose elements do not lie side by side, one element for each address.
Target target_of(const Tensor& x, size_t i, std::vector<Tensor>& gapped) {
  const char* op = "scale_grads_";
  Target target{-1, memory_of(x), dtype_of(x, op), 0, 0, 0};
  int64_t reach = target.memory.elements > 0 ? 1 : 0;  // from the first element past the last
  if (target.memory.dimensions.empty()) reach = target.memory.elements;
  for (size_t d = target.memory.dimensions.size(); d-- > 0 && reach > 0;) {
    const Dimension& dimension = target.memory.dimensions[d];
    if (dimension.stride < reach)
      throw refusal(std::string(op) + ": " + nth_grad(i) +
                    " has elements that share memory, which would be scaled more than once");
    reach += (dimension.size - 1) * dimension.stride;
  }
  if (!target.memory.dimensions.empty()) {
    target.gapped = static_cast<int64_t>(gapped.size());
    gapped.push_back(x);
    for (int64_t d = 0; d < x.dim(); ++d)
      if (x.stride(d) == 0 && x.size(d) > 1) gapped.back() = torch::stable::narrow(gapped.back(), d, 0, 1);
  }
  target.begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  target.end = target.begin + static_cast<uintptr_t>(reach) * x.element_size();
  return target;
}

// The targets of a list by address, those of the same memory once, and the groups of each.
struct Merged {
  std::vector<const Target*> targets;
  std::vector<camox_grad_listing> listings;
};

Merged merged(const std::vector<Target>& listed) {
  std::vector<const Target*> order;
  for (const Target& target : listed)
    if (target.begin != target.end) order.push_back(&target);
  std::stable_sort(order.begin(), order.end(), [](const Target* a, const Target* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  Merged found;
  for (const Target* target : order) {
    if (found.targets.empty() || !target->is_memory_of(*found.targets.back())) found.targets.push_back(target);
    found.listings.push_back({static_cast<int32_t>(found.targets.size() - 1), static_cast<int32_t>(target->group)});
  }
  return found;
}

// Each target of `chosen` on its own.
std::vector<Merged> one_by_one(const Merged& chosen) {
  std::vector<Merged> found(chosen.targets.size());
  for (size_t i = 0; i < found.size(); ++i) found[i].targets.push_back(chosen.targets[i]);
  for (const camox_grad_listing& listing : chosen.listings) found[listing.grad].listings.push_back({0, listing.group});
  return found;
}

// No element belongs to two targets.
bool are_disjoint(const std::vector<const Target*>& targets) {
  uintptr_t end = 0;
  for (const Target* target : targets) {
    if (target->begin < end) return false;
    end = target->end;
  }
  return true;
}

void scale(const Merged& chosen, const Tensor& scales, const std::vector<Tensor>& gapped) {
  std::vector<camox_grad> found;
  std::vector<Tensor> copies;
  found.reserve(chosen.targets.size());
  for (const Target* target : chosen.targets)
    if (target->gapped >= 0)
      found.push_back(run_of(gapped[target->gapped], target->memory, target->dtype, copies));
    else
      found.push_back({reinterpret_cast<void*>(target->begin), target->memory.elements, 1, 1, 0, target->dtype});
  if (found.empty()) return;
  camox_grad_norms_params p{};
  p.count = static_cast<int64_t>(found.size()), p.groups = scales.numel(), p.grads = found.data();
  check(camox_grad_norms_check(&p, "scale_grads_"));
#ifdef CAMOX_CUDA_PART
  const Tensor table = device_table(scales);
  p.table = table.data_ptr(), p.scales = static_cast<const float*>(scales.data_ptr());
  p.listings = static_cast<int64_t>(chosen.listings.size()), p.listing = chosen.listings.data();
  launch(camox_scale_grads_cuda, p, scales, "scale_grads_");
#else
  const bool is_double = scales.scalar_type() == ScalarType::Double;
  for (const camox_grad_listing& listing : chosen.listings)
    found[listing.grad].factor *= is_double ? static_cast<const double*>(scales.data_ptr())[listing.group]
                                            : static_cast<const float*>(scales.data_ptr())[listing.group];
  const Plan plan(p);
  run(camox_scale_grads, p, p.items, CAMOX_GRAD_ITEM);
#endif
  for (size_t i = 0, copy = 0; i < chosen.targets.size(); ++i)
    if (chosen.targets[i]->gapped >= 0) {
      Tensor written = gapped[chosen.targets[i]->gapped];
      torch::stable::copy_(written, copies[copy++]);
    }
}

void scale_grads_(std::vector<Tensor>& grads, const std::vector<int64_t>& groups, const Tensor& given_scales) {
  const char* op = "scale_grads_";
  check_lists(grads, groups, op);
  if (given_scales.scalar_type() != ScalarType::Float && (!CAMOX_ON_CPU || given_scales.scalar_type() != ScalarType::Double))
    throw refusal(std::string(op) + ": scales must have dtype float32" + (CAMOX_ON_CPU ? " or float64" : ""));
  if (given_scales.dim() != 1)
    throw refusal(std::string(op) + ": scales must have 1 dimension, got " + text(given_scales.dim()));
  check_device(given_scales, grads[0], op, "scales");
  const Tensor scales = as_contiguous(given_scales);
  const int64_t num_groups = scales.numel();
  std::vector<Target> listed;
  std::vector<Tensor> gapped;
  listed.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (groups[i] < 0 || groups[i] >= num_groups)
      throw refusal(std::string(op) + ": groups[" + text(static_cast<int64_t>(i)) + "] must be in [0, " + text(num_groups) +
                    "), got " + text(groups[i]));
    listed.push_back(target_of(grads[i], i, gapped));
    listed.back().group = groups[i];
  }
  grads.clear();
  const Merged targets = merged(listed);
  if (are_disjoint(targets.targets)) return scale(targets, scales, gapped);
  // Views that share some of their memory: threads would write the same elements.
  for (const Merged& target : one_by_one(targets)) scale(target, scales, gapped);
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("grad_group_norms(Tensor[] grads, int[] groups, int num_groups, int reduce) -> Tensor");
  m.def("scale_grads_(Tensor(a!)[] grads, int[] groups, Tensor scales) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("grad_group_norms", TORCH_BOX(&grad_group_norms));
  m.impl("scale_grads_", TORCH_BOX(&scale_grads_));
}
