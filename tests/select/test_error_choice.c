/* test_error_choice.c - which blocks the error selector keeps, against a plain sort of all steps;
 * and the promises of the rule: exact budgets, one block per row, forced blocks, monotone levels.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/error_case.h"
#include "rules/levels.h"

/* One way to raise a block, in the plain reference. */
typedef struct step {
    double gain;
    int64_t head, row, block; /* number of the head, of the row in it, of the block in the row */
    int32_t to, weight;       /* ESA_LEVEL_* */
} step;

static int by_gain(const void *a, const void *b)
{
    const step *x = a, *y = b;
    if (x->gain != y->gain) return x->gain > y->gain ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return (x->block > y->block) - (x->block < y->block);
}

/* The scores are f32, and gains are rounded to f32: equal gains must be equal here too. */
static double gain_of(float saved, int32_t columns)
{
    const float g = saved / (float)columns;
    return g != g ? INFINITY : g > 0.0f ? (double)g : 0.0;
}

static int32_t is_text(const error_case *c, int32_t side, int64_t block)
{
    const esa_layout *l = &c->args.params.layout;
    const int64_t N = side ? c->Nk : c->Nq,
                  B = side ? c->args.params.block_k : c->args.params.block_q,
                  front = side ? l->text_front_k : l->text_front_q,
                  back = side ? l->text_back_k : l->text_back_q;
    for (int64_t n = block * B; n < case_min((block + 1) * B, N); n++)
        if (n < front || n >= N - back) return 1;
    return 0;
}

/* level[Hq][nq][nk] of batch entry b by sorting all steps; 255: the block does not exist. Returns
 * the columns that are spent. *over: 1 if the blocks that are exact anyway cost more than the
 * budget. */
static int64_t sorted_choice(const error_case *c, const float *errors, uint8_t *level, int64_t b,
                             int32_t *over, int32_t *unfit)
{
    const esa_select_params *p = &c->args.params;
    const int64_t len = case_kv_len(c, b), nk = c->nk, n = (len + p->block_k - 1) / p->block_k,
                  plane = c->B * c->Hq * c->nq * nk;
    const int32_t with = p->tail == ESA_TAIL_LEVELS, exact = with ? p->block_k : 1,
                  mean = with ? 1 : 0;
    step *all = malloc((size_t)(2 * c->Hq * c->nq * nk + 1) * sizeof *all);
    int64_t count = 0, spent = 0;
    assert_non_null(all);
    memset(level, 255, (size_t)(c->Hq * c->nq * nk));
    for (int64_t h = 0; h < c->Hq; h++)
        for (int64_t i = 0; i < c->nq; i++) {
            const float *e = errors + ((b * c->Hq + h) * c->nq + i) * nk;
            uint8_t *out = level + (h * c->nq + i) * nk;
            int64_t best = 0;
            for (int64_t j = 1; j < n; j++)
                if (gain_of(e[j], 1) > gain_of(e[best], 1)) best = j;
            for (int64_t j = 0; j < n; j++) {
                const int32_t forced = is_text(c, 0, i) || is_text(c, 1, j) || j == best;
                out[j] = forced ? ESA_LEVEL_EXACT : ESA_LEVEL_MEAN;
                spent += forced ? exact : mean;
                if (forced) continue;
                step s = { gain_of(e[j], exact - mean), h, i, j, ESA_LEVEL_EXACT, exact - mean };
                if (with) {
                    const double first = gain_of(e[j] - e[plane + j], p->fine - 1),
                                 second = gain_of(e[plane + j], exact - p->fine);
                    if (first > second) {
                        all[count++] = (step){ first, h, i, j, ESA_LEVEL_FINE, p->fine - 1 };
                        s.gain = second;
                        s.weight = exact - p->fine;
                    }
                }
                all[count++] = s;
            }
        }
    qsort(all, (size_t)count, sizeof *all, by_gain);
    const int64_t budget = (int64_t)floor(p->budget * (double)(c->Hq * c->nq * n * exact) + 0.5);
    *over = spent > budget;
    *unfit = 0;
    for (int64_t s = 0; s < count && !*unfit; s++) {
        if (spent + all[s].weight > budget) {
            *unfit = all[s].weight;
            break;
        }
        spent += all[s].weight;
        level[(all[s].head * c->nq + all[s].row) * nk + all[s].block] = (uint8_t)all[s].to;
    }
    free(all);
    return spent;
}

/* Levels [B][Hq][nq][nk] that the library chooses from errors; 255: not in the mask and beyond the
 * existing blocks. The caller frees. */
