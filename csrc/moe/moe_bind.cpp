// Schemas and entries of moe_route, moe_dispatch, moe_combine and moe_aux_loss.
#include "../common/torch_util.h"
#include "moe.h"
#include "moe_plan.h"

namespace {

using namespace camox;
using torch::headeronly::ScalarType;
using OptionalInt = std::optional<int64_t>;

std::string text(int64_t value) { return std::to_string(value); }

// ---- routing ----

// int64 indices of a routing, as the kernels read them.
Tensor indices(const Tensor& value, const Tensor& x, int64_t numel, const char* op, const char* name) {
  if (value.scalar_type() != ScalarType::Long) throw refusal(std::string(op) + ": " + name + " must have dtype int64");
  if (value.numel() != numel)
    throw refusal(std::string(op) + ": " + name + " must have " + text(numel) + " elements, got " + text(value.numel()));
  check_device(value, x, op, name);
  return as_contiguous(value);
}

const int64_t* data_of(const Tensor& value) { return static_cast<const int64_t*>(value.data_ptr()); }

camox_moe_route_params route_params(const Tensor& logits, int64_t top_k, const char* op) {
  if (logits.dim() != 2)
    throw refusal(std::string(op) + ": logits must have 2 dimensions (rows, experts), got " + text(logits.dim()));
  camox_moe_route_params p{};
  p.dtype = dtype_of(logits, op);
  p.rows = logits.size(0), p.num_experts = logits.size(1), p.top_k = top_k, p.capacity = -1;
  p.logits = logits.data_ptr();
  p.logits_stride[0] = logits.stride(0), p.logits_stride[1] = logits.stride(1);
  return p;
}

void set_valid(camox_moe_route_params& p, const OptionalTensor& valid, const Tensor& logits, const char* op) {
  if (!valid.has_value()) return;
  if (valid->scalar_type() != ScalarType::Bool) throw refusal(std::string(op) + ": valid must have dtype bool");
  if (valid->dim() != 1 || valid->size(0) != p.rows)
    throw refusal(std::string(op) + ": valid must have shape (" + text(p.rows) + ",)");
  check_device(*valid, logits, op, "valid");
  static const uint8_t nothing = 0;  // an empty tensor may have no memory
  p.valid = p.rows ? static_cast<const uint8_t*>(valid->data_ptr()) : &nothing;
  p.valid_stride = valid->stride(0);
}

Tensor empty_indices(const Tensor& like, std::initializer_list<int64_t> size) {
  return empty_contiguous(like, aoti_torch_dtype_int64(), size.size(), size.begin());
}

using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Routed moe_route(const Tensor& logits, OptionalTensor valid, int64_t top_k, int64_t score, OptionalInt capacity) {
  const char* op = "moe_route";
  camox_moe_route_params p = route_params(logits, top_k, op);
  p.score = code_of(score, CAMOX_MOE_SIGMOID_TOPK, op, "score");
  if (capacity.has_value() && *capacity < 0) throw refusal(std::string(op) + ": capacity must be >= 0, got " + text(*capacity));
  p.capacity = capacity.value_or(-1);
  set_valid(p, valid, logits, op);
  check(camox_moe_route_check(&p));
  const int64_t slots = p.rows * top_k, experts_count = p.num_experts;
  Tensor weights = empty_real(logits, {p.rows, top_k}), experts = empty_indices(logits, {p.rows, top_k});
  Tensor counts = empty_indices(logits, {experts_count}), offsets = empty_indices(logits, {experts_count + 1});
  Tensor order = empty_indices(logits, {slots}), position = empty_indices(logits, {slots});
  p.weights = weights.data_ptr(), p.experts = static_cast<int64_t*>(experts.data_ptr());
  p.counts = static_cast<int64_t*>(counts.data_ptr()), p.offsets = static_cast<int64_t*>(offsets.data_ptr());
  p.order = static_cast<int64_t*>(order.data_ptr()), p.position = static_cast<int64_t*>(position.data_ptr());
#ifdef CAMOX_CUDA_PART
  const std::array<int64_t, 2> size = {camox_moe_cuda_blocks(&p), experts_count};
  Tensor block_totals = empty_contiguous(logits, aoti_torch_dtype_int32(), size.size(), size.data());
  p.block_totals = static_cast<int32_t*>(block_totals.data_ptr());
  launch_with_error_word(camox_moe_route_cuda, p, logits, op);
#else
  const int64_t blocks = camox_moe_blocks(&p), cost = blocks > 0 ? logits.numel() * top_k / blocks : 0;
  std::vector<int64_t> block_counts(blocks * (experts_count + 1));
  p.block_counts = block_counts.data();
  run_with_scratch(camox_moe_choose(p.dtype, camox_isa_current()), p, blocks, cost, CAMOX_MOE_SCRATCH);
  check(camox_moe_scan(&p));
  run(camox_moe_place_slots, p, blocks, blocks > 0 ? 4 * slots / blocks : 0);
#endif
  return {weights, experts, counts, offsets, order, position};
}

// Routing by experts that the caller chose. The kernels that route logits place the slots; of a dtype they need only some.
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_place(const Tensor& given, OptionalTensor valid, int64_t num_experts,
                                                     OptionalInt capacity) {
  const char* op = "moe_place";
  if (given.dim() != 2) throw refusal(std::string(op) + ": experts must have 2 dimensions (rows, K)");
  if (capacity.has_value() && *capacity < 0) throw refusal(std::string(op) + ": capacity must be >= 0, got " + text(*capacity));
  camox_moe_route_params p{};
  p.dtype = CAMOX_F32;
  p.rows = given.size(0), p.top_k = given.size(1), p.num_experts = num_experts, p.capacity = capacity.value_or(-1);
  set_valid(p, valid, given, op);
  check(camox_moe_route_check(&p));
  const int64_t slots = p.rows * p.top_k;
  Tensor experts = indices(given, given, slots, op, "experts");
  Tensor counts = empty_indices(given, {num_experts}), offsets = empty_indices(given, {num_experts + 1});
  Tensor order = empty_indices(given, {slots}), position = empty_indices(given, {slots});
  p.experts = const_cast<int64_t*>(data_of(experts));
  p.counts = static_cast<int64_t*>(counts.data_ptr()), p.offsets = static_cast<int64_t*>(offsets.data_ptr());
  p.order = static_cast<int64_t*>(order.data_ptr()), p.position = static_cast<int64_t*>(position.data_ptr());
#ifdef CAMOX_CUDA_PART
  const std::array<int64_t, 2> size = {camox_moe_cuda_blocks(&p), num_experts};
  Tensor block_totals = empty_contiguous(given, aoti_torch_dtype_int32(), size.size(), size.data());
  p.block_totals = static_cast<int32_t*>(block_totals.data_ptr());
  launch_with_error_word(camox_moe_place_cuda, p, given, op);
#else
  check(camox_moe_check_experts(p.experts, slots, num_experts));
  const int64_t blocks = camox_moe_blocks(&p), cost = blocks > 0 ? 4 * slots / blocks : 0;
  std::vector<int64_t> block_counts(blocks * (num_experts + 1));
  p.block_counts = block_counts.data();
  run(camox_moe_count, p, blocks, cost);
  check(camox_moe_scan(&p));
  run(camox_moe_place_slots, p, blocks, cost);
#endif
  return {counts, offsets, order, position};
}

Tensor moe_route_backward(const Tensor& given_grad, const Tensor& logits, const Tensor& given_experts,
                          const Tensor& given_position, int64_t score) {
  const char* op = "moe_route_backward";
  if (given_experts.dim() != 2) throw refusal(std::string(op) + ": experts must have 2 dimensions");
  camox_moe_route_params p = route_params(logits, given_experts.size(1), op);
  p.score = code_of(score, CAMOX_MOE_SIGMOID_TOPK, op, "score");
  check(camox_moe_route_check(&p));
  const int64_t slots = p.rows * p.top_k;
  Tensor experts = indices(given_experts, logits, slots, op, "experts");
  Tensor position = indices(given_position, logits, slots, op, "position");
  check_real(given_grad, logits, 2, op, "grad");
  if (given_grad.numel() != slots) throw refusal(std::string(op) + ": grad must have the shape of experts");
  Tensor grad = as_contiguous(given_grad);
  Tensor grad_logits = empty_contiguous(logits, dtype_code(logits), 2, logits.sizes().data());
  p.experts = const_cast<int64_t*>(data_of(experts)), p.position = const_cast<int64_t*>(data_of(position));
  p.grad = grad.data_ptr(), p.grad_logits = grad_logits.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_moe_route_backward_cuda, p, logits, op);
#else
  check(camox_moe_check_experts(p.experts, slots, p.num_experts));
  const int64_t blocks = camox_moe_blocks(&p);
  run_with_scratch(camox_moe_route_backward(p.dtype, camox_isa_current()), p, blocks, blocks > 0 ? logits.numel() / blocks : 0,
                   CAMOX_MOE_SCRATCH);
#endif
  return grad_logits;
}

