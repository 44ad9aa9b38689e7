/* test_work.c - the work of a call (rules/work.h), recounted token by token from masks and rules.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "rules/work.h"

enum { MAX_BLOCKS = 40 };

typedef struct work_case {
    esa_attn_args a;
    int32_t kv_len[2];
    int32_t count[2 * 3 * MAX_BLOCKS], fine_count[2 * 3 * MAX_BLOCKS];
    uint16_t index[2 * 3 * MAX_BLOCKS * MAX_BLOCKS], fine_index[2 * 3 * MAX_BLOCKS * MAX_BLOCKS];
    uint8_t level[2 * 3 * MAX_BLOCKS * MAX_BLOCKS]; /* 0 exact, 1 fine, 2 neither */
} work_case;

static void make_case(work_case *c, esa_rng *r)
{
    static const int32_t blocks[] = { 16, 32, 48, 128 },
                         tails[] = { ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_CENTROID,
                                     ESA_TAIL_LEVELS };
    esa_attn_args *a = &c->a;
    memset(c, 0, sizeof *c);
    a->B = 1 + esa_rng_below(r, 2);
    a->Hq = 1 + esa_rng_below(r, 3);
    a->Hkv = 1;
    a->Nq = 1 + esa_rng_below(r, 300);
    a->Nk = 1 + esa_rng_below(r, 300);
    a->D = 8;
    a->block_q = blocks[esa_rng_below(r, 4)];
    a->block_k = blocks[esa_rng_below(r, 4)];
    a->tail = tails[esa_rng_below(r, 4)];
    a->causal = esa_rng_below(r, 4) == 0;
    a->fine = 2 << esa_rng_below(r, 3);
    if (!a->causal) a->exact_rows = (int32_t)esa_rng_below(r, 3) * 4;
    a->nq = (a->Nq + a->block_q - 1) / a->block_q;
    a->nk = (a->Nk + a->block_k - 1) / a->block_k;
    a->cap = a->nk;
    a->mask_batch = esa_rng_below(r, 2) ? a->Hq : 0;
    a->count = c->count;
    a->index = c->index;
    a->fine_count = c->fine_count;
    a->fine_index = c->fine_index;
    for (int b = 0; b < 2; b++) c->kv_len[b] = (int32_t)esa_rng_below(r, (uint32_t)a->Nk + 1);
    if (esa_rng_below(r, 2)) a->kv_len = c->kv_len;
    for (int64_t row = 0; row < a->B * a->Hq * a->nq; row++)
        for (int64_t j = 0; j < a->nk; j++) {
            const uint8_t level = (uint8_t)esa_rng_below(r, 3);
            c->level[row * a->nk + j] = level;
            if (level == 0) c->index[row * a->cap + c->count[row]++] = (uint16_t)j;
            if (level == 1) c->fine_index[row * a->cap + c->fine_count[row]++] = (uint16_t)j;
        }
}

/* Columns that stand in for block j on a level, if every query of row i sees the whole block. */
static int64_t stand_ins(const work_case *c, int64_t len, int64_t i, int64_t j, int32_t fine)
{
    const esa_attn_args *a = &c->a;
    int64_t parts = 0, last = -1;
    for (int64_t k = j * a->block_k; k < (j + 1) * a->block_k && k < len; k++) {
        if (a->causal && k > i * a->block_q + a->Nk - a->Nq) return 0;
        const int64_t part = fine ? k % a->block_k / (a->block_k / a->fine) : 0;
        parts += part != last;
        last = part;
    }
    return parts;
}

/* Multiply-adds of one attention call, counted column by column. */
static double count_attention(const work_case *c)
{
    const esa_attn_args *a = &c->a;
    double sum = 0.0;
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t h = 0; h < a->Hq; h++)
            for (int64_t n = 0; n < a->Nq; n++) {
                const int64_t i = n / a->block_q, row = (b * a->mask_batch + h) * a->nq + i,
                              len = a->kv_len ? a->kv_len[b] : a->Nk;
                int64_t columns = 0;
                for (int64_t j = 0; j < a->nk; j++) {
                    const uint8_t level = c->level[row * a->nk + j];
                    if (level == 0)
                        for (int64_t k = j * a->block_k; k < (j + 1) * a->block_k && k < len; k++)
                            columns++;
                    else if (a->tail == ESA_TAIL_LEVELS)
                        columns += stand_ins(c, len, i, j, level == 1);
                    else if (a->tail == ESA_TAIL_POOLED ||
                             (a->tail == ESA_TAIL_CENTROID && n % a->block_q == 0))
                        columns += stand_ins(c, len, i, j, 0);
                }
                /* So many rows of the block are exact; which ones does not matter here. */
                if (n % a->block_q < a->exact_rows) columns += len;
                sum += 2.0 * (double)columns * (double)a->D;
            }
    return sum;
}

