/* test_pipeline.c - from a prompt to pixels with models/wan-tiny: parity with diffusers, and what
 * happens when things go wrong.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_tensors.h"
#include "esa/esa_video.h"

static const char *model_folder(void)
{
    static char path[600];
    const char *models = getenv("ESA_TEST_MODELS");
    snprintf(path, sizeof path, "%s/wan-tiny", models ? models : "models");
    return path;
}

static esa_model *open_model(esa_ctx *ctx)
{
    esa_model *model;
    if (esa_model_open(ctx, &model, model_folder(), NULL) != ESA_OK)
        fail_msg("%s", esa_ctx_error(ctx));
    return model;
}

static esa_ctx *context(int32_t threads)
{
    esa_ctx_params p = esa_ctx_params_default();
    esa_ctx *ctx;
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
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

/* ---------------------------------------------------------------- parity */

typedef struct golden_case {
    const char *name, *prompt, *negative;
    int32_t frames, height, width, steps;
    double guidance;
    uint64_t seed;
} golden_case;
static const golden_case cases[] = {
    /* as tools/golden/pipeline.py */
    { "guided", "a red ball rolls to the right over a blue floor", NULL, 5, 64, 48, 4, 4.0, 0 },
    { "negative", "A &lt;large&gt;  green ring grows", "blue", 1, 32, 64, 3, 2.5, 7 },
    { "plain", "", NULL, 9, 32, 32, 1, 1.0, (UINT64_C(1) << 33) + 1 },
};

static const void *find(esa_tensors *file, const char *name, const char *part, int64_t bytes)
{
    char full[64];
    esa_tensor_info info = { .struct_size = sizeof info };
    snprintf(full, sizeof full, "%s.%s", name, part);
    if (esa_tensors_find(file, full, &info) != ESA_OK) fail_msg("no tensor %s", full);
    if (bytes) assert_int_equal(info.bytes, bytes);
    return info.data;
}

/* Latents within 1e-4 of their scale: f32 with another order of summation, through 2 x 8 blocks per
 * step. Pixels above 50 dB: the same, plus rounding to 8 bits, which alone gives 59 dB if values
 * lie halfway between levels. */
