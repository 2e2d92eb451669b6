/* What Python asks of the CUDA part before it uses it, and the stream that torch is on. */
#include <cuda_runtime.h>
#include <dlfcn.h>

#define CAMOX_EXPORT extern "C" __attribute__((visibility("default")))

/* "sm_80,sm_90": the architectures with machine code here; PTX of the last one is here too. */
CAMOX_EXPORT const char *camox_cuda_archs(void) { return CAMOX_CUDA_ARCHS; }

/* CUDA version that this part was built with and that the driver supports (0: no driver), as 1000 * major + 10 * minor. */
CAMOX_EXPORT void camox_cuda_versions(int *built, int *driver) {
  *built = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}

extern "C" const char *camox_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

/* libtorch_cuda is looked up where torch has loaded it: a CPU-only torch, beside which this is built, has none to link with. */
extern "C" void *camox_cuda_current_stream(int device_index) {
  typedef int current_stream_fn(int, void **);
  static current_stream_fn *const current_stream = reinterpret_cast<current_stream_fn *>(
      dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream"));
  void *stream = nullptr;
  if (current_stream != nullptr) current_stream(device_index, &stream);
  return stream;
}
