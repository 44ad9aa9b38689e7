/* test_session_cached.c - sessions that take their masks from a file: the file must be of their
 * layout and of their kind, causal or not.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include "common/on_gpu.h"
#include "common/one_ctx.h"

static esa_session_stats stats_of(const esa_session *s)
{
    esa_session_stats t = { .struct_size = sizeof t };
    assert_int_equal(esa_session_get_stats(s, &t, 0, 0), ESA_OK);
    return t;
}

static const int32_t window[3] = { 1, 4, 5 };

static void says_nothing(esa_layout *y) { *y = esa_layout_default(); }

static void as_the_file(esa_layout *y)
{
    y->order = ESA_ORDER_TILE3D;
    memcpy(y->window, window, sizeof window);
}

static void other_window(esa_layout *y) { y->order = ESA_ORDER_TILE3D; }

static void text_behind(esa_layout *y)
{
    y->text_front_q = 0;
    y->text_back_q = 10;
}

static void other_order(esa_layout *y) { y->order = ESA_ORDER_HILBERT; }

static void protects_frame_0(esa_layout *y) { y->protect_first_frame = 1; }

static void other_keys(esa_layout *y)
{
    memcpy(y->grid_k, y->grid_q, sizeof y->grid_k);
    y->text_back_k = 10;
}

/* A cached session says where its tokens stand, and the file must say the same: window, text,
 * order, protection. */
static void test_cached_layout(void **state)
{
    (void)state;
    scratch s = scratch_make(), u = s;
    mini m = mini_make(2, 3, 1, 2); /* memory for more tokens: 240 of the grid and 10 of text */
    m.B = 1;
    m.N = 250;
    m.text = 10;
    esa_session_params r = mini_params(&m, ESA_SESSION_RECORD);
    r.select.layout.order = ESA_ORDER_TILE3D;
    memcpy(r.select.layout.window, window, sizeof window);
    mini_record(ctx, &m, &r, 1, 1, scratch_path(&s, "rec"));
    const char *one[] = { scratch_path(&s, "rec") };
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "masks"), one, 1, NULL));
    esa_mask_file *file;
    ok(ctx, esa_mask_file_open(ctx, &file, scratch_path(&u, "masks")));
    static const struct {
        void (*change)(esa_layout *y); /* of the mini model's layout; NULL: none */
        const char *refused;
    } cases[] = {
        { NULL, NULL },
        { says_nothing, NULL }, /* the file's layout counts */
        { as_the_file, NULL },
        { other_window, "tile3d 2x8x8" },
        { text_behind, "text 0 + 10" },
        { other_order, "order hilbert" },
        { protects_frame_0, "frame 0 protected" },
        { other_keys, "keys: grid 3x8x10, text 0 + 10" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int32_t applied = 0; applied < 2; applied++) {
            esa_session_params p = mini_params(&m, ESA_SESSION_CACHED);
            p.masks = file;
            if (cases[i].change) cases[i].change(&p.select.layout);
            p.select.layout.order_applied = applied;
            esa_session *x;
            const esa_status status = esa_session_create(ctx, &x, &p);
            if (!cases[i].refused)
                ok(ctx, status);
            else
                assert_refused(ctx, status, ESA_ERR_MISMATCH, cases[i].refused,
                               "tile3d 1x4x5, text 10 + 0", "the session", NULL);
            esa_session_free(x);
        }
    esa_mask_file_free(file);
    scratch_remove(&s);
    mini_free(&m);
}

/* A file of causal masks says so, and serves causal sessions only; others serve the others only. */
static void test_cached_causal(void **state)
{
    (void)state;
    scratch s = scratch_make(), u = s;
    mini m = mini_make(1, 1, 1, 1);
    const mini_views t = mini_view(&m);
    mini_fill(&m, 0, 0, 0);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    for (int causal = 0; causal < 2; causal++) {
        esa_session_params p = mini_params(&m, ESA_SESSION_CACHED);
        p.select.causal = causal;
        p.dense_first_layer = 0;
        p.warmup_frac = 0;
        esa_mask *mask;
        ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &p.select));
        ok(ctx, esa_mask_file_save(ctx, scratch_path(&s, "mask"), mask));
        esa_mask_file *file;
        esa_mask_file_info info = { .struct_size = sizeof info };
        ok(ctx, esa_mask_file_open(ctx, &file, scratch_path(&s, "mask")));
        assert_int_equal(esa_mask_file_get_info(file, &info), ESA_OK);
        assert_int_equal(info.causal, causal);
        /* Kept by the exchange and by rewriting. */
        ok(ctx, esa_mask_file_export_fa4(ctx, scratch_path(&u, "fa4"), file, 0.4));
        ok(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&u, "back"), scratch_path(&s, "fa4"),
                                         NULL, NULL));
        esa_mask_file *back;
        ok(ctx, esa_mask_file_open(ctx, &back, scratch_path(&u, "back")));
        assert_int_equal(esa_mask_file_get_info(back, &info), ESA_OK);
        assert_int_equal(info.causal, causal);
        esa_mask_file_free(back);
        esa_session *x;
        p.masks = file;
        p.attention.causal = !causal;
        assert_refused(ctx, esa_session_create(ctx, &x, &p), ESA_ERR_MISMATCH, "causal",
                       causal ? "not causal" : "bidirectional", NULL);
        p.attention.causal = causal;
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_begin(x));
        ok(ctx, esa_session_step(x, 0, 0));
        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, &p.attention));
        memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
        ok(ctx, esa_session_attention(x, 0, 0, &t.q, &t.k, &t.v, &t.o, NULL));
        assert_memory_equal(expected, m.o, mini_size(&m) * 4);
        assert_int_equal(stats_of(x).sparse_calls, 1);
        esa_mask_info made = { .struct_size = sizeof made };
        assert_int_equal(esa_mask_get_info(mask, &made), ESA_OK);
        assert_float_equal(stats_of(x).density, made.density, 1e-12);
        esa_session_free(x);
        esa_mask_free(mask);

        /* Bits beyond the 15 key blocks (the bits end the file) are refused by all that read
         * them. */
        esa_mask_file_free(file);
        size_t n;
        uint8_t *bytes = scratch_read(scratch_path(&s, "mask"), &n);
        bytes[n - 1] |= 0x80;
        scratch_write(scratch_path(&s, "mask"), bytes, n);
        free(bytes);
        ok(ctx, esa_mask_file_open(ctx, &file, scratch_path(&s, "mask")));
        p.masks = file;
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_begin(x));
        ok(ctx, esa_session_step(x, 0, 0));
        assert_refused(ctx, esa_session_attention(x, 0, 0, &t.q, &t.k, &t.v, &t.o, NULL),
                       ESA_ERR_FORMAT, "bits beyond", NULL);
        esa_session_free(x);
        double density[3];
        assert_refused(ctx, esa_mask_file_heads(file, NULL, NULL, density, 0, 0, 0, 0.4),
                       ESA_ERR_FORMAT, "bits beyond", NULL);
        esa_mask_build b = esa_mask_build_default();
        const double budget = 0.4;
        b.importance = ESA_IMPORTANCE_NONE;
        b.budgets = &budget;
        b.budget_count = 1;
        assert_refused(ctx, esa_mask_file_derive(ctx, scratch_path(&u, "derived"), file, &b),
                       ESA_ERR_FORMAT, "bits beyond", NULL);
        esa_mask_file_free(file);
    }
    free(expected);
    scratch_remove(&s);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_cached_layout),
                                        cmocka_unit_test(test_cached_causal) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
