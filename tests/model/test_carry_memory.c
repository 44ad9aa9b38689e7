/* test_carry_memory.c - host memory of the differences that a video carries: what the machine has
 * left decides before the first step, and is given back before the decoder works.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* nftw */
#include "common/fake_tree.h"

#include "esa/esa_video.h"
#include "model/run/model.h"

/* Bytes that the ctx and its session hold. */
typedef struct watch {
    int64_t held, steps, decoder;
} watch;

static void *count_alloc(void *user, uint64_t bytes)
{
    void *p = aligned_alloc(64, (size_t)bytes);
    if (p) ((watch *)user)->held += (int64_t)bytes;
    return p;
}

static void count_free(void *user, void *ptr, uint64_t bytes)
{
    if (ptr) ((watch *)user)->held -= (int64_t)bytes;
    free(ptr);
}

/* A machine whose control group has so many bytes, and a clip on it. */
typedef struct machine {
    scratch root;
    esa_ctx *ctx;
    esa_model *model;
    char said[400]; /* the last warning */
} machine;

static void keep_warning(void *user, int32_t level, const char *text)
{
    if (level == ESA_LOG_WARNING) snprintf(user, 400, "%s", text);
}

static void machine_open(machine *x, watch *w)
{
    char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    esa_ctx_params c = esa_ctx_params_default();
    *x = (machine){ .root = scratch_make() };
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    c.threads = 2;
    c.log = keep_warning;
    c.log_user = x->said;
    if (w) {
        c.alloc = count_alloc;
        c.dealloc = count_free;
        c.alloc_user = w;
    }
    assert_int_equal(esa_ctx_create(&x->ctx, &c), ESA_OK);
    if (esa_model_open(x->ctx, &x->model, path, NULL)) fail_msg("%s", esa_ctx_error(x->ctx));
    x->model->host_root = x->root.dir;
    fake_put(&x->root, "/proc", "meminfo", "MemAvailable: 64000000 kB\n");
    fake_put(&x->root, "/proc/self", "cgroup", "0::/job\n");
    fake_put(&x->root, "/sys/fs/cgroup/job", "memory.current", "0\n");
}

static void machine_close(machine *x)
{
    esa_model_free(x->model);
    esa_ctx_free(x->ctx);
    fake_remove(&x->root);
}

static esa_generate_params clip(void)
{
    esa_generate_params p = esa_generate_params_default();
    p.prompt = "a red ball rolls to the right over a blue floor";
    p.frames = 5;
    p.height = p.width = 64;
    p.steps = 3;
    p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 128);
    p.session.select.block_q = p.session.select.block_k = 16;
    p.session.carry = 2;
    return p;
}

static esa_status make(machine *x, const esa_generate_params *p, int64_t bytes,
                       esa_generate_stats *stats)
{
    char text[32];
    esa_frames *frames;
    *stats = (esa_generate_stats){ .struct_size = sizeof *stats };
    snprintf(text, sizeof text, "%lld", (long long)bytes);
    fake_put(&x->root, "/sys/fs/cgroup/job", "memory.max", text);
    const esa_status status = esa_generate(x->model, &frames, p, stats);
    esa_frames_free(frames);
    return status;
}

/* All layers, rows of E4M3 for each token and head: a byte a value and four for the scale. */
static int64_t all_differences(const machine *x, const esa_generate_stats *stats)
{
    const esa_model_info *i = &x->model->facts.info;
    return i->layers * esa_carry_bytes(ESA_CARRY_E4M3, 1, i->heads, stats->tokens, i->head_dim);
}

static void within_the_machine(void **state)
{
    (void)state;
    machine x;
    esa_generate_stats stats;
    machine_open(&x, NULL);
    esa_generate_params p = clip();
    if (make(&x, &p, INT64_C(8) << 30, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    const int64_t all = all_differences(&x, &stats);
    assert_int_equal(stats.session.carry_bytes, all);
    assert_int_equal(stats.session.carry_host_bytes, 0);
    assert_int_equal(stats.session.anchor_calls, 2 * x.model->facts.info.layers);
    /* so little that they do not fit beside the activations: refused before the first step */
    p.decode = 0;
    if (make(&x, &p, INT64_C(8) << 30, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    const int64_t peak = stats.peak_bytes;
    assert_refused(x.ctx, make(&x, &p, all, &stats), ESA_ERR_MEMORY,
                   "out of memory: the differences that 2 anchors carry take 0.00 GB",
                   "GB are left", "turn carry off", NULL);
    /* not strict: the layers that have no room run without, and the stats say so */
    p.session.strict = 0;
    if (make(&x, &p, all, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    assert_int_equal(stats.session.anchor_calls, 0);
    assert_int_equal(stats.session.carry_bytes, 0);
    assert_true(stats.session.sparse_calls > 0);
    assert_non_null(strstr(x.said, "without carry"));
    /* without carry nothing is needed */
    p.session.strict = 1;
    p.session.carry = ESA_CARRY_OFF;
    if (make(&x, &p, all, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    assert_int_equal(stats.peak_bytes, peak - all);
    /* and a machine that says nothing is believed */
    x.model->host_root = "/no/such/folder";
    p = clip();
    if (make(&x, &p, all, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    assert_int_equal(stats.session.carry_bytes, all);
    machine_close(&x);
}

/* The caller's own limit. */
static void room_of_the_caller(void **state)
{
    (void)state;
    machine x;
    esa_generate_stats stats;
    machine_open(&x, NULL);
    esa_generate_params p = clip();
    p.decode = 0;
    p.session.carry_room = 1000;
    assert_refused(x.ctx, make(&x, &p, INT64_C(8) << 30, &stats), ESA_ERR_MEMORY, "carry_room",
                   NULL);
    p.session.strict = 0;
    p.session.carry_room = 200000;
    if (make(&x, &p, INT64_C(8) << 30, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
    assert_true(stats.session.carry_bytes > 0 && stats.session.carry_bytes <= 200000);
    const int64_t one = all_differences(&x, &stats) / x.model->facts.info.layers;
    /* one anchor call for each layer that has room */
    assert_int_equal(stats.session.anchor_calls, 2 * (stats.session.carry_bytes / one));
    machine_close(&x);
}

static int32_t note(void *user, const esa_progress *p)
{
    watch *w = user;
    if (p->stage == ESA_STAGE_DENOISE && p->done == p->total) w->steps = w->held;
    if (p->stage == ESA_STAGE_DECODE && !w->decoder) w->decoder = w->held;
    return 0;
}

/* Without carry the decoder begins with as much as with it. */
static void gone_before_the_decoder(void **state)
{
    (void)state;
    watch w[2] = { { 0 } };
    esa_generate_stats stats;
    for (int32_t i = 0; i < 2; i++) {
        machine x;
        machine_open(&x, &w[i]);
        esa_generate_params p = clip();
        if (i) p.session.carry = ESA_CARRY_OFF;
        p.progress = note;
        p.progress_user = &w[i];
        if (make(&x, &p, INT64_C(8) << 30, &stats)) fail_msg("%s", esa_ctx_error(x.ctx));
        if (!i) assert_true(stats.session.carry_bytes > 0);
        machine_close(&x);
    }
    assert_true(w[0].steps > w[1].steps);
    assert_true(w[0].decoder > 0 && w[0].decoder == w[1].decoder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(within_the_machine),
        cmocka_unit_test(room_of_the_caller),
        cmocka_unit_test(gone_before_the_decoder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
