/* test_cog.c - CogVideoX's transformer and decoder against diffusers: blocks, orders, sessions,
 * batches of frames, tiles; and what is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/cog_cases.h"
#include "model/fail_each.h"
#include "session/session.h"

/* f32 against f32 with another order of sums. */
#define TOLERANCE 2.5e-5

/* Compares with tensor model.CASE.WHAT or clip.CASE of the golden. */
static double error_of(const esa_tensors *golden, const char *what, const float *got, int64_t count)
{
    char name[96];
    int64_t n, one;
    const int64_t every = atoll(esa_tensors_metadata(golden, "every"));
    snprintf(name, sizeof name, "%s.scale", what);
    const float scale = golden_find(golden, name, &one)[0];
    const float *want = golden_find(golden, what, &n);
    assert_int_equal(n, (count + every - 1) / every);
    return golden_error(got, every, want, n, scale);
}

/* ---------------------------------------------------------------- the transformer */

typedef struct watcher {
    const esa_tensors *golden;
    const char *name;
    double worst;
    int32_t seen;
} watcher;

static void watch(void *user, int32_t block, const float *hidden, int64_t rows, int64_t d)
{
    watcher *w = user;
    char what[64];
    snprintf(what, sizeof what, "model.%s.block.%d", w->name, block);
    const double e = error_of(w->golden, what, hidden, rows * d);
    if (!(e <= w->worst)) w->worst = e;
    w->seen++;
}

static void run_case(const cog_case *c, int32_t order, int32_t threads)
{
    dit_bench b;
    cog_open_dit(&b, c, threads, ESA_DEVICE_CPU, 0);
    esa_tensors *golden = golden_open(b.ctx, "cog.safetensors");
    watcher w = { golden, c->name, 0, 0 };
    esa_session_params p = dense(order);
    char what[64];
    if (order == ESA_ORDER_ADAPTIVE) p.select.selector = ESA_SELECT_ERROR; /* it needs it */
    esa_dit_set_watch(b.dit, watch, &w);
    esa_session_free(dit_run(&b, &p));
    snprintf(what, sizeof what, "model.%s.output", c->name);
    const double e = error_of(golden, what, b.v, b.out_count);
    print_message("%s, order %d: blocks %.2e, output %.2e\n", c->name, order, w.worst, e);
    assert_int_equal(w.seen, c->config.layers + 1);
    assert_true(w.worst < TOLERANCE);
    assert_true(e < TOLERANCE);
    esa_tensors_free(golden);
    dit_close(&b);
}

static void blocks_and_output(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COG_CASES; i++) run_case(&cog_cases[i], ESA_ORDER_RASTER, 2);
}

static void orders(void **state)
{
    (void)state;
    run_case(&cog_cases[1], ESA_ORDER_HILBERT, 1);
    run_case(&cog_cases[1], ESA_ORDER_TILE, 2);
    run_case(&cog_cases[0], ESA_ORDER_TILE3D, 2);
    run_case(&cog_cases[1], ESA_ORDER_ADAPTIVE, 2);
}

static double largest(const float *a, const float *b, int64_t count)
{
    double worst = 0, scale = 0;
    for (int64_t i = 0; i < count; i++) {
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        scale = fmax(scale, fabs((double)b[i]));
    }
    return worst / scale;
}

/* Density 1 is the dense result; less is another one, with text kept: the layout says where it is.
 * In the compat modes tiles move the text, which the calls then do. */
