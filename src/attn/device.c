/* device.c - finding and opening the CUDA plugin, GPU scratch, and the public calls about the GPU.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* dladdr, dl_iterate_phdr */
#include "attn/device.h"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(offsetof(esa_device_info, memory) == 32 && offsetof(esa_device_info, name) == 48 &&
                   offsetof(esa_device_info, reserved) == 144,
               "esa_device_info offsets");

#define PLUGIN_NAME "libesa_cuda.so"

static const char here = 0; /* an object of this library: where it lies, the library lies */

#if defined(__linux__)
/* For the first object of the process, the executable: 1 into *inside if it holds `here`, that is,
 * if libesa is linked into it. */
static int look_at_executable(struct dl_phdr_info *object, size_t size, void *inside)
{
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const uintptr_t low = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        if (object->dlpi_phdr[i].p_type == PT_LOAD &&
            (uintptr_t)&here - low < object->dlpi_phdr[i].p_memsz)
            *(int32_t *)inside = 1;
    }
    return 1; /* the others are not looked at */
}
#endif

/* The file this code was loaded from. An executable is known to dladdr by the word it was called
 * with, which is no path when it was found through $PATH: the kernel knows better. 0 if nobody
 * knows. */
static int32_t own_path(char *path, size_t bytes)
{
#if defined(__linux__)
    int32_t executable = 0;
    dl_iterate_phdr(look_at_executable, &executable);
    if (executable) {
        const ssize_t length = readlink("/proc/self/exe", path, bytes);
        if (length < 1 || (size_t)length >= bytes) return 0;
        path[length] = 0;
        return 1;
    }
#endif
    Dl_info info;
    return dladdr(&here, &info) && info.dli_fname &&
           (size_t)snprintf(path, bytes, "%s", info.dli_fname) < bytes;
}

/* $ESA_CUDA_LIB, or the file beside the one this code was loaded from. With a slash in it always:
 * dlopen looks for bare names in places that nobody named. 0 if the path does not fit. */
static int32_t plugin_path(char *path, size_t bytes)
{
    const char *given = getenv("ESA_CUDA_LIB");
    if (given && *given)
        return (size_t)snprintf(path, bytes, "%s%s", strchr(given, '/') ? "" : "./", given) < bytes;
    if (!own_path(path, bytes)) return 0;
    char *const slash = strrchr(path, '/'), *const name = slash ? slash + 1 : path;
    const size_t room = bytes - (size_t)(name - path);
    return (size_t)snprintf(name, room, "%s" PLUGIN_NAME, slash ? "" : "./") < room;
}

static esa_status load(esa_ctx *ctx, esa_cuda *cuda)
{
    char path[4096], error[256] = "";
    if (!plugin_path(path, sizeof path))
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "the path of " PLUGIN_NAME " could not be determined: set ESA_CUDA_LIB");
    /* NODELETE: masks keep pointers into the plugin and may be freed after the ctx. */
    cuda->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!cuda->handle)
        return esa_fail(ctx, ESA_ERR_DEVICE, "the CUDA plugin could not be opened (%.300s)",
                        dlerror());
    esa_cuda_entry_fn *entry;
    *(void **)&entry = dlsym(cuda->handle, ESA_CUDA_ENTRY_NAME);
    if (!entry)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "%.300s is not an esa plugin: it has no " ESA_CUDA_ENTRY_NAME, path);
    const esa_cuda_host host = {
        sizeof host,           sizeof(esa_attn_args), sizeof(esa_select_args),
        sizeof(esa_cuda_mask), sizeof(esa_cuda_info), sizeof(esa_cuda_table),
        esa_version()
    };
    cuda->table = entry(ESA_CUDA_ABI, &host, error, (int32_t)sizeof error);
    if (!cuda->table)
        return esa_fail(ctx, ESA_ERR_DEVICE, "%.200s does not fit this library: %.240s", path,
                        error);
    return ESA_OK;
}

static void unload(esa_ctx *ctx)
{
    if (ctx->cuda->handle) dlclose(ctx->cuda->handle);
    esa_mem_free(&ctx->mem, ctx->cuda, sizeof *ctx->cuda);
    ctx->cuda = NULL;
}

