/* fuzz_session_seeds.h - seeds of the mask file and recording fuzzers, made by the library itself.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_FUZZ_SESSION_SEEDS_H
#define ESA_TESTS_FUZZ_SESSION_SEEDS_H

#include "fuzz_common.h"
#include "esa/esa_session.h"

/* Recordings of a few calls, and mask files of every kind from them. */
static int make_seeds(const char *folder)
{
    static float q[2 * 96 * 8], k[2 * 96 * 8], v[2 * 96 * 8], o[2 * 96 * 8];
    for (int i = 0; i < 2 * 96 * 8; i++) {
        q[i] = (float)(i * 37 % 101) / 25 - 2;
        k[i] = (float)(i * 53 % 97) / 24 - 2;
        v[i] = 1;
    }
    const esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 2, 96, 8),
                     tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, 2, 96, 8),
                     tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, 2, 96, 8),
                     to = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, 2, 96, 8);
    int bad = 0;
    for (int i = 0; i < 8; i++) {
        const int errors = i >= 6;
        esa_session_params p = esa_session_params_default();
        p.mode = ESA_SESSION_RECORD;
        p.layers = 2;
        p.steps = 3;
        p.branches = 1 + (i == 1);
        p.record_per_branch = 1;
        p.record_groups = i == 2 ? 2 : 0;
        p.model = i == 3 ? "a \"model\"" : NULL;
        if (errors) {
            p.select.selector = ESA_SELECT_ERROR;
            p.select.tail = i == 6 ? ESA_TAIL_LEVELS : ESA_TAIL_POOLED;
        }
        p.select.block_q = 48;
        p.select.block_k = i == 4 ? 48 : 16;
        p.select.layout.grid_q[0] = 2;
        p.select.layout.grid_q[1] = i == 5 ? 5 : 6;
        p.select.layout.grid_q[2] = 8;
        p.select.layout.text_back_q = i == 5 ? 16 : 0;
        esa_session *s = NULL;
        esa_status status = esa_session_create(fuzz_ctx, &s, &p);
        if (status == ESA_OK) status = esa_session_begin(s);
        for (int32_t step = 0; step < 3; step++)
            for (int32_t branch = 0; branch < p.branches; branch++) {
                if (status == ESA_OK) status = esa_session_step(s, step, branch);
                for (int32_t layer = 0; status == ESA_OK && layer < 2; layer++)
                    status = esa_session_attention(s, layer, ESA_CALL_SELF, &tq, &tk, &tv, &to,
                                                   NULL);
            }
        char recording[1024], output[1024];
        snprintf(recording, sizeof recording, "%s/recording%d", folder, i);
        if (status == ESA_OK) status = esa_session_save_recording(s, recording);
        esa_session_free(s);
        for (int32_t kind = 0; status == ESA_OK && kind < 3; kind++) {
            esa_mask_build b = esa_mask_build_default();
            const double budgets[2] = { 0.5, errors ? 0.7 : 0.3 };
            const char *from = recording;
            b.importance = kind;
            b.budgets = budgets;
            b.budget_count = 2;
            snprintf(output, sizeof output, "%s/masks%d.%d", folder, i, kind);
            status = esa_mask_file_build(fuzz_ctx, output, &from, 1, &b);
        }
        if (status != ESA_OK) fprintf(stderr, "%s\n", esa_ctx_error(fuzz_ctx));
        bad |= status != ESA_OK;
    }
    return bad;
}

#endif
