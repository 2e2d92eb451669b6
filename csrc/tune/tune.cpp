// PyTorch's own CPU kernels, replaced: which there are, when each serves, and how it is put in place and taken out again.
// This is a shared object of its own, which camox_ops.train.tune_cpu opens; opening it changes nothing yet.
//
//   sgemm_, cblas_sgemm_batch   what PyTorch's mm, addmm, bmm, baddbmm, their .out variants, attention and whatever else
//                               multiplies float32 matrices call. They lie below the operators, whose arguments torch has
//                               checked by then, and an operator that takes a Scalar, as addmm does, cannot be registered
//                               through the stable ABI (torch 2.10 to 2.13: "Not yet supported conversion").
//   aten::bernoulli_.float      at the dispatcher, for the CPU key.
//   aten::avg_pool2d, aten::convolution, aten::_softmax, aten::_log_softmax, aten::upsample_bilinear2d,
//   aten::upsample_nearest2d, aten::_upsample_nearest_exact2d and their backward, and without it aten::max_pool2d_with_indices
//   and aten::native_batch_norm   there too: pool.cpp, convolution.cpp, softmax.cpp, upsample.cpp, max_pool.cpp, batch_norm.cpp.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "../common/integers.h"
#include "../common/torch_util.h"
#include "../gemm/sgemm_run.h"
#include "batch_norm_ops.h"
#include "bernoulli.h"
#include "convolution.h"
#include "pool.h"
#include "slot.h"
#include "softmax_ops.h"
#include "stock.h"
#include "upsample_ops.h"

#define CAMOX_TUNE_API extern "C" __attribute__((visibility("default")))

// In torch from 2.13 on: without it an operator that takes a Generator cannot be called.
extern "C" __attribute__((weak)) AOTITorchError torch_delete_generator(AtenGeneratorHandle generator);
extern "C" __attribute__((weak)) AOTITorchError torch_delete_stable_ivalue(StableIValue* value);
// torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_bernoulli__float(AtenTensorHandle self, double p,
                                                                                AtenGeneratorHandle* generator);

