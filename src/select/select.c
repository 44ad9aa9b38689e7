/* select.c - runs the selector named in the params, and knows its block counts and scratch size.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/rules.h"

/* The functions of each row of rules/selectors.h. FULL needs none: esa_select_run keeps every block
 * itself. */
#define esa_full_carve         NULL
#define esa_full_run           NULL
#define FUNCTIONS(ID, id, ...) { esa_##id##_carve, esa_##id##_run },
static const struct {
    void (*carve)(const esa_select_args *args, esa_carve *carve);
    void (*run)(const esa_select_args *args, esa_mask *mask, void *ws);
} functions[] = { ESA_SELECTORS(FUNCTIONS) };

void esa_select_blocks(const esa_select_params *p, int64_t Nq, int64_t Nk, int64_t *nq, int64_t *nk,
                       int32_t *runnable)
{
    *nq = esa_ceil_div(Nq, p->block_q);
    *nk = esa_ceil_div(Nk, p->block_k);
    *runnable = 1;
    if (!esa_pools_apart(p)) return;
    /* Image and text are pooled separately, which gives one block more than the kernel has
     * if neither fills its last block. Equal counts run even if the block borders differ, as
     * in the original. */
    const int64_t text_q = (int64_t)p->layout.text_front_q + p->layout.text_back_q;
    const int64_t text_k = (int64_t)p->layout.text_front_k + p->layout.text_back_k;
    const int64_t pq = esa_ceil_div(Nq - text_q, p->block_q) + esa_ceil_div(text_q, p->block_q);
    const int64_t pk = esa_ceil_div(Nk - text_k, p->block_k) + esa_ceil_div(text_k, p->block_k);
    *runnable = pq == *nq && pk == *nk;
    *nq = pq;
    *nk = pk;
}

int64_t esa_select_workspace(const esa_select_args *args)
{
    esa_carve c = { NULL, 0 };
    esa_rules rules;
    esa_rules_carve(&rules, &c, args); /* to count the existing blocks */
    const int32_t selector = args->params.selector;
    if (functions[selector].carve) functions[selector].carve(args, &c);
    return c.used;
}

static void full_run(const esa_select_args *args, esa_mask *mask, const esa_rules *rules, int64_t b)
{
    for (int64_t h = 0; h < args->Hq; h++)
        for (int64_t i = 0; i < args->nq; i++) {
            const int64_t row = (b * args->Hq + h) * args->nq + i;
            for (int32_t j = 0; j < rules->visible[i]; j++)
                mask->index[row * mask->cap + j] = (uint16_t)j;
            mask->count[row] = rules->visible[i];
            if (mask->fine_count) mask->fine_count[row] = 0;
        }
}

void esa_select_sign(const esa_select_args *args, esa_mask *mask, int64_t existing)
{
    const esa_select_params *p = &args->params;
    int64_t nq, nk;
    esa_select_blocks(p, args->Nq, args->Nk, &nq, &nk, &mask->runnable);
    mask->selector = p->selector;
    mask->mode = p->mode;
    mask->causal = p->causal;
    mask->asked = esa_selector_has(p->selector, ESA_ROW_KEEPS_ALL) ? 1.0 : p->budget;
    mask->existing = existing;
    mask->layout = p->layout;
    mask->filled = 1;
}

void esa_select_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    esa_rules rules;
    int64_t existing = 0;
    const int32_t full = esa_keeps_all(&args->params);
    esa_rules_carve(&rules, &c, args);
    for (int64_t b = 0; b < args->B; b++) {
        esa_rules_fill(&rules, args, b);
        existing += args->Hq * rules.seen;
        if (full) full_run(args, mask, &rules, b);
    }
    void *rest = (char *)ws + c.used;
    if (!full) functions[args->params.selector].run(args, mask, rest);
    esa_select_sign(args, mask, existing);
}
