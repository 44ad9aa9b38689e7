/* test_gpu_session.c - sessions on a GPU: recordings beside the CPU's, masks that rest there, the
 * fast kernels.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The policy itself is tested by tests/session, which runs on the GPU, too (common/on_gpu.h). */
#include "select/kit.h"
#include "common/on_gpu.h"
#include "session/mini_model.h"
#include "session/session.h"

/* A recording made on the GPU and one made on the CPU from the same numbers: importances of the
 * resulting files agree. */
static void recordings_agree(void **state)
{
    (void)state;
    scratch dir = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    char file[2][700];
    esa_mask_file *made[2];
    for (int gpu = 0; gpu < 2; gpu++) {
        char recording[700];
        mini m = mini_make(2, 3, 1, 1);
        const esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        snprintf(recording, sizeof recording, "%s/recording%d", dir.dir, gpu);
        snprintf(file[gpu], sizeof file[gpu], "%s/masks%d", dir.dir, gpu);
        on_gpu_set(gpu);
        mini_record(ctx, &m, &p, 3, 2, recording);
        on_gpu_set(-1);
        const char *one[] = { recording };
        static const double budgets[] = { 0.3 };
        esa_mask_build build = esa_mask_build_default();
        build.importance = ESA_IMPORTANCE_F16;
        build.budgets = budgets;
        build.budget_count = 1;
        ok(ctx, esa_mask_file_build(ctx, file[gpu], one, 1, &build));
        ok(ctx, esa_mask_file_open(ctx, &made[gpu], file[gpu]));
        mini_free(&m);
    }
    esa_mask_file_info info = { .struct_size = sizeof info };
    ok(ctx, esa_mask_file_get_info(made[0], &info));
    const int64_t cells = info.H * info.nq * info.nk;
    float *a = malloc((size_t)cells * 4), *b = malloc((size_t)cells * 4);
    double worst = 0.0;
    int64_t bits = 0, differ = 0;
    for (int32_t layer = 0; layer < 2; layer++)
        for (int32_t step = 0; step < 3; step++) {
            if (!esa_mask_file_stored(made[0], layer, step)) continue;
            ok(ctx, esa_mask_file_importance(made[0], a, layer, step, 0));
            ok(ctx, esa_mask_file_importance(made[1], b, layer, step, 0));
            for (int64_t i = 0; i < cells; i++)
                worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
            esa_mask *x, *y;
            ok(ctx, esa_mask_file_get(made[0], &x, layer, step, 0, 0.3));
            ok(ctx, esa_mask_file_get(made[1], &y, layer, step, 0, 0.3));
            uint8_t *p = kit_bytes(x), *q = kit_bytes(y);
            for (int64_t i = 0; i < cells; i++) differ += p[i] != q[i];
            bits += cells;
            free(p);
            free(q);
            esa_mask_free(x);
            esa_mask_free(y);
        }
    printf("recorded importance differs by at most %.2g; %lld of %lld blocks of the masks differ\n",
           worst, (long long)differ, (long long)bits);
    /* f16 importances: steps of 2^-11 below 1 */
    assert_true(worst < 1e-3 && bits > 0 && differ * 100 <= bits);
    free(a);
    free(b);
    esa_mask_file_free(made[0]);
    esa_mask_file_free(made[1]);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
}

/* The memory for masks that is counted beforehand is enough, and not much more. */
static void check_kept(esa_ctx *ctx, const esa_session *s, int64_t bytes, const esa_tensor *q)
{
    esa_shapes shapes = esa_shapes_default();
    esa_session_bytes room;
    shapes.device = ESA_DEVICE_CUDA;
    shapes.dtype = q->dtype;
    shapes.B = q->dim[0];
    shapes.Hq = shapes.Hkv = q->dim[1];
    shapes.Nq = shapes.Nk = q->dim[2];
    shapes.D = q->dim[3];
    ok(ctx, esa_session_room(s, &shapes, &room));
    assert_in_range(bytes, 1, room.kept);
    assert_true(room.kept <= 3 * bytes + 4096 && room.scratch > 0);
}

