/* gpu_fenced.h - memory on the GPU with fences around it, for tests of kernels that get pointers.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_GPU_FENCED_H
#define ESA_TESTS_CUDA_GPU_FENCED_H

#include <stdlib.h>
#include <string.h>
#include "backend/backend.h"
#include "base/half.h"
#include "base/rng.h"
#include "gpu_kit.h"

enum { FENCE = 256 }; /* bytes before and after */

typedef struct fenced {
    void *data;    /* on the GPU; this is what kernels get */
    void *block;   /* on the GPU */
    uint8_t *host; /* [bytes]: the contents as uploaded */
    int64_t bytes; /* of the contents */
    int64_t start; /* of the contents in the block */
} fenced;

/* shift: bytes by which data is off the alignment of its block, less than FENCE. */
static inline fenced fenced_new(esa_ctx *ctx, const esa_backend *be, const void *contents,
                                int64_t bytes, int64_t shift)
{
    fenced g = { .bytes = bytes, .start = FENCE + shift };
    const int64_t all = bytes + 2 * FENCE + shift;
    uint8_t *block = malloc((size_t)all);
    memset(block, 0x5a, (size_t)all);
    memcpy(block + g.start, contents, (size_t)bytes);
    g.host = malloc((size_t)bytes + 1);
    memcpy(g.host, contents, (size_t)bytes);
    must(ctx, be->alloc(ctx, &g.block, all));
    must(ctx, be->upload(ctx, g.block, block, all));
    g.data = (char *)g.block + g.start;
    free(block);
    return g;
}

/* The contents now, to be freed; fails if a fence changed. */
static inline void *fenced_read(esa_ctx *ctx, const esa_backend *be, const fenced *g,
                                const char *what)
{
    const int64_t all = g->start + g->bytes + FENCE;
    uint8_t *block = malloc((size_t)all);
    must(ctx, be->download(ctx, block, g->block, all));
    for (int64_t i = 0; i < all; i++)
        if ((i < g->start || i >= g->start + g->bytes) && block[i] != 0x5a)
            fail_msg("%s: byte %lld outside its %lld bytes changed", what,
                     (long long)(i - g->start), (long long)g->bytes);
    memmove(block, block + g->start, (size_t)g->bytes);
    return block;
}

static inline void fenced_free(esa_ctx *ctx, const esa_backend *be, fenced *g)
{
    be->release(ctx, g->block, g->start + g->bytes + FENCE);
    free(g->host);
    *g = (fenced){ 0 };
}

/* count random BF16 values in [-size, size), to be freed. Long arrays repeat the first million, at
 * a distance that no row length divides, so that true shapes do not wait for their data. */
static inline uint16_t *random_bf16(esa_rng *rng, int64_t count, float size)
{
    const int64_t period = 1000003;
    uint16_t *x = malloc((size_t)(count > 0 ? count : 1) * 2);
    for (int64_t i = 0; i < count; i++)
        x[i] = i < period ? esa_f32_to_bf16(size * (2 * esa_rng_unit(rng) - 1)) : x[i - period];
    return x;
}

/* Milliseconds of one call, best of `rounds`; the first call is not counted. */
static inline double best_ms(esa_ctx *ctx, const esa_backend *be, int rounds,
                             esa_status (*run)(esa_ctx *ctx, const void *args), const void *args)
{
    double best = 1e9, seconds;
    esa_mark from = { 0 }, to = { 0 };
    must(ctx, run(ctx, args));
    for (int i = 0; i < rounds; i++) {
        must(ctx, be->mark_record(ctx, &from));
        must(ctx, run(ctx, args));
        must(ctx, be->mark_record(ctx, &to));
        must(ctx, be->mark_elapsed(ctx, &seconds, &from, &to));
        best = seconds < best ? seconds : best;
    }
    be->mark_release(ctx, &from);
    be->mark_release(ctx, &to);
    return 1e3 * best;
}

#endif
