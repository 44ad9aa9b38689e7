/* mask_file_test.h - what the mask file tests share: a context, a build, cells as bits.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SESSION_MASK_FILE_TEST_H
#define ESA_TESTS_SESSION_MASK_FILE_TEST_H

#include "session/mini_model.h"
#include <math.h>
#include "esa/esa_tensors.h"
#include "maskfile/open_file.h"

static const double budgets[] = { 0.5, 0.25, 0.7 };

static inline esa_mask_build build_of(int32_t importance, int32_t count)
{
    esa_mask_build b = esa_mask_build_default();
    b.importance = importance;
    b.budgets = budgets;
    b.budget_count = count;
    return b;
}

/* Bits of one cell; the caller frees. */
static inline uint8_t *bits_of(esa_mask_file *f, int32_t layer, int32_t step, int32_t branch,
                               double budget, int64_t *bytes)
{
    esa_mask *m;
    ok(ctx, esa_mask_file_get(f, &m, layer, step, branch, budget));
    const esa_mask_file_info i = info_of(f);
    *bytes = i.H * i.nq * ((i.nk + 7) / 8);
    uint8_t *bits = malloc((size_t)*bytes);
    assert_int_equal(esa_mask_to_bits(m, bits), ESA_OK);
    esa_mask_free(m);
    return bits;
}

/* A recording of two prompts. */
static inline void record(mini *m, esa_session_params *p, const char *path)
{
    mini_record(ctx, m, p, 5, 2, path);
}

#endif
