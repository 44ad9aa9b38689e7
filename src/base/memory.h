/* memory.h - allocation, size arithmetic without overflow, and carving one block into parts.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_MEMORY_H
#define ESA_BASE_MEMORY_H

#include "base/engine.h"
#include "base/inline.h"
#include <stddef.h>

#include "esa/esa.h"

/* An allocator. Objects that may outlive their ctx (masks, files) keep a copy. */
typedef struct esa_allocator {
    void *(*alloc)(void *user, uint64_t bytes);
    void (*dealloc)(void *user, void *ptr, uint64_t bytes);
    void *user;
} esa_allocator;

/* Returns memory aligned to 64 bytes, or NULL if there is not enough, or if bytes is negative or
 * above 2^56. 0 bytes give a valid 1-byte block. esa_mem_free needs the size given at allocation
 * and accepts NULL. */
ESA_ENGINE void *esa_mem_alloc(const esa_allocator *mem, int64_t bytes);
ESA_ENGINE void *esa_mem_zalloc(const esa_allocator *mem, int64_t bytes);
ESA_ENGINE void esa_mem_free(const esa_allocator *mem, void *ptr, int64_t bytes);

/* a * b and a + b, or -1 for overflow or a negative operand. esa_mem_alloc(-1) fails, so sizes may
 * be chained. */
ESA_ENGINE int64_t esa_size_mul(int64_t a, int64_t b);
ESA_ENGINE int64_t esa_size_add(int64_t a, int64_t b);

/* Carves one block into parts. With base NULL it only counts bytes, so that the same code can first
 * measure and then place. */
typedef struct esa_carve {
    char *base;
    int64_t used;
} esa_carve;
/* Returns the next part, aligned to ESA_WORKSPACE_ALIGN; NULL while counting. The size saturates at
 * INT64_MAX instead of overflowing. */
ESA_ENGINE void *esa_carve_take(esa_carve *carve, int64_t bytes);

#endif