static void like_diffusers(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char golden[640], latents[640];
    const char *folder = getenv("ESA_TEST_GOLDEN");
    snprintf(golden, sizeof golden, "%s/pipeline.safetensors", folder ? folder : "tests/golden");
    snprintf(latents, sizeof latents, "%s", scratch_path(&s, "latents"));
    esa_ctx *ctx = context(2);
    esa_model *model = open_model(ctx);
    esa_tensors *file, *ours;
    if (esa_tensors_open(ctx, &file, golden) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        const golden_case *c = &cases[n];
        esa_generate_params p = esa_generate_params_default();
        p.prompt = c->prompt;
        p.negative_prompt = c->negative;
        p.frames = c->frames;
        p.height = c->height;
        p.width = c->width;
        p.steps = c->steps;
        p.guidance = c->guidance;
        p.seed = c->seed;
        p.save_latents = latents;
        esa_frames *frames, *want;
        esa_generate_stats stats = { .struct_size = sizeof stats };
        if (esa_generate(model, &frames, &p, &stats) != ESA_OK)
            fail_msg("%s: %s", c->name, esa_ctx_error(ctx));
        assert_int_equal(esa_tensors_open(ctx, &ours, latents), ESA_OK);
        esa_tensor_info got = { .struct_size = sizeof got };
        assert_int_equal(esa_tensors_find(ours, "latents", &got), ESA_OK);
        const char *a = find(file, c->name, "latents", got.bytes), *b = got.data;
        double worst = 0, scale = 0;
        for (int64_t i = 0; i < got.bytes; i += 4) {
            float x, y;
            memcpy(&x, a + i, 4);
            memcpy(&y, b + i, 4);
            worst = fmax(worst, fabs((double)x - (double)y));
            scale = fmax(scale, fabs((double)x));
        }
        if (!(worst <= 1e-4 * scale))
            fail_msg("%s: latents differ by %g at a scale of %g; were the weights changed? "
                     "(tools/golden/pipeline.py)",
                     c->name, worst, scale);
        const int64_t size = (int64_t)c->frames * c->height * c->width * 3;
        esa_metrics m = { .struct_size = sizeof m };
        assert_int_equal(esa_frames_create(ctx, &want, find(file, c->name, "video", size),
                                           c->frames, c->height, c->width, 16),
                         ESA_OK);
        assert_int_equal(esa_frames_compare(ctx, &m, want, frames), ESA_OK);
        if (!(m.psnr > 50)) fail_msg("%s: PSNR %.1f dB, expected more than 50", c->name, m.psnr);
        assert_int_equal(stats.frames, c->frames);
        assert_true(stats.steps == c->steps && stats.height == c->height &&
                    stats.width == c->width);
        assert_int_equal(stats.session.calls, 8 * c->steps * (c->guidance > 1 ? 2 : 1));
        assert_true(stats.seconds >= stats.denoise_seconds && stats.denoise_seconds > 0 &&
                    stats.attention_seconds > 0 && stats.gemm_seconds > 0);
        assert_true(stats.peak_bytes > 1000000);
        esa_frames_free(want);
        esa_frames_free(frames);
        esa_tensors_free(ours);
    }
    esa_tensors_free(file);
    esa_model_free(model);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- the model */

static void count_lines(void *user, const char *line)
{
    assert_true(strlen(line) > 0);
    ++*(int *)user;
}

static void described(void **state)
{
    (void)state;
    int lines = 0;
    esa_ctx *ctx = context(1);
    esa_model_params mp = esa_model_params_default();
    mp.report = count_lines;
    mp.report_user = &lines;
    assert_int_equal(esa_model_check(ctx, model_folder(), &mp), ESA_OK);
    assert_int_equal(lines, 3); /* one per part */
    esa_model *model = open_model(ctx);
    esa_model_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
    assert_string_equal(info.name, "wan-tiny");
    assert_true(info.frames == 33 && info.height == 128 && info.width == 128 && info.steps == 8 &&
                info.guidance == 2.5 && info.fps == 16.0);
    assert_true(info.factor[0] == 2 && info.factor[1] == 4 && info.factor[2] == 4);
    assert_true(info.patch[0] == 1 && info.patch[1] == 2 && info.patch[2] == 2);
    assert_true(info.parameters[0] > 7000000 && info.parameters[1] > 1000000 &&
                info.held_bytes > 1000000);
    char hash[80];
    assert_int_equal(esa_model_config_hash(ctx, hash, model_folder()), ESA_OK);
    assert_string_equal(hash, info.config_hash);
    assert_refused(ctx, esa_model_config_hash(ctx, hash, "/nonexistent"), ESA_ERR_IO,
                   "/nonexistent/transformer/config.json", NULL);
    info.struct_size = 1;
    assert_int_equal(esa_model_get_info(model, &info), ESA_ERR_VERSION);
    esa_model_free(model);
    esa_model_free(NULL);
    assert_refused(ctx, esa_model_open(ctx, &model, "/nonexistent", NULL), ESA_ERR_IO,
                   "/nonexistent/model_index.json", NULL);
    assert_null(model);
    assert_refused(ctx, esa_model_open(ctx, &model, "", NULL), ESA_ERR_ARGUMENT, "folder", NULL);
    mp.parts = 0;
    assert_refused(ctx, esa_model_open(ctx, &model, model_folder(), &mp), ESA_ERR_ARGUMENT, "parts",
                   NULL);
    mp = esa_model_params_default();
    mp.linear = 3;
    assert_refused(ctx, esa_model_open(ctx, &model, model_folder(), &mp), ESA_ERR_ARGUMENT,
                   "linear is 3", NULL);
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- refusals */

typedef struct watcher {
    int calls, stop_at, last_stage, text, steps, frames;
    double density;
} watcher;

static int32_t watch(void *user, const esa_progress *p)
{
    watcher *w = user;
    assert_true(p->struct_size == sizeof *p && p->stage >= w->last_stage && p->done >= 0 &&
                p->done <= p->total);
    w->last_stage = p->stage;
    if (p->stage == ESA_STAGE_TEXT) w->text = p->done;
    if (p->stage == ESA_STAGE_DENOISE) w->steps = p->done;
    if (p->stage == ESA_STAGE_DECODE) w->frames = p->done;
    w->density = p->density;
    return ++w->calls == w->stop_at;
}

static void refusals(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context(1);
    esa_model *model = open_model(ctx);
    esa_frames *frames = NULL;
    esa_generate_params p = tiny();
    p.height = 36;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "height", "36",
                   "a multiple of 8", NULL);
    assert_null(frames);
    p = tiny();
    p.frames = -1;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "frames is -1",
                   NULL);
    p = tiny();
    p.steps = -2;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "steps is -2",
                   NULL);
    p = tiny();
    p.prompt = NULL;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "prompt", NULL);
    p = tiny();
    p.prompt = "broken \xc3(";
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "UTF-8", NULL);
    p = tiny();
    p.guidance = INFINITY;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "guidance", NULL);
    p = tiny();
    p.scheduler = 9;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "scheduler",
                   NULL);
    p = tiny();
    p.session.mode = ESA_SESSION_CACHED;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "mask file",
                   NULL);
    p = tiny();
    p.session.mode = ESA_SESSION_ONLINE;
    p.session.select.budget = 7;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "7", NULL);
    watcher w = { 0 }; /* before anything is computed, also if warm-up comes first */
    p = tiny();
    p.session.mode = ESA_SESSION_ONLINE;
    p.session.select.block_q = 1;
    p.progress = watch;
    p.progress_user = &w;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_UNSUPPORTED, "block_q is 1",
                   NULL);
    p = tiny();
    p.vae_tile = 15;
    p.progress = watch;
    p.progress_user = &w;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT, "vae_tile is 15",
                   "multiple of 16", NULL);
    assert_int_equal(w.calls, 0);
    p = tiny();
    p.struct_size = 8;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_VERSION,
                   "esa_generate_params has struct_size 8", NULL);
    p = tiny();
    p.save_latents = "/nonexistent/latents";
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_IO, "/nonexistent/latents",
                   NULL);
    assert_null(frames);
    p = tiny(); /* the model still works */
    p.save_embeds = scratch_path(&s, "e");
    esa_generate_stats stats = { .struct_size = sizeof stats };
    assert_int_equal(esa_generate(model, &frames, &p, &stats), ESA_OK);
    esa_model_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
    print_message("weights %.1f MB, peak %.1f MB\n", 1e-6 * (double)info.held_bytes,
                  1e-6 * (double)stats.peak_bytes);
    /* weights count once; a video this small adds little */
    assert_true(stats.peak_bytes > info.held_bytes);
    assert_true(stats.peak_bytes < info.held_bytes + 9000000);
    assert_non_null(frames);
    esa_frames_free(frames);
    p.decode = 0;
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK);
    assert_null(frames);
    esa_model_free(model);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static void *limited_alloc(void *user, uint64_t bytes)
{
    return bytes > *(uint64_t *)user ? NULL : aligned_alloc(64, (size_t)bytes);
}

