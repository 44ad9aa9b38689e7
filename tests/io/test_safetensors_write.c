/* test_safetensors_write.c - the writer: round trips of every dtype, and files that appear whole or
 * not at all.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"
#include "common/one_ctx.h"
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include "base/rng.h"
#include "esa/esa_tensors.h"

static const int64_t sizes[] = { 4, 2, 2, 8, 8, 4, 2, 1, 1, 1, 2, 4, 8, 1, 1 };

static void test_round_trip(void **state)
{
    (void)state;
    const uint64_t seed = 20260;
    print_message("seed %llu\n", (unsigned long long)seed);
    esa_rng rng = { seed };
    scratch s = scratch_make();
    const char *names[] = { "plain",
                            "with \"quotes\" and \\ and \n",
                            "gr\xc3\xbc\xc3\x9f/\xe6\xbc\xa2",
                            "a.b.c",
                            "\x01\x1f",
                            " " };
    for (int32_t round = 0; round < 60; round++) {
        esa_tensors_writer *w;
        assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "x.safetensors")),
                         ESA_OK);
        const int32_t count = (int32_t)esa_rng_below(&rng, 20);
        for (int i = 0; i < round % 4; i++) {
            char key[32];
            snprintf(key, sizeof key, "key%d\t", i);
            assert_int_equal(esa_tensors_writer_metadata(w, key, names[i]), ESA_OK);
        }
        uint8_t *data[20];
        int64_t bytes[20], dims[20][8];
        int32_t ranks[20], dtypes[20];
        char name[20][64];
        int64_t total = 0;
        for (int32_t t = 0; t < count; t++) {
            dtypes[t] = (round + t) % 15;
            ranks[t] = (int32_t)esa_rng_below(&rng, 9);
            bytes[t] = sizes[dtypes[t]];
            for (int32_t i = 0; i < ranks[t]; i++) {
                dims[t][i] = esa_rng_below(&rng, 4);
                bytes[t] *= dims[t][i];
            }
            data[t] = malloc((size_t)bytes[t] + 1);
            for (int64_t i = 0; i < bytes[t]; i++) data[t][i] = (uint8_t)esa_rng_next(&rng);
            snprintf(name[t], sizeof name[t], "%s%d", names[t % 6], t);
            assert_int_equal(esa_tensors_writer_declare(w, name[t], dtypes[t], ranks[t], dims[t]),
                             ESA_OK);
            total += bytes[t];
        }
        /* Pieces of any size, across tensors. */
        uint8_t *all = malloc((size_t)total + 1);
        int64_t at = 0;
        for (int32_t t = 0; t < count; t++) {
            memcpy(all + at, data[t], (size_t)bytes[t]);
            at += bytes[t];
        }
        for (at = 0; at < total;) {
            const int64_t left = total - at,
                          n = 1 + esa_rng_below(&rng, left > 5000 ? 5000 : (uint32_t)left);
            assert_int_equal(esa_tensors_writer_data(w, all + at, n), ESA_OK);
            at += n;
        }
        assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
        esa_tensors_writer_free(w);
        free(all);
        assert_int_equal(scratch_count(&s), 1);

        esa_tensors *f;
        const esa_status opened = esa_tensors_open(ctx, &f, scratch_path(&s, "x.safetensors"));
        if (opened != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
        assert_int_equal(esa_tensors_count(f), count);
        assert_int_equal(esa_tensors_metadata_count(f), round % 4);
        for (int i = 0; i < round % 4; i++) {
            char key[32];
            snprintf(key, sizeof key, "key%d\t", i);
            assert_string_equal(esa_tensors_metadata(f, key), names[i]);
        }
        for (int32_t t = 0; t < count; t++) {
            esa_tensor_info info = { .struct_size = sizeof info };
            assert_int_equal(esa_tensors_find(f, name[t], &info), ESA_OK);
            assert_int_equal(info.dtype, dtypes[t]);
            assert_int_equal(info.rank, ranks[t]);
            assert_int_equal(info.bytes, bytes[t]);
            for (int32_t i = 0; i < ranks[t]; i++) assert_int_equal(info.dim[i], dims[t][i]);
            assert_memory_equal(info.data, data[t], bytes[t]);
            if (t == 0) assert_true((uintptr_t)info.data % 64 == 0);
            free(data[t]);
        }
        esa_tensors_free(f);
    }
    scratch_remove(&s);
}