static uint8_t *library_choice(const error_case *c, const float *errors, const esa_ctx *ctx)
{
    esa_select_args a = c->args;
    a.kern = ctx->kern;
    a.pool = ctx->pool;
    a.q = a.k = a.v = NULL; /* not read */
    const int64_t rows = c->B * c->Hq * c->nq, bytes = esa_select_workspace(&a);
    esa_mask *mask = esa_mask_new(&ctx->mem, c->B, c->Hq, c->Nq, c->Nk, c->nq, c->nk,
                                  a.params.block_q, a.params.block_k);
    void *ws = esa_mem_alloc(&ctx->mem, bytes);
    uint8_t *level = malloc((size_t)(rows * c->nk));
    assert_true(mask && ws && level);
    if (c->levels == 2) assert_true(esa_mask_add_fine(mask, a.params.fine));
    memset(ws, 0xff, (size_t)bytes);
    esa_select_from_errors(&a, mask, errors, ws);
    assert_int_equal(mask->selector, ESA_SELECT_ERROR);
    int64_t existing = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t b = r / (c->Hq * c->nq),
                      n = (case_kv_len(c, b) + a.params.block_k - 1) / a.params.block_k;
        existing += n;
        for (int64_t j = 0; j < c->nk; j++) level[r * c->nk + j] = j < n ? ESA_LEVEL_MEAN : 255;
        for (int32_t side = 0; side < c->levels; side++) {
            const int32_t count = side ? mask->fine_count[r] : mask->count[r];
            const uint16_t *index = (side ? mask->fine_index : mask->index) + r * mask->cap;
            for (int32_t i = 0; i < count; i++) {
                assert_true(index[i] < n && (i == 0 || index[i] > index[i - 1]));
                assert_int_equal(level[r * c->nk + index[i]], ESA_LEVEL_MEAN); /* in one list */
                level[r * c->nk + index[i]] = side ? ESA_LEVEL_FINE : ESA_LEVEL_EXACT;
            }
        }
    }
    assert_int_equal(mask->existing, existing);
    esa_mask_free(mask);
    esa_mem_free(&ctx->mem, ws, bytes);
    return level;
}

/* Scores as a file or a caller might hold them. kind 0: smooth; 1: many equal ones; 2: all equal;
 * 3: zeros; 4: NaN, infinity and huge ones among them; 5: fine means that are worse. */
static float *make_errors(const error_case *c, esa_rng *r, int32_t kind)
{
    const int64_t plane = c->B * c->Hq * c->nq * c->nk;
    float *e = malloc((size_t)(c->levels * plane) * sizeof *e);
    assert_non_null(e);
    for (int64_t i = 0; i < plane; i++) {
        const float u = esa_rng_unit(r);
        e[i] = kind == 0 || kind == 5 ? u * u * u
               : kind == 1            ? (float)esa_rng_below(r, 4)
               : kind == 2            ? 0.25f
               : kind == 3
                   ? 0.0f
                   : (float[]){ u, NAN, INFINITY, 3e38f, 1e-42f, 0.0f }[esa_rng_below(r, 6)];
        if (c->levels == 1) continue;
        const float part = kind == 1   ? (float)esa_rng_below(r, 3) / 2.0f
                           : kind == 5 ? 1.0f + esa_rng_unit(r)
                                       : esa_rng_unit(r);
        e[plane + i] = kind == 4 && esa_rng_below(r, 5) == 0 ? NAN : e[i] * part;
    }
    return e;
}

static void choice_is_that_of_a_sort(void **state)
{
    esa_rng r = { kit_seed("choice_is_that_of_a_sort") };
    esa_ctx *ctx[] = { kit_ctx(1), kit_ctx(2), kit_ctx(3) };
    int32_t exhausted = 0, overdrawn = 0;
    (void)state;
    for (int round = 0; round < 200; round++) {
        error_case c;
        case_make(&c, &r);
        const int32_t kind = round % 6;
        const int64_t cells = c.Hq * c.nq * c.nk;
        float *errors = make_errors(&c, &r, kind);
        uint8_t *want = malloc((size_t)cells);
        assert_non_null(want);
        for (int t = 0; t < 3; t++) {
            uint8_t *got = library_choice(&c, errors, ctx[t]);
            for (int64_t b = 0; b < c.B; b++) {
                int32_t over, unfit;
                const int64_t spent = sorted_choice(&c, errors, want, b, &over, &unfit);
                for (int64_t i = 0; i < cells; i++)
                    if (got[b * cells + i] != want[i])
                        fail_msg("level %d of cell %d, expected %d; scores of kind %d: %s",
                                 got[b * cells + i], (int)i, want[i], (int)kind, c.name);
                /* The budget is used up to the first step that does not fit. */
                const esa_select_params *p = &c.args.params;
                const int64_t n = (case_kv_len(&c, b) + p->block_k - 1) / p->block_k,
                              exact = c.levels == 2 ? p->block_k : 1;
                const double asked = p->budget * (double)(c.Hq * c.nq * n * exact);
                if (!over && unfit) {
                    assert_true((double)spent <= asked + 0.5 &&
                                (double)(spent + unfit) > asked + 0.5 - 1e-6);
                    exhausted++;
                }
                overdrawn += over;
                if (!over && !unfit) /* nothing is left to raise */
                    for (int64_t i = 0; i < cells; i++) assert_true(want[i] == 0 || want[i] == 255);
                for (int64_t row = 0; row < c.Hq * c.nq && n > 0; row++) {
                    int64_t kept = 0;
                    for (int64_t j = 0; j < c.nk; j++)
                        kept += got[b * cells + row * c.nk + j] == ESA_LEVEL_EXACT;
                    assert_true(kept >= 1);
                }
            }
            free(got);
        }
        free(want);
        free(errors);
        case_free(&c);
    }
    assert_true(exhausted > 50 && overdrawn > 20); /* both cases did occur */
    for (int t = 0; t < 3; t++) esa_ctx_free(ctx[t]);
}

