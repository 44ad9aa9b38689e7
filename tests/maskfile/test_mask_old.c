/* test_mask_old.c - recordings and mask files of format version 1 give the same bytes as ever.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The recordings are written here, number by number. The hashes are those of the files that the
 * library wrote before version 2 existed. */
#include "maskfile/mask_file_test.h"

enum { LAYERS = 2, GROUPS = 3, HEADS = 2, ROWS = 5, COLUMNS = 10 };

static void put(esa_tensors_writer *w, const char *key, const char *value)
{
    ok(ctx, esa_tensors_writer_metadata(w, key, value));
}

/* A recording of version 1: 150 tokens in blocks of 32x16, one prompt per seed. */
static void write_recording(const char *path, uint64_t seed)
{
    static const char *const text[][2] = {
        { "format", "esa.recording" },
        { "model", "old" },
        { "config_hash", "0a" },
        { "selector", "entropy" },
        { "mode", "fixed" },
        { "order", "raster" },
        { "importance", "none" },
        { "format_version", "1" },
        { "layers", "2" },
        { "steps", "3" },
        { "groups", "3" },
        { "branches", "1" },
        { "prompts", "1" },
        { "heads", "2" },
        { "tokens_q", "150" },
        { "tokens_k", "150" },
        { "samples", "4" },
        { "causal", "0" },
        { "protect_first_frame", "0" },
        { "dense_first_layer", "0" },
        { "block", "32,16" },
        { "grid_q", "0,0,0" },
        { "grid_k", "0,0,0" },
        { "text_q", "0,0" },
        { "text_k", "0,0" },
        { "window", "2,8,8" },
        { "warmup_frac", "0.0" },
        { "scale", "0" },
    };
    static uint32_t sums[LAYERS * GROUPS][HEADS * ROWS * COLUMNS];
    int32_t count[LAYERS * GROUPS];
    esa_rng r = { seed };
    for (int c = 0; c < LAYERS * GROUPS; c++) {
        count[c] = 2;
        for (int i = 0; i < HEADS * ROWS * COLUMNS; i++)
            sums[c][i] = esa_rng_below(&r, 1u << (12 + esa_rng_below(&r, 13)));
    }
    const int64_t none = 0, cells[3] = { 1, LAYERS, GROUPS },
                  shape[4] = { LAYERS * GROUPS, HEADS, ROWS, COLUMNS };
    esa_tensors_writer *w;
    ok(ctx, esa_tensors_writer_create(ctx, &w, path));
    for (size_t i = 0; i < sizeof text / sizeof text[0]; i++) put(w, text[i][0], text[i][1]);
    ok(ctx, esa_tensors_writer_declare(w, "dense_layers", ESA_FILE_I32, 1, &none));
    ok(ctx, esa_tensors_writer_declare(w, "count", ESA_FILE_I32, 3, cells));
    ok(ctx, esa_tensors_writer_declare(w, "sums", ESA_FILE_U32, 4, shape));
    ok(ctx, esa_tensors_writer_data(w, count, sizeof count));
    ok(ctx, esa_tensors_writer_data(w, sums, sizeof sums));
    ok(ctx, esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
}

static uint64_t hash_of(const char *path)
{
    size_t n;
    uint8_t *bytes = scratch_read(path, &n);
    const uint64_t h = mini_hash(UINT64_C(0xcbf29ce484222325), bytes, (int64_t)n);
    free(bytes);
    return h;
}

static void same_bytes_as_ever(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char a[640], b[640], out[640];
    strcpy(a, scratch_path(&s, "a"));
    strcpy(b, scratch_path(&s, "b"));
    strcpy(out, scratch_path(&s, "out"));
    write_recording(a, 1);
    write_recording(b, 2);
    const char *ab[] = { a, b };
    ok(ctx, esa_recording_merge(ctx, out, ab, 2));
    print_message("merged %016llx\n", (unsigned long long)hash_of(out));
    assert_true(hash_of(out) == UINT64_C(0xfe1c17173eb08f08));
    static const uint64_t hash[3] = { UINT64_C(0xf6bff06ccb0734ea), UINT64_C(0x370fccea3b66289f),
                                      UINT64_C(0x7c91c1a7d6952945) };
    for (int32_t importance = ESA_IMPORTANCE_NONE; importance <= ESA_IMPORTANCE_F16; importance++) {
        const esa_mask_build build = build_of(importance, 3);
        ok(ctx, esa_mask_file_build(ctx, out, ab, 2, &build));
        print_message("importance %d: %016llx\n", importance, (unsigned long long)hash_of(out));
        assert_true(hash_of(out) == hash[importance]);
        esa_mask_file *f = open_file(out);
        const esa_mask_file_info i = info_of(f);
        assert_int_equal(i.format_version, 1);
        assert_int_equal(i.dense_first_layer, 1);
        assert_int_equal(i.stored_layers, 1);
        assert_int_equal(i.fine, 0);
        double density = 0;
        ok(ctx, esa_mask_file_density(f, &density, 1, 2, 0, 0.25));
        assert_float_equal(density, 0.25, 0); /* the same in every cell */
        esa_mask_file_free(f);
    }
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(same_bytes_as_ever) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
