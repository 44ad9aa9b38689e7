/* inflate.c - unpacks zlib streams (RFC 1950, 1951): every block kind, strict about codes, lengths,
 * distances and the check sum.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Canonical Huffman codes are walked bit by bit with a count per length: no tables to build but two
 * small arrays, a few tens of MB a second, which is plenty beside the filters of PNG. */
#include "media/frames.h"

#include <string.h>

#define MAX_BITS      15
#define MAX_LITERALS  288
#define MAX_DISTANCES 32

typedef struct source {
    const uint8_t *in;
    int64_t size, at;
    uint32_t hold; /* bits not yet used, least significant first */
    int count;
    int ended; /* 1: more bits were asked for than there are */
} source;

typedef struct code {
    uint16_t count[MAX_BITS + 1], symbol[MAX_LITERALS];
} code;

static uint32_t take(source *s, int bits) /* bits <= 16 */
{
    while (s->count < bits) {
        if (s->at >= s->size) {
            s->ended = 1;
            return 0;
        }
        s->hold |= (uint32_t)s->in[s->at++] << s->count;
        s->count += 8;
    }
    const uint32_t value = s->hold & ((1u << bits) - 1);
    s->hold >>= bits;
    s->count -= bits;
    return value;
}

/* Canonical codes of these lengths; 0: they are over-subscribed, or incomplete with more than one
 * code. */
static int make_code(code *c, const uint8_t *length, int n)
{
    uint16_t next[MAX_BITS + 1];
    memset(c->count, 0, sizeof c->count);
    for (int i = 0; i < n; i++) c->count[length[i]]++;
    int left = 1, used = n - c->count[0];
    for (int bits = 1; bits <= MAX_BITS; bits++) {
        left = 2 * left - c->count[bits];
        if (left < 0) return 0;
    }
    if (left > 0 && used > 1) return 0;
    next[1] = 0;
    for (int bits = 1; bits < MAX_BITS; bits++)
        next[bits + 1] = (uint16_t)(next[bits] + c->count[bits]);
    for (int i = 0; i < n; i++)
        if (length[i]) c->symbol[next[length[i]]++] = (uint16_t)i;
    return 1;
}

/* The next symbol, or -1. */
static int symbol_of(source *s, const code *c)
{
    int value = 0, first = 0, index = 0;
    for (int bits = 1; bits <= MAX_BITS; bits++) {
        value |= (int)take(s, 1);
        if (s->ended) return -1;
        const int count = c->count[bits];
        if (value - first < count) return c->symbol[index + value - first];
        index += count;
        first = (first + count) << 1;
        value <<= 1;
    }
    return -1;
}

/* Symbols until the end of the block; 0: they make no sense or do not fit. */
static int coded(source *s, uint8_t *out, int64_t room, int64_t *used, const code *literals,
                 const code *distances)
{
    static const uint16_t base[29] = { 3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                       15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                       67, 83, 99, 115, 131, 163, 195, 227, 258 };
    static const uint8_t extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                       2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0 };
    for (;;) {
        const int symbol = symbol_of(s, literals);
        if (symbol < 0 || symbol > 285) return 0;
        if (symbol == 256) return 1;
        if (symbol < 256) {
            if (*used == room) return 0;
            out[(*used)++] = (uint8_t)symbol;
            continue;
        }
        const int64_t length = base[symbol - 257] + (int64_t)take(s, extra[symbol - 257]);
        const int d = symbol_of(s, distances);
        if (d < 0 || d > 29) return 0;
        const int more = d < 4 ? 0 : d / 2 - 1;
        const int64_t distance = d < 4
                                     ? d + 1
                                     : ((int64_t)(2 + d % 2) << more) + (int64_t)take(s, more) + 1;
        if (s->ended || distance > *used || length > room - *used) return 0;
        /* they may overlap */
        for (int64_t i = 0; i < length; i++, (*used)++) out[*used] = out[*used - distance];
    }
}

