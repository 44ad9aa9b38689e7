/* plugin.c - finds and opens the CUDA plugin, and manages GPU scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* dladdr, dl_iterate_phdr */
#include "backend/plugin.h"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLUGIN_NAME "libesa_cuda.so"

static const char here = 0; /* its address shows which file this code was loaded from */

#if defined(__linux__)
/* Called with the first object of the process, which is the executable. Sets *inside to 1 if the
 * executable holds `here`, that is, if libesa is linked into it. */
static int look_at_executable(struct dl_phdr_info *object, size_t size, void *inside)
{
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const uintptr_t low = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        if (object->dlpi_phdr[i].p_type == PT_LOAD &&
            (uintptr_t)&here - low < object->dlpi_phdr[i].p_memsz)
            *(int32_t *)inside = 1;
    }
    return 1; /* stop: the other objects do not matter */
}
#endif

/* Writes the path of the file that this code was loaded from; 0 if it cannot be found. For an
 * executable, dladdr gives the name it was called with, which is not a path if the shell found it
 * through $PATH. So the path of an executable comes from /proc/self/exe. */
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

/* Writes $ESA_CUDA_LIB, or the path of the plugin beside the file of own_path. The path always has
 * a slash, because dlopen looks for a bare name in system folders. 0 if the path does not fit. */
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
                        "the folder of libesa, which holds " PLUGIN_NAME
                        ", could not be found: set ESA_CUDA_LIB");
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
    const esa_cuda_host host = esa_cuda_host_of(esa_build_id());
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

static void trim(esa_ctx *ctx)
{
    if (!ctx->cuda || !ctx->cuda->arena) return;
    ctx->cuda->table->release(ctx->cuda_device, ctx->cuda->arena);
    ctx->cuda->arena = NULL;
    ctx->cuda->arena_bytes = 0;
}

static void close_gpu(esa_ctx *ctx)
{
    if (!ctx->cuda) return;
    trim(ctx);
    if (ctx->cuda->dev) ctx->cuda->table->close(ctx->cuda->dev);
    unload(ctx);
}

esa_status esa_cuda_plugin(esa_ctx *ctx)
{
    if (ctx->cuda) return ESA_OK;
    ctx->cuda = esa_mem_zalloc(&ctx->mem, sizeof *ctx->cuda);
    if (!ctx->cuda) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the CUDA plugin");
    ctx->cuda_close = close_gpu;
    ctx->cuda_trim = trim;
    const esa_status status = load(ctx, ctx->cuda);
    if (status) unload(ctx);
    return status;
}

esa_status esa_cuda_open(esa_ctx *ctx)
{
    if (ctx->cuda && ctx->cuda->dev) return ESA_OK;
    esa_status status = esa_cuda_plugin(ctx);
    if (status) return status;
    char error[256] = "";
    status = ctx->cuda->table->open(&ctx->cuda->dev, ctx->cuda_device, getenv("ESA_CUDA"), error,
                                    (int32_t)sizeof error);
    if (status) return esa_fail(ctx, status, "%s", error);
    esa_log(ctx, ESA_LOG_INFO, "esa %s: CUDA plugin %s, GPU %d", esa_version(),
            ctx->cuda->table->version, (int)ctx->cuda_device);
    return ESA_OK;
}

esa_status esa_cuda_status(esa_ctx *ctx, esa_status status)
{
    return status ? esa_fail(ctx, status, "%s", ctx->cuda->table->error(ctx->cuda->dev)) : ESA_OK;
}

esa_status esa_cuda_scratch(esa_ctx *ctx, void **scratch, int64_t bytes)
{
    esa_cuda *c = ctx->cuda;
    if (bytes < 0 || bytes > c->arena_bytes) { /* negative: beyond 64 bits, which alloc refuses */
        trim(ctx);
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
