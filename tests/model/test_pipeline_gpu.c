/* test_pipeline_gpu.c - whole videos on a GPU: near those of the CPU, the same bits again and under
 * limits of memory; failures and cancelled runs leave one message and no memory behind.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/gpu_clip.h"

#include <math.h>
#include <time.h>

/* bf16 against f32, from prompt to pixels, at the size the model was trained for: at least 40 dB.
 */
static void like_the_cpu(void **state)
{
    (void)state;
    esa_ctx *ctx = context();
    esa_frames *frames[2];
    esa_generate_stats stats;
    for (int32_t i = 0; i < 2; i++) {
        esa_model *model = opened(ctx, i ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU, 0);
        esa_generate_params p = video(128, 2);
        if (on_stand_in()) p.frames = 1; /* a slow GPU; test_vae_gpu has frames that follow */
        frames[i] = made(ctx, model, &p, &stats);
        double sum = 0;
        for (int32_t k = 0; k < ESA_WORK_KINDS; k++) sum += stats.work_seconds[k];
        assert_true(stats.work_seconds[ESA_WORK_PRODUCTS] > 0 &&
                    stats.work_seconds[ESA_WORK_ATTENTION] > 0 &&
                    stats.work_seconds[ESA_WORK_CONVOLUTIONS] > 0);
        assert_true(sum <= stats.seconds);
        assert_true((stats.device_peak_bytes > 0) == i);
        esa_model_info info = { .struct_size = sizeof info };
        assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
        assert_true(info.device == i && (info.device_bytes > 0) == i);
        esa_model_free(model);
    }
    const double db = psnr(ctx, frames[0], frames[1]);
    print_message("PSNR %.1f dB\n", db);
    assert_true(db >= 40 && db < 90);
    esa_frames_free(frames[0]);
    esa_frames_free(frames[1]);
    esa_ctx_free(ctx);
}

static void count_preview(void *user, const esa_preview *p)
{
    assert_true(p->height == 64 && p->width == 64);
    ++*(int32_t *)user;
}

/* Resident, again, with blocks that are copied and with previews: the same pixels; and less memory.
 */
static void same_bits(void **state)
{
    (void)state;
    const int64_t limits[] = { 0, 0, tight_limit() };
    esa_frames *frames[3];
    esa_generate_params p = video(64, 3);
    if (on_stand_in()) p.frames = 3; /* guarding its memory is slow */
    unsetenv("ESA_STAND_IN_OPEN");   /* a host that touches the GPU's memory dies here */
    p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 0);
    p.cache = 100;
    int32_t previews = 0;
    for (int32_t i = 0; i < 3; i++) {
        esa_generate_stats stats;
        esa_ctx *ctx = context(); /* a new one: its peak counts */
        p.preview = i ? count_preview : NULL;
        p.preview_user = &previews;
        p.preview_every = 1;
        esa_model *model = opened(ctx, ESA_DEVICE_CUDA, limits[i]);
        frames[i] = made(ctx, model, &p, &stats);
        /* it is the sum of two peaks, of allocations and of scratch, at different times */
        if (limits[i]) assert_true(stats.device_peak_bytes <= limits[i] / 20 * 21);
        assert_int_equal(previews, i * (p.steps - 1));
        assert_true(isinf(psnr(ctx, frames[0], frames[i])));
        esa_model_free(model);
        esa_ctx_free(ctx);
    }
    for (int32_t i = 0; i < 3; i++) esa_frames_free(frames[i]);
    esa_ctx *ctx = context();
    esa_model *model;
    assert_refused(ctx, open_on(ctx, &model, ESA_DEVICE_CUDA, 1 << 20), ESA_ERR_MEMORY,
                   "the weights", NULL);
    assert_null(model);
    esa_ctx_free(ctx);
    setenv("ESA_STAND_IN_OPEN", "1", 1);
}

static int32_t stop_at(void *user, const esa_progress *p)
{
    return p->stage == ESA_STAGE_DENOISE && p->done >= *(const int32_t *)user;
}

static int32_t stop_at_text(void *user, const esa_progress *p)
{
    (void)user;
    return p->stage == ESA_STAGE_TEXT;
}

/* Stops inside the first forward. */
static int32_t stop_inside(void *user, const esa_progress *p)
{
    return p->stage == ESA_STAGE_DENOISE && ++*(int32_t *)user > 3;
}

/* Lets every allocation fail from the end of the second step to the end of the last. */
static int32_t fill_up(void *user, const esa_progress *p)
{
    const int32_t steps = *(const int32_t *)user;
    if (p->stage == ESA_STAGE_DENOISE && p->done >= 2 && p->done < steps)
        setenv("ESA_STAND_IN_FULL", "1", 1);
    else
        unsetenv("ESA_STAND_IN_FULL");
    return 0;
}