std::tuple<Tensor, Tensor> moe_aux_loss(const Tensor& logits, const Tensor& given_counts, OptionalTensor valid, int64_t kind,
                                        int64_t top_k) {
  const char* op = "moe_aux_loss";
  camox_moe_route_params p = route_params(logits, top_k, op);
  p.aux = code_of(kind, CAMOX_MOE_USAGE_MSE, op, "kind");
  set_valid(p, valid, logits, op);
  check(camox_moe_route_check(&p));
  Tensor counts = indices(given_counts, logits, p.num_experts, op, "counts");
  Tensor loss = empty_real(logits, {}), slope = empty_real(logits, {p.num_experts});
  p.counts = const_cast<int64_t*>(data_of(counts));
  p.loss = loss.data_ptr(), p.slope = slope.data_ptr();
#ifdef CAMOX_CUDA_PART
  Tensor partial = empty_real(logits, {camox_moe_cuda_blocks(&p), p.num_experts + 2});
  p.partial = partial.data_ptr();
  launch_with_error_word(camox_moe_aux_cuda, p, logits, op);
#else
  const int64_t blocks = p.aux == CAMOX_MOE_USAGE_MSE ? 0 : camox_moe_blocks(&p);
  std::vector<double> partial(blocks * (p.num_experts + 2));
  p.partial = partial.data();
  run_with_scratch(camox_moe_aux_sums(p.dtype, camox_isa_current()), p, blocks, blocks > 0 ? 4 * logits.numel() / blocks : 0,
                   CAMOX_MOE_SCRATCH);
  camox_moe_aux_finish(&p);
#endif
  return {loss, slope};
}

