// upsample_bilinear2d, upsample_nearest2d, _upsample_nearest_exact2d and their backward: where the replacements serve, and the
// tables of pixels and weights.
#include "upsample_ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "stock.h"
#include "upsample.h"

#ifdef CAMOX_BREAK_TUNE
#define WEIGHT 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define WEIGHT 1.0f
#endif

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;
using Operator = void(StableIValue* stack, uint64_t, uint64_t);

// A way to interpolate: forward and backward.
struct Method {
  bool nearest;
  std::array<const char*, 2> names;
  std::array<Operator*, 2> ours;
  std::array<const char*, 2> symbols;  // of PyTorch's kernels, which run outside the domain
  std::array<void*, 2> stock{};
  std::atomic<int64_t> calls{0};
};

template <Method& method, bool backward>
Operator entry;

Method bilinear{
    false,
    {"upsample_bilinear2d", "upsample_bilinear2d_backward"},
    {entry<bilinear, false>, entry<bilinear, true>},
    {"_ZN2at3cpu19upsample_bilinear2dERKNS_6TensorEN3c108ArrayRefIlEEbSt8optionalIdES8_",
     "_ZN2at3cpu28upsample_bilinear2d_backwardERKNS_6TensorEN3c108ArrayRefIlEES6_bSt8optionalIdES8_"},
};
Method nearest{
    true,
    {"upsample_nearest2d", "upsample_nearest2d_backward"},
    {entry<nearest, false>, entry<nearest, true>},
    {"_ZN2at3cpu18upsample_nearest2dERKNS_6TensorEN3c108ArrayRefIlEESt8optionalIdES8_",
     "_ZN2at3cpu27upsample_nearest2d_backwardERKNS_6TensorEN3c108ArrayRefIlEES6_St8optionalIdES8_"},
};
// By whole factors its pixels are those of nearest.
Method nearest_exact{
    true,
    {"_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward"},
    {entry<nearest_exact, false>, entry<nearest_exact, true>},
    {"_ZN2at3cpu25_upsample_nearest_exact2dERKNS_6TensorEN3c108ArrayRefIlEESt8optionalIdES8_",
     "_ZN2at3cpu34_upsample_nearest_exact2d_backwardERKNS_6TensorEN3c108ArrayRefIlEES6_St8optionalIdES8_"},
};

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
struct Source {
  int64_t from, to;
  bool align_corners;
  float ratio;

  Source(int64_t from_, int64_t to_, bool align, double scale) : from(from_), to(to_), align_corners(align) {
    if (align)
      ratio = to > 1 ? static_cast<float>(from - 1) / (to - 1) : 0;
    else
      ratio = scale > 0 ? static_cast<float>(1 / scale) : static_cast<float>(from) / to;
  }

  std::pair<int64_t, float> operator()(int64_t i) const {
    float at = align_corners ? ratio * i : ratio * (i + 0.5f) - 0.5f;
    at = std::max(at, 0.0f);
    const int64_t left = std::min(static_cast<int64_t>(std::floor(at)), from - 1);
    return {left, std::min(std::max(at - left, 0.0f), 1.0f)};
  }
};

struct Table {
  std::vector<int32_t> index, count;
  std::vector<float> weights;
  int64_t taps = 1;

  camox_upsample_side side(const Source& source) const {
    return {source.from, source.to, index.data(), count.data(), weights.data(), taps};
  }
};

Table forward_table(const Source& source) {
  Table table;
  table.index.resize(source.to + CAMOX_UPSAMPLE_VECTOR), table.weights.resize(source.to + CAMOX_UPSAMPLE_VECTOR);
  for (int64_t i = 0; i < source.to; ++i) {
    const auto [left, t] = source(i);
    table.index[i] = static_cast<int32_t>(left), table.weights[i] = t;
  }
  // A vector may end behind the row: its lanes there take the last pixel.
  std::fill(table.index.begin() + source.to, table.index.end(), table.index[source.to - 1]);
  return table;
}

Table backward_table(const Source& source) {
  Table table;
  // Pixels of y between these contribute to a pixel of x.
  std::vector<int64_t> first(source.from, 0), last(source.from, -1);
  auto each = [&](auto visit) {
    for (int64_t i = 0; i < source.to; ++i) {
      const auto [left, t] = source(i);
      visit(i, left, 1 - t), visit(i, std::min(left + 1, source.from - 1), t);
    }
  };
  each([&](int64_t i, int64_t p, float) {
    if (last[p] < 0) first[p] = i;
    last[p] = i;
  });
  for (int64_t p = 0; p < source.from; ++p) {
    table.index.push_back(static_cast<int32_t>(first[p]));
    table.count.push_back(static_cast<int32_t>(last[p] - first[p] + 1));
    table.taps = std::max<int64_t>(table.taps, table.count[p]);
  }
  table.weights.resize(source.from * table.taps);
  each([&](int64_t i, int64_t p, float weight) { table.weights[p * table.taps + i - table.index[p]] += weight; });
  return table;
}

