/* Runtime of the CUDA emulator: fibers, scheduler, guarded memory, error reports and the record of kernels run.
   Linux only. It is a test tool: never linked into the library. */
#define CAMOX_EMULATED_ARCH 0
#include "cuda_emulator.h"

#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__) || defined(CAMOX_EMULATOR_UCONTEXT)
#include <ucontext.h>
#endif

/* glibc exports it; no header declares it. */
struct tls_index {
  unsigned long module, offset;
};
extern "C" void *__tls_get_addr(tls_index *);

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace {

constexpr int max_threads = 1024, warp_size = 32, max_warps = max_threads / warp_size;
constexpr size_t page = 4096, stack_bytes = 128 << 10, max_shared = 232448, guard_bytes = 16 << 20;
/* Stacks lie whole pages apart: unless each begins at another place in its page, all share one set of the L1 cache. */
constexpr size_t stack_shifts = 16;
constexpr unsigned char poison = 0xff; /* a NaN in every float type, -1 in every integer */

enum order { forward = 0, reverse = 1, random_order = 2 };

struct {
  int order = forward, threads = 0;
  uint64_t seed = 1;
  double timeout_s = 60;
  int64_t grid_cap = INT32_MAX;
  bool capturing = false;   /* as into a graph: kernels run at once all the same */
  std::string without_file; /* the barrier that is left out, to see whether anything notices */
  int without_line = 0;
} config;

/* ---- context switch ---- */
#if defined(__x86_64__) && !defined(CAMOX_EMULATOR_UCONTEXT)
/* swapcontext makes two system calls a switch; this saves what the ABI calls callee-saved and nothing else. */
__asm__(
    ".text\n.p2align 4\n.globl camox_emulator_switch\n.hidden camox_emulator_switch\n.type camox_emulator_switch,@function\n"
    "camox_emulator_switch:\n"
    "  endbr64\n  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq (%rsi), %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size camox_emulator_switch,.-camox_emulator_switch\n");
struct context {
  void *sp;
};
extern "C" void camox_emulator_switch(context *save, const context *load);

void context_make(context *c, unsigned char *stack, size_t bytes, void (*entry)()) {
  void **top = reinterpret_cast<void **>(stack + bytes);
  *--top = nullptr; /* where entry would return to: it never does */
  *--top = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  c->sp = top;
}
void context_switch(context *save, const context *load) { camox_emulator_switch(save, load); }
#else
struct context {
  ucontext_t u;
};
void context_make(context *c, unsigned char *stack, size_t bytes, void (*entry)()) {
  getcontext(&c->u);
  c->u.uc_stack.ss_sp = stack;
  c->u.uc_stack.ss_size = bytes;
  c->u.uc_link = nullptr;
  makecontext(&c->u, entry, 0);
}
void context_switch(context *save, const context *load) { swapcontext(&save->u, &load->u); }
#endif

/* ---- fibers ---- */
enum class wait { none, barrier, warp, exited };

struct pending_copy {
  void *to;
  unsigned char bytes[16];
  int count, group;
  const camox_emulator_site *site;
};

struct fiber {
  camox_emulator_thread self; /* first: kernels see a pointer to it */
  context at;
  unsigned char *stack;
  wait waits;
  const camox_emulator_site *site;
  unsigned mask;
  int result, group;
  std::vector<pending_copy> copies;
};

/* Lanes of a warp that wait for each other; what each deposits is here, so that the last one reads none of their fibers. */
struct rendezvous {
  unsigned mask, arrived;
  const camox_emulator_site *site; /* of the first lane; another lane's that is not the same place makes `differs` true */
  bool differs;
  camox_emulator_lanes lanes;
};

/* A __shared__ variable that a kernel may use: where in its object's TLS block it lies. */
struct shared_variable {
  size_t offset, bytes;
};

struct launch {
  camox_emulator_launch_info info;
  std::string name;
  dim3 grid, block;
  size_t shared_bytes, tls_module, tls_bytes;
  uint64_t blocks, next;
  const std::vector<shared_variable> *variables;
  std::vector<uint64_t> shuffled;
  bool failed;
};

struct worker {
  pthread_t thread;
  int number;
  context scheduler;
  sigjmp_buf recover;
  launch *job;
  fiber *current;
  fiber fibers[max_threads];
  uint64_t ready[max_threads / 64];
  int ready_count, threads, live, at_barrier, predicate_count;
  std::vector<rendezvous> warps[max_warps];
  unsigned char *stacks, *shared_region, *shared, *tls;
  std::vector<unsigned char *> free_stacks;
  std::unordered_set<size_t> poisoned; /* TLS modules */
  uint64_t random;
  dim3 block_idx;
};

/* initial-exec: read in signal handlers and on every access to threadIdx. */
__attribute__((tls_model("initial-exec"))) thread_local worker *self_worker;

std::mutex report_lock;
std::string report;

uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* ---- guarded global memory ---- */
struct allocation {
  unsigned char *region, *data, *first_page, *end_page;
  size_t region_bytes, bytes;
  char name[64];
};
std::vector<allocation> allocations;

std::string format_va(const char *format, va_list args) {
  char text[1024];
  vsnprintf(text, sizeof text, format, args);
  return text;
}

__attribute__((format(printf, 1, 2))) std::string format(const char *f, ...) {
  va_list args;
  va_start(args, f);
  std::string text = format_va(f, args);
  va_end(args);
  return text;
}

std::string describe(const fiber *f) {
  const dim3 b(f->self.block_idx.x, f->self.block_idx.y, f->self.block_idx.z);
  const uint3 t = f->self.thread_idx;
  return format("block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

std::string whereabouts(const fiber *f) {
  if (f->waits == wait::exited) return "has left the kernel";
  if (f->waits == wait::none) return "runs";
  const char *slash = strrchr(f->site->file, '/');
  std::string text = format("waits at %s (%s:%d", f->site->what, slash ? slash + 1 : f->site->file, f->site->line);
  if (f->waits == wait::warp) text += format(", mask 0x%08x", f->mask);
  return text + ")";
}

/* Keeps the first error; the scheduler of the failing block takes over. */
[[noreturn]] void fail_fiber(const fiber *f, const std::string &what) {
  worker *w = self_worker;
  {
    std::lock_guard<std::mutex> hold(report_lock);
    if (report.empty()) report = "kernel " + w->job->name + ", " + describe(f) + ": " + what;
  }
  __atomic_store_n(&w->job->failed, true, __ATOMIC_RELEASE);
  siglongjmp(w->recover, 1);
}

int index_of(const worker *w, const fiber *f) { return int(f - w->fibers); }

/* ---- scheduler ---- */
void make_ready(worker *w, int index) {
  w->ready[index / 64] |= uint64_t(1) << (index % 64);
  ++w->ready_count;
}

/* The lanes of `mask` of the warp whose first thread is `first`. Each says itself that it waits no longer, when it runs. */
void make_warp_ready(worker *w, int first, unsigned mask) {
  w->ready[first / 64] |= uint64_t(mask) << (first % 64);
  w->ready_count += __builtin_popcount(mask);
}

/* The place of the set bit that has `rank` others below it, counted in all bytes at once: branches on a random rank would be
   mispredicted. */
int place_of_set_bit(uint64_t bits, int rank) {
  constexpr uint64_t ones = 0x0101010101010101u, tops = ones << 7;
  uint64_t counts = bits - (bits >> 1 & 0x5555555555555555u);
  counts = (counts & 0x3333333333333333u) + (counts >> 2 & 0x3333333333333333u);
  counts = ((counts + (counts >> 4)) & 0x0f0f0f0f0f0f0f0fu) * ones; /* of each byte: the set bits up to its end */
  const auto bytes_of_at_most_rank = [&](uint64_t numbers) {
    return int(((((uint64_t(rank) * ones | tops) - numbers) & tops) >> 7) * ones >> 56);
  };
  const int first = bytes_of_at_most_rank(counts) * 8; /* of the bit's byte */
  rank -= int(counts << 8 >> first & 0xff);
  const uint64_t spread = ((bits >> first & 0xff) * ones) & 0x8040201008040201u; /* bit i in byte i */
  return first + bytes_of_at_most_rank(((spread + (tops - ones)) >> 7 & ones) * ones);
}

int pick(worker *w) {
  const int words = max_threads / 64;
  int word = 0, bit = 0;
  if (config.order == forward) {
    while (!w->ready[word]) ++word;
    bit = __builtin_ctzll(w->ready[word]);
  } else if (config.order == reverse) {
    word = words - 1;
    while (!w->ready[word]) --word;
    bit = 63 - __builtin_clzll(w->ready[word]);
  } else {
    int rank = int(next_random(&w->random) % uint64_t(w->ready_count));
    for (int here; rank >= (here = __builtin_popcountll(w->ready[word])); ++word) rank -= here;
    bit = place_of_set_bit(w->ready[word], rank);
  }
  w->ready[word] &= ~(uint64_t(1) << bit);
  --w->ready_count;
  return word * 64 + bit;
}

void fiber_main() {
  worker *w = self_worker;
  fiber *f = w->current;
  w->job->info.invoke(w->job->info.bound);
  if (!f->copies.empty()) fail_fiber(f, format("cp.async at line %d is never waited for", f->copies.front().site->line));
  f->waits = wait::exited;
  --w->live;
  w->free_stacks.push_back(f->stack);
  context_switch(&f->at, &w->scheduler); /* a next fiber may get this stack, so that it cannot be made here */
  abort();
}

/* The fiber that is to run next, with a stack. */
fiber *next_fiber(worker *w) {
  fiber *f = &w->fibers[pick(w)];
  if (!f->stack) { /* a fiber that ran to its end hands its warm stack to the next */
    f->stack = w->free_stacks.back();
    w->free_stacks.pop_back();
    const size_t shift = size_t(index_of(w, f)) % stack_shifts * (page / stack_shifts);
    context_make(&f->at, f->stack, stack_bytes - shift, fiber_main);
  }
  return w->current = f;
}

/* From a fiber that waits straight to the next one; to the scheduler, which knows of deadlocks, when none can run. */
void switch_fiber(worker *w) {
  fiber *const from = w->current;
  if (!w->ready_count) {
    context_switch(&from->at, &w->scheduler);
  } else {
    const fiber *const to = next_fiber(w);
    if (to != from) context_switch(&from->at, &to->at);
  }
  from->waits = wait::none;
}

/* Nothing can run and not all have finished: say who waits for whom. */
[[noreturn]] void fail_deadlock(worker *w) {
  for (int i = 0; i < w->threads; ++i) {
    const fiber *f = &w->fibers[i];
    if (f->waits != wait::warp) continue;
    for (int lane = 0; lane < warp_size; ++lane) {
      const int other = i / warp_size * warp_size + lane;
      const fiber *g = &w->fibers[other];
      if (!(f->mask >> lane & 1) || other >= w->threads || (g->waits == wait::warp && g->mask == f->mask)) continue;
      fail_fiber(f, whereabouts(f) +
                        format(" for lane %d, but thread (%u,%u,%u) ", lane, g->self.thread_idx.x, g->self.thread_idx.y,
                               g->self.thread_idx.z) +
                        whereabouts(g));
    }
  }
  const fiber *waiting = nullptr, *absent = nullptr;
  for (int i = 0; i < w->threads; ++i) {
    const fiber *f = &w->fibers[i];
    if (f->waits == wait::barrier && !waiting) waiting = f;
    if (f->waits != wait::barrier && !absent) absent = f;
  }
  fail_fiber(waiting, whereabouts(waiting) +
                          format(" with %d of %d threads, but thread (%u,%u,%u) ", w->at_barrier, w->threads,
                                 absent->self.thread_idx.x, absent->self.thread_idx.y, absent->self.thread_idx.z) +
                          whereabouts(absent));
}

/* The kernel's own ones alone: the TLS block has those of all kernels, up to 2 MB. */
void poison_variables(worker *w) {
  for (const shared_variable &v : *w->job->variables) memset(w->tls + v.offset, poison, v.bytes);
}

void run_block(worker *w, uint64_t linear) {
  launch *job = w->job;
  const dim3 grid = job->grid, block = job->block;
  const uint3 block_idx = {unsigned(linear % grid.x), unsigned(linear / grid.x % grid.y), unsigned(linear / grid.x / grid.y)};
  w->threads = w->live = int(block.x * block.y * block.z);
  w->ready_count = w->at_barrier = w->predicate_count = 0;
  w->random = config.seed * 0x2545f4914f6cdd1du + linear;
  w->block_idx = dim3(block_idx.x, block_idx.y, block_idx.z);
  memset(w->ready, 0, sizeof w->ready);
  for (auto &pending : w->warps) pending.clear();
  w->free_stacks.clear();
  for (int i = w->threads; i-- > 0;) w->free_stacks.push_back(w->stacks + size_t(i) * (stack_bytes + page) + page);
  poison_variables(w);
  /* flush against the guard page behind it */
  w->shared = w->shared_region + (max_shared + page - 1) / page * page - (job->shared_bytes + 15) / 16 * 16;
  memset(w->shared, poison, size_t(w->shared_region + (max_shared + page - 1) / page * page - w->shared));
  for (int i = 0; i < w->threads; ++i) {
    fiber *f = &w->fibers[i];
    f->self.thread_idx = {unsigned(i) % block.x, unsigned(i) / block.x % block.y, unsigned(i) / block.x / block.y};
    f->self.block_idx = block_idx;
    f->self.block_dim = block;
    f->self.grid_dim = grid;
    f->stack = nullptr;
    f->waits = wait::none;
    f->group = 0;
    f->copies.clear();
    make_ready(w, i);
  }
  if (sigsetjmp(w->recover, 0)) {
    w->current = nullptr;
    return;
  }
  while (w->live) {
    if (!w->ready_count) fail_deadlock(w);
    const fiber *f = next_fiber(w);
    context_switch(&w->scheduler, &f->at);
  }
  w->current = nullptr;
}

/* ---- signals ---- */
struct sigaction old_actions[NSIG];
const int fault_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGUSR2};

std::string describe_address(const worker *w, const unsigned char *p, const char *access) {
  for (const allocation &a : allocations) {
    if (p < a.region || p >= a.region + a.region_bytes) continue;
    if (p < a.data) return format("%s out of bounds at %p: %zd bytes before buffer '%s'", access, p, a.data - p, a.name);
    return format("%s out of bounds at %p: %zd bytes past the end of buffer '%s' (%zu bytes)", access, p,
                  p - (a.data + a.bytes), a.name, a.bytes);
  }
  if (p >= w->shared_region - guard_bytes && p < w->shared_region + guard_bytes + max_shared)
    return format("%s out of bounds at %p: dynamic shared memory has %zu bytes, this is byte %zd", access, p,
                  w->job->shared_bytes, p - w->shared);
  if (p >= w->stacks && p < w->stacks + max_threads * (stack_bytes + page)) return "stack overflow";
  if (!p) return format("%s at a non-canonical or null address", access);
  return format("%s out of bounds at %p, in no buffer", access, p);
}

void on_fault(int number, siginfo_t *info, void *context_data) {
  worker *w = self_worker;
  if (!w || !w->current) { /* not a kernel's fault: give it back to whoever held the signal */
    if (number == SIGUSR2) return;
    sigaction(number, &old_actions[number], nullptr);
    return;
  }
  if (number == SIGUSR2)
    fail_fiber(w->current,
               format("still running after %g s: a thread spins on a value that no other thread will write", config.timeout_s));
  if (number == SIGFPE) fail_fiber(w->current, "integer division by zero");
  const char *access = "access";
#if defined(__x86_64__)
  access = static_cast<ucontext_t *>(context_data)->uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read";
#else
  (void)context_data;
#endif
  fail_fiber(w->current, describe_address(w, static_cast<unsigned char *>(info->si_addr), access));
}

void take_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int number : fault_signals) sigaction(number, &action, &old_actions[number]);
}