static void attention_is_counted_token_by_token(void **state)
{
    esa_rng r = { kit_seed("attention_is_counted_token_by_token") };
    work_case *c = malloc(sizeof *c);
    (void)state;
    assert_non_null(c);
    for (int round = 0; round < 400; round++) {
        make_case(c, &r);
        const esa_attn_args *a = &c->a;
        const double dense = 2.0 * (double)(a->B * a->Hq * a->Nq * a->Nk * a->D);
        const double want = count_attention(c) / dense, got = esa_work_attention(a);
        if (fabs(got - want) > 1e-12) /* sums of integers below 2^53 and one division */
            fail_msg("work %.15g, counted %.15g: N %d/%d block %dx%d tail %d causal %d", got, want,
                     (int)a->Nq, (int)a->Nk, a->block_q, a->block_k, a->tail, a->causal);
        esa_attn_args full = *a;
        full.count = NULL;
        double pairs = 0.0;
        for (int64_t b = 0; b < a->B; b++)
            for (int64_t n = 0; n < a->Nq; n++)
                for (int64_t k = 0; k < (a->kv_len ? a->kv_len[b] : a->Nk); k++)
                    pairs += !a->causal || k <= n + a->Nk - a->Nq;
        assert_true(fabs(esa_work_attention(&full) - pairs * (double)(2 * a->Hq * a->D) / dense) <=
                    1e-12);
    }
    free(c);
}

/* From totals: exact where all blocks have one size. */
static void totals_agree_with_lists(void **state)
{
    esa_rng r = { kit_seed("totals_agree_with_lists") };
    work_case *c = malloc(sizeof *c);
    (void)state;
    assert_non_null(c);
    for (int round = 0; round < 200; round++) {
        make_case(c, &r);
        esa_attn_args *a = &c->a;
        if (a->causal) continue;
        const int32_t whole = round % 2;
        if (whole) { /* no short blocks */
            a->Nq = a->nq * a->block_q;
            a->Nk = a->nk * a->block_k;
            a->kv_len = NULL;
        }
        a->mask_batch = a->Hq;
        int64_t facts[3] = { 0, 0, 0 };
        const int64_t rows = a->B * a->Hq * a->nq;
        for (int64_t b = 0; b < a->B; b++) {
            const int64_t len = a->kv_len ? a->kv_len[b] : a->Nk,
                          n = (len + a->block_k - 1) / a->block_k;
            for (int64_t row = b * a->Hq * a->nq; row < (b + 1) * a->Hq * a->nq; row++) {
                facts[0] += n;
                c->count[row] = c->fine_count[row] = 0; /* lists hold blocks that exist */
                for (int64_t j = 0; j < n; j++) {
                    const uint8_t level = c->level[row * a->nk + j];
                    if (level == 0) c->index[row * a->cap + c->count[row]++] = (uint16_t)j;
                    if (level == 1)
                        c->fine_index[row * a->cap + c->fine_count[row]++] = (uint16_t)j;
                }
                facts[1] += c->count[row];
                facts[2] += c->fine_count[row];
            }
        }
        const double lists = esa_work_attention(a), totals = esa_work_facts(a, facts, rows);
        if (whole)
            assert_true(fabs(lists - totals) <= 1e-12);
        else { /* every row or column of blocks may be short; exact rows come on top */
            const double most = 1.0 + (double)(a->nk * a->fine) / (double)a->Nk +
                                (double)esa_work_exact_rows(a) / (double)a->Nq;
            assert_true(totals >= 0.0 && totals <= most);
        }
    }
    free(c);
}

/* Rows of queries and columns of keys that a selector multiplies, counted one by one. */
static double count_selection(const esa_select_params *p, int64_t Nq, int64_t Nk, int64_t len)
{
    int64_t rows = 0, columns = 0;
    double products = 1.0;
    for (int64_t first = 0; first < Nq; first += p->block_q) {
        const int64_t n = Nq - first < p->block_q ? Nq - first : p->block_q;
        if (p->selector == ESA_SELECT_ENTROPY) rows += n < p->samples ? n : p->samples;
        if (p->selector == ESA_SELECT_RF_V2) rows++;
        if (p->selector == ESA_SELECT_ERROR)
            for (int64_t g = 0; g < n; g += p->group_q) rows++;
    }
    if (p->selector == ESA_SELECT_ENTROPY) columns = len;
    for (int64_t first = 0; first < len && p->selector != ESA_SELECT_ENTROPY; first += p->block_k) {
        const int64_t n = len - first < p->block_k ? len - first : p->block_k;
        if (p->selector == ESA_SELECT_RF_V2) columns++;
        if (p->selector != ESA_SELECT_ERROR) continue;
        products = 2.0;
        for (int64_t g = 0; g < n; g += p->group_k) columns++;
        if (p->tail != ESA_TAIL_NONE) columns++;
        if (p->tail == ESA_TAIL_LEVELS)
            for (int64_t f = 0; f < n; f += p->block_k / p->fine) columns++;
    }
    return products * (double)rows * (double)columns / (2.0 * (double)Nq * (double)Nk);
}