static void limited_free(void *user, void *ptr, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}

/* A decoder that does not fit takes tiles, and one that was told which is refused before the first
 * step. */
static void decoder_too_large(void **state)
{
    (void)state;
    uint64_t limit = 50000000;
    esa_ctx *ctx;
    esa_frames *frames;
    esa_ctx_params cp = esa_ctx_params_default();
    cp.threads = 1;
    cp.alloc = limited_alloc;
    cp.dealloc = limited_free;
    cp.alloc_user = &limit;
    assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
    esa_model *model = open_model(ctx);
    watcher w = { 0 };
    esa_generate_params p = tiny();
    p.height = p.width = 256;
    p.frames = 1;
    p.vae_tile = 256;
    p.progress = watch;
    p.progress_user = &w;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_MEMORY, "256 x 256",
                   "in these tiles", NULL);
    assert_int_equal(w.last_stage, ESA_STAGE_TEXT);
    p.vae_tile = 0;
    p.guidance = 1;
    p.steps = 1;
    esa_generate_stats stats = { .struct_size = sizeof stats };
    w = (watcher){ 0 };
    assert_int_equal(esa_generate(model, &frames, &p, &stats), ESA_OK);
    print_message("tiles of %d pixels\n", (int)stats.vae_tile);
    assert_true(stats.vae_tile > 0 && stats.vae_tile < 256);
    esa_frames_free(frames);
    limit = 4000000; /* too little for any tile */
    w = (watcher){ 0 };
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_MEMORY, "memory", NULL);
    esa_model_free(model);
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- progress and cancelling */

