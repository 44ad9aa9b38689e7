/* fuzz_movie.c - reads any bytes as a video through FFmpeg (mp4_read.c, movie_input.c). Each input
 * is refused with a message, or loads with sizes and pixels that agree, and no other file is
 * opened. The input is the file itself.
 * SPDX-License-Identifier: Apache-2.0
 *
 * FFmpeg's libraries are those of the system, so only our side is instrumented. Seeds are files of
 * our own writer; tests/fuzz/corpus/fuzz_movie keeps some. */
#include "fuzz/fuzz_common.h"

#include <libavutil/log.h>
#include <libavutil/mem.h>
#include "media/frames.h"

/* A few bytes may ask for pictures of gigabytes. The limits keep a run small; a refusal for memory
 * is a refusal. */
#define MOST (INT64_C(64) << 20)

/* The seeds are encoded, and x265 forgets some parameters of a video that has ended. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libx265\n"; }

static void *small_alloc(void *user, uint64_t bytes)
{
    (void)user;
    return bytes <= (uint64_t)MOST ? aligned_alloc(64, (size_t)bytes) : NULL;
}

static void small_free(void *user, void *ptr, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const esa_allocator small = { small_alloc, small_free, NULL };
    esa_frames_info info = { .struct_size = sizeof info }, peek = { .struct_size = sizeof peek };
    esa_frames *frames = NULL;
    const esa_allocator before = fuzz_ctx->mem;
    av_max_alloc((size_t)MOST);
    fuzz_ctx->mem = small;
    fuzz_ctx->error[0] = 0;
    const esa_status peeked = esa_mp4_read(fuzz_ctx, NULL, &peek, "fuzzed", data, (int64_t)size,
                                           16);
    const esa_status status = esa_mp4_read(fuzz_ctx, &frames, &info, "fuzzed", data, (int64_t)size,
                                           16);
    fuzz_ctx->mem = before;
    must(av_log_get_level() == AV_LOG_INFO, "the log level is as it was");
    if (!peeked)
        must(peek.frames >= 0 && peek.height >= 1 && peek.width >= 1 && peek.fps >= 0.01 &&
                 peek.fps <= 1000,
             "a look gives sizes that make sense");
    if (status) {
        must(!frames, "a refusal has no object");
        must(fuzz_ctx->error[0] != 0, "a refusal has a message");
        must(status == ESA_ERR_FORMAT || status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_MEMORY,
             "of the format");
        return 0;
    }
    must(frames->count >= 1 && frames->height >= 1 && frames->width >= 1 && frames->fps >= 0.01 &&
             frames->fps <= 1000,
         "a video has sizes that make sense");
    volatile uint8_t touched = 0;
    const int64_t count = (int64_t)frames->count * frames->height * frames->width * 3;
    for (int64_t i = 0; i < count; i++) touched = (uint8_t)(touched ^ frames->rgb[i]);
    esa_frames_free(frames);
    return 0;
}

/* One small file of every codec that this FFmpeg writes, a picture, and a list of files. */
static int make_seeds(const char *folder)
{
    static const char list[] = "ffconcat version 1.0\nfile seed0.mp4\n";
    char path[1024];
    uint8_t rgb[2 * 16 * 16 * 3];
    esa_frames *two = NULL, *one = NULL;
    for (size_t i = 0; i < sizeof rgb; i++) rgb[i] = (uint8_t)(i * 3);
    int bad = esa_frames_create(fuzz_ctx, &two, rgb, 2, 16, 16, 16) != ESA_OK ||
              esa_frames_create(fuzz_ctx, &one, rgb, 1, 16, 16, 16) != ESA_OK;
    for (int32_t codec = ESA_CODEC_AUTO; codec <= ESA_CODEC_LOSSLESS && !bad; codec++) {
        esa_save_params p = esa_save_params_default();
        p.codec = codec;
        snprintf(path, sizeof path, "%s/seed%d.mp4", folder, codec);
        const esa_status status = esa_frames_save(fuzz_ctx, two, path, &p);
        bad = status && status != ESA_ERR_UNSUPPORTED;
    }
    snprintf(path, sizeof path, "%s/picture.png", folder);
    bad = bad || esa_frames_save(fuzz_ctx, one, path, NULL) != ESA_OK;
    snprintf(path, sizeof path, "%s/clip.y4m", folder);
    bad = bad || esa_frames_save(fuzz_ctx, two, path, NULL) != ESA_OK;
    snprintf(path, sizeof path, "%s/list", folder);
    FILE *f = bad ? NULL : fopen(path, "wb");
    bad = !f || fwrite(list, 1, sizeof list - 1, f) != sizeof list - 1;
    if (f) bad = fclose(f) != 0 || bad;
    esa_frames_free(one);
    esa_frames_free(two);
    return bad;
}
