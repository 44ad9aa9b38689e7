/* test_load.c - reads videos from files: what our writers write comes back, cut and damaged files
 * are refused with a message, a failed allocation leaks nothing. tests/cli/check_export.py has
 * pictures of other programs.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_tensors.h"
#include "esa/esa_video.h"
#include "media/frames.h"

/* x265 keeps a copy of its settings when it is closed. The leak checker must ignore it. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libx265\n"; }

enum { COUNT = 3, H = 14, W = 18, SIZE = H * W * 3 };

static esa_ctx *context(void)
{
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    return ctx;
}

/* Smooth, so that lossy formats can keep it. */
static esa_frames *clip(esa_ctx *ctx, int32_t count, int32_t height, int32_t width, double fps)
{
    esa_frames *f;
    uint8_t *rgb = malloc((size_t)(count * height * width * 3));
    assert_non_null(rgb);
    for (int64_t i = 0; i < (int64_t)count * height * width; i++) {
        const double x = (double)(i % width), y = (double)(i / width % height),
                     t = (double)(i / width / height);
        rgb[3 * i] = (uint8_t)(127 + 100 * sin(0.2 * x + 0.4 * t));
        rgb[3 * i + 1] = (uint8_t)(127 + 100 * cos(0.15 * y - 0.3 * t));
        rgb[3 * i + 2] = (uint8_t)(127 + 60 * sin(0.1 * (x + y)));
    }
    assert_int_equal(esa_frames_create(ctx, &f, rgb, count, height, width, fps), ESA_OK);
    free(rgb);
    return f;
}

static esa_frames_info info_of(const esa_frames *f)
{
    esa_frames_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_frames_get_info(f, &info), ESA_OK);
    return info;
}

/* The largest difference between two videos of the same size. */
static int worst(const esa_frames *a, const esa_frames *b)
{
    const esa_frames_info x = info_of(a), y = info_of(b);
    int most = 0;
    assert_true(x.frames == y.frames && x.height == y.height && x.width == y.width);
    for (int64_t i = 0; i < (int64_t)x.frames * x.height * x.width * 3; i++)
        most = abs(x.rgb[i] - y.rgb[i]) > most ? abs(x.rgb[i] - y.rgb[i]) : most;
    return most;
}

