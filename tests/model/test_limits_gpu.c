/* test_limits_gpu.c - the memory of a GPU: any limit above one that works works too, the limit
 * holds, the decoder takes tiles when it must, the text encoder stays while there is room, and the
 * plan is said before the work.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/gpu_clip.h"

#include <math.h>

enum { MIB = 1 << 20 };

static void set_number(const char *name, int64_t number)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)number);
    setenv(name, text, 1);
}

static int begin(void **state)
{
    (void)state;
    setenv("ESA_STAND_IN_OPEN", "1", 1); /* test_pipeline_gpu guards the memory */
    return 0;
}

/* A sparse clip with what takes memory: masks that are kept, a step cache, guidance. */
static esa_generate_params rich(void)
{
    esa_generate_params p = video(32, 2);
    p.frames = 1;
    p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 0);
    p.session.warmup_frac = 0;
    p.session.refresh_every = 2;
    p.cache = 100;
    return p;
}

/* Opens wan-tiny with a limit and makes a clip; NULL: out of memory. No more than the limit without
 * the driver's share can be allocated meanwhile. */
static esa_frames *within(int64_t limit, const esa_generate_params *p, esa_generate_stats *stats)
{
    esa_ctx *ctx = context();
    esa_model *model = NULL;
    esa_frames *frames = NULL;
    *stats = (esa_generate_stats){ .struct_size = sizeof *stats };
    set_number("ESA_STAND_IN_MOST", limit - limit / 16);
    esa_status status = open_on(ctx, &model, ESA_DEVICE_CUDA, limit);
    if (!status) status = esa_generate(model, &frames, p, stats);
    if (status && (status != ESA_ERR_MEMORY || strstr(esa_ctx_error(ctx), "GPU 0 has less")))
        fail_msg("limit %lld: %s", (long long)limit, esa_ctx_error(ctx));
    unsetenv("ESA_STAND_IN_MOST");
    esa_model_free(model);
    esa_ctx_free(ctx);
    return frames;
}

/* Every limit gives the same pixels or one message, and all above the first that works work. */
static void monotone(void **state)
{
    (void)state;
    if (!on_stand_in()) skip(); /* a real GPU cannot be told to refuse */
    const esa_generate_params p = rich();
    esa_generate_stats stats;
    esa_frames *want = within(64 * MIB, &p, &stats);
    esa_ctx *ctx = context();
    assert_non_null(want);
    assert_int_equal(stats.vae_tile, 0);
    int32_t worked = 0, refused = 0;
    for (int64_t limit = 13 * MIB; limit < 26 * MIB; limit += MIB * 5 / 8) {
        esa_frames *frames = within(limit, &p, &stats);
        print_message("%.1f MiB: %s\n", (double)limit / MIB, frames ? "works" : "too little");
        assert_true(frames || !worked);
        worked += frames != NULL;
        refused += frames == NULL;
        if (frames && !stats.vae_tile) assert_true(isinf(psnr(ctx, want, frames)));
        esa_frames_free(frames);
    }
    assert_true(worked > 4 && refused > 2);
    esa_frames_free(want);
    esa_ctx_free(ctx);
}

/* Masks of a file are in the account too, with the scratch of the calls that use them. */
static void cached(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    scratch dir = scratch_make();
    char recording[640], masks[640];
    const char *const list[] = { recording };
    snprintf(recording, sizeof recording, "%s", scratch_path(&dir, "recording"));
    snprintf(masks, sizeof masks, "%s", scratch_path(&dir, "masks"));
    esa_ctx *ctx = context();
    esa_generate_stats stats;
    esa_generate_params p = video(64, 2);
    p.session = esa_session_params_recommended(ESA_SESSION_RECORD, ESA_SELECT_ENTROPY, 0);
    p.session.select.block_q = p.session.select.block_k = 16;
    p.record = recording;
    esa_frames_free(within(40 * MIB, &p, &stats));
    if (esa_mask_file_build(ctx, masks, list, 1, NULL)) fail_msg("%s", esa_ctx_error(ctx));
    p.record = NULL;
    p.masks = masks;
    p.session.mode = ESA_SESSION_CACHED;
    p.session.warmup_frac = 0.2; /* step 0, as the masks say */
    esa_frames *want = NULL;
    for (int64_t limit = 40 * MIB; limit > 20 * MIB; limit -= 18 * MIB) {
        esa_frames *frames = within(limit, &p, &stats);
        assert_non_null(frames);
        assert_true(stats.session.masks_loaded > 0 && stats.session.sparse_calls > 0);
        if (want) assert_true(isinf(psnr(ctx, want, frames)));
        esa_frames_free(want);
        want = frames;
    }
    esa_frames_free(want);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
}

/* ---------------------------------------------------------------- the plan in words */

static void note(void *user, const char *line)
{
    char *text = user;
    const size_t used = strlen(text);
    snprintf(text + used, 900 - used, "%s\n", line);
}