/* SIGUSR2 stays ours: one that was sent to a worker may still be under way, and its default is to end the process. */
void give_signals_back() {
  for (int number : fault_signals)
    if (number != SIGUSR2) sigaction(number, &old_actions[number], nullptr);
}

/* ---- workers ---- */
struct worker_pool {
  std::mutex lock;
  std::condition_variable start, done;
  std::vector<worker *> workers;
  launch *job = nullptr;
  uint64_t turn = 0;
  int busy = 0, wanted = 0;
};
worker_pool &pool = *new worker_pool; /* never destroyed: its threads wait on it when the process ends */

unsigned char *map(size_t bytes, int protection) {
  void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("CUDA emulator: mmap");
    abort();
  }
  return static_cast<unsigned char *>(p);
}

void open_pages(unsigned char *p, size_t bytes) {
  if (mprotect(p, bytes, PROT_READ | PROT_WRITE)) {
    perror("CUDA emulator: mprotect");
    abort();
  }
}

void work(worker *w) {
  self_worker = w;
  w->stacks = map(max_threads * (stack_bytes + page), PROT_NONE);
  for (int i = 0; i < max_threads; ++i) open_pages(w->stacks + size_t(i) * (stack_bytes + page) + page, stack_bytes);
  const size_t shared_pages = (max_shared + page - 1) / page * page;
  w->shared_region = map(guard_bytes * 2 + shared_pages, PROT_NONE) + guard_bytes;
  open_pages(w->shared_region, shared_pages);
  stack_t alternate = {};
  alternate.ss_size = 64 << 10;
  alternate.ss_sp = map(alternate.ss_size, PROT_READ | PROT_WRITE);
  sigaltstack(&alternate, nullptr);
  uint64_t seen = 0;
  std::unique_lock<std::mutex> hold(pool.lock);
  for (;;) {
    pool.start.wait(hold, [&] { return pool.turn != seen; });
    seen = pool.turn;
    launch *job = pool.job;
    if (!job || w->number >= pool.wanted) continue;
    w->job = job;
    ++pool.busy;
    hold.unlock();
    w->tls = nullptr;
    if (job->tls_module) {
      tls_index at = {job->tls_module, 0};
      w->tls = static_cast<unsigned char *>(__tls_get_addr(&at));
      if (w->poisoned.insert(job->tls_module).second) memset(w->tls, poison, job->tls_bytes);
    }
    while (!__atomic_load_n(&job->failed, __ATOMIC_ACQUIRE)) {
      const uint64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
      if (i >= job->blocks) break;
      run_block(w, config.order == forward ? i : config.order == reverse ? job->blocks - 1 - i : job->shuffled[i]);
    }
    poison_variables(w); /* other kernels of the object find them so */
    hold.lock();
    if (--pool.busy == 0) pool.done.notify_all();
  }
}

