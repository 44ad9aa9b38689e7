/* test_changing_files.c - files that another process rewrites or shortens while they are opened, or
 * afterwards: an error or right data, never a write outside of memory and never SIGBUS.
 *
 * The allocator of the context stands for the other process: it changes the file at one allocation
 * of the call, at each of them in turn. It also puts guards behind every block.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <fcntl.h>
#include "esa/esa_session.h"
#include "esa/esa_tensors.h"
#include "esa/esa_work.h"
#include "io/gguf.h"
#include "io/gguf_make.h"

enum { GUARD = 64, SIZE = 4096 };

typedef struct meddler {
    const char *path;
    const uint8_t *later; /* [SIZE] the file's next state; NULL: it is cut to `cut` bytes */
    off_t cut;
    int64_t at, count, live; /* changes the file at allocation number at; 0: never */
} meddler;

static void change(const meddler *m)
{
    const int fd = open(m->path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    if (m->later)
        assert_int_equal(pwrite(fd, m->later, SIZE, 0), SIZE);
    else
        assert_int_equal(ftruncate(fd, m->cut), 0);
    close(fd);
}

static void *meddler_alloc(void *user, uint64_t bytes)
{
    meddler *m = user;
    m->live++;
    if (++m->count == m->at) change(m);
    uint8_t *p = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64 + GUARD);
    assert_non_null(p);
    memset(p + bytes, 0xa5, GUARD);
    return p;
}

static void meddler_free(void *user, void *ptr, uint64_t bytes)
{
    meddler *m = user;
    const uint8_t *guard = (const uint8_t *)ptr + bytes;
    if (!ptr) return;
    m->live--;
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0xa5) fail_msg("byte %d behind a block was written", i);
    free(ptr);
}

static esa_ctx *meddler_ctx(meddler *m)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    p.alloc = meddler_alloc;
    p.dealloc = meddler_free;
    p.alloc_user = m;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* ---------------------------------------------------------------- the kinds of files */

/* A GGUF file of SIZE bytes whose one key has this many bytes. */
static void make_gguf(uint8_t file[SIZE], size_t key)
{
    char name[3000];
    memset(name, 'k', key);
    name[key] = 0;
    gguf_make m = gguf_begin(3, 1, 1);
    gguf_text(&m, name, "text");
    const size_t head = (m.size + 8 + 1 + 4 + 8 + 4 + 8 + 31) / 32 * 32;
    gguf_tensor(&m, "t", 1, (uint64_t[]){ (SIZE - head) / 4 }, 0, 0);
    gguf_data(&m, 32, SIZE - head);
    assert_int_equal(m.size, SIZE);
    memcpy(file, m.bytes, SIZE);
}

/* The same as a safetensors file, whose header is as long as the rest allows. */
static void make_st(uint8_t file[SIZE], size_t key)
{
    char head[SIZE];
    memset(head, ' ', sizeof head);
    int n = sprintf(head, "{\"__metadata__\":{\"");
    memset(head + n, 'k', key);
    n += (int)key;
    n += sprintf(head + n, "\":\"text\"},\"t\":{\"dtype\":\"U8\",\"shape\":[1024],"
                           "\"data_offsets\":[0,1024]}}");
    head[n] = ' ';
    const uint64_t length = SIZE - 8 - 1024;
    memcpy(file, &length, 8);
    memcpy(file + 8, head, length);
    for (int i = 0; i < 1024; i++) file[SIZE - 1024 + i] = (uint8_t)(i * 7);
}

static esa_status open_gguf(esa_ctx *ctx, void **file, const char *path)
{
    return esa_gguf_open(ctx, (esa_tensors **)file, path);
}
static esa_status open_weights(esa_ctx *ctx, void **file, const char *path)
{
    return esa_st_open_weights(ctx, (esa_tensors **)file, path);
}
static esa_status open_tensors(esa_ctx *ctx, void **file, const char *path)
{
    return esa_tensors_open(ctx, (esa_tensors **)file, path);
}

typedef struct kind {
    const char *name;
    void (*make)(uint8_t file[SIZE], size_t key);
    esa_status (*open)(esa_ctx *ctx, void **file, const char *path);
    int32_t mapped;
} kind;
static const kind kinds[] = { { "gguf", make_gguf, open_gguf, 1 },
                              { "weights", make_st, open_weights, 1 },
                              { "tensors", make_st, open_tensors, 0 } };

