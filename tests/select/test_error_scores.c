/* test_error_scores.c - scores of the error selector against the rule in double, on random problems
 * of awkward size; and the same bits for any number of threads and any window.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/error_case.h"
#include "cpu/cpu.h"

static float *scores_of(const error_case *c, const esa_ctx *ctx, const esa_cpu_kernels *kern,
                        int64_t window)
{
    esa_select_args a = c->args;
    const size_t n = (size_t)(c->levels * c->B * c->Hq * c->nq * c->nk);
    a.kern = kern;
    a.pool = ctx->pool;
    a.window = window;
    const int64_t bytes = esa_select_errors_workspace(&a);
    void *ws = esa_mem_alloc(&ctx->mem, bytes);
    float *out = malloc(n * sizeof *out);
    assert_true(ws && out);
    memset(ws, 0xff, (size_t)bytes); /* scratch holds NaN before the call */
    memset(out, 0xff, n * sizeof *out);
    esa_select_errors(&a, out, ws);
    esa_mem_free(&ctx->mem, ws, bytes);
    return out;
}

static void check_scores(const error_case *c, const float *got)
{
    const int64_t cells = c->nq * c->nk, plane = c->B * c->Hq * cells;
    double *want = malloc((size_t)(c->levels * cells) * sizeof *want),
           *room = malloc((size_t)(c->levels * cells) * sizeof *room);
    assert_true(want && room);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t h = 0; h < c->Hq; h++) {
            case_scores(c, want, room, b, h);
            for (int64_t l = 0; l < c->levels; l++)
                for (int64_t i = 0; i < cells; i++) {
                    const double x = (double)got[l * plane + (b * c->Hq + h) * cells + i],
                                 y = want[l * cells + i], r = room[l * cells + i];
                    if (!(fabs(x - y) <= 2.0 * sqrt(y * r) + r))
                        fail_msg("score %.9g of level %d, cell %d, expected %.9g within %g: %s", x,
                                 (int)l, (int)i, y, 2.0 * sqrt(y * r) + r, c->name);
                }
        }
    free(want);
    free(room);
}

