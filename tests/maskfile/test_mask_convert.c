/* test_mask_convert.c - single masks and FA4 lists to and from mask files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"

static void test_fa4(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    for (int branches = 1; branches <= 2; branches++) {
        mini m = mini_make(3, 5, branches, 1);
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_per_branch = 1;
        p.record_groups = 3;
        record(&m, &p, scratch_path(&s, "rec"));
        const char *rec[] = { scratch_path(&s, "rec") };
        esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "m"));
        ok(ctx, esa_mask_file_export_fa4(ctx, scratch_path(&t, "fa4"), f, 0.5));
        /* Round trip with our own metadata. */
        /* A file of ours describes itself; a caller who says otherwise is told. */
        esa_mask_info wrong = {
            .struct_size = sizeof wrong, .Nq = 4000, .Nk = 4000, .block_q = 16, .block_k = 16
        };
        assert_refused(ctx,
                       esa_mask_file_import_fa4(ctx, scratch_path(&t, "no"),
                                                scratch_path(&s, "fa4"), &wrong, NULL),
                       ESA_ERR_MISMATCH, "4000 x 4000", NULL);
        const esa_mask_file_info own = info_of(f);
        for (int how = 0; how < 6; how++) {
            esa_mask_info said = { .struct_size = sizeof said,
                                   .Nq = own.Nq,
                                   .Nk = own.Nk,
                                   .block_q = own.block_q,
                                   .block_k = own.block_k };
            const char *word = NULL;
            if (how) said.layout = esa_layout_default(); /* 0: not said, 1: nothing said */
            if (how == 2) said.layout = own.layout;
            if (how == 3) {
                memcpy(said.layout.grid_q, (const int32_t[]){ 3, 10, 8 },
                       sizeof said.layout.grid_q);
                word = "grid 3x10x8";
            }
            if (how == 4) {
                said.layout.order = ESA_ORDER_TILE;
                word = "order tile";
            }
            if (how == 5) {
                said.layout.text_front_q = 5;
                word = "text 5 + 0";
            }
            const esa_status told = esa_mask_file_import_fa4(ctx, scratch_path(&t, "said"),
                                                             scratch_path(&s, "fa4"), &said,
                                                             how ? own.model : NULL);
            if (word)
                assert_refused(ctx, told, ESA_ERR_MISMATCH, word, "grid 3x8x10", "the caller",
                               NULL);
            else
                ok(ctx, told);
        }
        assert_refused(ctx,
                       esa_mask_file_import_fa4(ctx, scratch_path(&t, "no"),
                                                scratch_path(&s, "fa4"), NULL, "another"),
                       ESA_ERR_MISMATCH, "'mini'", "'another'", NULL);
        ok(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "back"), scratch_path(&s, "fa4"),
                                         NULL, NULL));
        esa_mask_file *g = open_file(scratch_path(&t, "back"));
        const esa_mask_file_info i = info_of(f), j = info_of(g);
        assert_int_equal(j.budget_permille[0], 500);
        assert_int_equal(j.importance, ESA_IMPORTANCE_NONE);
        assert_int_equal(i.stored_groups, j.stored_groups);
        for (int32_t l = 1; l < 3; l++)
            for (int32_t st = 2; st < 5; st++)
                for (int32_t br = 0; br < branches; br++) {
                    int64_t n;
                    uint8_t *x = bits_of(f, l, st, br, 0.5, &n),
                            *y = bits_of(g, l, st, br, 0.5, &n);
                    assert_memory_equal(x, y, n);
                    free(x);
                    free(y);
                }
        /* The lists themselves are those of esa_mask_to_fa4. */
        esa_tensors *raw;
        esa_tensor_info cnt = { .struct_size = sizeof cnt }, idx = { .struct_size = sizeof idx };
        ok(ctx, esa_tensors_open(ctx, &raw, scratch_path(&t, "fa4")));
        ok(ctx, esa_tensors_find(raw, "full_block_cnt", &cnt));
        ok(ctx, esa_tensors_find(raw, "full_block_idx", &idx));
        assert_int_equal(cnt.rank, branches > 1 ? 5 : 4);
        esa_mask *mask;
        ok(ctx, esa_mask_file_get(f, &mask, 1, 4, 0, 0.5));
        int32_t c[24], x[24 * 15];
        assert_int_equal(esa_mask_to_fa4(mask, c, x), ESA_OK);
        esa_mask_free(mask);
        /* layer 1 is the first stored one, step 4 is in the last group */
        const int64_t cell = j.stored_groups - 1;
        assert_memory_equal((const uint8_t *)cnt.data + cell * 24 * 4, c, sizeof c);
        assert_memory_equal((const uint8_t *)idx.data + cell * 24 * 15 * 4, x, sizeof x);

        /* A file from elsewhere has no metadata; order inside a row does not matter, duplicates
         * do. */
        if (branches == 1) {
            int32_t *ci = malloc((size_t)cnt.bytes), *xi = malloc((size_t)idx.bytes);
            memcpy(ci, cnt.data, (size_t)cnt.bytes);
            memcpy(xi, idx.data, (size_t)idx.bytes);
            const int32_t first = xi[0];
            if (ci[0] > 1) {
                xi[0] = xi[1];
                xi[1] = first;
            }
            for (int bad = 0; bad < 4; bad++) {
                if (bad == 1) xi[0] = xi[1];
                if (bad == 2) xi[0] = 15;
                if (bad == 3) ci[0] = 16;
                esa_tensors_writer *w;
                ok(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&t, "foreign")));
                ok(ctx, esa_tensors_writer_declare(w, "full_block_cnt", ESA_FILE_I32, cnt.rank,
                                                   cnt.dim));
                ok(ctx, esa_tensors_writer_declare(w, "full_block_idx", ESA_FILE_I32, idx.rank,
                                                   idx.dim));
                ok(ctx, esa_tensors_writer_data(w, ci, cnt.bytes));
                ok(ctx, esa_tensors_writer_data(w, xi, idx.bytes));
                ok(ctx, esa_tensors_writer_finish(w));
                esa_tensors_writer_free(w);
                esa_mask_info info;
                memset(&info, 0, sizeof info);
                info.struct_size = sizeof info;
                info.block_q = 32;
                info.block_k = 16;
                info.Nq = info.Nk = 240;
                char in[640];
                strcpy(in, scratch_path(&t, "foreign"));
                const esa_status status = esa_mask_file_import_fa4(ctx, scratch_path(&t, "back"),
                                                                   in, &info, "their model");
                if (bad) {
                    assert_refused(ctx, status, ESA_ERR_FORMAT,
                                   bad == 1   ? "twice"
                                   : bad == 2 ? "beyond"
                                              : "full_block_cnt",
                                   NULL);
                    continue;
                }
                ok(ctx, status);
                esa_mask_file *h = open_file(scratch_path(&t, "back"));
                const esa_mask_file_info k = info_of(h);
                assert_string_equal(k.model, "their model");
                assert_int_equal(k.layers, 2);
                assert_int_equal(k.steps, i.stored_groups);
                assert_int_equal(k.selector, -1);
                assert_float_equal(k.budget_permille[0], 500, 20);
                int64_t n;
                uint8_t *u = bits_of(f, 1, 1, 0, 0.5, &n),
                        *o = bits_of(h, 0, 0, 0, k.budget_permille[0] / 1000.0, &n);
                assert_memory_equal(u, o, n);
                free(u);
                free(o);
                esa_mask_file_free(h);
                assert_refused(
                    ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "b2"), in, NULL, NULL),
                    ESA_ERR_ARGUMENT, "info", NULL);
                info.Nk = 256;
                assert_refused(
                    ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "b2"), in, &info, NULL),
                    ESA_ERR_MISMATCH, "8 x 15", "8 x 16", NULL);
            }
            free(ci);
            free(xi);
        }
        esa_tensors_free(raw);
        esa_mask_file_free(f);
        esa_mask_file_free(g);
        mini_free(&m);
    }
    scratch_remove(&s);
}

