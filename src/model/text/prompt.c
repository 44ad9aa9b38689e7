/* prompt.c - see prompt.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/prompt.h"

#include <string.h>

int32_t esa_utf8_next(const char *s, int32_t *n)
{
    const uint8_t *p = (const uint8_t *)s;
    const int32_t length = p[0] < 0x80                   ? 1
                           : p[0] >= 0xc2 && p[0] < 0xe0 ? 2
                           : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
                           : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                                         : 0;
    int32_t c = length < 2 ? p[0] : p[0] & (0x7f >> length);
    *n = 1;
    if (!length) return -1;
    for (int32_t i = 1; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80) return -1;
        c = c << 6 | (p[i] & 0x3f);
    }
    if ((length == 3 && c < 0x800) || (length == 4 && (c < 0x10000 || c > 0x10ffff)) ||
        (c >= 0xd800 && c < 0xe000))
        return -1;
    *n = length;
    return c;
}

int32_t esa_utf8_put(char *out, int32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    const int32_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int32_t i = length - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((0xf00 >> length & 0xff) | c);
    return length;
}

/* Unicode's White_Space. */
static int32_t is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

/* The text of the named reference s[0 .. n), or NULL. */
static const char *entity(const char *s, int64_t n)
{
    int32_t lo = 0, hi = esa_html_entity_count;
    while (lo < hi) {
        const int32_t mid = (lo + hi) / 2;
        const char *name = esa_html_entity_text[esa_html_entity_at[mid] >> 12] +
                           (esa_html_entity_at[mid] & 4095);
        const int c = strncmp(s, name, (size_t)n), order = c ? c : -(int)(unsigned char)name[n];
        if (!order) return name + n + 1;
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* Writes the character of "&#num;". HTML reads some codes as windows-1252, and drops characters
 * that are not allowed. */
static int32_t put_number(char *out, int64_t num)
{
    static const uint16_t western[32] = { 0x20ac, 0x81,   0x201a, 0x192,  0x201e, 0x2026, 0x2020,
                                          0x2021, 0x2c6,  0x2030, 0x160,  0x2039, 0x152,  0x8d,
                                          0x17d,  0x8f,   0x90,   0x2018, 0x2019, 0x201c, 0x201d,
                                          0x2022, 0x2013, 0x2014, 0x2dc,  0x2122, 0x161,  0x203a,
                                          0x153,  0x9d,   0x17e,  0x178 };
    if (num >= 0x80 && num < 0xa0) return esa_utf8_put(out, western[num - 0x80]);
    if (num == 0 || (num >= 0xd800 && num < 0xe000) || num > 0x10ffff)
        return esa_utf8_put(out, 0xfffd);
    if ((num < 32 && num != 9 && num != 10 && num != 12 && num != 13) || num == 0x7f ||
        (num >= 0xfdd0 && num <= 0xfdef) || (num & 0xfffe) == 0xfffe)
        return 0;
    return esa_utf8_put(out, (int32_t)num);
}

/* Replaces the reference at s, which starts with "&": writes the replacement to out, returns its
 * length, and sets *used to the length of the reference. *used is 0 if s is not a reference. */
static int64_t reference(char *out, const char *s, int64_t *used)
{
    const char *at = s + 1;
    *used = 0;
    if (*at == '#') {
        const int32_t hex = at[1] == 'x' || at[1] == 'X';
        int64_t num = 0;
        const char *digit = at += 1 + hex;
        for (;; at++) {
            const char c = *at, low = (char)(c | 0x20);
            const int32_t v = c >= '0' && c <= '9'              ? c - '0'
                              : hex && low >= 'a' && low <= 'f' ? low - 'a' + 10
                                                                : -1;
            if (v < 0) break;
            num = esa_min64(num * (hex ? 16 : 10) + v, 0x110000);
        }
        if (at == digit) return 0;
        *used = at + (*at == ';') - s;
        return put_number(out, num);
    }
    int32_t n;
    for (int32_t i = 0; i < 32 && *at && !strchr("\t\n\f <&#;", *at); i++) {
        esa_utf8_next(at, &n);
        at += n;
    }
    if (at == s + 1) return 0;
    at += *at == ';';
    for (int64_t k = at - (s + 1); k >= 2; k--) {
        const char *text = entity(s + 1, k);
        if (!text) continue;
        *used = 1 + k;
        const int64_t length = (int64_t)strlen(text);
        memcpy(out, text, (size_t)length);
        return length;
    }
    return 0;
}

/* to has room for GROWTH times the bytes of s. The worst case is "&nLt;": five bytes become six. */
#define GROWTH 2
static void unescape(char *to, const char *s)
{
    for (int64_t used; *s; s += used) {
        used = 0;
        const int64_t n = *s == '&' ? reference(to, s, &used) : 0;
        to += n;
        if (!used) *to++ = *s, used = 1;
    }
    *to = 0;
}

/* At the ends, Python's str.strip also removes the separators of files, groups, records and units.
 */
static int32_t is_end_space(int32_t c) { return is_space(c) || (c >= 0x1c && c < 0x20); }

static void squeeze(char *s)
{
    char *to = s, *end = s; /* end: after the last character that stays */
    const char *from = s;
    int32_t n, gap = 0;
    while (*from && is_end_space(esa_utf8_next(from, &n))) from += n;
    for (; *from; from += n) {
        const int32_t c = esa_utf8_next(from, &n);
        if (is_space(c)) {
            gap = 1;
            continue;
        }
        if (gap) *to++ = ' ';
        gap = 0;
        memmove(to, from, (size_t)n);
        to += n;
        if (!is_end_space(c)) end = to;
    }
    *end = 0;
}

esa_status esa_utf8_check(esa_ctx *ctx, const char *text, int64_t *bytes, int64_t *chars)
{
    int64_t at = 0, count = 0;
    for (int32_t n; text[at]; at += n, count++)
        if (esa_utf8_next(text + at, &n) < 0)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the prompt is not valid UTF-8: byte 0x%02x at position %lld",
                            (unsigned)(uint8_t)text[at], (long long)at);
    *bytes = at;
    if (chars) *chars = count;
    return ESA_OK;
}

/* What every prompt must be. */
static esa_status check_prompt(esa_ctx *ctx, const char *text, int64_t *bytes)
{
    int64_t count = 0;
    ESA_TRY(esa_utf8_check(ctx, text, bytes, &count));
    if (count > ESA_PROMPT_MAX)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the prompt has %lld characters, expected at most %d", (long long)count,
                        ESA_PROMPT_MAX);
    return ESA_OK;
}

