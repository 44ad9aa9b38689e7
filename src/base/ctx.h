/* ctx.h - what an esa_ctx holds, error text, memory. Includes nothing but the public header and inline.h.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_CTX_H
#define ESA_BASE_CTX_H

#include <stdatomic.h>
#include <stddef.h>
#include "base/inline.h"
#include "esa/esa.h"

struct esa_pool;
struct esa_cpu_kernels;
struct esa_cuda;

/* Where memory comes from. Objects that may outlive their ctx (masks, files) keep a copy of this. */
typedef struct esa_allocator {
    void *(*alloc)(void *user, uint64_t bytes);
    void  (*dealloc)(void *user, void *ptr, uint64_t bytes);
    void   *user;
} esa_allocator;

/* How objects that may outlive their ctx (masks) read and give back memory of a device. download waits for the work that
 * fills src. */
typedef struct esa_device_heap {
    int32_t ordinal;
    void (*release)(int32_t ordinal, void *ptr);
    esa_status (*download)(int32_t ordinal, void *dst, const void *src, int64_t bytes, void *stream);
} esa_device_heap;

struct esa_ctx {
    esa_allocator mem;
    void (*log)(void *user, int32_t level, const char *text);
    void *log_user;
    void *cuda_stream;
    int32_t cuda_device;
    struct esa_cuda *cuda;  /* the plugin and the GPU, once used (attn/device.c); NULL before */
    struct esa_pool *pool;
    const struct esa_cpu_kernels *kern;
    void   *arena;          /* scratch kept between calls */
    int64_t arena_bytes;
    int64_t arena_peak;
    atomic_int busy;        /* 1 while a call is inside */
    char error[512];
};

/* Writes the sentence into ctx (NULL allowed: nothing is written) and returns status. */
esa_status esa_fail(esa_ctx *ctx, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void esa_log(esa_ctx *ctx, int32_t level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Every public call that takes a ctx starts with enter (clears the error text; ESA_ERR_STATE if another call is inside) and
 * ends with leave. Internal functions never call them. */
esa_status esa_ctx_enter(esa_ctx *ctx);
void       esa_ctx_leave(esa_ctx *ctx);

/* 64-byte aligned; NULL when out of memory, for negative sizes and for overflow. bytes 0 gives a valid 1-byte block.
 * esa_mem_free needs the size given at allocation and accepts NULL. */
void *esa_mem_alloc(const esa_allocator *mem, int64_t bytes);
void *esa_mem_zalloc(const esa_allocator *mem, int64_t bytes);
void  esa_mem_free(const esa_allocator *mem, void *ptr, int64_t bytes);

/* a * b, or -1 on overflow or a negative factor. esa_mem_alloc(-1) fails cleanly, so sizes may be chained. */
int64_t esa_size_mul(int64_t a, int64_t b);
int64_t esa_size_add(int64_t a, int64_t b);

/* At least bytes of scratch, kept in the ctx until trim; grows, never shrinks. Contents are undefined. */
esa_status esa_ctx_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

/* Carving one block into parts. With base NULL it only counts, so the same code measures and places. */
typedef struct esa_carve {
    char   *base;
    int64_t used;
} esa_carve;
/* The next part, ESA_WORKSPACE_ALIGN aligned (NULL while counting). Saturates at INT64_MAX instead of overflowing. */
void *esa_carve_take(esa_carve *carve, int64_t bytes);

#endif
