/* test_tensor_file.c - reads and writes embeddings and latents: types, a leading batch, and
 * everything that is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include "esa/esa_tensors.h"
#include "model/run/tensor_file.h"

static void put(esa_ctx *ctx, const char *path, int32_t dtype, int32_t rank, const int64_t *dim,
                const void *data, int64_t bytes)
{
    esa_tensors_writer *w;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, path), ESA_OK);
    assert_int_equal(esa_tensors_writer_declare(w, "x", dtype, rank, dim), ESA_OK);
    assert_int_equal(esa_tensors_writer_data(w, data, bytes), ESA_OK);
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
}

static void types_and_batches(void **state)
{
    static const float f32[6] = { 1, -2, 0.5f, 3, 0, -0.25f };
    static const uint16_t f16[6] = { 0x3c00, 0xc000, 0x3800, 0x4200, 0, 0xb400 },
                          bf16[6] = { 0x3f80, 0xc000, 0x3f00, 0x4040, 0, 0xbe80 };
    static const int64_t shapes[3][4] = { { 2, 3 }, { 1, 2, 3 }, { 1, 1, 2, 3 } };
    static const int64_t expected[2] = { -1, 3 };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    const char *path = scratch_path(&s, "t");
    for (int32_t rank = 2; rank <= 4; rank++)
        for (int32_t dtype = ESA_FILE_F32; dtype <= ESA_FILE_BF16; dtype++) {
            const void *data = dtype == ESA_FILE_F32   ? (const void *)f32
                               : dtype == ESA_FILE_F16 ? (const void *)f16
                                                       : (const void *)bf16;
            esa_loaded t;
            put(ctx, path, dtype, rank, shapes[rank - 2], data, dtype == ESA_FILE_F32 ? 24 : 12);
            assert_int_equal(esa_loaded_read(ctx, &t, path, "x", 2, expected), ESA_OK);
            assert_true(t.dim[0] == 2 && t.dim[1] == 3);
            assert_memory_equal(t.data, f32, sizeof f32); /* these values are exact in all three */
            esa_loaded_free(ctx, &t);
        }
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static void there_and_back(void **state)
{
    static const float a[6] = { 1, 2, 3, 4, 5, 6 }, b[3] = { 7, 8, 9 };
    static const int64_t expected[2] = { -1, 3 };
    (void)state;
    scratch s = scratch_make();
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    const char *path = scratch_path(&s, "t");
    const esa_to_save save[2] = { { "a", a, { 2, 3 } }, { "b", b, { 1, 3 } } };
    esa_loaded t;
    assert_int_equal(esa_loaded_write(ctx, path, save, 2, 2), ESA_OK);
    assert_int_equal(esa_loaded_read(ctx, &t, path, "a", 2, expected), ESA_OK);
    assert_memory_equal(t.data, a, sizeof a);
    esa_loaded_free(ctx, &t);
    assert_int_equal(esa_loaded_read(ctx, &t, path, "b", 2, expected), ESA_OK);
    assert_memory_equal(t.data, b, sizeof b);
    esa_loaded_free(ctx, &t);
    for (int64_t left = 0;; left++) { /* every allocation of reading fails once */
        c.left = left;
        const esa_status status = esa_loaded_read(ctx, &t, path, "a", 2, expected);
        c.left = -1;
        if (status == ESA_OK) break;
        assert_int_equal(status, ESA_ERR_MEMORY);
        assert_null(t.data);
        assert_true(left < 100);
    }
    esa_loaded_free(ctx, &t);
    assert_refused(ctx, esa_loaded_write(ctx, "/nonexistent/t", save, 2, 2), ESA_ERR_IO,
                   "/nonexistent/t", NULL);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

static void refusals(void **state)
{
    static const float bad[6] = { 1, 2, 3, 4, 5, 1.0f / 0.0f };
    static const int64_t two[2] = { 2, 3 }, wide[2] = { -1, 4 }, three[3] = { 2, 1, 3 },
                         fits[2] = { 2, 3 };
    static const int32_t whole[6] = { 1, 2, 3, 4, 5, 6 };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    const char *path = scratch_path(&s, "t");
    esa_loaded t;
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 2, fits), ESA_ERR_IO, "t", NULL);
    put(ctx, path, ESA_FILE_F32, 2, two, bad, 24);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 2, fits), ESA_ERR_FORMAT, "not finite",
                   NULL);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "y", 2, fits), ESA_ERR_MISMATCH,
                   "no tensor named y", NULL);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 2, wide), ESA_ERR_MISMATCH, "[2, 3]",
                   "[any, 4]", NULL);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 3, three), ESA_ERR_MISMATCH, "[2, 3]",
                   "[2, 1, 3]", NULL);
    /* a 1 that does not come first is not a batch */
    put(ctx, path, ESA_FILE_F32, 3, three, whole, 24);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 2, fits), ESA_ERR_MISMATCH, "[2, 1, 3]",
                   NULL);
    put(ctx, path, ESA_FILE_I32, 2, two, whole, 24);
    assert_refused(ctx, esa_loaded_read(ctx, &t, path, "x", 2, fits), ESA_ERR_DTYPE, "neither F32",
                   NULL);
    assert_null(t.data);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(types_and_batches),
        cmocka_unit_test(there_and_back),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