Tensor moe_aux_loss_backward(const Tensor& grad, const Tensor& logits, const Tensor& given_slope, OptionalTensor valid,
                             int64_t kind) {
  const char* op = "moe_aux_loss_backward";
  camox_moe_route_params p = route_params(logits, 1, op);
  p.aux = code_of(kind, CAMOX_MOE_USAGE_MSE, op, "kind");
  set_valid(p, valid, logits, op);
  check(camox_moe_route_check(&p));
  check_real(grad, logits, 0, op, "grad");
  check_real(given_slope, logits, 1, op, "slope");
  if (given_slope.numel() != p.num_experts)
    throw refusal(std::string(op) + ": slope must have " + text(p.num_experts) + " elements");
  Tensor slope = as_contiguous(given_slope);
  Tensor grad_logits = empty_contiguous(logits, dtype_code(logits), 2, logits.sizes().data());
  p.grad = grad.data_ptr(), p.slope = slope.data_ptr(), p.grad_logits = grad_logits.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_moe_aux_backward_cuda, p, logits, op);
#else
  const int64_t blocks = camox_moe_blocks(&p);
  run_with_scratch(camox_moe_aux_backward(p.dtype, camox_isa_current()), p, blocks,
                   blocks > 0 ? 4 * logits.numel() / blocks : 0, CAMOX_MOE_SCRATCH);
#endif
  return grad_logits;
}

// ---- rows ----

// The dimensions before a row: rows or sorted places, or experts and their capacity.
struct Outer {
  int64_t size[2];
  int64_t count;
  const int64_t* begin() const { return size; }
  const int64_t* end() const { return size + count; }
};

