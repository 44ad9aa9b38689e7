/* test_hunyuan_dit.c - the transformer against diffusers, block by block; orders, threads and
 * density 1 do not change the result; the scheduler; wrong files and texts are refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/hunyuan_dit.h"
#include "model/hunyuan_cases.h"
#include "model/sched/sched.h"

typedef struct dit_run {
    hunyuan_bench b;
    const hunyuan_dit_case *c;
    wan_folder folder;
    esa_hunyuan_dit *dit;
    esa_tensors *golden;
    float *x, *v, *text, *pooled;
    int64_t in, out, tokens;
    int32_t seen;
    double worst;
} dit_run;

static float *filled(const dit_run *r, const char *what, int64_t count, float scale)
{
    float *data = malloc((size_t)count * 4);
    char name[64];
    assert_non_null(data);
    snprintf(name, sizeof name, "%s.%s", r->c->name, what);
    fill_tensor(data, count, name, scale, 0);
    return data;
}

static void run_open(dit_run *r, const hunyuan_dit_case *c, int32_t threads)
{
    *r = (dit_run){ .c = c };
    hunyuan_begin(&r->b, threads, ESA_DEVICE_CPU);
    r->folder = hunyuan_folder(r->b.ctx, c->name, "transformer",
                               "diffusion_pytorch_model.safetensors");
    r->b.env.folder = r->folder.top.dir;
    hunyuan_ok(&r->b, esa_hunyuan_dit_open(&r->b.env, &r->dit, &c->config));
    r->golden = golden_open(r->b.ctx, "hunyuan.safetensors");
    const int64_t volume = (int64_t)c->latent[0] * c->latent[1] * c->latent[2];
    r->in = volume * c->config.in_channels;
    r->out = volume * c->config.out_channels;
    r->tokens = volume / (c->config.patch[0] * c->config.patch[1] * c->config.patch[2]);
    r->x = filled(r, "latents", r->in, 2.0f);
    r->v = malloc((size_t)r->out * 4);
    r->text = filled(r, "text", c->rows * c->config.text_dim, 1.0f);
    r->pooled = filled(r, "pooled", c->config.pooled_dim, 1.0f);
}

static void run_close(dit_run *r)
{
    esa_hunyuan_dit_free(r->dit);
    esa_tensors_free(r->golden);
    wan_folder_remove(&r->folder);
    hunyuan_end(&r->b);
    free(r->x);
    free(r->v);
    free(r->text);
    free(r->pooled);
}

static void watch(void *user, int32_t block, const float *hidden, int64_t tokens, int64_t d)
{
    dit_run *r = user;
    char name[64];
    assert_int_equal(tokens, r->tokens + r->c->rows);
    snprintf(name, sizeof name, "%s.block.%d", r->c->name, block);
    /* what the padding holds does not matter */
    const double e = hunyuan_compare(r->golden, name, hidden, (r->tokens + r->c->valid) * d);
    r->worst = fmax(r->worst, e);
    r->seen++;
}

/* One forward as step 0 of 1. The caller frees the session. */
static esa_session *run_forward(dit_run *r, esa_session_params *p)
{
    const hunyuan_dit_case *c = r->c;
    esa_session *s = NULL;
    const esa_text text = {
        .data = r->text, .pooled = r->pooled, .rows = c->rows, .valid = c->valid
    };
    p->select.layout.text_back_q = (int32_t)c->rows;
    hunyuan_ok(&r->b, esa_hunyuan_dit_begin(r->dit, c->latent, &p->select.layout,
                                            p->select.selector, p->select.mode, 1));
    hunyuan_ok(&r->b, esa_hunyuan_dit_text(r->dit, 0, &text));
    p->layers = c->config.doubles + c->config.singles;
    p->steps = 1;
    p->warmup_frac = 0;
    hunyuan_ok(&r->b, esa_session_create(r->b.ctx, &s, p));
    hunyuan_ok(&r->b, esa_session_begin(s));
    hunyuan_ok(&r->b, esa_session_step(s, 0, 0));
    const esa_dit_call call = {
        .session = s, .v = r->v, .x = r->x, .t = c->t, .guidance = c->guidance
    };
    hunyuan_ok(&r->b, esa_hunyuan_dit_forward(r->dit, &call));
    return s;
}