static void progress_and_cancel(void **state)
{
    (void)state;
    esa_ctx *ctx = context(1);
    esa_model *model = open_model(ctx);
    esa_frames *frames, *again;
    watcher w = { 0 };
    esa_generate_params p = tiny();
    p.session.mode = ESA_SESSION_ONLINE;
    p.session.warmup_frac = 0;
    p.session.select.block_q = p.session.select.block_k = 16;
    p.progress = watch;
    p.progress_user = &w;
    /* while the text encoder is loaded, on first use */
    for (int stop = 1; stop < 4; stop++) {
        w = (watcher){ .stop_at = 7 * stop };
        assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_STATE, "cancelled",
                       NULL);
        assert_true(w.last_stage == ESA_STAGE_TEXT && w.text == 0);
    }
    w = (watcher){ 0 };
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK); /* now it is loaded */
    esa_frames_free(frames);
    w = (watcher){ 0 };
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK);
    assert_true(w.text == 2 && w.steps == 2 && w.frames == 2 && w.density > 0 && w.density <= 1);
    const int calls = w.calls;
    /* wherever it is stopped, there is no result and no leak */
    for (int stop = 1; stop <= calls; stop++) {
        esa_frames *none;
        w = (watcher){ .stop_at = stop };
        assert_refused(ctx, esa_generate(model, &none, &p, NULL), ESA_ERR_STATE, "cancelled", NULL);
        assert_null(none);
        assert_int_equal(w.calls, stop);
    }
    w = (watcher){ 0 };
    assert_int_equal(esa_generate(model, &again, &p, NULL), ESA_OK);
    esa_frames_info a = { .struct_size = sizeof a }, b = { .struct_size = sizeof b };
    assert_int_equal(esa_frames_get_info(frames, &a), ESA_OK);
    assert_int_equal(esa_frames_get_info(again, &b), ESA_OK);
    assert_memory_equal(a.rgb, b.rgb, 3 * 32 * 32 * 3);
    esa_frames_free(frames);
    esa_frames_free(again);
    esa_model_free(model);
    esa_ctx_free(ctx);
}

/* Loading can be stopped at every tensor too. */
static int32_t stop_loading(void *user, const esa_progress *p)
{
    watcher *w = user;
    assert_true(p->struct_size == sizeof *p && p->stage == ESA_STAGE_LOAD && p->done >= w->frames &&
                p->done <= p->total);
    w->frames = p->done;
    return ++w->calls == w->stop_at;
}