/* The table alone: enough to count GPUs. */
static esa_status plugin(esa_ctx *ctx)
{
    if (ctx->cuda) return ESA_OK;
    ctx->cuda = esa_mem_zalloc(&ctx->mem, sizeof *ctx->cuda);
    if (!ctx->cuda) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the CUDA plugin");
    ctx->cuda_close = esa_cuda_close;
    ctx->cuda_trim = esa_cuda_trim;
    const esa_status status = load(ctx, ctx->cuda);
    if (status) unload(ctx);
    return status;
}

esa_status esa_cuda_open(esa_ctx *ctx)
{
    if (ctx->cuda && ctx->cuda->dev) return ESA_OK;
    esa_status status = plugin(ctx);
    if (status) return status;
    char error[256] = "";
    status = ctx->cuda->table->open(&ctx->cuda->dev, ctx->cuda_device, getenv("ESA_CUDA"), error,
                                    (int32_t)sizeof error);
    if (status) return esa_fail(ctx, status, "%s", error);
    esa_log(ctx, ESA_LOG_INFO, "esa %s: CUDA plugin %s, GPU %d", esa_version(),
            ctx->cuda->table->version, (int)ctx->cuda_device);
    return ESA_OK;
}

void esa_cuda_trim(esa_ctx *ctx)
{
    if (!ctx->cuda || !ctx->cuda->arena) return;
    ctx->cuda->table->release(ctx->cuda_device, ctx->cuda->arena);
    ctx->cuda->arena = NULL;
    ctx->cuda->arena_bytes = 0;
}

void esa_cuda_close(esa_ctx *ctx)
{
    if (!ctx->cuda) return;
    esa_cuda_trim(ctx);
    if (ctx->cuda->dev) ctx->cuda->table->close(ctx->cuda->dev);
    unload(ctx);
}

esa_status esa_cuda_status(esa_ctx *ctx, esa_status status)
{
    return status ? esa_fail(ctx, status, "%s", ctx->cuda->table->error(ctx->cuda->dev)) : ESA_OK;
}

esa_status esa_cuda_scratch(esa_ctx *ctx, void **scratch, int64_t bytes)
{
    esa_cuda *c = ctx->cuda;
    if (bytes < 0 || bytes > c->arena_bytes) { /* negative: beyond 64 bits, which alloc refuses */
        esa_cuda_trim(ctx);
        const esa_status status = esa_cuda_status(ctx, c->table->alloc(c->dev, &c->arena, bytes));
        if (status) {
            c->arena = NULL;
            return status;
        }
        c->arena_bytes = bytes;
        c->arena_peak = esa_max64(c->arena_peak, bytes);
    }
    *scratch = c->arena;
    return ESA_OK;
}

/* ---------------------------------------------------------------- masks on the GPU */

esa_cuda_mask esa_cuda_mask_view(const esa_mask *m)
{
    return (esa_cuda_mask){ m->count, m->index, m->facts, m->B, m->H, m->nq, m->nk, m->cap };
}

/* Builds one side's permutation in the host arena and uploads it, if this side moves. */
static esa_status upload_order(esa_ctx *ctx, int32_t **perm, const esa_mask *m, int32_t side)
{
    const esa_cuda *c = ctx->cuda;
    const int64_t N = side ? m->Nk : m->Nq;
    if (m->layout.order_applied || esa_order_is_identity(&m->layout, side, m->mode)) return ESA_OK;
    void *host;
    esa_status status = esa_ctx_scratch(ctx, &host, N * 4);
    if (status) return status;
    esa_order_build(host, N, &m->layout, side, m->mode);
    status = c->table->alloc(c->dev, (void **)perm, N * 4);
    if (!status) status = c->table->upload(c->dev, *perm, host, N * 4, ctx->cuda_stream);
    return esa_cuda_status(ctx, status);
}

