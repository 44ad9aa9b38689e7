/* counting.h - an allocator for a ctx, which counts and fails where it is told to.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_COUNTING_H
#define ESA_TESTS_COUNTING_H

#include <stdlib.h>
#include "esa/esa.h"

/* Counts what lives; with left >= 0 the allocation after `left` more fails, and only that one. */
typedef struct counting {
    int64_t live, total, left;
} counting;

static inline void *counting_alloc(void *user, uint64_t bytes)
{
    counting *c = user;
    c->total++;
    if (c->left >= 0 && c->left-- == 0) return NULL;
    void *p = aligned_alloc(64, (size_t)bytes);
    if (p) c->live++;
    return p;
}

static inline void counting_free(void *user, void *ptr, uint64_t bytes)
{
    (void)bytes;
    counting *c = user;
    c->live -= ptr != NULL;
    free(ptr);
}

/* Settings of a ctx that allocates so. */
static inline esa_ctx_params counting_params(counting *c, int32_t threads)
{
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    p.alloc = counting_alloc;
    p.dealloc = counting_free;
    p.alloc_user = c;
    return p;
}

#endif
