/* ctx.c - makes and frees a ctx: message, log, scratch memory, and the guard that admits one call
 * at a time.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_getaffinity */
#include "ctx/ctx.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/host_limits.h"
#include "base/number.h"
#include "base/pool.h"
#include "cpu/cpu.h"

static void *default_alloc(void *user, uint64_t bytes)
{
    (void)user;
    return aligned_alloc(64, (size_t)bytes);
}

static void default_dealloc(void *user, void *ptr, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}

esa_ctx_params esa_ctx_params_default(void)
{
    esa_ctx_params p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    return p;
}

/* CPUs this process may run on (a container or taskset may grant fewer than the machine has). */
static int32_t usable_cpus(void)
{
    long n = 0;
#if defined(__linux__)
    cpu_set_t set[8]; /* of 1024 CPUs each; the call fails if the machine may have more */
    if (!sched_getaffinity(0, sizeof set, set)) n = CPU_COUNT_S(sizeof set, set);
#endif
    if (n < 1) n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > INT32_MAX ? INT32_MAX : (int32_t)n;
}

/* Threads for a caller who asks for none: one per CPU, as far as a CPU quota pays for them. A part
 * of a CPU is worth a thread. Notes in ctx what made them fewer. */
static int32_t default_threads(esa_ctx *ctx)
{
    const int32_t cpus = usable_cpus();
    const int64_t quota = esa_host_quota("");
    int64_t n = cpus;
    if (quota < n * 1000) {
        n = esa_ceil_div(quota, 1000);
        esa_text_format(ctx->limit, sizeof ctx->limit,
                        "the control group's CPU quota is %.2f of the %d CPUs of this process",
                        1e-3 * (double)quota, (int)cpus);
    } else if (n > ESA_MAX_THREADS) {
        n = ESA_MAX_THREADS;
        snprintf(ctx->limit, sizeof ctx->limit, "%d is the most, for %d CPUs", ESA_MAX_THREADS,
                 (int)cpus);
    }
    return (int32_t)n;
}

/* Notes in ctx that the system refused threads. */
static void note_refused(esa_ctx *ctx, int32_t asked)
{
    snprintf(ctx->limit, sizeof ctx->limit, "the system started only %d of %d threads: %s",
             (int)esa_pool_threads(ctx->pool), (int)asked, strerror(esa_pool_refused(ctx->pool)));
    esa_log(ctx, ESA_LOG_WARNING, "%s", ctx->limit);
}

esa_status esa_ctx_create(esa_ctx **out, const esa_ctx_params *params)
{
    if (!out) return ESA_ERR_ARGUMENT;
    *out = NULL;
    if (params && params->struct_size != sizeof *params) return ESA_ERR_VERSION;
    const esa_ctx_params p = params ? *params : esa_ctx_params_default();
    for (int32_t i = 0; i < 4; i++)
        if (p.reserved[i]) return ESA_ERR_ARGUMENT;
    if (p.threads < 0 || p.threads > ESA_MAX_THREADS || !p.alloc != !p.dealloc)
        return ESA_ERR_ARGUMENT;
    if (p.cpu_level < ESA_CPU_BEST || p.cpu_level >= ESA_CPU_LEVELS) return ESA_ERR_ARGUMENT;
    const esa_cpu_kernels *kern = esa_cpu_kernels_get(p.cpu_level);
    /* a level this machine does not have, or an unknown $ESA_CPU */
    if (!kern) return ESA_ERR_UNSUPPORTED;

    esa_allocator mem = { default_alloc, default_dealloc, NULL };
    if (p.alloc) mem = (esa_allocator){ p.alloc, p.dealloc, p.alloc_user };
    esa_ctx *ctx = esa_mem_zalloc(&mem, sizeof *ctx);
    if (!ctx) return ESA_ERR_MEMORY;
    ctx->mem = mem;
    ctx->log = p.log;
    ctx->log_user = p.log_user;
    ctx->cuda_stream = p.cuda_stream;
    ctx->cuda_device = p.cuda_device;
    ctx->kern = kern;
    atomic_init(&ctx->busy, 0);
    const int32_t threads = p.threads ? p.threads : default_threads(ctx);
    const esa_status status = esa_pool_create(&ctx->pool, threads, &mem);
    if (status) {
        esa_mem_free(&mem, ctx, sizeof *ctx);
        return status;
    }
    if (esa_pool_refused(ctx->pool)) note_refused(ctx, threads);
    esa_log(ctx, ESA_LOG_INFO, "esa %s: CPU kernels %s, %d threads", esa_version(), kern->name,
            (int)esa_pool_threads(ctx->pool));
    *out = ctx;
    return ESA_OK;
}