/* A 300 KB tensor crosses the buffer; large pieces bypass it. */
static void test_large(void **state)
{
    (void)state;
    scratch s = scratch_make();
    const int64_t n = 3000000, dim[1] = { n };
    uint8_t *data = malloc((size_t)n);
    for (int64_t i = 0; i < n; i++) data[i] = (uint8_t)(i * 31 + (i >> 9));
    for (int64_t piece = 1000; piece <= n; piece = piece * 7 + 13) {
        esa_tensors_writer *w;
        assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "large")), ESA_OK);
        assert_int_equal(esa_tensors_writer_declare(w, "t", ESA_FILE_U8, 1, dim), ESA_OK);
        for (int64_t at = 0; at < n; at += piece)
            assert_int_equal(esa_tensors_writer_data(w, data + at, piece < n - at ? piece : n - at),
                             ESA_OK);
        assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
        esa_tensors_writer_free(w);
        esa_tensors *f;
        esa_tensor_info info = { .struct_size = sizeof info };
        assert_int_equal(esa_tensors_open(ctx, &f, scratch_path(&s, "large")), ESA_OK);
        assert_int_equal(esa_tensors_find(f, "t", &info), ESA_OK);
        assert_memory_equal(info.data, data, n);
        esa_tensors_free(f);
    }
    free(data);
    scratch_remove(&s);
}

static void test_misuse(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_tensors_writer *w;
    const int64_t two = 2, huge[2] = { INT64_MAX, 2 }, negative = -1;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "f")), ESA_OK);
    assert_refused(ctx, esa_tensors_writer_metadata(w, "a", NULL), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_tensors_writer_metadata(w, "", "x"), ESA_ERR_ARGUMENT, "no name", NULL);
    assert_refused(ctx, esa_tensors_writer_metadata(w, "a", "\xff"), ESA_ERR_ARGUMENT, "UTF-8",
                   NULL);
    assert_int_equal(esa_tensors_writer_metadata(w, "a", "x"), ESA_OK);
    assert_refused(ctx, esa_tensors_writer_metadata(w, "a", "y"), ESA_ERR_ARGUMENT, "already given",
                   NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "__metadata__", 0, 0, NULL), ESA_ERR_ARGUMENT,
                   "__metadata__", NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", 99, 0, NULL), ESA_ERR_ARGUMENT,
                   "dtype 99", NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", 0, 9, huge), ESA_ERR_ARGUMENT, "rank 9",
                   NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", 0, 1, NULL), ESA_ERR_ARGUMENT, "rank 1",
                   NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", 0, 2, huge), ESA_ERR_ARGUMENT,
                   "too large", NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", 0, 1, &negative), ESA_ERR_ARGUMENT,
                   "negative", NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, "\xc3", 0, 1, &two), ESA_ERR_ARGUMENT,
                   "UTF-8", NULL);
    assert_refused(ctx, esa_tensors_writer_declare(w, NULL, 0, 1, &two), ESA_ERR_ARGUMENT,
                   "no name", NULL);
    assert_int_equal(esa_tensors_writer_declare(w, "t", ESA_FILE_F32, 1, &two), ESA_OK);
    assert_int_equal(esa_tensors_writer_declare(w, "tt", ESA_FILE_U8, 0, NULL), ESA_OK);
    assert_refused(ctx, esa_tensors_writer_declare(w, "t", ESA_FILE_F32, 1, &two), ESA_ERR_ARGUMENT,
                   "already declared", NULL);
    assert_refused(ctx, esa_tensors_writer_data(w, NULL, 4), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_tensors_writer_data(w, "123456789", 10), ESA_ERR_ARGUMENT, "9 bytes",
                   NULL);
    assert_int_equal(esa_tensors_writer_data(w, "12345678", 8), ESA_OK);
    assert_refused(ctx, esa_tensors_writer_declare(w, "late", 0, 0, NULL), ESA_ERR_STATE,
                   "before the first data", NULL);
    assert_refused(ctx, esa_tensors_writer_finish(w), ESA_ERR_STATE, "only 8", NULL);
    assert_int_equal(scratch_count(&s), 0);
    assert_int_equal(esa_tensors_writer_finish(w), ESA_ERR_STATE);
    assert_int_equal(esa_tensors_writer_data(w, "1", 1), ESA_ERR_STATE);
    esa_tensors_writer_free(w);
    esa_tensors_writer_free(NULL);

    /* Abandoned: nothing is left, and what stood there before stays. */
    scratch_write(scratch_path(&s, "old"), "old", 3);
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "old")), ESA_OK);
    assert_int_equal(scratch_count(&s), 2);
    esa_tensors_writer_free(w);
    assert_int_equal(scratch_count(&s), 1);
    size_t n;
    uint8_t *old = scratch_read(scratch_path(&s, "old"), &n);
    assert_int_equal(n, 3);
    free(old);

    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, "/nonexistent-folder/x"), ESA_ERR_IO,
                   "/nonexistent-folder/x", "No such file", NULL);
    assert_null(w);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, s.dir), ESA_ERR_IO, "folder", NULL);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, "/dev/null"), ESA_ERR_IO,
                   "not a regular file", NULL);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, NULL), ESA_ERR_ARGUMENT, "file name",
                   NULL);
    assert_int_equal(esa_tensors_writer_create(NULL, &w, "x"), ESA_ERR_ARGUMENT);
    if (geteuid() != 0) {
        assert_int_equal(chmod(s.dir, 0500), 0);
        assert_refused(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&s, "new")), ESA_ERR_IO,
                       "Permission denied", NULL);
        assert_int_equal(chmod(s.dir, 0700), 0);
    }
    scratch_remove(&s);
}

