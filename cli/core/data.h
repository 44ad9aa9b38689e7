/* data.h - tensors of the benchmarks, random and synthetic contents, and the cost of a mask.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_DATA_H
#define ESA_CLI_DATA_H

#include "core/cli.h"

/* ---------------------------------------------------------------- numbers (data.c) */

/* splitmix64: the same numbers on every machine */
typedef struct data_rng {
    uint64_t state;
} data_rng;
uint64_t data_next(data_rng *rng);
double data_unit(data_rng *rng);   /* [0, 1) */
double data_normal(data_rng *rng); /* mean 0, variance 1; a sum of eight uniforms, |x| < 5 */

/* ---------------------------------------------------------------- owning tensors (data.c) */

/* A contiguous B,H,N,D view of 64-byte aligned memory; data is NULL after a message when out of
 * memory. */
esa_tensor data_tensor_new(int32_t dtype, int64_t B, int64_t H, int64_t N, int64_t D);
void data_tensor_free(esa_tensor *tensor);
/* A copy of a contiguous tensor on ctx's GPU; data is NULL after a message. */
esa_tensor data_tensor_to_gpu(esa_ctx *ctx, const esa_tensor *tensor);
void data_tensor_free_gpu(esa_ctx *ctx, esa_tensor *tensor);
int64_t data_tensor_count(const esa_tensor *tensor);
/* Fills t with normal numbers times gain. */
void data_tensor_random(esa_tensor *tensor, uint64_t seed, double gain);
/* Converts f32 to the dtype of out, rounding to nearest even; same shape. */
void data_tensor_convert(esa_tensor *out, const esa_tensor *in);

/* ---------------------------------------------------------------- synthetic video-like heads
 * (synth.c) */

enum { SYNTH_LOCAL = 0, SYNTH_TEMPORAL = 1, SYNTH_SINK = 2, SYNTH_DIFFUSE = 3, SYNTH_KINDS = 4 };
#define SYNTH_NAMES "local|temporal|sink|diffuse"
/* Fills heads h = 0 .. H-1 of f32 tensors [1,H,t*h*w,D] with kind h % SYNTH_KINDS; D even, at
 * least 16. */
void synth_fill(esa_tensor *q, esa_tensor *k, esa_tensor *v, const int32_t grid[3], uint64_t seed);

/* q, k, v of such heads, and room for an output and for the dense reference. */
typedef struct synth_case {
    esa_ctx *ctx;
    esa_tensor q, k, v, o, ref;
    int32_t grid[3];
    uint64_t seed;
} synth_case;
/* grid has three entries. CLI_OK; CLI_USAGE or CLI_FAILED after a message that begins with what.
 * Call synth_close in any case. */
int synth_open(synth_case *c, const cli_list *grid, int64_t heads, int64_t dim, int64_t seed,
               int64_t threads, const char *what);
void synth_close(synth_case *c);

/* ---------------------------------------------------------------- measures (measure.c) */

/* Counts the query-key pairs that a mask keeps (NULL: all) over all heads and batch entries.
 * head[H] (may be NULL) receives the pairs of each head of batch entry 0. -1 when out of memory. */
int64_t measure_pairs(const esa_mask *mask, const esa_tensor *q, const esa_tensor *k, int causal,
                      int64_t *head);
/* The relative error |o - ref| / |ref| (Euclidean norm) of one head of batch entry 0. Both tensors
 * are f32 and contiguous. */
double measure_error(const esa_tensor *o, const esa_tensor *ref, int64_t head);

/* The median of n numbers, NaN if n is 0; sorts them, so that the least comes first. */
double measure_median(double *values, int64_t n);
/* The mean of n numbers, NaN if n is 0. */
double measure_mean(const double *values, int64_t n);

#endif