/* ---- launch record and errors ---- */
struct run_record {
  std::string module, symbol;
  uintptr_t offset;
  uint64_t blocks, threads;
};
std::vector<run_record> records;
std::string records_text;
std::unordered_map<const void *, int> dynamic_limits;
struct static_memory {
  size_t bytes; /* in whole 16, as dynamic memory behind it needs */
  std::vector<shared_variable> variables;
};
std::unordered_map<std::string, static_memory> static_shared; /* of each kernel; its key is what place() makes */
cudaError_t last_error = cudaSuccess;

std::string kernel_name(const void *kernel, const char *text) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname || info.dli_saddr != kernel) return text;
  int status = 0;
  char *plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = plain ? plain : info.dli_sname;
  free(plain);
  return name;
}

/* Where a kernel lies, whatever address its object was loaded at. */
std::string place(const char *module, uintptr_t offset) { return format("%zu ", size_t(offset)) + module; }

struct tls_query {
  uintptr_t address;
  size_t module, bytes;
};

int find_tls(dl_phdr_info *info, size_t, void *data) {
  tls_query *q = static_cast<tls_query *>(data);
  bool inside = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) &h = info->dlpi_phdr[i];
    if (h.p_type == PT_LOAD && q->address - (info->dlpi_addr + h.p_vaddr) < h.p_memsz) inside = true;
    if (h.p_type == PT_TLS) bytes = h.p_memsz;
  }
  if (inside && bytes) {
    q->module = info->dlpi_tls_modid;
    q->bytes = bytes;
  }
  return inside;
}

