/* compat_rows.h - how the original rf_v2 and ada_bsa choose the blocks of one row, including their
 * rounding points.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_COMPAT_ROWS_H
#define ESA_RULES_COMPAT_ROWS_H

#include <math.h>
#include <string.h>
#include "base/args.h"
#include "rules/rank.h"

/* The choice of rf_v2 for one row. score[n] becomes its softmax; keep[n] marks every block at or
 * above the k-th largest value. Scratch: key[n]. round: the dtype every step rounds to
 * (compat-round), or ESA_DTYPE_F32. In compat-round the scores come unscaled. */
ESA_INLINE void esa_rf_pick_compat(uint8_t *keep, float *s, int64_t n,
                                   const esa_select_params *params, int32_t round, uint64_t *key)
{
    double total = 0.0;
    float top = -INFINITY, bar = INFINITY;
    const int64_t wanted = esa_min64(n, esa_max64(1, (int64_t)ceil((double)n * params->budget)));
    for (int64_t j = 0; j < n; j++) {
        if (round != ESA_DTYPE_F32)
            s[j] = esa_round_to(esa_round_to(s[j], round) * (float)params->scale, round);
        if (s[j] > top) top = s[j];
        keep[j] = 0;
    }
    for (int64_t j = 0; j < n; j++) total += (double)(s[j] = expf(s[j] - top));
    if (total != total) return; /* NaN compares false: only forced blocks remain */
    for (int64_t j = 0; j < n; j++) s[j] = esa_round_to((float)((double)s[j] / total), round);
    esa_top_k(keep, s, NULL, n, wanted, key);
    for (int64_t j = 0; j < n; j++)
        if (keep[j] && s[j] < bar) bar = s[j];
    for (int64_t j = 0; j < n; j++) keep[j] = s[j] >= bar;
}

ESA_INLINE float esa_half(float f) { return esa_round_to(f, ESA_DTYPE_F16); }

/* Adds n values in fp16 by adjacent pairs, like a hardware reduction of 2^m lanes. Missing lanes
 * are 0. */
ESA_INLINE float esa_half_tree(const float *v, int64_t n)
{
    float lane[64];
    int64_t width = 1;
    while (width < n) width *= 2;
    for (int64_t i = 0; i < width; i++) lane[i] = i < n ? v[i] : 0.0f;
    for (; width > 1; width /= 2)
        for (int64_t i = 0; i < width / 2; i++) lane[i] = esa_half(lane[2 * i] + lane[2 * i + 1]);
    return lane[0];
}

/* Block scores of one block row, rounded to fp16 where the original rounds. x: logits [rows][ld],
 * the first limit[r] columns of each row. score[blocks], with `group` columns per block. p: scratch
 * [rows][blocks]. tile: columns per online-softmax step. */
ESA_INLINE void esa_ada_scores_rounded(double *score, const float *x, int64_t ld, int64_t rows,
                                       const int64_t *limit, int64_t blocks, int64_t group,
                                       int64_t tile, float *p)
{
    /* p[r][j]: the block's probabilities relative to the running maximum of its tile, summed in
     * fp16, then multiplied by the factor of the tile. */
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * ld;
        float top = -INFINITY, total = 0.0f;
        float seen[64]; /* running maximum at each tile; 64 x 512 groups = 262144 keys */
        const int64_t tiles = esa_ceil_div(limit[r], tile),
                      step = esa_max64(1, esa_ceil_div(tiles, 64));
        for (int64_t j = 0; j < blocks; j++) p[r * blocks + j] = 0.0f;
        for (int64_t c0 = 0, t = 0; c0 < limit[r]; c0 += tile * step, t++) {
            const int64_t c1 = esa_min64(limit[r], c0 + tile * step);
            float high = top, sum = 0.0f;
            for (int64_t c = c0; c < c1; c++)
                if (row[c] > high) high = row[c];
            for (int64_t c = c0; c < c1; c += group) {
                float lane[64];
                const int64_t n = esa_min64(group, c1 - c);
                for (int64_t i = 0; i < n; i++) {
                    const float e = expf(row[c + i] - high);
                    sum += e;
                    lane[i] = esa_half(e);
                }
                p[r * blocks + c / group] = esa_half_tree(lane, n);
            }
            total = total * (t ? expf(top - high) : 0.0f) + sum;
            top = seen[t] = high;
        }
        for (int64_t c = 0; c < limit[r]; c += group) {
            const float factor = esa_half(expf(seen[c / (tile * step)] - top) / total);
            p[r * blocks + c / group] = esa_half(p[r * blocks + c / group] * factor);
        }
    }
    /* Rows are added in halves. Rows above the highest power of two come first. */
    int64_t n = rows, width = 1;
    while (2 * width <= n) width *= 2;
    for (; n > 1; n = width, width /= 2)
        for (int64_t r = width; r < n; r++)
            for (int64_t j = 0; j < blocks; j++)
                p[(r - width) * blocks + j] = esa_half(p[(r - width) * blocks + j] +
                                                       p[r * blocks + j]);
    for (int64_t j = 0; j < blocks; j++) score[j] = (double)p[j];
}

