/* ctx.h - what an esa_ctx holds, its error text, its guard and its scratch memory.
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

/* How objects that may outlive their ctx (masks) read and give back memory of a device. download
 * waits for the work that fills src. */
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
    struct esa_cuda *cuda; /* the plugin and the GPU, once used (attn/device.c); NULL before */
    void (*cuda_close)(esa_ctx *ctx), (*cuda_trim)(esa_ctx *ctx); /* set with it */
    struct esa_pool *pool;
    const struct esa_cpu_kernels *kern;
    void *arena; /* scratch kept between calls */
    int64_t arena_bytes;
    int64_t arena_peak;
    atomic_int busy;       /* ESA_CTX_*: whether a call is inside */
    int32_t lent;          /* 1 between lend and take_back */
    int64_t entries;       /* calls that took the guard so far; a test counts them */
    int64_t views_checked; /* likewise, tensor views that were validated */
    char error[512];
};

/* Writes the message into ctx (NULL: nothing is written) and returns status. */
ESA_ENGINE esa_status esa_fail(esa_ctx *ctx, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
ESA_ENGINE void esa_log(esa_ctx *ctx, int32_t level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Every public call that takes a ctx starts with enter (clears the error text; ESA_ERR_STATE if
 * another call is inside) and ends with leave. Internal functions never call them. */
ESA_ENGINE esa_status esa_ctx_enter(esa_ctx *ctx);
ESA_ENGINE void esa_ctx_leave(esa_ctx *ctx);

/* Around a callback of a call that is inside: calls of the callback may enter meanwhile, one at a
 * time. take_back waits until the last of them has left. */
ESA_ENGINE void esa_ctx_lend(esa_ctx *ctx);
ESA_ENGINE void esa_ctx_take_back(esa_ctx *ctx);

/* At least bytes of scratch, kept in the ctx until trim; grows, never shrinks. Contents are
 * undefined. */
esa_status esa_ctx_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

#endif