void refuse(const std::string &name, const std::string &why, cudaError_t code) {
  std::lock_guard<std::mutex> hold(report_lock);
  if (report.empty()) report = "kernel " + name + ": " + why;
  last_error = code;
}

size_t shared_limit(int arch) {
  return arch < 800 ? 65536 : arch == 800 || arch == 870 ? 166912 : arch < 900 ? 101376 : arch < 1200 ? 232448 : 101376;
}

/* Undefined behaviour that g++'s instrumentation meets; every handler's data begins with the place in the source. */
struct source_place {
  const char *file;
  uint32_t line, column;
};

void undefined(const void *data, const std::string &what) {
  const source_place *at = static_cast<const source_place *>(data);
  const char *slash = strrchr(at->file, '/');
  const std::string text = what + format(" (%s:%u)", slash ? slash + 1 : at->file, at->line);
  worker *w = self_worker;
  if (w && w->current) fail_fiber(w->current, text);
  std::lock_guard<std::mutex> hold(report_lock);
  if (report.empty()) report = "host code: " + text;
}

}  // namespace

extern "C" {

camox_emulator_thread *camox_emulator_self(void) { return &self_worker->current->self; }

void camox_emulator_fail(const char *f, ...) {
  va_list args;
  va_start(args, f);
  const std::string text = format_va(f, args);
  va_end(args);
  fail_fiber(self_worker->current, text);
}

void camox_emulator_fail_lane(int lane, const char *f, ...) {
  va_list args;
  va_start(args, f);
  const std::string text = format_va(f, args);
  va_end(args);
  worker *w = self_worker;
  fail_fiber(&w->fibers[index_of(w, w->current) / warp_size * warp_size + lane], text);
}

static bool left_out(const camox_emulator_site *site) {
  if (site->line != config.without_line) return false;
  const char *slash = strrchr(site->file, '/');
  return config.without_file == (slash ? slash + 1 : site->file);
}

/* One place in the source is a site for each template that it is compiled in. */
static bool same_place(const camox_emulator_site *a, const camox_emulator_site *b) {
  return a == b || (a->line == b->line && !strcmp(a->what, b->what) && !strcmp(a->file, b->file));
}

int camox_emulator_barrier(int predicate, int operation, const camox_emulator_site *site) {
  if (left_out(site)) return 0;
  worker *w = self_worker;
  fiber *f = w->current;
  f->waits = wait::barrier;
  f->site = site;
  w->predicate_count += predicate;
  if (++w->at_barrier == w->threads) {
    for (int i = 0; i < w->threads; ++i) {
      const fiber *g = &w->fibers[i];
      if (!same_place(g->site, site))
        fail_fiber(f, whereabouts(f) + ", but thread " +
                          format("(%u,%u,%u) ", g->self.thread_idx.x, g->self.thread_idx.y, g->self.thread_idx.z) +
                          whereabouts(g));
    }
    const int count = w->predicate_count;
    const int result = operation == CAMOX_EMULATOR_COUNT ? count
                       : operation == CAMOX_EMULATOR_AND ? count == w->threads
                                                         : count > 0;
    w->at_barrier = w->predicate_count = 0;
    for (int i = 0; i < w->threads; ++i) {
      w->fibers[i].result = result;
      make_ready(w, i);
    }
  }
  switch_fiber(w);
  return f->result;
}

void camox_emulator_warp(unsigned mask, void *payload, camox_emulator_collective *run, const camox_emulator_site *site) {
  if (left_out(site)) return;
  worker *w = self_worker;
  fiber *f = w->current;
  const int index = index_of(w, f), lane = index % warp_size, first = index - lane;
  const unsigned existing = w->threads - first >= warp_size ? ~0u : (1u << (w->threads - first)) - 1;
  if (!(mask >> lane & 1))
    fail_fiber(f, format("%s: lane %d is not in its own mask 0x%08x (line %d)", site->what, lane, mask, site->line));
  f->waits = wait::warp;
  f->site = site;
  f->mask = mask;
  std::vector<rendezvous> &pending = w->warps[index / warp_size];
  size_t i = 0;
  while (i < pending.size() && pending[i].mask != mask) ++i;
  if (i == pending.size()) {
    pending.emplace_back();
    pending[i].mask = mask;
    pending[i].arrived = 0;
    pending[i].site = site;
    pending[i].differs = false;
  }
  rendezvous &here = pending[i];
  here.arrived |= 1u << lane;
  here.lanes.payload[lane] = payload;
  if (site != here.site && !same_place(site, here.site)) here.differs = true;
  if (here.arrived == (mask & existing)) {
    here.lanes.mask = mask & existing;
    for (int l = 0; here.differs && l < warp_size; ++l) {
      const fiber *g = &w->fibers[first + l];
      if ((here.lanes.mask >> l & 1) && !same_place(g->site, site))
        fail_fiber(f, whereabouts(f) + format(", but lane %d ", l) + whereabouts(g));
    }
    run(&here.lanes);
    make_warp_ready(w, first, here.lanes.mask);
    pending.erase(pending.begin() + long(i));
  }
  switch_fiber(w);
}

void *camox_emulator_dynamic_shared(void) { return self_worker->shared; }

int camox_emulator_is_shared(const void *p) {
  const worker *w = self_worker;
  const unsigned char *q = static_cast<const unsigned char *>(p);
  return (q >= w->shared && q < w->shared + w->job->shared_bytes) || (w->tls && q >= w->tls && q < w->tls + w->job->tls_bytes);
}

void camox_emulator_cp_async(void *shared, const void *global, int bytes, int valid_bytes, const camox_emulator_site *site) {
  fiber *f = self_worker->current;
  if (!camox_emulator_is_shared(shared))
    camox_emulator_fail("cp.async (line %d): the destination is not shared memory", site->line);
  if (reinterpret_cast<uintptr_t>(shared) % unsigned(bytes) ||
      (valid_bytes && reinterpret_cast<uintptr_t>(global) % unsigned(bytes)))
    camox_emulator_fail("cp.async (line %d): addresses must be multiples of %d bytes", site->line, bytes);
  pending_copy copy = {shared, {}, bytes, f->group, site};
  memcpy(copy.bytes, global, size_t(valid_bytes)); /* faults here, where the copy stands in the source */
  memset(shared, poison, size_t(bytes));           /* until its wait the destination holds nothing */
  f->copies.push_back(copy);
}

void camox_emulator_cp_async_commit(void) { ++self_worker->current->group; }

void camox_emulator_cp_async_wait(int pending_groups) {
  fiber *f = self_worker->current;
  size_t kept = 0;
  for (const pending_copy &copy : f->copies) {
    if (pending_groups < 0 || copy.group < f->group - pending_groups)
      memcpy(copy.to, copy.bytes, size_t(copy.count));
    else
      f->copies[kept++] = copy;
  }
  f->copies.resize(kept);
}

void camox_emulator_pause(void) {
  worker *w = self_worker;
  make_ready(w, index_of(w, w->current));
  switch_fiber(w);
}

int64_t camox_emulator_grid_cap(void) { return config.grid_cap; }

void camox_emulator_configure(int order, uint64_t seed, int threads, double timeout_s, int64_t grid_cap) {
  config.order = order;
  config.seed = seed;
  config.threads = threads;
  config.timeout_s = timeout_s;
  config.grid_cap = grid_cap;
}

void camox_emulator_capture(int capturing) { config.capturing = capturing != 0; }

/* Leaves out the barrier in this line of a file, named without its folder; line 0: none. */
void camox_emulator_without_barrier(const char *file, int line) {
  config.without_file = file;
  config.without_line = line;
}

/* The first error since the last call, "" when there is none. */
const char *camox_emulator_take_error(void) {
  static std::string taken;
  std::lock_guard<std::mutex> hold(report_lock);
  taken = report;
  report.clear();
  last_error = cudaSuccess;
  return taken.c_str();
}

/* One line per launch since the last call: object, offset of the kernel in it, blocks, threads a block, name. */
const char *camox_emulator_take_runs(void) {
  records_text.clear();
  for (const run_record &r : records)
    records_text += r.module + '\t' +
                    format("%zu\t%llu\t%llu\t", size_t(r.offset), static_cast<unsigned long long>(r.blocks),
                           static_cast<unsigned long long>(r.threads)) +
                    r.symbol + '\n';
  records.clear();
  return records_text.c_str();
}

/* The __shared__ variables of the kernel at this offset in an object, and their bytes in all; without them it is not launched. */
void camox_emulator_static_shared(const char *module, size_t offset, size_t bytes, const size_t *variables, size_t count) {
  static_memory &memory = static_shared[place(module, offset)];
  memory = {bytes, {}};
  for (size_t i = 0; i < count; ++i) memory.variables.push_back({variables[2 * i], variables[2 * i + 1]});
}

void camox_emulator_launch(const camox_emulator_launch_info *info, dim3 grid, dim3 block, size_t shared_bytes) {
  const std::string name = kernel_name(info->kernel, info->text);
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > max_threads || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535)
    return refuse(
        name, format("invalid launch: grid (%u,%u,%u), block (%u,%u,%u)", grid.x, grid.y, grid.z, block.x, block.y, block.z),
        cudaErrorInvalidConfiguration);
  Dl_info object = {};
  dladdr(info->kernel, &object);
  const char *const module = object.dli_fname ? object.dli_fname : "";
  const uintptr_t offset = reinterpret_cast<uintptr_t>(info->kernel) - reinterpret_cast<uintptr_t>(object.dli_fbase);
  const auto known = static_shared.find(place(module, offset));
  if (known == static_shared.end())
    return refuse(name, "its static shared memory is not known (camox_emulator_static_shared)", cudaErrorInvalidValue);
  const auto limit = dynamic_limits.find(info->kernel);
  const size_t total = shared_bytes + known->second.bytes;
  const bool too_much = limit == dynamic_limits.end() ? total > 49152 : shared_bytes > size_t(limit->second);
  if (too_much || total > shared_limit(info->arch))
    return refuse(name,
                  format("%zu bytes of dynamic and %zu of static shared memory; 49152 together need no cudaFuncSetAttribute, "
                         "sm_%d has %zu",
                         shared_bytes, known->second.bytes, info->arch / 10, shared_limit(info->arch)),
                  cudaErrorInvalidValue);
  if (info->parameter_bytes > 4096) return refuse(name, "more than 4096 bytes of parameters", cudaErrorInvalidValue);

  tls_query q = {reinterpret_cast<uintptr_t>(info->kernel), 0, 0};
  dl_iterate_phdr(find_tls, &q);
  launch job = {};
  job.info = *info;
  job.name = name;
  job.grid = grid;
  job.block = block;
  job.shared_bytes = shared_bytes;
  job.tls_module = q.module;
  job.tls_bytes = q.bytes;
  job.variables = &known->second.variables;
  job.blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (config.order == random_order) {
    uint64_t state = config.seed;
    job.shuffled.resize(job.blocks);
    for (uint64_t i = 0; i < job.blocks; ++i) job.shuffled[i] = i;
    for (uint64_t i = job.blocks; i > 1; --i) std::swap(job.shuffled[i - 1], job.shuffled[next_random(&state) % i]);
  }
  records.push_back({module, name, offset, job.blocks, threads});

  take_signals();
  std::unique_lock<std::mutex> hold(pool.lock);
  const int threads_wanted = config.threads > 0 ? config.threads : int(std::thread::hardware_concurrency());
  pool.wanted = threads_wanted < 1 ? 1 : threads_wanted > 8 ? 8 : threads_wanted;
  if (uint64_t(pool.wanted) > job.blocks) pool.wanted = int(job.blocks);
  while (int(pool.workers.size()) < pool.wanted) {
    worker *w = new worker();
    w->number = int(pool.workers.size());
    pool.workers.push_back(w);
    std::thread thread(work, w);
    w->thread = thread.native_handle();
    thread.detach();
  }
  pool.job = &job;
  ++pool.turn;
  pool.start.notify_all();
  const auto finished = [&] { return pool.busy == 0 && (job.next >= job.blocks || job.failed); };
  while (!pool.done.wait_for(hold, std::chrono::duration<double>(config.timeout_s), finished))
    for (worker *w : pool.workers) pthread_kill(w->thread, SIGUSR2);
  pool.job = nullptr;
  hold.unlock();
  give_signals_back();
  if (job.failed) last_error = cudaErrorLaunchFailure;
}

