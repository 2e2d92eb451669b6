// upsample_bilinear2d and its backward: where the replacement serves, and the tables of pixels and weights.
#include "upsample_ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "stock.h"
#include "upsample.h"

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

// A list of numbers, which the stack gives away.
std::vector<int64_t> take_numbers(StableIValue list) {
  const auto handle = torch::stable::detail::to<StableListHandle>(list);
  size_t size = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(handle, &size));
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < size; ++i) {
    StableIValue number;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(handle, i, &number));
    numbers.push_back(torch::stable::detail::to<int64_t>(number));
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(handle));
  return numbers;
}

using Scale = std::optional<double>;

// The pixel of x on the left of pixel i of y, and how far from it to the next: PyTorch's definition, in its precision.
template <class Real>
struct Source {
  int64_t from, to;
  bool align_corners;
  Real ratio;

  Source(int64_t from_, int64_t to_, bool align, double scale) : from(from_), to(to_), align_corners(align) {
    if (align)
      ratio = to > 1 ? static_cast<Real>(from - 1) / (to - 1) : 0;
    else
      ratio = scale > 0 ? static_cast<Real>(1 / scale) : static_cast<Real>(from) / to;
  }

  std::pair<int64_t, Real> operator()(int64_t i) const {
    Real at = align_corners ? ratio * i : ratio * (i + Real(0.5)) - Real(0.5);
    at = std::max(at, Real(0));
    const int64_t left = std::min(static_cast<int64_t>(std::floor(at)), from - 1);
    return {left, std::min(std::max(at - left, Real(0)), Real(1))};
  }
};

template <class Real>
struct Table {
  using Index = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  std::vector<Index> index, count;
  std::vector<Real> weights;
  int64_t taps = 1;

  camox_upsample_side side(const Source<Real>& source) const {
    return {source.from, source.to, index.data(), count.data(), weights.data(), taps};
  }
};

template <class Real>
Table<Real> forward_table(const Source<Real>& source) {
  Table<Real> table;
  table.index.resize(source.to + CAMOX_UPSAMPLE_VECTOR), table.weights.resize(source.to + CAMOX_UPSAMPLE_VECTOR);
  for (int64_t i = 0; i < source.to; ++i) {
    const auto [left, t] = source(i);
    table.index[i] = static_cast<typename Table<Real>::Index>(left), table.weights[i] = t;
  }
  // A vector may end behind the row: its lanes there take the last pixel.
  std::fill(table.index.begin() + source.to, table.index.end(), table.index[source.to - 1]);
  return table;
}

template <class Real>
Table<Real> backward_table(const Source<Real>& source) {
  Table<Real> table;
  // Pixels of y between these contribute to a pixel of x.
  std::vector<int64_t> first(source.from, 0), last(source.from, -1);
  auto each = [&](auto visit) {
    for (int64_t i = 0; i < source.to; ++i) {
      const auto [left, t] = source(i);
      visit(i, left, 1 - t), visit(i, std::min(left + 1, source.from - 1), t);
    }
  };
  each([&](int64_t i, int64_t p, Real) {
    if (last[p] < 0) first[p] = i;
    last[p] = i;
  });
  for (int64_t p = 0; p < source.from; ++p) {
    table.index.push_back(static_cast<typename Table<Real>::Index>(first[p]));
    table.count.push_back(static_cast<typename Table<Real>::Index>(last[p] - first[p] + 1));
    table.taps = std::max<int64_t>(table.taps, table.count[p]);
  }
  table.weights.resize(source.from * table.taps);
  each([&](int64_t i, int64_t p, Real weight) { table.weights[p * table.taps + i - table.index[p]] += weight; });
  return table;
}

struct Call {
  Tensor in, out;
  std::array<int64_t, 2> from, to;
  bool align_corners;
  std::array<Scale, 2> scales;
  bool backward;

  // PyTorch takes 0 for none as well.
  double scale(int side) const { return scales[side].value_or(0); }
};

template <class Real>
void compute(const Call& call) {
  // Fewer planes than this are divided into bands of rows.
  constexpr int64_t least_items = 16, least_band = 16;
  const Source<Real> rows(call.from[0], call.to[0], call.align_corners, call.scale(0));
  const Source<Real> columns(call.from[1], call.to[1], call.align_corners, call.scale(1));
  const Table<Real> of_rows = call.backward ? backward_table(rows) : forward_table(rows);
  const Table<Real> of_columns = call.backward ? backward_table(columns) : forward_table(columns);
  camox_upsample_params p{};
  p.channels = call.in.size(1), p.planes = call.in.size(0) * p.channels;
  p.rows = of_rows.side(rows), p.columns = of_columns.side(columns);
  p.in = view4(call.in), p.out = view4(call.out);
  const int64_t written = call.backward ? call.from[0] : call.to[0];
  p.bands = std::clamp<int64_t>((least_items + p.planes - 1) / p.planes, 1, std::max<int64_t>(1, written / least_band));
  const camox_dtype dtype = dtype_of(call.in, "upsample_bilinear2d");
  const camox_isa isa = camox_isa_current();
  run_with_scratch(call.backward ? camox_upsample_backward(dtype, isa) : camox_upsample_forward(dtype, isa), p,
                   p.planes * p.bands, call.to[0] * call.to[1] / p.bands, camox_upsample_scratch(&p));
  calls.fetch_add(1, std::memory_order_relaxed);
}

