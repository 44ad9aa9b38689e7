/* scores.h - what rf_v2 and ada_bsa score a block with, in double, pair by pair.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SELECT_SCORES_H
#define ESA_TESTS_SELECT_SCORES_H

#include "select/world.h"

/* Means of the blocks of one side: mean [blocks][D]. */
static inline void naive_block_means(const world *w, double *mean, int32_t keys, int64_t b,
                                     int64_t h)
{
    const int64_t block = keys ? w->p.block_k : w->p.block_q, N = keys ? w->kv_len[b] : w->Nq,
                  blocks = keys ? w->nk : w->nq;
    for (int64_t i = 0; i < blocks; i++)
        for (int64_t d = 0; d < w->D; d++) {
            double sum = 0.0;
            int64_t n = 0;
            for (int64_t t = i * block; t < (i + 1) * block && t < N; t++, n++)
                sum += keys ? world_k(w, b, h, t, d) : world_q(w, b, h, t, d);
            mean[i * w->D + d] = n ? sum / (double)n : 0.0;
        }
}

/* rf_v2: the product of the means, score [nq][nk]. */
static inline void naive_means(const world *w, double *score, int64_t b, int64_t h)
{
    double *mq = malloc((size_t)(w->nq * w->D) * sizeof *mq),
           *mk = malloc((size_t)(w->nk * w->D) * sizeof *mk);
    assert_true(mq && mk);
    naive_block_means(w, mq, 0, b, h);
    naive_block_means(w, mk, 1, b, h);
    for (int64_t I = 0; I < w->nq; I++)
        for (int64_t J = 0; J < w->nk; J++) {
            double dot = 0.0;
            for (int64_t d = 0; d < w->D; d++) dot += mq[I * w->D + d] * mk[J * w->D + d];
            score[I * w->nk + J] = dot / sqrt((double)w->D);
        }
    free(mq);
    free(mk);
}

/* Rows of one head in order, in double: [N][D]. The caller frees. */
static inline double *naive_head(const world *w, int32_t keys, int64_t b, int64_t h)
{
    const int64_t N = keys ? w->Nk : w->Nq;
    double *x = malloc((size_t)(N * w->D) * sizeof *x);
    assert_non_null(x);
    for (int64_t n = 0; n < N; n++)
        for (int64_t d = 0; d < w->D; d++)
            x[n * w->D + d] = keys ? world_k(w, b, h, n, d) : world_q(w, b, h, n, d);
    return x;
}

/* ada_bsa: group scores from the pairs that exist and are visible (fixed), or as the original
 * computes them (compat, T = 1024). */
static inline void naive_ada(const world *w, double *score, int64_t b, int64_t h)
{
    const int64_t gq = (w->Nq + 7) / 8, len = w->kv_len[b];
    const int32_t fixed = w->p.mode == ESA_MODE_FIXED;
    const int64_t gk = fixed ? (len + 7) / 8 : len / 8;
    double *x = malloc((size_t)(gk + 1) * sizeof *x), *q = naive_head(w, 0, b, h),
           *k = naive_head(w, 1, b, h);
    memset(score, 0, (size_t)(w->nq * w->nk) * sizeof *score);
    for (int64_t i = 0; i < gq; i++) {
        double top = -INFINITY, total = 0.0;
        int64_t queries = 0;
        for (int64_t u = 0; u < 8; u++) queries += 8 * i + u < w->Nq;
        int64_t columns = gk;
        if (!fixed && w->p.causal) {
            const int64_t tile = 8 * i / 1024 * 1024,
                          rows = w->Nq - tile < 1024 ? w->Nq - tile : 1024;
            columns = (tile + rows / 8 * 8) / 8 < gk ? (tile + rows / 8 * 8) / 8 : gk;
        }
        for (int64_t j = 0; j < columns; j++) {
            double sum = 0.0;
            int64_t pairs = 0;
            for (int64_t u = 0; u < 8; u++) {
                const int64_t qi = 8 * i + 7 - u, kj = 8 * j + u;
                if (qi >= w->Nq || kj >= len || (fixed && !world_sees(w, b, qi, kj))) continue;
                double dot = 0.0;
                for (int64_t d = 0; d < w->D; d++) dot += q[qi * w->D + d] * k[kj * w->D + d];
                sum += dot;
                pairs++;
            }
            x[j] = fixed ? (pairs ? w->p.scale * sum / (double)pairs + log((double)pairs / 8.0)
                                  : -INFINITY)
                         : w->p.scale * sum / 8.0;
            if (x[j] > top) top = x[j];
        }
        if (top == -INFINITY) continue;
        for (int64_t j = 0; j < columns; j++) total += exp(x[j] - top);
        for (int64_t j = 0; j < columns; j++)
            score[(8 * i / w->p.block_q) * w->nk + 8 * j / w->p.block_k] +=
                exp(x[j] - top) / total * (fixed ? (double)queries / 8.0 : 1.0);
    }
    free(x);
    free(q);
    free(k);
}

#endif