/* ---- guarded buffers ---- */
void *camox_emulator_alloc(size_t bytes, int flush_at_start, const char *name) {
  const size_t inner = (bytes + page - 1) / page * page + (bytes ? 0 : page);
  allocation a = {};
  a.region_bytes = inner + 2 * guard_bytes;
  a.region = map(a.region_bytes, PROT_NONE);
  a.first_page = a.region + guard_bytes;
  a.end_page = a.first_page + inner;
  open_pages(a.first_page, inner);
  memset(a.first_page, poison, inner);
  a.bytes = bytes;
  a.data = flush_at_start && bytes ? a.first_page : a.end_page - bytes;
  snprintf(a.name, sizeof a.name, "%s", name);
  allocations.push_back(a);
  return a.data;
}

/* What the guard pages cannot see: bytes written beside a buffer in its own pages. "" when there are none. */
const char *camox_emulator_check_slack(void) {
  static std::string text;
  text.clear();
  for (const allocation &a : allocations)
    for (const unsigned char *p = a.first_page; p < a.end_page && text.empty(); ++p) {
      if (p == a.data) p += a.bytes;
      const unsigned char *const end = p < a.data ? a.data : a.end_page;
      while (end - p >= 8 && !memcmp(p, "\xff\xff\xff\xff\xff\xff\xff\xff", 8)) p += 8; /* g++'s: one comparison */
      if (p == a.data) p += a.bytes;
      if (p < a.end_page && *p != poison)
        text = format("written beside buffer '%s': byte %zd of %zu", a.name, p - a.data, a.bytes);
    }
  return text.c_str();
}