static void test_save(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_mask_info i;
    memset(&i, 0, sizeof i);
    i.struct_size = sizeof i;
    i.block_q = 48;
    i.block_k = 16;
    i.B = 2;
    i.H = 3;
    i.Nq = 100;
    i.Nk = 170;
    const int64_t row = 2, bytes = 2 * 3 * 3 * row; /* nq 3, nk 11 */
    uint8_t bits[36];
    esa_rng r = { 7 };
    for (int64_t n = 0; n < bytes; n++) bits[n] = (uint8_t)esa_rng_next(&r) & (n % 2 ? 7 : 255);
    esa_mask *m;
    ok(ctx, esa_mask_from_bits(ctx, &m, &i, bits));
    ok(ctx, esa_mask_file_save(ctx, scratch_path(&s, "m"), m));
    esa_mask_file *f = open_file(scratch_path(&s, "m"));
    const esa_mask_file_info k = info_of(f);
    assert_int_equal(k.branches, 2);
    assert_int_equal(k.selector, -1);
    assert_int_equal(k.prompts, 0);
    for (int32_t b = 0; b < 2; b++) {
        int64_t n;
        uint8_t *x = bits_of(f, 0, 0, b, k.budget_permille[0] / 1000.0, &n);
        assert_int_equal(n, 18);
        assert_memory_equal(x, bits + b * 18, 18);
        free(x);
    }
    double entropy[3], mass[3];
    ok(ctx, esa_mask_file_heads(f, entropy, mass, NULL, 0, 0, 0, k.budget_permille[0] / 1000.0));
    assert_true(isnan(entropy[0]) && isnan(mass[2]));
    assert_refused(ctx, esa_mask_file_save(ctx, scratch_path(&s, "m2"), NULL), ESA_ERR_ARGUMENT,
                   "NULL", NULL);
    assert_refused(ctx, esa_mask_file_save(ctx, "/nonexistent/m", m), ESA_ERR_IO, "/nonexistent/m",
                   NULL);
    esa_mask_free(m);
    esa_mask_file_free(f);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_fa4), cmocka_unit_test(test_save) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
