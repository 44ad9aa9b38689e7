/* test_gguf.c - the strict reader of GGUF files: what is right is read, everything else is refused
 * with a message.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"
#include "common/one_ctx.h"
#include "base/blocks.h"
#include "io/gguf.h"
#include "io/gguf_make.h"

/* Opens a copy of exactly the file's size, so that the address sanitizer sees every read past it.
 */
static esa_status open_exact(esa_tensors **file, const gguf_make *m, size_t size, void **bytes)
{
    *bytes = malloc(size ? size : 1);
    assert_non_null(*bytes);
    memcpy(*bytes, m->bytes, size);
    return esa_gguf_open_memory(ctx, file, *bytes, (int64_t)size);
}

static void refuse(const gguf_make *m, const char *words)
{
    esa_tensors *file = (void *)1;
    void *bytes;
    const esa_status status = open_exact(&file, m, m->size, &bytes);
    if (status != ESA_ERR_FORMAT)
        fail_msg("status %s instead of: %s", esa_status_name(status), words);
    assert_null(file);
    if (!strstr(esa_ctx_error(ctx), words))
        fail_msg("'%s' is missing in: %s", words, esa_ctx_error(ctx));
    free(bytes);
}

/* Three tensors: f32 [2][3], Q8_0 [2][64], Q4_K [256]. */
static gguf_make good(uint32_t version)
{
    gguf_make m = gguf_begin(version, 3, 5);
    gguf_text(&m, "general.architecture", "wan");
    gguf_key(&m, "general.file_type", 4);
    gguf_u32(&m, 15);
    gguf_key(&m, "a.list", 9); /* two strings */
    gguf_u32(&m, 8);
    gguf_u64(&m, 2);
    gguf_string(&m, "one");
    gguf_string(&m, "");
    gguf_key(&m, "a.nest", 9); /* [[1, 2], []] of u16 */
    gguf_u32(&m, 9);
    gguf_u64(&m, 2);
    gguf_u32(&m, 2);
    gguf_u64(&m, 2);
    gguf_u32(&m, 0x00020001);
    gguf_u32(&m, 2);
    gguf_u64(&m, 0);
    gguf_key(&m, "a.truth", 7);
    gguf_byte(&m, 1);
    gguf_tensor(&m, "plain", 2, (uint64_t[]){ 3, 2 }, 0, 0);
    gguf_tensor(&m, "eight", 2, (uint64_t[]){ 64, 2 }, 8, 32);
    gguf_tensor(&m, "four", 1, (uint64_t[]){ 256 }, 12, 192);
    gguf_data(&m, 32, 192 + 144);
    return m;
}

static void test_good(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        const gguf_make m = good(version);
        esa_tensors *file;
        void *bytes;
        if (open_exact(&file, &m, m.size, &bytes)) fail_msg("refused: %s", esa_ctx_error(ctx));
        assert_int_equal(file->count, 3);
        assert_string_equal(esa_st_metadata(file, "general.architecture"), "wan");
        assert_null(esa_st_metadata(file, "general.file_type"));
        const esa_st_entry *e = esa_st_find(file, "eight");
        assert_int_equal(e->dtype, ESA_BLOCKS_Q8_0);
        assert_int_equal(e->rank, 2);
        assert_int_equal(e->dim[0], 2);
        assert_int_equal(e->dim[1], 64);
        assert_int_equal(e->end - e->begin, 4 * 34);
        assert_ptr_equal(esa_st_data(file, e), (uint8_t *)bytes + m.size - 192 - 144 + 32);
        assert_int_equal(esa_st_find(file, "four")->dtype, ESA_BLOCKS_Q4_K);
        assert_int_equal(esa_st_find(file, "plain")->dtype, ESA_FILE_F32);
        assert_string_equal(esa_file_dtype_name(ESA_BLOCKS_Q4_K), "Q4_K");
        esa_st_close(file);
        free(bytes);
    }
    gguf_make empty = gguf_begin(3, 0, 0);
    esa_tensors *file;
    assert_int_equal(esa_gguf_open_memory(ctx, &file, empty.bytes, (int64_t)empty.size), ESA_OK);
    assert_int_equal(file->count, 0);
    esa_st_close(file);
}

