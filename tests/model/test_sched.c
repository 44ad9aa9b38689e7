/* test_sched.c - every step of the schedulers against diffusers, both sigma rules.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include "model/fill.h"
#include "model/sched/sched_internal.h"

#define COUNT           64
/* Sigmas are the same f32 numbers up to one rounding. Samples differ by a few f32 roundings per
 * step (seen: 4e-7 of the scale at 50 steps); ten times that is allowed, because another libm
 * rounds logarithms differently. */
#define SIGMA_TOLERANCE 1e-7
#define STEP_TOLERANCE  5e-6

static esa_ctx *ctx;
static esa_nn nn;

static void run_rule(int32_t kind, const char *file)
{
    static const double list[] = { 1.0, 0.9375, 0.7, 0.3 }; /* as in wan_sched.py */
    static const int32_t steps[] = { 1, 2, 3, 8, 20, 50, 4 };
    const size_t cases = kind == ESA_SCHED_UNIPC_036 ? 6 : 7; /* the last has the list */
    static const double shifts[] = { 1, 3, 5, 12 };
    esa_tensors *golden = golden_open(ctx, file);
    float noise[COUNT], x[COUNT], v[COUNT];
    fill_tensor(noise, COUNT, "sched.noise", 1.0f, 0);
    double worst = 0;
    for (size_t a = 0; a < cases; a++)
        for (size_t b = 0; b < sizeof shifts / sizeof *shifts; b++) {
            const esa_sched_config config = { .kind = kind,
                                              .train_steps = 1000,
                                              .order = 2,
                                              .shift = shifts[b],
                                              .list = a == 6 ? list : NULL };
            char which[16];
            snprintf(which, sizeof which, a == 6 ? "list" : "%d", steps[a]);
            esa_sched *s = NULL;
            assert_int_equal(esa_sched_create(&nn, &s, &config, steps[a], COUNT), ESA_OK);
            char name[64];
            int64_t n;
            snprintf(name, sizeof name, "%s.%g.sigmas", which, shifts[b]);
            const float *sigma = golden_find(golden, name, &n);
            assert_int_equal(n, steps[a] + 1);
            for (int32_t i = 0; i <= steps[a]; i++)
                assert_true(fabs(esa_sched_sigma(s, i) - (double)sigma[i]) <= SIGMA_TOLERANCE);
            snprintf(name, sizeof name, "%s.%g.timesteps", which, shifts[b]);
            const float *t = golden_find(golden, name, &n);
            for (int32_t i = 0; i < steps[a]; i++)
                assert_true(fabs(esa_sched_timestep(s, i) - (double)t[i]) <=
                            (kind == ESA_SCHED_EULER ? 1e-3 : 0));
            snprintf(name, sizeof name, "%s.%g.samples", which, shifts[b]);
            const float *samples = golden_find(golden, name, &n);
            fill_tensor(x, COUNT, "sched.x", 2.0f, 0);
            for (int32_t i = 0; i < steps[a]; i++) {
                for (int32_t k = 0; k < COUNT; k++)
                    v[k] = sinf(3 * x[k]) + (float)esa_sched_timestep(s, i) / 1000.0f * noise[k];
                assert_int_equal(esa_sched_step(s, i, x, v, NULL), ESA_OK);
                double scale = 0;
                for (int32_t k = 0; k < COUNT; k++)
                    scale = fmax(scale, fabs((double)samples[i * COUNT + k]));
                const double e = golden_error(x, 1, samples + i * COUNT, COUNT, scale);
                if (!(e < STEP_TOLERANCE))
                    print_error("%s: %d steps, shift %g, step %d: %.2e\n", file, steps[a],
                                shifts[b], i, e);
                assert_true(e < STEP_TOLERANCE);
                worst = fmax(worst, e);
            }
            assert_int_equal(esa_sched_step(s, steps[a], x, v, NULL), ESA_ERR_STATE);
            esa_sched_free(s);
        }
    print_message("%s: worst step %.2e\n", file, worst);
    esa_tensors_free(golden);
}

