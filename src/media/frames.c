/* frames.c - the object: creates, describes and frees frames, puts two videos side by side.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "media/frames.h"

#include <math.h>
#include <string.h>

int esa_fps_valid(double fps) { return fps >= 0.01 && fps <= 1000; }

esa_frames_info esa_frames_sizes(int64_t count, int64_t height, int64_t width, double fps)
{
    return (esa_frames_info){ .struct_size = sizeof(esa_frames_info),
                              .frames = (int32_t)count,
                              .height = (int32_t)height,
                              .width = (int32_t)width,
                              .fps = fps };
}

esa_status esa_frames_drop(esa_status status, esa_frames **frames)
{
    if (!status || !frames) return status;
    esa_frames_free(*frames);
    *frames = NULL;
    return status;
}

esa_status esa_frames_new(esa_ctx *ctx, esa_frames **frames, int64_t count, int64_t height,
                          int64_t width, double fps)
{
    *frames = NULL;
    if (count < 1 || count > ESA_FRAMES_MAX_COUNT || height < 1 || height > ESA_FRAMES_MAX_SIDE ||
        width < 1 || width > ESA_FRAMES_MAX_SIDE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the video has %lld frames of %lld x %lld, expected 1 .. %d frames with "
                        "sides of 1 .. %d pixels",
                        (long long)count, (long long)width, (long long)height, ESA_FRAMES_MAX_COUNT,
                        ESA_FRAMES_MAX_SIDE);
    if (!esa_fps_valid(fps))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "fps is %g, expected 0.01 .. 1000 frames per second",
                        fps);
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
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = frames ? esa_frames_new(ctx, frames, count, height, width, fps)
                                     : esa_fail(ctx, ESA_ERR_ARGUMENT, "frames is NULL");
    if (!status && rgb) memcpy((*frames)->rgb, rgb, (size_t)(*frames)->bytes);
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
    *info = esa_frames_sizes(frames->count, frames->height, frames->width, frames->fps);
    info->rgb = frames->rgb;
    return ESA_OK;
}

static esa_status beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left,
                         const esa_frames *right)
{
    if (!both || !left || !right)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "both, left or right is NULL");
    if (left->count != right->count || left->height != right->height)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "%d frames of height %d do not fit beside %d frames of height %d",
                        left->count, left->height, right->count, right->height);
    ESA_TRY(esa_frames_new(ctx, both, left->count, left->height,
                           (int64_t)left->width + right->width, left->fps));
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
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = beside(ctx, both, left, right);
    esa_ctx_leave(ctx);
    return status;
}
