/* test_gpu_faults.c - a GPU that fails once at every point. The call returns a status and a
 * message, nothing leaks, and the next call works.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only the stand-in can be told to fail (tests/cuda/stand_in.c: ESA_STAND_IN_FAIL). Views lie on
 * the GPU from the start, so that every failure hits the library and not the test. */
#define _GNU_SOURCE /* setenv */
#define ESA_EXPERIMENTAL
#include "cuda/gpu_kit.h"
#include "session/mini_model.h"

/* Small: every point that can fail is a whole story of its own. */
enum { B = 1, H = 2, N = 240, D = 16, LAYERS = 2, STEPS = 4 };

typedef struct fixture {
    esa_ctx *ctx;
    esa_tensor q, k, v, o;
} fixture;

static fixture fresh(void)
{
    fixture f = { .ctx = kit_ctx(1) };
    esa_rng r = { kit_seed("fresh") };
    esa_tensor *t[] = { &f.q, &f.k, &f.v, &f.o };
    for (int i = 0; i < 4; i++) {
        kit_tensor one = kit_random(&r, ESA_DTYPE_F32, B, H, N, D, 0, 1.0f);
        *t[i] = gpu_tensor(f.ctx, one.data, ESA_DTYPE_F32, B, H, N, D);
        free(one.data);
    }
    return f;
}

static void finish(fixture *f)
{
    esa_tensor *t[] = { &f->q, &f->k, &f->v, &f->o };
    for (int i = 0; i < 4; i++) esa_device_free(f->ctx, t[i]->data);
    esa_ctx_free(f->ctx);
}

static void fail_after(int calls)
{
    char text[16];
    snprintf(text, sizeof text, "%d", calls);
    setenv("ESA_STAND_IN_FAIL", text, 1);
}

/* 1 if the failure that was asked for has not happened. */
static int nothing_failed(void)
{
    const int left = getenv("ESA_STAND_IN_FAIL") != NULL;
    unsetenv("ESA_STAND_IN_FAIL");
    return left;
}

/* A failure has a message; one of the stand-in's own also has the status that belongs to it. */
static void check_failure(const esa_ctx *ctx, esa_status status, int point)
{
    const char *text = esa_ctx_error(ctx);
    if (strlen(text) < 20) fail_msg("point %d: \"%s\" is not a message", point, text);
    if ((strstr(text, "told to fail") && status != ESA_ERR_DEVICE) ||
        (strstr(text, "memory free") && status != ESA_ERR_MEMORY))
        fail_msg("point %d: %s, but \"%s\"", point, esa_status_name(status), text);
}

static esa_select_params selection(void)
{
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.block_q = 32;
    p.block_k = 16;
    p.budget = 0.4;
    p.layout.grid_q[0] = 3;
    p.layout.grid_q[1] = 8;
    p.layout.grid_q[2] = 10;
    p.layout.order = ESA_ORDER_HILBERT;
    return p;
}

/* Everything a caller does without a session. *silent: the failure came from a call that knows no
 * ctx. */