static void sessions(void **state)
{
    (void)state;
    static const struct {
        int32_t selector, order, mode;
    } rules[] = { { ESA_SELECT_ENTROPY, ESA_ORDER_HILBERT, ESA_MODE_FIXED },
                  { ESA_SELECT_RF_V2, ESA_ORDER_TILE, ESA_MODE_FIXED },
                  { ESA_SELECT_RF_V2, ESA_ORDER_TILE, ESA_MODE_COMPAT },
                  { ESA_SELECT_ERROR, ESA_ORDER_ADAPTIVE, ESA_MODE_FIXED } };
    const cog_case *c = &cog_cases[1];
    dit_bench b;
    cog_open_dit(&b, c, 2, ESA_DEVICE_CPU, 0);
    esa_session_params p = dense(ESA_ORDER_RASTER);
    esa_session_free(dit_run(&b, &p));
    float *dense = malloc((size_t)b.out_count * 4);
    memcpy(dense, b.v, (size_t)b.out_count * 4);
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        for (int32_t whole = 0; whole < 2; whole++) {
            p = esa_session_params_default();
            p.mode = ESA_SESSION_ONLINE;
            p.select = esa_select_params_default(rules[i].selector);
            p.select.mode = rules[i].mode;
            p.select.layout.order = rules[i].order;
            p.select.budget = whole ? 1 : 0.5;
            p.select.block_q = p.select.block_k = 64;
            p.dense_first_layer = 0;
            esa_session *s = dit_run(&b, &p);
            esa_session_stats stats = { .struct_size = sizeof stats };
            dit_ok(&b, esa_session_get_stats(s, &stats, -1, -1));
            const double e = largest(b.v, dense, b.out_count);
            print_message("selector %d, mode %d, density %.2f: %.2e\n", rules[i].selector,
                          rules[i].mode, stats.density, e);
            assert_true(whole ? e < TOLERANCE : e > 1e-4 && e < 1 && stats.density < 0.95);
            esa_session_free(s);
        }
    free(dense);
    dit_close(&b);
}

static void refusals(void **state)
{
    (void)state;
    const cog_case *c = &cog_cases[1];
    dit_bench b;
    cog_open_dit(&b, c, 1, ESA_DEVICE_CPU, 0);
    esa_layout layout = esa_layout_default();
    static const struct {
        int32_t latent[3];
        const char *says;
    } wrong[] = {
        { { 5, 24, 27 }, "27 width, expected a multiple of 2" },
        { { 0, 24, 26 }, "0 frames, expected a multiple of 1" },
        { { 5, 1 << 21, 26 }, "2097152 height, expected at most 1048576" },
        { { 5, 1 << 20, 1 << 20 }, "1374389534720 tokens, expected at most 67108864" },
    };
    layout.text_front_q = c->config.max_text;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_refused(
            b.ctx,
            esa_dit_begin(b.dit, wrong[i].latent, &layout, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 1),
            ESA_ERR_ARGUMENT, wrong[i].says, NULL);
    layout.text_front_q = 0;
    assert_refused(b.ctx,
                   esa_dit_begin(b.dit, c->latent, &layout, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 1),
                   ESA_ERR_ARGUMENT, "0 rows of text", NULL);
    layout.text_front_q = c->config.max_text;
    dit_ok(&b, esa_dit_begin(b.dit, c->latent, &layout, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 1));
    assert_refused(b.ctx, forward(b.dit, NULL, 0, b.v, b.x, 1), ESA_ERR_STATE,
                   "no text for branch 0", NULL);
    assert_refused(b.ctx, set_text(b.dit, 0, b.text, 3), ESA_ERR_MISMATCH,
                   "3 rows, but self-attention has places for 26", NULL);
    b.ticks = 0;
    b.stop_at = 2; /* after the second block */
    esa_session_params p = dense(ESA_ORDER_RASTER);
    p.layers = c->config.layers;
    p.steps = 1;
    p.select.layout = layout;
    esa_session *s = NULL;
    dit_ok(&b, esa_session_create(b.ctx, &s, &p));
    dit_ok(&b, esa_session_begin(s));
    dit_ok(&b, esa_session_step(s, 0, 0));
    dit_ok(&b, set_text(b.dit, 0, b.text, c->config.max_text));
    assert_refused(b.ctx, forward(b.dit, s, 0, b.v, b.x, 1), ESA_ERR_STATE, "cancelled", NULL);
    esa_session_free(s);
    dit_close(&b);
}

/* ---------------------------------------------------------------- the decoder */

static void clips(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COG_CLIPS; i++) {
        const cog_clip *c = &cog_clips[i];
        bench b;
        char what[64];
        cog_open_vae(&b, c, 1 + i % 2, ESA_DEVICE_CPU);
        esa_tensors *golden = golden_open(b.ctx, "cog.safetensors");
        ok(&b, decode(&b, c->name, c->latent, c->tile));
        snprintf(what, sizeof what, "clip.%s", c->name);
        const double e = error_of(golden, what, b.clip, b.count);
        print_message("%s: %.2e\n", c->name, e);
        assert_true(e < TOLERANCE);
        esa_tensors_free(golden);
        bench_close(&b);
    }
}

