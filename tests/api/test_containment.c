/* test_containment.c - NaN and infinity in one element of q, k or v stay where esa.h says: every
 * row that does not see the element keeps its bits. In 8 bits such a row may change within the
 * error of the rounding, and must be finite.
 *
 * Random calls: every selector, tail and dtype in 16 and in 8 bits, with a mask that the selector
 * made from the clean inputs.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "common/attention_case.h"
#include "common/naive.h"
#include "esa/esa.h"

enum { Q, K, V, SIDES };

static int32_t level_of[8];
static int levels;
static uint64_t drawn; /* the state of the generator, splitmix64 */

static int begin(void **state)
{
    (void)state;
    int native;
    print_message("seed %llu\n", (unsigned long long)test_seed());
    levels = find_test_levels(level_of, &native);
    drawn = test_seed();
    return levels ? 0 : -1;
}

static uint64_t draw(void)
{
    uint64_t z = (drawn += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static int64_t pick(int64_t n) { return (int64_t)(draw() % (uint64_t)n); }

/* What poisons, as a number and in f16 and bf16. */
static const struct {
    float value;
    uint16_t f16, bf16;
} poisons[] = { { NAN, 0x7e00, 0x7fc0 },
                { INFINITY, 0x7c00, 0x7f80 },
                { -INFINITY, 0xfc00, 0xff80 } };

/* One call on clean and one on poisoned inputs. */
typedef struct problem {
    int64_t B, Hq, Hkv, Nq, Nk, D, nq, nk;
    int32_t dtype, selector;
    esa_select_params select;
    esa_attention_params params;
    esa_ctx *ctx;
    esa_mask *mask;
    uint8_t *level;       /* [B][Hq][nq][nk]: 0 exact, 1 fine, 2 neither */
    void *data[SIDES];    /* [B][H][N][D] */
    double *out[2], *lse; /* [B][Hq][Nq][D], 0: clean, 1: poisoned; of lse likewise, one behind the
                           * other: [2][B][Hq][Nq] */
    int side;
    int64_t b, h, row, d; /* the poisoned element */
    int64_t poison;       /* which of poisons[] */
} problem;

static int64_t heads(const problem *p, int side) { return side == Q ? p->Hq : p->Hkv; }
static int64_t length(const problem *p, int side) { return side == Q ? p->Nq : p->Nk; }

static esa_tensor view(const problem *p, int side)
{
    return esa_tensor_bnsd(p->data[side], p->dtype, p->B, heads(p, side), length(p, side), p->D);
}

static void choose(problem *p, int32_t selector, int32_t tail, int32_t dtype, int32_t precision)
{
    memset(p, 0, sizeof *p);
    p->B = 1 + pick(2);
    p->Hkv = 1 + pick(2);
    p->Hq = p->Hkv * (1 + pick(2));
    p->Nq = 40 + pick(200);
    p->Nk = pick(2) ? p->Nq : 40 + pick(200);
    p->D = pick(2) ? 64 << pick(2) : 1 + pick(130);
    p->dtype = dtype;
    p->select = esa_select_params_default(selector);
    p->select.block_q = precision == 8 && pick(2) ? 128 : 16 * (1 + (int32_t)pick(4));
    p->select.block_k = precision == 8 && pick(2) ? 128 : 16 * (1 + (int32_t)pick(4));
    p->select.budget = 0.1 + 0.1 * (double)pick(6);
    p->select.seed = (uint64_t)pick(1000);
    p->params = esa_attention_params_default();
    p->params.tail = tail;
    p->params.precision = precision;
    if (selector == ESA_SELECT_ERROR)
        p->select.tail = tail == ESA_TAIL_CENTROID ? ESA_TAIL_POOLED : tail;
    else if (tail == ESA_TAIL_NONE)
        p->select.causal = p->params.causal = (int32_t)pick(2);
    p->nq = (p->Nq + p->select.block_q - 1) / p->select.block_q;
    p->nk = (p->Nk + p->select.block_k - 1) / p->select.block_k;
    p->side = (int)pick(SIDES);
    p->b = pick(p->B);
    p->h = pick(heads(p, p->side));
    p->row = pick(length(p, p->side));
    p->d = pick(p->D);
    p->poison = pick(3);
}

static void run(problem *p, int poisoned)
{
    const int64_t rows = p->B * p->Hq * p->Nq, bytes = p->dtype == ESA_DTYPE_F32 ? 4 : 2;
    void *o = malloc((size_t)(rows * p->D * bytes));
    float *lse = malloc((size_t)rows * sizeof *lse);
    assert_true(o && lse);
    const esa_tensor q = view(p, Q), k = view(p, K), v = view(p, V),
                     to = esa_tensor_bnsd(o, p->dtype, p->B, p->Hq, p->Nq, p->D),
                     tl = esa_tensor_bnsd(lse, ESA_DTYPE_F32, p->B, p->Hq, p->Nq, 1);
    p->params.lse = &tl;
    if (esa_attention(p->ctx, &q, &k, &v, &to, p->mask, &p->params))
        fail_msg("%s", esa_ctx_error(p->ctx));
    tensor_to_double(p->out[poisoned], &to);
    tensor_to_double(p->lse + poisoned * rows, &tl);
    free(o);
    free(lse);
}

/* Both runs. */
static void solve(problem *p, int32_t level)
{
    const int64_t bytes = p->dtype == ESA_DTYPE_F32 ? 4 : 2, rows = p->B * p->Hq * p->Nq;
    p->ctx = level_ctx(level, 1 + (int32_t)pick(2));
    for (int side = 0; side < SIDES; side++) {
        p->data[side] = malloc((size_t)(p->B * heads(p, side) * length(p, side) * p->D * bytes));
        assert_non_null(p->data[side]);
        const esa_tensor t = view(p, side);
        tensor_fill(&t, draw(), 1.0);
    }
    for (int i = 0; i < 2; i++) p->out[i] = malloc((size_t)(rows * p->D) * sizeof(double));
    p->lse = malloc((size_t)(2 * rows) * sizeof(double));
    p->level = malloc((size_t)(p->B * p->Hq * p->nq * p->nk));
    assert_true(p->out[0] && p->out[1] && p->lse && p->level);
    const esa_tensor q = view(p, Q), k = view(p, K), v = view(p, V);
    if (esa_select_qkv(p->ctx, &p->mask, &q, &k, &v, &p->select))
        fail_msg("%s", esa_ctx_error(p->ctx));
    assert_int_equal(esa_mask_to_levels(p->mask, p->level), ESA_OK);
    run(p, 0);
    const int64_t at = ((p->b * heads(p, p->side) + p->h) * length(p, p->side) + p->row) * p->D +
                       p->d;
    if (p->dtype == ESA_DTYPE_F32)
        ((float *)p->data[p->side])[at] = poisons[p->poison].value;
    else
        ((uint16_t *)p->data[p->side])[at] = p->dtype == ESA_DTYPE_F16 ? poisons[p->poison].f16
                                                                       : poisons[p->poison].bf16;
    run(p, 1);
}

static void release(problem *p)
{
    esa_mask_free(p->mask);
    esa_ctx_free(p->ctx);
    for (int side = 0; side < SIDES; side++) free(p->data[side]);
    for (int i = 0; i < 2; i++) free(p->out[i]);
    free(p->lse);
    free(p->level);
}

/* 1 if the block of the poisoned key is exact for query i of head h. */
static int computes(const problem *p, int64_t h, int64_t i)
{
    const int64_t row = (p->b * p->Hq + h) * p->nq + i / p->select.block_q;
    return p->level[row * p->nk + p->row / p->select.block_k] == 0;
}

/* 1 if the rules of esa.h let query i of head h of batch entry b see the poison. */
static int may_see(const problem *p, int64_t b, int64_t h, int64_t i)
{
    if (b != p->b) return 0;
    if (p->side == Q) {
        if (h != p->h) return 0;
        /* a centroid tail uses the mean query of the block */
        const int64_t unit = p->params.tail == ESA_TAIL_CENTROID ? p->select.block_q : 1;
        return i / unit == p->row / unit;
    }
    if (h / (p->Hq / p->Hkv) != p->h) return 0;
    return p->params.tail != ESA_TAIL_NONE || computes(p, h, i);
}

/* Rows that changed though they may not. In 8 bits: that are no weighted means of v any more; v
 * lies in -1 .. 1, and its rounding adds at most a sixteenth. */
static int64_t wrong_rows(const problem *p)
{
    int64_t wrong = 0;
    for (int64_t b = 0, r = 0; b < p->B; b++)
        for (int64_t h = 0; h < p->Hq; h++)
            for (int64_t i = 0; i < p->Nq; i++, r++) {
                const double *was = p->out[0] + r * p->D, *is = p->out[1] + r * p->D;
                const double *lse = p->lse + r, *lse_is = lse + p->B * p->Hq * p->Nq;
                int bad = 0;
                if (may_see(p, b, h, i)) continue;
                if (p->params.precision == 8)
                    for (int64_t d = 0; d < p->D; d++) bad |= !(fabs(is[d]) <= 1.0 + 1.0 / 16);
                else
                    bad = memcmp(was, is, (size_t)p->D * sizeof *is) != 0 ||
                          memcmp(lse, lse_is, sizeof *lse) != 0;
                wrong += bad;
            }
    return wrong;
}

/* NaN in q reaches its own row, and NaN in v every row that computes its block: 1 if not. Without
 * this a call that ignores its inputs would pass. */
static int lost(const problem *p)
{
    if (p->poison != 0 || p->params.causal || p->side == K) return 0;
    for (int64_t h = 0; h < p->Hq; h++)
        for (int64_t i = 0; i < p->Nq; i++) {
            const double *is = p->out[1] + ((p->b * p->Hq + h) * p->Nq + i) * p->D;
            int sees = p->side == V && h / (p->Hq / p->Hkv) == p->h && computes(p, h, i);
            if (p->side == Q && h == p->h && i == p->row) {
                const int64_t row = (p->b * p->Hq + h) * p->nq + i / p->select.block_q;
                sees = memchr(p->level + row * p->nk, 0, (size_t)p->nk) != NULL;
            }
            if (sees && !isnan(is[p->d])) return 1;
        }
    return 0;
}

static void check(int32_t selector, int32_t tail, int32_t dtype, int32_t precision)
{
    static int turn;
    const int32_t level = level_of[turn++ % levels];
    problem p;
    choose(&p, selector, tail, dtype, precision);
    solve(&p, level);
    const int64_t wrong = wrong_rows(&p);
    if (wrong || lost(&p))
        fail_msg("%lld rows changed%s: selector %d tail %d dtype %d bits %d causal %d level %d, B "
                 "%lld Hq %lld Hkv %lld Nq %lld Nk %lld D %lld blocks %dx%d, %g in %c of batch "
                 "entry %lld head %lld row %lld channel %lld",
                 (long long)wrong, lost(&p) ? ", and the poison is lost" : "", selector, tail,
                 dtype, precision, p.params.causal, level, (long long)p.B, (long long)p.Hq,
                 (long long)p.Hkv, (long long)p.Nq, (long long)p.Nk, (long long)p.D,
                 p.select.block_q, p.select.block_k, (double)poisons[p.poison].value, "qkv"[p.side],
                 (long long)p.b, (long long)p.h, (long long)p.row, (long long)p.d);
    release(&p);
}

/* Where the processor is slow ($ESA_TEST_SMALL) one draw per combination and every fifth of them:
 * the counter runs through all tails and dtypes. */
static void all_combinations(int32_t precision)
{
    const int small = getenv("ESA_TEST_SMALL") != NULL;
    int number = 0;
    for (int draw = 0; draw < (small ? 1 : 4); draw++)
        for (int32_t selector = ESA_SELECT_FULL; selector <= ESA_SELECT_ERROR; selector++)
            for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_LEVELS; tail++)
                for (int32_t dtype = ESA_DTYPE_F32; dtype <= ESA_DTYPE_BF16; dtype++)
                    if (!small || number++ % 5 == 0) check(selector, tail, dtype, precision);
}

static void test_16_bits(void **state)
{
    (void)state;
    all_combinations(16);
}

static void test_8_bits(void **state)
{
    (void)state;
    all_combinations(8);
}

/* The check finds a row that changes though it may not, and poison that is lost. */
static void test_planted(void **state)
{
    (void)state;
    problem p;
    for (int32_t precision = 8; precision <= 16; precision += 8) {
        do choose(&p, ESA_SELECT_RANDOM, ESA_TAIL_NONE, ESA_DTYPE_F32, precision);
        while (p.side != Q || p.poison != 0 || p.params.causal);
        solve(&p, level_of[0]);
        assert_int_equal(wrong_rows(&p), 0);
        assert_int_equal(lost(&p), 0);
        const int64_t own = (p.b * p.Hq + p.h) * p.Nq + p.row;
        double *other = p.out[1] + (own ? own - 1 : own + 1) * p.D + p.d;
        *other = precision == 8 ? NAN : nextafter(*other, 2);
        assert_int_equal(wrong_rows(&p), 1);
        for (int64_t d = 0; d < p.D; d++) p.out[1][own * p.D + d] = 0;
        assert_int_equal(lost(&p), 1);
        release(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_16_bits),
                                        cmocka_unit_test(test_8_bits),
                                        cmocka_unit_test(test_planted) };
    return cmocka_run_group_tests(tests, begin, NULL);
}