static void scores_follow_the_rule(void **state)
{
    esa_rng r = { kit_seed("scores_follow_the_rule") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    /* where the machine is slow, fewer */
    const int rounds = getenv("ESA_TEST_SMALL") ? 20 : 80;
    for (int round = 0; round < rounds; round++) {
        error_case c;
        case_make(&c, &r);
        for (int32_t level = ESA_CPU_REF; level < ESA_CPU_LEVELS; level++) {
            const esa_cpu_kernels *kern = esa_cpu_kernels_get(level);
            if (!kern || esa_cpu_vectors(level) != level)
                continue; /* the f32 set of another level */
            float *got = scores_of(&c, ctx, kern, 0);
            check_scores(&c, got);
            free(got);
        }
        case_free(&c);
    }
    esa_ctx_free(ctx);
}

/* Every size of groups at the usual blocks, with a short last block and a short last group. */
static void groups_of_any_size_follow_the_rule(void **state)
{
    static const int32_t sizes[] = { 1, 2, 4, 8, 16 };
    esa_rng r = { kit_seed("groups_of_any_size_follow_the_rule") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 50; round++) {
        error_case c;
        memset(&c, 0, sizeof c);
        esa_select_params *p = &c.args.params;
        *p = esa_select_params_default(ESA_SELECT_ERROR);
        p->block_q = p->block_k = round < 25 ? 64 : 128;
        p->group_q = sizes[round % 5];
        p->group_k = sizes[round / 5 % 5];
        p->tail = ESA_TAIL_LEVELS;
        p->fine = p->block_k / p->group_k < 16 ? 2 : 4; /* longer than a group */
        p->layout.order = ESA_ORDER_RASTER;
        p->layout.protect_first_frame = 0;
        c.B = 1;
        c.Hkv = 1;
        c.Hq = 2;
        c.Nq = 131 + esa_rng_below(&r, 40);
        c.Nk = 131 + esa_rng_below(&r, 40);
        c.D = 40;
        case_fill(&c, &r, round % 3, 0, 1.5f, round % 2);
        float *got = scores_of(&c, ctx, ctx->kern, 0);
        check_scores(&c, got);
        free(got);
        case_free(&c);
    }
    esa_ctx_free(ctx);
}

static void same_bits_for_any_number_of_threads(void **state)
{
    esa_rng r = { kit_seed("same_bits_for_any_number_of_threads") };
    esa_ctx *one = kit_ctx(1), *two = kit_ctx(2), *three = kit_ctx(3);
    (void)state;
    for (int round = 0; round < 30; round++) {
        error_case c;
        case_make(&c, &r);
        const size_t bytes = (size_t)(c.levels * c.B * c.Hq * c.nq * c.nk) * sizeof(float);
        float *a = scores_of(&c, one, one->kern, 0), *b = scores_of(&c, two, two->kern, 1),
              *d = scores_of(&c, three, three->kern, 0);
        if (memcmp(a, b, bytes) || memcmp(a, d, bytes)) fail_msg("other bits: %s", c.name);
        free(a);
        free(b);
        free(d);
        case_free(&c);
    }
    esa_ctx_free(one);
    esa_ctx_free(two);
    esa_ctx_free(three);
}

static void set_all(kit_tensor *t, int64_t n, float x)
{
    for (int64_t i = 0; i < n; i++) esa_store_f32(t->data, i, t->view.dtype, x);
}

/* Equal keys and values: the mean of a block is as good as the block. One value for all keys: no
 * weight can be wrong. */
static void homogeneous_blocks_have_no_error(void **state)
{
    esa_rng r = { kit_seed("homogeneous_blocks_have_no_error") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 12; round++) {
        error_case c;
        do { /* tail NONE drops weight, which is an error with equal keys too */
            memset(&c, 0, sizeof c);
            case_make(&c, &r);
            if (c.args.params.tail != ESA_TAIL_NONE) break;
            case_free(&c);
        } while (1);
        const int64_t n = c.B * c.Hkv * c.Nk * c.D;
        set_all(&c.v, n, 0.75f);
        float *got = scores_of(&c, ctx, ctx->kern, 0);
        for (int64_t i = 0; i < c.levels * c.B * c.Hq * c.nq * c.nk; i++)
            /* rounding of a weight, squared, times |v|^2 */
            if (!(got[i] >= 0.0f && (double)got[i] <= 1e-10 * (double)c.D))
                fail_msg("equal values, score %g: %s", (double)got[i], c.name);
        free(got);
        set_all(&c.k, n, -0.5f);
        got = scores_of(&c, ctx, ctx->kern, 0);
        for (int64_t i = 0; i < c.levels * c.B * c.Hq * c.nq * c.nk; i++)
            if (!(got[i] >= 0.0f && (double)got[i] <= 1e-10 * (double)c.D))
                fail_msg("equal keys and values, score %g: %s", (double)got[i], c.name);
        free(got);
        case_free(&c);
    }
    esa_ctx_free(ctx);
}

/* NaN or infinity in an input gives some score, and only its own heads see it. */
static void odd_numbers_stay_in_their_head(void **state)
{
    esa_rng r = { kit_seed("odd_numbers_stay_in_their_head") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 24; round++) {
        error_case c;
        case_make(&c, &r);
        kit_tensor *t = round % 3 == 0 ? &c.q : round % 3 == 1 ? &c.k : &c.v;
        const int64_t cells = c.nq * c.nk, plane = c.B * c.Hq * cells,
                      H = round % 3 == 0 ? c.Hq : c.Hkv, ratio = c.Hq / H;
        float *before = scores_of(&c, ctx, ctx->kern, 0);
        const int64_t at = esa_rng_below(&r, (uint32_t)t->view.dim[2]) * t->view.stride[2];
        esa_store_f32(t->data, at, t->view.dtype, round % 2 ? NAN : INFINITY);
        float *after = scores_of(&c, ctx, ctx->kern, 0);
        for (int64_t l = 0; l < c.levels; l++)
            for (int64_t h = ratio; h < c.B * c.Hq; h++)
                assert_memory_equal(before + l * plane + h * cells, after + l * plane + h * cells,
                                    (size_t)cells * sizeof *before);
        free(before);
        free(after);
        case_free(&c);
    }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_follow_the_rule),
        cmocka_unit_test(groups_of_any_size_follow_the_rule),
        cmocka_unit_test(same_bits_for_any_number_of_threads),
        cmocka_unit_test(homogeneous_blocks_have_no_error),
        cmocka_unit_test(odd_numbers_stay_in_their_head),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
