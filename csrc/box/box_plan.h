/* How images are divided into work items, and what each needs of scratch: for the kernels and for whoever asks how many items
   there are. */
#ifndef CAMOX_BOX_PLAN_H
#define CAMOX_BOX_PLAN_H

#include "../common/integers.h"
#include "box.h"

/* Elements of the rows that are summed along together, so that they stay in L1. */
#define CAMOX_BOX_GROUP_ELEMENTS 1536
/* Elements of running sums, one line for each row of a window, that stay in L2 beside them. */
#define CAMOX_BOX_LINES_ELEMENTS 65536
/* Fewer images than this are divided into bands of rows. */
#define CAMOX_BOX_LEAST_UNITS 16
#define CAMOX_BOX_LEAST_BAND 32 /* rows */
/* Lines of scratch are whole vectors of any instruction set; a loop may read one vector past the end of an array. */
#define CAMOX_BOX_VECTOR 16
#define CAMOX_BOX_CACHE_LINE 64 /* bytes */
/* A load waits for a store whose address has the same low 12 bits, so the two arrays of sums along rows lie half a page of
   floats apart, beyond whole pages: 1.2 times the speed at windows of 31. */
#define CAMOX_BOX_PAGE 1024

/* A line is what a work item holds of a row of the image: its pixels, each of `step` adjacent channels (1 where rows of single
   channels are adjacent). A window that reaches beyond the image on both sides of every pixel sums what a smaller one sums, so
   radius < side. Rows are counted from -radius on, where the window of row 0 begins, in blocks of `window` rows. */
typedef struct {
  int64_t window_height, window_width, radius_y, radius_x;
  int64_t step, chunks;  /* channels per work item; work items over all channels */
  int64_t line, padded;  /* elements of a line, and with the radius_x pixels of zeros between it and the next */
  int64_t line_stride;   /* elements of a line of scratch */
  int64_t group, summed; /* rows that are summed along together; elements of them with what loops read past the end */
  int64_t bands, band_blocks;
  int64_t items;
} camox_box_plan;

static inline camox_box_plan camox_box_plan_of(const camox_box_params *p) {
  camox_box_plan plan = {0};
  if (p->batch == 0 || p->channels == 0 || p->height == 0 || p->width == 0) return plan;
  plan.radius_y = camox_box_clipped(p->window_height, p->height), plan.window_height = 2 * plan.radius_y + 1;
  plan.radius_x = camox_box_clipped(p->window_width, p->width), plan.window_width = 2 * plan.radius_x + 1;
  plan.step = 1;
  if (p->channels_last) {
    const int64_t fitting = CAMOX_BOX_LINES_ELEMENTS / (plan.window_height * p->width) / CAMOX_BOX_VECTOR * CAMOX_BOX_VECTOR;
    plan.step = camox_min_i64(p->channels, camox_max_i64(fitting, CAMOX_BOX_VECTOR));
  }
  plan.chunks = camox_ceil_div(p->channels, plan.step);
  plan.line = p->width * plan.step, plan.padded = (p->width + plan.radius_x) * plan.step;
  plan.line_stride = camox_round_up(plan.line, CAMOX_BOX_VECTOR);

  const int64_t blocks = camox_ceil_div(p->height, plan.window_height), images = p->batch * plan.chunks;
  const int64_t wanted = images < CAMOX_BOX_LEAST_UNITS ? camox_ceil_div(CAMOX_BOX_LEAST_UNITS, images) : 1;
  const int64_t least_rows = camox_max_i64(4 * plan.window_height, CAMOX_BOX_LEAST_BAND);
  const int64_t least_blocks = camox_ceil_div(least_rows, plan.window_height);
  plan.band_blocks = camox_max_i64(camox_ceil_div(blocks, wanted), camox_min_i64(least_blocks, blocks));
  plan.bands = camox_ceil_div(blocks, plan.band_blocks);
  plan.items = images * plan.bands;

  plan.group = camox_max_i64(1, CAMOX_BOX_GROUP_ELEMENTS / plan.padded);
  plan.group = camox_min_i64(plan.group, p->height);
  /* The largest shift along a row is less than the window. */
  const int64_t shift = (plan.radius_x + plan.window_width) * plan.step;
  /* In registers a vector of zeros lies between rows, and sums come out up to CAMOX_BOX_VECTOR / 4 vectors later. */
  const int64_t widest = camox_max_i64(plan.padded, plan.line_stride + CAMOX_BOX_VECTOR);
  const int64_t behind = camox_max_i64(shift + CAMOX_BOX_VECTOR, 4 * CAMOX_BOX_VECTOR);
  plan.summed = camox_round_up(plan.group * widest + behind, CAMOX_BOX_PAGE) + CAMOX_BOX_PAGE / 2;
  return plan;
}

/* Lines beside the window's: the running sum, zeros, divisors, a line of x and one of results. */
#define CAMOX_BOX_OTHER_LINES 5

static inline int64_t camox_box_scratch_elements(const camox_box_plan *plan) {
  return 2 * plan->summed + (plan->window_height + CAMOX_BOX_OTHER_LINES) * plan->line_stride;
}

#endif
