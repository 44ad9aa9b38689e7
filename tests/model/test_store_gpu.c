/* test_store_gpu.c - weights on the GPU: what the views hold, the same bytes whether groups stay or
 * are copied, limits, failures.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/store_kit.h"

static int64_t free_bytes(void)
{
    int64_t bytes = 0;
    must(nn.be->transfer->room(ctx, &bytes));
    return bytes;
}

/* ---------------------------------------------------------------- a store of the part */

typedef struct bench {
    part *p;
    esa_weights *w;
    esa_store *s;
} bench;

static esa_status try_open(bench *b, part *p, const esa_store_settings *settings)
{
    *b = (bench){ .p = p };
    must(esa_weights_open(ctx, &b->w, p->folder.dir, "part", "part"));
    part_want(p, b->w);
    must(esa_weights_check(b->w, NULL, NULL));
    return esa_store_open(&nn, &b->s, b->w, settings);
}

static void bench_close(bench *b)
{
    esa_store_free(b->s);
    esa_weights_free(b->w);
}

static bench bench_open(part *p, int32_t linear, const char *keep, int64_t limit)
{
    bench b;
    const esa_store_settings settings = { .linear = linear, .keep = keep, .limit = limit };
    must(try_open(&b, p, &settings));
    return b;
}

/* What one forward sees, groups 0 and 1 .. last. */
typedef struct seen {
    uint8_t *data[PART_TENSORS];
    int64_t bytes[PART_TENSORS];
} seen;

static void look(seen *s, const bench *b, int32_t last)
{
    memset(s, 0, sizeof *s);
    for (int32_t g = 0; g <= last; g++) {
        if (g) must(esa_store_begin(b->s, g));
        for (int32_t i = 0; i < b->p->count; i++) {
            const part_tensor *t = &b->p->tensor[i];
            if (t->group == g && !(t->flags & ESA_WANT_HOST))
                s->data[i] = read_view(t, &s->bytes[i]);
        }
        if (g) must(esa_store_end(b->s, g));
    }
}

static void forget(seen *s)
{
    for (int32_t i = 0; i < PART_TENSORS; i++) free(s->data[i]);
}

static void same(const bench *b, const seen *want, const char *what)
{
    seen got;
    look(&got, b, PART_BLOCKS);
    for (int32_t i = 0; i < b->p->count; i++)
        if (got.bytes[i] != want->bytes[i] ||
            (got.data[i] && memcmp(got.data[i], want->data[i], (size_t)got.bytes[i])))
            fail_msg("%s: %s has other bytes", what, b->p->tensor[i].name);
    forget(&got);
}

/* ---------------------------------------------------------------- what the views hold */

static void check_values(const part *p, const part_tensor *t, const uint8_t *data)
{
    const int32_t f8 = t->view.dtype == ESA_DTYPE_F8;
    float top = 0, scale = 1;
    for (int64_t i = 0; i < part_count(t); i++) {
        const float want = part_value(p, t, i);
        if (!f8) {
            assert_true(esa_load_f32(data, i, t->view.dtype) == esa_round_to(want, t->view.dtype));
            continue;
        }
        const int64_t row = i / t->dim[1];
        memcpy(&scale, data + part_count(t) + 4 * row, 4);
        const float x = scale * esa_f8_to_f32(data[i]);
        top = i % t->dim[1] ? fmaxf(top, fabsf(want)) : fabsf(want);
        if (t->file == ESA_FILE_F8_E4M3) { /* as it is */
            assert_true(data[i] == esa_f32_to_f8(part_stored(t, i)));
            assert_true(scale == part_scale(p, t, row));
        } else {
            assert_true(fabsf(x - want) <= 1.001f * (0x1p-4f * fabsf(want) + 0x1p-10f * scale));
            if (i % t->dim[1] == t->dim[1] - 1) assert_true(scale == top / ESA_F8_MAX);
        }
    }
}

static int32_t expected_dtype(const part_tensor *t, int32_t linear)
{
    if (t->flags & ESA_WANT_F32) return ESA_DTYPE_F32;
    return (t->flags & ESA_WANT_F8) && linear == ESA_DTYPE_F8 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16;
}