namespace {

using namespace camox;
using torch::stable::detail::StableLibrary;

std::atomic<int64_t> sgemm_calls, batch_calls, bernoulli_calls;

using Sgemm = void(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                   const float*, const int*, const float*, float*, const int*);
using SgemmBatch = void(int, const int*, const int*, const int*, const int*, const int*, const float*, const float**,
                        const int*, const float**, const int*, const float*, float**, const int*, int, const int*);
std::atomic<Sgemm*> stock_sgemm;
std::atomic<SgemmBatch*> stock_sgemm_batch;
std::atomic<bool> serving_sgemm, serving_sgemm_batch;

constexpr int column_major = 102, no_transpose = 111;  // CBLAS
// Smaller products are not slower in MKL, and those that are a vector long in one direction have kernels of their own there.
std::atomic<int64_t> least_size{8}, least_product{32 * 32 * 32}, least_batch_product{48 * 48 * 48};

bool worth_it(int64_t m, int64_t n, int64_t k, float alpha, const std::atomic<int64_t>& least) {
  return std::min({m, n, k}) >= least_size.load(std::memory_order_relaxed) &&
         m * n * k >= least.load(std::memory_order_relaxed) && alpha != 0;
}

// BLAS counts in columns: its C [m,n] is our c transposed, with op(B) as x and op(A) as y.
camox_sgemm_shape shape_of(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                           int64_t ldc) {
  camox_sgemm_shape shape{};
  shape.rows = n, shape.columns = m, shape.depth = k;
  shape.x_row = transpose_b ? 1 : ldb, shape.x_depth = transpose_b ? ldb : 1;
  shape.y_column = transpose_a ? lda : 1, shape.y_depth = transpose_a ? 1 : lda;
  shape.c_row = ldc;
  return shape;
}

void sgemm(const char* transa, const char* transb, const int* m, const int* n, const int* k, const float* alpha, const float* a,
           const int* lda, const float* b, const int* ldb, const float* beta, float* c, const int* ldc) {
  if (serving_sgemm.load(std::memory_order_relaxed) && worth_it(*m, *n, *k, *alpha, least_product)) {
    auto transposed = [](char code) { return code != 'n' && code != 'N'; };
    Products p{};
    p.shape = shape_of(transposed(*transa), transposed(*transb), *m, *n, *k, *lda, *ldb, *ldc);
    p.shape.alpha = *alpha, p.shape.beta = *beta;
    p.x = &b, p.y = &a, p.c = &c, p.count = 1;
    if (multiply(p)) {
      sgemm_calls.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
  stock_sgemm.load(std::memory_order_relaxed)(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void sgemm_batch(int layout, const int* transa, const int* transb, const int* m, const int* n, const int* k, const float* alpha,
                 const float** a, const int* lda, const float** b, const int* ldb, const float* beta, float** c, const int* ldc,
                 int groups, const int* group_size) {
  if (serving_sgemm_batch.load(std::memory_order_relaxed) && layout == column_major && groups == 1 &&
      worth_it(*m, *n, *k, *alpha, least_batch_product)) {
    Products p{};
    p.shape = shape_of(*transa != no_transpose, *transb != no_transpose, *m, *n, *k, *lda, *ldb, *ldc);
    p.shape.alpha = *alpha, p.shape.beta = *beta;
    p.x = b, p.y = a, p.c = c, p.count = *group_size;
    if (p.count > 0 && multiply(p)) {
      batch_calls.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
  stock_sgemm_batch.load(std::memory_order_relaxed)(layout, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc,
                                                    groups, group_size);
}

int64_t fresh_seed() {
  // The generator that torch.manual_seed sets gives one number per call.
  const int64_t size = 1, stride = 1;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &made));
  Tensor number(made);
  AtenTensorHandle passed;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(made, &passed));
  std::array<StableIValue, 2> stack = {torch::stable::detail::from(passed), torch::stable::detail::from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::random_", "", stack.data(), TORCH_ABI_VERSION));
  Tensor returned(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  return *static_cast<const int64_t*>(number.data_ptr());
}

bool is_dense(const Tensor& x) {
  if (x.is_contiguous()) return true;
  const std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  const std::vector<int64_t> packed = packed_strides(sizes, memory_order(x, 0, x.dim()));
  for (int64_t d = 0; d < x.dim(); ++d)
    if (sizes[d] > 1 && x.stride(d) != packed[d]) return false;
  return true;
}

bool is_float(const Tensor& x) {
  using torch::headeronly::ScalarType;
  const ScalarType type = x.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Double;
}

void fill_bernoulli(const Tensor& self, double probability) {
  constexpr int64_t exceeds_cache = 32 << 20, line = 64;
  camox_bernoulli_params p{};
  p.out = self.data_ptr();
  p.count = self.numel();
  p.bound = static_cast<uint64_t>(std::ldexp(probability, 32) + 0.5);
  p.exceeds_cache = p.count * self.element_size() >= exceeds_cache && reinterpret_cast<uintptr_t>(p.out) % line == 0;
  p.seed = static_cast<uint64_t>(fresh_seed());
  const int64_t items = camox_ceil_div(p.count, CAMOX_BERNOULLI_ITEM);
  run(camox_bernoulli(dtype_of(self, "bernoulli_"), camox_isa_current()), p, items, CAMOX_BERNOULLI_ITEM);
}

// PyTorch's kernel, which its C interface has for compiled models and which does not pass through the dispatcher.
void stock_bernoulli(const Tensor& self, double p, StableIValue* own_generator) {
  AtenGeneratorHandle generator = own_generator ? torch::stable::detail::to<AtenGeneratorHandle>(*own_generator) : nullptr;
  const AOTITorchError error = aoti_torch_cpu_bernoulli__float(self.get(), p, own_generator ? &generator : nullptr);
  if (own_generator) torch_delete_generator(generator), torch_delete_stable_ivalue(own_generator);
  check_stock(error, "bernoulli_");
}

// bernoulli_.float(Tensor(a!) self, float p, *, Generator? generator) -> Tensor(a!)
void bernoulli(StableIValue* stack, uint64_t, uint64_t) {
  Tensor self(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const double p = torch::stable::detail::to<double>(stack[1]);
  const bool own_generator = stack[2] != torch::stable::detail::from(std::nullopt);
  if (own_generator || !is_float(self) || !is_dense(self) || !(p >= 0 && p <= 1)) {
    stock_bernoulli(self, p, torch::stable::detail::to<StableIValue*>(stack[2]));
  } else if (self.numel() > 0) {
    fill_bernoulli(self, p);
    bernoulli_calls.fetch_add(1, std::memory_order_relaxed);
  }
  stack[0] = torch::stable::detail::from(self);
}

// A BLAS function whose slot in PyTorch's library is ours while `serving`.
template <class Function>
struct BlasCall {
  const char* name;
  Function* ours;
  std::atomic<Function*>& stock;
  std::atomic<bool>& serving;
  camox_slot slot{};

  const char* put() {
    if (!slot.at) slot = camox_slot_find("libtorch_cpu.", name);
    if (!slot.at) return "this PyTorch calls no BLAS library through a linkage table";
    if (*slot.at != reinterpret_cast<void*>(ours)) {
      stock.store(reinterpret_cast<Function*>(*slot.at));
      if (camox_slot_set(slot, reinterpret_cast<void*>(ours)) != 0) return "PyTorch's linkage table is write-protected";
    }
    serving.store(true);
    return nullptr;
  }

  // Where somebody else stands in the slot by now, ours may be called by them: it hands everything on.
  void take() {
    serving.store(false);
    if (slot.at && *slot.at == reinterpret_cast<void*>(ours)) camox_slot_set(slot, reinterpret_cast<void*>(stock.load()));
  }
};

BlasCall<Sgemm> one_product{"sgemm_", sgemm, stock_sgemm, serving_sgemm};
BlasCall<SgemmBatch> many_products{"cblas_sgemm_batch", sgemm_batch, stock_sgemm_batch, serving_sgemm_batch};
std::unique_ptr<StableLibrary> registered_bernoulli;

const char* put_bernoulli() {
  if (!torch_delete_generator || !torch_delete_stable_ivalue) return "PyTorch hands generators to such kernels from 2.13 on";
  if (!aoti_torch_cpu_bernoulli__float) return "this PyTorch's C interface does not have its own kernel";
  if (!registered_bernoulli) {
    registered_bernoulli = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    registered_bernoulli->impl("bernoulli_.float", bernoulli);
  }
  return nullptr;
}

struct Replacement {
  const char* name;
  const char* (*put)();  // why not, or NULL
  void (*take)();
  int64_t (*calls)();
};

Replacement table[] = {
    {"mm", [] { return one_product.put(); }, [] { one_product.take(); }, [] { return sgemm_calls.load(); }},
    {"bmm", [] { return many_products.put(); }, [] { many_products.take(); }, [] { return batch_calls.load(); }},
    {"bernoulli_", put_bernoulli, [] { registered_bernoulli.reset(); }, [] { return bernoulli_calls.load(); }},
    {"avg_pool2d", put_avg_pool2d, take_avg_pool2d, avg_pool2d_calls},
    {"max_pool2d", put_max_pool2d, take_max_pool2d, max_pool2d_calls},
    {"convolution", put_convolution, take_convolution, convolution_calls},
    {"pointwise", put_pointwise, take_pointwise, pointwise_calls},
    {"softmax", put_softmax, take_softmax, softmax_calls},
    {"batch_norm", put_batch_norm, take_batch_norm, batch_norm_calls},
    {"upsample_bilinear2d", put_upsample_bilinear, take_upsample_bilinear, upsample_bilinear_calls},
    {"upsample_nearest2d", put_upsample_nearest, take_upsample_nearest, upsample_nearest_calls},
};

Replacement* find(const char* name) {
  for (Replacement& replacement : table)
    if (std::strcmp(replacement.name, name) == 0) return &replacement;
  return nullptr;
}

}  // namespace

// What Python calls, one at a time, while no other thread computes.
CAMOX_TUNE_API void camox_tune_open(void* (*address)(const char* symbol)) { address_in_torch = address; }

// NULL, or what is wrong.
CAMOX_TUNE_API const char* camox_tune_put(const char* name) {
  try {
    Replacement* replacement = find(name);
    return replacement ? replacement->put() : "no such replacement";
  } catch (const std::exception&) {
    return "PyTorch refused the registration";
  }
}

CAMOX_TUNE_API void camox_tune_take(const char* name) {
  if (Replacement* replacement = find(name)) replacement->take();
}

// For tests, whose products are small: which ones are replaced. size is at least 1.
CAMOX_TUNE_API void camox_tune_set_least(int64_t size, int64_t product, int64_t batch_product) {
  least_size.store(size), least_product.store(product), least_batch_product.store(batch_product);
}

// How often a replacement served.
CAMOX_TUNE_API int64_t camox_tune_calls(const char* name) {
  const Replacement* replacement = find(name);
  return replacement ? replacement->calls() : -1;
}
