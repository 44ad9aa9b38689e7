/* test_gpu_session.c - sessions on a GPU: recordings beside the CPU's, masks that rest there, the fast kernels.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The policy itself is tested by tests/session, which runs on the GPU, too (common/on_gpu.h). */
#include "select/kit.h"
#include "common/on_gpu.h"
#include "session/mini_model.h"

/* A recording made on the GPU and one made on the CPU from the same numbers: importances of the resulting files agree. */
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
            for (int64_t i = 0; i < cells; i++) worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
            esa_mask *x, *y;
            ok(ctx, esa_mask_file_get(made[0], &x, layer, step, 0, 0.3));
            ok(ctx, esa_mask_file_get(made[1], &y, layer, step, 0, 0.3));
            uint8_t *p = kit_bytes(x), *q = kit_bytes(y);
            for (int64_t i = 0; i < cells; i++) differ += p[i] != q[i];
            bits += cells;
            free(p);  free(q);
            esa_mask_free(x);  esa_mask_free(y);
        }
    printf("recorded importance differs by at most %.2g; %lld of %lld blocks of the masks differ\n", worst, (long long)differ, (long long)bits);
    assert_true(worst < 1e-3 && bits > 0 && differ * 100 <= bits);      /* f16 importances: steps of 2^-11 below 1 */
    free(a);
    free(b);
    esa_mask_file_free(made[0]);
    esa_mask_file_free(made[1]);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
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
        printf("video %d: %lld sparse calls, %lld masks loaded, %lld bytes of masks on the GPU, kernel %s, attention %.3g s\n", video, (long long)stats.sparse_calls,
               (long long)stats.masks_loaded, (long long)stats.device_bytes, stats.kernel, stats.attention_seconds);
        assert_true(stats.sparse_calls > 0 && stats.device_bytes > 0);
        bytes[video] = stats.device_bytes;
    }
    esa_session_free(s);
    assert_true(hash[0] == hash[1] && bytes[0] == bytes[1]);            /* the second video reuses what the first uploaded */
    esa_mask_file_free(masks);
    mini_free(&m);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
}

/* bf16, head dim 128, blocks of 128: what a model runs. Online with a mask for two steps, compared with the plain calls. */
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
            p.warmup_frac = 0.2;                                        /* step 0 */
            p.dense_first_layer = 0;
            p.refresh_every = 2;                                        /* made at steps 1 and 3 */
            p.select = esa_select_params_default(selector);
            p.select.block_q = p.select.block_k = 128;
            p.select.budget = 0.4;
            p.select.layout.grid_q[0] = 7; p.select.layout.grid_q[1] = p.select.layout.grid_q[2] = 10;
            p.select.layout.order = ESA_ORDER_TILE;
            p.attention.tail = tail;
            esa_session *s;
            ok(ctx, esa_session_create(ctx, &s, &p));
            ok(ctx, esa_session_begin(s));
            esa_mask *mask = NULL;
            for (int32_t step = 0; step < STEPS; step++) {
                esa_rng r = { kit_seed("fast_kernels") + (uint64_t)step };
                kit_tensor t[4];
                for (int i = 0; i < 4; i++) t[i] = kit_random(&r, ESA_DTYPE_BF16, 1, H, N, D, i % 2, 1.0f);
                if (step % 2) {
                    esa_mask_free(mask);
                    ok(ctx, esa_select(ctx, &mask, &t[0].view, &t[1].view, &p.select));
                }
                ok(ctx, esa_attention(ctx, &t[0].view, &t[1].view, &t[2].view, &t[3].view, mask, &p.attention));
                memcpy(expected, t[3].data, SIZE * 2);
                memset(t[3].data, 0, SIZE * 2);
                ok(ctx, esa_session_step(s, step, 0));
                ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t[0].view, &t[1].view, &t[2].view, &t[3].view, NULL));
                if (memcmp(expected, t[3].data, SIZE * 2)) fail_msg("selector %d tail %d step %d: other bits than the plain calls", (int)selector, (int)tail, (int)step);
                for (int i = 0; i < 4; i++) free(t[i].data);
            }
            esa_session_stats stats = { .struct_size = sizeof stats };
            ok(ctx, esa_session_get_stats(s, &stats, -1, -1));
            printf("selector %d tail %d: kernel %s, density %.3f, select %.3g ms, attention %.3g ms, %lld bytes of masks on the GPU\n", (int)selector, (int)tail,
                   stats.kernel, stats.density, 1e3 * stats.select_seconds, 1e3 * stats.attention_seconds, (long long)stats.device_bytes);
            assert_int_equal(stats.dense_calls, 1);
            assert_int_equal(stats.masks_made, 2);
            assert_true(stats.density > 0.2 && stats.density < 0.8 && stats.select_seconds > 0 && stats.attention_seconds > 0 && stats.device_bytes > 0);
            esa_mask_free(mask);
            esa_session_free(s);
        }
    free(expected);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recordings_agree), cmocka_unit_test(cached_masks_rest_on_the_gpu), cmocka_unit_test(fast_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