/* A file size limit behaves like a full disk: writes fail part of the way. */
static void test_disk_full(void **state)
{
    (void)state;
    scratch s = scratch_make();
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    const int64_t n = 1000000, dim[1] = { n };
    uint8_t *data = calloc(1, (size_t)n);
    const int64_t limits[] = { 0, 1, 7, 64, 100, 65536, 262144, 600000, n, n + 100 };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        for (int64_t piece = 100; piece <= n; piece *= 100) {
            scratch_write(scratch_path(&s, "f"), "old", 3);
            esa_tensors_writer *w;
            assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "f")), ESA_OK);
            assert_int_equal(esa_tensors_writer_declare(w, "t", ESA_FILE_U8, 1, dim), ESA_OK);
            limit = old;
            limit.rlim_cur = (rlim_t)limits[i];
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
            esa_status status = ESA_OK;
            for (int64_t at = 0; status == ESA_OK && at < n; at += piece)
                status = esa_tensors_writer_data(w, data + at, piece < n - at ? piece : n - at);
            if (status == ESA_OK) status = esa_tensors_writer_finish(w);
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
            assert_refused(ctx, status, ESA_ERR_IO, "cannot be written", NULL);
            assert_int_equal(scratch_count(&s), 1); /* the temporary file is already gone */
            assert_int_equal(esa_tensors_writer_finish(w), ESA_ERR_IO);
            assert_int_equal(esa_tensors_writer_data(w, data, 1), ESA_ERR_IO);
            esa_tensors_writer_free(w);
            size_t left;
            uint8_t *was = scratch_read(scratch_path(&s, "f"), &left);
            assert_int_equal(left, 3);
            free(was);
        }
    free(data);
    scratch_remove(&s);
}

static esa_status write_some(esa_ctx *c, const char *path)
{
    esa_tensors_writer *w;
    esa_status status = esa_tensors_writer_create(c, &w, path);
    for (int i = 0; status == ESA_OK && i < 100; i++) {
        char name[32];
        const int64_t dim[1] = { i };
        snprintf(name, sizeof name, "tensor%d", i);
        status = esa_tensors_writer_metadata(w, name, "value");
        if (status == ESA_OK) status = esa_tensors_writer_declare(w, name, ESA_FILE_U8, 1, dim);
    }
    uint8_t data[4950] = { 0 };
    if (status == ESA_OK) status = esa_tensors_writer_data(w, data, sizeof data);
    if (status == ESA_OK) status = esa_tensors_writer_finish(w);
    esa_tensors_writer_free(w);
    return status;
}