void camox_emulator_free(void *data) {
  for (size_t i = 0; i < allocations.size(); ++i) {
    if (allocations[i].data != data) continue;
    munmap(allocations[i].region, allocations[i].region_bytes);
    allocations.erase(allocations.begin() + long(i));
    return;
  }
}

/* ---- the part of the CUDA runtime that launchers call ---- */
cudaError_t CUDARTAPI cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return last_error; }
const char *CUDARTAPI cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the CUDA emulator";
}
cudaError_t CUDARTAPI cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *status) {
  *status = config.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t) {
  memset(p, byte, bytes);
  return cudaSuccess;
}
cudaError_t camox_emulator_device_attribute(int *value, enum cudaDeviceAttr attribute, int arch) {
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = 2;
  else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin)
    *value = int(shared_limit(arch));
  else
    return cudaErrorInvalidValue;
  return cudaSuccess;
}
/* As many as give small tensors a block each, fewer where a test lowers the grid. */
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
  *blocks = int(std::min<int64_t>(config.grid_cap, 64));
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) dynamic_limits[kernel] = value;
  return cudaSuccess;
}

/* ---- g++ -fsanitize=bounds,alignment,... without libubsan: reports name the kernel and the thread ---- */
void __ubsan_handle_out_of_bounds(void *data, uintptr_t index) {
  undefined(data, format("index %zd is out of its array's bounds", ssize_t(index)));
}
void __ubsan_handle_type_mismatch_v1(void *data, uintptr_t p) {
  undefined(data, format("misaligned or null access at %p", reinterpret_cast<void *>(p)));
}
void __ubsan_handle_add_overflow(void *data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in +"); }
void __ubsan_handle_sub_overflow(void *data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in -"); }
void __ubsan_handle_mul_overflow(void *data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in *"); }
void __ubsan_handle_negate_overflow(void *data, uintptr_t) { undefined(data, "signed overflow in unary -"); }
void __ubsan_handle_divrem_overflow(void *data, uintptr_t, uintptr_t) {
  undefined(data, "integer division by zero or overflow");
}
void __ubsan_handle_shift_out_of_bounds(void *data, uintptr_t, uintptr_t) {
  undefined(data, "shift by more than the type has");
}

}  // extern "C"

/* ---- warp operations whose loops pay to be optimized, as kernels are not ---- */
void camox_emulator_shuffle_run(camox_emulator_lanes *lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes->mask >> lane & 1)) continue;
    camox_emulator_shuffle_payload *p = static_cast<camox_emulator_shuffle_payload *>(lanes->payload[lane]);
    if (!(lanes->mask >> p->source & 1))
      camox_emulator_fail_lane(lane, "shuffle reads lane %d, which takes no part in it", p->source);
    p->out = static_cast<camox_emulator_shuffle_payload *>(lanes->payload[p->source])->in;
  }
}

