/* y4m_read.c - reads YUV4MPEG2 with 8 bits: 4:2:0 (chroma placed as in JPEG or in MPEG-2), 4:2:2,
 * 4:4:4 with or without alpha, and grey.
 * SPDX-License-Identifier: Apache-2.0 */
#include "media/frames.h"

#include <string.h>

#define LONGEST 4096 /* bytes of a header line */

typedef struct y4m {
    const char *name;
    esa_yuv_layout l;
    int64_t line; /* bytes of the header */
    int planes;
    double fps;
} y4m;

/* Reads the integer at *at and moves *at past it; -1 if there is none. */
static int64_t number(const uint8_t **at, const uint8_t *end)
{
    int64_t x = 0;
    const uint8_t *p = *at;
    for (; p < end && *p >= '0' && *p <= '9' && x < INT64_C(1) << 40; p++) x = 10 * x + (*p - '0');
    const int64_t found = p > *at ? x : -1;
    *at = p;
    return found;
}

/* Sets the layout from the chroma word; 0 if it is not supported. */
static int chroma(y4m *v, const char *word, size_t n)
{
    static const struct {
        const char *name;
        int across, down, left, planes;
    } known[] = {
        { "420", 2, 2, 0, 3 },      { "420jpeg", 2, 2, 0, 3 }, { "420mpeg2", 2, 2, 1, 3 },
        { "420paldv", 2, 2, 1, 3 }, { "422", 2, 1, 1, 3 },     { "444", 1, 1, 0, 3 },
        { "444alpha", 1, 1, 0, 4 }, { "mono", 1, 1, 0, 1 },
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strlen(known[i].name) == n && memcmp(known[i].name, word, n) == 0) {
            v->l.across = known[i].across;
            v->l.down = known[i].down;
            v->l.left = known[i].left;
            v->planes = known[i].planes;
            return 1;
        }
    return 0;
}

/* One word of the header line: a letter and its value. */
static esa_status read_word(esa_ctx *ctx, y4m *v, const uint8_t *word, const uint8_t *stop)
{
    const uint8_t *at = word + 1;
    if (*word == 'W')
        v->l.width = number(&at, stop);
    else if (*word == 'H')
        v->l.height = number(&at, stop);
    else if (*word == 'F') {
        const int64_t a = number(&at, stop);
        at++;
        const int64_t b = at < stop ? number(&at, stop) : -1;
        if (a > 0 && b > 0 && esa_fps_valid((double)a / (double)b)) v->fps = (double)a / (double)b;
    } else if (*word == 'C' && !chroma(v, (const char *)at, (size_t)(stop - at)))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s has colours C%.*s, expected 8 bits of C420, C422, C444 or Cmono",
                        v->name, (int)esa_min64(stop - at, 20), (const char *)at);
    else if (stop - word == 16 && memcmp(word, "XCOLORRANGE=FULL", 16) == 0)
        v->l.full = 1;
    return ESA_OK;
}

static esa_status read_header(esa_ctx *ctx, y4m *v, const uint8_t *bytes, int64_t size, double fps)
{
    const uint8_t *end = memchr(bytes, '\n', (size_t)esa_min64(size, LONGEST));
    if (!end)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is a damaged Y4M: its first line has no end",
                        v->name);
    v->line = end + 1 - bytes;
    v->l.across = v->l.down = 2;
    v->planes = 3;
    v->fps = fps;
    for (const uint8_t *p = bytes + 9; p < end;) {
        const uint8_t *word = p + 1, *stop = memchr(word, ' ', (size_t)(end - word));
        if (!stop) stop = end;
        if (word < stop) ESA_TRY(read_word(ctx, v, word, stop));
        p = stop;
    }
    if (v->l.width < 1 || v->l.height < 1 || v->l.width > ESA_FRAMES_MAX_SIDE ||
        v->l.height > ESA_FRAMES_MAX_SIDE)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%.200s has %lld x %lld pixels, expected sides of 1 .. %d", v->name,
                        (long long)v->l.width, (long long)v->l.height, ESA_FRAMES_MAX_SIDE);
    return ESA_OK;
}

/* The size of the FRAME line at `at`, which may have parameters; -1 if there is none. */
static int64_t frame_line(const uint8_t *bytes, int64_t size, int64_t at)
{
    if (size - at < 6 || memcmp(bytes + at, "FRAME", 5) != 0) return -1;
    const uint8_t *end = memchr(bytes + at + 5, '\n', (size_t)esa_min64(size - at - 5, LONGEST));
    return end && (bytes[at + 5] == '\n' || bytes[at + 5] == ' ') ? end + 1 - (bytes + at) : -1;
}

/* The size of the FRAME line at `at` if a whole frame is there, else -1. picture: bytes of one. The
 * file may change between two looks, so every look at a frame goes through here. */
static int64_t whole_frame(const uint8_t *bytes, int64_t size, int64_t at, int64_t picture)
{
    const int64_t line = frame_line(bytes, size, at);
    return line >= 0 && size - at - line >= picture ? line : -1;
}

static esa_status incomplete(esa_ctx *ctx, const y4m *v, int64_t frame)
{
    return esa_fail(ctx, ESA_ERR_FORMAT,
                    "%.200s is a damaged Y4M: frame %lld of %lld x %lld pixels is incomplete",
                    v->name, (long long)frame, (long long)v->l.width, (long long)v->l.height);
}

/* Counts the frames, so that memory is only reserved for frames that exist. */
static esa_status count_frames(esa_ctx *ctx, int64_t *count, const y4m *v, const uint8_t *bytes,
                               int64_t size, int64_t picture)
{
    *count = 0;
    for (int64_t at = v->line; at < size; (*count)++) {
        const int64_t line = whole_frame(bytes, size, at, picture);
        if (line < 0) return incomplete(ctx, v, *count);
        at += line + picture;
    }
    if (!*count) return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s holds no frames", v->name);
    if (*count > ESA_FRAMES_MAX_COUNT)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s holds %lld frames, expected at most %d",
                        v->name, (long long)*count, ESA_FRAMES_MAX_COUNT);
    return ESA_OK;
}

esa_status esa_y4m_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    y4m v = { .name = name };
    int64_t count;
    if (frames) *frames = NULL;
    ESA_TRY(read_header(ctx, &v, bytes, size, fps));
    const int64_t luma = v.l.width * v.l.height, chroma_size = esa_ceil_div(v.l.width, v.l.across) *
                                                               esa_ceil_div(v.l.height, v.l.down);
    const int64_t picture = luma + (v.planes >= 3 ? 2 * chroma_size : 0) +
                            (v.planes == 4 ? luma : 0);
    ESA_TRY(count_frames(ctx, &count, &v, bytes, size, picture));
    *info = esa_frames_sizes(count, v.l.height, v.l.width, v.fps);
    if (!frames) return ESA_OK;
    ESA_TRY(esa_frames_new(ctx, frames, count, v.l.height, v.l.width, v.fps));
    int64_t at = v.line;
    for (int64_t i = 0; i < count; i++) {
        const int64_t line = whole_frame(bytes, size, at, picture);
        if (line < 0) return esa_frames_drop(incomplete(ctx, &v, i), frames);
        const uint8_t *plane = bytes + at + line;
        esa_yuv_to_rgb((*frames)->rgb + i * luma * 3, plane, v.planes >= 3 ? plane + luma : NULL,
                       plane + luma + chroma_size, &v.l);
        at += line + picture;
    }
    return ESA_OK;
}
