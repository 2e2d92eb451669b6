/* Status codes of the C kernels and their one thread-local message. C code never throws, prints or exits. */
#ifndef CAMOX_STATUS_H
#define CAMOX_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CAMOX_OK = 0,
  CAMOX_INVALID_ARGUMENT = 1, /* becomes ValueError in Python */
  CAMOX_UNSUPPORTED = 2,      /* becomes RuntimeError: no such variant in this build or on this machine */
  CAMOX_CUDA_ERROR = 3        /* becomes RuntimeError with the CUDA error's text */
};

/* Stores the formatted message for this thread and returns code, so that checks read `return camox_fail(...)`. */
int camox_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The message of this thread's last camox_fail; valid until its next one. */
const char *camox_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
