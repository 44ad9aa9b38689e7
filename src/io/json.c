/* json.c - a strict pull reader for JSON; see json.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/json.h"

#include <stddef.h>

int esa_utf8_length(const char *s, const char *end)
{
    const unsigned char *u = (const unsigned char *)s;
    const ptrdiff_t left = end - s;
    if (left < 1) return 0;
    if (u[0] < 0x80) return 1;
    if (u[0] < 0xc2) return 0; /* a continuation byte, or an overlong form of ASCII */
    const int n = u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : u[0] < 0xf5 ? 4 : 0;
    if (n == 0 || left < n) return 0;
    for (int i = 1; i < n; i++)
        if ((u[i] & 0xc0) != 0x80) return 0;
    if (u[0] == 0xe0 && u[1] < 0xa0) return 0; /* overlong */
    if (u[0] == 0xed && u[1] > 0x9f) return 0; /* surrogates */
    if (u[0] == 0xf0 && u[1] < 0x90) return 0; /* overlong */
    if (u[0] == 0xf4 && u[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return n;
}

int esa_json_peek(esa_json *json)
{
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r'))
        json->at++;
    return json->at < json->end ? (unsigned char)*json->at : -1;
}

static int fail(esa_json *json, const char *what)
{
    if (!json->error) json->error = what;
    return 0;
}

int esa_json_take(esa_json *json, char c)
{
    if (esa_json_peek(json) != (unsigned char)c) {
        switch (c) {
        case '{': return fail(json, "expected an object");
        case '[': return fail(json, "expected an array");
        case ':': return fail(json, "expected a ':'");
        case ']': return fail(json, "expected a ']'");
        default: return fail(json, "expected other punctuation");
        }
    }
    json->at++;
    return 1;
}

int esa_json_next(esa_json *json, char close)
{
    const int c = esa_json_peek(json);
    if (c == ',') {
        json->at++;
        return 1;
    }
    if (c == (unsigned char)close) {
        json->at++;
        return 0;
    }
    fail(json, c < 0          ? "the text ends too early"
               : close == '}' ? "expected a ',' or '}'"
                              : "expected a ',' or ']'");
    return -1;
}

/* Four hex digits at s, or -1. */
static int32_t hex4(const char *s, const char *end)
{
    if (end - s < 4) return -1;
    int32_t v = 0;
    for (int i = 0; i < 4; i++) {
        const char c = s[i];
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

static char *put_utf8(char *out, int32_t c)
{
    if (c < 0x80) {
        *out++ = (char)c;
        return out;
    }
    if (c < 0x800) {
        *out++ = (char)(0xc0 | (c >> 6));
    } else {
        if (c < 0x10000)
            *out++ = (char)(0xe0 | (c >> 12));
        else {
            *out++ = (char)(0xf0 | (c >> 18));
            *out++ = (char)(0x80 | ((c >> 12) & 0x3f));
        }
        *out++ = (char)(0x80 | ((c >> 6) & 0x3f));
    }
    *out++ = (char)(0x80 | (c & 0x3f));
    return out;
}

/* Reads an escape; json->at is after the backslash. Returns the new end of the output, or NULL. */
static char *unescape(esa_json *json, char *out)
{
    if (json->at >= json->end) {
        fail(json, "a string has no end");
        return NULL;
    }
    const char c = *json->at++;
    switch (c) {
    case '"':
    case '\\':
    case '/': *out++ = c; return out;
    case 'b': *out++ = '\b'; return out;
    case 'f': *out++ = '\f'; return out;
    case 'n': *out++ = '\n'; return out;
    case 'r': *out++ = '\r'; return out;
    case 't': *out++ = '\t'; return out;
    case 'u': break;
    default: fail(json, "a string holds an unknown escape"); return NULL;
    }
    int32_t u = hex4(json->at, json->end);
    if (u < 0) {
        fail(json, "a \\u escape has no four hex digits");
        return NULL;
    }
    json->at += 4;
    if (u == 0) {
        fail(json, "a string holds a NUL character");
        return NULL;
    }
    if (u >= 0xdc00 && u <= 0xdfff) {
        fail(json, "a \\u escape is half of a surrogate pair");
        return NULL;
    }
    if (u >= 0xd800 && u <= 0xdbff) {
        const int32_t low = json->end - json->at >= 6 && json->at[0] == '\\' && json->at[1] == 'u'
                                ? hex4(json->at + 2, json->end)
                                : -1;
        if (low < 0xdc00 || low > 0xdfff) {
            fail(json, "a \\u escape is half of a surrogate pair");
            return NULL;
        }
        json->at += 6;
        u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
    }
    return put_utf8(out, u);
}

const char *esa_json_string(esa_json *json)
{
    if (esa_json_peek(json) != '"') {
        fail(json, "expected a string");
        return NULL;
    }
    json->at++;
    char *const text = json->strings, *out = text;
    for (;;) {
        if (json->at >= json->end) {
            fail(json, "a string has no end");
            return NULL;
        }
        const unsigned char c = (unsigned char)*json->at;
        if (c == '"') break;
        if (c < 0x20) {
            fail(json, "a string holds a control character");
            return NULL;
        }
        if (c == '\\') {
            json->at++;
            out = unescape(json, out);
            if (!out) return NULL;
            continue;
        }
        const int n = esa_utf8_length(json->at, json->end);
        if (n == 0) {
            fail(json, "a string is not UTF-8");
            return NULL;
        }
        for (int i = 0; i < n; i++) *out++ = *json->at++;
    }
    json->at++;
    *out++ = 0;
    json->strings = out;
    return text;
}

int esa_json_integer(esa_json *json, int64_t *value)
{
    const int c = esa_json_peek(json);
    if (c == '-') return fail(json, "a number is negative");
    if (c < '0' || c > '9') return fail(json, "expected a number");
    int64_t v = 0;
    const char *first = json->at;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        const int d = *json->at - '0';
        if (v > (INT64_MAX - d) / 10) return fail(json, "a number does not fit 63 bits");
        v = v * 10 + d;
    }
    if (*first == '0' && json->at - first > 1) return fail(json, "a number has a leading zero");
    if (json->at < json->end && (*json->at == '.' || *json->at == 'e' || *json->at == 'E'))
        return fail(json, "a number is not an integer");
    *value = v;
    return 1;
}