/* After the first dense and the first sparse step nothing is allocated. Only the stand-in can say
 * that it is full. */
static void no_allocation(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    static const int32_t selectors[] = { ESA_SELECT_ENTROPY, ESA_SELECT_ERROR };
    esa_ctx *ctx = context();
    esa_model *model = opened(ctx, ESA_DEVICE_CUDA, 0);
    for (int32_t i = 0; i < 3; i++) {
        esa_generate_stats stats;
        esa_generate_params p = video(64, 5);
        p.frames = 1; /* what is allocated, not how much */
        if (i) p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, selectors[i - 1], 0);
        p.session.warmup_frac = 0.2;
        p.cache = i == 1 ? 0.05 : 0;
        p.progress = fill_up;
        p.progress_user = &p.steps;
        esa_frames_free(made(ctx, model, &p, &stats));
        assert_int_equal(stats.session.sparse_calls > 0, i > 0);
    }
    esa_model_free(model);
    esa_ctx_free(ctx);
}

static void cancelled(void **state)
{
    (void)state;
    esa_ctx *ctx = context();
    esa_model *model = opened(ctx, ESA_DEVICE_CUDA, 0);
    esa_frames *frames;
    esa_generate_stats stats;
    esa_generate_params p = video(64, 3);
    const int32_t step = 1;
    p.progress = stop_at;
    p.progress_user = (void *)(uintptr_t)&step;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_STATE, "cancelled", NULL);
    assert_null(frames);
    /* A run that was broken off inside a forward, and the pause after it, are no work of the next
     * run; and its activations are gone. */
    const int64_t before = free_bytes();
    int32_t calls = 0;
    p.progress = stop_inside;
    p.progress_user = &calls;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_STATE, "cancelled", NULL);
    if (on_stand_in()) assert_int_equal(free_bytes(), before);
    /* a text encoder that was broken off does not stay there */
    p.progress = stop_at_text;
    p.prompt = "a prompt that the model does not know yet";
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_STATE, "cancelled", NULL);
    if (on_stand_in()) assert_true(free_bytes() > before);
    nanosleep(&(struct timespec){ .tv_sec = 2 }, NULL);
    p.progress = NULL;
    esa_frames_free(made(ctx, model, &p, &stats));
    double sum = 0;
    for (int32_t k = 0; k < ESA_WORK_KINDS; k++) sum += stats.work_seconds[k];
    assert_true(sum <= stats.seconds);
    assert_true(stats.gemm_seconds <= stats.denoise_seconds);
    esa_model_free(model);
    esa_ctx_free(ctx);
}

/* Latents of a file are decoded under a limit that the weights alone would fill: blocks leave. */
static void decoded(void **state)
{
    (void)state;
    scratch dir = scratch_make();
    esa_ctx *ctx = context();
    const int64_t limit = tight_limit();
    esa_model *model = opened(ctx, ESA_DEVICE_CUDA, limit);
    esa_model_info opened_info = { .struct_size = sizeof opened_info }, info = opened_info;
    esa_generate_params p = video(64, 1);
    esa_generate_stats stats;
    esa_frames *frames[2];
    char path[700];
    snprintf(path, sizeof path, "%s", scratch_path(&dir, "latents.safetensors"));
    p.save_latents = path;
    frames[0] = made(ctx, model, &p, &stats);
    esa_model_free(model);
    model = opened(ctx, ESA_DEVICE_CUDA, limit);
    assert_int_equal(esa_model_get_info(model, &opened_info), ESA_OK);
    esa_decode_params d = esa_decode_params_default();
    d.latents = path;
    if (esa_decode(model, &frames[1], &d)) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
    /* elsewhere the share of the workspace may be enough for the decoder */
    if (on_stand_in()) assert_true(info.resident_blocks < opened_info.resident_blocks);
    assert_true(isinf(psnr(ctx, frames[0], frames[1])));
    d.vae_tile = 1;
    esa_frames *none;
    assert_refused(ctx, esa_decode(model, &none, &d), ESA_ERR_ARGUMENT, "multiple", NULL);
    esa_frames_free(frames[0]);
    esa_frames_free(frames[1]);
    esa_model_free(model);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
}

/* Opening, then making a video, fails at one call of the GPU after the other (every `stride`th): a
 * message each time, and no memory is lost. Each try after a failure comes further than the one
 * before it, and the last one works. Returns how many failed. */