void compute(const Call& call) {
  if (call.in.scalar_type() == torch::headeronly::ScalarType::Double)
    compute<double>(call);
  else
    compute<float>(call);
}

// Images whose rows are dense, not channels_last, which PyTorch's kernels serve well; to more rows and columns, so that a pixel
// of y moves on by at most one of x. PyTorch takes an equal side as it is, without a neighbour of weight 0, which may be NaN.
bool serves(const Tensor& in, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  using torch::headeronly::ScalarType;
  const ScalarType type = in.scalar_type();
  const bool real = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  if (!real || in.dim() != 4 || in.numel() == 0 || from.size() != 2 || to.size() != 2) return false;
  if (from[0] < 1 || from[1] < 1 || to[0] <= from[0] || to[1] <= from[1]) return false;
  return !is_channels_last(in) && (in.stride(3) == 1 || in.size(3) == 1);
}

// Where scales are given with other sizes, a pixel of y may move on by more than one of x.
bool scales_fit(const Call& call) {
  for (int side = 0; side < 2; ++side)
    if (!call.align_corners && call.scale(side) != 0 && !(call.scale(side) >= 1)) return false;
  return true;
}

// PyTorch's kernels, which run outside the domain.
using StockForward = StockTensor(const void*, StockNumbers, bool, Scale, Scale);
using StockBackward = StockTensor(const void*, StockNumbers, StockNumbers, bool, Scale, Scale);
StockForward* stock_forward;
StockBackward* stock_backward;

StockNumbers list_of(const std::vector<int64_t>& numbers) { return {numbers.data(), numbers.size()}; }

// upsample_bilinear2d(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h, float? scales_w) -> Tensor
void upsample(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const std::vector<int64_t> to = take_numbers(stack[1]);
  Call call{x, {}, {}, {}, torch::stable::detail::to<bool>(stack[2]), {}, false};
  call.scales = {torch::stable::detail::to<Scale>(stack[3]), torch::stable::detail::to<Scale>(stack[4])};
  std::vector<int64_t> from;
  if (x.dim() == 4) from = {x.size(2), x.size(3)};
  if (serves(x, from, to) && scales_fit(call)) {
    call.from = {from[0], from[1]}, call.to = {to[0], to[1]};
    const std::array<int64_t, 4> sizes = {x.size(0), x.size(1), to[0], to[1]};
    call.out = empty_contiguous(x, dtype_code(x), 4, sizes.data());
    compute(call);
  } else {
    call.out = owned(stock_forward(x.get(), list_of(to), call.align_corners, call.scales[0], call.scales[1]));
  }
  stack[0] = torch::stable::detail::from(call.out);
}

// upsample_bilinear2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, bool align_corners,
//                              float? scales_h, float? scales_w) -> Tensor
void upsample_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const std::vector<int64_t> to = take_numbers(stack[1]), size = take_numbers(stack[2]);
  Call call{grad, {}, {}, {}, torch::stable::detail::to<bool>(stack[3]), {}, true};
  call.scales = {torch::stable::detail::to<Scale>(stack[4]), torch::stable::detail::to<Scale>(stack[5])};
  std::vector<int64_t> from;
  if (size.size() == 4 && to.size() == 2 && grad.dim() == 4 && size[0] == grad.size(0) && size[1] == grad.size(1) &&
      to[0] == grad.size(2) && to[1] == grad.size(3))
    from = {size[2], size[3]};
  if (serves(grad, from, to) && scales_fit(call)) {
    call.from = {from[0], from[1]}, call.to = {to[0], to[1]};
    call.out = empty_contiguous(grad, dtype_code(grad), 4, size.data());
    compute(call);
  } else {
    call.out =
        owned(stock_backward(grad.get(), list_of(to), list_of(size), call.align_corners, call.scales[0], call.scales[1]));
  }
  stack[0] = torch::stable::detail::from(call.out);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_upsample() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  stock_forward = reinterpret_cast<StockForward*>(
      address_in_torch("_ZN2at3cpu19upsample_bilinear2dERKNS_6TensorEN3c108ArrayRefIlEEbSt8optionalIdES8_"));
  stock_backward = reinterpret_cast<StockBackward*>(
      address_in_torch("_ZN2at3cpu28upsample_bilinear2d_backwardERKNS_6TensorEN3c108ArrayRefIlEES6_bSt8optionalIdES8_"));
  if (!stock_forward || !stock_backward) return "this PyTorch's library has its own kernel under another name";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("upsample_bilinear2d", upsample).impl("upsample_bilinear2d_backward", upsample_backward);
    registered = std::move(library);
  }
  return nullptr;
}

void take_upsample() { registered.reset(); }

int64_t upsample_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
