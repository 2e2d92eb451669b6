/* libstdc++'s shared_ptr asks __libc_single_threaded, new in glibc 2.32, whether it may leave atomics out. Our own copy, seen
   by this binary alone, says that there may be threads, and the binary loads wherever torch's own wheels do (glibc 2.28). */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