/* Every shorter file is refused, up to the last bytes of data. */
static void test_cut(void **state)
{
    (void)state;
    const gguf_make m = good(3);
    for (size_t size = 0; size < m.size; size++) {
        esa_tensors *file;
        void *bytes;
        assert_int_equal(open_exact(&file, &m, size, &bytes), ESA_ERR_FORMAT);
        assert_null(file);
        assert_true(strlen(esa_ctx_error(ctx)) > 20);
        free(bytes);
    }
}

static void test_header(void **state)
{
    (void)state;
    gguf_make m = gguf_begin(1, 0, 0);
    refuse(&m, "version of GGUF is 1");
    m = gguf_begin(4, 0, 0);
    refuse(&m, "version of GGUF is 4");
    m = gguf_begin(0x03000000, 0, 0);
    refuse(&m, "big-endian");
    m.bytes[0] = 'X';
    refuse(&m, "not a GGUF file");
    m = gguf_begin(3, UINT64_MAX, 0);
    refuse(&m, "claims 18446744073709551615 tensors");
    m = gguf_begin(3, 0, 1);
    refuse(&m, "1 metadata pairs");
    m = good(3);
    gguf_pad(&m, 64);
    refuse(&m, "the tensors end at byte 336");
}

static void test_metadata(void **state)
{
    (void)state;
    gguf_make m = gguf_begin(3, 0, 1);
    gguf_text(&m, "", "some text that is long enough");
    refuse(&m, "a key of the metadata is empty");
    m = gguf_begin(3, 0, 1);
    gguf_text(&m, "a\xff", "text");
    refuse(&m, "not UTF-8");
    m = gguf_begin(3, 0, 1);
    gguf_text(&m, "a", "\xc0\x80");
    refuse(&m, "metadata 'a' is not UTF-8");
    m = gguf_begin(3, 0, 2);
    gguf_text(&m, "a", "1");
    gguf_text(&m, "a", "2");
    refuse(&m, "metadata 'a' appears twice");
    m = gguf_begin(3, 0, 1);
    gguf_key(&m, "a", 13);
    gguf_u64(&m, 0);
    refuse(&m, "type of value that does not exist");
    m = gguf_begin(3, 0, 1);
    gguf_key(&m, "a", 7);
    gguf_u64(&m, 2);
    refuse(&m, "truth value");
    m = gguf_begin(3, 0, 1);
    gguf_key(&m, "a", 9);
    gguf_u32(&m, 0);
    gguf_u64(&m, UINT64_C(1) << 62);
    refuse(&m, "inside the metadata");
    m = gguf_begin(3, 0, 1);
    gguf_key(&m, "a", 9);
    for (int i = 0; i < 6; i++) {
        gguf_u32(&m, 9);
        gguf_u64(&m, 1);
    }
    refuse(&m, "nested too deeply");
    static const uint32_t wrong[] = { 0, 48, 1u << 21 };
    for (size_t i = 0; i < 3; i++) {
        m = gguf_begin(3, 0, 1);
        gguf_key(&m, "general.alignment", 4);
        gguf_u32(&m, wrong[i]);
        refuse(&m, "expected a power of two");
    }
    m = gguf_begin(3, 0, 1);
    gguf_key(&m, "general.alignment", 10);
    gguf_u64(&m, 32);
    refuse(&m, "is not a u32");
}

/* One tensor and its data. */
static gguf_make one(uint32_t rank, const uint64_t *dim, uint32_t type, uint64_t offset,
                     size_t data)
{
    gguf_make m = gguf_begin(3, 1, 0);
    gguf_tensor(&m, "x", rank, dim, type, offset);
    gguf_data(&m, 32, data);
    return m;
}

