/* compare.c - esa_frames_compare: both metrics over a video, frames spread over the ctx's threads.
 * SPDX-License-Identifier: Apache-2.0 */
#include "base/pool.h"
#include "media/frames.h"
#include "metric/metric.h"

#include <math.h>

typedef struct compare {
    const esa_frames *a, *b;
    double *ssim;                   /* [count] */
    int64_t *error;                 /* [count] */
    double *scratch;                /* [threads][each] */
    int64_t each;
} compare;

static void one_frame(void *arg, int64_t i, int32_t worker)
{
    const compare *c = arg;
    const int64_t size = (int64_t)c->a->height * c->a->width * 3;
    const uint8_t *a = c->a->rgb + i * size, *b = c->b->rgb + i * size;
    c->error[i] = esa_squared_error(a, b, size);
    c->ssim[i] = esa_ssim(a, b, c->a->height, c->a->width, c->scratch + worker * c->each);
}

static esa_status measure(esa_ctx *ctx, esa_metrics *out, const esa_frames *a, const esa_frames *b)
{
    if (a->count != b->count || a->height != b->height || a->width != b->width)
        return esa_fail(ctx, ESA_ERR_SHAPE, "%d frames of %d x %d cannot be compared with %d frames of %d x %d", b->count, b->width, b->height,
                        a->count, a->width, a->height);
    if (a->height < ESA_SSIM_WINDOW || a->width < ESA_SSIM_WINDOW)
        return esa_fail(ctx, ESA_ERR_SHAPE, "frames of %d x %d are smaller than the window of SSIM, %d x %d", a->width, a->height,
                        ESA_SSIM_WINDOW, ESA_SSIM_WINDOW);
    compare c = { .a = a, .b = b, .each = esa_ssim_scratch(a->width) };
    const int64_t threads = esa_pool_threads(ctx->pool), per_frame = (int64_t)(sizeof *c.ssim + sizeof *c.error);
    const int64_t bytes = a->count * per_frame + threads * c.each * (int64_t)sizeof *c.scratch;
    double *block = esa_mem_alloc(&ctx->mem, bytes);
    if (!block) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while comparing %d frames", a->count);
    c.scratch = block;
    c.ssim = block + threads * c.each;
    c.error = (int64_t *)(void *)(c.ssim + a->count);
    esa_pool_run(ctx->pool, one_frame, &c, a->count);
    const int64_t size = (int64_t)a->height * a->width * 3;
    int64_t error = 0, worst = 0;
    double ssim = 0, least = INFINITY;
    for (int64_t i = 0; i < a->count; i++) {            /* in order: the same bits whatever the number of threads */
        error += c.error[i];
        if (c.error[i] > worst) worst = c.error[i];
        ssim += c.ssim[i];
        if (c.ssim[i] < least) least = c.ssim[i];
    }
    *out = (esa_metrics){ .struct_size = sizeof *out, .frames = a->count, .psnr = esa_psnr(error, a->count * size),
                          .ssim = ssim / a->count, .psnr_min = esa_psnr(worst, size), .ssim_min = least };
    esa_mem_free(&ctx->mem, block, bytes);
    return ESA_OK;
}

esa_status esa_frames_compare(esa_ctx *ctx, esa_metrics *metrics, const esa_frames *reference, const esa_frames *frames)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    if (!metrics || !reference || !frames) status = esa_fail(ctx, ESA_ERR_ARGUMENT, "metrics, reference or frames is NULL");
    else if (metrics->struct_size != sizeof *metrics)
        status = esa_fail(ctx, ESA_ERR_VERSION, "esa_metrics has %u bytes, expected %u", metrics->struct_size, (unsigned)sizeof *metrics);
    else status = measure(ctx, metrics, reference, frames);
    esa_ctx_leave(ctx);
    return status;
}