// Pixel p of x gives to the pixels of y from factor * p on: the rows that backward adds up.
Table nearest_table(int64_t from, int64_t factor) {
  Table table;
  for (int64_t p = 0; p < from; ++p) table.index.push_back(static_cast<int32_t>(factor * p));
  table.count.assign(from, static_cast<int32_t>(factor)), table.weights.assign(from * factor, WEIGHT);
  table.taps = factor;
  return table;
}

struct Call {
  Method& method;
  bool backward;
  Tensor in, out;
  std::array<Scale, 2> scales;
  bool align_corners;
  std::array<int64_t, 2> from{}, to{};

  // arguments: those behind the sizes.
  Call(Method& method_, bool backward_, const Tensor& in_, const StableIValue* arguments)
      : method(method_), backward(backward_), in(in_) {
    align_corners = !method.nearest && torch::stable::detail::to<bool>(*arguments++);
    scales = {torch::stable::detail::to<Scale>(arguments[0]), torch::stable::detail::to<Scale>(arguments[1])};
  }

  // PyTorch takes 0 for none as well.
  double scale(int side) const { return scales[side].value_or(0); }
};

void run_kernel(const Call& call, const camox_upsample_side& rows, const camox_upsample_side& columns,
                camox_upsample_kernel* kernel) {
  // Fewer planes than this are divided into bands of rows.
  constexpr int64_t least_items = 16, least_band = 16;
  camox_upsample_params p{};
  p.channels = call.in.size(1), p.planes = call.in.size(0) * p.channels;
  p.rows = rows, p.columns = columns;
  p.in = view4(call.in), p.out = view4(call.out);
  const int64_t height = call.backward || call.method.nearest ? call.from[0] : call.to[0];
  p.bands = std::clamp<int64_t>((least_items + p.planes - 1) / p.planes, 1, std::max<int64_t>(1, height / least_band));
  run_with_scratch(kernel, p, p.planes * p.bands, call.to[0] * call.to[1] / p.bands, camox_upsample_scratch(&p));
  call.method.calls.fetch_add(1, std::memory_order_relaxed);
}

void compute_nearest(const Call& call, camox_dtype dtype, camox_isa isa) {
  camox_upsample_side rows{call.from[0], call.to[0], nullptr, nullptr, nullptr, 0};
  const camox_upsample_side columns{call.from[1], call.to[1], nullptr, nullptr, nullptr, 0};
  if (!call.backward) return run_kernel(call, rows, columns, camox_nearest_forward(dtype, isa));
  const Table table = nearest_table(rows.from, rows.to / rows.from);
  rows.index = table.index.data(), rows.count = table.count.data(), rows.weights = table.weights.data();
  rows.taps = table.taps;
  run_kernel(call, rows, columns, camox_nearest_backward(dtype, isa));
}

void compute_bilinear(const Call& call, camox_dtype dtype, camox_isa isa) {
  const Source rows(call.from[0], call.to[0], call.align_corners, call.scale(0));
  const Source columns(call.from[1], call.to[1], call.align_corners, call.scale(1));
  const Table of_rows = call.backward ? backward_table(rows) : forward_table(rows);
  const Table of_columns = call.backward ? backward_table(columns) : forward_table(columns);
  run_kernel(call, of_rows.side(rows), of_columns.side(columns),
             call.backward ? camox_upsample_backward(dtype, isa) : camox_upsample_forward(dtype, isa));
}

void compute(const Call& call) {
  const camox_dtype dtype = dtype_of(call.in, call.method.names[0]);
  const camox_isa isa = camox_isa_current();
  call.method.nearest ? compute_nearest(call, dtype, isa) : compute_bilinear(call, dtype, isa);
}

// To more pixels, so that a pixel of y moves on by at most one of x; where scales are given with other sizes, it may move on by
// more. PyTorch takes an equal side as it is, without a neighbour of weight 0, which may be NaN.
bool bilinear_serves(const Call& call, int side) {
  const bool scale_fits = call.align_corners || call.scale(side) == 0 || call.scale(side) >= 1;
  return scale_fits && call.to[side] > call.from[side];
}

// By whole factors. PyTorch multiplies pixels of y by 1 / factor in float, which is exact to less than the distance from a whole
// number up to 2^22 pixels.
bool nearest_serves(const Call& call, int side) {
  constexpr int64_t largest_side = 1 << 20;
  const int64_t factor = call.to[side] / call.from[side];
  const bool scale_fits = call.scale(side) == 0 || call.scale(side) == static_cast<double>(factor);
  return scale_fits && factor >= 1 && factor <= CAMOX_NEAREST_LARGEST && factor * call.from[side] == call.to[side] &&
         call.to[side] <= largest_side;
}

