/* picture.c - the size of a picture, from the first bytes of PNG, JPEG and WebP, so that one that
 * is too large is refused before anything decodes it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/fields.h"

#include <string.h>

static int32_t big(const unsigned char *p, int n)
{
    int64_t x = 0;
    for (int i = 0; i < n; i++) x = x << 8 | p[i];
    return x > INT32_MAX ? INT32_MAX : (int32_t)x;
}

static int32_t little(const unsigned char *p, int n)
{
    int32_t x = 0;
    for (int i = n; i-- > 0;) x = x << 8 | p[i];
    return x;
}

/* The first frame header of a JPEG: a marker 0xffc0 .. 0xffcf that is no table. */
static int jpeg_size(int32_t size[2], const unsigned char *p, size_t n)
{
    size_t at = 2;
    while (at + 9 < n && p[at] == 0xff) {
        const unsigned char marker = p[at + 1];
        if (marker == 0xff) { /* filling */
            at++;
            continue;
        }
        const int frame = marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 &&
                          marker != 0xcc;
        if (frame) {
            size[0] = big(p + at + 5, 2);
            size[1] = big(p + at + 7, 2);
            return 1;
        }
        at += 2 + (size_t)big(p + at + 2, 2);
    }
    return 0;
}

static int webp_size(int32_t size[2], const unsigned char *p, size_t n)
{
    if (n < 30) return 0;
    if (memcmp(p + 12, "VP8X", 4) == 0) {
        size[1] = 1 + little(p + 24, 3);
        size[0] = 1 + little(p + 27, 3);
        return 1;
    }
    if (memcmp(p + 12, "VP8L", 4) == 0) {
        size[1] = 1 + (little(p + 21, 2) & 0x3fff);
        size[0] = 1 + (little(p + 22, 3) >> 6 & 0x3fff);
        return p[20] == 0x2f;
    }
    if (memcmp(p + 12, "VP8 ", 4) != 0) return 0;
    size[1] = little(p + 26, 2) & 0x3fff;
    size[0] = little(p + 28, 2) & 0x3fff;
    return 1;
}

int serve_picture_size(int32_t size[2], const unsigned char *p, size_t n)
{
    if (n >= 24 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) {
        size[1] = big(p + 16, 4);
        size[0] = big(p + 20, 4);
        return size[0] > 0 && size[1] > 0;
    }
    int found = 0;
    if (n > 3 && memcmp(p, "\xff\xd8\xff", 3) == 0) found = jpeg_size(size, p, n);
    if (n > 12 && memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0)
        found = webp_size(size, p, n);
    return found && size[0] > 0 && size[1] > 0;
}
