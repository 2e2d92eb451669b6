/* The last block of a launch: blocks count themselves once their results are in memory, and the block that counts last reads the
   results of all and finishes the call, in an order that does not depend on which block it is. A kernel of its own for that
   would begin a microsecond after this one has ended.

     block 0   results -> count 1 of 3
     block 2   results -> count 2 of 3
     block 1   results -> count 3 of 3 -> reads all results, finishes

   Counters are 0 between launches: the last count sets its counter back. Launches on one stream follow one another, so every
   stream keeps a row of counters of the device. A captured launch may be replayed beside any other: it counts in memory of its
   call, which is cleared before it; so does a launch on a stream for which no row is left, or that needs more than a row.

   CAMOX_COUNTERS: counters of a row; the source defines it before it includes this header. */
#ifndef CAMOX_LAST_BLOCK_CUH
#define CAMOX_LAST_BLOCK_CUH

#include <atomic>

#include "cuda_util.cuh"

#define CAMOX_COUNTER_ROWS 64

/* Zero when the library is loaded onto a device. */
static __device__ uint32_t camox_counter_rows[CAMOX_COUNTER_ROWS][CAMOX_COUNTERS];

/* Where the blocks of a launch count: in a row, or in `own` where row is -1. */
struct camox_counters {
  int row;
  uint32_t *own;
};

/* Adds 1 to a counter and returns what it was; `last` goes back to 0. What this thread wrote before can be read by whoever counts
   later, and this thread reads what those wrote who counted before. */
__device__ __forceinline__ uint32_t camox_count(uint32_t *counter, uint32_t last) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH == 0
  return atomicInc(counter, last);
#else
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
#endif
}

/* In every thread, whether this block is the last of `blocks` that count in counter `index`. Thread 0 wrote the block's results;
   those of all blocks can then be read past L1, by __ldcg. */
__device__ __forceinline__ bool camox_is_last_block(const camox_counters &counters, int index, int64_t blocks) {
  bool is_last = false;
  if (threadIdx.x == 0) {
    uint32_t *const counter = (counters.row < 0 ? counters.own : camox_counter_rows[counters.row]) + index;
    const uint32_t last = static_cast<uint32_t>(blocks - 1);
    is_last = camox_count(counter, last) == last;
  }
  return __syncthreads_or(is_last) != 0;
}

/* The row of a stream, by its number, which no later stream gets; -1: there is none left. */
static inline int camox_counter_row_of(unsigned long long stream) {
  static std::atomic<unsigned long long> streams[CAMOX_COUNTER_ROWS]; /* number + 1, or 0: free */
  for (int row = 0; row < CAMOX_COUNTER_ROWS; ++row) {
    unsigned long long known = 0;
    if (streams[row].compare_exchange_strong(known, stream + 1) || known == stream + 1) return row;
  }
  return -1;
}

/* For launches of one call on this stream, which count in the first `counters` of a row. own: as many numbers in memory of the
   call. A failure is reported by camox_launch_status. */
static inline camox_counters camox_counters_on(void *stream, uint32_t *own, int counters = CAMOX_COUNTERS) {
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  const bool plain = cudaStreamIsCapturing(on, &capture) == cudaSuccess && capture == cudaStreamCaptureStatusNone &&
                     cudaStreamGetId(on, &number) == cudaSuccess;
  const int row = plain && counters <= CAMOX_COUNTERS ? camox_counter_row_of(number) : -1;
  if (row < 0) (void)cudaMemsetAsync(own, 0, static_cast<size_t>(counters) * sizeof *own, on);
  return {row, own};
}

#endif
