/* plugin.c - finds and opens the CUDA plugin, and manages GPU scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* dladdr, dl_iterate_phdr, secure_getenv */
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
#include "base/pool.h"
#include "base/status.h"

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

#if defined(__linux__)
/* Writes the path that the system has for the file mapped at `here`; 0 if there is none. */
static int32_t mapped_path(char *path, size_t bytes)
{
    char line[4300];
    int32_t found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long long low, high;
        const char *name = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (name && sscanf(line, "%llx-%llx", &low, &high) == 2 && (uintptr_t)&here >= low &&
            (uintptr_t)&here < high)
            found = (size_t)snprintf(path, bytes, "%s", name) < bytes;
    }
    if (maps) fclose(maps);
    return found;
}
#endif

/* Writes the absolute path of the file that this code was loaded from; 0 if it cannot be found. For
 * an executable, dladdr gives the name it was called with, which is not a path if the shell found
 * it through $PATH. So the path of an executable comes from /proc/self/exe. For a library, dladdr
 * gives the path it was opened by. If that was relative, it meant a folder that may not be the
 * current one any more; so that path comes from /proc/self/maps. */
static int32_t own_path(char *path, size_t bytes)
{
#if defined(__linux__)
    int32_t executable = 0;
    dl_iterate_phdr(look_at_executable, &executable);
    if (executable) {
        const ssize_t length = readlink("/proc/self/exe", path, bytes);
        if (length < 1 || (size_t)length >= bytes) return 0;
        path[length] = 0;
        return path[0] == '/';
    }
#endif
    Dl_info info;
    if (!dladdr(&here, &info) || !info.dli_fname) return 0;
    if (info.dli_fname[0] == '/')
        return (size_t)snprintf(path, bytes, "%s", info.dli_fname) < bytes;
#if defined(__linux__)
    return mapped_path(path, bytes);
#else
    return 0;
#endif
}

/* Writes the path of the plugin beside the file of own_path; 0 if it does not fit. */
static int32_t path_beside(char *path, size_t bytes)
{
    if (!own_path(path, bytes)) return 0;
    char *const name = strrchr(path, '/') + 1;
    const size_t room = bytes - (size_t)(name - path);
    return (size_t)snprintf(name, room, PLUGIN_NAME) < room;
}

/* Writes $ESA_CUDA_LIB, or the path of the plugin beside libesa. Nothing is looked for in the
 * current folder, which may be anyone's when a GPU is first used. */
static esa_status plugin_path(esa_ctx *ctx, char *path, size_t bytes)
{
    const char *given = secure_getenv("ESA_CUDA_LIB");
    if (given && *given && given[0] != '/')
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "ESA_CUDA_LIB is %.200s, expected an absolute path (one that begins with "
                        "/)",
                        given);
    if (given && *given ? (size_t)snprintf(path, bytes, "%s", given) < bytes
                        : path_beside(path, bytes))
        return ESA_OK;
    return esa_fail(ctx, ESA_ERR_DEVICE,
                    "the folder of libesa, which holds " PLUGIN_NAME
                    ", could not be found: set ESA_CUDA_LIB");
}

static esa_status load(esa_ctx *ctx, esa_cuda *cuda)
{
    char path[4096], error[256] = "";
    ESA_TRY(plugin_path(ctx, path, sizeof path));
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
    const int32_t forked = esa_pool_forked(ctx->pool); /* CUDA does not work there */
    if (!forked) trim(ctx);
    if (ctx->cuda->dev && !forked) ctx->cuda->table->close(ctx->cuda->dev);
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