/* Masks of a file go to the GPU once per layer and step group and are counted there. */
static void cached_masks_rest_on_the_gpu(void **state)
{
    (void)state;
    scratch dir = scratch_make();
    char recording[700], file[700];
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    snprintf(recording, sizeof recording, "%s/recording", dir.dir);
    snprintf(file, sizeof file, "%s/masks", dir.dir);
    mini m = mini_make(3, 4, 1, 1);
    const esa_session_params record = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &record, 3, 1, recording);
    const char *one[] = { recording };
    static const double budgets[] = { 0.4 };
    esa_mask_build build = esa_mask_build_default();
    build.budgets = budgets;
    build.budget_count = 1;
    ok(ctx, esa_mask_file_build(ctx, file, one, 1, &build));
    esa_mask_file *masks;
    ok(ctx, esa_mask_file_open(ctx, &masks, file));
    esa_session_params p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = masks;
    uint64_t hash[3];
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    int64_t bytes[2];
    for (int video = 0; video < 2; video++) {
        ok(ctx, mini_run(&m, s, &hash[video]));
        esa_session_stats stats = { .struct_size = sizeof stats };
        ok(ctx, esa_session_get_stats(s, &stats, -1, -1));
        printf("video %d: %lld sparse calls, %lld masks loaded, %lld bytes of masks on the GPU, "
               "kernel %s, attention %.3g s\n",
               video, (long long)stats.sparse_calls, (long long)stats.masks_loaded,
               (long long)stats.device_bytes, stats.kernel, stats.attention_seconds);
        assert_true(stats.sparse_calls > 0 && stats.device_bytes > 0);
        bytes[video] = stats.device_bytes;
        const esa_tensor q = esa_tensor_bnsd(NULL, ESA_DTYPE_F32, m.B, m.H, m.N, m.D);
        check_kept(ctx, s, stats.device_bytes, &q);
    }
    esa_session_free(s);
    /* the second video reuses what the first uploaded */
    assert_true(hash[0] == hash[1] && bytes[0] == bytes[1]);
    esa_mask_file_free(masks);
    mini_free(&m);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
}

/* bf16, head dim 128, blocks of 128: what a model runs. Online with a mask for two steps, compared
 * with the plain calls. */
static void fast_kernels(void **state)
{
    enum { H = 3, N = 700, D = 128, SIZE = H * N * D, STEPS = 5 };
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    uint16_t *expected = malloc(SIZE * 2);
    for (int32_t selector = ESA_SELECT_ENTROPY; selector <= ESA_SELECT_ADA_BSA; selector++)
        for (int32_t tail = 0; tail < 3; tail++) {
            esa_session_params p = esa_session_params_default();
            p.layers = 1;
            p.steps = STEPS;
            p.warmup_frac = 0.2; /* step 0 */
            p.dense_first_layer = 0;
            p.refresh_every = 2; /* made at steps 1 and 3 */
            p.select = esa_select_params_default(selector);
            p.select.block_q = p.select.block_k = 128;
            p.select.budget = 0.4;
            p.select.layout.grid_q[0] = 7;
            p.select.layout.grid_q[1] = p.select.layout.grid_q[2] = 10;
            p.select.layout.order = ESA_ORDER_TILE;
            p.attention.tail = tail;
            esa_session *s;
            ok(ctx, esa_session_create(ctx, &s, &p));
            ok(ctx, esa_session_begin(s));
            esa_mask *mask = NULL;
            for (int32_t step = 0; step < STEPS; step++) {
                esa_rng r = { kit_seed("fast_kernels") + (uint64_t)step };
                kit_tensor t[4];
                for (int i = 0; i < 4; i++)
                    t[i] = kit_random(&r, ESA_DTYPE_BF16, 1, H, N, D, i % 2, 1.0f);
                if (step % 2) {
                    esa_mask_free(mask);
                    ok(ctx, esa_select(ctx, &mask, &t[0].view, &t[1].view, &p.select));
                }
                ok(ctx, esa_attention(ctx, &t[0].view, &t[1].view, &t[2].view, &t[3].view, mask,
                                      &p.attention));
                memcpy(expected, t[3].data, SIZE * 2);
                memset(t[3].data, 0, SIZE * 2);
                ok(ctx, esa_session_step(s, step, 0));
                ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t[0].view, &t[1].view,
                                              &t[2].view, &t[3].view, NULL));
                if (memcmp(expected, t[3].data, SIZE * 2))
                    fail_msg("selector %d tail %d step %d: other bits than the plain calls",
                             (int)selector, (int)tail, (int)step);
                for (int i = 0; i < 4; i++) free(t[i].data);
            }
            esa_session_stats stats = { .struct_size = sizeof stats };
            ok(ctx, esa_session_get_stats(s, &stats, -1, -1));
            printf("selector %d tail %d: kernel %s, density %.3f, select %.3g ms, attention %.3g "
                   "ms, %lld bytes of masks on the GPU\n",
                   (int)selector, (int)tail, stats.kernel, stats.density,
                   1e3 * stats.select_seconds, 1e3 * stats.attention_seconds,
                   (long long)stats.device_bytes);
            assert_int_equal(stats.dense_calls, 1);
            assert_int_equal(stats.masks_made, 2);
            assert_true(stats.density > 0.2 && stats.density < 0.8 && stats.select_seconds > 0 &&
                        stats.attention_seconds > 0 && stats.device_bytes > 0);
            const esa_tensor q = esa_tensor_bnsd(NULL, ESA_DTYPE_BF16, 1, H, N, D);
            check_kept(ctx, s, stats.device_bytes, &q);
            esa_mask_free(mask);
            esa_session_free(s);
        }
    free(expected);
    esa_ctx_free(ctx);
}

