/* test_callback.c - what the denoised callback of esa_generate may do with the ctx and the model.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include "esa/esa_video.h"

static const char *wan_tiny(void)
{
    static char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    return path;
}

static esa_model *open_model(esa_ctx *ctx)
{
    esa_model *model;
    if (esa_model_open(ctx, &model, wan_tiny(), NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return model;
}

/* The smallest video with more than one latent frame: 2 x 4 x 4 tokens. */
static esa_generate_params tiny(void)
{
    esa_generate_params p = esa_generate_params_default();
    p.prompt = "a red ball";
    p.frames = 3;
    p.height = p.width = 32;
    p.steps = 2;
    return p;
}

typedef struct watcher {
    esa_ctx *ctx;
    esa_model *model, *other; /* other: NULL in the inner call */
    const char *latents;
    int callbacks, decode_ticks;
} watcher;

static int32_t on_progress(void *user, const esa_progress *p)
{
    ((watcher *)user)->decode_ticks += p->stage == ESA_STAGE_DECODE && p->done > 0;
    return 0;
}

static void on_denoised(void *user, const esa_session *session)
{
    watcher *w = user;
    w->callbacks++;
    esa_session_stats stats = { .struct_size = sizeof stats };
    assert_int_equal(esa_session_get_stats(session, &stats, -1, -1), ESA_OK);
    assert_true(stats.calls > 0);

    esa_frames *frames;
    esa_generate_params p = tiny();
    assert_refused(w->ctx, esa_generate(w->model, &frames, &p, NULL), ESA_ERR_STATE,
                   "this model is busy: its callback must not start another call of it", NULL);
    assert_null(frames);
    esa_decode_params d = esa_decode_params_default();
    d.latents = w->latents;
    assert_refused(w->ctx, esa_decode(w->model, &frames, &d), ESA_ERR_STATE,
                   "this model is busy: its callback must not start another call of it", NULL);
    assert_null(frames);
    if (!w->other) return;

    /* another model may run on the same ctx, with a callback of its own */
    watcher inner = { w->ctx, w->other, NULL, w->latents, 0, 0 };
    p.denoised = on_denoised;
    p.denoised_user = &inner;
    p.progress = on_progress;
    p.progress_user = &inner;
    if (esa_generate(w->other, &frames, &p, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(w->ctx));
    assert_int_equal(inner.callbacks, 1);
    assert_true(inner.decode_ticks > 0);
    esa_frames_free(frames);
}

/* A recording run, because it still needs its session after the callback. */
static void calls_of_the_callback(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 2);
    watcher w = { ctx, open_model(ctx), open_model(ctx), scratch_path(&s, "latents"), 0, 0 };
    esa_generate_params p = tiny();
    p.session = esa_session_params_recommended(ESA_SESSION_RECORD, ESA_SELECT_ENTROPY, 0);
    p.record = scratch_path(&t, "recording");
    p.denoised = on_denoised;
    p.denoised_user = &w;
    p.progress = on_progress;
    p.progress_user = &w;
    esa_frames *frames;
    if (esa_generate(w.model, &frames, &p, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(w.callbacks, 1);
    assert_true(w.decode_ticks > 0); /* the refused calls left the progress function in place */
    assert_int_equal(access(p.record, F_OK), 0);
    esa_frames_free(frames);
    esa_model_free(w.other);
    esa_model_free(w.model);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(calls_of_the_callback) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