static void unipc(void **state)
{
    (void)state;
    run_rule(ESA_SCHED_UNIPC, "sched_unipc.safetensors");
}
static void unipc_036(void **state)
{
    (void)state;
    run_rule(ESA_SCHED_UNIPC_036, "sched_unipc_036.safetensors");
}
static void euler(void **state)
{
    (void)state;
    run_rule(ESA_SCHED_EULER, "sched_euler.safetensors");
}

/* The rules of tools/golden/cog.py. */
static const esa_sched_config cog_rules[] = {
    { .kind = ESA_SCHED_DDIM, .snr_shift = 3, .zero_snr = 1, .last_is_clean = 1 },
    { .kind = ESA_SCHED_DDIM, .snr_shift = 3, .zero_snr = 1, .last_is_clean = 1 },
    { .kind = ESA_SCHED_DDIM, .snr_shift = 1, .spacing = ESA_SPACING_LEADING, .offset = 1 },
    { .kind = ESA_SCHED_DDIM, .snr_shift = 1, .last_is_clean = 1, .spacing = ESA_SPACING_LINSPACE },
    { .kind = ESA_SCHED_DPM, .snr_shift = 1, .zero_snr = 1, .last_is_clean = 1 },
    { .kind = ESA_SCHED_DPM, .snr_shift = 1, .zero_snr = 1, .last_is_clean = 1 },
    { .kind = ESA_SCHED_DPM, .snr_shift = 1, .zero_snr = 1, .last_is_clean = 1 },
    { .kind = ESA_SCHED_DPM, .snr_shift = 3, .spacing = ESA_SPACING_LEADING, .offset = 1 },
};

static void run_cog(const esa_tensors *golden, int32_t rule)
{
    esa_sched_config config = cog_rules[rule];
    config.train_steps = 1000;
    config.shift = 1;
    config.beta_first = 0.00085;
    config.beta_last = 0.012;
    char name[64];
    int64_t n, count;
    snprintf(name, sizeof name, "sched.%d.timesteps", rule);
    const float *t = golden_find(golden, name, &n);
    snprintf(name, sizeof name, "sched.%d.samples", rule);
    const float *want = golden_find(golden, name, &count);
    snprintf(name, sizeof name, "sched.%d.draws", rule);
    const float *draws = golden_find(golden, name, &count);
    esa_sched *s = NULL;
    assert_int_equal(esa_sched_create(&nn, &s, &config, (int32_t)n, COUNT), ESA_OK);
    float x[COUNT], v[COUNT], noise[COUNT];
    fill_tensor(x, COUNT, "sched.noise", 1.0f, 0);
    double worst = 0;
    int32_t drawn = 0;
    for (int32_t i = 0; i < n; i++) {
        double scale = 0;
        assert_true(esa_sched_timestep(s, i) == (double)t[i]);
        assert_int_equal(esa_sched_draws(s, i), (int)draws[i]);
        drawn += (int)draws[i];
        snprintf(name, sizeof name, "sched.draw.%d", drawn - 1);
        fill_tensor(noise, COUNT, name, 1.0f, 0);
        snprintf(name, sizeof name, "sched.v.%d", i);
        fill_tensor(v, COUNT, name, 1.0f, 0);
        assert_int_equal(esa_sched_step(s, i, x, v, noise), ESA_OK);
        for (int32_t k = 0; k < COUNT; k++) scale = fmax(scale, fabs((double)want[i * COUNT + k]));
        worst = fmax(worst, golden_error(x, 1, want + i * COUNT, COUNT, scale));
        assert_true(esa_sched_sigma(s, i) > esa_sched_sigma(s, i + 1));
    }
    print_message("rule %d, %d steps: worst step %.2e\n", rule, (int)n, worst);
    assert_true(worst < STEP_TOLERANCE);
    esa_sched_free(s);
}

static void cog(void **state)
{
    (void)state;
    esa_tensors *golden = golden_open(ctx, "cog.safetensors");
    for (int32_t i = 0; i < (int32_t)(sizeof cog_rules / sizeof cog_rules[0]); i++)
        run_cog(golden, i);
    esa_tensors_free(golden);
}