static esa_session_stats stats_of(const esa_ctx *ctx, const esa_session *s)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    ok(ctx, esa_session_get_stats(s, &stats, -1, -1));
    return stats;
}

/* A mask at rest keeps its own figures: by the time it is used again its plan may have made room
 * for others. */
static void rests_outlive_plans(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    mini m = mini_make(1, 2, 1, 1);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    p.dense_first_layer = 0;
    p.refresh_every = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    mini_fill(&m, 0, 0, 0);
    ok(ctx, esa_session_step(s, 0, 0));
    ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    const double density = stats_of(ctx, s).density;
    /* more shapes than a session keeps plans for */
    for (int64_t tokens = 20; tokens < 40; tokens++) {
        esa_tensor k = t.k, v = t.v;
        k.dim[2] = v.dim[2] = tokens;
        ok(ctx, esa_session_attention(s, 0, ESA_CALL_CROSS, &t.q, &k, &v, &t.o, NULL));
    }
    ok(ctx, esa_session_step(s, 1, 0));
    ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    const esa_session_stats stats = stats_of(ctx, s);
    assert_int_equal(stats.sparse_calls, 2);
    assert_int_equal(stats.masks_made, 1);
    assert_true(density > 0.3 && density < 0.5 && fabs(stats.density - density) < 1e-12);
    esa_session_free(s);
    mini_free(&m);
    esa_ctx_free(ctx);
}

/* One session, one ctx, calls on both devices in turn: masks at rest serve the device they lie on,
 * and nothing is lost in between. */
static void devices_in_turn(void **state)
{
    enum { STEPS = 8 };
    static const int gpu[STEPS] = { 1, 1, 0, 0, 1, 0, 1, 0 };
    /* every second step, and where the device changed */
    static const int32_t made[STEPS] = { 1, 0, 1, 0, 1, 1, 1, 1 };
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    mini m = mini_make(1, STEPS, 1, 2);
    const mini_views t = mini_view(&m);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    p.dense_first_layer = 0;
    p.refresh_every = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    /* statistics before anything ran */
    assert_true(stats_of(ctx, s).calls == 0 && isnan(stats_of(ctx, s).density));
    esa_mask *mask = NULL;
    int32_t masks = 0;
    for (int32_t step = 0; step < STEPS; step++) {
        on_gpu_set(gpu[step]);
        mini_fill(&m, 0, step, 0);
        if (made[step]) {
            esa_mask_free(mask);
            ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &p.select));
        }
        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, NULL));
        memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
        ok(ctx, esa_session_step(s, step, 0));
        ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
        if (memcmp(expected, m.o, (size_t)mini_size(&m) * 4))
            fail_msg("step %d: other bits than the plain calls", (int)step);
        masks += made[step];
        assert_int_equal(stats_of(ctx, s).masks_made, masks);
        if (step % 3 == 2) esa_ctx_trim(ctx); /* scratch of both devices may go at any time */
    }
    on_gpu_set(-1);
    const esa_session_stats stats = stats_of(ctx, s);
    assert_int_equal(stats.calls, STEPS);
    assert_true(stats.density > 0.3 && stats.density < 0.5 && stats.attention_seconds > 0);
    ok(ctx, esa_session_begin(s));
    assert_int_equal(stats_of(ctx, s).calls, 0);
    esa_mask_free(mask);
    esa_session_free(s);
    free(expected);
    mini_free(&m);
    esa_ctx_free(ctx);
}

