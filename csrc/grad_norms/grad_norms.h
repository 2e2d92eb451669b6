/* grad_norms: norms of many gradient tensors by group, and their multiplication by a factor of their group.

   gradients g_0 ... g_{n-1} of any shapes and of any of the dtypes, group(i) in [0, groups):
     norm_i  = sqrt(sum(g_i^2))
     norms[k] = sum of norm_i over the i with group(i) = k               SUM_OF_NORMS
              = sqrt(sum of norm_i^2 over these i)                       L2, the norm of all their elements
     scale     g_i = g_i * product of scales[group] over all that g_i is listed with, in place
   dtypes    float32, bfloat16, float16, also mixed: squares are added in float32 over 8 elements on the CPU, over 16 or 32 on
   CUDA, and in float64 beyond. float64 on the CPU. Norms are float32, float64 where a gradient is.
   backward  none.
   errors    CAMOX_INVALID_ARGUMENT: unknown dtype or reduction, a group outside [0, groups), a negative size.
   source    the formula. */
#ifndef CAMOX_GRAD_NORMS_H
#define CAMOX_GRAD_NORMS_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_GROUP_SUM_OF_NORMS = 0, CAMOX_GROUP_L2 = 1 } camox_group_reduce;

/* A gradient as a run of memory, whatever its shape. */
typedef struct {
  void *data;
  int64_t elements;
  double repeats; /* how many elements of the gradient lie at one address: those of an expanded dimension */
  double factor;  /* what scale multiplies it by; CPU */
  int64_t group;  /* norms */
  camox_dtype dtype;
} camox_grad;

/* At most CAMOX_GRAD_PIECE neighbouring elements of a gradient. */
typedef struct {
  int64_t begin, elements;
  int64_t grad;
} camox_grad_piece;

/* scale: a gradient, by its number in the list, and one of its groups. */
typedef struct {
  int32_t grad, group;
} camox_grad_listing;

typedef struct {
  camox_group_reduce reduce;
  int64_t count, groups;
  const camox_grad *grads;           /* [count]; CUDA, norms: in the order of their groups */
  int64_t pieces;                    /* CPU: camox_grad_norms_pieces */
  int64_t items;                     /* CPU: work items, camox_grad_norms_plan */
  const camox_grad_piece *piece;     /* CPU: [pieces], gradient by gradient */
  const int64_t *item;               /* CPU: [items + 1], the first piece of each work item and the end of the last */
  double *partial;                   /* CPU: [pieces], sums of squares */
  double *squares;                   /* CPU: [count], the sum of squares of each run */
  camox_dtype norms_dtype;           /* CAMOX_F32, or on the CPU CAMOX_F64 */
  void *norms;                       /* [groups] */
  void *table;                       /* CUDA: camox_grad_norms_table_bytes, on the device */
  const float *scales;               /* CUDA, scale: [groups] */
  int64_t listings;                  /* CUDA, scale */
  const camox_grad_listing *listing; /* CUDA, scale: [listings] in the order of the gradients; on the host, as grads are */
} camox_grad_norms_params;

/* Validates all arguments; nothing has been written when it fails. */
int camox_grad_norms_check(const camox_grad_norms_params *p, const char *op);

/* How many pieces the gradients have, and at most how many work items. */
int64_t camox_grad_norms_pieces(const camox_grad_norms_params *p);

/* Cuts the gradients into pieces and bundles them as work items of about equal cost, by sizes alone, so that any number of
   threads gives the same bits. piece, item: room for camox_grad_norms_pieces and one more. Returns the number of items. */
int64_t camox_grad_norms_plan(const camox_grad_norms_params *p, camox_grad_piece *piece, int64_t *item);

/* The sum of the squares of n elements; asks for the memory that many bytes beyond what it reads. */
typedef double camox_grad_norms_squares_kernel(const void *data, int64_t n, int64_t prefetch_offset);
camox_grad_norms_squares_kernel *camox_grad_norms_squares(camox_dtype dtype, camox_isa isa);

/* n elements, each multiplied by factor, in place. */
typedef void camox_grad_norms_scale_kernel(void *data, int64_t n, double factor);
camox_grad_norms_scale_kernel *camox_grad_norms_scale(camox_dtype dtype, camox_isa isa);

/* The sum of squares of a run: piece by piece, as the three functions below compute it. */
double camox_grad_norms_of_run(const camox_grad *grad);

/* The sums of squares of the pieces of work items begin ... end-1. */
void camox_grad_norms_sums(const camox_grad_norms_params *p, int64_t begin, int64_t end);

/* After them the sum of each run, in a fixed order. */
void camox_grad_norms_gather(const camox_grad_norms_params *p);

/* The norms from the sums of all runs, in a fixed order. sum: scratch, [groups]. */
void camox_grad_norms_finish(const camox_grad_norms_params *p, double *sum);

/* Multiplies the pieces of work items begin ... end-1 by the factor of their gradient. */
void camox_scale_grads(const camox_grad_norms_params *p, int64_t begin, int64_t end);

/* Bytes of device memory for p->table. */
size_t camox_grad_norms_table_bytes(void);

/* Host wrappers of the CUDA kernels: 0 or a cudaError_t. They have read grads and listing when they return. */
int camox_grad_norms_cuda(const camox_grad_norms_params *p, void *stream);
int camox_scale_grads_cuda(const camox_grad_norms_params *p, void *stream);

#ifdef __cplusplus
}
#endif
#endif