/* A larger budget never lowers the level of a block. */
static void levels_grow_with_the_budget(void **state)
{
    esa_rng r = { kit_seed("levels_grow_with_the_budget") };
    esa_ctx *ctx = kit_ctx(2);
    int32_t fine_seen = 0;
    (void)state;
    for (int round = 0; round < 60; round++) {
        error_case c;
        case_make(&c, &r);
        const int64_t all = c.B * c.Hq * c.nq * c.nk;
        float *errors = make_errors(&c, &r, round % 6);
        uint8_t *before = NULL;
        for (int32_t step = 0; step <= 20; step++) {
            c.args.params.budget = step / 20.0;
            uint8_t *now = library_choice(&c, errors, ctx);
            for (int64_t i = 0; i < all && before; i++) {
                if (now[i] > before[i])
                    fail_msg("budget %g lowers cell %d from %d to %d: %s", step / 20.0, (int)i,
                             before[i], now[i], c.name);
                fine_seen += now[i] == ESA_LEVEL_FINE;
            }
            free(before);
            before = now;
        }
        for (int64_t i = 0; i < all; i++)
            assert_true(before[i] == ESA_LEVEL_EXACT || before[i] == 255); /* budget 1 */
        free(before);
        free(errors);
        case_free(&c);
    }
    printf("[   INFO   ] %d cells were on the fine level\n", (int)fine_seen);
    assert_true(fine_seen > 50);
    esa_ctx_free(ctx);
}

/* With levels, no other choice of the same cost or less has a smaller error, up to the one step
 * that no longer fits: checked by trying everything on one row of five blocks. */
static void choice_is_best_for_its_cost(void **state)
{
    esa_rng r = { kit_seed("choice_is_best_for_its_cost") };
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    for (int round = 0; round < 300; round++) {
        enum { N = 5, ALL = 243 };
        error_case c;
        memset(&c, 0, sizeof c);
        esa_select_params *p = &c.args.params;
        *p = esa_select_params_default(ESA_SELECT_ENTROPY);
        p->selector = ESA_SELECT_ERROR;
        p->tail = ESA_TAIL_LEVELS;
        p->fine = 4;
        p->block_q = p->block_k = 16;
        p->layout.protect_first_frame = 0;
        p->layout.order = ESA_ORDER_RASTER;
        p->budget = 0.3 + 0.1 * (double)esa_rng_below(&r, 7);
        c.B = c.Hq = c.Hkv = 1;
        c.Nq = 16;
        c.Nk = 16 * N;
        c.D = 1;
        case_fill(&c, &r, ESA_DTYPE_F32, 0, 1.0f, 0);
        float e[2 * N];
        for (int j = 0; j < N; j++) {
            e[j] = 0.01f + esa_rng_unit(&r);
            e[N + j] = e[j] * esa_rng_unit(&r);
        }
        uint8_t *level = library_choice(&c, e, ctx);
        const int32_t cost[] = { 16, 4, 1 };
        double error = 0.0;
        int32_t spent = 0, best = 0;
        for (int j = 0; j < N; j++) {
            if (e[j] > e[best]) best = j;
            spent += cost[level[j]];
            error += level[j] == ESA_LEVEL_EXACT ? 0.0 : (double)e[level[j] == 1 ? N + j : j];
        }
        for (int32_t other = 0; other < ALL; other++) {
            double sum = 0.0;
            int32_t paid = 0, digits = other, legal = 1;
            for (int j = 0; j < N; j++, digits /= 3) {
                const int32_t l = digits % 3;
                paid += cost[l];
                sum += l == ESA_LEVEL_EXACT ? 0.0 : (double)e[l == 1 ? N + j : j];
                if (j == best && l != ESA_LEVEL_EXACT) legal = 0;
            }
            if (legal && paid <= spent && sum < error - 1e-6)
                fail_msg("error %g at cost %d, but %g is possible at %d", error, (int)spent, sum,
                         (int)paid);
        }
        free(level);
        case_free(&c);
    }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choice_is_that_of_a_sort),
        cmocka_unit_test(levels_grow_with_the_budget),
        cmocka_unit_test(choice_is_best_for_its_cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
