/* png_read.c - PNG: every colour type and depth, all filters, check sums checked; interlaced
 * pictures are refused.
 * SPDX-License-Identifier: Apache-2.0
 *
 * 16-bit samples are rounded to 8. Alpha and transparent colours are dropped, gamma and colour
 * profiles ignored: metrics compare the bytes that writers put there. */
#include "media/frames.h"

#include <string.h>

enum { GREY = 0, RGB = 2, PALETTE = 3, GREY_ALPHA = 4, RGB_ALPHA = 6 };

typedef struct png {
    const char *name;
    int64_t width, height;
    int depth, type, channels;
    int64_t packed; /* bytes of IDAT */
    uint8_t palette[256][3];
    int colours;
} png;

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static int64_t line_bytes(const png *p)
{
    return esa_ceil_div(p->width * p->channels * p->depth, 8);
}

static esa_status broken(esa_ctx *ctx, const png *p, const char *how)
{
    return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is a damaged PNG: %s", p->name, how);
}

static esa_status read_header(esa_ctx *ctx, png *p, const uint8_t *body, int64_t count)
{
    static const int8_t channels[7] = { 1, 0, 3, 1, 2, 0, 4 };
    if (count != 13) return broken(ctx, p, "its header has another length");
    p->width = get32(body);
    p->height = get32(body + 4);
    p->depth = body[8];
    p->type = body[9];
    p->channels = p->type <= 6 ? channels[p->type] : 0;
    const int small = p->depth == 1 || p->depth == 2 || p->depth == 4;
    const int fits = p->depth == 8 || (p->depth == 16 && p->type != PALETTE) ||
                     (small && (p->type == GREY || p->type == PALETTE));
    if (!p->channels || !fits)
        return broken(ctx, p, "its colour type and depth do not go together");
    if (body[10] || body[11]) return broken(ctx, p, "an unknown compression or filter");
    if (body[12])
        return esa_fail(
            ctx, ESA_ERR_UNSUPPORTED,
            "%.200s is an interlaced PNG, which is not read; save it without interlacing", p->name);
    if (p->width < 1 || p->height < 1 || p->width > ESA_FRAMES_MAX_SIDE ||
        p->height > ESA_FRAMES_MAX_SIDE)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%.200s has %lld x %lld pixels, expected sides of 1 .. %d", p->name,
                        (long long)p->width, (long long)p->height, ESA_FRAMES_MAX_SIDE);
    return ESA_OK;
}

/* Walks the chunks; with out the bytes of IDAT are gathered there. */
static esa_status walk(esa_ctx *ctx, png *p, const uint8_t *bytes, int64_t size, uint8_t *out)
{
    int64_t at = 8, packed = 0;
    for (int first = 1;; first = 0) {
        if (size - at < 12) return broken(ctx, p, "it ends too early");
        const int64_t count = get32(bytes + at);
        const uint8_t *kind = bytes + at + 4, *body = kind + 4;
        if (count > size - at - 12) return broken(ctx, p, "it ends too early");
        if (!out && esa_png_crc(kind, count + 4) != get32(body + count))
            return broken(ctx, p, "a check sum is wrong");
        if (first != (memcmp(kind, "IHDR", 4) == 0))
            return broken(ctx, p, "its header is not where it belongs");
        if (first) {
            const esa_status status = read_header(ctx, p, body, count);
            if (status != ESA_OK) return status;
        } else if (memcmp(kind, "PLTE", 4) == 0) {
            if (count % 3 || count > 768 || count == 0)
                return broken(ctx, p, "its palette has another length");
            memcpy(p->palette, body, (size_t)count);
            p->colours = (int)(count / 3);
        } else if (memcmp(kind, "IDAT", 4) == 0) {
            if (out) memcpy(out + packed, body, (size_t)count);
            packed += count;
        } else if (memcmp(kind, "IEND", 4) == 0) {
            break;
        } else if (!(kind[0] & 32)) {
            return broken(ctx, p, "it holds a chunk that must not be skipped and is not known");
        }
        at += 12 + count;
    }
    p->packed = packed;
    if (p->type == PALETTE && !p->colours) return broken(ctx, p, "it has no palette");
    return ESA_OK;
}

/* Undoes the filter of one row in place; step: bytes of a pixel. up NULL: first row. 0: no such
 * filter. */