static esa_status plain_story(const fixture *f, int *silent)
{
    enum { NQ = 8, NK = 15, CELLS = B * H * NQ * NK };
    const esa_select_params sp = selection();
    esa_attention_params exact = esa_attention_params_default();
    exact.exact_rows = 4;
    esa_shapes s = shapes_of(ESA_DTYPE_F32, B, H, N, D);
    s.device = ESA_DEVICE_CUDA;
    esa_mask *mask = NULL, *cpu = NULL, *back = NULL, *planned = NULL;
    esa_plan *plan = NULL;
    float importance[CELLS], number = 7;
    double entropy[B * H];
    uint8_t bits[CELLS];
    void *memory = NULL;
    esa_mask_info info = { .struct_size = sizeof info };
    *silent = 0;
    esa_status status = esa_select(f->ctx, &mask, &f->q, &f->k, &sp);
    if (!status) status = esa_attention(f->ctx, &f->q, &f->k, &f->v, &f->o, mask, NULL);
    if (!status) status = esa_attention(f->ctx, &f->q, &f->k, &f->v, &f->o, mask, &exact);
    if (!status) status = esa_importance(f->ctx, importance, entropy, &f->q, &f->k, &sp);
    if (!status) status = esa_mask_to_device(f->ctx, &cpu, mask, ESA_DEVICE_CPU);
    if (!status) status = esa_attention(f->ctx, &f->q, &f->k, &f->v, &f->o, cpu, NULL);
    if (!status) status = esa_mask_to_device(f->ctx, &back, cpu, ESA_DEVICE_CUDA);
    if (!status) status = esa_plan_create(f->ctx, &plan, &s, &sp, NULL);
    if (!status) status = esa_mask_create(plan, &planned);
    if (!status) status = esa_plan_select(plan, planned, &f->q, &f->k, NULL);
    if (!status) status = esa_plan_attention(plan, planned, &f->q, &f->k, &f->v, &f->o, NULL, NULL);
    if (!status) status = esa_device_alloc(f->ctx, &memory, 4);
    if (!status) status = esa_device_upload(f->ctx, memory, &number, 4);
    if (!status) status = esa_device_download(f->ctx, &number, memory, 4);
    if (!status) status = esa_device_sync(f->ctx);
    if (!status) *silent = (status = esa_mask_get_info(planned, &info)) != ESA_OK;
    if (!status) *silent = (status = esa_mask_to_bits(planned, bits)) != ESA_OK;
    esa_mask_free(mask);
    esa_mask_free(cpu);
    esa_mask_free(back);
    esa_mask_free(planned);
    esa_plan_free(plan);
    esa_device_free(f->ctx, memory);
    return status;
}

static void plain_calls(void **state)
{
    (void)state;
    if (!on_stand_in()) skip(); /* a real GPU does not fail on demand */
    fixture f = fresh();
    const int64_t free_before = gpu_free_bytes();
    int silent, points = 0, memory = 0, device = 0;
    for (;; points++) {
        fail_after(points);
        const esa_status status = plain_story(&f, &silent);
        const int done = nothing_failed();
        if (done != !status) fail_msg("point %d: %s", points, esa_status_name(status));
        memory += status == ESA_ERR_MEMORY;
        device += status == ESA_ERR_DEVICE;
        if (status && !silent) check_failure(f.ctx, status, points);
        esa_ctx_trim(f.ctx);
        if (gpu_free_bytes() != free_before)
            fail_msg("point %d: %lld bytes are lost", points,
                     (long long)(free_before - gpu_free_bytes()));
        if (done) break;
    }
    printf("every one of %d calls failed once: %d for memory, %d otherwise\n", points, memory,
           device);
    assert_true(memory > 10 && device > 10 && memory + device == points);
    must(f.ctx, plain_story(&f, &silent));
    finish(&f);
}

/* A copy of a mask lives in the memory of the ctx that made the copy, not of the ctx that made the
 * original. */
static void copies_use_their_ctx(void **state)
{
    (void)state;
    fixture f = fresh();
    const esa_select_params sp = selection();
    counting c;
    esa_ctx *other = counting_ctx(&c, 1);
    esa_mask *mask, *copy[2];
    must(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &sp));
    must(other, esa_mask_to_device(other, &copy[0], mask, ESA_DEVICE_CUDA)); /* opens the GPU */
    esa_mask_free(copy[0]);
    esa_ctx_trim(other);
    const int64_t before = c.live;
    for (int32_t left = 0;; left++) {
        c.left = left;
        const esa_status status = esa_mask_to_device(other, &copy[0], mask, ESA_DEVICE_CPU);
        c.left = -1;
        if (!status) break;
        refused(other, status, ESA_ERR_MEMORY, "out of memory");
        assert_null(copy[0]);
        assert_true(c.live == before && left < 3);
    }
    const int64_t one = c.live - before;
    assert_true(one > 0);
    must(other, esa_mask_to_device(other, &copy[1], copy[0], ESA_DEVICE_CPU));
    assert_int_equal(c.live - before, 2 * one);
    esa_mask_free(mask);
    esa_mask_free(copy[0]);
    esa_mask_free(copy[1]);
    assert_int_equal(c.live, before);
    esa_ctx_free(other);
    finish(&f);
}