/* Bytes are those of the pixels; memory is what was announced. */
static void bytes(void **state)
{
    (void)state;
    for (int32_t i = 2; i < COG_CLIPS; i += 2) {
        const cog_clip *c = &cog_clips[i];
        bench b;
        cog_open_vae(&b, c, 2, ESA_DEVICE_CPU);
        ok(&b, decode(&b, c->name, c->latent, c->tile));
        uint8_t *got = malloc((size_t)b.count);
        const int64_t held = b.nn.held;
        b.nn.peak = 0;
        ok(&b, decode_to(&b, c->name, c->latent, c->tile, got));
        assert_int_equal(b.nn.peak, held + esa_vae_bytes(b.vae, c->latent, c->tile));
        check_bytes(&b, got);
        b.broken = 1;
        assert_refused(b.ctx, decode_to(&b, c->name, c->latent, c->tile, got), ESA_ERR_FORMAT,
                       "NaN", NULL);
        b.broken = 0;
        b.stop_at = 1;
        assert_refused(b.ctx, decode_to(&b, c->name, c->latent, c->tile, got), ESA_ERR_STATE,
                       "cancelled", NULL);
        assert_refused(b.ctx, decode_to(&b, c->name, c->latent, 7, got), ESA_ERR_ARGUMENT,
                       "tile is 7", NULL);
        free(got);
        bench_close(&b);
    }
}

/* ---------------------------------------------------------------- faults */

/* The life of a transformer. The first failure is returned. */
static esa_status dit_life(esa_ctx *ctx, void *from)
{
    const cog_case *c = &cog_cases[0];
    dit_bench *b = from, own = { .ctx = ctx };
    esa_session *session = NULL;
    esa_session_params p = dense(ESA_ORDER_HILBERT);
    esa_nn_init(&own.nn, ctx);
    own.env = (esa_part_env){ .nn = &own.nn, .folder = b->folder.top.dir, .hold = ESA_HOLD_BF16 };
    p.select.layout.text_front_q = c->config.max_text;
    p.layers = c->config.layers;
    p.steps = 1;
    esa_status status = open_dit(&own.env, &own.dit, &esa_cog_dit_kind, &c->config);
    if (!status)
        status = esa_dit_begin(own.dit, c->latent, &p.select.layout, p.select.selector,
                               p.select.mode, 1);
    if (!status) status = set_text(own.dit, 0, b->text, c->config.max_text);
    if (!status) status = esa_session_create(ctx, &session, &p);
    if (!status) status = esa_session_begin(session);
    if (!status) status = esa_session_step(session, 0, 0);
    if (!status) status = forward(own.dit, session, 0, b->v, b->x, c->t);
    snprintf(message, sizeof message, "%s", esa_ctx_error(ctx));
    esa_session_free(session);
    esa_dit_free(own.dit);
    assert_int_equal(own.nn.held, own.nn.scratch_bytes);
    esa_nn_close(&own.nn);
    esa_ctx_trim(ctx);
    return status;
}

/* The same for a decoder. */
static esa_status vae_life(esa_ctx *ctx, void *from)
{
    const cog_clip *c = &cog_clips[0];
    bench own = { .ctx = ctx };
    esa_cog_vae_config config = *c->config;
    config.factor_s = 1 << (config.levels - 1);
    esa_nn_init(&own.nn, ctx);
    own.env = (esa_part_env){ .nn = &own.nn, .folder = ((bench *)from)->folder.top.dir };
    esa_status status = open_vae(&own.env, &own.vae, &esa_cog_vae_kind, &config);
    if (!status) status = decode(&own, c->name, c->latent, c->tile);
    snprintf(message, sizeof message, "%s", esa_ctx_error(ctx));
    esa_vae_free(own.vae);
    free(own.clip);
    assert_int_equal(own.nn.held, own.nn.scratch_bytes);
    esa_nn_close(&own.nn);
    esa_ctx_trim(ctx);
    return status;
}

static void every_allocation(void **state)
{
    (void)state;
    dit_bench d;
    bench v;
    cog_open_dit(&d, &cog_cases[0], 1, ESA_DEVICE_CPU, 0);
    fail_each(dit_life, &d, 20);
    dit_close(&d);
    cog_open_vae(&v, &cog_clips[0], 1, ESA_DEVICE_CPU);
    fail_each(vae_life, &v, 20);
    bench_close(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_and_output), cmocka_unit_test(orders), cmocka_unit_test(sessions),
        cmocka_unit_test(refusals),          cmocka_unit_test(clips),  cmocka_unit_test(bytes),
        cmocka_unit_test(every_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
