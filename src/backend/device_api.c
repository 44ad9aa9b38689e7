/* device_api.c - the public calls for the GPU: count, info, memory, copies, stream.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/backend.h"
#include "backend/plugin.h"

#include <stddef.h>
#include <stdio.h>

_Static_assert(offsetof(esa_device_info, memory) == 32 && offsetof(esa_device_info, name) == 48 &&
                   offsetof(esa_device_info, reserved) == 144,
               "esa_device_info offsets");

static esa_status count_devices(esa_ctx *ctx, int32_t *count)
{
    char error[256] = "";
    if (!count) return esa_fail(ctx, ESA_ERR_ARGUMENT, "count is NULL");
    ESA_TRY(esa_cuda_plugin(ctx));
    const esa_status status = ctx->cuda->table->devices(count, error, (int32_t)sizeof error);
    return status ? esa_fail(ctx, status, "%s", error) : ESA_OK;
}

esa_status esa_device_count(esa_ctx *ctx, int32_t *count)
{
    if (count) *count = 0;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = count_devices(ctx, count);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status get_info(esa_ctx *ctx, esa_device_info *info)
{
    if (!info) return esa_fail(ctx, ESA_ERR_ARGUMENT, "info is NULL");
    if (info->struct_size != sizeof *info)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_device_info has struct_size %u, this library expects %u",
                        info->struct_size, (unsigned)sizeof *info);
    esa_cuda_info got;
    ESA_TRY(esa_cuda_open(ctx));
    ESA_TRY(esa_cuda_status(ctx, ctx->cuda->table->info(ctx->cuda->dev, &got)));
    *info = (esa_device_info){ .struct_size = (uint32_t)sizeof *info,
                               .ordinal = got.ordinal,
                               .major = got.major,
                               .minor = got.minor,
                               .multiprocessors = got.multiprocessors,
                               .driver = got.driver,
                               .runtime = got.runtime,
                               .memory = got.memory,
                               .free_memory = got.free_memory };
    snprintf(info->name, sizeof info->name, "%s", got.name);
    snprintf(info->kernels, sizeof info->kernels, "%s", got.kernels);
    snprintf(info->plugin, sizeof info->plugin, "%s", ctx->cuda->table->version);
    return ESA_OK;
}

esa_status esa_device_get_info(esa_ctx *ctx, esa_device_info *info)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = get_info(ctx, info);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status library(esa_ctx *ctx, char *text, int32_t bytes)
{
    const char *name;
    if (!text || bytes < 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "text is NULL, or bytes is %d; expected room for a text", (int)bytes);
    ESA_TRY(esa_cuda_open(ctx));
    ESA_TRY(esa_backend_cuda.products->library(ctx, &name));
    snprintf(text, (size_t)bytes, "%s", name);
    return ESA_OK;
}

esa_status esa_device_library(esa_ctx *ctx, char *text, int32_t bytes)
{
    if (text && bytes > 0) text[0] = 0;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = library(ctx, text, bytes);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status alloc(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    if (!ptr || bytes < 0)
        return esa_fail(
            ctx, ESA_ERR_ARGUMENT,
            "ptr is NULL, or bytes is %lld; expected a pointer to fill and 0 or more bytes",
            (long long)bytes);
    ESA_TRY(esa_cuda_open(ctx));
    return esa_backend_cuda.alloc(ctx, ptr, bytes);
}

esa_status esa_device_alloc(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    if (ptr) *ptr = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = alloc(ctx, ptr, bytes);
    esa_ctx_leave(ctx);
    return status;
}

void esa_device_free(esa_ctx *ctx, void *ptr)
{
    if (ctx && ptr && ctx->cuda) ctx->cuda->table->release(ctx->cuda_device, ptr);
}

typedef esa_status copy_fn(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);

/* Does the work of upload and download: checks the arguments, opens the GPU, copies. */
static esa_status copy(esa_ctx *ctx, void *dst, const void *src, int64_t bytes, copy_fn *fn)
{
    if (bytes < 0 || (bytes && (!dst || !src)))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "dst or src is NULL, or bytes is %lld; expected two pointers and 0 or more "
                        "bytes",
                        (long long)bytes);
    ESA_TRY(esa_cuda_open(ctx));
    return bytes ? fn(ctx, dst, src, bytes) : ESA_OK;
}

esa_status esa_device_upload(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = copy(ctx, dst, src, bytes, esa_backend_cuda.upload);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_device_download(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = copy(ctx, dst, src, bytes, esa_backend_cuda.download);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status sync_stream(esa_ctx *ctx)
{
    ESA_TRY(esa_cuda_open(ctx));
    return esa_cuda_status(ctx, ctx->cuda->table->sync(ctx->cuda->dev, ctx->cuda_stream));
}

esa_status esa_device_sync(esa_ctx *ctx)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = sync_stream(ctx);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_ctx_set_stream(esa_ctx *ctx, void *cuda_stream)
{
    esa_status status = ESA_OK;
    ESA_TRY(esa_ctx_enter(ctx));
    /* work that was enqueued before shares scratch with what follows */
    if (cuda_stream != ctx->cuda_stream && ctx->cuda && ctx->cuda->dev) status = sync_stream(ctx);
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
