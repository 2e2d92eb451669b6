/* csrc/common/cuda_part.cu on a made-up machine of four GPUs: which of them has a context, and each one's error word. */
#define CAMOX_EMULATED_ARCH 900
#define CAMOX_CUDA_ARCHS "sm_90,compute_90"
#include "cuda_emulator.h"
#undef cudaDeviceGetAttribute

constexpr int fake_devices = 4;

extern "C" {
int fake_current;
bool fake_contexts[fake_devices], fake_symbol_fails;
uint32_t fake_words[fake_devices];
static cudaError_t fake_error;

static cudaError_t fake_fails(cudaError_t error) { return fake_error = error; }

/* What the runtime does on the current device makes a context there; so does making it the current one. */
static uint32_t *fake_touch(void) {
  fake_contexts[fake_current] = true;
  return &fake_words[fake_current];
}

cudaError_t CUDARTAPI cudaGetLastError(void) {
  const cudaError_t error = fake_error;
  fake_error = cudaSuccess;
  return error;
}
const char *CUDARTAPI cudaGetErrorString(cudaError_t) { return "made up"; }
const char *camox_last_refusal(void) { return "refused"; }
cudaError_t CUDARTAPI cudaDriverGetVersion(int *version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int *device) {
  *device = fake_current;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (device < 0 || device >= fake_devices) return fake_fails(cudaErrorInvalidDevice);
  fake_current = device;
  fake_touch();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int device) {
  if (device < 0 || device >= fake_devices) return fake_fails(cudaErrorInvalidDevice);
  *value = 100 + device;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize(void) {
  fake_touch();
  return cudaSuccess;
}
}

/* Beside nvcc these are templates of the runtime's header. */
static cudaError_t cudaGetSymbolAddress(void **to, const uint32_t &) {
  *to = fake_touch();
  return fake_symbol_fails ? fake_fails(cudaErrorInvalidSymbol) : cudaSuccess;
}
static cudaError_t cudaMemcpyFromSymbol(void *to, const uint32_t &, size_t bytes) {
  memcpy(to, fake_touch(), bytes);
  return cudaSuccess;
}
static cudaError_t cudaMemcpyToSymbol(const uint32_t &, const void *from, size_t bytes) {
  memcpy(fake_touch(), from, bytes);
  return cudaSuccess;
}

#include "cuda_part.cu"