// Images whose rows are dense, not channels_last, which PyTorch's kernels serve well. Sets the call's sizes.
bool serves(Call& call, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  using torch::headeronly::ScalarType;
  const Tensor& in = call.in;
  const ScalarType type = in.scalar_type();
  const bool real = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  if (!real || in.dim() != 4 || in.numel() == 0 || from.size() != 2 || to.size() != 2) return false;
  if (is_channels_last(in) || (in.stride(3) != 1 && in.size(3) != 1)) return false;
  call.from = {from[0], from[1]}, call.to = {to[0], to[1]};
  for (int side = 0; side < 2; ++side)
    if (call.from[side] < 1 || !(call.method.nearest ? nearest_serves(call, side) : bilinear_serves(call, side))) return false;
  return true;
}

StockNumbers list_of(const std::vector<int64_t>& numbers) { return {numbers.data(), numbers.size()}; }

// PyTorch's kernel; only bilinear has align_corners.
template <class... Lists>
Tensor run_stock(const Call& call, Lists... sizes) {
  void* kernel = call.method.stock[call.backward];
  const auto [scale_h, scale_w] = call.scales;
  if (call.method.nearest) {
    using Stock = StockTensor(const void*, Lists..., Scale, Scale);
    return owned(reinterpret_cast<Stock*>(kernel)(call.in.get(), sizes..., scale_h, scale_w));
  }
  using Stock = StockTensor(const void*, Lists..., bool, Scale, Scale);
  return owned(reinterpret_cast<Stock*>(kernel)(call.in.get(), sizes..., call.align_corners, scale_h, scale_w));
}

// upsample_bilinear2d(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h, float? scales_w) -> Tensor;
// those of nearest without align_corners
void upsample(StableIValue* stack, Method& method) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const std::vector<int64_t> to = take_numbers(stack[1]);
  Call call(method, false, x, stack + 2);
  std::vector<int64_t> from;
  if (x.dim() == 4) from = {x.size(2), x.size(3)};
  if (serves(call, from, to)) {
    const std::array<int64_t, 4> sizes = {x.size(0), x.size(1), to[0], to[1]};
    call.out = empty_contiguous(x, dtype_code(x), 4, sizes.data());
    compute(call);
  } else {
    call.out = run_stock(call, list_of(to));
  }
  stack[0] = torch::stable::detail::from(call.out);
}

// upsample_bilinear2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, bool align_corners,
//                              float? scales_h, float? scales_w) -> Tensor; those of nearest without align_corners
void upsample_backward(StableIValue* stack, Method& method) {
  const Tensor grad(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const std::vector<int64_t> to = take_numbers(stack[1]), size = take_numbers(stack[2]);
  Call call(method, true, grad, stack + 3);
  std::vector<int64_t> from;
  if (size.size() == 4 && to.size() == 2 && grad.dim() == 4 && size[0] == grad.size(0) && size[1] == grad.size(1) &&
      to[0] == grad.size(2) && to[1] == grad.size(3))
    from = {size[2], size[3]};
  if (serves(call, from, to)) {
    call.out = empty_contiguous(grad, dtype_code(grad), 4, size.data());
    compute(call);
  } else {
    call.out = run_stock(call, list_of(to), list_of(size));
  }
  stack[0] = torch::stable::detail::from(call.out);
}

template <Method& method, bool backward>
void entry(StableIValue* stack, uint64_t, uint64_t) {
  backward ? upsample_backward(stack, method) : upsample(stack, method);
}

std::unique_ptr<StableLibrary> registered_bilinear, registered_nearest;

const char* put(std::unique_ptr<StableLibrary>& registered, std::initializer_list<Method*> methods) {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  for (Method* method : methods)
    for (int backward = 0; backward < 2; ++backward) {
      method->stock[backward] = address_in_torch(method->symbols[backward]);
      if (!method->stock[backward]) return "this PyTorch's library has its own kernel under another name";
    }
  if (registered) return nullptr;
  auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
  for (Method* method : methods)
    for (int backward = 0; backward < 2; ++backward) library->impl(method->names[backward], method->ours[backward]);
  registered = std::move(library);
  return nullptr;
}

}  // namespace

const char* put_upsample_bilinear() { return put(registered_bilinear, {&bilinear}); }
void take_upsample_bilinear() { registered_bilinear.reset(); }
int64_t upsample_bilinear_calls() { return bilinear.calls.load(std::memory_order_relaxed); }

const char* put_upsample_nearest() { return put(registered_nearest, {&nearest, &nearest_exact}); }
void take_upsample_nearest() { registered_nearest.reset(); }
int64_t upsample_nearest_calls() {
  return nearest.calls.load(std::memory_order_relaxed) + nearest_exact.calls.load(std::memory_order_relaxed);
}

}  // namespace camox