/* Every type of file, in both types of linear layers. Tensors start where store.h says. */
static void values(void **state)
{
    static const int32_t file[] = { -1, ESA_FILE_F8_E4M3 },
                         linear[] = { ESA_DTYPE_BF16, ESA_DTYPE_F8 };
    (void)state;
    for (int n = 0; n < 4; n++) {
        part p;
        part_make(&p, file[n / 2]);
        part_write(&p, ctx);
        bench b = bench_open(&p, linear[n % 2], NULL, 0);
        seen s;
        look(&s, &b, PART_BLOCKS);
        int32_t f8 = 0;
        for (int32_t i = 0; i < p.count; i++) {
            const part_tensor *t = &p.tensor[i];
            if (t->flags & ESA_WANT_HOST) continue;
            assert_int_equal(t->view.dtype, expected_dtype(t, linear[n % 2]));
            assert_int_equal(t->view.rank, t->rank);
            assert_memory_equal(t->view.dim, t->dim, sizeof t->dim);
            f8 += t->view.dtype == ESA_DTYPE_F8;
            check_values(&p, t, s.data[i]);
            const esa_weight *before = &p.tensor[i ? i - 1 : 0].view;
            if (!(t->flags & ESA_WANT_JOIN)) {
                assert_int_equal((uintptr_t)t->view.data % 256, 0);
                continue;
            }
            assert_ptr_equal(t->view.data, (const char *)before->data +
                                               part_count(t) * esa_view_element(before->dtype));
            if (t->view.scale) assert_ptr_equal(t->view.scale, before->scale + before->dim[0]);
        }
        esa_store_plan plan;
        esa_store_get_plan(b.s, &plan);
        assert_int_equal(plan.f8, f8);
        assert_int_equal(plan.f8, n % 2 ? 4 * (PART_BLOCKS - 2) : 0);
        assert_true(plan.groups == PART_BLOCKS && plan.resident == PART_BLOCKS && plan.lanes == 0);
        /* what stays on the host is there, as esa_weights_load holds it */
        const part_tensor *words = &p.tensor[2];
        for (int64_t i = 0; i < part_count(words); i++)
            assert_true(esa_load_f32(words->view.data, i, words->view.dtype) ==
                        part_value(&p, words, i));
        forget(&s);
        bench_close(&b);
        scratch_remove(&p.folder);
    }
}

/* Layers that are kept in BF16; joined ones stay together. */
static void kept(void **state)
{
    static const struct {
        const char *keep;
        int32_t f8;
    } list[] = { { NULL, 20 },
                 { "", 20 },
                 { "blocks.2.*", 16 },
                 { "*.up.weight", 15 },
                 { "blocks.1.q.weight,blocks.9.*", 17 }, /* k and v of block 1 too */
                 { "*.k.*,*up*", 0 },
                 { "blocks.2", 20 },
                 { "*", 0 } };
    (void)state;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        esa_store_plan plan;
        bench b = bench_open(&p, ESA_DTYPE_F8, list[i].keep, 0);
        esa_store_get_plan(b.s, &plan);
        assert_int_equal(plan.f8, list[i].f8);
        bench_close(&b);
    }
    scratch_remove(&p.folder);
}

/* ---------------------------------------------------------------- groups that are copied */

static void check_plan(const bench *b, int64_t limit)
{
    esa_store_plan plan;
    esa_store_get_plan(b->s, &plan);
    assert_true(plan.resident_bytes + plan.lane_bytes <= limit);
    assert_true(plan.resident <= plan.groups && plan.groups == PART_BLOCKS);
    assert_int_equal(plan.lanes > 0, plan.resident < plan.groups);
    assert_int_equal(plan.streamed_bytes > 0, plan.resident < plan.groups);
    assert_int_equal(plan.rate > 0, plan.resident < plan.groups);
}

/* From everything on the device down to the least: the same bytes, three forwards in a row, and
 * after forwards that were broken off. */
