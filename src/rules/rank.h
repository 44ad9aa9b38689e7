/* rank.h - the k largest of n values, and descending ranks, without comparing floats.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each candidate becomes one uint64: the bits of the value, made monotone, in the high half; the
 * complement of the index in the low half. A larger key is better, and of equal values the lower
 * index wins. Keys are unique, so no tie rule is needed.
 *
 * Selection is a radix select from the top byte: at most 8 passes over a shrinking rest, O(n) for
 * any data. The GPU ranks by the same integers. */
#ifndef ESA_RULES_RANK_H
#define ESA_RULES_RANK_H

#include "base/half.h"

/* Maps a value to an integer of the same order. */
ESA_INLINE uint32_t esa_rank_bits(float value)
{
    const uint32_t u = esa_bits_from_f32(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0;  /* NaN ranks below -inf */
    if ((u & 0x7fffffffu) == 0) return 0x80000000u; /* -0 = +0 */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* A key that sorts by value descending, then index ascending (larger is better); and the index
 * of a key. */
ESA_INLINE uint64_t esa_rank_key(float value, int64_t index)
{
    return (uint64_t)esa_rank_bits(value) << 32 | (uint32_t) ~(uint32_t)index;
}

ESA_INLINE int64_t esa_rank_index(uint64_t key) { return (int64_t)(uint32_t) ~(uint32_t)key; }

/* Marks the k largest of value[n] among those with allow[j] != 0 (NULL: all). Of equal values the
 * lower index wins; NaN ranks last. Sets keep[j] to 1 for the chosen ones and leaves the others
 * alone. scratch: n uint64. */
ESA_INLINE void esa_top_k(uint8_t *keep, const float *value, const uint8_t *allow, int64_t n,
                          int64_t k, uint64_t *scratch)
{
    int64_t m = 0;
    for (int64_t j = 0; j < n; j++)
        if (!allow || allow[j]) scratch[m++] = esa_rank_key(value[j], j);
    if (k <= 0) return;
    for (int32_t shift = 56; k < m && shift >= 0; shift -= 8) {
        int32_t hist[256] = { 0 };
        for (int64_t i = 0; i < m; i++) hist[scratch[i] >> shift & 255]++;
        int64_t above = 0; /* candidates in higher buckets; all are chosen */
        int32_t bucket = 255;
        while (above + hist[bucket] < k) above += hist[bucket--];
        int64_t rest = 0;
        for (int64_t i = 0; i < m; i++) {
            const int32_t b = (int32_t)(scratch[i] >> shift & 255);
            if (b > bucket)
                keep[esa_rank_index(scratch[i])] = 1;
            else if (b == bucket)
                scratch[rest++] = scratch[i];
        }
        k -= above;
        m = rest;
    }
    /* k >= m: the rest is chosen. */
    for (int64_t i = 0; i < m; i++) keep[esa_rank_index(scratch[i])] = 1;
}

ESA_INLINE void esa_sift_key(uint64_t *a, int64_t i, int64_t n)
{
    for (int64_t c = 2 * i + 1; c < n; i = c, c = 2 * i + 1) {
        if (c + 1 < n && a[c + 1] < a[c]) c++;
        if (a[i] <= a[c]) return;
        const uint64_t t = a[i];
        a[i] = a[c];
        a[c] = t;
    }
}

/* Sorts keys in place, largest first. */
ESA_INLINE void esa_sort_keys(uint64_t *key, int64_t n)
{
    for (int64_t i = n / 2; i-- > 0;) esa_sift_key(key, i, n);
    for (int64_t end = n - 1; end > 0; end--) {
        const uint64_t t = key[0];
        key[0] = key[end];
        key[end] = t;
        esa_sift_key(key, 0, end);
    }
}

#endif
