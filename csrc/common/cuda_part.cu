/* The CUDA part's functions for Python: versions, torch's current stream, and the bad values that kernels have reported. */
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>

#include <atomic>

#include "status.h"

#define CAMOX_EXPORT extern "C" __attribute__((visibility("default")))

/* "sm_80,sm_90,compute_90": the architectures with machine code here, and that of the PTX, if there is any. */
CAMOX_EXPORT const char *camox_cuda_archs(void) { return CAMOX_CUDA_ARCHS; }

/* 1 where its kernels were compiled without optimisation, for a machine that has no GPU (setup.py). */
CAMOX_EXPORT int camox_cuda_unoptimised(void) {
#if defined(CAMOX_CUDA_UNOPTIMISED)
  return 1;
#else
  return 0;
#endif
}

/* CUDA version that this part was built with and that the driver supports (0: no driver), as 1000 * major + 10 * minor. */
CAMOX_EXPORT void camox_cuda_versions(int *built, int *driver) {
  *built = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}

/* The kernels' checks were made in this part, which has a message of its own. */
CAMOX_EXPORT const char *camox_cuda_last_refusal(void) { return camox_last_refusal(); }

CAMOX_EXPORT const char *camox_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

/* Puts torch's stream on a device into *stream: NULL, or why it cannot be had, for on any other stream kernels would race with
   torch's. libtorch_cuda is looked up where torch has loaded it: a CPU-only torch, beside which this is built, has none to link
   with. */
extern "C" const char *camox_cuda_current_stream(int device_index, void **stream) {
  typedef int current_stream_fn(int, void **);
  static current_stream_fn *const current_stream = reinterpret_cast<current_stream_fn *>(
      dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream"));
  if (current_stream == nullptr) return "this torch has no aoti_torch_get_current_cuda_stream to ask for its stream";
  return current_stream(device_index, stream) == 0 ? nullptr : "torch failed to return its current stream";
}

/* Of a device; 1 where it does not say, and then the launch that follows tells why. */
extern "C" int camox_cuda_multiprocessors(int device_index) {
  int count = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_index) == cudaSuccess) return count;
  cudaGetLastError(); /* or that launch would seem to have failed with it */
  return 1;
}

/* Makes a device the current one of this thread until the end of the scope. */
struct on_device {
  int before = 0;
  bool moved = false;
  cudaError_t error;
  explicit on_device(int device) : error(cudaGetDevice(&before)) {
    if (error != cudaSuccess || before == device) return;
    error = cudaSetDevice(device);
    moved = error == cudaSuccess;
  }
  ~on_device() {
    if (moved) cudaSetDevice(before);
  }
};

/* Zero when the library is loaded onto a device; see device_errors.h. */
__device__ uint32_t camox_error_word;

/* Its address on every device whose kernels were given it: asked for once, so that a captured graph has none of it. */
constexpr int error_devices = 128; /* torch serves 120 */
static std::atomic<uint32_t *> error_words[error_devices];

/* Where kernels on a device set their bits; NULL where it cannot be found, and then nothing is reported. */
extern "C" uint32_t *camox_cuda_error_word(int device_index) {
  if (device_index < 0 || device_index >= error_devices) return nullptr;
  if (error_words[device_index] != nullptr) return error_words[device_index];
  const on_device there(device_index);
  void *address = nullptr;
  if (there.error != cudaSuccess || cudaGetSymbolAddress(&address, camox_error_word) != cudaSuccess) {
    cudaGetLastError(); /* or the launch that follows would seem to have failed */
    return nullptr;
  }
  error_words[device_index] = static_cast<uint32_t *>(address);
  return static_cast<uint32_t *>(address);
}

/* Waits for the device, then moves its bits to *bits and clears them: 0 or a cudaError_t. A device whose kernels were never
   given the word has no bits, and is not touched: that alone would make a context on it. */
CAMOX_EXPORT int camox_cuda_take_errors(int device_index, uint32_t *bits) {
  *bits = 0;
  if (device_index < 0 || device_index >= error_devices || error_words[device_index] == nullptr) return 0;
  const on_device there(device_index);
  cudaError_t error = there.error;
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaMemcpyFromSymbol(bits, camox_error_word, sizeof *bits);
  const uint32_t none = 0;
  if (error == cudaSuccess && *bits != 0) error = cudaMemcpyToSymbol(camox_error_word, &none, sizeof none);
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}
