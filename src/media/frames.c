/* frames.c - the object: creating, describing, putting two beside one another.
 * SPDX-License-Identifier: Apache-2.0 */
#include "media/frames.h"

#include <math.h>
#include <string.h>

esa_status esa_frames_new(esa_ctx *ctx, esa_frames **frames, int64_t count, int64_t height,
                          int64_t width, double fps)
{
    *frames = NULL;
    if (count < 1 || count > ESA_FRAMES_MAX_COUNT || height < 1 || height > ESA_FRAMES_MAX_SIDE ||
        width < 1 || width > ESA_FRAMES_MAX_SIDE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%lld frames of %lld x %lld were asked for, expected 1 .. %d frames with "
                        "sides of 1 .. %d pixels",
                        (long long)count, (long long)width, (long long)height, ESA_FRAMES_MAX_COUNT,
                        ESA_FRAMES_MAX_SIDE);
    if (!(fps >= 0.01 && fps <= 1000))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%g frames a second were asked for, expected 0.01 .. 1000", fps);
    esa_frames *f = esa_mem_zalloc(&ctx->mem, sizeof *f);
    const int64_t bytes = count * height * width * 3;
    uint8_t *rgb = f ? esa_mem_zalloc(&ctx->mem, bytes) : NULL;
    if (!rgb) {
        esa_mem_free(&ctx->mem, f, sizeof *f);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for %lld frames of %lld x %lld",
                        (long long)count, (long long)width, (long long)height);
    }
    *f = (esa_frames){ .mem = ctx->mem,
                       .count = (int32_t)count,
                       .height = (int32_t)height,
                       .width = (int32_t)width,
                       .fps = fps,
                       .rgb = rgb,
                       .bytes = bytes };
    *frames = f;
    return ESA_OK;
}

esa_status esa_frames_create(esa_ctx *ctx, esa_frames **frames, const uint8_t *rgb, int32_t count,
                             int32_t height, int32_t width, double fps)
{
    if (frames) *frames = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    if (!frames)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "frames is NULL");
    else
        status = esa_frames_new(ctx, frames, count, height, width, fps);
    if (status == ESA_OK && rgb) memcpy((*frames)->rgb, rgb, (size_t)(*frames)->bytes);
    esa_ctx_leave(ctx);
    return status;
}

void esa_frames_free(esa_frames *frames)
{
    if (!frames) return;
    const esa_allocator mem = frames->mem;
    esa_mem_free(&mem, frames->rgb, frames->bytes);
    esa_mem_free(&mem, frames, sizeof *frames);
}

esa_status esa_frames_get_info(const esa_frames *frames, esa_frames_info *info)
{
    if (!frames || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    *info = (esa_frames_info){ .struct_size = sizeof *info,
                               .frames = frames->count,
                               .height = frames->height,
                               .width = frames->width,
                               .fps = frames->fps,
                               .rgb = frames->rgb };
    return ESA_OK;
}

static esa_status beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left,
                         const esa_frames *right)
{
    if (left->count != right->count || left->height != right->height)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "%d frames of height %d cannot stand beside %d frames of height %d",
                        left->count, left->height, right->count, right->height);
    const esa_status status = esa_frames_new(ctx, both, left->count, left->height,
                                             (int64_t)left->width + right->width, left->fps);
    if (status != ESA_OK) return status;
    const size_t a = (size_t)left->width * 3, b = (size_t)right->width * 3;
    for (int64_t row = 0; row < (int64_t)left->count * left->height; row++) {
        uint8_t *to = (*both)->rgb + (size_t)row * (a + b);
        memcpy(to, left->rgb + (size_t)row * a, a);
        memcpy(to + a, right->rgb + (size_t)row * b, b);
    }
    return ESA_OK;
}

esa_status esa_frames_beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left,
                             const esa_frames *right)
{
    if (both) *both = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    if (!both || !left || !right)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "both, left or right is NULL");
    else
        status = beside(ctx, both, left, right);
    esa_ctx_leave(ctx);
    return status;
}
