/* error.c - the error selector: scores, then the choice of levels, one batch entry at a time.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each half can run alone: esa_select_errors ends after the scores, esa_select_from_errors starts
 * with them. */
#include "select/error.h"

typedef struct error_work {
    esa_rules rules;
    esa_error_scores scores;
    esa_error_choice choice;
    float *errors; /* [levels][Hq][nq][nk] */
} error_work;

static void carve(error_work *w, esa_carve *c, const esa_select_args *a)
{
    esa_rules_carve(&w->rules, c, a);
    esa_error_scores_carve(&w->scores, c, a);
    esa_error_choice_carve(&w->choice, c, a);
    w->errors = esa_carve_take(c,
                               w->scores.levels * a->Hq * a->nq * a->nk * (int64_t)sizeof(float));
}

void esa_error_carve(const esa_select_args *args, esa_carve *c)
{
    error_work w;
    carve(&w, c, args);
}

int64_t esa_select_errors_workspace(const esa_select_args *args)
{
    esa_carve c = { NULL, 0 };
    esa_error_carve(args, &c);
    return c.used;
}

void esa_error_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    error_work w;
    carve(&w, &c, args);
    const int64_t level = args->Hq * args->nq * args->nk;
    for (int64_t b = 0; b < args->B; b++) {
        esa_rules_fill(&w.rules, args, b);
        esa_error_scores_run(w.errors, level, &w.scores, args, &w.rules, b);
        esa_error_choice_run(mask, &w.choice, args, &w.rules, w.errors, level, b);
    }
}

void esa_select_errors(const esa_select_args *args, float *out, void *ws)
{
    esa_carve c = { ws, 0 };
    error_work w;
    carve(&w, &c, args);
    const int64_t entry = args->Hq * args->nq * args->nk, level = args->B * entry;
    for (int64_t b = 0; b < args->B; b++) {
        esa_rules_fill(&w.rules, args, b);
        esa_error_scores_run(out + b * entry, level, &w.scores, args, &w.rules, b);
    }
}

void esa_select_from_errors(const esa_select_args *args, esa_mask *mask, const float *errors,
                            void *ws)
{
    esa_carve c = { ws, 0 };
    error_work w;
    carve(&w, &c, args);
    const int64_t entry = args->Hq * args->nq * args->nk, level = args->B * entry;
    int64_t existing = 0;
    for (int64_t b = 0; b < args->B; b++) {
        esa_rules_fill(&w.rules, args, b);
        esa_error_choice_run(mask, &w.choice, args, &w.rules, errors + b * entry, level, b);
        existing += args->Hq * w.rules.seen;
    }
    esa_select_sign(args, mask, existing);
}