template <bool TRANSPOSED>
void camox_emulator_ldmatrix_run(camox_emulator_lanes *lanes) {
  if (lanes->mask != ~0u) camox_emulator_fail("ldmatrix needs all 32 lanes of the warp");
  uint16_t matrices[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const void *row = static_cast<camox_emulator_ldmatrix_payload *>(lanes->payload[lane])->row;
    if (!camox_emulator_is_shared(row)) camox_emulator_fail_lane(lane, "ldmatrix reads what is not shared memory");
    if (reinterpret_cast<uintptr_t>(row) % 16)
      camox_emulator_fail_lane(lane, "ldmatrix: a row must begin at a multiple of 16 bytes");
    memcpy(matrices[lane / 8][lane % 8], row, 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t *to = static_cast<camox_emulator_ldmatrix_payload *>(lanes->payload[lane])->to;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const auto &m = matrices[i];
      to[i] = TRANSPOSED ? m[t][g] | uint32_t(m[t + 1][g]) << 16 : m[g][t] | uint32_t(m[g][t + 1]) << 16;
    }
  }
}

template <typename T>
static float camox_emulator_half_of(uint32_t word, int i) {
  const uint16_t bits = static_cast<uint16_t>(word >> (16 * i));
  T value;
  memcpy(static_cast<void *>(&value), &bits, 2);
  return static_cast<float>(value);
}

