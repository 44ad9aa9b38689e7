/* error_choice.c - which blocks are exact, which are on the fine level: the rule of rules/levels.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One budget for all heads and rows of a batch entry. The blocks that are exact in any case are
 * paid for first. Then three rounds of a radix search over all steps find the gain at which the
 * budget runs out, a walk over the rows finds the block among equal gains, and every row is written
 * by itself. Threads only add up integers, so their number changes nothing. */
#include <string.h>
#include "select/error.h"

typedef struct job {
    const esa_select_args *args;
    const esa_error_choice *w;
    const esa_rules *rules;
    const float *errors;
    int64_t level_stride, b;
    esa_mask *mask;
    esa_level_costs costs;
    esa_level_cut cut;
    int32_t round;
} job;

void esa_error_choice_carve(esa_error_choice *w, esa_carve *c, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool), rows = a->Hq * a->nq;
    w->best = esa_carve_take(c, rows * (int64_t)sizeof(int32_t));
    w->weight = esa_carve_take(c, rows * (int64_t)sizeof(int64_t));
    w->bins = esa_carve_take(c, threads * ESA_CUT_BINS * (int64_t)sizeof(int64_t));
    w->keep = esa_carve_take(c, threads * a->nk);
}

/* Sets the worker's keep to the blocks of a row that are exact in any case; returns it. */
static uint8_t *exact_anyway(const job *x, int64_t row, int32_t worker)
{
    uint8_t *keep = x->w->keep + worker * x->args->nk;
    esa_rules_forced(keep, x->rules, row % x->args->nq, x->args->nk);
    if (x->w->best[row] >= 0) keep[x->w->best[row]] = 1;
    return keep;
}

/* The best block of a row, and the columns that its exact blocks cost beyond one mean each. */
static void best_item(void *arg, int64_t row, int32_t worker)
{
    const job *x = arg;
    const int32_t visible = x->rules->visible[row % x->args->nq];
    const float *e = x->errors + row * x->args->nk;
    int32_t best = visible > 0 ? 0 : -1;
    for (int32_t j = 1; j < visible; j++)
        if (esa_gain_key(e[j]) > esa_gain_key(e[best])) best = j;
    x->w->best[row] = best;
    const uint8_t *keep = exact_anyway(x, row, worker);
    int64_t exact = 0;
    for (int32_t j = 0; j < visible; j++) exact += keep[j];
    x->w->weight[row] = exact * (x->costs.exact - x->costs.mean);
}

static esa_level_steps steps_of(const job *x, int64_t row, int32_t j)
{
    const float *e = x->errors + row * x->args->nk + j;
    return esa_level_steps_of(&x->costs, e[0], x->costs.levels > 1 ? e[x->level_stride] : 0.0f);
}

/* Adds the weights of a row's steps to the worker's bins. */
static void bins_item(void *arg, int64_t row, int32_t worker)
{
    const job *x = arg;
    const int32_t visible = x->rules->visible[row % x->args->nq];
    const uint8_t *keep = exact_anyway(x, row, worker);
    int64_t *bins = x->w->bins + worker * ESA_CUT_BINS;
    for (int32_t j = 0; j < visible; j++) {
        if (keep[j]) continue;
        const esa_level_steps s = steps_of(x, row, j);
        for (int32_t i = 0; i <= s.via_fine; i++) {
            const int32_t d = esa_cut_digit(s.key[i], x->cut.key, x->round);
            if (d >= 0) bins[d] += s.weight[i];
        }
    }
}

/* Weight of a row's steps whose gain is exactly that of the cut. */
static void ties_item(void *arg, int64_t row, int32_t worker)
{
    const job *x = arg;
    const int32_t visible = x->rules->visible[row % x->args->nq];
    const uint8_t *keep = exact_anyway(x, row, worker);
    int64_t sum = 0;
    for (int32_t j = 0; j < visible; j++) {
        if (keep[j]) continue;
        const esa_level_steps s = steps_of(x, row, j);
        for (int32_t i = 0; i <= s.via_fine; i++) sum += s.key[i] == x->cut.key ? s.weight[i] : 0;
    }
    x->w->weight[row] = sum;
}

