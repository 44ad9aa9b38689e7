/* test_preview.c - the previews of esa_generate: when they come, what they show, and that they
 * change nothing.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_video.h"

#define STEPS 12

static esa_model *open_model(esa_ctx *ctx, int32_t parts)
{
    static char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    esa_model_params p = esa_model_params_default();
    esa_model *model;
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    p.parts = parts;
    if (esa_model_open(ctx, &model, path, &p) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return model;
}

static esa_generate_params video(void)
{
    esa_generate_params p = esa_generate_params_default();
    p.prompt = "a red ball rolls to the right over a blue floor";
    p.frames = 17;
    p.height = p.width = 64;
    p.steps = STEPS;
    return p;
}

typedef struct seen {
    esa_ctx *ctx;
    esa_model *model;
    int count, step[STEPS], progress_stage;
    int32_t height, width;
    uint8_t *rgb[STEPS]; /* owned */
} seen;

static void on_preview(void *user, const esa_preview *p)
{
    seen *s = user;
    esa_frames *frames;
    const esa_generate_params tiny = video();
    assert_int_equal(p->struct_size, sizeof *p);
    assert_int_equal(p->steps, STEPS);
    assert_true(s->count < STEPS);
    s->height = p->height;
    s->width = p->width;
    s->step[s->count] = p->step;
    const size_t bytes = (size_t)p->height * (size_t)p->width * 3;
    s->rgb[s->count] = malloc(bytes);
    memcpy(s->rgb[s->count++], p->rgb, bytes);
    assert_int_equal(esa_generate(s->model, &frames, &tiny, NULL), ESA_ERR_STATE);
}

static int32_t on_progress(void *user, const esa_progress *p)
{
    seen *s = user;
    assert_true(p->stage >=
                s->progress_stage); /* the preview's decoding is no stage of the video */
    s->progress_stage = p->stage;
    return 0;
}

static void forget(seen *s)
{
    for (int i = 0; i < s->count; i++) free(s->rgb[i]);
    s->count = 0;
}

/* Root mean square difference between a preview and the frame of the video that it stands for,
 * pooled to its size. */
static double distance(const seen *s, int i, const esa_frames *frames)
{
    esa_frames_info f = { .struct_size = sizeof f };
    double sum = 0;
    assert_int_equal(esa_frames_get_info(frames, &f), ESA_OK);
    const int32_t pool = f.height / s->height, frame = f.frames / 2;
    const uint8_t *rgb = f.rgb + (int64_t)frame * f.height * f.width * 3;
    for (int32_t y = 0; y < s->height; y++)
        for (int32_t x = 0; x < s->width; x++)
            for (int32_t c = 0; c < 3; c++) {
                double mean = 0;
                for (int32_t k = 0; k < pool * pool; k++)
                    mean += rgb[((y * pool + k / pool) * f.width + x * pool + k % pool) * 3 + c];
                const double d = s->rgb[i][(y * s->width + x) * 3 + c] - mean / (pool * pool);
                sum += d * d;
            }
    return sqrt(sum / (3.0 * s->height * s->width));
}

static esa_frames *made(esa_ctx *ctx, esa_model *model, const esa_generate_params *p)
{
    esa_frames *frames;
    if (esa_generate(model, &frames, p, NULL) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return frames;
}

/* The pictures sharpen, at full size and pooled, with and without a step cache. The video has the
 * same bits as one without them. */
static void sharpen(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 2);
    seen s = { ctx, open_model(ctx, ESA_PART_ALL), 0, { 0 }, 0, 0, 0, { NULL } };
    esa_generate_params p = video();
    for (int cached = 0; cached < 2; cached++) {
        p.cache = cached ? 0.05 : 0;
        p.preview = NULL;
        esa_frames *plain = made(ctx, s.model, &p);
        for (int pooled = 0; pooled < 2; pooled++) {
            esa_metrics same = { .struct_size = sizeof same };
            p.preview = on_preview;
            p.preview_user = p.progress_user = &s;
            p.progress = on_progress;
            p.preview_every = 3;
            p.preview_side = pooled ? 32 : 0;
            s.progress_stage = 0;
            esa_frames *frames = made(ctx, s.model, &p);
            assert_int_equal(s.height, pooled ? 32 : 64);
            assert_int_equal(s.width, pooled ? 32 : 64);
            assert_int_equal(s.count, 3); /* not behind the last step */
            for (int i = 0; i < 3; i++) assert_int_equal(s.step[i], 3 * (i + 1));
            assert_int_equal(esa_frames_compare(ctx, &same, plain, frames), ESA_OK);
            assert_true(isinf(same.psnr));
            const double first = distance(&s, 0, frames), last = distance(&s, 2, frames);
            print_message("distance %.1f after step 3, %.1f after step 9\n", first, last);
            /* The last one is near the video; what is left is the steps that follow, the pooling
             * and the decoder, which saw no frame before this one. Noise alone is above 70. */
            assert_true(last < first && last < 35);
            forget(&s);
            esa_frames_free(frames);
            p.progress = NULL;
        }
        esa_frames_free(plain);
    }
    esa_model_free(s.model);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
}

static void refusals(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_model *model = open_model(ctx, ESA_PART_ALL);
    esa_generate_params p = video();
    esa_frames *frames;
    p.preview = on_preview;
    p.preview_every = -1;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT,
                   "preview_every is -1", NULL);
    p.preview_every = 1;
    p.preview_side = 31;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_ARGUMENT,
                   "preview_side is 31, expected 32 .. 1024", NULL);
    esa_model_free(model);
    model = open_model(ctx, ESA_PART_ALL & ~ESA_PART_VAE);
    p.preview_side = 0;
    p.decode = 0;
    assert_refused(ctx, esa_generate(model, &frames, &p, NULL), ESA_ERR_STATE,
                   "opened without its VAE", NULL);
    esa_model_free(model);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(sharpen), cmocka_unit_test(refusals) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