static int stored(source *s, uint8_t *out, int64_t room, int64_t *used)
{
    s->hold = 0; /* at most seven bits: the rest of a byte */
    s->count = 0;
    if (s->size - s->at < 4) return 0;
    const uint8_t *head = s->in + s->at;
    const int64_t length = head[0] | head[1] << 8;
    if ((head[2] | head[3] << 8) != (~length & 0xffff)) return 0;
    s->at += 4;
    if (length > s->size - s->at || length > room - *used) return 0;
    memcpy(out + *used, s->in + s->at, (size_t)length);
    s->at += length;
    *used += length;
    return 1;
}

static int fixed(source *s, uint8_t *out, int64_t room, int64_t *used)
{
    uint8_t length[MAX_LITERALS], five[MAX_DISTANCES];
    code literals, distances;
    for (int i = 0; i < MAX_LITERALS; i++) length[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    memset(five, 5, sizeof five);
    make_code(&literals, length, MAX_LITERALS);
    make_code(&distances, five, MAX_DISTANCES);
    return coded(s, out, room, used, &literals, &distances);
}

static int dynamic(source *s, uint8_t *out, int64_t room, int64_t *used)
{
    static const uint8_t order[19] = { 16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                       11, 4,  12, 3, 13, 2, 14, 1, 15 };
    uint8_t length[MAX_LITERALS + MAX_DISTANCES] = { 0 };
    code lengths, literals, distances;
    const int n = (int)take(s, 5) + 257, m = (int)take(s, 5) + 1, k = (int)take(s, 4) + 4;
    if (s->ended || n > 286 || m > 30) return 0;
    for (int i = 0; i < k; i++) length[order[i]] = (uint8_t)take(s, 3);
    if (s->ended || !make_code(&lengths, length, 19)) return 0;
    memset(length, 0, sizeof length);
    for (int i = 0; i < n + m;) {
        const int symbol = symbol_of(s, &lengths);
        if (symbol < 0 || symbol > 18 || (symbol == 16 && i == 0)) return 0;
        if (symbol < 16) {
            length[i++] = (uint8_t)symbol;
            continue;
        }
        const uint8_t value = symbol == 16 ? length[i - 1] : 0;
        int times = symbol == 16   ? 3 + (int)take(s, 2)
                    : symbol == 17 ? 3 + (int)take(s, 3)
                                   : 11 + (int)take(s, 7);
        if (s->ended || i + times > n + m) return 0;
        while (times--) length[i++] = value;
    }
    if (length[256] == 0 || !make_code(&literals, length, n) ||
        !make_code(&distances, length + n, m))
        return 0;
    return coded(s, out, room, used, &literals, &distances);
}

int64_t esa_zlib_unpack(uint8_t *out, int64_t room, const uint8_t *in, int64_t bytes)
{
    source s = { .in = in, .size = bytes, .at = 2 };
    int64_t used = 0;
    /* Deflate with a window of at most 32 KiB, no preset dictionary, a header that checks. */
    if (bytes < 6 || (in[0] & 15) != 8 || in[0] >> 4 > 7 || (in[1] & 32) ||
        (in[0] << 8 | in[1]) % 31)
        return -1;
    for (int last = 0; !last;) {
        last = (int)take(&s, 1);
        const uint32_t kind = take(&s, 2);
        if (s.ended || kind == 3) return -1;
        if (!(kind == 0 ? stored : kind == 1 ? fixed : dynamic)(&s, out, room, &used)) return -1;
    }
    /* whole bytes only were taken ahead: fewer than eight bits are left over */
    const uint8_t *check = in + s.at;
    if (bytes - s.at < 4) return -1;
    const uint32_t sum = (uint32_t)check[0] << 24 | (uint32_t)check[1] << 16 |
                         (uint32_t)check[2] << 8 | check[3];
    return sum == esa_adler(out, used) ? used : -1;
}
