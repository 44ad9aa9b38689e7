/* test_safetensors_read.c - the strict reader: what is right is read, everything else is refused
 * with a message.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"
#include "common/one_ctx.h"
#include "esa/esa_tensors.h"

/* A file in memory from header text and a number of data bytes; the caller frees. */
static uint8_t *make(const char *header, size_t data, size_t *size)
{
    const size_t n = strlen(header);
    *size = 8 + n + data;
    uint8_t *bytes = malloc(*size);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++) bytes[8 + n + i] = (uint8_t)(i * 7 + 1);
    return bytes;
}

static esa_status open_text(esa_tensors **file, const char *header, size_t data)
{
    /* The exact size on the heap, so that the address sanitizer sees every read past the end. The
     * bytes leak into the file object's lifetime only when it opened. */
    size_t size;
    uint8_t *bytes = make(header, data, &size);
    const esa_status status = esa_tensors_open_memory(ctx, file, bytes, (int64_t)size);
    if (status != ESA_OK) free(bytes);
    return status;
}

static void accept(const char *header, size_t data)
{
    size_t size;
    uint8_t *bytes = make(header, data, &size);
    esa_tensors *file;
    const esa_status status = esa_tensors_open_memory(ctx, &file, bytes, (int64_t)size);
    if (status != ESA_OK) fail_msg("refused: %s\n%s", esa_ctx_error(ctx), header);
    esa_tensors_free(file);
    free(bytes);
}

static void refuse(const char *header, size_t data, const char *word)
{
    esa_tensors *file = (void *)1;
    const esa_status status = open_text(&file, header, data);
    if (status != ESA_ERR_FORMAT) fail_msg("status %s for %s", esa_status_name(status), header);
    assert_null(file);
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("'%s' is missing in: %s\n%s", word, esa_ctx_error(ctx), header);
}