ESA_INLINE double esa_key_value(uint64_t key)
{
    double d;
    memcpy(&d, &key, sizeof d);
    return d;
}

/* Adds 16 sorted values, in double or in fp16. */
ESA_INLINE double esa_chunk_sum(const uint64_t *key, int32_t rounded)
{
    float lane[16];
    double sum = 0.0;
    for (int32_t i = 0; i < 16; i++) {
        lane[i] = (float)esa_key_value(key[i]);
        sum += esa_key_value(key[i]);
    }
    return rounded ? (double)esa_half_tree(lane, 16) : sum;
}

/* The choice of ada_bsa for one block row: keep[n] from score[n] (n candidates). Scratch: key[n
 * rounded up to 32]. Scores are softmax mass per key block and not negative, so the bits of a
 * double sort like integers. rounded: sums and scores are fp16, as on the original's device. */
ESA_INLINE void esa_ada_pick_compat(uint8_t *keep, const double *score, int64_t n,
                                    const esa_select_params *params, int32_t rounded, uint64_t *key)
{
    if (params->causal && n <= 2) {
        memset(keep, 1, (size_t)n);
        return;
    }
    const float share = (float)params->budget;
    const double threshold = (double)(float)params->cdf_threshold;
    const int32_t drop_first = params->keep_sink,
                  drop_last = params->keep_recent || !params->causal;
    const int64_t padded = esa_ceil_div(n, 32) * 32;
    double total = 0.0, cut = 0.0;
    int64_t pos = n;
    for (int64_t j = 0; j < padded; j++) {
        const int32_t in = j < n && !(j == 0 && drop_first) && !(j == n - 1 && drop_last);
        const double w = in && score[j] > 0.0 ? score[j] : 0.0;
        memcpy(&key[j], &w, sizeof w);
    }
    /* Before sorting, because the original adds the row in its given order. */
    for (int64_t c = 0; c < padded; c += 16) {
        total += esa_chunk_sum(key + c, rounded);
        if (rounded) total = (double)esa_half((float)total);
    }
    esa_sort_keys(key, padded);
    if (threshold < 1.0) {
        const double target = rounded ? (double)((float)threshold * (float)total)
                                      : threshold * total;
        double acc = 0.0;
        int64_t first = 0;
        for (int64_t c = 0; c < padded; c += 16) {
            const double sum = esa_chunk_sum(key + c, rounded);
            if (acc + sum > target) {
                first = c;
                break;
            }
            acc += sum; /* if no chunk ends the loop, first stays 0: one block */
        }
        for (pos = first; pos < first + 16; pos++) {
            acc += esa_key_value(key[pos]);
            if (rounded) acc = (double)(float)acc;
            if (acc >= target) break;
        }
        if (pos == first + 16) pos--;
        cut = esa_key_value(key[pos]);
    }
    if (n >= 10 && (float)pos > (float)n * share) {
        /* At least 1: the original reads before the start for 0. */
        const int64_t top = esa_max64(1, (int64_t)((float)n * share));
        cut = esa_key_value(key[esa_min64(top, padded) - 1]);
    }
    for (int64_t j = 0; j < n; j++) {
        const int32_t in = !(j == 0 && drop_first) && !(j == n - 1 && drop_last);
        keep[j] = in && score[j] > cut - 1e-5;
    }
    if (n > 0) keep[0] = 1; /* regardless of keep_sink */
    if (n > 0 && drop_last) keep[n - 1] = 1;
}

#endif
