/* fuzz_choice.c - any bytes as scores of the error selector: the choice ends, keeps its budget and
 * its promises, and a larger budget lowers no block.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first eight bytes give the shape, the rest are scores. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "ctx/ctx.h"
#include "rules/levels.h"
#include "select/select.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { MOST = 4096 }; /* blocks of a problem */

static esa_ctx *ctx;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    esa_ctx_params p = esa_ctx_params_default();
    (void)argc;
    (void)argv;
    p.threads = 1;
    p.cpu_level = ESA_CPU_REF;
    if (esa_ctx_create(&ctx, &p) != ESA_OK) exit(1);
    return 0;
}

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken promise: %s\n", what);
    abort();
}

/* Runs the choice and writes ESA_LEVEL_* of every block; checks lists and cost. */
static void choose(uint8_t *level, const esa_select_args *a, const float *errors)
{
    const esa_level_costs cost = esa_level_costs_of(&a->params);
    const int64_t rows = a->Hq * a->nq, bytes = esa_select_workspace(a);
    esa_mask *mask = esa_mask_new(&ctx->mem, 1, a->Hq, a->Nq, a->Nk, a->nq, a->nk,
                                  a->params.block_q, a->params.block_k);
    void *ws = esa_mem_alloc(&ctx->mem, bytes);
    if (!mask || !ws || (cost.levels == 2 && !esa_mask_add_fine(mask, a->params.fine))) exit(1);
    esa_select_from_errors(a, mask, errors, ws);
    int64_t spent = 0;
    memset(level, ESA_LEVEL_MEAN, (size_t)(rows * a->nk));
    for (int64_t r = 0; r < rows; r++) {
        must(mask->count[r] >= 1 && mask->count[r] <= a->nk, "a row has an exact block");
        for (int32_t l = 0; l < cost.levels; l++) {
            const uint16_t *index = (l ? mask->fine_index : mask->index) + r * mask->cap;
            const int32_t n = l ? mask->fine_count[r] : mask->count[r];
            for (int32_t i = 0; i < n; i++) {
                must(index[i] < a->nk && (i == 0 || index[i] > index[i - 1]), "lists ascend");
                must(level[r * a->nk + index[i]] == ESA_LEVEL_MEAN, "a block is in one list");
                level[r * a->nk + index[i]] = (uint8_t)l;
            }
        }
    }
    for (int64_t i = 0; i < rows * a->nk; i++)
        spent += level[i] == ESA_LEVEL_EXACT  ? cost.exact
                 : level[i] == ESA_LEVEL_FINE ? cost.fine
                                              : cost.mean;
    const int64_t budget = esa_level_budget(&cost, a->params.budget, rows * a->nk),
                  least = rows * a->nk * cost.mean + rows * (cost.exact - cost.mean),
                  step = cost.exact - cost.mean;
    must(spent <= esa_max64(budget, least), "no more than the budget is spent");
    must(spent > budget - step || spent == rows * a->nk * cost.exact, "the budget is used");
    esa_mask_free(mask);
    esa_mem_free(&ctx->mem, ws, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static float errors[2 * MOST];
    static uint8_t small[MOST], large[MOST];
    if (size < 8) return 0;
    esa_select_args a;
    memset(&a, 0, sizeof a);
    a.params = esa_select_params_default(ESA_SELECT_ERROR);
    a.params.layout.protect_first_frame = 0;
    a.params.layout.order = ESA_ORDER_RASTER;
    a.params.scale = 1.0;
    a.params.block_q = a.params.block_k = 16 * (1 + data[0] % 16);
    a.params.tail = data[1] % 3 == 2 ? ESA_TAIL_LEVELS : data[1] % 3;
    a.params.fine = 2 << data[2] % 3;
    a.params.budget = data[3] / 255.0;
    a.kern = ctx->kern;
    a.pool = ctx->pool;
    a.B = a.Hkv = 1;
    a.Hq = 1 + data[4] % 4;
    a.nq = 1 + data[5] % 32;
    a.nk = 1 + data[6] % 32;
    a.Nq = a.nq * a.params.block_q;
    a.Nk = a.nk * a.params.block_k;
    a.D = 1;
    const size_t cells = (size_t)(a.Hq * a.nq * a.nk), given = (size - 8) / sizeof(float);
    memset(errors, 0, sizeof errors);
    for (size_t i = 0; i < 2 * cells && given; i++) /* repeated if there are too few */
        memcpy(&errors[i], data + 8 + i % given * sizeof(float), sizeof(float));
    choose(small, &a, errors);
    a.params.budget += (1.0 - a.params.budget) * data[7] / 255.0;
    choose(large, &a, errors);
    for (size_t i = 0; i < cells; i++) must(large[i] <= small[i], "a larger budget lowers nothing");
    return 0;
}
