/* test_step_cache.c - the rule of the step cache, and whole runs with it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_video.h"
#include "rules/step_cache.h"

/* ---------------------------------------------------------------- the rule */

/* Runs the rule over steps of a velocity that turns evenly: x moves by 1 a step, and the velocity
 * by `turn` times that. Marks computed steps with C, others with a dot. */
static void pattern(char *out, double threshold, int32_t steps, int32_t warmup, double turn)
{
    esa_step_cache c = esa_step_cache_begin(threshold, steps, warmup);
    int32_t skip = 0, since = 0;
    for (int32_t i = 0; i < steps; i++) {
        const esa_step_figures f = { .x_change = 1,
                                     .v_size = { 10, 5 },
                                     .v_change = { turn * since, turn * since / 4 } };
        out[i] = skip ? '.' : 'C';
        if (!skip) since = 0;
        since++;
        skip = esa_step_cache_next(&c, i, out[i] == 'C', &f);
    }
    out[steps] = 0;
}

static void rule(void **state)
{
    (void)state;
    char got[64];
    /* a change of 0.02 a step: two steps below 0.05, the third reaches 0.06 */
    pattern(got, 0.05, 12, 0, 0.2);
    assert_string_equal(got, "CC..C..C..CC"); /* the last one is always computed */
    pattern(got, 0.03, 8, 0, 0.2);
    assert_string_equal(got, "CC.C.C.C");
    pattern(got, 0.02, 8, 0, 0.2); /* not below the threshold */
    assert_string_equal(got, "CCCCCCCC");
    pattern(got, 100, 12, 5, 0.2); /* the warm-up is computed */
    assert_string_equal(got, "CCCCC......C");
    pattern(got, 100, 40, 0, 0.2); /* so is a tenth of the steps */
    assert_string_equal(got, "CCCC...................................C");
    pattern(got, 100, 3, 0, 0.2); /* two velocities are needed to know how fast they change */
    assert_string_equal(got, "CCC");
    pattern(got, 100, 1, 0, 0.2);
    assert_string_equal(got, "C");
    pattern(got, 100, 12, 0, (double)NAN);
    assert_string_equal(got, "CCCCCCCCCCCC");
}

/* The branch that changes more decides: its size is smaller here. */
static void branches(void **state)
{
    (void)state;
    esa_step_cache c = esa_step_cache_begin(0.05, 10, 0);
    const esa_step_figures f[2] = {
        { .x_change = 1, .v_size = { 10, 2 } },
        { .x_change = 1, .v_size = { 10, 2 }, .v_change = { .1, .1 } }
    };
    assert_int_equal(esa_step_cache_next(&c, 0, 1, &f[0]), 0);
    assert_int_equal(esa_step_cache_next(&c, 1, 1, &f[1]), 0); /* 0.01 and 0.05 */
    c = esa_step_cache_begin(0.051, 10, 0);
    assert_int_equal(esa_step_cache_next(&c, 0, 1, &f[0]), 0);
    assert_int_equal(esa_step_cache_next(&c, 1, 1, &f[1]), 1);
}

/* ---------------------------------------------------------------- runs */

static esa_model *open_model(esa_ctx *ctx)
{
    char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    esa_model *model;
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    if (esa_model_open(ctx, &model, path, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return model;
}

static esa_generate_params small(const char *latents)
{
    esa_generate_params p = esa_generate_params_default();
    p.prompt = "a red ball rolls to the right over a blue floor";
    p.frames = 5;
    p.height = p.width = 64;
    p.steps = 10;
    p.decode = 0;
    p.save_latents = latents;
    return p;
}

/* The bytes of the latents file of a run; the caller frees them. */
static char *run(esa_ctx *ctx, esa_model *model, const esa_generate_params *p, int64_t *size,
                 esa_generate_stats *stats)
{
    esa_frames *frames;
    *stats = (esa_generate_stats){ .struct_size = sizeof *stats };
    if (esa_generate(model, &frames, p, stats) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    FILE *file = fopen(p->save_latents, "rb");
    assert_non_null(file);
    char *bytes = malloc(1 << 20);
    assert_non_null(bytes);
    *size = (int64_t)fread(bytes, 1, 1 << 20, file);
    fclose(file);
    assert_true(*size > 1000);
    return bytes;
}

static void runs(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char path[640];
    char *bits[4];
    int64_t size[4];
    esa_generate_stats stats;
    snprintf(path, sizeof path, "%s", scratch_path(&s, "latents"));
    for (int32_t threads = 1; threads < 3; threads++) {
        esa_ctx_params cp = esa_ctx_params_default();
        esa_ctx *ctx;
        cp.threads = threads;
        assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
        esa_model *model = open_model(ctx);
        esa_generate_params p = small(path);
        bits[0] = run(ctx, model, &p, &size[0], &stats);
        assert_int_equal(stats.computed_steps, 10);
        p.cache = 1e-9; /* nothing is left out: the same bits as without */
        bits[1] = run(ctx, model, &p, &size[1], &stats);
        assert_int_equal(stats.computed_steps, 10);
        assert_true(size[0] == size[1] && !memcmp(bits[0], bits[1], (size_t)size[0]));
        free(bits[1]);
        p.cache = 100; /* all that may be left out: steps 0, 1 and 9 are computed */
        p.session.mode = ESA_SESSION_ONLINE;
        p.session.warmup_frac = 0;
        bits[1 + threads] = run(ctx, model, &p, &size[1 + threads], &stats);
        assert_int_equal(stats.computed_steps, 3);
        assert_int_equal(stats.session.calls, 3 * 2 * 8);
        free(bits[0]);
        esa_model_free(model);
        esa_ctx_free(ctx);
    }
    assert_true(size[2] == size[3] && !memcmp(bits[2], bits[3], (size_t)size[2]));
    free(bits[2]);
    free(bits[3]);
    scratch_remove(&s);
}

static void refused(void **state)
{
    (void)state;
    esa_ctx *ctx;
    esa_frames *frames;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_model *model = open_model(ctx);
    esa_generate_params p = small(NULL);
    p.cache = -1;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "cache is -1",
                   NULL);
    p.cache = (double)NAN;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "cache", NULL);
    for (int32_t i = ESA_PRESET_FAITHFUL; i <= ESA_PRESET_FAST; i++)
        assert_true(esa_preset_cache(i) > 0 && esa_preset_cache(i) < 0.1);
    assert_true(isnan(esa_preset_cache(-1)) && isnan(esa_preset_cache(3)));
    p.cache = 0.1;
    p.session.mode = ESA_SESSION_RECORD;
    p.record = "recording";
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "step cache",
                   NULL);
    esa_model_free(model);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(rule), cmocka_unit_test(branches),
                                        cmocka_unit_test(runs), cmocka_unit_test(refused) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