static int unfilter(uint8_t *row, const uint8_t *up, int64_t bytes, int64_t step, int filter)
{
    if (filter > 4) return 0;
    for (int64_t i = 0; i < bytes; i++) {
        const int a = i >= step ? row[i - step] : 0, b = up ? up[i] : 0,
                  c = up && i >= step ? up[i - step] : 0;
        const int guess = filter == 0   ? 0
                          : filter == 1 ? a
                          : filter == 2 ? b
                          : filter == 3 ? (a + b) / 2
                                        : esa_png_paeth(a, b, c);
        row[i] = (uint8_t)(row[i] + guess);
    }
    return 1;
}

/* Sample i of a row as stored, and as 8 bits. */
static int sample(const png *p, const uint8_t *row, int64_t i)
{
    if (p->depth == 8) return row[i];
    if (p->depth == 16) return row[2 * i] << 8 | row[2 * i + 1];
    const int64_t bit = i * p->depth;
    return row[bit / 8] >> (8 - p->depth - bit % 8) & ((1 << p->depth) - 1);
}

static uint8_t eight(const png *p, int value)
{
    const int most = (1 << p->depth) - 1;
    return p->depth == 8 ? (uint8_t)value : (uint8_t)((value * 255 + most / 2) / most);
}

static int put_row(const png *p, uint8_t *rgb, const uint8_t *row)
{
    for (int64_t x = 0; x < p->width; x++, rgb += 3) {
        if (p->type == PALETTE) {
            const int colour = sample(p, row, x);
            if (colour >= p->colours) return 0;
            memcpy(rgb, p->palette[colour], 3);
        } else {
            const int wide = p->type == RGB || p->type == RGB_ALPHA;
            for (int c = 0; c < 3; c++)
                rgb[c] = eight(p, sample(p, row, x * p->channels + (wide ? c : 0)));
        }
    }
    return 1;
}

static esa_status decode(esa_ctx *ctx, png *p, const uint8_t *bytes, int64_t size, uint8_t *rgb)
{
    const int64_t line = line_bytes(p), plain = (line + 1) * p->height,
                  step = esa_max64(1, p->channels * p->depth / 8);
    /* Deflate makes at most 1032 bytes of one: a header that promises more lies, and is not given
     * the memory. */
    if (plain / 1032 > p->packed) return broken(ctx, p, "it ends too early");
    uint8_t *block = esa_mem_alloc(&ctx->mem, plain + p->packed), *packed = block + plain;
    if (!block) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while reading %.200s", p->name);
    esa_status status = walk(ctx, p, bytes, size, packed);
    if (status == ESA_OK && esa_zlib_unpack(block, plain, packed, p->packed) != plain)
        status = broken(ctx, p, "its pixels cannot be unpacked");
    for (int64_t y = 0; y < p->height && status == ESA_OK; y++) {
        uint8_t *row = block + y * (line + 1) + 1;
        if (!unfilter(row, y ? row - line - 1 : NULL, line, step, row[-1]))
            status = broken(ctx, p, "an unknown filter");
        else if (!put_row(p, rgb + y * p->width * 3, row))
            status = broken(ctx, p, "a colour that is not in its palette");
    }
    esa_mem_free(&ctx->mem, block, plain + p->packed);
    return status;
}

static esa_status begin(esa_ctx *ctx, png *p, const char *name, const uint8_t *bytes, int64_t size)
{
    *p = (png){ .name = name };
    return walk(ctx, p, bytes, size, NULL);
}

esa_status esa_png_read_into(esa_ctx *ctx, esa_frames *frames, int64_t i, const char *name,
                             const uint8_t *bytes, int64_t size)
{
    png p;
    const esa_status status = begin(ctx, &p, name, bytes, size);
    if (status != ESA_OK) return status;
    if (p.width != frames->width || p.height != frames->height)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%.200s has %lld x %lld pixels, the pictures before it have %d x %d", name,
                        (long long)p.width, (long long)p.height, frames->width, frames->height);
    return decode(ctx, &p, bytes, size, frames->rgb + i * p.height * p.width * 3);
}

esa_status esa_png_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    png p;
    if (frames) *frames = NULL;
    esa_status status = begin(ctx, &p, name, bytes, size);
    if (status != ESA_OK) return status;
    *info = (esa_frames_info){ .struct_size = sizeof *info,
                               .frames = 1,
                               .height = (int32_t)p.height,
                               .width = (int32_t)p.width,
                               .fps = fps };
    if (!frames) return ESA_OK;
    if (line_bytes(&p) * p.height / 1032 > p.packed) return broken(ctx, &p, "it ends too early");
    status = esa_frames_new(ctx, frames, 1, p.height, p.width, fps);
    if (status != ESA_OK) return status;
    status = decode(ctx, &p, bytes, size, (*frames)->rgb);
    if (status == ESA_OK) return ESA_OK;
    esa_frames_free(*frames);
    *frames = NULL;
    return status;
}