static void test_memory_failure(void **state)
{
    (void)state;
    scratch s = scratch_make();
    counting c;
    esa_ctx *small = counting_ctx(&c, 1);
    const int64_t base = c.live;
    int64_t points = 0;
    for (;; points++) {
        c.left = points;
        const esa_status status = write_some(small, scratch_path(&s, "f"));
        assert_int_equal(c.live, base);
        if (status == ESA_OK) break;
        assert_refused(small, status, ESA_ERR_MEMORY, "out of memory", NULL);
        assert_int_equal(scratch_count(&s), 0);
    }
    c.left = -1;
    assert_true(points >= 8);
    print_message("write: every one of %lld allocations failed once\n", (long long)points);
    esa_ctx_free(small);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

static void test_long_names(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char name[2000];
    memset(name, '"', sizeof name);
    name[sizeof name - 1] = 0;
    esa_tensors_writer *w;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "f")), ESA_OK);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(esa_tensors_writer_declare(w, name, ESA_FILE_U8, 0, NULL), ESA_OK);
        assert_int_equal(esa_tensors_writer_declare(w, name, ESA_FILE_U8, 0, NULL),
                         ESA_ERR_ARGUMENT);
        name[1998 - i] = 0;
    }
    uint8_t data[50] = { 0 };
    assert_int_equal(esa_tensors_writer_data(w, data, 50), ESA_OK);
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
    esa_tensors *f;
    assert_int_equal(esa_tensors_open(ctx, &f, scratch_path(&s, "f")), ESA_OK);
    assert_int_equal(esa_tensors_count(f), 50);
    esa_tensors_free(f);
    scratch_remove(&s);
}

/* A link at the output's place stays a link: the file behind it is replaced, or made. */
static void test_links(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    struct stat st;
    scratch_write(scratch_path(&s, "target"), "old", 3);
    assert_int_equal(symlink("target", scratch_path(&s, "near")), 0);
    assert_int_equal(symlink(scratch_path(&t, "near"), scratch_path(&s, "far")),
                     0); /* a link to a link, absolute */
    assert_int_equal(symlink("new", scratch_path(&s, "dangling")), 0);
    assert_int_equal(symlink("loop", scratch_path(&s, "loop")), 0);
    assert_int_equal(symlink("/dev/null", scratch_path(&s, "device")), 0);
    assert_int_equal(symlink("/proc/self/fd/2", scratch_path(&s, "open")), 0);
    for (int i = 0; i < 3; i++) {
        const char *name = i == 0 ? "near" : i == 1 ? "far" : "dangling";
        scratch_write(scratch_path(&s, "target"), "old", 3);
        assert_int_equal(write_some(ctx, scratch_path(&s, name)), ESA_OK);
        assert_int_equal(lstat(scratch_path(&s, name), &st), 0);
        assert_true(S_ISLNK(st.st_mode));
        assert_int_equal(lstat(scratch_path(&s, i == 2 ? "new" : "target"), &st), 0);
        assert_true(S_ISREG(st.st_mode) && st.st_size > 4950);
        assert_int_equal(scratch_count(&s), i == 2 ? 8 : 7);
    }
    esa_tensors_writer *w;
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&s, "loop")), ESA_ERR_IO,
                   "loop", NULL);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&s, "device")), ESA_ERR_IO,
                   "not a regular file", NULL);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&s, "open")), ESA_ERR_IO,
                   "refers to an open file", NULL);
    assert_refused(ctx, esa_tensors_writer_create(ctx, &w, "/proc/self/fd/2"), ESA_ERR_IO,
                   "refers to an open file", NULL);
    assert_int_equal(scratch_count(&s), 8);
    scratch_remove(&s);
}

/* Every name the file system takes can be written, also where the temporary name has no room for
 * it. */
static void test_long_targets(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char name[256];
    memset(name, 'n', sizeof name);
    for (int n = 238; n <= 255; n++) {
        name[n] = 0;
        const esa_status status = write_some(ctx, scratch_path(&s, name));
        if (status != ESA_OK) fail_msg("%d bytes: %s", n, esa_ctx_error(ctx));
        name[n] = 'n';
    }
    assert_int_equal(scratch_count(&s), 18);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_large),
        cmocka_unit_test(test_misuse),         cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_memory_failure), cmocka_unit_test(test_long_names),
        cmocka_unit_test(test_links),          cmocka_unit_test(test_long_targets)
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
