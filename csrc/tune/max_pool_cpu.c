/* Compiled once per instruction set; the body once per element type. */
#include "../common/integers.h"
#include "max_pool.h"

#ifdef CAMOX_BREAK_TUNE
#define FACTOR 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define FACTOR 1
#endif

#define CAMOX_WITHOUT_F64
#define CAMOX_BODY "../tune/max_pool_cpu.inc"
#include "../common/simd_foreach.h"
