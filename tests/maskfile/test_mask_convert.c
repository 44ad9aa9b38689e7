/* test_mask_convert.c - single masks and FA4 lists to and from mask files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"

/* A mask file of a mini model with its FA4 lists beside it, in a folder of its own. */
typedef struct exported {
    scratch dir;
    char file[640], fa4[640], out[640];
    mini m;
    esa_mask_file *masks;
    esa_mask_file_info info;
} exported;

static exported export_fa4(int32_t branches)
{
    exported e = { .dir = scratch_make() };
    strcpy(e.file, scratch_path(&e.dir, "masks"));
    strcpy(e.fa4, scratch_path(&e.dir, "fa4"));
    strcpy(e.out, scratch_path(&e.dir, "out"));
    e.m = mini_make(3, 5, branches, 1);
    esa_session_params p = mini_params(&e.m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    p.record_groups = 3;
    const char *rec[] = { scratch_path(&e.dir, "rec") };
    record(&e.m, &p, rec[0]);
    const esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, e.file, rec, 1, &b));
    e.masks = open_file(e.file);
    e.info = info_of(e.masks);
    ok(ctx, esa_mask_file_export_fa4(ctx, e.fa4, e.masks, 0.5));
    return e;
}

static void exported_free(exported *e)
{
    esa_mask_file_free(e->masks);
    mini_free(&e->m);
    scratch_remove(&e->dir);
}

static void same_bits(esa_mask_file *f, int32_t f_layer, int32_t f_step, esa_mask_file *g,
                      int32_t g_layer, int32_t g_step, int32_t branch, double g_budget)
{
    int64_t n;
    uint8_t *x = bits_of(f, f_layer, f_step, branch, 0.5, &n),
            *y = bits_of(g, g_layer, g_step, branch, g_budget, &n);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

/* Out and in again: the same masks, with our own metadata. */
static void fa4_round_trip(void **state)
{
    (void)state;
    for (int32_t branches = 1; branches <= 2; branches++) {
        exported e = export_fa4(branches);
        ok(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, NULL, NULL));
        esa_mask_file *back = open_file(e.out);
        const esa_mask_file_info i = info_of(back);
        assert_int_equal(i.budget_permille[0], 500);
        assert_int_equal(i.importance, ESA_IMPORTANCE_NONE);
        assert_int_equal(i.stored_groups, e.info.stored_groups);
        for (int32_t layer = 1; layer < 3; layer++)
            for (int32_t step = 2; step < 5; step++)
                for (int32_t branch = 0; branch < branches; branch++)
                    same_bits(e.masks, layer, step, back, layer, step, branch, 0.5);
        esa_mask_file_free(back);
        exported_free(&e);
    }
}

/* The lists in the file are those of esa_mask_to_fa4. */
static void fa4_lists_are_the_masks(void **state)
{
    (void)state;
    for (int32_t branches = 1; branches <= 2; branches++) {
        exported e = export_fa4(branches);
        esa_tensors *raw;
        esa_tensor_info cnt = { .struct_size = sizeof cnt }, idx = { .struct_size = sizeof idx };
        ok(ctx, esa_tensors_open(ctx, &raw, e.fa4));
        ok(ctx, esa_tensors_find(raw, "full_block_cnt", &cnt));
        ok(ctx, esa_tensors_find(raw, "full_block_idx", &idx));
        assert_int_equal(cnt.rank, branches > 1 ? 5 : 4);
        esa_mask *mask;
        ok(ctx, esa_mask_file_get(e.masks, &mask, 1, 4, 0, 0.5));
        int32_t c[24], x[24 * 15];
        assert_int_equal(esa_mask_to_fa4(mask, c, x), ESA_OK);
        esa_mask_free(mask);
        /* layer 1 is the first stored one, step 4 is in the last group */
        const int64_t cell = e.info.stored_groups - 1;
        assert_memory_equal((const uint8_t *)cnt.data + cell * 24 * 4, c, sizeof c);
        assert_memory_equal((const uint8_t *)idx.data + cell * 24 * 15 * 4, x, sizeof x);
        esa_tensors_free(raw);
        exported_free(&e);
    }
}

/* A file of ours describes itself. What the caller says beside it must agree, or say nothing. */
static void fa4_caller_must_agree(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t layout; /* 0: zeros, 1: the default, 2: the file's */
        int32_t grid[3], order, text_front;
        const char *model, *refused;
    } cases[] = {
        { .name = "sizes alone" },
        { .name = "a default layout", .layout = 1, .model = "mini" },
        { .name = "the file's layout", .layout = 2, .model = "mini" },
        { .name = "another grid",
          .layout = 1,
          .grid = { 3, 10, 8 },
          .model = "mini",
          .refused = "grid 3x10x8" },
        { .name = "another order",
          .layout = 1,
          .order = ESA_ORDER_TILE,
          .model = "mini",
          .refused = "order tile" },
        { .name = "other text",
          .layout = 1,
          .text_front = 5,
          .model = "mini",
          .refused = "text 5 + 0" },
    };
    for (int32_t branches = 1; branches <= 2; branches++) {
        exported e = export_fa4(branches);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            esa_mask_info said = { .struct_size = sizeof said,
                                   .Nq = e.info.Nq,
                                   .Nk = e.info.Nk,
                                   .block_q = e.info.block_q,
                                   .block_k = e.info.block_k };
            if (cases[i].layout == 1) said.layout = esa_layout_default();
            if (cases[i].layout == 2) said.layout = e.info.layout;
            if (cases[i].grid[0])
                memcpy(said.layout.grid_q, cases[i].grid, sizeof said.layout.grid_q);
            if (cases[i].order) said.layout.order = cases[i].order;
            if (cases[i].text_front) said.layout.text_front_q = cases[i].text_front;
            print_message("%s\n", cases[i].name);
            const esa_status told = esa_mask_file_import_fa4(ctx, e.out, e.fa4, &said,
                                                             cases[i].model);
            if (cases[i].refused)
                assert_refused(ctx, told, ESA_ERR_MISMATCH, cases[i].refused, "grid 3x8x10",
                               "the caller", NULL);
            else
                ok(ctx, told);
        }
        const esa_mask_info wrong = {
            .struct_size = sizeof wrong, .Nq = 4000, .Nk = 4000, .block_q = 16, .block_k = 16
        };
        assert_refused(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, &wrong, NULL),
                       ESA_ERR_MISMATCH, "4000 x 4000", NULL);
        assert_refused(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, NULL, "another"),
                       ESA_ERR_MISMATCH, "'mini'", "'another'", NULL);
        exported_free(&e);
    }
}