static void bad_calls(void **state)
{
    (void)state;
    esa_sched_config config = {
        .kind = ESA_SCHED_UNIPC, .train_steps = 1000, .order = 2, .shift = 3
    };
    esa_sched *s = NULL;
    float x[4] = { 0 }, v[4] = { 0 };
    assert_int_equal(esa_sched_create(&nn, &s, &config, 0, 4), ESA_ERR_ARGUMENT);
    assert_null(s);
    assert_int_equal(esa_sched_create(&nn, &s, &config, 2, INT64_MAX), ESA_ERR_MEMORY);
    config.shift = -1;
    assert_int_equal(esa_sched_create(&nn, &s, &config, 2, 4), ESA_ERR_ARGUMENT);
    config.shift = 3;
    assert_int_equal(esa_sched_create(&nn, &s, &config, 2, 4), ESA_OK);
    assert_int_equal(esa_sched_step(s, 1, x, v, NULL), ESA_ERR_STATE);
    assert_int_equal(esa_sched_step(s, 0, x, v, NULL), ESA_OK);
    assert_int_equal(esa_sched_step(s, 0, x, v, NULL), ESA_ERR_STATE);
    esa_sched_free(s);
    config = cog_rules[0];
    config.train_steps = 5;
    config.shift = 1;
    assert_int_equal(esa_sched_create(&nn, &s, &config, 6, 4), ESA_ERR_ARGUMENT);
    esa_sched_free(NULL);
}

/* A sample that is made of a clean one and noise, with the velocity that belongs to them: behind
 * every step the clean one is found again. Flows of any order keep such samples where they are, as
 * does DDIM. */
static void clean(void **state)
{
    (void)state;
    static const esa_sched_config rules[] = {
        { .kind = ESA_SCHED_EULER, .order = 2, .to_zero = 1, .shift = 3 },
        { .kind = ESA_SCHED_UNIPC, .order = 2, .shift = 5 },
        { .kind = ESA_SCHED_DDIM, .snr_shift = 3, .zero_snr = 1, .last_is_clean = 1, .shift = 1 },
        { .kind = ESA_SCHED_DDIM, .snr_shift = 1, .spacing = ESA_SPACING_LEADING, .shift = 1 },
    };
    enum { STEPS = 8 }; /* divides 1000: else DDIM steps to other signals than it goes on from */
    float first[COUNT], noise[COUNT], x[COUNT], v[COUNT];
    fill_tensor(first, COUNT, "sched.clean", 1.0f, 0);
    fill_tensor(noise, COUNT, "sched.noise", 1.0f, 0);
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        esa_sched_config config = rules[r];
        config.train_steps = 1000;
        config.beta_first = 0.00085;
        config.beta_last = 0.012;
        esa_sched *s = NULL;
        double worst = 0;
        assert_int_equal(esa_sched_create(&nn, &s, &config, STEPS, COUNT), ESA_OK);
        for (int32_t i = 0; i < STEPS; i++) {
            const double part = s->signal ? sqrt(s->signal[i]) : 1 - esa_sched_sigma(s, i),
                         rest = s->signal ? sqrt(1 - s->signal[i]) : esa_sched_sigma(s, i);
            float of_x, of_v;
            for (int32_t k = 0; k < COUNT; k++) {
                if (i == 0) x[k] = (float)(part * first[k] + rest * noise[k]);
                v[k] = s->signal ? (float)(part * noise[k] - rest * first[k]) : noise[k] - first[k];
            }
            assert_int_equal(esa_sched_step(s, i, x, v, NULL), ESA_OK);
            esa_sched_clean(s, i, &of_x, &of_v);
            for (int32_t k = 0; k < COUNT; k++)
                worst = fmax(worst, fabs((double)of_x * x[k] + (double)of_v * v[k] - first[k]));
        }
        print_message("rule %zu: off by %.1e\n", r, worst);
        /* f32 samples of size 1 through eight steps: some roundings of 6e-8 for each */
        assert_true(worst < 1e-5);
        esa_sched_free(s);
    }
}

int main(void)
{
    if (esa_ctx_create(&ctx, NULL) != ESA_OK) return 1;
    esa_nn_init(&nn, ctx);
    const struct CMUnitTest tests[] = { cmocka_unit_test(unipc), cmocka_unit_test(unipc_036),
                                        cmocka_unit_test(euler), cmocka_unit_test(cog),
                                        cmocka_unit_test(clean), cmocka_unit_test(bad_calls) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    return failed;
}