esa_status esa_cuda_mask_like(esa_ctx *ctx, esa_mask **mask, const esa_mask *like)
{
    const esa_cuda *c = ctx->cuda;
    *mask = NULL;
    esa_mask *m = esa_mem_alloc(&ctx->mem, (int64_t)sizeof *m);
    if (!m) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a mask");
    *m = *like;
    m->mem = ctx->mem;
    m->device = ESA_DEVICE_CUDA;
    m->heap = (esa_device_heap){ ctx->cuda_device, c->table->release, c->table->download };
    m->cap = m->nk;
    m->filled = 0;
    m->count = NULL;
    m->index = NULL;
    m->facts = NULL;
    m->perm_q = m->perm_k = NULL;
    const int64_t rows = esa_size_mul(esa_size_mul(m->B, m->H), m->nq);
    esa_status status = c->table->alloc(c->dev, (void **)&m->count, esa_size_mul(rows, 4));
    if (!status)
        status = c->table->alloc(c->dev, (void **)&m->index,
                                 esa_size_mul(esa_size_mul(rows, m->cap), 2));
    if (!status) status = c->table->alloc(c->dev, (void **)&m->facts, 16);
    if (status) esa_cuda_status(ctx, status);
    if (!status) status = upload_order(ctx, &m->perm_q, m, 0);
    if (!status) status = upload_order(ctx, &m->perm_k, m, 1);
    if (status)
        esa_mask_free(m);
    else
        *mask = m;
    return status;
}

/* *host = the mask in host memory, in memory of ctx unless it already lies there. */
static esa_status read_mask(esa_ctx *ctx, const esa_mask **host, const esa_mask *mask)
{
    const esa_status status = esa_mask_on_host(host, mask, &ctx->mem);
    if (status == ESA_ERR_MEMORY) return esa_fail(ctx, status, "out of memory for a mask");
    return status ? esa_fail(ctx, status, "the mask could not be read from GPU %d",
                             (int)mask->heap.ordinal)
                  : ESA_OK;
}

esa_status esa_cuda_mask_copy(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask)
{
    esa_status status = esa_cuda_open(ctx);
    if (status) return status;
    const esa_cuda *c = ctx->cuda;
    const esa_mask *host;
    if ((status = read_mask(ctx, &host, mask))) return status;
    esa_mask *m;
    if (!(status = esa_cuda_mask_like(ctx, &m, host))) {
        const int64_t rows = m->B * m->H * m->nq,
                      facts[2] = { host->existing, esa_mask_kept(host) };
        status = c->table->upload(c->dev, m->count, host->count, rows * 4, ctx->cuda_stream);
        if (!status)
            status = c->table->upload(c->dev, m->index, host->index, rows * m->cap * 2,
                                      ctx->cuda_stream);
        if (!status)
            status = c->table->upload(c->dev, m->facts, facts, sizeof facts, ctx->cuda_stream);
        esa_cuda_status(ctx, status);
        m->filled = 1;
    }
    if (host != mask) esa_mask_free((esa_mask *)host);
    if (status)
        esa_mask_free(m);
    else
        *copy = m;
    return status;
}

static esa_status copy_to_cpu(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask)
{
    const esa_mask *host;
    const esa_status status = read_mask(ctx, &host, mask);
    if (status) return status;
    if (host != mask) {
        *copy = (esa_mask *)host;
        return ESA_OK;
    }
    esa_mask *m = esa_mask_like(&ctx->mem, mask);
    if (!m) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a mask");
    const int64_t rows = m->B * m->H * m->nq;
    memcpy(m->count, mask->count, (size_t)(rows * 4));
    for (int64_t r = 0; r < rows; r++)
        memcpy(m->index + r * m->cap, mask->index + r * mask->cap, (size_t)mask->count[r] * 2);
    *copy = m;
    return ESA_OK;
}

esa_status esa_mask_to_device(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask, int32_t device)
{
    if (copy) *copy = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    if (!copy || !mask)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", copy ? "mask" : "copy");
    else if (!mask->filled)
        status = esa_fail(ctx, ESA_ERR_STATE, "the mask is empty: there is nothing to copy");
    else if (device == ESA_DEVICE_CPU)
        status = copy_to_cpu(ctx, copy, mask);
    else if (device == ESA_DEVICE_CUDA)
        status = esa_cuda_mask_copy(ctx, copy, mask);
    else
        status = esa_fail(ctx, ESA_ERR_DEVICE,
                          "device is %d, expected ESA_DEVICE_CPU or ESA_DEVICE_CUDA", (int)device);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- the public calls */

esa_status esa_device_count(esa_ctx *ctx, int32_t *count)
{
    if (count) *count = 0;
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    char error[256] = "";
    if (!count) status = esa_fail(ctx, ESA_ERR_ARGUMENT, "count is NULL");
    if (!status && !(status = plugin(ctx)) &&
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
