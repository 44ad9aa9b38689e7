/* any_set.h - a ctx for every set of kernels that can run here: those of this machine's levels, and
 * the sets over AMX tiles whose tile operations are plain C (common/tiles_emulated.h).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ANY_SET_H
#define ESA_TESTS_ANY_SET_H

#include "common/tiles_emulated.h"
#include "ctx/ctx.h"

enum {
    ANY_SET_LEVELS = 16,           /* more than there are; others are refused */
    ANY_SETS = ANY_SET_LEVELS + 2, /* and the emulated ones */
    ANY_SET_BEST = ESA_CPU_BEST
};

/* NULL: not a set of this machine. */
static inline esa_ctx *any_set_ctx(int32_t threads, int32_t set)
{
    esa_ctx *ctx;
    const esa_cpu_kernels *tiles = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    p.cpu_level = set < ANY_SET_LEVELS ? set : ESA_CPU_REF;
    if (set >= ANY_SET_LEVELS && !(tiles = tiles_emulated(set - ANY_SET_LEVELS))) return NULL;
    if (esa_ctx_create(&ctx, &p)) return NULL;
    if (tiles) ctx->kern = tiles;
    return ctx;
}

#endif
