// Schemas and entries of grad_group_norms and scale_grads_.
#include "../common/direct.h"

#include <algorithm>
#include <new>

#include "../common/torch_util.h"
#include "grad_norms.h"
#include "grad_norms_plan.h"
#ifndef CAMOX_CUDA_PART
#include "grad_norms_threads.h"
#endif

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

// The elements of a tensor lie side by side, the last dimension's innermost.
bool is_contiguous(const int64_t* sizes, const int64_t* strides, int64_t dimensions) {
  int64_t inside = 1;
  for (int64_t d = dimensions; d-- > 0; inside *= sizes[d])
    if (sizes[d] != 1 && strides[d] != inside) return false;
  return true;
}

Memory memory_of(const int64_t* sizes, const int64_t* strides, int64_t dimensions) {
  Memory memory;
  if (is_contiguous(sizes, strides, dimensions)) {
    for (int64_t d = 0; d < dimensions; ++d) memory.elements *= sizes[d];
    return memory;
  }
  for (int64_t d = 0; d < dimensions; ++d) {
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

Memory memory_of(const Tensor& x) { return memory_of(x.sizes().data(), x.strides().data(), x.dim()); }

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
  GradList list(found.size());
  for (const camox_grad& grad : found) list.add(grad);
  list.complete();
  add_up_while_read(list, [&] { list.add_up_small(); });
  list.put_into(p);
  list.finish(p);
#endif
  return norms;
}

#ifndef CAMOX_CUDA_PART
// ---- norms of a list of Python's ----

// The elements of a tensor of Python's side by side in CPU memory; false where they don't lie so, or are of another dtype than
// float32, bfloat16 and float16.
bool run_of(PyObject* tensor, camox_grad& run) {
  camox_dlpack_tensor x;
  if (camox_describe(tensor, &x) != 0) {
    PyErr_Clear();
    return false;
  }
  const Memory memory = memory_of(x.shape, x.strides, x.ndim);
  const bool is_half = x.dtype.bits == 16 && x.dtype.lanes == 1;
  if (x.dtype.code == CAMOX_DLPACK_FLOAT && x.dtype.bits == 32 && x.dtype.lanes == 1)
    run.dtype = CAMOX_F32;
  else if (x.dtype.code == CAMOX_DLPACK_FLOAT && is_half)
    run.dtype = CAMOX_F16;
  else if (x.dtype.code == CAMOX_DLPACK_BFLOAT && is_half)
    run.dtype = CAMOX_BF16;
  else
    return false;
  run.data = static_cast<char*>(x.data) + x.byte_offset;
  run.elements = memory.elements, run.repeats = memory.repeats;
  // Tensors that torch knows to be zero have no memory.
  return x.device.device_type == CAMOX_DLPACK_CPU && memory.dimensions.empty() && (x.data != nullptr || memory.elements == 0);
}

// Adds what grads, a tuple, holds; false where the operator has to look at it.
bool read_tuple(PyObject* grads, PyObject* groups, int64_t num_groups, GradList& list) try {
  for (Py_ssize_t i = 0; i < PyTuple_Size(grads); ++i) {
    PyObject* const grad = PyTuple_GetItem(grads, i);
    PyObject* const given_group = PyTuple_GetItem(groups, i);
    if (Py_TYPE(given_group) != &PyLong_Type) return false;
    const int64_t group = PyLong_AsLongLong(given_group);
    if (group < 0 || group >= num_groups) return false;
    if (grad == Py_None) continue;
    camox_grad run{nullptr, 0, 1, 1, group, CAMOX_F32};
    if (!Described::is_plain(grad) || !run_of(grad, run)) return false;
    list.add(run);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// Writes the norms; false, and nothing written, where the operator has to look at the list. Needs Python's lock, and gives it to
// others when the list is read. The tuple holds the tensors until then.
bool norms_of_tuple(PyObject* grads, PyObject* groups, camox_grad_norms_params& p) {
  GradList list(PyTuple_Size(grads));
  bool is_read = false;
  std::optional<WithoutGil> others_run;
  add_up_while_read(list, [&] {
    is_read = read_tuple(grads, groups, p.groups, list);
    list.complete();
    others_run.emplace();
    list.add_up_small();
  });
  list.put_into(p), p.norms_dtype = CAMOX_F32;
  if (!is_read || p.count == 0 || camox_grad_norms_check(&p, "grad_group_norms") != CAMOX_OK) return false;
  list.finish(p);
  return true;
}
#endif

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
// (grads, groups, reduce, norms), the first two lists or tuples -> whether the norms are written.
extern "C" PyObject* camox_grad_norms_of_list(PyObject*, PyObject* args) {
  PyObject *given_grads, *given_groups, *norms;
  int reduce;
  if (!PyArg_ParseTuple(args, "OOiO", &given_grads, &given_groups, &reduce, &norms)) return nullptr;
  bool written = false;
  PyObject* const grads = PySequence_Tuple(given_grads);
  PyObject* const groups = PySequence_Tuple(given_groups);
  camox_grad of_norms{};
  if (grads != nullptr && groups != nullptr && PyTuple_Size(grads) == PyTuple_Size(groups) && camox_describe != nullptr &&
      run_of(norms, of_norms)) {
    camox_grad_norms_params p{};
    p.reduce = static_cast<camox_group_reduce>(reduce), p.norms = of_norms.data, p.groups = of_norms.elements;
    try {
      written = norms_of_tuple(grads, groups, p);
    } catch (const std::exception&) {  // no memory, which the operator will say
    }
  }
  Py_XDECREF(grads);
  Py_XDECREF(groups);
  PyErr_Clear();
  return PyBool_FromLong(written);
}

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("grad_group_norms(Tensor[] grads, int[] groups, int num_groups, int reduce) -> Tensor");
  m.def("scale_grads_(Tensor(a!)[] grads, int[] groups, Tensor scales) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("grad_group_norms", TORCH_BOX(&grad_group_norms));
  m.impl("scale_grads_", TORCH_BOX(&scale_grads_));
}