// Rows without gaps, x's dimensions from `leading` on, which lie in memory in the order of x's strides. The same rule as
// empty_rows in ops/_layout.py.
struct RowLayout {
  std::vector<int64_t> size, stride;
  int64_t row_size = 1, row_stride = 1;
};

RowLayout row_layout(const Tensor& x, int64_t leading) {
  RowLayout layout;
  std::vector<int64_t> order = memory_order(x, leading, x.dim());
  for (int64_t& d : order) d -= leading;
  for (int64_t d = leading; d < x.dim(); ++d) layout.size.push_back(x.size(d));
  layout.stride = packed_strides(layout.size, order);
  for (int64_t n : layout.size) layout.row_size *= n, layout.row_stride *= n > 1 ? n : 1;
  return layout;
}

// Rows of this layout after dimensions of the sizes `outer`.
Tensor empty_rows(const Tensor& like, const RowLayout& layout, Outer outer) {
  std::vector<int64_t> size(outer.begin(), outer.end()), stride(outer.count, layout.row_stride);
  if (outer.count == 2) stride[0] *= size[1] > 1 ? size[1] : 1;
  size.insert(size.end(), layout.size.begin(), layout.size.end());
  stride.insert(stride.end(), layout.stride.begin(), layout.stride.end());
  return empty_strided(like, dtype_code(like), size.size(), size.data(), stride.data());
}

// x itself, of `outer` and rows of the layout's sizes, where its rows lie as in the layout; else a copy.
Tensor as_rows(const Tensor& x, const RowLayout& layout, Outer outer) {
  bool same = true;
  for (size_t d = 0; d < layout.size.size(); ++d) same &= layout.size[d] <= 1 || x.stride(outer.count + d) == layout.stride[d];
  if (outer.count == 2) same &= x.size(0) <= 1 || x.size(1) <= 1 || x.stride(0) == x.size(1) * x.stride(1);
  if (same || x.numel() == 0) return x;
  Tensor dense = empty_rows(x, layout, outer);
  torch::stable::copy_(dense, x);
  return dense;
}

// From one row to the next.
int64_t row_stride(const Tensor& x, int64_t leading) {
  if (leading == 1) return x.stride(0);
  return x.size(1) > 1 ? x.stride(1) : x.stride(0);
}

struct Indices {
  Tensor experts, offsets, position;
};

// The operators' arguments that come from moe_route. checked: they have been validated before, by the forward of a backward;
// autograd refuses tensors that were written to in between.
struct GivenRouting {
  const Tensor &experts, &offsets, &position;
  OptionalInt capacity;
  bool checked;
};

// Puts them, tensors on x's device, into p.
Indices set_routing(camox_moe_rows_params& p, const Tensor& x, const GivenRouting& given, const char* op) {
  const Tensor &experts = given.experts, &offsets = given.offsets, &position = given.position;
  const OptionalInt capacity = given.capacity;
  if (experts.dim() != 2 || offsets.dim() != 1)
    throw refusal(std::string(op) + ": experts must have shape (rows, K) and offsets (E+1,)");
  if (capacity.has_value() && *capacity < 0) throw refusal(std::string(op) + ": capacity must be >= 0, got " + text(*capacity));
  p.dtype = dtype_of(x, op);
  p.rows = experts.size(0), p.top_k = experts.size(1), p.num_experts = offsets.size(0) - 1;
  p.capacity = capacity.value_or(-1);
  check(camox_moe_rows_check(&p));
  const int64_t slots = p.rows * p.top_k;
  Indices found{indices(experts, x, slots, op, "experts"), indices(offsets, x, p.num_experts + 1, op, "offsets"),
                indices(position, x, slots, op, "position")};
  p.experts = data_of(found.experts), p.offsets = data_of(found.offsets), p.position = data_of(found.position);
#ifndef CAMOX_CUDA_PART
  if (given.checked) return found;
  std::vector<uint8_t> taken(slots);
  check(camox_moe_check_places(&p, taken.data()));
#endif
  return found;
}