/* One open with the change at allocation number at; returns how many there were. */
static int64_t open_once(const kind *k, meddler *m, int64_t at, const uint8_t *before)
{
    esa_tensors *file = NULL;
    m->at = 0;
    esa_ctx *ctx = meddler_ctx(m);
    const int64_t live = m->live;
    scratch_write(m->path, before, SIZE);
    m->count = 0;
    m->at = at;
    const esa_status status = k->open(ctx, (void **)&file, m->path);
    const int64_t count = m->count;
    m->at = 0;
    if (status && status != ESA_ERR_IO && status != ESA_ERR_FORMAT)
        fail_msg("%s, allocation %lld: %s", k->name, (long long)at, esa_status_name(status));
    if (status) {
        assert_null(file);
        assert_true(strlen(esa_ctx_error(ctx)) > 20);
    } else {
        assert_int_equal(file->mapped, k->mapped);
        assert_int_equal(file->count, 1);
        assert_string_equal(file->entry[0].name, "t");
        assert_int_equal(file->pair_count, 1);
        assert_string_equal(file->pair[0].value, "text");
        assert_int_equal(strspn(file->pair[0].key, "k"), strlen(file->pair[0].key));
        esa_st_close(file);
    }
    assert_int_equal(m->live, live);
    esa_ctx_free(ctx);
    assert_int_equal(m->live, 0);
    return count;
}

static void test_rewritten_while_opened(void **state)
{
    (void)state;
    scratch s = scratch_make();
    uint8_t before[SIZE], later[SIZE];
    char path[640];
    strcpy(path, scratch_path(&s, "file"));
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (int longer = 0; longer < 2; longer++) {
            meddler m = { .path = path, .later = later };
            kinds[i].make(before, longer ? 8 : 2000);
            kinds[i].make(later, longer ? 2000 : 8);
            const int64_t count = open_once(&kinds[i], &m, 0, before);
            assert_true(count >= 5); /* the object, its name, strings, pairs, entries */
            for (int64_t at = 1; at <= count; at++) open_once(&kinds[i], &m, at, before);
        }
    scratch_remove(&s);
}

static void test_cut_while_opened(void **state)
{
    (void)state;
    static const off_t cuts[] = { 0, 4, 20, 200, SIZE - 1 };
    scratch s = scratch_make();
    uint8_t before[SIZE];
    char path[640];
    strcpy(path, scratch_path(&s, "file"));
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
            meddler m = { .path = path, .cut = cuts[c] };
            kinds[i].make(before, 2000);
            const int64_t count = open_once(&kinds[i], &m, 0, before);
            for (int64_t at = 1; at <= count; at++) open_once(&kinds[i], &m, at, before);
        }
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- afterwards */