/* Among the steps with the gain of the cut: the first that does not fit. */
static void cut_ties(job *x, int64_t left)
{
    const esa_select_args *a = x->args;
    int64_t row = 0;
    esa_pool_run(a->pool, ties_item, x, a->Hq * a->nq);
    for (; row < a->Hq * a->nq - 1 && x->w->weight[row] <= left; row++) left -= x->w->weight[row];
    const int32_t visible = x->rules->visible[row % a->nq];
    const uint8_t *keep = exact_anyway(x, row, 0);
    for (int32_t j = 0; j < visible; j++) {
        if (keep[j]) continue;
        const esa_level_steps s = steps_of(x, row, j);
        for (int32_t i = 0; i <= s.via_fine; i++) {
            if (s.key[i] != x->cut.key) continue;
            x->cut.first_out = row * a->nk + j;
            if (s.weight[i] > left) return;
            left -= s.weight[i];
        }
    }
}

/* Finds the cut at which the columns that are left run out. */
static void find_cut(job *x, int64_t left)
{
    const esa_select_args *a = x->args;
    const int64_t threads = esa_pool_threads(a->pool);
    int64_t *bins = x->w->bins;
    x->cut.key = 0;
    x->cut.first_out = INT64_MAX;
    for (x->round = 0; x->round < ESA_CUT_ROUNDS; x->round++) {
        memset(bins, 0, (size_t)(threads * ESA_CUT_BINS) * sizeof *bins);
        esa_pool_run(a->pool, bins_item, x, a->Hq * a->nq);
        for (int64_t t = 1; t < threads; t++)
            for (int32_t d = 0; d < ESA_CUT_BINS; d++) bins[d] += bins[t * ESA_CUT_BINS + d];
        const int32_t digit = esa_cut_walk(bins, &left);
        if (digit < 0) return; /* everything fits */
        x->cut.key |= (uint32_t)digit << esa_cut_shift(x->round);
    }
    cut_ties(x, left);
}

/* Writes the lists of a row. */
static void write_item(void *arg, int64_t row, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    esa_mask *mask = x->mask;
    const int32_t visible = x->rules->visible[row % a->nq];
    const int64_t at = x->b * a->Hq * a->nq + row;
    const uint8_t *keep = exact_anyway(x, row, worker);
    uint16_t *exact = mask->index + at * mask->cap,
             *fine = mask->fine_index ? mask->fine_index + at * mask->cap : NULL;
    int32_t exacts = 0, fines = 0;
    for (int32_t j = 0; j < visible; j++) {
        int32_t level = ESA_LEVEL_EXACT;
        if (!keep[j]) {
            const esa_level_steps s = steps_of(x, row, j);
            level = esa_level_of(&s, &x->cut, row * a->nk + j);
        }
        if (level == ESA_LEVEL_EXACT)
            exact[exacts++] = (uint16_t)j;
        else if (level == ESA_LEVEL_FINE && fine)
            fine[fines++] = (uint16_t)j;
    }
    mask->count[at] = exacts;
    if (mask->fine_count) mask->fine_count[at] = fines;
}

void esa_error_choice_run(esa_mask *mask, const esa_error_choice *w, const esa_select_args *a,
                          const esa_rules *rules, const float *errors, int64_t level_stride,
                          int64_t b)
{
    job x = { .args = a,
              .w = w,
              .rules = rules,
              .errors = errors,
              .level_stride = level_stride,
              .b = b,
              .mask = mask,
              .costs = esa_level_costs_of(&a->params) };
    const int64_t rows = a->Hq * a->nq, existing = a->Hq * rules->seen;
    int64_t left = esa_level_budget(&x.costs, a->params.budget, existing) - existing * x.costs.mean;
    esa_pool_run(a->pool, best_item, &x, rows);
    for (int64_t r = 0; r < rows; r++) left -= w->weight[r];
    find_cut(&x, esa_max64(0, left));
    esa_pool_run(a->pool, write_item, &x, rows);
}
