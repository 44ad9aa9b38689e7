/* entropy.c - the entropy selector: importance, then budgets per head from its entropy, then the
 * best blocks of each row.
 * SPDX-License-Identifier: Apache-2.0
 *
 * E_h = mean over the rows of -sum_j p_j ln p_j / ln(visible blocks). The heads of a batch entry
 * share the budget (esa_budget_entropy), and the total of a head is spread over its rows
 * (esa_budget_spread). Each half can run alone: esa_select_importance ends after the first,
 * esa_select_from_importance starts with the second. */
#include <math.h>
#include "select/importance.h"

typedef struct entropy_work {
    esa_rules rules;
    esa_importance_work imp;
    float *importance;       /* [Hq][nq][nk] */
    double *row_entropy;     /* [Hq][nq] */
    double *entropy, *spare; /* [Hq] */
    int32_t *blocks;         /* [Hq] k_h */
    int32_t *quota;          /* [Hq][nq] */
    esa_picker *picker;      /* [threads] */
} entropy_work;

typedef struct job {
    const esa_select_args *args;
    const entropy_work *w;
    const float *importance; /* [Hq][nq][nk] of this batch entry */
    esa_mask *mask;
    int64_t b;
} job;

static void carve(entropy_work *w, esa_carve *c, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool), rows = a->Hq * a->nq;
    esa_rules_carve(&w->rules, c, a);
    esa_importance_carve(&w->imp, c, a);
    w->importance = esa_carve_take(c, rows * a->nk * (int64_t)sizeof(float));
    w->row_entropy = esa_carve_take(c, rows * (int64_t)sizeof(double));
    w->entropy = esa_carve_take(c, a->Hq * (int64_t)sizeof(double));
    w->spare = esa_carve_take(c, a->Hq * (int64_t)sizeof(double));
    w->blocks = esa_carve_take(c, a->Hq * (int64_t)sizeof(int32_t));
    w->quota = esa_carve_take(c, rows * (int64_t)sizeof(int32_t));
    w->picker = esa_carve_take(c, threads * (int64_t)sizeof(esa_picker));
    for (int64_t t = 0; t < threads; t++) {
        esa_picker p;
        esa_picker_carve(&p, c, a->nk);
        if (w->picker) w->picker[t] = p;
    }
}

void esa_entropy_carve(const esa_select_args *args, esa_carve *c)
{
    entropy_work w;
    carve(&w, c, args);
}

/* Normalised entropy of one row. -1 if the row sees at most one block and says nothing
 * about its head. */
static void entropy_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const int32_t v = x->w->rules.visible[item % x->args->nq];
    const float *p = x->importance + item * x->args->nk;
    double e = 0.0;
    (void)worker;
    for (int32_t j = 0; j < v; j++)
        if (p[j] > 0.0f) e -= (double)p[j] * log((double)p[j]);
    x->w->row_entropy[item] = v > 1 ? e / log((double)v) : -1.0;
}

static void head_entropies(const job *x)
{
    const esa_select_args *a = x->args;
    esa_pool_run(a->pool, entropy_item, (void *)x, a->Hq * a->nq);
    for (int64_t h = 0; h < a->Hq; h++) {
        double sum = 0.0;
        int64_t n = 0;
        for (int64_t i = 0; i < a->nq; i++) {
            const double e = x->w->row_entropy[h * a->nq + i];
            if (e >= 0.0) {
                sum += e;
                n++;
            }
        }
        /* Rounded shares can exceed 1 slightly. */
        x->w->entropy[h] = n && sum < (double)n ? sum / (double)n : 1.0;
    }
}

static void pick_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    esa_picker *p = &x->w->picker[worker];
    const int64_t i = item % a->nq, h = item / a->nq;
    esa_rules_pick(p, &x->w->rules, x->importance + item * a->nk, i, x->w->quota[item], a->nk);
    esa_mask_set_row(x->mask, (x->b * a->Hq + h) * a->nq + i, p->keep);
}

/* Second half, for the batch entry whose rules are filled. */
static void pick(const job *x)
{
    const esa_select_args *a = x->args;
    const entropy_work *w = x->w;
    const int64_t n = w->rules.existing;
    head_entropies(x);
    if (n > 0) esa_budget_entropy(w->blocks, w->entropy, a->Hq, n, a->params.budget, w->spare);
    for (int64_t h = 0; h < a->Hq; h++) {
        /* k_h of n blocks per row. Rows that see less (causal) get the same share of
         * what they see. */
        const int64_t total = n > 0 ? (2 * w->blocks[h] * w->rules.seen + n) / (2 * n) : 0;
        esa_budget_spread(w->quota + h * a->nq, w->rules.visible, w->rules.least, a->nq, total);
    }
    esa_pool_run(a->pool, pick_item, (void *)x, a->Hq * a->nq);
}

void esa_entropy_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    entropy_work w;
    carve(&w, &c, args);
    for (int64_t b = 0; b < args->B; b++) {
        const job x = { args, &w, w.importance, mask, b };
        esa_rules_fill(&w.rules, args, b);
        esa_importance_run(w.importance, &w.imp, args, &w.rules, b);
        pick(&x);
    }
}

void esa_select_importance(const esa_select_args *args, float *out, double *entropy, void *ws)
{
    esa_carve c = { ws, 0 };
    entropy_work w;
    carve(&w, &c, args);
    for (int64_t b = 0; b < args->B; b++) {
        float *part = out + b * args->Hq * args->nq * args->nk;
        const job x = { args, &w, part, NULL, b };
        esa_rules_fill(&w.rules, args, b);
        esa_importance_run(part, &w.imp, args, &w.rules, b);
        if (!entropy) continue;
        head_entropies(&x);
        for (int64_t h = 0; h < args->Hq; h++) entropy[b * args->Hq + h] = w.entropy[h];
    }
}

void esa_select_from_importance(const esa_select_args *args, esa_mask *mask,
                                const float *importance, void *ws)
{
    esa_carve c = { ws, 0 };
    entropy_work w;
    carve(&w, &c, args);
    int64_t existing = 0;
    for (int64_t b = 0; b < args->B; b++) {
        const job x = { args, &w, importance + b * args->Hq * args->nq * args->nk, mask, b };
        esa_rules_fill(&w.rules, args, b);
        pick(&x);
        existing += args->Hq * w.rules.seen;
    }
    esa_select_sign(args, mask, existing);
}