/* The lists of an exported file, to be changed and written again without metadata. */
typedef struct lists {
    esa_tensor_info cnt, idx;
    int32_t *count, *index;
} lists;

static lists read_lists(const char *path)
{
    lists l = { .cnt.struct_size = sizeof l.cnt, .idx.struct_size = sizeof l.idx };
    esa_tensors *raw;
    ok(ctx, esa_tensors_open(ctx, &raw, path));
    ok(ctx, esa_tensors_find(raw, "full_block_cnt", &l.cnt));
    ok(ctx, esa_tensors_find(raw, "full_block_idx", &l.idx));
    l.count = malloc((size_t)l.cnt.bytes);
    l.index = malloc((size_t)l.idx.bytes);
    memcpy(l.count, l.cnt.data, (size_t)l.cnt.bytes);
    memcpy(l.index, l.idx.data, (size_t)l.idx.bytes);
    esa_tensors_free(raw);
    return l;
}

static void write_lists(const lists *l, const char *path)
{
    esa_tensors_writer *w;
    ok(ctx, esa_tensors_writer_create(ctx, &w, path));
    ok(ctx, esa_tensors_writer_declare(w, "full_block_cnt", ESA_FILE_I32, l->cnt.rank, l->cnt.dim));
    ok(ctx, esa_tensors_writer_declare(w, "full_block_idx", ESA_FILE_I32, l->idx.rank, l->idx.dim));
    ok(ctx, esa_tensors_writer_data(w, l->count, l->cnt.bytes));
    ok(ctx, esa_tensors_writer_data(w, l->index, l->idx.bytes));
    ok(ctx, esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
}

static void lists_free(lists *l)
{
    free(l->count);
    free(l->index);
}

static const esa_mask_info foreign_info = {
    .struct_size = sizeof foreign_info, .block_q = 32, .block_k = 16, .Nq = 240, .Nk = 240
};

/* A file from elsewhere has no metadata: the caller describes it. Order inside a row does not
 * matter. */
static void fa4_from_elsewhere(void **state)
{
    (void)state;
    exported e = export_fa4(1);
    lists l = read_lists(e.fa4);
    assert_true(l.count[0] > 1);
    const int32_t first = l.index[0];
    l.index[0] = l.index[1];
    l.index[1] = first;
    write_lists(&l, e.fa4);
    ok(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, &foreign_info, "their model"));
    esa_mask_file *f = open_file(e.out);
    const esa_mask_file_info i = info_of(f);
    assert_string_equal(i.model, "their model");
    assert_int_equal(i.layers, 2);
    assert_int_equal(i.steps, e.info.stored_groups);
    assert_int_equal(i.selector, -1);
    assert_float_equal(i.budget_permille[0], 500, 20);
    same_bits(e.masks, 1, 1, f, 0, 0, 0, i.budget_permille[0] / 1000.0);
    esa_mask_file_free(f);
    assert_refused(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, NULL, NULL), ESA_ERR_ARGUMENT,
                   "info", NULL);
    esa_mask_info wrong = foreign_info;
    wrong.Nk = 256;
    assert_refused(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, &wrong, NULL), ESA_ERR_MISMATCH,
                   "8 x 15", "8 x 16", NULL);
    lists_free(&l);
    exported_free(&e);
}

/* Lists that no mask can have. */
static void fa4_bad_lists(void **state)
{
    (void)state;
    exported e = export_fa4(1);
    lists l = read_lists(e.fa4);
    assert_true(l.count[0] > 1);
    const struct {
        int32_t *where, value;
        const char *word;
    } cases[] = {
        { &l.index[0], l.index[1], "twice" },
        { &l.index[0], 15, "beyond" },
        { &l.count[0], 16, "full_block_cnt" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t was = *cases[i].where;
        *cases[i].where = cases[i].value;
        write_lists(&l, e.fa4);
        *cases[i].where = was;
        assert_refused(ctx, esa_mask_file_import_fa4(ctx, e.out, e.fa4, &foreign_info, NULL),
                       ESA_ERR_FORMAT, cases[i].word, NULL);
    }
    lists_free(&l);
    exported_free(&e);
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fa4_round_trip),        cmocka_unit_test(fa4_lists_are_the_masks),
        cmocka_unit_test(fa4_caller_must_agree), cmocka_unit_test(fa4_from_elsewhere),
        cmocka_unit_test(fa4_bad_lists),         cmocka_unit_test(test_save),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