esa_status esa_prompt_clean(esa_ctx *ctx, char **out, int64_t *bytes, const char *text)
{
    int64_t at = 0;
    *out = NULL;
    ESA_TRY(check_prompt(ctx, text, &at));
    const int64_t once = GROWTH * at + 1;
    char *half = esa_mem_alloc(&ctx->mem, once);
    *bytes = GROWTH * once;
    *out = esa_mem_alloc(&ctx->mem, *bytes);
    if (half && *out) {
        unescape(half, text);
        unescape(*out, half);
        squeeze(*out);
    }
    const esa_status status = half && *out
                                  ? ESA_OK
                                  : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a prompt");
    esa_mem_free(&ctx->mem, half, once);
    if (status) {
        esa_mem_free(&ctx->mem, *out, *bytes);
        *out = NULL;
    }
    return status;
}

esa_status esa_prompt_copy(esa_ctx *ctx, char **out, int64_t *bytes, const char *text)
{
    int64_t length = 0;
    *out = NULL;
    ESA_TRY(check_prompt(ctx, text, &length));
    *bytes = length + 1;
    *out = esa_mem_alloc(&ctx->mem, *bytes);
    if (!*out) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a prompt");
    memcpy(*out, text, (size_t)*bytes);
    return ESA_OK;
}

static const char hunyuan_front[] =
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following "
    "aspects: 1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the "
    "objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n";
static const char hunyuan_back[] = "<|eot_id|>";

esa_status esa_prompt_hunyuan(esa_ctx *ctx, char **out, int64_t *bytes, const char *text)
{
    int64_t length = 0;
    *out = NULL;
    ESA_TRY(check_prompt(ctx, text, &length));
    const int64_t front = sizeof hunyuan_front - 1, back = sizeof hunyuan_back;
    *bytes = front + length + back;
    *out = esa_mem_alloc(&ctx->mem, *bytes);
    if (!*out) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a prompt");
    memcpy(*out, hunyuan_front, (size_t)front);
    memcpy(*out + front, text, (size_t)length);
    memcpy(*out + front + length, hunyuan_back, (size_t)back);
    return ESA_OK;
}
