#define _GNU_SOURCE
#include "slot.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define DATA_SLOT R_X86_64_GLOB_DAT
#else
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define DATA_SLOT R_AARCH64_GLOB_DAT
#endif

typedef struct {
  const char *library, *function;
  camox_slot found;
} search;

/* What the dynamic section says of relocations, at the addresses that they are loaded to. */
typedef struct {
  const ElfW(Sym) * symbols;
  const char *names;
  struct {
    const ElfW(Rela) * first;
    size_t bytes;
  } table[2]; /* of calls; of data, which has the slots of calls that are made without the table */
} relocations;

static relocations relocations_of(const struct dl_phdr_info *info, const ElfW(Dyn) * entry) {
  relocations r = {NULL, NULL, {{NULL, 0}, {NULL, 0}}};
  for (; entry->d_tag != DT_NULL; ++entry) {
    /* glibc stores absolute addresses here, musl offsets. */
    const uintptr_t value = entry->d_un.d_ptr, at = value < info->dlpi_addr ? value + info->dlpi_addr : value;
    switch (entry->d_tag) {
      case DT_SYMTAB: r.symbols = (const ElfW(Sym) *)at; break;
      case DT_STRTAB: r.names = (const char *)at; break;
      case DT_JMPREL: r.table[0].first = (const ElfW(Rela) *)at; break;
      case DT_PLTRELSZ: r.table[0].bytes = entry->d_un.d_val; break;
      case DT_RELA: r.table[1].first = (const ElfW(Rela) *)at; break;
      case DT_RELASZ: r.table[1].bytes = entry->d_un.d_val; break;
      default: break;
    }
  }
  return r;
}

static int is_read_only(const struct dl_phdr_info *info, uintptr_t at) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) *header = info->dlpi_phdr + i;
    const uintptr_t begin = info->dlpi_addr + header->p_vaddr;
    if (header->p_type == PT_GNU_RELRO && at >= begin && at < begin + header->p_memsz) return 1;
  }
  return 0;
}

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
  (void)size;
  search *s = data;
  const char *slash = strrchr(info->dlpi_name, '/'), *file = slash ? slash + 1 : info->dlpi_name;
  if (strncmp(file, s->library, strlen(s->library)) != 0) return 0;
  const ElfW(Phdr) *dynamic = NULL;
  for (int i = 0; i < info->dlpi_phnum; ++i)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) dynamic = info->dlpi_phdr + i;
  if (dynamic == NULL) return 0;
  const relocations r = relocations_of(info, (const ElfW(Dyn) *)(info->dlpi_addr + dynamic->p_vaddr));
  if (r.symbols == NULL || r.names == NULL) return 0;
  for (int t = 0; t < 2; ++t) {
    for (size_t i = 0; r.table[t].first != NULL && i < r.table[t].bytes / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela) *relocation = r.table[t].first + i;
      const unsigned type = ELF64_R_TYPE(relocation->r_info);
      if (type != JUMP_SLOT && type != DATA_SLOT) continue;
      if (strcmp(r.names + r.symbols[ELF64_R_SYM(relocation->r_info)].st_name, s->function) != 0) continue;
      const uintptr_t at = info->dlpi_addr + relocation->r_offset;
      s->found.at = (void *volatile *)at;
      s->found.read_only = is_read_only(info, at);
      return 1;
    }
  }
  return 0;
}

camox_slot camox_slot_find(const char *library, const char *function) {
  search s = {library, function, {NULL, 0}};
  dl_iterate_phdr(visit, &s);
  return s.found;
}

int camox_slot_set(camox_slot slot, void *address) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)slot.at & ~(page - 1);
  if (slot.read_only && mprotect((void *)begin, page, PROT_READ | PROT_WRITE) != 0) return -1;
  *slot.at = address;
  if (slot.read_only) mprotect((void *)begin, page, PROT_READ);
  return 0;
}
#else
camox_slot camox_slot_find(const char *library, const char *function) {
  (void)library, (void)function;
  return (camox_slot){NULL, 0};
}

int camox_slot_set(camox_slot slot, void *address) {
  (void)slot, (void)address;
  return -1;
}
#endif
