/* device_api.c - the public calls about the GPU: count, info, memory, copies, stream.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/plugin.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

_Static_assert(offsetof(esa_device_info, memory) == 32 && offsetof(esa_device_info, name) == 48 &&
                   offsetof(esa_device_info, reserved) == 144,
               "esa_device_info offsets");

esa_status esa_device_count(esa_ctx *ctx, int32_t *count)
{
    if (count) *count = 0;
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    char error[256] = "";
    if (!count) status = esa_fail(ctx, ESA_ERR_ARGUMENT, "count is NULL");
    if (!status && !(status = esa_cuda_plugin(ctx)) &&
        (status = ctx->cuda->table->devices(count, error, (int32_t)sizeof error)))
        esa_fail(ctx, status, "%s", error);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_device_get_info(esa_ctx *ctx, esa_device_info *info)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    esa_cuda_info got;
    if (!info)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "info is NULL");
    else if (info->struct_size != sizeof *info)
        status = esa_fail(ctx, ESA_ERR_VERSION,
                          "esa_device_info has struct_size %u, this library expects %u",
                          info->struct_size, (unsigned)sizeof *info);
    if (!status && !(status = esa_cuda_open(ctx)) &&
        !(status = esa_cuda_status(ctx, ctx->cuda->table->info(ctx->cuda->dev, &got)))) {
        memset(info, 0, sizeof *info);
        info->struct_size = (uint32_t)sizeof *info;
        info->ordinal = got.ordinal;
        info->major = got.major;
        info->minor = got.minor;
        info->multiprocessors = got.multiprocessors;
        info->driver = got.driver;
        info->runtime = got.runtime;
        info->memory = got.memory;
        info->free_memory = got.free_memory;
        snprintf(info->name, sizeof info->name, "%s", got.name);
        snprintf(info->kernels, sizeof info->kernels, "%s", got.kernels);
        snprintf(info->plugin, sizeof info->plugin, "%s", ctx->cuda->table->version);
    }
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_device_alloc(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    if (ptr) *ptr = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (!ptr || bytes < 0)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                          "esa_device_alloc needs a pointer to fill and 0 or more bytes, got %lld",
                          (long long)bytes);
    if (!status && !(status = esa_cuda_open(ctx)))
        status = esa_cuda_status(ctx, ctx->cuda->table->alloc(ctx->cuda->dev, ptr, bytes));
    esa_ctx_leave(ctx);
    return status;
}

void esa_device_free(esa_ctx *ctx, void *ptr)
{
    if (ctx && ptr && ctx->cuda) ctx->cuda->table->release(ctx->cuda_device, ptr);
}

/* What upload and download share: arguments checked, GPU open. */
static esa_status check_copy(esa_ctx *ctx, const void *dst, const void *src, int64_t bytes)
{
    if (bytes < 0 || (bytes && (!dst || !src)))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "a copy needs two pointers and 0 or more bytes, got %lld",
                        (long long)bytes);
    return esa_cuda_open(ctx);
}

esa_status esa_device_upload(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (!(status = check_copy(ctx, dst, src, bytes)) && bytes)
        status = esa_cuda_status(
            ctx, ctx->cuda->table->upload(ctx->cuda->dev, dst, src, bytes, ctx->cuda_stream));
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_device_download(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (!(status = check_copy(ctx, dst, src, bytes)) && bytes &&
        (status = ctx->cuda->table->download(ctx->cuda_device, dst, src, bytes, ctx->cuda_stream)))
        esa_fail(ctx, status, "copying %lld bytes from GPU %d failed", (long long)bytes,
                 (int)ctx->cuda_device);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_device_sync(esa_ctx *ctx)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (!(status = esa_cuda_open(ctx)))
        status = esa_cuda_status(ctx, ctx->cuda->table->sync(ctx->cuda->dev, ctx->cuda_stream));
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_ctx_set_stream(esa_ctx *ctx, void *cuda_stream)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (cuda_stream != ctx->cuda_stream && ctx->cuda && ctx->cuda->dev)
        status = esa_cuda_status(ctx, ctx->cuda->table->sync(ctx->cuda->dev, ctx->cuda_stream));
    if (!status) ctx->cuda_stream = cuda_stream;
    esa_ctx_leave(ctx);
    return status;
}

void esa_device_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes)
{
    const esa_cuda *c = ctx ? ctx->cuda : NULL;
    if (held_bytes) *held_bytes = c ? c->arena_bytes : 0;
    if (peak_bytes) *peak_bytes = c ? c->arena_peak : 0;
}