static void cancel_loading(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    watcher w = { 0 };
    esa_model *model;
    esa_model_params mp = esa_model_params_default();
    mp.progress = stop_loading;
    mp.progress_user = &w;
    const int64_t live = c.live;
    assert_int_equal(esa_model_open(ctx, &model, model_folder(), &mp), ESA_OK);
    esa_model_free(model);
    const int calls = w.calls;
    assert_true(calls > 100 && w.frames == 14); /* megabytes of the transformer */
    for (int stop = 1; stop <= calls; stop += calls / 3) {
        w = (watcher){ .stop_at = stop };
        assert_refused(ctx, esa_model_open(ctx, &model, model_folder(), &mp), ESA_ERR_STATE,
                       "cancelled", NULL);
        assert_null(model);
        assert_int_equal(w.calls, stop);
        esa_ctx_trim(ctx);
        assert_int_equal(c.live, live);
    }
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- NaN in the weights */

/* Copies a file of the model; 64 bytes of it, nan_from_end bytes before its end, become NaN in f16
 * (0: none). */
static void copy_file(const char *to, const char *name, size_t nan_from_end)
{
    char path[900];
    size_t n;
    snprintf(path, sizeof path, "%s/%s", model_folder(), name);
    uint8_t *bytes = scratch_read(path, &n);
    if (nan_from_end) memset(bytes + n - nan_from_end, 0xff, 64);
    scratch_write(to, bytes, n);
    free(bytes);
}

/* Damaged weights give a message that names the stage, not a black video. */
static void not_finite(void **state)
{
    (void)state;
    static const char *const parts[] = { "transformer", "vae", "text_encoder", "tokenizer",
                                         "scheduler" };
    static const char *const files[] = { "model_index.json",
                                         "transformer/config.json",
                                         "vae/config.json",
                                         "text_encoder/config.json",
                                         "scheduler/scheduler_config.json",
                                         "tokenizer/tokenizer_config.json",
                                         "tokenizer/spiece.model",
                                         "text_encoder/model.safetensors",
                                         "transformer/diffusion_pytorch_model.safetensors",
                                         "vae/diffusion_pytorch_model.safetensors" };
    /* in proj_out.weight of the transformer, in post_quant_conv.weight of the VAE */
    static const size_t place[2] = { 4096, 2500 };
    for (int broken = 0; broken < 2; broken++) {
        scratch s = scratch_make();
        for (int i = 0; i < 5; i++) assert_int_equal(mkdir(scratch_path(&s, parts[i]), 0755), 0);
        for (int i = 0; i < 10; i++)
            copy_file(scratch_path(&s, files[i]), files[i], i == 8 + broken ? place[broken] : 0);
        esa_ctx *ctx = context(1);
        esa_model *model;
        esa_frames *frames;
        esa_generate_params p = tiny();
        p.save_latents = scratch_path(&s, "latents");
        if (esa_model_open(ctx, &model, s.dir, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
        const esa_status status = esa_generate(model, &frames, &p, NULL);
        if (broken == 0)
            assert_refused(ctx, status, ESA_ERR_FORMAT, "step 1 of 2", "not finite", NULL);
        else
            assert_refused(ctx, status, ESA_ERR_FORMAT, "VAE", "frame 0", NULL);
        assert_null(frames);
        assert_int_not_equal(access(p.save_latents, F_OK), 0);
        esa_model_free(model);
        esa_ctx_free(ctx);
        for (int i = 0; i < 10; i++) unlink(scratch_path(&s, files[i]));
        for (int i = 0; i < 5; i++) rmdir(scratch_path(&s, parts[i]));
        scratch_remove(&s);
    }
}

/* ---------------------------------------------------------------- memory */

/* Allocations fail one after the other, spread over the call: a status, a message, no leak, and the
 * model still works. */
static void out_of_memory(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_model *model = open_model(ctx);
    esa_frames *frames;
    esa_generate_params p = tiny();
    p.session.mode = ESA_SESSION_ONLINE;
    p.session.warmup_frac = 0;
    /* the text encoder is open now, scratch has grown */
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK);
    esa_frames_free(frames);
    int64_t before = c.total;
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK);
    esa_frames_free(frames);
    const int64_t allocations = c.total - before, live = c.live;
    assert_true(allocations > 10);
    for (int64_t left = 0; left < allocations; left++) {
        c.left = left;
        const esa_status status = esa_generate(model, &frames, &p, NULL);
        c.left = -1;
        if (status == ESA_OK) { /* scratch that is only grown may be skipped */
            esa_frames_free(frames);
            continue;
        }
        if (status != ESA_ERR_MEMORY)
            fail_msg("allocation %d: %s: %s", (int)left, esa_status_name(status),
                     esa_ctx_error(ctx));
        assert_null(frames);
        assert_true(strlen(esa_ctx_error(ctx)) > 0);
    }
    assert_int_equal(esa_generate(model, &frames, &p, NULL), ESA_OK);
    esa_frames_free(frames);
    /* what a failed call freed may have been allocated again in other pieces */
    assert_true(c.live <= live + 2);
    esa_model_free(model);
    before = c.total;
    assert_int_equal(esa_model_open(ctx, &model, model_folder(), NULL), ESA_OK);
    const int64_t opening = c.total - before;
    esa_model_free(model);
    for (int64_t left = 0; left < opening; left += 1 + left / 8) {
        c.left = left;
        const esa_status status = esa_model_open(ctx, &model, model_folder(), NULL);
        c.left = -1;
        if (status == ESA_OK)
            esa_model_free(model);
        else if (status != ESA_ERR_MEMORY)
            fail_msg("opening, allocation %d: %s: %s", (int)left, esa_status_name(status),
                     esa_ctx_error(ctx));
        else
            assert_null(model);
    }
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
}

/* ---------------------------------------------------------------- recording and cached masks */

static void record_then_cached(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char recording[640], masks[640];
    snprintf(recording, sizeof recording, "%s", scratch_path(&s, "recording"));
    snprintf(masks, sizeof masks, "%s", scratch_path(&s, "masks"));
    esa_ctx *ctx = context(2);
    esa_model *model = open_model(ctx);
    esa_frames *frames, *dense;
    esa_generate_params p = tiny();
    p.height = p.width = 64;
    assert_int_equal(esa_generate(model, &dense, &p, NULL), ESA_OK);
    p.session.mode = ESA_SESSION_RECORD;
    p.session.select.block_q = p.session.select.block_k = 16;
    p.record = recording;
    for (int i = 0; i < 2; i++) { /* the second adds to the first; recording runs dense */
        if (esa_generate(model, &frames, &p, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
        esa_metrics m = { .struct_size = sizeof m };
        assert_int_equal(esa_frames_compare(ctx, &m, dense, frames), ESA_OK);
        assert_true(isinf(m.psnr));
        esa_frames_free(frames);
    }
    const char *list[] = { recording };
    if (esa_mask_file_build(ctx, masks, list, 1, NULL) != ESA_OK)
        fail_msg("%s", esa_ctx_error(ctx));
    p.record = NULL;
    p.masks = masks;
    p.session.mode = ESA_SESSION_CACHED;
    p.session.select.budget = 0.5;
    p.session.warmup_frac = 0.2;
    esa_generate_stats stats = { .struct_size = sizeof stats };
    if (esa_generate(model, &frames, &p, &stats) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    assert_true(stats.session.masks_loaded > 0 && stats.session.sparse_calls > 0 &&
                fabs(stats.session.density - 0.5) < 0.1);
    esa_frames_free(frames);
    p.width = 32;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_MISMATCH, NULL);
    esa_frames_free(dense);
    esa_model_free(model);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* esa_generate_resolve gives the values that esa_generate then uses. */
static void says_what_would_run(void **state)
{
    (void)state;
    esa_ctx *ctx = context(1);
    esa_model *model = open_model(ctx);
    esa_model_info info = { .struct_size = sizeof info };
    int64_t tokens = 0;
    assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
    esa_generate_params p = esa_generate_params_default();
    assert_int_equal(esa_generate_resolve(model, &p, NULL), ESA_OK);
    assert_int_equal(p.frames, info.frames);
    assert_int_equal(p.height, info.height);
    assert_int_equal(p.width, info.width);
    assert_int_equal(p.steps, info.steps);
    assert_true(p.guidance == info.guidance);
    assert_int_equal(p.session.select.block_q, 0); /* dense: there is no selection */

    p = tiny();
    p.frames = 4; /* rounded down */
    p.prompt = NULL;
    p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 0);
    p.session.select.layout.order = ESA_ORDER_DEFAULT;
    assert_int_equal(esa_generate_resolve(model, &p, &tokens), ESA_OK);
    assert_int_equal(p.frames, 3);
    assert_int_equal(tokens, 2 * 4 * 4);
    assert_int_equal(p.session.select.block_q, 256);
    assert_int_equal(p.session.select.block_k, 128);
    assert_int_equal(p.session.select.layout.order, ESA_ORDER_RASTER);
    assert_true(p.session.select.scale == 0);
    const int32_t *grid = p.session.select.layout.grid_q;
    assert_true(grid[0] == 2 && grid[1] == 4 && grid[2] == 4);
    assert_int_equal(p.session.branches, p.guidance > 1 ? 2 : 1);
    p.prompt = "a red ball";
    p.session.select.block_q = p.session.select.block_k = 16;
    p.session.warmup_frac = 0;
    esa_frames *frames;
    esa_generate_stats stats = { .struct_size = sizeof stats };
    assert_int_equal(esa_generate(model, &frames, &p, &stats), ESA_OK);
    assert_int_equal(stats.tokens, tokens);
    assert_int_equal(stats.frames, p.frames);
    esa_frames_free(frames);

    esa_generate_params before = p;
    p.height = before.height = 33;
    assert_int_equal(esa_generate_resolve(model, &p, &tokens), ESA_ERR_ARGUMENT);
    assert_non_null(strstr(esa_ctx_error(ctx), "height"));
    p.height = before.height = 32;
    p.session.select.block_q = before.session.select.block_q = 17;
    assert_int_equal(esa_generate_resolve(model, &p, &tokens), ESA_ERR_UNSUPPORTED);
    assert_memory_equal(&p, &before, sizeof p);
    assert_int_equal(esa_generate_resolve(model, NULL, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_generate_resolve(NULL, &p, NULL), ESA_ERR_ARGUMENT);
    esa_model_free(model);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(says_what_would_run), cmocka_unit_test(like_diffusers),
        cmocka_unit_test(described),           cmocka_unit_test(refusals),
        cmocka_unit_test(decoder_too_large),   cmocka_unit_test(progress_and_cancel),
        cmocka_unit_test(cancel_loading),      cmocka_unit_test(not_finite),
        cmocka_unit_test(out_of_memory),       cmocka_unit_test(record_then_cached),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