Outer outer_of_rows(const camox_moe_rows_params& p) { return {{p.rows}, 1}; }

Outer outer_of_places(const camox_moe_rows_params& p) {
  if (p.capacity < 0) return {{p.rows * p.top_k}, 1};
  return {{p.num_experts, p.capacity}, 2};
}

void check_first(const Tensor& x, const int64_t* size, int64_t count, const char* op, const char* name) {
  bool same = x.dim() >= count;
  for (int64_t d = 0; same && d < count; ++d) same = x.size(d) == size[d];
  if (same) return;
  std::string expected;
  for (int64_t d = 0; d < count; ++d) expected += text(size[d]) + ", ";
  throw refusal(std::string(op) + ": " + name + " must have shape (" + expected + "...)");
}

void check_outer(const Tensor& x, Outer outer, const char* op, const char* name) {
  check_first(x, outer.size, outer.count, op, name);
}

#ifndef CAMOX_CUDA_PART
void run_rows(camox_moe_rows_kernel* kernel, const camox_moe_rows_params& p, bool fills_places) {
  const int64_t cost = p.row_size / camox_moe_chunks(&p) * p.top_k;
  run(kernel, p, camox_moe_items(&p, fills_places), cost);
}
#endif

Tensor moe_dispatch(const Tensor& given, const Tensor& experts, const Tensor& offsets, const Tensor& position,
                    OptionalInt capacity) {
  const char* op = "moe_dispatch";
  camox_moe_rows_params p{};
  const Indices routing = set_routing(p, given, {experts, offsets, position, capacity, false}, op);
  check_outer(given, outer_of_rows(p), op, "x");
  const RowLayout layout = row_layout(given, 1);
  Tensor x = as_rows(given, layout, outer_of_rows(p)), y = empty_rows(x, layout, outer_of_places(p));
  p.row_size = p.place_stride = layout.row_size;
  p.row = x.data_ptr(), p.row_stride = row_stride(x, 1), p.place = y.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_moe_dispatch_cuda, p, x, op);
#else
  run_rows(camox_moe_dispatch(p.dtype, camox_isa_current()), p, true);
#endif
  return y;
}

// weights: NULL for the plain sum, the backward of dispatch.
Tensor combine(const Tensor& given, const OptionalTensor& given_weights, const GivenRouting& given_routing, const char* op,
               const char* name) {
  camox_moe_rows_params p{};
  const Indices routing = set_routing(p, given, given_routing, op);
  const Outer outer = outer_of_places(p);
  check_outer(given, outer, op, name);
  const RowLayout layout = row_layout(given, outer.count);
  Tensor y = as_rows(given, layout, outer), x = empty_rows(y, layout, outer_of_rows(p));
  OptionalTensor weights;
  if (given_weights.has_value()) {
    check_real(*given_weights, y, 2, op, "weights");
    check_outer(*given_weights, {{p.rows, p.top_k}, 2}, op, "weights");
    weights = as_contiguous(*given_weights);
    p.weights = weights->data_ptr();
  }
  p.row_size = p.row_stride = layout.row_size;
  p.place = y.data_ptr(), p.place_stride = row_stride(y, outer.count), p.row = x.data_ptr();
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_moe_combine_cuda, p, y, op);
#else
  run_rows(camox_moe_combine(p.dtype, camox_isa_current()), p, false);
#endif
  return x;
}

Tensor moe_dispatch_backward(const Tensor& grad, const Tensor& experts, const Tensor& offsets, const Tensor& position,
                             OptionalInt capacity, bool checked) {
  return combine(grad, std::nullopt, {experts, offsets, position, capacity, checked}, "moe_dispatch_backward", "grad");
}

Tensor moe_combine(const Tensor& y, const Tensor& weights, const Tensor& experts, const Tensor& offsets, const Tensor& position,
                   OptionalInt capacity) {
  return combine(y, weights, {experts, offsets, position, capacity, false}, "moe_combine", "y");
}

