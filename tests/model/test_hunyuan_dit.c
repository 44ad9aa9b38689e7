/* test_hunyuan_dit.c - the transformer against diffusers, block by block; orders, threads and
 * density 1 do not change the result; the scheduler; wrong files and texts are refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/hunyuan_cases.h"
#include "model/sched/sched.h"

typedef struct watcher {
    const dit_bench *b;
    const hunyuan_dit_case *c;
    esa_tensors *golden;
    int32_t seen;
    double worst;
} watcher;

static void watch(void *user, int32_t block, const float *hidden, int64_t rows, int64_t d)
{
    watcher *w = user;
    char name[64];
    assert_int_equal(rows, w->b->tokens + w->c->rows);
    snprintf(name, sizeof name, "%s.block.%d", w->c->name, block);
    /* what the padding holds does not matter */
    const double e = hunyuan_compare(w->golden, name, hidden, (w->b->tokens + w->c->valid) * d);
    w->worst = fmax(w->worst, e);
    w->seen++;
}

static void check_case(const hunyuan_dit_case *c, int32_t order, int32_t watched)
{
    dit_bench b;
    char name[64];
    hunyuan_open(&b, c, 2, ESA_DEVICE_CPU, 0, 0);
    watcher w = { .b = &b, .c = c, .golden = golden_open(b.ctx, "hunyuan.safetensors") };
    if (watched) esa_dit_set_watch(b.dit, watch, &w);
    esa_session_params p = dense(order);
    esa_session_free(dit_run(&b, &p));
    snprintf(name, sizeof name, "%s.output", c->name);
    const double e = hunyuan_compare(w.golden, name, b.v, b.out_count);
    print_message("%s, order %d: blocks %.2e, output %.2e\n", c->name, order, w.worst, e);
    assert_int_equal(w.seen, watched ? p.layers + 1 : 0);
    esa_tensors_free(w.golden);
    dit_close(&b);
}

static void blocks_and_output(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof hunyuan_dits / sizeof hunyuan_dits[0]; i++)
        check_case(&hunyuan_dits[i], ESA_ORDER_RASTER, 1);
    /* without a watcher the last block leaves out what is not needed */
    check_case(&hunyuan_dits[0], ESA_ORDER_RASTER, 0);
    check_case(&hunyuan_dits[1], ESA_ORDER_HILBERT, 1);
    check_case(&hunyuan_dits[2], ESA_ORDER_TILE3D, 1);
}

/* The same bits with 1 and 3 threads; everything kept is the dense result. */
static void threads_and_density(void **unused)
{
    (void)unused;
    dit_bench one, three;
    hunyuan_open(&one, &hunyuan_dits[1], 1, ESA_DEVICE_CPU, 0, 0);
    hunyuan_open(&three, &hunyuan_dits[1], 3, ESA_DEVICE_CPU, 0, 0);
    esa_session_params p = esa_session_params_default(), q = p, dense = p;
    p.mode = q.mode = ESA_SESSION_ONLINE;
    p.dense_first_layer = q.dense_first_layer = 0;
    p.select.budget = q.select.budget = 0.5;
    esa_session_free(dit_run(&one, &p));
    esa_session *s = dit_run(&three, &q);
    esa_session_stats stats = { .struct_size = sizeof stats };
    dit_ok(&three, esa_session_get_stats(s, &stats, -1, -1));
    assert_int_equal(stats.sparse_calls, p.layers);
    assert_true(stats.density < 0.95);
    esa_session_free(s);
    assert_memory_equal(one.v, three.v, (size_t)one.out_count * 4);
    dense.mode = ESA_SESSION_DENSE;
    esa_session_free(dit_run(&one, &dense));
    q.select.budget = 1;
    esa_session_free(dit_run(&three, &q));
    const double e = golden_error(one.v, 1, three.v, one.out_count, 1);
    print_message("density 1 against dense: %.2e\n", e);
    assert_true(e < 1e-4); /* values up to 5, another order of sums */
    dit_close(&one);
    dit_close(&three);
}