void esa_ctx_free(esa_ctx *ctx)
{
    if (!ctx) return;
    if (ctx->cuda) ctx->cuda_close(ctx);
    esa_pool_free(ctx->pool);
    esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
    const esa_allocator mem = ctx->mem;
    esa_mem_free(&mem, ctx, sizeof *ctx);
}

const char *esa_ctx_error(const esa_ctx *ctx) { return ctx ? ctx->error : ""; }
int32_t esa_ctx_threads(const esa_ctx *ctx) { return ctx ? esa_pool_threads(ctx->pool) : 0; }
const char *esa_ctx_limit(const esa_ctx *ctx) { return ctx ? ctx->limit : ""; }
const char *esa_ctx_cpu(const esa_ctx *ctx) { return ctx ? ctx->kern->name : ""; }

void esa_ctx_memory(const esa_ctx *ctx, int64_t *held_bytes, int64_t *peak_bytes)
{
    if (held_bytes) *held_bytes = ctx ? ctx->arena_bytes : 0;
    if (peak_bytes) *peak_bytes = ctx ? ctx->arena_peak : 0;
}

void esa_ctx_trim(esa_ctx *ctx)
{
    if (!ctx || esa_ctx_enter(ctx)) return;
    esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
    ctx->arena = NULL;
    ctx->arena_bytes = 0;
    if (ctx->cuda) ctx->cuda_trim(ctx);
    esa_ctx_leave(ctx);
}

esa_status esa_fail(esa_ctx *ctx, esa_status status, const char *format, ...)
{
    if (ctx) {
        va_list args;
        va_start(args, format);
        esa_text_vformat(ctx->error, sizeof ctx->error, format, args);
        va_end(args);
        if (ctx->log) ctx->log(ctx->log_user, ESA_LOG_ERROR, ctx->error);
    }
    return status;
}

void esa_log(esa_ctx *ctx, int32_t level, const char *format, ...)
{
    if (!ctx || !ctx->log) return;
    char text[512];
    va_list args;
    va_start(args, format);
    esa_text_vformat(text, sizeof text, format, args);
    va_end(args);
    ctx->log(ctx->log_user, level, text);
}

/* Takes the guard if it is in this state. */
static int32_t take(esa_ctx *ctx, int state)
{
    return atomic_compare_exchange_strong(&ctx->busy, &state, ESA_CTX_BUSY);
}

esa_status esa_ctx_enter(esa_ctx *ctx)
{
    if (!ctx) return ESA_ERR_ARGUMENT;
    /* The message belongs to the call that is inside, so this one writes none. */
    if (!take(ctx, ESA_CTX_FREE) && !take(ctx, ESA_CTX_LENT)) return ESA_ERR_STATE;
    if (esa_pool_forked(ctx->pool)) {
        esa_fail(ctx, ESA_ERR_STATE,
                 "this ctx was made before fork(), and its threads do not exist in the child "
                 "process: make a ctx there");
        esa_ctx_leave(ctx);
        return ESA_ERR_STATE;
    }
    ctx->error[0] = 0;
    ctx->entries++;
    return ESA_OK;
}

void esa_ctx_leave(esa_ctx *ctx)
{
    atomic_store(&ctx->busy, ctx->lent ? ESA_CTX_LENT : ESA_CTX_FREE);
}

void esa_ctx_lend(esa_ctx *ctx)
{
    ctx->lent++;
    esa_ctx_leave(ctx);
}

void esa_ctx_take_back(esa_ctx *ctx)
{
    while (!take(ctx, ESA_CTX_LENT)) {
        if (esa_pool_forked(ctx->pool)) { /* whoever was inside does not exist in this process */
            atomic_store(&ctx->busy, ESA_CTX_BUSY);
            break;
        }
        sched_yield();
    }
    ctx->lent--;
}

esa_status esa_ctx_scratch(esa_ctx *ctx, void **scratch, int64_t bytes)
{
    if (bytes < 0 || bytes > ctx->arena_bytes) { /* negative: beyond 64 bits, which alloc refuses */
        /* Free the old memory first, so that the two are never held together. */
        esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
        ctx->arena_bytes = 0;
        ctx->arena = esa_mem_alloc(&ctx->mem, bytes);
        if (!ctx->arena)
            return esa_fail(ctx, ESA_ERR_MEMORY,
                            "out of memory: %lld bytes of scratch could not be allocated",
                            (long long)bytes);
        ctx->arena_bytes = bytes;
        if (bytes > ctx->arena_peak) ctx->arena_peak = bytes;
    }
    *scratch = ctx->arena;
    return ESA_OK;
}