/* One video, with statistics in the middle of it. */
static esa_status video(const fixture *f, esa_session *s)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    esa_status status = esa_session_begin(s);
    for (int32_t step = 0; step < STEPS && !status; step++) {
        status = esa_session_step(s, step, 0);
        for (int32_t layer = 0; layer < LAYERS && !status; layer++)
            status = esa_session_attention(s, layer, ESA_CALL_SELF, &f->q, &f->k, &f->v, &f->o,
                                           NULL);
        if (!status && step == 1) status = esa_session_get_stats(s, &stats, -1, -1);
    }
    return status ? status : esa_session_get_stats(s, &stats, -1, -1);
}

static void check_video(const fixture *f, esa_session *s, int32_t mode)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    must(f->ctx, video(f, s));
    must(f->ctx, esa_session_get_stats(s, &stats, -1, -1));
    assert_int_equal(stats.calls, LAYERS * STEPS);
    if (mode != ESA_SESSION_RECORD)
        assert_true(stats.sparse_calls > 0 && stats.density > 0.3 && stats.density < 0.5 &&
                    stats.device_bytes >= 0);
    assert_true(stats.attention_seconds > 0 && stats.select_seconds > 0);
}

typedef struct session_kind {
    const char *name;
    int32_t mode, refresh_every;
} session_kind;

static const session_kind session_kinds[] = {
    { "online", ESA_SESSION_ONLINE, 1 },
    { "online, resting masks", ESA_SESSION_ONLINE, 2 },
    { "cached", ESA_SESSION_CACHED, 1 },
    { "recording", ESA_SESSION_RECORD, 1 },
};

static void session_story(const fixture *f, const session_kind *kind, esa_mask_file *masks)
{
    esa_session_params p = esa_session_params_default();
    p.mode = kind->mode;
    p.layers = LAYERS;
    p.steps = STEPS;
    p.refresh_every = kind->refresh_every;
    p.select = selection();
    p.masks = kind->mode == ESA_SESSION_CACHED ? masks : NULL;
    esa_ctx_trim(f->ctx);
    const int64_t free_before = gpu_free_bytes();
    int points = 0;
    for (;; points++) {
        esa_session *s = NULL;
        fail_after(points);
        esa_status status = esa_session_create(f->ctx, &s, &p);
        if (!status) status = video(f, s);
        const int done = nothing_failed();
        if (done != !status)
            fail_msg("%s, point %d: %s", kind->name, points, esa_status_name(status));
        if (status) check_failure(f->ctx, status, points);
        if (s) check_video(f, s, p.mode); /* the session is still good */
        esa_session_free(s);
        esa_ctx_trim(f->ctx);
        if (gpu_free_bytes() != free_before)
            fail_msg("%s, point %d: %lld bytes are lost", kind->name, points,
                     (long long)(free_before - gpu_free_bytes()));
        if (done) break;
    }
    printf("%s: every one of %d calls failed once\n", kind->name, points);
    assert_true(points > 20);
}

static void sessions(void **state)
{
    (void)state;
    if (!on_stand_in()) skip(); /* a real GPU does not fail on demand */
    fixture f = fresh();
    scratch dir = scratch_make(), other = dir;
    esa_session_params p = esa_session_params_default();
    esa_session *s;
    p.mode = ESA_SESSION_RECORD;
    p.layers = LAYERS;
    p.steps = STEPS;
    p.select = selection();
    must(f.ctx, esa_session_create(f.ctx, &s, &p));
    must(f.ctx, video(&f, s));
    must(f.ctx, esa_session_save_recording(s, scratch_path(&dir, "recording")));
    esa_session_free(s);
    const char *one[] = { scratch_path(&dir, "recording") };
    static const double budgets[] = { 0.4 };
    esa_mask_build build = esa_mask_build_default();
    build.budgets = budgets;
    build.budget_count = 1;
    esa_mask_file *masks;
    must(f.ctx, esa_mask_file_build(f.ctx, scratch_path(&other, "masks"), one, 1, &build));
    must(f.ctx, esa_mask_file_open(f.ctx, &masks, scratch_path(&other, "masks")));
    for (size_t i = 0; i < sizeof session_kinds / sizeof *session_kinds; i++)
        session_story(&f, &session_kinds[i], masks);
    esa_mask_file_free(masks);
    scratch_remove(&dir);
    finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(plain_calls),
                                        cmocka_unit_test(copies_use_their_ctx),
                                        cmocka_unit_test(sessions) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