/* Sigmas and timesteps are the same f32 numbers up to a rounding, and so are the samples of a run.
 */
static void schedule(void **unused)
{
    (void)unused;
    hunyuan_bench b;
    hunyuan_begin(&b, 1, ESA_DEVICE_CPU);
    esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
    static const int32_t list[] = { 1, 5, 50 };
    for (int32_t k = 0; k < 3; k++) {
        const esa_sched_config config = {
            .kind = ESA_SCHED_EULER, .train_steps = 1000, .shift = 7, .to_zero = 1
        };
        const float *want[3];
        static const char *const what[3] = { "sigmas", "timesteps", "x" };
        esa_sched *s;
        float x[100], v[100];
        for (int32_t i = 0; i < 3; i++) {
            char name[64];
            int64_t n;
            snprintf(name, sizeof name, "sched.%d.%s", list[k], what[i]);
            want[i] = golden_find(golden, name, &n);
        }
        hunyuan_ok(&b, esa_sched_create(&b.nn, &s, &config, list[k], 100));
        fill_tensor(x, 100, "sched.x", 2.0f, 0);
        for (int32_t i = 0; i < list[k]; i++) {
            char name[64];
            assert_true(fabs(esa_sched_sigma(s, i) - (double)want[0][i]) <= 1e-7);
            assert_true(fabs(esa_sched_timestep(s, i) - (double)want[1][i]) <= 1e-4);
            snprintf(name, sizeof name, "sched.v.%d", i);
            fill_tensor(v, 100, name, 1.0f, 0);
            hunyuan_ok(&b, esa_sched_step(s, i, x, v, NULL));
        }
        assert_true(golden_error(x, 1, want[2], 100, 2) < 1e-6);
        esa_sched_free(s);
    }
    esa_tensors_free(golden);
    hunyuan_end(&b);
}

static void refuses(void **unused)
{
    (void)unused;
    dit_bench b;
    hunyuan_open(&b, &hunyuan_dits[0], 1, ESA_DEVICE_CPU, 0, 0);
    esa_hunyuan_config other = hunyuan_dits[0].config;
    other.singles = 2;
    assert_refused(b.ctx, check_dit(&b.env, &esa_hunyuan_dit_kind, &other), ESA_ERR_MISMATCH,
                   "single_transformer_blocks.1", NULL);
    other = hunyuan_dits[0].config;
    other.guidance = 0;
    assert_refused(b.ctx, check_dit(&b.env, &esa_hunyuan_dit_kind, &other), ESA_ERR_MISMATCH,
                   "guidance_embedder", NULL);
    esa_layout layout = esa_layout_default();
    const int32_t latent[3] = { 1, 6, 8 };
    assert_refused(b.ctx, esa_dit_begin(b.dit, latent, &layout, ESA_SELECT_ENTROPY, 0, 1),
                   ESA_ERR_ARGUMENT, "text", NULL);
    layout.text_back_q = 12;
    dit_ok(&b, esa_dit_begin(b.dit, latent, &layout, ESA_SELECT_ENTROPY, 0, 1));
    esa_text text = { .data = b.text, .pooled = b.pooled, .rows = 13, .valid = 13 };
    assert_refused(b.ctx, esa_dit_text(b.dit, 0, &text), ESA_ERR_ARGUMENT, "13 rows", NULL);
    text.rows = 12;
    text.valid = 0;
    assert_refused(b.ctx, esa_dit_text(b.dit, 0, &text), ESA_ERR_ARGUMENT, "0 of them", NULL);
    const esa_dit_call call = { .branch = 0 };
    assert_refused(b.ctx, esa_dit_forward(b.dit, &call), ESA_ERR_STATE, "no text", NULL);
    dit_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(blocks_and_output),
                                        cmocka_unit_test(threads_and_density),
                                        cmocka_unit_test(schedule), cmocka_unit_test(refuses) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
