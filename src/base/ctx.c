/* ctx.c - error text, memory, scratch and the one-call-at-a-time guard of a ctx.
 * SPDX-License-Identifier: Apache-2.0
 *
 * esa_ctx_create lives in src/attn/context.c, because it chooses kernels; everything here is below the kernels. */
#include "base/ctx.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

esa_status esa_fail(esa_ctx *ctx, esa_status status, const char *format, ...)
{
    if (ctx) {
        va_list args;
        va_start(args, format);
        vsnprintf(ctx->error, sizeof ctx->error, format, args);
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
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ctx->log(ctx->log_user, level, text);
}

esa_status esa_ctx_enter(esa_ctx *ctx)
{
    if (!ctx) return ESA_ERR_ARGUMENT;
    /* A second thread must not touch the error text of the first one's call, so nothing is written here. */
    if (atomic_exchange(&ctx->busy, 1)) return ESA_ERR_STATE;
    ctx->error[0] = 0;
    return ESA_OK;
}

void esa_ctx_leave(esa_ctx *ctx) { atomic_store(&ctx->busy, 0); }

int64_t esa_size_mul(int64_t a, int64_t b)
{
    int64_t r;
    if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &r)) return -1;
    return r;
}

int64_t esa_size_add(int64_t a, int64_t b)
{
    int64_t r;
    if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &r)) return -1;
    return r;
}

void *esa_mem_alloc(const esa_allocator *mem, int64_t bytes)
{
    if (bytes < 0 || bytes > (INT64_C(1) << 56)) return NULL;
    const uint64_t size = ((uint64_t)(bytes ? bytes : 1) + 63u) & ~(uint64_t)63u;
    return mem->alloc(mem->user, size);
}

void *esa_mem_zalloc(const esa_allocator *mem, int64_t bytes)
{
    void *p = esa_mem_alloc(mem, bytes);
    if (p) memset(p, 0, (size_t)bytes);
    return p;
}

void esa_mem_free(const esa_allocator *mem, void *ptr, int64_t bytes)
{
    if (!ptr) return;
    mem->dealloc(mem->user, ptr, ((uint64_t)(bytes ? bytes : 1) + 63u) & ~(uint64_t)63u);
}

esa_status esa_ctx_scratch(esa_ctx *ctx, void **scratch, int64_t bytes)
{
    if (bytes > ctx->arena_bytes) {
        /* Freed before the new one is taken, so that the two never stand side by side. */
        esa_mem_free(&ctx->mem, ctx->arena, ctx->arena_bytes);
        ctx->arena_bytes = 0;
        ctx->arena = esa_mem_alloc(&ctx->mem, bytes);
        if (!ctx->arena)
            return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory: %lld bytes of scratch could not be allocated", (long long)bytes);
        ctx->arena_bytes = bytes;
        if (bytes > ctx->arena_peak) ctx->arena_peak = bytes;
    }
    *scratch = ctx->arena;
    return ESA_OK;
}

void *esa_carve_take(esa_carve *carve, int64_t bytes)
{
    const int64_t a = ESA_WORKSPACE_ALIGN;
    if (carve->used == INT64_MAX || bytes < 0 || bytes > INT64_MAX - carve->used - a) {
        carve->used = INT64_MAX;
        return NULL;
    }
    void *part = carve->base ? carve->base + carve->used : NULL;
    carve->used += (bytes + a - 1) / a * a;
    return part;
}
