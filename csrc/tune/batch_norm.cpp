// native_batch_norm, which F.batch_norm, nn.BatchNorm1d to 3d and F.instance_norm call: where the replacement serves. Inference goes
// on to PyTorch's kernel, and so does backward, whose sums PyTorch adds up in vectors.
#include <algorithm>
#include <atomic>

#include "../common/integers.h"
#include "batch_norm.h"
#include "batch_norm_ops.h"
#include "stock.h"

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

bool is_dense_float32(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Float && x.is_contiguous(); }

// Images whose planes are not so small that the work for each of them counts more than that for its values.
bool serves(const Tensor& x) {
  constexpr int64_t least_plane = 16;
  return x.dim() >= 3 && is_dense_float32(x) && x.numel() > 0 && x.numel() >= least_plane * x.size(0) * x.size(1);
}

// A tensor for each channel, or none.
bool fits(const OptionalTensor& of_channels, const Tensor& x) {
  return !of_channels || (of_channels->dim() == 1 && of_channels->size(0) == x.size(1) && is_dense_float32(*of_channels));
}

float* floats(const OptionalTensor& x) { return x ? static_cast<float*>(x->data_ptr()) : nullptr; }

Tensor empty_of_channels(const Tensor& x) {
  const int64_t channels = x.size(1);
  return empty_contiguous(x, dtype_code(x), 1, &channels);
}

// The sizes. Few channels are divided into bands.
camox_batch_norm_params params_of(const Tensor& x) {
  constexpr int64_t least_items = 16, least_band = 16384;
  camox_batch_norm_params p{};
  p.images = x.size(0), p.channels = x.size(1), p.plane = x.numel() / (p.images * p.channels);
  p.bands =
      std::clamp<int64_t>(camox_ceil_div(least_items, p.channels), 1, std::max<int64_t>(1, p.images * p.plane / least_band));
  p.x = static_cast<const float*>(x.data_ptr());
  return p;
}

void compute(camox_batch_norm_params& p) {
  camox_batch_norm_kernel* kernel = camox_batch_norm(camox_isa_current());
  const int64_t items = p.channels * p.bands, cost = 2 * p.images * p.plane / p.bands;
  std::vector<double> sums(2 * items);
  p.sums = sums.data();
  p.adds_up = 1, p.writes = p.bands == 1;
  run(kernel, p, items, cost);
  if (!p.writes) {
    p.adds_up = 0, p.writes = 1;
    run(kernel, p, items, cost);
  }
  calls.fetch_add(1, std::memory_order_relaxed);
}

// PyTorch's kernel, which runs outside the domain.
using Three = std::tuple<StockTensor, StockTensor, StockTensor>;
using Stock = Three(const void*, const StockOptional&, const StockOptional&, const StockOptional&, const StockOptional&, bool,
                    double, double);
Stock* stock;

using Results = std::array<Tensor, 3>;

Results owned(const Three& made) {
  return {camox::owned(std::get<0>(made)), camox::owned(std::get<1>(made)), camox::owned(std::get<2>(made))};
}

// The next argument of the stack; torch calls itself nothing where it passes an undefined tensor.
OptionalTensor optional_tensor(StableIValue value) {
  auto tensor = torch::stable::detail::to<OptionalTensor>(value);
  if (tensor && !tensor->defined()) tensor.reset();
  return tensor;
}

// native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,
//                   float momentum, float eps) -> (Tensor, Tensor, Tensor)
void batch_norm(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const OptionalTensor weight = optional_tensor(stack[1]), bias = optional_tensor(stack[2]);
  const OptionalTensor running_mean = optional_tensor(stack[3]), running_var = optional_tensor(stack[4]);
  const bool training = torch::stable::detail::to<bool>(stack[5]);
  const double momentum = torch::stable::detail::to<double>(stack[6]), eps = torch::stable::detail::to<double>(stack[7]);
  Results results;
  if (training && serves(x) && fits(weight, x) && fits(bias, x) && fits(running_mean, x) && fits(running_var, x)) {
    results = {empty_contiguous(x), empty_of_channels(x), empty_of_channels(x)};
    camox_batch_norm_params p = params_of(x);
    p.weight = floats(weight), p.bias = floats(bias);
    p.running_mean = floats(running_mean), p.running_var = floats(running_var);
    p.y = floats(results[0]), p.mean = floats(results[1]), p.invstd = floats(results[2]);
    p.momentum = momentum, p.eps = eps;
    compute(p);
  } else {
    results = owned(stock(x.get(), StockOptional(weight), StockOptional(bias), StockOptional(running_mean),
                          StockOptional(running_var), training, momentum, eps));
  }
  for (int i = 0; i < 3; ++i) stack[i] = torch::stable::detail::from(results[i]);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_batch_norm() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  stock =
      reinterpret_cast<Stock*>(address_in_torch("_ZN2at3cpu17native_batch_normERKNS_6TensorERKSt8optionalIS1_ES7_S7_S7_bdd"));
  if (!stock) return "this PyTorch's library has its own kernel under another name";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("native_batch_norm", batch_norm);
    registered = std::move(library);
  }
  return nullptr;
}

void take_batch_norm() { registered.reset(); }

int64_t batch_norm_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
