/* Status codes of the C kernels and their one thread-local message; notes of what a call runs. C code never throws, prints
   or exits. */
#ifndef CAMOX_STATUS_H
#define CAMOX_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CAMOX_OK = 0,
  CAMOX_INVALID_ARGUMENT = 1, /* becomes ValueError in Python (raise_as_torch_does of camox_ops/_torch_private.py) */
  CAMOX_UNSUPPORTED = 2,      /* becomes RuntimeError: no such variant in this build or on this machine */
  CAMOX_CUDA_ERROR = 3        /* becomes RuntimeError with the CUDA error's text */
};

/* Stores the formatted message for this thread and returns code, so that checks read `return camox_fail(...)`. */
int camox_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The message of this thread's last camox_fail; valid until its next one. */
const char *camox_last_error(void);

/* The same where it was an argument that was refused, else empty. */
const char *camox_last_refusal(void);

/* Notes of what this thread's calls run and why, for cx.explain: lines that begin with "kernel " or "why ". They are asked for
   only while camox_notes_are_kept is set, so that a call without them pays for one comparison. */
extern int camox_notes_are_kept;
void camox_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The notes since the last camox_clear_notes, one a line; those that found no room are missing. */
const char *camox_notes(void);
void camox_clear_notes(void);

#ifdef __cplusplus
}
#endif
#endif