/* d += a b of fragments whose elements `take` puts into the matrices. Columns are the inner loop, whose vectors g++ makes. */
template <typename T, int K, typename Take>
static void camox_emulator_mma_of(camox_emulator_lanes *lanes, const Take &take) {
  if (lanes->mask != ~0u) camox_emulator_fail("mma needs all 32 lanes of the warp");
  double a[16][K], b[K][8], sums[16][8];
  float *d[32];
  for (int lane = 0; lane < 32; ++lane) {
    const auto &payload = *static_cast<camox_emulator_mma_payload<T> *>(lanes->payload[lane]);
    take(payload, lane / 4, lane % 4, a, b);
    d[lane] = payload.d;
    for (int i = 0; i < 4; ++i) sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2] = payload.d[i];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k)
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) d[lane][i] = static_cast<float>(sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2]);
}

template <typename T, int K>
void camox_emulator_mma_run(camox_emulator_lanes *lanes) {
  camox_emulator_mma_of<T, K>(lanes,
                              [](const camox_emulator_mma_payload<T> &p, int g, int t, double (&a)[16][K], double (&b)[K][8]) {
                                for (int i = 0; i < 2; ++i)
                                  for (int half = 0; half < K / 8; ++half) {
                                    a[g][2 * t + i + 8 * half] = camox_emulator_half_of<T>(p.a[2 * half], i);
                                    a[g + 8][2 * t + i + 8 * half] = camox_emulator_half_of<T>(p.a[2 * half + 1], i);
                                    b[2 * t + i + 8 * half][g] = camox_emulator_half_of<T>(p.b[half], i);
                                  }
                              });
}

/* Bits below the mantissa of TF32 are not seen. */
static float camox_emulator_tf32_of(uint32_t bits) {
  bits &= 0xffffe000u;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void camox_emulator_mma_run_tf32(camox_emulator_lanes *lanes) {
  camox_emulator_mma_of<float, 8>(
      lanes, [](const camox_emulator_mma_payload<float> &p, int g, int t, double (&a)[16][8], double (&b)[8][8]) {
        for (int half = 0; half < 2; ++half) {
          a[g][t + 4 * half] = camox_emulator_tf32_of(p.a[2 * half]);
          a[g + 8][t + 4 * half] = camox_emulator_tf32_of(p.a[2 * half + 1]);
          b[t + 4 * half][g] = camox_emulator_tf32_of(p.b[half]);
        }
      });
}

template void camox_emulator_ldmatrix_run<false>(camox_emulator_lanes *);
template void camox_emulator_ldmatrix_run<true>(camox_emulator_lanes *);
template void camox_emulator_mma_run<__half, 8>(camox_emulator_lanes *);
template void camox_emulator_mma_run<__half, 16>(camox_emulator_lanes *);
template void camox_emulator_mma_run<__nv_bfloat16, 8>(camox_emulator_lanes *);
template void camox_emulator_mma_run<__nv_bfloat16, 16>(camox_emulator_lanes *);