static void limits(void **state)
{
    (void)state;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    bench all = bench_open(&p, ESA_DTYPE_F8, NULL, 0);
    esa_store_plan plan;
    esa_store_get_plan(all.s, &plan);
    const int64_t total = plan.resident_bytes;
    seen want, part_way;
    look(&want, &all, PART_BLOCKS);
    bench_close(&all);
    int32_t opened = 0, seen_one_lane = 0;
    for (int64_t limit = total; limit > 0; limit -= 1500) {
        bench b;
        const esa_store_settings settings = { .linear = ESA_DTYPE_F8, .limit = limit };
        const esa_status status = try_open(&b, &p, &settings);
        if (status) {
            refused(status, ESA_ERR_MEMORY, "need at least");
            bench_close(&b);
            break;
        }
        opened++;
        check_plan(&b, limit);
        esa_store_get_plan(b.s, &plan);
        seen_one_lane |= plan.lanes == 1;
        for (int n = 0; n < 3; n++) same(&b, &want, "a forward");
        for (int32_t last = 1; last < PART_BLOCKS; last++) {
            look(&part_way, &b, last);
            forget(&part_way);
            must(esa_store_begin(b.s, last + 1)); /* no end */
            same(&b, &want, "after a forward that was broken off");
        }
        bench_close(&b);
    }
    assert_true(opened > 5 && seen_one_lane);
    forget(&want);
    scratch_remove(&p.folder);
}

static void note(void *user, const char *line)
{
    char *text = user;
    const size_t used = strlen(text);
    snprintf(text + used, 600 - used, "%s\n", line);
}

/* The plan in words. */
static void described(void **state)
{
    (void)state;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    char text[600] = "";
    bench b = bench_open(&p, ESA_DTYPE_F8, NULL, 0);
    esa_store_plan plan;
    esa_store_get_plan(b.s, &plan);
    esa_store_describe(b.s, note, text);
    assert_string_equal(text, "weights   part 0.00 GiB, 20 tensors in fp8: all on the GPU\n");
    bench_close(&b);
    b = bench_open(&p, ESA_DTYPE_BF16, NULL, plan.resident_bytes);
    text[0] = 0;
    esa_store_describe(b.s, note, text);
    print_message("%s", text);
    assert_non_null(strstr(text, "of 7 blocks stay on the GPU, "));
    assert_non_null(strstr(text, "are copied through 2 buffers of 0.00 GiB\n"));
    assert_non_null(strstr(text, "copies    0.00 GiB a forward at "));
    assert_non_null(strstr(text, " beside the work\n"));
    bench_close(&b);
    scratch_remove(&p.folder);
}

/* Groups leave and come back. */
static void fitted(void **state)
{
    (void)state;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    const int64_t before = free_bytes();
    bench b = bench_open(&p, ESA_DTYPE_BF16, NULL, 0);
    esa_store_plan plan, now;
    esa_store_get_plan(b.s, &plan);
    const int64_t total = plan.resident_bytes;
    seen want;
    look(&want, &b, PART_BLOCKS);
    static const int percent[] = { 70, 40, 55, 100, 30, 90, 60, 0 };
    for (size_t i = 0; i < sizeof percent / sizeof *percent; i++) {
        const esa_status status = esa_store_fit(b.s, total * percent[i] / 100);
        if (status) { /* too small: all stays as it was */
            refused(status, ESA_ERR_MEMORY, "need at least");
            same(&b, &want, "after a limit that is too small");
            continue;
        }
        esa_store_get_plan(b.s, &now);
        if (percent[i]) check_plan(&b, total * percent[i] / 100);
        assert_int_equal(now.resident == PART_BLOCKS, percent[i] == 100 || percent[i] == 0);
        for (int n = 0; n < 2; n++) same(&b, &want, "after fitting");
    }
    refused(esa_store_fit(b.s, 1), ESA_ERR_MEMORY, "at least");
    refused(esa_store_begin(b.s, PART_BLOCKS + 1), ESA_ERR_INTERNAL, "group 8");
    same(&b, &want, "after refusals");
    forget(&want);
    bench_close(&b);
    if (stand_in) assert_int_equal(free_bytes(), before); /* a real GPU keeps memory for itself */
    scratch_remove(&p.folder);
}

/* Host memory that cannot be pinned: groups go through stages, and without those through the stream
 * of the work. The bytes are the same. */