static int32_t walk(const esa_generate_params *p, int32_t stride)
{
    esa_ctx *ctx = context();
    esa_model *open = NULL;
    esa_generate_params now = p ? *p : esa_generate_params_default();
    int32_t failed = 0, ended = 0;
    if (p) { /* once without failures: the text encoder stays from now on */
        esa_generate_stats stats;
        open = opened(ctx, ESA_DEVICE_CUDA, 0);
        esa_frames_free(made(ctx, open, p, &stats));
        esa_ctx_trim(ctx);
    }
    const int64_t before = free_bytes();
    for (int32_t n = 0; !ended; n += stride) {
        char text[16];
        esa_frames *frames = NULL;
        snprintf(text, sizeof text, "%d", (int)n);
        setenv("ESA_STAND_IN_FAIL", text, 1);
        if (p) now.prompt = text; /* the model remembers the last prompt */
        const esa_status status = p ? esa_generate(open, &frames, &now, NULL)
                                    : open_on(ctx, &open, ESA_DEVICE_CUDA, 0);
        ended = getenv("ESA_STAND_IN_FAIL") != NULL;
        unsetenv("ESA_STAND_IN_FAIL");
        assert_true(!ended || !status); /* nothing failed that was not told to */
        if (status) {
            failed++;
            assert_true(strlen(esa_ctx_error(ctx)) > 10 && !frames);
            assert_int_equal(p != NULL, open != NULL);
        }
        esa_frames_free(frames);
        if (!p) esa_model_free(open); /* it may have got by without the call that failed */
        esa_ctx_trim(ctx);            /* scratch stays between calls */
        if (status) assert_true(free_bytes() >= before);
    }
    if (p) esa_model_free(open);
    esa_ctx_free(ctx);
    return failed;
}

static void failures(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    const int64_t before = free_bytes();
    esa_generate_params p = video(32, 1);
    p.frames = 1;
    const int32_t opening = walk(NULL, 29), making = walk(&p, 31);
    assert_int_equal(free_bytes(), before);
    print_message("failed at %d points while opening, at %d while making a video\n", opening,
                  making);
    assert_true(opening > 30 && making > 30);
}

/* Out of memory in the middle of a video: one message, and the model makes the next one. */
static int32_t fill_in_time(void *user, const esa_progress *p)
{
    if (p->stage == *(const int32_t *)user) setenv("ESA_STAND_IN_MOST", "1", 1);
    return 0;
}

static void out_of_memory(void **state)
{
    static const int32_t stages[] = { ESA_STAGE_TEXT, ESA_STAGE_DENOISE };
    (void)state;
    if (!on_stand_in()) skip();
    esa_ctx *ctx = context();
    esa_model *model = opened(ctx, ESA_DEVICE_CUDA, 0);
    esa_frames *frames;
    esa_generate_stats stats;
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        esa_generate_params p = video(32, 1);
        p.progress = fill_in_time;
        p.progress_user = (void *)(uintptr_t)&stages[i];
        assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_MEMORY, "out of memory",
                       "GPU 0 has less memory", NULL);
        unsetenv("ESA_STAND_IN_MOST");
        assert_null(frames);
        p.progress = NULL;
        esa_frames_free(made(ctx, model, &p, &stats));
    }
    esa_model_free(model);
    esa_ctx_free(ctx);
}

/* A GPU that answers nothing any more: one message for every try, all can be freed, and the process
 * goes on with the CPU. */
static int32_t lose(void *user, const esa_progress *p)
{
    (void)user;
    if (p->stage == ESA_STAGE_DENOISE && p->done == 1) setenv("ESA_STAND_IN_LOST", "1", 1);
    return 0;
}

static void lost(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    esa_ctx *ctx = context();
    esa_frames *frames;
    esa_generate_stats stats;
    const int64_t before = free_bytes();
    esa_model *model = opened(ctx, ESA_DEVICE_CUDA, 0), *other;
    esa_generate_params p = video(32, 3);
    p.progress = lose;
    for (int32_t i = 0; i < 2; i++) {
        assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_DEVICE, "stand-in GPU",
                       NULL);
        assert_null(frames);
    }
    assert_refused(ctx, open_on(ctx, &other, ESA_DEVICE_CUDA, 0), ESA_ERR_DEVICE, "stand-in GPU",
                   NULL);
    assert_null(other);
    other = opened(ctx, ESA_DEVICE_CPU, 0);
    p.progress = NULL;
    esa_frames_free(made(ctx, other, &p, &stats));
    esa_model_free(other);
    esa_model_free(model);
    esa_ctx_free(ctx);
    unsetenv("ESA_STAND_IN_LOST");
    assert_int_equal(free_bytes(), before);
}

int main(void)
{
    setenv("ESA_STAND_IN_OPEN", "1", 1); /* guarding its memory takes most of the time */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_the_cpu),  cmocka_unit_test(same_bits),
        cmocka_unit_test(no_allocation), cmocka_unit_test(decoded),
        cmocka_unit_test(cancelled),     cmocka_unit_test(failures),
        cmocka_unit_test(out_of_memory), cmocka_unit_test(lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