static void test_good(void **state)
{
    (void)state;
    accept("{}", 0);
    accept("{}      ", 0);
    accept("{ \n\t\r}", 0);
    accept("{\"__metadata__\":{}}", 0);
    accept("{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4);
    accept("{\"a\":{\"shape\":[2,3],\"data_offsets\":[0,12],\"dtype\":\"BF16\"}}  ", 12);
    accept("{\"e\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"f\":{\"dtype\":\"U8\","
           "\"shape\":[3,0,9],\"data_offsets\":[0,0]}}",
           0);
    accept("{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},\"a\":{\"dtype\":\"I8\","
           "\"shape\":[1],\"data_offsets\":[0,1]}}",
           3);
    accept("{\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]},\"a\":{\"dtype\":\"I8\","
           "\"shape\":[2],\"data_offsets\":[0,2]}}",
           2);
    accept("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1);

    esa_tensors *file;
    const char *h =
        "{\"__metadata__\":{\"k\\u00e9\\n\":\"\\ud83d\\ude00 \\\"x\\\" \\\\ \\/\",\"a\":\"\"},"
        "\"second\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[4,8]},\"first\":{\"dtype\":"
        "\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    size_t size;
    uint8_t *bytes = make(h, 8, &size);
    assert_int_equal(esa_tensors_open_memory(ctx, &file, bytes, (int64_t)size), ESA_OK);
    assert_int_equal(esa_tensors_count(file), 2);
    assert_int_equal(esa_tensors_metadata_count(file), 2);
    assert_string_equal(esa_tensors_metadata(file, "k\xc3\xa9\n"), "\xf0\x9f\x98\x80 \"x\" \\ /");
    assert_string_equal(esa_tensors_metadata(file, "a"), "");
    assert_null(esa_tensors_metadata(file, "b"));
    const char *key, *value;
    assert_int_equal(esa_tensors_metadata_at(file, 0, &key, &value), ESA_OK);
    assert_string_equal(key, "a");
    assert_int_equal(esa_tensors_metadata_at(file, 2, &key, &value), ESA_ERR_ARGUMENT);
    esa_tensor_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_tensors_at(file, 0, &info), ESA_OK);
    assert_string_equal(info.name, "first");
    assert_int_equal(info.bytes, 4);
    assert_int_equal(esa_tensors_find(file, "second", &info), ESA_OK);
    assert_int_equal(info.dtype, ESA_FILE_I16);
    assert_int_equal(info.rank, 1);
    assert_int_equal(info.dim[0], 2);
    assert_memory_equal(info.data, bytes + size - 4, 4);
    assert_refused(ctx, esa_tensors_find(file, "third", &info), ESA_ERR_ARGUMENT, "third", NULL);
    assert_refused(ctx, esa_tensors_at(file, 2, &info), ESA_ERR_ARGUMENT, "2", NULL);
    assert_int_equal(esa_tensors_at(file, -1, &info), ESA_ERR_ARGUMENT);
    info.struct_size = 8;
    assert_int_equal(esa_tensors_at(file, 0, &info), ESA_ERR_VERSION);
    esa_tensors_free(file);
    free(bytes);
}

static void test_json(void **state)
{
    (void)state;
    refuse("[]", 0, "does not start with '{'");
    refuse(" {}", 0, "does not start with '{'");
    refuse("{", 0, "not start with '{'");
    refuse("{ ", 0, "expected a string");
    refuse("{}x", 0, "only spaces may follow");
    refuse("{}\n", 0, "only spaces may follow");
    refuse("{\"a\"}", 0, "expected a ':'");
    refuse("{\"a\":{}}", 0, "has no dtype");
    refuse("{\"a\":{\"dtype\":\"F32\"}}", 0, "has no shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "has no data_offsets");
    refuse("{\"a\":1}", 0, "expected an object");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},}", 4,
           "expected a string");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}", 4, "ends too early");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"extra\":1}}", 4,
           "unknown key 'extra'");
    refuse("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
           "a second key 'dtype'");
    refuse("{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype 'F31'");
    refuse("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "expected a string");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4,
           "expected an array");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,],\"data_offsets\":[0,4]}}", 4,
           "expected a number");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[[1]],\"data_offsets\":[0,4]}}", 4,
           "expected a number");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "two numbers");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4,
           "expected a ']'");
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "metadata 'a' is not a string");
    refuse("{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, "metadata 'a' is not a string");
    refuse("{\"__metadata__\":{\"a\":null}}", 0, "not a string");
    refuse("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "metadata 'a' appears twice");
    refuse("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ appears twice");
    refuse("{\"__metadata__\":[]}", 0, "expected an object");
}

static void test_strings(void **state)
{
    (void)state;
    refuse("{\"a\x01\":{}}", 0, "control character");
    refuse("{\"a", 0, "has no end");
    refuse("{\"a\\", 0, "has no end");
    refuse("{\"\\x\":{}}", 0, "unknown escape");
    refuse("{\"\\u12g4\":{}}", 0, "four hex digits");
    refuse("{\"\\u0000\":{}}", 0, "NUL");
    refuse("{\"\\ud800\":{}}", 0, "surrogate");
    refuse("{\"\\udc00\":{}}", 0, "surrogate");
    refuse("{\"\\ud800\\u0041\":{}}", 0, "surrogate");
    refuse("{\"\x80\":{}}", 0, "not UTF-8");
    refuse("{\"\xc0\xaf\":{}}", 0, "not UTF-8");
    refuse("{\"\xe0\x80\xaf\":{}}", 0, "not UTF-8");
    refuse("{\"\xed\xa0\x80\":{}}", 0, "not UTF-8");
    refuse("{\"\xf0\x80\x80\x80\":{}}", 0, "not UTF-8");
    refuse("{\"\xf4\x90\x80\x80\":{}}", 0, "not UTF-8");
    refuse("{\"\xf8\x88\x80\x80\x80\":{}}", 0, "not UTF-8");
    refuse("{\"\xe2\x82\":{}}", 0, "not UTF-8");
    /* A control character in a name does not reach the message. */
    refuse("{\"a\\u001b[31m\":{}}", 0, "'a?[31m'");
}

static void test_numbers(void **state)
{
    (void)state;
    const struct {
        const char *shape, *offsets, *word;
    } bad[] = { { "-1", "0,4", "negative" },
                { "1.0", "0,4", "not an integer" },
                { "1e0", "0,4", "not an integer" },
                { "01", "0,4", "leading zero" },
                { "+1", "0,4", "expected a number" },
                { "9223372036854775808", "0,4", "63 bits" },
                { "99999999999999999999999", "0,4", "63 bits" },
                { "\"1\"", "0,4", "expected a number" },
                { "true", "0,4", "expected a number" },
                { "1", "-0,4", "negative" },
                { "1", "0,4.0", "not an integer" },
                { "1", "0.5,4", "not an integer" },
                { "1", "0,18446744073709551620", "63 bits" },
                { "1", "null,4", "expected a number" },
                { "1,1,1,1,1,1,1,1,1", "0,4", "more than 8 dimensions" },
                { "4294967296,4294967296", "0,4", "need more than" },
                { "9223372036854775807,9223372036854775807", "0,4", "need more than" },
                { "3074457345618258603,3", "0,4", "need more than" },
                { "2305843009213693952", "0,4", "need more than" },
                { "2", "0,4", "has 4 bytes, but its dtype and shape need 8" },
                { "1", "4,0", "claims bytes 4 to 0" },
                { "1", "0,8", "claims bytes 0 to 8" },
                { "1", "9223372036854775803,9223372036854775807", "claims bytes" } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char h[256];
        snprintf(h, sizeof h, "{\"a\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%s]}}",
                 bad[i].shape, bad[i].offsets);
        refuse(h, 4, bad[i].word);
    }
}

static void test_tiling(void **state)
{
    (void)state;
#define T(name, begin, end, n)                                                                     \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" n "],\"data_offsets\":[" begin "," end "]}"
    refuse("{" T("a", "0", "2", "2") "," T("b", "1", "3", "2") "}", 3, "overlap");
    refuse("{" T("a", "0", "2", "2") "," T("b", "0", "2", "2") "}", 2, "overlap");
    refuse("{" T("a", "0", "4", "4") "," T("b", "2", "2", "0") "}", 4, "overlap");
    refuse("{" T("a", "0", "1", "1") "," T("b", "2", "3", "1") "}", 3,
           "bytes 1 to 2 of the data (before 'b') belong to no tensor");
    refuse("{" T("a", "1", "2", "1") "}", 2,
           "bytes 0 to 1 of the data (before 'a') belong to no tensor");
    refuse("{" T("a", "0", "1", "1") "}", 2, "end at byte 1 of the data, but the file has 2");
    refuse("{}", 1, "end at byte 0 of the data, but the file has 1");
    refuse("{" T("a", "0", "1", "1") "," T("a", "1", "2", "1") "}", 2, "tensor 'a' appears twice");
    refuse("{" T("a", "0", "1", "1") "," T("\\u0061", "1", "2", "1") "}", 2,
           "tensor 'a' appears twice");
    refuse("{" T("a", "0", "2", "2") "}", 1, "claims bytes 0 to 2");
#undef T
}

static void test_sizes(void **state)
{
    (void)state;
    esa_tensors *file;
    const struct {
        const char *bytes;
        size_t n;
        const char *word;
    } bad[] = { { "", 0, "too short" },
                { "\2\0\0\0\0\0\0", 7, "too short" },
                { "\2\0\0\0\0\0\0\0{", 9, "claims 2 bytes" },
                { "\0\0\0\0\0\0\0\0", 8, "does not start" },
                { "\377\377\377\377\377\377\377\377{}", 10, "at most 100000000" },
                { "\1\341\365\5\0\0\0\0{}", 10, "at most 100000000" },
                { "\377\340\365\5\0\0\0\0{}", 10, "claims 99999999 bytes" },
                { "PK\3\4aaaaaaaaaaaa", 16, "zip archive" },
                { "\200\2}q\1.", 6, "pickle" },
                { "\223NUMPY\1\0aaaa", 12, "NumPy" },
                { "GGUF\3\0\0\0aaaa", 12, "GGUF" },
                { "version https://git-lfs", 23, "Git LFS" } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t *copy = malloc(bad[i].n ? bad[i].n : 1);
        memcpy(copy, bad[i].bytes, bad[i].n);
        assert_refused(ctx, esa_tensors_open_memory(ctx, &file, copy, (int64_t)bad[i].n),
                       ESA_ERR_FORMAT, bad[i].word, NULL);
        assert_null(file);
        free(copy);
    }
    /* Every prefix of a good file is refused or (never) accepted as something else. */
    size_t size;
    uint8_t *bytes = make("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]},\"__"
                          "metadata__\":{\"x\":\"\\u00e9\"}}  ",
                          12, &size);
    for (size_t n = 0; n < size; n++) {
        uint8_t *part = malloc(n ? n : 1);
        memcpy(part, bytes, n);
        assert_int_equal(esa_tensors_open_memory(ctx, &file, part, (int64_t)n), ESA_ERR_FORMAT);
        free(part);
    }
    /* Every single byte changed to every value: no crash, and what opens still fits its bytes. */
    for (size_t i = 0; i < size; i++)
        for (int v = 0; v < 256; v++) {
            const uint8_t old = bytes[i];
            bytes[i] = (uint8_t)v;
            if (esa_tensors_open_memory(ctx, &file, bytes, (int64_t)size) == ESA_OK) {
                esa_tensor_info info = { .struct_size = sizeof info };
                for (int64_t t = 0; t < esa_tensors_count(file); t++) {
                    assert_int_equal(esa_tensors_at(file, t, &info), ESA_OK);
                    assert_true((const uint8_t *)info.data >= bytes &&
                                (const uint8_t *)info.data + info.bytes <= bytes + size);
                }
                esa_tensors_free(file);
            }
            bytes[i] = old;
        }
    free(bytes);
}

static void test_nesting(void **state)
{
    (void)state;
    /* A megabyte of brackets must neither recurse nor take long. */
    const size_t n = 1000000;
    char *h = malloc(n + 32);
    memcpy(h, "{\"a\":", 5);
    memset(h + 5, '{', n);
    h[n + 5] = 0;
    refuse(h, 0, "expected a string");
    memset(h + 5, '[', n);
    refuse(h, 0, "expected an object");
    free(h);
}

static void test_files(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_tensors *file = (void *)1;
    assert_refused(ctx, esa_tensors_open(ctx, &file, scratch_path(&s, "none.safetensors")),
                   ESA_ERR_IO, "none.safetensors", "No such file", NULL);
    assert_null(file);
    assert_refused(ctx, esa_tensors_open(ctx, &file, s.dir), ESA_ERR_IO, "folder", NULL);
    assert_refused(ctx, esa_tensors_open(ctx, &file, "/dev/null"), ESA_ERR_IO, "not a regular file",
                   NULL);
    assert_refused(ctx, esa_tensors_open(ctx, &file, ""), ESA_ERR_ARGUMENT, "file name", NULL);
    assert_refused(ctx, esa_tensors_open(ctx, &file, NULL), ESA_ERR_ARGUMENT, "file name", NULL);
    assert_int_equal(esa_tensors_open(NULL, &file, "x"), ESA_ERR_ARGUMENT);
    assert_refused(ctx, esa_tensors_open(ctx, NULL, "x"), ESA_ERR_ARGUMENT, "NULL", NULL);
    scratch_write(scratch_path(&s, "empty"), "", 0);
    assert_refused(ctx, esa_tensors_open(ctx, &file, scratch_path(&s, "empty")), ESA_ERR_FORMAT,
                   "empty", NULL);
    assert_int_equal(mkfifo(scratch_path(&s, "pipe"), 0600), 0);
    assert_refused(ctx, esa_tensors_open(ctx, &file, scratch_path(&s, "pipe")), ESA_ERR_IO,
                   "not a regular file", NULL);
    esa_tensors_free(NULL);
    scratch_remove(&s);
}

static void test_memory_failure(void **state)
{
    (void)state;
    counting c;
    esa_ctx *small = counting_ctx(&c, 1);
    const int64_t base = c.live;
    char h[8192] = "{\"__metadata__\":{\"m0\":\"v\"";
    for (int i = 1; i < 40; i++) sprintf(h + strlen(h), ",\"m%d\":\"v\"", i);
    strcat(h, "}");
    for (int i = 0; i < 40; i++)
        sprintf(h + strlen(h), ",\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                i, i, i + 1);
    strcat(h, "}");
    size_t size;
    uint8_t *bytes = make(h, 40, &size);
    int64_t points = 0;
    for (;; points++) {
        esa_tensors *file;
        c.left = points;
        const esa_status status = esa_tensors_open_memory(small, &file, bytes, (int64_t)size);
        if (status == ESA_OK) {
            c.left = -1;
            esa_tensors_free(file);
            break;
        }
        assert_refused(small, status, ESA_ERR_MEMORY, "out of memory", NULL);
        assert_null(file);
        assert_int_equal(c.live, base);
    }
    assert_true(points >= 5);
    assert_int_equal(c.live, base);
    print_message("open: every one of %lld allocations failed once\n", (long long)points);
    free(bytes);
    esa_ctx_free(small);
    assert_int_equal(c.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),          cmocka_unit_test(test_json),
        cmocka_unit_test(test_strings),       cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_tiling),        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_nesting),       cmocka_unit_test(test_files),
        cmocka_unit_test(test_memory_failure)
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
