/* Compiled once per instruction set; the body once per element type. */
#include <float.h>

#include "bands_plan.h"

/* The stencil engine's window (stencil.inc): 5x5 pixels, of as many images as the backward has gradients. */
#define CAMOX_STENCIL_REACH 2
#define CAMOX_STENCIL_SOURCES 4
#define CAMOX_STENCIL_PARTS 4
/* What is kept of a column of five pixels; the backward has no OFFSET. */
enum { PIXEL, THREE, FIVE, OFFSET };
/* What the backward's sums across rows are. */
enum { INNER, OUTER, DIRECT, BANDS_FILTERS };

#define CAMOX_BODY "../bands/bands_cpu.inc"
#include "../common/simd_foreach.h"
