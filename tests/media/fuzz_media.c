/* fuzz_media.c - any bytes as a video: refused with a sentence, or everything it says is true. PNG,
 * Y4M, NPY and safetensors, and the unpacker below PNG; FFmpeg's formats are FFmpeg's.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of a file, then one byte that says how they are used:
 *   0  as a file
 *   1  as a PNG whose check sums are put right first: what lies behind them is reached
 *   2  as a zlib stream
 *   3  as plain bytes: packed and unpacked again they must be the same
 *   4  as a PNG's header (13 bytes), 8 colours, and unpacked rows: packed and put together here, so
 * that filters and depths are reached */
#include "fuzz/fuzz_common.h"
#include "media/frames.h"

enum { FILE_BYTES = 0, PNG_SUMS, ZLIB, PLAIN, PNG_ROWS, USES };
#define LONGEST 65536

static void put32(uint8_t *at, uint32_t x)
{
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(x >> (24 - 8 * i));
}

/* The file's sizes with and without its pixels must agree, and every pixel be there. */
static void as_file(const uint8_t *bytes, size_t size)
{
    esa_frames_info info = { 0 }, peek = { 0 };
    esa_frames *frames = NULL;
    fuzz_ctx->error[0] = 0;
    const esa_status status = esa_video_read(fuzz_ctx, &frames, &info, "fuzzed", bytes,
                                             (int64_t)size, 16);
    if (status != ESA_OK) {
        must(!frames, "a refusal has no object");
        must(fuzz_ctx->error[0] || status == ESA_ERR_UNSUPPORTED, "a refusal has a sentence");
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
    put32(at + 8 + count, esa_png_crc(at + 4, (int64_t)count + 4));
    return count + 12;
}

static void right_sums(uint8_t *bytes, size_t size)
{
    for (size_t at = 8; size >= 12 && at <= size - 12;) {
        const size_t count = (size_t)bytes[at] << 24 | (size_t)bytes[at + 1] << 16 |
                             (size_t)bytes[at + 2] << 8 | bytes[at + 3];
        if (count > size - at - 12) return;
        put32(bytes + at + 8 + count, esa_png_crc(bytes + at + 4, (int64_t)count + 4));
        at += 12 + count;
    }
}

static void from_rows(const uint8_t *bytes, size_t size)
{
    static uint8_t file[2 * LONGEST + 1024];
    static int64_t table[ESA_ZLIB_TABLE];
    if (size < 13 + 24) return;
    size_t at = 8;
    memcpy(file, "\x89PNG\r\n\x1a\n", 8);
    memcpy(file + at + 8, bytes, 13);
    at += chunk(file + at, "IHDR", 13);
    memcpy(file + at + 8, bytes + 13, 24);
    at += chunk(file + at, "PLTE", 24);
    const int64_t packed = esa_zlib_pack(file + at + 8, bytes + 37, (int64_t)size - 37, table);
    at += chunk(file + at, "IDAT", (size_t)packed);
    at += chunk(file + at, "IEND", 0);
    as_file(file, at);
}

static void there_and_back(const uint8_t *bytes, size_t size)
{
    static uint8_t packed[2 * LONGEST], back[LONGEST];
    static int64_t table[ESA_ZLIB_TABLE];
    const int64_t n = esa_zlib_pack(packed, bytes, (int64_t)size, table);
    must(n <= esa_zlib_bound((int64_t)size), "the bound holds");
    must(esa_zlib_unpack(back, (int64_t)size, packed, n) == (int64_t)size &&
             memcmp(back, bytes, size) == 0,
         "what is packed comes back");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t length;
    if (size < 9) return 0;
    memcpy(&length, data, 8);
    if (length > size - 9 || length > LONGEST) return 0;
    uint8_t *bytes = malloc(length ? length : 1); /* of its own size: a read behind it is seen */
    if (!bytes) return 0;
    memcpy(bytes, data + 8, length);
    switch (data[8 + length] % USES) {
    case PNG_SUMS:
        right_sums(bytes, length);
        as_file(bytes, length);
        break;
    case ZLIB: {
        static uint8_t out[LONGEST];
        const int64_t n = esa_zlib_unpack(out, sizeof out, bytes, (int64_t)length);
        must(n >= -1 && n <= (int64_t)sizeof out, "a size that fits");
        break;
    }
    case PLAIN: there_and_back(bytes, length); break;
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
    /* A stream of zlib's with dynamic codes. */
    static const uint8_t dynamic[] = {
        0x78, 0xda, 0x15, 0x4f, 0x6d, 0x0a, 0x40, 0x31, 0x08, 0xba, 0x8a, 0x57, 0x0b, 0x26,
        0x2c, 0x88, 0x82, 0xcd, 0xdd, 0xff, 0xf9, 0x7e, 0xf5, 0xa1, 0x99, 0xb2, 0x81, 0x47,
        0x71, 0x5e, 0xcc, 0x16, 0xc8, 0x21, 0x14, 0xf7, 0x3d, 0xae, 0x50, 0x81, 0x6d, 0x8c,
        0xdc, 0x49, 0x1d, 0x46, 0x19, 0x35, 0xcf, 0x03, 0x8f, 0x1b, 0x31, 0x90, 0xdb, 0x68,
        0x41, 0x2c, 0xd5, 0x9a, 0x18, 0x1c, 0x4a, 0x3d, 0x18, 0x35, 0xcc, 0x36, 0x12, 0xde,
        0xe4, 0x7a, 0xa7, 0x4c, 0x3f, 0xbe, 0xe7, 0x40, 0x9a, 0x5f, 0x4a, 0x0b, 0xb7, 0x5b,
        0xfb, 0x7f, 0xea, 0x7d, 0xc2, 0xc2, 0x23, 0xb4, 0x42, 0x27, 0x6f, 0x51, 0x00, 0x6a,
        0x2c, 0xf3, 0x92, 0xf1, 0x9f, 0x75, 0xf2, 0x7f, 0x61, 0x9c, 0x99, 0x17, 0xd7, 0x46,
        0x09, 0x6e, 0x66, 0xbb, 0x20, 0x4d, 0x17, 0x6d, 0xc0, 0x43, 0xf0, 0x3d, 0xd9, 0x26,
        0xae, 0xed, 0x38, 0x80, 0x86, 0x47, 0x7b, 0x29, 0x96, 0xc6, 0xcf, 0x24, 0x05, 0x0c,
        0xab, 0x86, 0xd7, 0x1d, 0xff, 0x94, 0xc5, 0x58, 0x73, 0x22, 0xad, 0x08, 0x47, 0xe1,
        0x6c, 0x87, 0x6e, 0xe8, 0xec, 0x70, 0x3a, 0x73, 0x3e, 0xce, 0x24, 0x72, 0xf5
    };
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
    bad = bad || save_seed(folder, dynamic, sizeof dynamic, ZLIB) ||
          save_seed(folder, rgb, sizeof rgb, PLAIN);
    /* depth, colour type */
    static const uint8_t kinds[][2] = {
        { 1, 0 }, { 8, 2 }, { 2, 3 }, { 8, 4 }, { 16, 6 }, { 16, 0 }
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0] && !bad; i++) {
        memset(rows, 1, sizeof rows);
        memcpy(rows, "\0\0\0\2\0\0\0\2", 8);
        rows[8] = kinds[i][0];
        rows[9] = kinds[i][1];
        rows[10] = rows[11] = rows[12] = 0;
        static const int channels[7] = { 1, 0, 3, 1, 2, 0, 4 };
        const size_t line = (size_t)(2 * channels[kinds[i][1]] * kinds[i][0] + 7) / 8;
        bad = save_seed(folder, rows, 37 + 2 * (1 + line), PNG_ROWS);
    }
    esa_frames_free(one);
    esa_frames_free(two);
    return bad;
}