static void test_tensors(void **state)
{
    (void)state;
    const uint64_t four[9] = { 4, 1, 1, 1, 1, 1, 1, 1, 1 }, zero[1] = { 0 };
    gguf_make m = one(9, four, 0, 0, 16);
    refuse(&m, "has 9 dimensions");
    m = one(1, four, 2, 0, 32);
    refuse(&m, "has type Q4_0, expected F32");
    m = one(1, four, 10, 0, 32);
    refuse(&m, "has type Q2_K");
    m = one(1, four, 77, 0, 32);
    refuse(&m, "type number 77");
    m = one(1, four, 8, 0, 34);
    refuse(&m, "rows of 4 elements, but Q8_0 needs a multiple of 32");
    m = one(1, (uint64_t[]){ 128 }, 14, 0, 210);
    refuse(&m, "Q6_K needs a multiple of 256");
    m = one(0, NULL, 8, 0, 34);
    refuse(&m, "rows of 1 elements");
    m = one(1, four, 0, 8, 32);
    refuse(&m, "begins at byte 8 of the data, expected a multiple of 32");
    m = one(1, four, 0, 32, 48);
    refuse(&m, "bytes 0 to 32 of the data (before 'x') belong to no tensor");
    m = one(1, four, 0, 0, 15);
    refuse(&m, "claims bytes 0 to 16, but the file has 15");
    m = one(1, four, 0, UINT64_C(1) << 63, 16);
    refuse(&m, "behind the end of the file");
    m = one(1, (uint64_t[]){ UINT64_MAX }, 0, 0, 16);
    refuse(&m, "beyond 63 bits");
    m = one(2, (uint64_t[]){ UINT64_C(1) << 40, UINT64_C(1) << 40 }, 0, 0, 16);
    refuse(&m, "more bytes than 63 bits");
    m = one(2, (uint64_t[]){ UINT64_C(1) << 40, UINT64_C(1) << 40 }, 12, 0, 144);
    refuse(&m, "more bytes than 63 bits");
    /* GGUF lists the last dimension first: the zero comes after the two that overflow. */
    for (uint32_t type = 0; type <= 12; type += 12) {
        m = one(3, (uint64_t[]){ 0, UINT64_C(1) << 40, UINT64_C(1) << 40 }, type, 0, 0);
        refuse(&m, "more bytes than 63 bits");
    }
    m = gguf_begin(3, 1, 0);
    gguf_tensor(&m, "", 1, four, 0, 0);
    gguf_data(&m, 32, 16);
    refuse(&m, "the name of a tensor is empty");
    m = gguf_begin(3, 2, 0);
    gguf_tensor(&m, "x", 1, four, 0, 0);
    gguf_tensor(&m, "x", 1, four, 0, 32);
    gguf_data(&m, 32, 48);
    refuse(&m, "tensor 'x' appears twice");
    m = gguf_begin(3, 2, 0);
    gguf_tensor(&m, "x", 1, four, 0, 0);
    gguf_tensor(&m, "y", 1, four, 0, 0);
    gguf_data(&m, 32, 16);
    refuse(&m, "overlap");

    esa_tensors *file;
    m = one(1, zero, 0, 0, 0); /* no elements */
    assert_int_equal(esa_gguf_open_memory(ctx, &file, m.bytes, (int64_t)m.size), ESA_OK);
    esa_st_close(file);
    m = one(5, four, 30, 0, 8); /* five dimensions, as patch embeddings have */
    assert_int_equal(esa_gguf_open_memory(ctx, &file, m.bytes, (int64_t)m.size), ESA_OK);
    assert_int_equal(esa_st_find(file, "x")->rank, 5);
    assert_int_equal(esa_st_find(file, "x")->dim[4], 4);
    esa_st_close(file);
    m = gguf_begin(3, 2, 1); /* another alignment, and data in another order than names */
    gguf_key(&m, "general.alignment", 4);
    gguf_u32(&m, 8);
    gguf_tensor(&m, "b", 1, four, 0, 16);
    gguf_tensor(&m, "a", 1, four, 0, 0);
    gguf_data(&m, 8, 32);
    assert_int_equal(esa_gguf_open_memory(ctx, &file, m.bytes, (int64_t)m.size), ESA_OK);
    assert_int_equal(esa_st_find(file, "b")->begin, 16);
    esa_st_close(file);
}

static void test_files(void **state)
{
    (void)state;
    scratch dir = scratch_make();
    const gguf_make m = good(3);
    esa_tensors *file;
    FILE *f = fopen(scratch_path(&dir, "x.gguf"), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(m.bytes, 1, m.size, f), m.size);
    fclose(f);
    assert_int_equal(esa_gguf_open(ctx, &file, scratch_path(&dir, "x.gguf")), ESA_OK);
    assert_int_equal(file->count, 3);
    esa_st_close(file);
    assert_int_equal(esa_gguf_open(ctx, &file, scratch_path(&dir, "y.gguf")), ESA_ERR_IO);
    assert_null(file);
    /* The public call is for safetensors. */
    assert_int_equal(esa_tensors_open(ctx, &file, scratch_path(&dir, "x.gguf")), ESA_ERR_FORMAT);
    assert_non_null(strstr(esa_ctx_error(ctx), "is a GGUF file"));
    scratch_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),    cmocka_unit_test(test_cut),
        cmocka_unit_test(test_header),  cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_tensors), cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