static void selection_is_counted_row_by_row(void **state)
{
    esa_rng r = { kit_seed("selection_is_counted_row_by_row") };
    (void)state;
    for (int round = 0; round < 300; round++) {
        static const int32_t selectors[] = { ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2,
                                             ESA_SELECT_ERROR };
        const int64_t Nq = 1 + esa_rng_below(&r, 700), Nk = 1 + esa_rng_below(&r, 700),
                      len = esa_rng_below(&r, (uint32_t)Nk + 1);
        esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
        p.selector = selectors[round % 3];
        p.block_q = p.block_k = 64 << esa_rng_below(&r, 3);
        p.samples = 1 + (int32_t)esa_rng_below(&r, 200);
        p.group_q = 1 << esa_rng_below(&r, 5);
        p.group_k = 1 << esa_rng_below(&r, 3);
        p.tail = (int32_t[]){ ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_LEVELS }[round / 3 % 3];
        p.fine = 2 << esa_rng_below(&r, 3);
        const double got = esa_work_select(&p, Nq, Nk, len),
                     want = count_selection(&p, Nq, Nk, len);
        if (fabs(got - want) > 1e-12)
            fail_msg("selector %d: work %.15g, counted %.15g", p.selector, got, want);
    }
    /* The figures of the study: 4 of 64 queries without values; 8 mean queries of a block of 64
     * times a quarter of the keys, plus 1 + 4 means a block. */
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.block_q = p.block_k = 64;
    p.samples = 4;
    assert_true(fabs(esa_work_select(&p, 4352, 4352, 4352) - 4.0 / 64 * 0.5) < 1e-12);
    p.selector = ESA_SELECT_ERROR;
    p.tail = ESA_TAIL_LEVELS;
    p.fine = 4;
    p.group_q = p.group_k = 0;
    assert_true(fabs(esa_work_select(&p, 4352, 4352, 4352) - 1.0 / 8 * (1.0 / 4 + 5.0 / 64)) <
                1e-12);
    p.selector = ESA_SELECT_ADA_BSA; /* one pair in eight, no values */
    assert_true(fabs(esa_work_select(&p, 4352, 4352, 4352) - 1.0 / 16) < 1e-12);
    p.selector = ESA_SELECT_RANDOM;
    assert_true(esa_work_select(&p, 4352, 4352, 4352) == 0.0);
    p.selector = ESA_SELECT_ERROR;
    p.budget = 1.0; /* nothing is scored */
    assert_true(esa_work_select(&p, 4352, 4352, 4352) == 0.0);
}

/* Orders small enough to count by hand. */
static void orders_are_counted_by_hand(void **state)
{
    (void)state;
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.selector = ESA_SELECT_ERROR;
    p.block_q = p.block_k = 16;
    p.layout.protect_first_frame = 0;
    const double D = 3, turns = ESA_ORDER_ROUNDS + 1;
    /* 16 tokens a side: one metric, one table of pairs, one cut. Nq and Nk differ from 16 by
     * nothing, so both sides cost the same. */
    const double one = 16 * D * D + (16 * D * D + 16 * 16 * D) + turns * 16 * 16;
    assert_true(fabs(esa_work_order(&p, 1, 1, 16, 16, 3) - 2 * one / (2 * 16 * 16 * D)) < 1e-12);
    /* Two query heads for a key head: the key's metric sees twice as many queries, and the one key
     * order is shared by both heads. */
    const double key = one + 16 * D * D;
    assert_true(fabs(esa_work_order(&p, 2, 1, 16, 16, 3) -
                     (2 * one + key) / (2 * 2 * 16 * 16 * D)) < 1e-12);
    /* 8 tokens or text alone: nothing is cut, but the metric is there. */
    assert_true(fabs(esa_work_order(&p, 1, 1, 8, 8, 3) - 2 * 8 * D * D / (2 * 8 * 8 * D)) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_counted_token_by_token),
        cmocka_unit_test(totals_agree_with_lists),
        cmocka_unit_test(selection_is_counted_row_by_row),
        cmocka_unit_test(orders_are_counted_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