static void test_cut_afterwards(void **state)
{
    (void)state;
    scratch s = scratch_make();
    uint8_t bytes[SIZE];
    esa_ctx *ctx = NULL;
    esa_tensors *file;
    esa_tensor_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    make_st(bytes, 8);
    scratch_write(scratch_path(&s, "file"), bytes, SIZE);
    assert_int_equal(esa_tensors_open(ctx, &file, scratch_path(&s, "file")), ESA_OK);
    assert_int_equal(truncate(scratch_path(&s, "file"), 0), 0);
    assert_int_equal(esa_tensors_find(file, "t", &info), ESA_OK);
    assert_memory_equal(info.data, bytes + SIZE - 1024, 1024);
    esa_tensors_free(file);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* Work plans are read while they are opened, and not later. */
static void test_cut_work_plan(void **state)
{
    (void)state;
    static const double sigma[2] = { 1, 0.5 }, density[2] = { 0.1, 0.5 },
                        error[4] = { 0.4, 0.1, 0.3, 0.1 }, weight[2] = { 1, 2 };
    const esa_work_plan_info info = { .struct_size = sizeof info,
                                      .layers = 1,
                                      .steps = 2,
                                      .points = 2,
                                      .prompts = 1,
                                      .selector = ESA_SELECT_ENTROPY,
                                      .order = ESA_ORDER_HILBERT,
                                      .tail = ESA_TAIL_POOLED,
                                      .block_q = 64,
                                      .block_k = 32,
                                      .model = "mini",
                                      .config_hash = "00ff" };
    scratch s = scratch_make();
    esa_work_plan *plan;
    char path[640];
    strcpy(path, scratch_path(&s, "plan"));
    meddler m = { .path = path };
    esa_ctx *ctx = meddler_ctx(&m);
    if (esa_work_plan_create(ctx, &plan, &info, sigma, density, error, weight))
        fail_msg("%s", esa_ctx_error(ctx));
    for (int64_t at = 1, count = 1; at <= count; at++) {
        esa_work_plan *read = NULL;
        m.at = 0;
        assert_int_equal(esa_work_plan_save(plan, path), ESA_OK);
        m.count = 0;
        m.at = at;
        const esa_status status = esa_work_plan_open(ctx, &read, path);
        count = status ? count + 1 : m.count;
        assert_true(!status || status == ESA_ERR_IO || status == ESA_ERR_FORMAT);
        assert_true(count < 100);
        esa_work_plan_free(read);
    }
    m.at = 0;
    esa_work_plan_free(plan);
    esa_ctx_free(ctx);
    assert_int_equal(m.live, 0);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- which files are copied */

/* A safetensors file with one tensor of this many zeros, which take no disk space. */
static void make_large(const char *path, int64_t bytes)
{
    char head[200];
    memset(head, ' ', sizeof head);
    const int n = snprintf(head + 8, sizeof head - 8,
                           "{\"t\":{\"dtype\":\"U8\",\"shape\":[%lld],\"data_offsets\":[0,%lld]}}",
                           (long long)bytes, (long long)bytes);
    head[8 + n] = ' ';
    memcpy(head, &(uint64_t){ 192 }, 8);
    scratch_write(path, head, sizeof head);
    assert_int_equal(truncate(path, 200 + (off_t)bytes), 0);
}

static void test_rule(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = NULL;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    for (int over = 0; over < 2; over++) {
        esa_tensors *file;
        make_large(scratch_path(&s, "file"), ESA_READ_MOST - 200 + over);
        if (esa_tensors_open(ctx, &file, scratch_path(&s, "file")))
            fail_msg("%s", esa_ctx_error(ctx));
        assert_int_equal(file->mapped, over);
        assert_null(file->head);
        esa_tensors_free(file);
    }
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* A header of GGUF that is longer than the part that is copied first. */
static void test_long_header(void **state)
{
    (void)state;
    const size_t array = 9 << 20;
    scratch s = scratch_make();
    esa_ctx *ctx = NULL;
    esa_tensors *file;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    gguf_make start = gguf_begin(3, 1, 2), rest = { .size = 0 };
    gguf_key(&start, "long", 9);
    gguf_u32(&start, 0);
    gguf_u64(&start, array);
    gguf_text(&rest, "after", "text");
    gguf_tensor(&rest, "t", 1, (uint64_t[]){ 8 }, 0, 0);
    const size_t head = start.size + array + rest.size, begin = (head + 31) / 32 * 32;
    uint8_t *bytes = calloc(1, begin + 32);
    assert_non_null(bytes);
    memcpy(bytes, start.bytes, start.size);
    memcpy(bytes + start.size + array, rest.bytes, rest.size);
    bytes[begin + 31] = 77;
    for (size_t size = begin + 32; size + 64 > begin; size -= 32) { /* whole, then cut */
        scratch_write(scratch_path(&s, "file"), bytes, size);
        const esa_status status = esa_gguf_open(ctx, &file, scratch_path(&s, "file"));
        assert_int_equal(status, size == begin + 32 ? ESA_OK : ESA_ERR_FORMAT);
        if (status) continue;
        assert_string_equal(esa_st_metadata(file, "after"), "text");
        assert_int_equal(esa_st_data(file, esa_st_find(file, "t"))[31], 77);
        esa_st_close(file);
    }
    /* A header that claims more than any header may have is not copied whole. */
    memcpy(bytes + start.size - 8, &(uint64_t){ 200u << 20 }, 8);
    scratch_write(scratch_path(&s, "file"), bytes, begin);
    assert_int_equal(truncate(scratch_path(&s, "file"), (off_t)300 << 20), 0);
    assert_refused(ctx, esa_gguf_open(ctx, &file, scratch_path(&s, "file")), ESA_ERR_FORMAT,
                   "more than 100000000 bytes", NULL);
    free(bytes);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rewritten_while_opened),
                                        cmocka_unit_test(test_cut_while_opened),
                                        cmocka_unit_test(test_cut_afterwards),
                                        cmocka_unit_test(test_cut_work_plan),
                                        cmocka_unit_test(test_rule),
                                        cmocka_unit_test(test_long_header) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