static void there_and_back(void **state)
{
    /* The conversion of Y4M to limited range and back loses less than a level each way in luma, and
     * twice that in blue. */
    static const struct {
        const char *name;
        int32_t codec, pixels;
        int most;
        double fps;
    } cases[] = {
        { "a.npy", 0, ESA_PIXELS_U8, 0, 16 },
        { "a.npy", 0, ESA_PIXELS_F32, 0, 16 },
        { "a.npy", 0, ESA_PIXELS_F16, 0, 16 },
        { "a.safetensors", 0, ESA_PIXELS_U8, 0, 12.5 },
        { "a.safetensors", 0, ESA_PIXELS_F32, 0, 12.5 },
        { "a.safetensors", 0, ESA_PIXELS_F16, 0, 12.5 },
        { "out/", 0, 0, 0, 16 },
        { "a.y4m", 0, 0, 3, 12.5 },
        { "a.mp4", ESA_CODEC_LOSSLESS, 0, 0, 12.5 },
    };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context();
    esa_frames *f = clip(ctx, COUNT, H, W, 12.5), *back;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        esa_save_params p = esa_save_params_default();
        p.codec = cases[i].codec;
        p.pixels = cases[i].pixels;
        const esa_status saved = esa_frames_save(ctx, f, scratch_path(&s, cases[i].name), &p);
        if (saved == ESA_ERR_UNSUPPORTED) {
            print_message("%s\n", esa_ctx_error(ctx));
            continue;
        } /* no FFmpeg, or no libx264 in it */
        assert_int_equal(saved, ESA_OK);
        esa_frames_info peek = { .struct_size = sizeof peek };
        if (esa_frames_peek(ctx, &peek, scratch_path(&s, cases[i].name), NULL) != ESA_OK)
            fail_msg("%s", esa_ctx_error(ctx));
        assert_true(peek.frames == COUNT && peek.height == H && peek.width == W &&
                    peek.rgb == NULL);
        if (esa_frames_load(ctx, &back, scratch_path(&s, cases[i].name), NULL) != ESA_OK)
            fail_msg("%s", esa_ctx_error(ctx));
        if (worst(f, back) > cases[i].most)
            fail_msg("%s: a pixel differs by %d, at most %d", cases[i].name, worst(f, back),
                     cases[i].most);
        assert_true(fabs(info_of(back).fps - cases[i].fps) < 1e-9 && peek.fps == info_of(back).fps);
        esa_frames_free(back);
        unlink(scratch_path(&s, cases[i].name));
    }
    esa_load_params p = esa_load_params_default();
    p.fps = 30; /* for files that state none */
    assert_int_equal(esa_frames_load(ctx, &back, scratch_path(&s, "out"), &p), ESA_OK);
    assert_true(info_of(back).fps == 30);
    esa_frames_free(back);
    for (int i = 0; i < COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "out/%05d.png", i);
        unlink(scratch_path(&s, name));
    }
    rmdir(scratch_path(&s, "out"));
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* A video in every codec of this FFmpeg comes back close to the original. */
static void codecs(void **state)
{
    static const char *const names[] = { "auto", "h264", "hevc", "av1", "mpeg4", "lossless" };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context();
    esa_frames *f = clip(ctx, 6, 64, 80, 24000.0 / 1001), *back;
    for (int32_t codec = ESA_CODEC_AUTO; codec <= ESA_CODEC_LOSSLESS; codec++) {
        esa_save_params p = esa_save_params_default();
        esa_metrics m = { .struct_size = sizeof m };
        p.codec = codec;
        const esa_status saved = esa_frames_save(ctx, f, scratch_path(&s, "a.mp4"), &p);
        if (saved == ESA_ERR_UNSUPPORTED) {
            print_message("%s: %s\n", names[codec], esa_ctx_error(ctx));
            assert_int_equal(scratch_count(&s), 0);
#ifdef ESA_HAVE_FFMPEG
            /* an FFmpeg without x265 or aom is one; without any encoder it is none */
            assert_int_not_equal(codec, ESA_CODEC_AUTO);
#endif
            continue;
        }
        if (saved != ESA_OK ||
            esa_frames_load(ctx, &back, scratch_path(&s, "a.mp4"), NULL) != ESA_OK)
            fail_msg("%s: %s", names[codec], esa_ctx_error(ctx));
        assert_int_equal(esa_frames_compare(ctx, &m, f, back), ESA_OK);
        print_message("%s: %.2f dB\n", names[codec], m.psnr);
        /* Smooth pictures at quality 75 give 40 dB or more with every codec; a wrong colour matrix
         * or range gives 25. */
        assert_true(codec == ESA_CODEC_LOSSLESS ? isinf(m.psnr) : m.psnr > 36);
        assert_true(fabs(info_of(back).fps - 24000.0 / 1001) < 1e-6);
        esa_frames_info peek = { .struct_size = sizeof peek };
        assert_int_equal(esa_frames_peek(ctx, &peek, scratch_path(&s, "a.mp4"), NULL), ESA_OK);
        if (codec != ESA_CODEC_AUTO)
            assert_string_equal(peek.codec, codec == ESA_CODEC_LOSSLESS ? "h264" : names[codec]);
        /* lossless H.264 is RGB, which not every browser plays */
        if (codec != ESA_CODEC_AUTO)
            assert_int_equal(peek.plays_in_browsers, codec == ESA_CODEC_H264);
        esa_frames_free(back);
        unlink(scratch_path(&s, "a.mp4"));
    }
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static void batch_and_floats(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context();
    esa_frames *back;
    const int64_t dim[5] = { 1, 1, 2, 2, 3 };
    float x[12] = { 0,       1,      0.5f, 0.25f, 1.0f / 255, 254.0f / 255,
                    -0.001f, 1.001f, 0.1f, 0.2f,  0.3f,       0.4f };
    for (int bad = 0; bad < 3; bad++) {
        esa_tensors_writer *w;
        if (bad) x[3] = bad == 1 ? -1 : NAN;
        assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&s, "a")), ESA_OK);
        assert_int_equal(esa_tensors_writer_metadata(w, "fps", "24"), ESA_OK);
        assert_int_equal(esa_tensors_writer_declare(w, "video", ESA_FILE_F32, 5, dim), ESA_OK);
        assert_int_equal(esa_tensors_writer_data(w, x, sizeof x), ESA_OK);
        assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
        esa_tensors_writer_free(w);
        const esa_status status = esa_frames_load(ctx, &back, scratch_path(&s, "a"), NULL);
        if (bad) {
            assert_refused(ctx, status, ESA_ERR_FORMAT, bad == 1 ? "-1" : "nan", "[0, 1]", NULL);
            assert_null(back);
            continue;
        }
        /* 127.5 goes to even */
        static const uint8_t want[12] = { 0, 255, 128, 64, 1, 254, 0, 255, 26, 51, 77, 102 };
        if (status != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
        assert_true(info_of(back).frames == 1 && info_of(back).fps == 24);
        for (int i = 0; i < 12; i++)
            if (info_of(back).rgb[i] != want[i])
                fail_msg("element %d: %d, expected %d", i, info_of(back).rgb[i], want[i]);
        esa_frames_free(back);
    }
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* Numbers have a point, whatever the locale is (cmake runs this program in one with a comma). */
static void numbers(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context();
    esa_frames *f = clip(ctx, 1, 4, 4, 23.976), *back;
    esa_tensors *file;
    assert_int_equal(esa_frames_save(ctx, f, scratch_path(&s, "a.safetensors"), NULL), ESA_OK);
    assert_int_equal(esa_tensors_open(ctx, &file, scratch_path(&s, "a.safetensors")), ESA_OK);
    assert_string_equal(esa_tensors_metadata(file, "fps"), "23.976");
    esa_tensors_free(file);
    assert_int_equal(esa_frames_load(ctx, &back, scratch_path(&s, "a.safetensors"), NULL), ESA_OK);
    assert_true(info_of(back).fps == 23.976);
    esa_frames_free(back);
    esa_load_params p = esa_load_params_default();
    p.fps = -1.5;
    assert_refused(ctx, esa_frames_load(ctx, &back, scratch_path(&s, "a.safetensors"), &p),
                   ESA_ERR_ARGUMENT, "fps is -1.5,", NULL);
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* A file cut at any byte, or with any byte changed, gives a message or a video, never a crash. */
static void cut_and_damaged(void **state)
{
    static const char *const names[] = { "a.png", "a.y4m", "a.npy", "a.safetensors" };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context();
    esa_frames *f = clip(ctx, 1, 12, 13, 16), *back;
    for (int n = 0; n < 4; n++) {
        size_t size;
        assert_int_equal(esa_frames_save(ctx, f, scratch_path(&s, names[n]), NULL), ESA_OK);
        uint8_t *bytes = scratch_read(scratch_path(&s, names[n]), &size);
        esa_frames_info info;
        int refused = 0;
        for (size_t cut = 0; cut < size; cut++) {
            uint8_t *part = malloc(cut ? cut : 1); /* exact: a read past it is seen */
            assert_non_null(part);
            memcpy(part, bytes, cut);
            ctx->error[0] = 0;
            const esa_status status = esa_video_read(ctx, &back, &info, names[n], part,
                                                     (int64_t)cut, 16);
            assert_true(status != ESA_OK && !back &&
                        (ctx->error[0] || status == ESA_ERR_UNSUPPORTED));
            free(part);
        }
        for (size_t at = 0; at < size; at++) {
            bytes[at] ^= 0x55;
            const esa_status status = esa_video_read(ctx, &back, &info, names[n], bytes,
                                                     (int64_t)size, 16);
            assert_true((status == ESA_OK) == (back != NULL));
            refused += status != ESA_OK;
            if (status == ESA_OK) esa_frames_free(back);
            bytes[at] ^= 0x55;
        }
        if (n == 0) assert_int_equal(refused, size); /* check sums cover every byte of a PNG */
        assert_true(refused > 0);
        free(bytes);
    }
    esa_frames_free(f);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static void refusals(void **state)
{
    (void)state;
    scratch s = scratch_make();
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_frames *f = clip(ctx, 2, 12, 12, 16), *back;
    esa_frames_info info = { .struct_size = sizeof info };
    assert_refused(ctx, esa_frames_load(ctx, &back, scratch_path(&s, "none.mp4"), NULL), ESA_ERR_IO,
                   "none.mp4", "No such file", NULL);
    assert_refused(ctx, esa_frames_load(ctx, &back, s.dir, NULL), ESA_ERR_FORMAT, "without PNG",
                   NULL);
    scratch_write(scratch_path(&s, "empty.mp4"), "", 0);
    assert_refused(ctx, esa_frames_load(ctx, &back, scratch_path(&s, "empty.mp4"), NULL),
                   ESA_ERR_FORMAT, "empty", NULL);
    scratch_write(scratch_path(&s, "text.mp4"), "this is no video at all, only a line of text", 44);
    assert_int_not_equal(esa_frames_load(ctx, &back, scratch_path(&s, "text.mp4"), NULL), ESA_OK);
    assert_true(strstr(esa_ctx_error(ctx), "text.mp4") != NULL && !back);
    scratch_write(scratch_path(&s, "a.pt"), "PK\x03\x04 a torch file", 18);
    assert_refused(ctx, esa_frames_load(ctx, &back, scratch_path(&s, "a.pt"), NULL), ESA_ERR_FORMAT,
                   "ZIP", "safetensors", NULL);
    assert_refused(ctx, esa_frames_load(ctx, NULL, "a", NULL), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_frames_load(ctx, &back, "", NULL), ESA_ERR_ARGUMENT, "name", NULL);
    esa_load_params p = esa_load_params_default();
    p.fps = -1;
    assert_refused(ctx, esa_frames_load(ctx, &back, "a", &p), ESA_ERR_ARGUMENT, "fps", NULL);
    p.struct_size = 1;
    assert_refused(ctx, esa_frames_load(ctx, &back, "a", &p), ESA_ERR_VERSION,
                   "esa_load_params has struct_size 1", NULL);
    info.struct_size = 0;
    assert_refused(ctx, esa_frames_peek(ctx, &info, "a", NULL), ESA_ERR_VERSION,
                   "esa_frames_info has struct_size 0", NULL);
    esa_save_params q = esa_save_params_default();
    q.codec = 99;
    assert_refused(ctx, esa_frames_save(ctx, f, scratch_path(&s, "a.mp4"), &q), ESA_ERR_ARGUMENT,
                   "codec is 99", NULL);
    q.codec = 0;
    q.pixels = -1;
    assert_refused(ctx, esa_frames_save(ctx, f, scratch_path(&s, "a.npy"), &q), ESA_ERR_ARGUMENT,
                   "pixels is -1", NULL);
    /* Every allocation of every reader and tensor writer fails once. */
    static const char *const names[] = { "a.npy", "a.safetensors", "a.y4m", "out/" };
    for (int n = 0; n < 4; n++) {
        for (int left = 0;; left++) {
            c.left = left;
            const esa_status status = esa_frames_save(ctx, f, scratch_path(&s, names[n]), NULL);
            if (status == ESA_OK) break;
            assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
            assert_true(left < 40);
        }
        for (int left = 0;; left++) {
            c.left = left;
            const esa_status status = esa_frames_load(ctx, &back, scratch_path(&s, names[n]), NULL);
            if (status == ESA_OK) break;
            assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
            assert_null(back);
            assert_true(left < 40);
        }
        c.left = -1;
        esa_frames_free(back);
    }
    unlink(scratch_path(&s, "out/00000.png"));
    scratch_write(scratch_path(&s, "out/00002.png"), "\x89PNG\r\n\x1a\nrest", 12);
    assert_refused(ctx, esa_frames_load(ctx, &back, scratch_path(&s, "out"), NULL), ESA_ERR_FORMAT,
                   "00002.png", NULL);
    unlink(scratch_path(&s, "out/00001.png"));
    unlink(scratch_path(&s, "out/00002.png"));
    rmdir(scratch_path(&s, "out"));
    esa_frames_free(f);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_and_back),   cmocka_unit_test(codecs),
        cmocka_unit_test(batch_and_floats), cmocka_unit_test(numbers),
        cmocka_unit_test(cut_and_damaged),  cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
