/* fuzz_media.c - reads any bytes as a video. Each input is refused with a message, or loads with
 * sizes and pixels that agree. Covers PNG, Y4M, NPY and safetensors; not what FFmpeg reads.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of a file, then one byte that says how they are used:
 *   0  as a file
 *   1  as a PNG whose check sums are corrected first, so that the code behind them is reached
 *   2  as a PNG's header (13 bytes), 8 colours, and uncompressed rows: compressed and put together
 *      here, so that filters, depths and interlacing are reached */
#include "fuzz/fuzz_common.h"
#include "media/frames.h"

#include <zlib.h>

enum { FILE_BYTES = 0, PNG_SUMS, PNG_ROWS, USES };
#define LONGEST 65536

static void put32(uint8_t *at, uint32_t x)
{
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(x >> (24 - 8 * i));
}

/* The sizes with and without pixels must agree, and every pixel must be readable. */
static void as_file(const uint8_t *bytes, size_t size)
{
    esa_frames_info info = { 0 }, peek = { 0 };
    esa_frames *frames = NULL;
    fuzz_ctx->error[0] = 0;
    const esa_status status = esa_video_read(fuzz_ctx, &frames, &info, "fuzzed", bytes,
                                             (int64_t)size, 16);
    if (status != ESA_OK) {
        must(!frames, "a refusal has no object");
        must(fuzz_ctx->error[0] || status == ESA_ERR_UNSUPPORTED, "a refusal has a message");
        must(status == ESA_ERR_FORMAT || status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_DTYPE ||
                 status == ESA_ERR_MEMORY,
             "of the format");
        return;
    }
    must(esa_video_read(fuzz_ctx, NULL, &peek, "fuzzed", bytes, (int64_t)size, 16) == ESA_OK,
         "what loads can be looked at");
    must(peek.frames == info.frames && peek.height == info.height && peek.width == info.width &&
             peek.fps == info.fps,
         "and has the same sizes");
    must(frames->count == info.frames && frames->height == info.height &&
             frames->width == info.width,
         "as the object");
    must(frames->fps >= 0.01 && frames->fps <= 1000, "a rate that makes sense");
    volatile uint8_t touched = 0;
    const int64_t count = (int64_t)frames->count * frames->height * frames->width * 3;
    for (int64_t i = 0; i < count; i++) touched = (uint8_t)(touched ^ frames->rgb[i]);
    esa_frames_free(frames);
}

static size_t chunk(uint8_t *at, const char *kind, size_t count)
{
    put32(at, (uint32_t)count);
    memcpy(at + 4, kind, 4);
    put32(at + 8 + count, (uint32_t)crc32(0, at + 4, (uInt)count + 4));
    return count + 12;
}

static void right_sums(uint8_t *bytes, size_t size)
{
    for (size_t at = 8; size >= 12 && at <= size - 12;) {
        const size_t count = (size_t)bytes[at] << 24 | (size_t)bytes[at + 1] << 16 |
                             (size_t)bytes[at + 2] << 8 | bytes[at + 3];
        if (count > size - at - 12) return;
        put32(bytes + at + 8 + count, (uint32_t)crc32(0, bytes + at + 4, (uInt)count + 4));
        at += 12 + count;
    }
}

static void from_rows(const uint8_t *bytes, size_t size)
{
    static uint8_t file[2 * LONGEST + 1024];
    uLongf packed = 2 * LONGEST;
    if (size < 13 + 24) return;
    size_t at = 8;
    memcpy(file, "\x89PNG\r\n\x1a\n", 8);
    memcpy(file + at + 8, bytes, 13);
    at += chunk(file + at, "IHDR", 13);
    if (bytes[9] & 2) { /* a palette is allowed in pictures with colours only */
        memcpy(file + at + 8, bytes + 13, 24);
        at += chunk(file + at, "PLTE", 24);
    }
    must(compress(file + at + 8, &packed, bytes + 37, (uLong)size - 37) == Z_OK, "rows compress");
    at += chunk(file + at, "IDAT", (size_t)packed);
    at += chunk(file + at, "IEND", 0);
    as_file(file, at);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t length;
    if (size < 9) return 0;
    memcpy(&length, data, 8);
    if (length > size - 9 || length > LONGEST) return 0;
    uint8_t *bytes = malloc(length ? length : 1); /* exactly as long: a read past its end is seen */
    if (!bytes) return 0;
    memcpy(bytes, data + 8, length);
    switch (data[8 + length] % USES) {
    case PNG_SUMS:
        right_sums(bytes, length);
        as_file(bytes, length);
        break;
    case PNG_ROWS: from_rows(bytes, length); break;
    default: as_file(bytes, length);
    }
    free(bytes);
    return 0;
}

