/* png.c - one frame as a PNG: 8-bit RGB, the filter of each row chosen by the smallest sum of
 * differences.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/outfile.h"
#include "media/frames.h"

#include <stdlib.h>
#include <string.h>

uint32_t esa_png_crc(const uint8_t *bytes, int64_t count)
{
    uint32_t table[256], crc = 0xffffffffu;
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int i = 0; i < 8; i++) c = (c & 1) ? 0xedb88320u ^ c >> 1 : c >> 1;
        table[n] = c;
    }
    for (int64_t i = 0; i < count; i++) crc = table[(crc ^ bytes[i]) & 255] ^ crc >> 8;
    return ~crc;
}

static void put32(uint8_t *at, uint32_t x)
{
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(x >> (24 - 8 * i));
}

int esa_png_paeth(int a, int b, int c)
{
    const int p = a + b - c, pa = abs(p - a), pb = abs(p - b), pc = abs(p - c);
    return pa <= pb && pa <= pc ? a : pb <= pc ? b : c;
}

/* out[1 + bytes]: the filter's number and the row as differences; the sum of their sizes. up NULL:
 * first row. */
static int64_t filter_row(uint8_t *out, const uint8_t *row, const uint8_t *up, int64_t bytes,
                          int filter)
{
    int64_t sum = 0;
    out[0] = (uint8_t)filter;
    for (int64_t i = 0; i < bytes; i++) {
        const int a = i >= 3 ? row[i - 3] : 0, b = up ? up[i] : 0, c = up && i >= 3 ? up[i - 3] : 0;
        const int guess = filter == 0   ? 0
                          : filter == 1 ? a
                          : filter == 2 ? b
                          : filter == 3 ? (a + b) / 2
                                        : esa_png_paeth(a, b, c);
        const uint8_t d = (uint8_t)(row[i] - guess);
        out[1 + i] = d;
        sum += d < 128 ? d : 256 - d;
    }
    return sum;
}

/* data[12 + count]: the chunk's bytes already stand at data + 8. Returns its size. */
static int64_t finish_chunk(uint8_t *data, const char type[4], int64_t count)
{
    put32(data, (uint32_t)count);
    memcpy(data + 4, type, 4);
    put32(data + 8 + count, esa_png_crc(data + 4, count + 4));
    return count + 12;
}

/* The whole file into out; its size. rows: scratch for the filtered picture, trial: for one
 * filtered row. */
static int64_t encode(uint8_t *out, uint8_t *rows, uint8_t *trial, int64_t *table,
                      const uint8_t *rgb, int64_t height, int64_t width)
{
    static const uint8_t magic[8] = { 0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n' };
    const int64_t line = width * 3;
    for (int64_t y = 0; y < height; y++) {
        uint8_t *best = rows + y * (line + 1);
        const uint8_t *row = rgb + y * line, *up = y ? row - line : NULL;
        int64_t least = filter_row(best, row, up, line, 0);
        for (int filter = 1; filter < 5; filter++) {
            const int64_t sum = filter_row(trial, row, up, line, filter);
            if (sum >= least) continue;
            least = sum;
            memcpy(best, trial, (size_t)line + 1);
        }
    }
    uint8_t *at = out;
    memcpy(at, magic, 8);
    at += 8;
    const uint8_t settings[5] = { 8, 2, 0, 0, 0 }; /* 8 bits, RGB, not interlaced */
    put32(at + 8, (uint32_t)width);
    put32(at + 12, (uint32_t)height);
    memcpy(at + 16, settings, 5);
    at += finish_chunk(at, "IHDR", 13);
    at += finish_chunk(at, "IDAT", esa_zlib_pack(at + 8, rows, height * (line + 1), table));
    at += finish_chunk(at, "IEND", 0);
    return at - out;
}

esa_status esa_png_save(esa_ctx *ctx, const esa_frames *frames, int64_t frame, const char *path)
{
    const int64_t line = (int64_t)frames->width * 3, plain = (line + 1) * frames->height,
                  bound = esa_zlib_bound(plain) + 64;
    esa_carve carve = { NULL, 0 };
    for (int pass = 0;; pass++) { /* measured, then placed */
        uint8_t *out = esa_carve_take(&carve, bound), *rows = esa_carve_take(&carve, plain),
                *trial = esa_carve_take(&carve, line + 1);
        int64_t *table = esa_carve_take(&carve, ESA_ZLIB_TABLE * (int64_t)sizeof *table);
        if (pass == 0) {
            const int64_t bytes = carve.used;
            carve = (esa_carve){ esa_mem_alloc(&ctx->mem, bytes), 0 };
            if (!carve.base)
                return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while writing %.200s", path);
            continue;
        }
        const int64_t size = encode(out, rows, trial, table,
                                    frames->rgb + frame * line * frames->height, frames->height,
                                    frames->width);
        esa_outfile file;
        esa_status status = esa_outfile_open(ctx, &file, path);
        if (status == ESA_OK) status = esa_outfile_write(&file, out, size);
        if (status == ESA_OK) status = esa_outfile_commit(&file);
        esa_outfile_close(&file);
        esa_mem_free(&ctx->mem, carve.base, carve.used);
        return status;
    }
}