static void check_case(const hunyuan_dit_case *c, int32_t order, int32_t watched)
{
    dit_run r;
    char name[64];
    run_open(&r, c, 2);
    if (watched) esa_hunyuan_dit_set_watch(r.dit, watch, &r);
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_DENSE;
    p.select.layout.order = order;
    esa_session_free(run_forward(&r, &p));
    snprintf(name, sizeof name, "%s.output", c->name);
    const double e = hunyuan_compare(r.golden, name, r.v, r.out);
    print_message("%s, order %d: blocks %.2e, output %.2e\n", c->name, order, r.worst, e);
    assert_int_equal(r.seen, watched ? p.layers + 1 : 0);
    run_close(&r);
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
    dit_run one, three;
    run_open(&one, &hunyuan_dits[1], 1);
    run_open(&three, &hunyuan_dits[1], 3);
    esa_session_params p = esa_session_params_default(), q = p, dense = p;
    p.mode = q.mode = ESA_SESSION_ONLINE;
    p.dense_first_layer = q.dense_first_layer = 0;
    p.select.budget = q.select.budget = 0.5;
    esa_session_free(run_forward(&one, &p));
    esa_session *s = run_forward(&three, &q);
    esa_session_stats stats = { .struct_size = sizeof stats };
    hunyuan_ok(&three.b, esa_session_get_stats(s, &stats, -1, -1));
    assert_int_equal(stats.sparse_calls, p.layers);
    assert_true(stats.density < 0.95);
    esa_session_free(s);
    assert_memory_equal(one.v, three.v, (size_t)one.out * 4);
    dense.mode = ESA_SESSION_DENSE;
    esa_session_free(run_forward(&one, &dense));
    q.select.budget = 1;
    esa_session_free(run_forward(&three, &q));
    const double e = golden_error(one.v, 1, three.v, one.out, 1);
    print_message("density 1 against dense: %.2e\n", e);
    assert_true(e < 1e-4); /* values up to 5, another order of sums */
    run_close(&one);
    run_close(&three);
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
    dit_run r;
    run_open(&r, &hunyuan_dits[0], 1);
    esa_hunyuan_config other = r.c->config;
    other.singles = 2;
    assert_refused(r.b.ctx, esa_hunyuan_dit_check(&r.b.env, &other), ESA_ERR_MISMATCH,
                   "single_transformer_blocks.1", NULL);
    other = r.c->config;
    other.guidance = 0;
    assert_refused(r.b.ctx, esa_hunyuan_dit_check(&r.b.env, &other), ESA_ERR_MISMATCH,
                   "guidance_embedder", NULL);
    esa_layout layout = esa_layout_default();
    const int32_t latent[3] = { 1, 6, 8 };
    assert_refused(r.b.ctx, esa_hunyuan_dit_begin(r.dit, latent, &layout, ESA_SELECT_ENTROPY, 0, 1),
                   ESA_ERR_ARGUMENT, "text", NULL);
    layout.text_back_q = 12;
    hunyuan_ok(&r.b, esa_hunyuan_dit_begin(r.dit, latent, &layout, ESA_SELECT_ENTROPY, 0, 1));
    esa_text text = { .data = r.text, .pooled = r.pooled, .rows = 13, .valid = 13 };
    assert_refused(r.b.ctx, esa_hunyuan_dit_text(r.dit, 0, &text), ESA_ERR_ARGUMENT, "13 rows",
                   NULL);
    text.rows = 12;
    text.valid = 0;
    assert_refused(r.b.ctx, esa_hunyuan_dit_text(r.dit, 0, &text), ESA_ERR_ARGUMENT, "0 of them",
                   NULL);
    const esa_dit_call call = { .branch = 0 };
    assert_refused(r.b.ctx, esa_hunyuan_dit_forward(r.dit, &call), ESA_ERR_STATE, "no text", NULL);
    run_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(blocks_and_output),
                                        cmocka_unit_test(threads_and_density),
                                        cmocka_unit_test(schedule), cmocka_unit_test(refuses) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