static void pageable(void **state)
{
    static const struct {
        const char *refused; /* calls of pin */
        int32_t opens;       /* 1: while opening, 0: while fitting */
    } list[] = { { "4", 0 }, { "5", 0 }, { "100", 0 }, { "1", 1 } };
    (void)state;
    if (!stand_in) return;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    bench b = bench_open(&p, ESA_DTYPE_BF16, NULL, 0);
    esa_store_plan plan;
    esa_store_get_plan(b.s, &plan);
    seen want;
    look(&want, &b, PART_BLOCKS);
    bench_close(&b);
    const int64_t limit = plan.resident_bytes * 6 / 10;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const esa_store_settings settings = { .limit = list[i].opens ? limit : 0 };
        if (list[i].opens) setenv("ESA_STAND_IN_PIN", list[i].refused, 1);
        const esa_status status = try_open(&b, &p, &settings);
        if (list[i].opens) { /* loading needs pinned memory */
            refused(status, ESA_ERR_MEMORY, "pin");
        } else {
            must(status);
            setenv("ESA_STAND_IN_PIN", list[i].refused, 1);
            must(esa_store_fit(b.s, limit));
            assert_string_equal(esa_ctx_error(ctx), "");
            for (int n = 0; n < 3; n++) same(&b, &want, "memory that is not pinned");
            esa_store_get_plan(b.s, &plan);
            assert_int_equal(plan.pinned, 0);
        }
        unsetenv("ESA_STAND_IN_PIN");
        bench_close(&b);
    }
    forget(&want);
    scratch_remove(&p.folder);
}

/* ---------------------------------------------------------------- failures */

static int32_t stop_after;
static int32_t tick(void *user, int64_t done, int64_t total)
{
    (void)user;
    assert_true(done <= total);
    return stop_after-- == 0;
}

static void cancelled(void **state)
{
    (void)state;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    const int64_t before = free_bytes();
    for (int32_t n = 0; n < 30; n += 7) {
        bench b = { .p = &p };
        const esa_store_settings settings = { .linear = ESA_DTYPE_F8 };
        must(esa_weights_open(ctx, &b.w, p.folder.dir, "part", "part"));
        part_want(&p, b.w);
        refused(esa_store_open(&nn, &b.s, b.w, &settings), ESA_ERR_STATE, "after a check");
        must(esa_weights_check(b.w, NULL, NULL));
        esa_weights_watch(b.w, tick, NULL);
        stop_after = n;
        refused(esa_store_open(&nn, &b.s, b.w, &settings), ESA_ERR_STATE, "cancelled");
        assert_null(b.s);
        bench_close(&b);
    }
    if (stand_in) assert_int_equal(free_bytes(), before);
    scratch_remove(&p.folder);
}

/* Each call of the device fails once: one message, nothing is lost, and the next try works. */
static void bad_luck(void **state)
{
    (void)state;
    if (!stand_in) return;
    part p;
    part_make(&p, -1);
    part_write(&p, ctx);
    bench all = bench_open(&p, ESA_DTYPE_F8, NULL, 0);
    esa_store_plan plan;
    esa_store_get_plan(all.s, &plan);
    seen want;
    look(&want, &all, PART_BLOCKS);
    bench_close(&all);
    const int64_t before = free_bytes();
    int32_t failures = 0, n = 0;
    for (; n < 4000; n += n < 50 ? 1 : 13) {
        bench b;
        char text[16];
        snprintf(text, sizeof text, "%d", n);
        const esa_store_settings settings = { .linear = ESA_DTYPE_F8,
                                              .limit = plan.resident_bytes * 6 / 10 };
        setenv("ESA_STAND_IN_FAIL", text, 1);
        esa_status status = try_open(&b, &p, &settings);
        for (int32_t g = 1; g <= PART_BLOCKS && !status; g++) {
            status = esa_store_begin(b.s, g);
            if (!status) status = esa_store_end(b.s, g);
        }
        if (!status) status = esa_store_fit(b.s, plan.resident_bytes);
        if (!status) status = esa_store_fit(b.s, plan.resident_bytes / 2);
        const int32_t over = getenv("ESA_STAND_IN_FAIL") != NULL;
        unsetenv("ESA_STAND_IN_FAIL");
        if (status) assert_true(esa_ctx_error(ctx)[0]);
        failures += status != ESA_OK;
        if (b.s) {
            must(esa_store_fit(b.s, plan.resident_bytes * 7 / 10));
            same(&b, &want, "after a failure");
        }
        bench_close(&b);
        assert_int_equal(free_bytes(), before);
        if (over) break;
    }
    assert_true(n > 100 && n < 4000 && failures > 50);
    forget(&want);
    scratch_remove(&p.folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values),    cmocka_unit_test(kept),     cmocka_unit_test(limits),
        cmocka_unit_test(described), cmocka_unit_test(fitted),   cmocka_unit_test(pageable),
        cmocka_unit_test(cancelled), cmocka_unit_test(bad_luck),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
