/* blocks.c - see blocks.h; base/blocks.h has the formats.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Loops have constant counts and no branches, so that compilers vectorise them. */
#include "nn/blocks.h"

#include <string.h>
#include "base/half.h"

static float half_at(const uint8_t *at)
{
    uint16_t h;
    memcpy(&h, at, 2);
    return esa_f16_to_f32(h);
}

static void q8_0(float *dst, const uint8_t *b)
{
    const float d = half_at(b);
    const int8_t *code = (const int8_t *)b + 2;
    for (int i = 0; i < 32; i++) dst[i] = d * (float)code[i];
}

/* Scale and minimum of group j of 8, times d and dmin. Six bits each: those of the groups 0 to 3
 * are the lower bits of bytes 0 to 7; those of 4 to 7 are half of a byte behind, and the upper bits
 * of bytes 0 to 7. */
static void scale_min(const uint8_t *b, int j, float *scale, float *min)
{
    const uint8_t *s = b + 4;
    const int k = j & 3;
    const int sc = j < 4 ? s[k] & 63 : (s[8 + k] & 15) | (s[k] >> 2 & 48),
              m = j < 4 ? s[4 + k] & 63 : s[8 + k] >> 4 | (s[4 + k] >> 2 & 48);
    *scale = half_at(b) * (float)sc;
    *min = half_at(b + 2) * (float)m;
}

static void q4_k(float *dst, const uint8_t *b)
{
    for (int j = 0; j < 8; j += 2) {
        const uint8_t *code = b + 16 + 16 * j; /* 32 bytes for two groups */
        float scale[2], min[2];
        scale_min(b, j, &scale[0], &min[0]);
        scale_min(b, j + 1, &scale[1], &min[1]);
        for (int i = 0; i < 32; i++) {
            dst[32 * j + i] = scale[0] * (float)(code[i] & 15) - min[0];
            dst[32 * j + 32 + i] = scale[1] * (float)(code[i] >> 4) - min[1];
        }
    }
}

static void q5_k(float *dst, const uint8_t *b)
{
    const uint8_t *fifth = b + 16; /* bit j of byte i: element i of group j */
    for (int j = 0; j < 8; j += 2) {
        const uint8_t *code = b + 48 + 16 * j;
        float scale[2], min[2];
        scale_min(b, j, &scale[0], &min[0]);
        scale_min(b, j + 1, &scale[1], &min[1]);
        for (int i = 0; i < 32; i++) {
            const int low = (code[i] & 15) | (fifth[i] >> j & 1) << 4,
                      high = code[i] >> 4 | (fifth[i] >> (j + 1) & 1) << 4;
            dst[32 * j + i] = scale[0] * (float)low - min[0];
            dst[32 * j + 32 + i] = scale[1] * (float)high - min[1];
        }
    }
}

/* Two halves of 128 elements. In a half, byte i of 64 has the lower bits of elements i and 64 + i;
 * byte i of 32 has the upper bits of i, 32 + i, 64 + i and 96 + i. A scale holds for 16. */
static void q6_k(float *dst, const uint8_t *b)
{
    const int8_t *scale = (const int8_t *)b + 192;
    const float d = half_at(b + 208);
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
        for (int g = 0; g < 8; g++) { /* groups of 16 */
            const float s = d * (float)scale[8 * half + g];
            const int quarter = g / 2, at = 16 * (g & 1), shift = quarter >= 2 ? 4 : 0;
            const uint8_t *l = low + 32 * (quarter & 1) + at, *h = high + at;
            float *out = dst + 128 * half + 16 * g;
            for (int i = 0; i < 16; i++) {
                const int code = (l[i] >> shift & 15) | (h[i] >> (2 * quarter) & 3) << 4;
                out[i] = s * (float)(code - 32);
            }
        }
    }
}

static void expand(float *dst, const uint8_t *block, int32_t dtype)
{
    switch (dtype) {
    case ESA_BLOCKS_Q8_0: q8_0(dst, block); break;
    case ESA_BLOCKS_Q4_K: q4_k(dst, block); break;
    case ESA_BLOCKS_Q5_K: q5_k(dst, block); break;
    default: q6_k(dst, block); break;
    }
}

void esa_blocks_to_f32(float *dst, const void *src, int32_t dtype, int64_t first, int64_t count)
{
    const int64_t elements = esa_blocks_elements(dtype), bytes = esa_blocks_bytes(dtype);
    const uint8_t *block = (const uint8_t *)src + first / elements * bytes;
    int64_t skip = first % elements;
    for (; count > 0; block += bytes) {
        const int64_t n = esa_min64(elements - skip, count);
        if (n == elements) {
            expand(dst, block, dtype);
        } else {
            float whole[ESA_BLOCKS_MOST];
            expand(whole, block, dtype);
            memcpy(dst, whole + skip, (size_t)(4 * n));
        }
        dst += n;
        count -= n;
        skip = 0;
    }
}
