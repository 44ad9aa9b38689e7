/* recorded_errors.h - what tests of recordings of errors share: recordings of the mini model, mask
 * files built from them, and sessions that run from a file.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SESSION_RECORDED_ERRORS_H
#define ESA_TESTS_SESSION_RECORDED_ERRORS_H

#define ESA_EXPERIMENTAL
#include "session/mini_model.h"
#include "common/on_gpu.h"
#include "maskfile/open_file.h"

/* The groups are those of a running model, so that random data needs both levels. */
static inline esa_session_params error_params(const mini *m, int32_t tail)
{
    esa_session_params p = mini_params(m, ESA_SESSION_RECORD);
    p.select.selector = ESA_SELECT_ERROR;
    p.select.tail = tail;
    p.select.group_q = 8;
    p.select.group_k = 2;
    return p;
}

/* Builds a file for `count` works from one recording. */
static inline void build(const char *output, const char *recording, const double *works,
                         int32_t count)
{
    esa_mask_build b = esa_mask_build_default();
    b.budgets = works;
    b.budget_count = count;
    ok(ctx, esa_mask_file_build(ctx, output, &recording, 1, &b));
}

static inline double density_of(esa_mask_file *f, int32_t layer, int32_t step, double work)
{
    double d = -1;
    ok(ctx, esa_mask_file_density(f, &d, layer, step, 0, work));
    return d;
}

/* Session params that run from a file. Its exact rows are not set: the file brings them. */
static inline esa_session_params cached_params(const mini *m, esa_mask_file *f, double budget)
{
    esa_session_params p = mini_params(m, ESA_SESSION_CACHED);
    p.masks = f;
    p.select.budget = budget;
    p.attention.tail = ESA_TAIL_LEVELS;
    return p;
}

static inline esa_session_stats run_cached(mini *m, const esa_session_params *p, uint64_t *hash)
{
    esa_session *x;
    esa_session_stats stats = { .struct_size = sizeof stats };
    ok(ctx, esa_session_create(ctx, &x, p));
    ok(ctx, mini_run(m, x, hash));
    ok(ctx, esa_session_get_stats(x, &stats, -1, -1));
    esa_session_free(x);
    return stats;
}

#endif
