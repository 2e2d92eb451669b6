/* Where a loaded library keeps the address of a function that it calls by name, and another address in its place.

   A call of an exported function goes through the library's procedure linkage table: code jumps to the address in a slot that
   the dynamic linker fills (ELF, "Procedure Linkage Table"), so that a function of the same name in a program or a preloaded
   library takes its place. Here that is done after loading, by storing an address in the slot, which any thread may call
   through at the same time, and undone by storing the old one. Linux alone; elsewhere nothing is found. */
#ifndef CAMOX_TUNE_SLOT_H
#define CAMOX_TUNE_SLOT_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void *volatile *at; /* NULL: the library is not loaded, or does not call such a function through a slot */
  int read_only;      /* whether the linker wrote-protected it */
} camox_slot;

/* library: how the file's name begins. */
camox_slot camox_slot_find(const char *library, const char *function);

/* Stores address in the slot; 0, or -1 where the kernel refuses to make it writable. */
int camox_slot_set(camox_slot slot, void *address);

#ifdef __cplusplus
}
#endif
#endif