/* More calls than a session keeps figures waiting for. */
static void many_calls(void **state)
{
    enum { LAYERS = 3, STEPS = 100 };
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_session_params p = esa_session_params_default();
    p.layers = LAYERS;
    p.steps = STEPS;
    p.warmup_frac = 0;
    p.select = esa_select_params_default(ESA_SELECT_RANDOM);
    p.select.block_q = p.select.block_k = 16;
    p.select.budget = 0.25;
    esa_rng r = { kit_seed("many_calls") };
    kit_tensor t[4];
    for (int i = 0; i < 4; i++) t[i] = kit_random(&r, ESA_DTYPE_F32, 1, 1, 64, 8, 0, 1.0f);
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    for (int32_t video = 0; video < 2; video++) {
        ok(ctx, esa_session_begin(s)); /* the first video's figures are never asked for */
        for (int32_t step = 0; step < STEPS; step++) {
            ok(ctx, esa_session_step(s, step, 0));
            for (int32_t layer = 0; layer < LAYERS; layer++)
                ok(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &t[0].view, &t[1].view,
                                              &t[2].view, &t[3].view, NULL));
        }
    }
    const esa_session_stats stats = stats_of(ctx, s);
    assert_int_equal(stats.calls, LAYERS * STEPS);
    assert_int_equal(stats.dense_calls, STEPS);
    assert_int_equal(stats.masks_made, (LAYERS - 1) * STEPS);
    assert_true(fabs(stats.density - 0.25) < 1e-12);
    for (int32_t step = 0; step < STEPS; step++) {
        esa_session_stats one = { .struct_size = sizeof one };
        ok(ctx, esa_session_get_stats(s, &one, 1, step));
        if (one.calls != 1 || fabs(one.density - 0.25) > 1e-12 ||
            !(one.attention_seconds > 0 && one.select_seconds > 0))
            fail_msg("step %d has no figures", (int)step);
    }
    esa_session_stats wrong = { .struct_size = 8 };
    assert_refused(ctx, esa_session_get_stats(s, &wrong, -1, -1), ESA_ERR_VERSION, "struct_size 8",
                   NULL);
    wrong.struct_size = sizeof wrong;
    assert_refused(ctx, esa_session_get_stats(s, &wrong, LAYERS, -1), ESA_ERR_ARGUMENT,
                   "layer is 3 and step is -1", "3 layers", NULL);
    assert_refused(ctx, esa_session_get_stats(s, NULL, -1, -1), ESA_ERR_ARGUMENT, "NULL", NULL);
    esa_session_free(s);
    for (int i = 0; i < 4; i++) free(t[i].data);
    esa_ctx_free(ctx);
}

/* A selector the GPU does not have: refused by a strict session, dense and counted in another
 * one. */
static void missing_selector(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    mini m = mini_make(2, 2, 1, 1);
    for (int32_t strict = 0; strict < 2; strict++) {
        esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
        p.warmup_frac = 0;
        p.strict = strict;
        p.refresh_every = 1 + strict;
        p.select.mode = ESA_MODE_COMPAT_ROUND;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        const esa_status status = mini_run(&m, s, NULL);
        if (strict)
            assert_refused(ctx, status, ESA_ERR_POLICY, "layer 1, step 0", "dense", "compat-round",
                           NULL);
        else {
            ok(ctx, status);
            const esa_session_stats stats = stats_of(ctx, s);
            assert_int_equal(stats.fallback_calls, 2);
            assert_int_equal(stats.dense_calls, 4);
            assert_true(stats.sparse_calls == 0 && stats.masks_made == 0 && isnan(stats.density));
        }
        esa_session_free(s);
    }
    mini_free(&m);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recordings_agree), cmocka_unit_test(cached_masks_rest_on_the_gpu),
        cmocka_unit_test(fast_kernels),     cmocka_unit_test(rests_outlive_plans),
        cmocka_unit_test(devices_in_turn),  cmocka_unit_test(many_calls),
        cmocka_unit_test(missing_selector),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