static void stop_if_silent(const char *text, const char *word)
{
    if (!strstr(text, word)) fail_msg("\"%s\" should mention \"%s\"", text, word);
}

/* It is said after everything is known, and agrees with what the model says afterwards. */
static int32_t said_before(void *user, const esa_progress *p)
{
    if (p->stage == ESA_STAGE_DENOISE) assert_true(strlen(user) > 0);
    return 0;
}

static void said(void **state)
{
    (void)state;
    for (int32_t tight = 0; tight < 2; tight++) {
        char text[900] = "", blocks[64];
        esa_ctx *ctx = context();
        esa_model *model = opened(ctx, ESA_DEVICE_CUDA, tight ? tight_limit() : 0);
        esa_model_info info = { .struct_size = sizeof info };
        esa_generate_stats stats;
        esa_generate_params p = rich();
        p.say = note;
        p.say_user = text;
        p.progress = said_before;
        p.progress_user = text;
        esa_frames_free(made(ctx, model, &p, &stats));
        assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
        print_message("%s", text);
        stop_if_silent(text, "weights   transformer 0.01 GiB: ");
        snprintf(blocks, sizeof blocks, "%d of 8 blocks stay on the GPU", info.resident_blocks);
        stop_if_silent(text, info.streamed_bytes ? blocks : "all on the GPU");
        if (info.streamed_bytes) stop_if_silent(text, "copies    ");
        stop_if_silent(text, "memory    0.");
        stop_if_silent(text, "for the decoder");
        if (on_stand_in()) assert_int_equal(info.streamed_bytes > 0, tight);
        esa_model_free(model);
        esa_ctx_free(ctx);
    }
}

/* ---------------------------------------------------------------- the text encoder */

static int32_t count_text(void *user, const esa_progress *p)
{
    *(int32_t *)user += p->stage == ESA_STAGE_TEXT;
    return 0;
}

/* It stays for the next prompt where there is room, and leaves for blocks of the transformer where
 * there is not. The pixels are the same. */
static void text_stays(void **state)
{
    (void)state;
    esa_frames *frames[2][2];
    for (int32_t tight = 0; tight < 2; tight++) {
        esa_ctx *ctx = context();
        esa_model *model = opened(ctx, ESA_DEVICE_CUDA, tight ? tight_limit() : 0);
        for (int32_t i = 0; i < 2; i++) {
            esa_generate_stats stats;
            esa_generate_params p = rich();
            esa_model_info info = { .struct_size = sizeof info };
            if (i) p.prompt = "two cubes";
            frames[tight][i] = made(ctx, model, &p, &stats);
            assert_int_equal(esa_model_get_info(model, &info), ESA_OK);
            if (!tight || on_stand_in()) assert_int_equal(info.parameters[2] > 0, !tight);
        }
        /* the last prompt again: the model still knows it, and opens no text encoder */
        esa_generate_params p = rich();
        esa_generate_stats stats;
        esa_frames *again;
        int32_t loads = 0;
        p.prompt = "two cubes";
        p.progress = count_text;
        p.progress_user = &loads;
        again = made(ctx, model, &p, &stats);
        assert_true(isinf(psnr(ctx, frames[tight][1], again)));
        assert_int_equal(loads, 2); /* one for each branch, none for layers */
        esa_frames_free(again);
        esa_model_free(model);
        esa_ctx_free(ctx);
    }
    esa_ctx *ctx = context();
    for (int32_t i = 0; i < 2; i++) assert_true(isinf(psnr(ctx, frames[0][i], frames[1][i])));
    for (int32_t i = 0; i < 4; i++) esa_frames_free(frames[i / 2][i % 2]);
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- tiles of the decoder */

/* Whole frames while they fit, then tiles: the pixels are those of tiles that were asked for. */
static void tiles(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    esa_generate_params p = video(128, 1);
    esa_generate_stats stats;
    esa_frames *tiled = NULL;
    p.frames = 1;
    for (int64_t limit = 32 * MIB; limit > 20 * MIB && !tiled; limit -= 6 * MIB) {
        esa_frames *frames = within(limit, &p, &stats);
        print_message("%.0f MiB: %s, tiles of %d\n", (double)limit / MIB,
                      frames ? "works" : "too little", (int)stats.vae_tile);
        assert_non_null(frames);
        if (stats.vae_tile)
            tiled = frames;
        else
            esa_frames_free(frames);
    }
    assert_non_null(tiled);
    assert_int_equal(stats.vae_tile, 64);
    p.vae_tile = 64;
    esa_ctx *ctx = context();
    esa_frames *asked = within(256 * MIB, &p, &stats);
    assert_true(isinf(psnr(ctx, asked, tiled)));
    esa_frames_free(asked);
    esa_frames_free(tiled);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(monotone),   cmocka_unit_test(cached), cmocka_unit_test(said),
        cmocka_unit_test(text_stays), cmocka_unit_test(tiles),
    };
    return cmocka_run_group_tests(tests, begin, NULL);
}