std::tuple<Tensor, Tensor> moe_combine_backward(const Tensor& given_grad, const Tensor& given, const Tensor& given_weights,
                                                const Tensor& experts, const Tensor& offsets, const Tensor& position,
                                                OptionalInt capacity, bool checked) {
  const char* op = "moe_combine_backward";
  camox_moe_rows_params p{};
  const Indices routing = set_routing(p, given, {experts, offsets, position, capacity, checked}, op);
  const Outer outer = outer_of_places(p);
  check_outer(given, outer, op, "y");
  const RowLayout layout = row_layout(given, outer.count);
  std::vector<int64_t> of_grad = {p.rows};
  of_grad.insert(of_grad.end(), layout.size.begin(), layout.size.end());
  check_first(given_grad, of_grad.data(), of_grad.size(), op, "grad");
  if (given_grad.dim() != static_cast<int64_t>(of_grad.size()))
    throw refusal(std::string(op) + ": grad must have as many dimensions as what combine returns");
  check_dtype_and_device(given_grad, given, op, "grad");
  check_real(given_weights, given, 2, op, "weights");
  check_outer(given_weights, {{p.rows, p.top_k}, 2}, op, "weights");
  Tensor grad = as_rows(given_grad, layout, outer_of_rows(p)), y = as_rows(given, layout, outer);
  Tensor weights = as_contiguous(given_weights);
  Tensor grad_y = empty_rows(y, layout, outer), grad_weights = empty_real(y, {p.rows, p.top_k});
  p.row_size = layout.row_size;
  p.row = grad.data_ptr(), p.row_stride = row_stride(grad, 1);
  p.place = y.data_ptr(), p.place_stride = row_stride(y, outer.count);
  p.weights = weights.data_ptr(), p.grad_place = grad_y.data_ptr(), p.grad_weights = grad_weights.data_ptr();
  const int64_t chunks = camox_moe_chunks(&p);
  OptionalTensor partial;
  if (chunks > 1) {
    partial = empty_real(y, {p.rows, chunks, p.top_k});
    p.partial = partial->data_ptr();
  }
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_moe_combine_backward_cuda, p, y, op);
#else
  run_rows(camox_moe_combine_backward(p.dtype, camox_isa_current()), p, true);
  camox_moe_sum_chunks(&p);
#endif
  return {grad_y, grad_weights};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
#define MOE_INDICES "Tensor experts, Tensor offsets, Tensor position, SymInt? capacity"
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "moe_route(Tensor logits, Tensor? valid, int top_k, int score, SymInt? capacity) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def("moe_route_backward(Tensor grad, Tensor logits, Tensor experts, Tensor position, int score) -> Tensor");
  m.def("moe_place(Tensor experts, Tensor? valid, int num_experts, SymInt? capacity) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("moe_aux_loss(Tensor logits, Tensor counts, Tensor? valid, int kind, int top_k) -> (Tensor, Tensor)");
  m.def("moe_aux_loss_backward(Tensor grad, Tensor logits, Tensor slope, Tensor? valid, int kind) -> Tensor");
  m.def("moe_dispatch(Tensor x, " MOE_INDICES ") -> Tensor");
  m.def("moe_dispatch_backward(Tensor grad, " MOE_INDICES ", bool checked=False) -> Tensor");
  m.def("moe_combine(Tensor y, Tensor weights, " MOE_INDICES ") -> Tensor");
  m.def("moe_combine_backward(Tensor grad, Tensor y, Tensor weights, " MOE_INDICES ", bool checked=False) -> (Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("moe_route", TORCH_BOX(&moe_route));
  m.impl("moe_route_backward", TORCH_BOX(&moe_route_backward));
  m.impl("moe_place", TORCH_BOX(&moe_place));
  m.impl("moe_aux_loss", TORCH_BOX(&moe_aux_loss));
  m.impl("moe_aux_loss_backward", TORCH_BOX(&moe_aux_loss_backward));
  m.impl("moe_dispatch", TORCH_BOX(&moe_dispatch));
  m.impl("moe_dispatch_backward", TORCH_BOX(&moe_dispatch_backward));
  m.impl("moe_combine", TORCH_BOX(&moe_combine));
  m.impl("moe_combine_backward", TORCH_BOX(&moe_combine_backward));
}
