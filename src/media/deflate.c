/* deflate.c - a small zlib compressor for PNG: one block of fixed Huffman codes, greedy matches
 * found by a hash of four bytes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * RFC 1951 sections 3.2.5 and 3.2.6. Within a fifth of zlib's own size on filtered pictures, in a
 * hundred lines. */
#include "media/frames.h"

#include <string.h>

#define WINDOW   32768
#define SHORTEST 4 /* three bytes may stand in a match too; with fixed codes that seldom pays */
#define LONGEST  258

typedef struct bits {
    uint8_t *out;
    uint64_t hold;
    int count;
} bits;

static void put(bits *b, uint32_t value, int count) /* count <= 32, least significant bit first */
{
    b->hold |= (uint64_t)value << b->count;
    b->count += count;
    for (; b->count >= 8; b->count -= 8, b->hold >>= 8) *b->out++ = (uint8_t)b->hold;
}

/* Huffman codes go most significant bit first. */
static void put_code(bits *b, uint32_t code, int count)
{
    uint32_t turned = 0;
    for (int i = 0; i < count; i++) turned |= (code >> i & 1) << (count - 1 - i);
    put(b, turned, count);
}

static void put_symbol(bits *b, int symbol) /* 0 .. 255 a byte, 256 the end, above: a length */
{
    if (symbol < 144)
        put_code(b, 0x30 + (uint32_t)symbol, 8);
    else if (symbol < 256)
        put_code(b, 0x190 + (uint32_t)symbol - 144, 9);
    else if (symbol < 280)
        put_code(b, (uint32_t)symbol - 256, 7);
    else
        put_code(b, 0xc0 + (uint32_t)symbol - 280, 8);
}

static void put_match(bits *b, int length, int distance)
{
    if (length == LONGEST)
        put_symbol(b, 285);
    else {
        /* eight single lengths, then groups of four that double */
        int code = length - 3, extra = 0;
        if (code >= 8) {
            while (code >> (extra + 3)) extra++;
            code = 4 * extra + (code >> extra);
        }
        put_symbol(b, 257 + code);
        if (extra) put(b, (uint32_t)(length - 3) & ((1u << extra) - 1), extra);
    }
    int code = distance - 1, extra = 0; /* four single distances, then groups of two */
    if (code >= 4) {
        while (code >> (extra + 2)) extra++;
        code = 2 * extra + (code >> extra);
    }
    put_code(b, (uint32_t)code, 5);
    if (extra) put(b, (uint32_t)(distance - 1) & ((1u << extra) - 1), extra);
}

uint32_t esa_adler(const uint8_t *in, int64_t bytes)
{
    uint32_t a = 1, c = 0;
    for (int64_t i = 0; i < bytes;) {
        const int64_t end = esa_min64(i + 5552, bytes); /* as many as cannot overflow */
        for (; i < end; i++) {
            a += in[i];
            c += a;
        }
        a %= 65521;
        c %= 65521;
    }
    return c << 16 | a;
}

int64_t esa_zlib_bound(int64_t bytes) { return bytes + bytes / 8 + 64; }

int64_t esa_zlib_pack(uint8_t *out, const uint8_t *in, int64_t bytes, int64_t *table)
{
    bits b = { out, 0, 0 };
    for (int i = 0; i < ESA_ZLIB_TABLE; i++) table[i] = -1;
    put(&b, 0x0178, 16); /* zlib, window of 32 KiB */
    put(&b, 3, 3);       /* last block, fixed codes */
    for (int64_t i = 0; i < bytes;) {
        int64_t length = 0, from = -1;
        if (i + SHORTEST <= bytes) {
            uint32_t word;
            memcpy(&word, in + i, 4);
            const uint32_t slot = word * 2654435761u >> 18;
            from = table[slot];
            table[slot] = i;
            if (from >= 0 && i - from <= WINDOW) {
                const int64_t most = esa_min64(LONGEST, bytes - i);
                while (length < most && in[from + length] == in[i + length]) length++;
            }
        }
        if (length < SHORTEST) {
            put_symbol(&b, in[i++]);
            continue;
        }
        put_match(&b, (int)length, (int)(i - from));
        i += length;
    }
    put_symbol(&b, 256);
    if (b.count) put(&b, 0, 8 - b.count);
    const uint32_t check = esa_adler(in, bytes);
    for (int i = 24; i >= 0; i -= 8) *b.out++ = (uint8_t)(check >> i);
    return b.out - out;
}
