/* random.c - uniformly random blocks of each row, for benchmarks and as a baseline.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row keeps max(1, round(budget * visible)) blocks. Every block gets a random value, and rows
 * pick as in the other selectors, so the rules for forced blocks and budgets are the same.
 * Values depend on (seed, branch, b, h, i) only, so the mask is the same on any machine with any
 * number of threads. */
#include "base/rng.h"
#include "select/rules.h"

typedef struct random_work {
    esa_rules rules;
    int32_t *quota;     /* [nq] */
    esa_picker *picker; /* [threads] */
    float *value;       /* [threads][nk] */
} random_work;

typedef struct job {
    const esa_select_args *args;
    const random_work *w;
    esa_mask *mask;
    int64_t b;
} job;

static void carve(random_work *w, esa_carve *c, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool);
    esa_rules_carve(&w->rules, c, a);
    w->quota = esa_carve_take(c, a->nq * (int64_t)sizeof(int32_t));
    w->value = esa_carve_take(c, threads * a->nk * (int64_t)sizeof(float));
    w->picker = esa_carve_take(c, threads * (int64_t)sizeof(esa_picker));
    for (int64_t t = 0; t < threads; t++) {
        esa_picker p;
        esa_picker_carve(&p, c, a->nk);
        if (w->picker) w->picker[t] = p;
    }
}

void esa_random_carve(const esa_select_args *args, esa_carve *c)
{
    random_work w;
    carve(&w, c, args);
}

static void pick_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const int64_t h = item / a->nq, i = item % a->nq, row = (x->b * a->Hq + h) * a->nq + i;
    float *value = x->w->value + worker * a->nk;
    esa_rng rng = esa_rng_of_row(a->params.seed, a->params.branch, row);
    for (int32_t j = 0; j < x->w->rules.visible[i]; j++) value[j] = esa_rng_unit(&rng);
    esa_picker *p = &x->w->picker[worker];
    esa_rules_pick(p, &x->w->rules, value, i, x->w->quota[i], a->nk);
    esa_mask_set_row(x->mask, row, p->keep);
}

void esa_random_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    random_work w;
    carve(&w, &c, args);
    for (int64_t b = 0; b < args->B; b++) {
        const job x = { args, &w, mask, b };
        int64_t total = 0;
        esa_rules_fill(&w.rules, args, b);
        for (int64_t i = 0; i < args->nq; i++)
            total += esa_row_wish(&args->params, w.rules.visible[i]);
        esa_budget_spread(w.quota, w.rules.visible, w.rules.least, args->nq, total);
        esa_pool_run(args->pool, pick_item, (void *)&x, args->Hq * args->nq);
    }
}
