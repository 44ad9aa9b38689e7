/* ctx.h - what an esa_ctx holds: its error message, its guard and its scratch memory.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CTX_CTX_H
#define ESA_CTX_CTX_H

#include <stdatomic.h>
#include <stddef.h>
#include "base/engine.h"
#include "base/memory.h"

struct esa_pool;
struct esa_cpu_kernels;
struct esa_cuda;

/* How objects that may outlive their ctx (masks) read and free memory of a device. download waits
 * for the work that fills src. */
typedef struct esa_device_heap {
    int32_t ordinal;
    void (*release)(int32_t ordinal, void *ptr);
    esa_status (*download)(int32_t ordinal, void *dst, const void *src, int64_t bytes,
                           void *stream);
} esa_device_heap;

enum { ESA_CTX_FREE = 0, ESA_CTX_BUSY = 1, ESA_CTX_LENT = 2 };

struct esa_ctx {
    esa_allocator mem;
    void (*log)(void *user, int32_t level, const char *text);
    void *log_user;
    void *cuda_stream;
    int32_t cuda_device;
    struct esa_cuda *cuda; /* plugin and GPU (backend/plugin.c); NULL until first used */
    void (*cuda_close)(esa_ctx *ctx), (*cuda_trim)(esa_ctx *ctx); /* set together with cuda */
    struct esa_pool *pool;
    const struct esa_cpu_kernels *kern;
    void *arena; /* scratch kept between calls */
    int64_t arena_bytes;
    int64_t arena_peak;
    atomic_int busy;       /* ESA_CTX_*: whether a call is inside */
    int32_t lent;          /* callbacks that run now, each between lend and take_back */
    int64_t entries;       /* calls that took the guard so far; for tests */
    int64_t views_checked; /* tensor views checked so far; for tests */
    char error[512];
    char limit[160]; /* what made the threads fewer than asked for, or than the CPUs; "" */
};

/* Writes the message into ctx (NULL: nothing is written) and returns status. */
ESA_ENGINE esa_status esa_fail(esa_ctx *ctx, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ESA_ENGINE void esa_log(esa_ctx *ctx, int32_t level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Every public call that takes a ctx starts with enter and ends with leave. Internal functions call
 * neither. enter clears the message. If another call is inside, it returns ESA_ERR_STATE and
 * changes nothing. */
ESA_ENGINE esa_status esa_ctx_enter(esa_ctx *ctx);
ESA_ENGINE void esa_ctx_leave(esa_ctx *ctx);

/* A call that is inside uses these around a callback, so that the callback can make calls on the
 * same ctx, one at a time. take_back waits until the last of them has left. They nest: such a call
 * may lend the ctx again. The calls of the callback may use the scratch memory, so the lender must
 * keep nothing in it. */
ESA_ENGINE void esa_ctx_lend(esa_ctx *ctx);
ESA_ENGINE void esa_ctx_take_back(esa_ctx *ctx);

/* *scratch = at least bytes of memory, which the ctx owns and keeps until esa_ctx_trim. Its
 * contents are undefined. It is valid until the next call of this function or of esa_ctx_trim.
 * Fails with ESA_ERR_MEMORY, also for negative bytes (a size beyond 64 bits). */
esa_status esa_ctx_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

#endif
