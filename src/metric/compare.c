/* compare.c - esa_frames_compare and esa_frames_measure: metrics over a video. PSNR, SSIM and
 * flicker give each thread of the ctx whole frames. LPIPS takes one frame at a time and spreads its
 * layers.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "base/pool.h"
#include "media/frames.h"
#include "metric/lpips.h"
#include "metric/metric.h"

#include <math.h>

typedef struct compare {
    const esa_frames *a, *b;
    double *ssim, *lpips;    /* [count] */
    int64_t *error, *change; /* [count] */
    double *scratch;         /* [threads][each] */
    int64_t each;
} compare;

static void one_frame(void *arg, int64_t i, int32_t worker)
{
    const compare *c = arg;
    const int64_t size = (int64_t)c->a->height * c->a->width * 3;
    const uint8_t *a = c->a->rgb + i * size, *b = c->b->rgb + i * size;
    c->error[i] = esa_squared_error(a, b, size);
    c->change[i] = i ? esa_change_error(a - size, a, b - size, b, size) : 0;
    c->ssim[i] = esa_ssim(a, b, c->a->height, c->a->width, c->scratch + worker * c->each);
}

static esa_status check(esa_ctx *ctx, const esa_frames *a, const esa_frames *b,
                        const esa_lpips *lpips)
{
    if (a->count != b->count || a->height != b->height || a->width != b->width)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "%d frames of %d x %d cannot be compared with %d frames of %d x %d",
                        b->count, b->width, b->height, a->count, a->width, a->height);
    if (a->height < ESA_SSIM_WINDOW || a->width < ESA_SSIM_WINDOW)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "frames of %d x %d are smaller than the window of SSIM, %d x %d", a->width,
                        a->height, ESA_SSIM_WINDOW, ESA_SSIM_WINDOW);
    const int32_t least = esa_lpips_least(lpips);
    if (a->height < least || a->width < least)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "frames of %d x %d are too small for LPIPS with %s, which needs %d x %d",
                        a->width, a->height, esa_lpips_net(lpips), least, least);
    if (lpips && lpips->ctx != ctx)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "lpips was opened with another ctx");
    return ESA_OK;
}

static esa_status perceive(esa_ctx *ctx, compare *c, esa_lpips *lpips,
                           int32_t (*progress)(void *, int32_t, int32_t), void *user)
{
    const int64_t size = (int64_t)c->a->height * c->a->width * 3;
    for (int32_t i = 0; i < c->a->count; i++) {
        c->lpips[i] = NAN;
        if (!lpips) continue;
        ESA_TRY(esa_lpips_distance(lpips, &c->lpips[i], c->a->rgb + i * size, c->b->rgb + i * size,
                                   c->a->height, c->a->width));
        if (progress && progress(user, i + 1, c->a->count))
            return esa_fail(ctx, ESA_ERR_STATE, "cancelled");
    }
    return ESA_OK;
}

/* Sums in the order of the frames: the same bits on any number of threads. */
static void summarise(esa_metrics *out, double *each, const compare *c, const esa_lpips *lpips)
{
    const int64_t count = c->a->count, size = (int64_t)c->a->height * c->a->width * 3;
    int64_t error = 0, worst = 0, change = 0;
    double ssim = 0, least = INFINITY, lpips_sum = 0, lpips_max = 0;
    for (int64_t i = 0; i < count; i++) {
        error += c->error[i];
        change += c->change[i];
        if (c->error[i] > worst) worst = c->error[i];
        ssim += c->ssim[i];
        if (c->ssim[i] < least) least = c->ssim[i];
        lpips_sum += c->lpips[i];
        if (c->lpips[i] > lpips_max) lpips_max = c->lpips[i];
        if (!each) continue;
        each[i * ESA_METRIC_COUNT + ESA_METRIC_PSNR] = esa_psnr(c->error[i], size);
        each[i * ESA_METRIC_COUNT + ESA_METRIC_SSIM] = c->ssim[i];
        each[i * ESA_METRIC_COUNT + ESA_METRIC_LPIPS] = c->lpips[i];
        each[i * ESA_METRIC_COUNT + ESA_METRIC_FLICKER] = i ? esa_root_mean(c->change[i], size)
                                                            : NAN;
    }
    *out = (esa_metrics){ .struct_size = sizeof *out,
                          .frames = (int32_t)count,
                          .psnr = esa_psnr(error, count * size),
                          .ssim = ssim / (double)count,
                          .psnr_min = esa_psnr(worst, size),
                          .ssim_min = least,
                          .lpips = lpips_sum / (double)count,
                          .lpips_max = lpips ? lpips_max : NAN,
                          .flicker = count > 1 ? esa_root_mean(change, (count - 1) * size) : NAN };
}

static esa_status measure(esa_ctx *ctx, esa_metrics *out, double *each, const esa_frames *a,
                          const esa_frames *b, esa_lpips *lpips,
                          int32_t (*progress)(void *, int32_t, int32_t), void *user)
{
    ESA_TRY(check(ctx, a, b, lpips));
    compare c = { .a = a, .b = b, .each = esa_ssim_scratch(a->width) };
    const int64_t threads = esa_pool_threads(ctx->pool), count = a->count;
    const int64_t bytes = (4 * count + threads * c.each) * (int64_t)sizeof(double);
    double *block = esa_mem_alloc(&ctx->mem, bytes);
    if (!block)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while comparing %d frames", a->count);
    c.scratch = block;
    c.ssim = block + threads * c.each;
    c.lpips = c.ssim + count;
    c.error = (int64_t *)(void *)(c.lpips + count);
    c.change = c.error + count;
    esa_pool_run(ctx->pool, one_frame, &c, count);
    const esa_status status = perceive(ctx, &c, lpips, progress, user);
    if (!status) summarise(out, each, &c, lpips);
    esa_mem_free(&ctx->mem, block, bytes);
    return status;
}

esa_status esa_frames_measure(esa_ctx *ctx, esa_metrics *metrics, double *each,
                              const esa_frames *reference, const esa_frames *frames,
                              esa_lpips *lpips,
                              int32_t (*progress)(void *user, int32_t done, int32_t total),
                              void *user)
{
    esa_status status;
    ESA_TRY(esa_engine_enter(ctx));
    if (!metrics || !reference || !frames)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "metrics, reference or frames is NULL");
    else if (metrics->struct_size != sizeof *metrics)
        status = esa_fail(ctx, ESA_ERR_VERSION,
                          "esa_metrics has struct_size %u, this library expects %u",
                          metrics->struct_size, (unsigned)sizeof *metrics);
    else
        status = measure(ctx, metrics, each, reference, frames, lpips, progress, user);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_frames_compare(esa_ctx *ctx, esa_metrics *metrics, const esa_frames *reference,
                              const esa_frames *frames)
{
    return esa_frames_measure(ctx, metrics, NULL, reference, frames, NULL, NULL, NULL);
}
