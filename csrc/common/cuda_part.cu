/* What Python asks of the CUDA part, the stream that torch is on, and what kernels tell of bad values. */
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>

#include <atomic>

#define CAMOX_EXPORT extern "C" __attribute__((visibility("default")))

/* "sm_80,sm_90": the architectures with machine code here; PTX of the last one is here too. */
CAMOX_EXPORT const char *camox_cuda_archs(void) { return CAMOX_CUDA_ARCHS; }

/* CUDA version that this part was built with and that the driver supports (0: no driver), as 1000 * major + 10 * minor. */
CAMOX_EXPORT void camox_cuda_versions(int *built, int *driver) {
  *built = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}

CAMOX_EXPORT const char *camox_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

/* libtorch_cuda is looked up where torch has loaded it: a CPU-only torch, beside which this is built, has none to link with. */
extern "C" void *camox_cuda_current_stream(int device_index) {
  typedef int current_stream_fn(int, void **);
  static current_stream_fn *const current_stream = reinterpret_cast<current_stream_fn *>(
      dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream"));
  void *stream = nullptr;
  if (current_stream != nullptr) current_stream(device_index, &stream);
  return stream;
}

/* Zero when the library is loaded onto a device; see device_errors.h. */
__device__ uint32_t camox_error_word;

/* Where kernels on the current device set their bits; NULL where it cannot be found, and then nothing is told. The address is
   asked for once, so that a captured graph has none of it. */
extern "C" uint32_t *camox_cuda_error_word(int device_index) {
  constexpr int known_devices = 64;
  static std::atomic<uint32_t *> known[known_devices];
  const bool cached = device_index >= 0 && device_index < known_devices;
  if (cached && known[device_index] != nullptr) return known[device_index];
  void *address = nullptr;
  if (cudaGetSymbolAddress(&address, camox_error_word) != cudaSuccess) return nullptr;
  if (cached) known[device_index] = static_cast<uint32_t *>(address);
  return static_cast<uint32_t *>(address);
}

/* Waits for the device, then moves its bits to *bits and clears them: 0 or a cudaError_t. */
CAMOX_EXPORT int camox_cuda_take_errors(int device_index, uint32_t *bits) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(device_index);
  if (error != cudaSuccess) return static_cast<int>(error);
  error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaMemcpyFromSymbol(bits, camox_error_word, sizeof *bits);
  const uint32_t none = 0;
  if (error == cudaSuccess && *bits != 0) error = cudaMemcpyToSymbol(camox_error_word, &none, sizeof none);
  cudaSetDevice(current);
  return static_cast<int>(error);
}