static int seed_number;

static int save_seed(const char *folder, const void *bytes, size_t size, uint8_t use)
{
    char path[1024];
    const uint64_t length = size;
    snprintf(path, sizeof path, "%s/seed%d", folder, seed_number++);
    FILE *f = fopen(path, "wb");
    if (!f) return 1;
    const int bad = fwrite(&length, 1, 8, f) != 8 || fwrite(bytes, 1, size, f) != size ||
                    fwrite(&use, 1, 1, f) != 1;
    return fclose(f) != 0 || bad;
}

/* A file that esa_frames_save wrote becomes a seed. */
static int save_written(const char *folder, const esa_frames *frames, const char *name,
                        int32_t pixels, uint8_t use)
{
    char path[1024];
    uint8_t bytes[8000];
    esa_save_params p = esa_save_params_default();
    p.pixels = pixels;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (esa_frames_save(fuzz_ctx, frames, path, &p) != ESA_OK) return 1;
    FILE *f = fopen(path, "rb");
    if (!f) return 1;
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    unlink(path);
    return save_seed(folder, bytes, n, use);
}

static int make_seeds(const char *folder)
{
    static const char *const lines[] = {
        "YUV4MPEG2 W2 H2 F16:1 C420jpeg\nFRAME\nabcdef",
        "YUV4MPEG2 W3 H1 F30000:1001 Ip A1:1 C422 XCOLORRANGE=FULL\nFRAME Ix\nabcdefg",
        "YUV4MPEG2 W2 H1 Cmono\nFRAME\nab", "YUV4MPEG2 W1 H1 C444alpha\nFRAME\nabcd"
    };
    uint8_t rgb[2 * 4 * 5 * 3], rows[13 + 24 + 64];
    esa_frames *two = NULL, *one = NULL;
    for (size_t i = 0; i < sizeof rgb; i++) rgb[i] = (uint8_t)(i * 37);
    int bad = esa_frames_create(fuzz_ctx, &two, rgb, 2, 4, 5, 16) != ESA_OK ||
              esa_frames_create(fuzz_ctx, &one, rgb, 1, 4, 5, 16) != ESA_OK;
    bad = bad || save_written(folder, one, "a.png", 0, FILE_BYTES) ||
          save_written(folder, one, "a.png", 0, PNG_SUMS) ||
          save_written(folder, two, "a.y4m", 0, FILE_BYTES) ||
          save_written(folder, two, "a.npy", ESA_PIXELS_U8, FILE_BYTES) ||
          save_written(folder, two, "a.npy", ESA_PIXELS_F16, FILE_BYTES) ||
          save_written(folder, two, "a.safetensors", ESA_PIXELS_F32, FILE_BYTES);
    for (int i = 0; i < 4 && !bad; i++)
        bad = save_seed(folder, lines[i], strlen(lines[i]), FILE_BYTES);
    /* depth, colour type, interlaced, bytes of a row. Interlaced, 2 x 2 pixels come in three
     * passes: 1 pixel, 1 pixel, a row of 2. */
    static const uint8_t kinds[][4] = { { 1, 0, 0, 1 }, { 8, 2, 0, 6 },   { 2, 3, 0, 1 },
                                        { 8, 4, 0, 4 }, { 16, 6, 0, 16 }, { 16, 0, 0, 4 },
                                        { 8, 2, 1, 3 } };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0] && !bad; i++) {
        memset(rows, 1, sizeof rows);
        memcpy(rows, "\0\0\0\2\0\0\0\2", 8);
        rows[8] = kinds[i][0];
        rows[9] = kinds[i][1];
        rows[10] = rows[11] = 0;
        rows[12] = kinds[i][2];
        const size_t line = kinds[i][3];
        bad = save_seed(folder, rows, 37 + (rows[12] ? 3 + 4 * line : 2 * (1 + line)), PNG_ROWS);
    }
    esa_frames_free(one);
    esa_frames_free(two);
    return bad;
}
