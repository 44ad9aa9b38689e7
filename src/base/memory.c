/* memory.c - allocation, size arithmetic without overflow, and carving one block into parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <string.h>

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
