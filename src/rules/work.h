/* work.h - how much arithmetic a call does, as a share of dense attention.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Work counts the multiply-adds of all products. Dense attention of one head has 2 Nq Nk D of them;
 * every figure here is a share of that, averaged over the heads. Sorting, gathering and softmax are
 * not in it.
 *
 *   attention  A block costs its queries times its keys, so short blocks cost less. A mean costs
 *              its queries times one column. A mean of the centroid tail costs one column for the
 *              whole query block.
 *   exact rows cost their number times all keys (rules/exact_rows.h).
 *   selection  The products of the scores: rows times columns, and a half if there is no product
 *              with the values.
 *   order      rules/order.h.
 *   floor      the blocks that rows keep in any case, as a density
 *
 * The figures follow from the method, not from how a device carries it out: a kernel that computes
 * a column and drops it does not raise them.
 *
 * Pure functions. Lists must be in host memory. */
#ifndef ESA_RULES_WORK_H
#define ESA_RULES_WORK_H

#include "rules/exact_rows.h"
#include "rules/levels.h"
#include "rules/order.h"
#include "rules/rows.h"

/* Number of keys of block j that exist. */
ESA_INLINE int64_t esa_work_keys(const esa_attn_args *a, int64_t kv_len, int64_t j)
{
    return esa_max64(0, esa_min64(a->block_k, kv_len - j * a->block_k));
}

/* Number of key blocks that every query of row i sees whole: only for these can means stand in. */
ESA_INLINE int64_t esa_work_whole(const esa_attn_args *a, int64_t kv_len, int64_t i)
{
    const int64_t limit = a->causal ? i * a->block_q + a->Nk - a->Nq + 1 : a->Nk;
    if (limit >= kv_len) return esa_ceil_div(kv_len, a->block_k);
    return limit > 0 ? limit / a->block_k : 0;
}

/* Number of pairs (query, key) that dense attention of one head computes. */
ESA_INLINE double esa_work_dense_pairs(const esa_attn_args *a, int64_t kv_len)
{
    if (!a->causal) return (double)a->Nq * (double)kv_len;
    double pairs = 0.0;
    for (int64_t i = 0; i < a->Nq; i++)
        pairs += (double)esa_max64(0, esa_min64(kv_len, i + a->Nk - a->Nq + 1));
    return pairs;
}

/* Number of pairs (query, column) of row i, whose lists start at row `at` of the mask. */
ESA_INLINE double esa_work_row_pairs(const esa_attn_args *a, int64_t kv_len, int64_t i, int64_t at)
{
    const int64_t queries = esa_min64(a->block_q, a->Nq - i * a->block_q),
                  whole = esa_work_whole(a, kv_len, i);
    const int32_t fines = a->tail == ESA_TAIL_LEVELS && a->fine_count ? a->fine_count[at] : 0;
    int64_t exact = 0, fine = 0, means = a->tail == ESA_TAIL_NONE ? 0 : whole;
    for (int32_t c = 0; c < a->count[at]; c++) {
        const int64_t j = a->index[at * a->cap + c];
        exact += esa_work_keys(a, kv_len, j);
        means -= means > 0 && j < whole;
    }
    for (int32_t c = 0; c < fines; c++) {
        const int64_t j = a->fine_index[at * a->cap + c];
        if (j >= whole) continue;
        fine += esa_ceil_div(esa_work_keys(a, kv_len, j), a->block_k / a->fine);
        means--;
    }
    return (double)queries * (double)(exact + fine) +
           (double)(a->tail == ESA_TAIL_CENTROID ? 1 : queries) * (double)means;
}

/* Number of exact rows of one head. */
ESA_INLINE int64_t esa_work_exact_rows(const esa_attn_args *a)
{
    const int64_t last = a->Nq - (a->nq - 1) * a->block_q;
    return (a->nq - 1) * esa_exact_rows_of(a->block_q, a->exact_rows) +
           esa_exact_rows_of(last, a->exact_rows);
}

/* Work of an attention call, from the lists of its mask. Dense without a mask. */
static inline double esa_work_attention(const esa_attn_args *a)
{
    double pairs = 0.0;
    for (int64_t b = 0; b < a->B; b++) {
        const int64_t kv_len = esa_kv_len(a->kv_len ? a->kv_len[b] : a->Nk, a->Nk);
        if (!a->count) {
            pairs += (double)a->Hq * esa_work_dense_pairs(a, kv_len);
            continue;
        }
        pairs += (double)a->Hq * (double)esa_work_exact_rows(a) * (double)kv_len;
        for (int64_t h = 0; h < a->Hq; h++)
            for (int64_t i = 0; i < a->nq; i++)
                pairs += esa_work_row_pairs(a, kv_len, i, (b * a->mask_batch + h) * a->nq + i);
    }
    return pairs / ((double)a->B * (double)a->Hq * (double)a->Nq * (double)a->Nk);
}

/* The same from the totals of a mask (facts of mask/mask.h: existing, kept, fine blocks), where the
 * lists are not at hand. Every block counts as one of average size, so short blocks make a small
 * difference; without them it is exact. rows: rows of the mask, over all heads. */
ESA_INLINE double esa_work_facts(const esa_attn_args *a, const int64_t *facts, int64_t rows)
{
    if (facts[0] <= 0 || rows <= 0) return 0.0;
    const double existing = (double)facts[0], n = existing / (double)rows, Nk = (double)a->Nk,
                 keys = n * (double)a->block_k < Nk ? n * (double)a->block_k : Nk,
                 fine = a->tail == ESA_TAIL_LEVELS ? (double)facts[2] : 0.0,
                 means = a->tail == ESA_TAIL_NONE ? 0.0
                         : a->tail == ESA_TAIL_CENTROID
                             ? (existing - (double)facts[1]) / (double)a->block_q
                             : existing - (double)facts[1] - fine;
    return ((double)facts[1] * keys + (fine * (double)a->fine + means) * n) / (existing * Nk) +
           (double)esa_work_exact_rows(a) * keys / ((double)a->Nq * Nk);
}

/* Work of one selection. kv_len: keys that exist. Causality is not subtracted. */
static inline double esa_work_select(const esa_select_params *p, int64_t Nq, int64_t Nk,
                                     int64_t kv_len)
{
    const double all = (double)Nq * (double)Nk, keys = (double)kv_len;
    const int64_t nq = esa_ceil_div(Nq, p->block_q), nk = esa_ceil_div(kv_len, p->block_k),
                  last = Nq - (nq - 1) * p->block_q;
    if (esa_keeps_all(p)) return 0.0;
    switch (esa_selector_of(p->selector)->work) {
    case ESA_WORK_SAMPLES: {
        const int64_t rows = (nq - 1) * esa_min64(p->samples, p->block_q) +
                             esa_min64(p->samples, last);
        const double passes = p->mode == ESA_MODE_COMPAT_ROUND ? 2.0 : 1.0;
        return 0.5 * passes * (double)rows * keys / all;
    }
    case ESA_WORK_BLOCKS: return 0.5 * (double)nq * (double)nk / all;
    case ESA_WORK_GROUPS: /* eight pairs for every two groups of eight */
        return 0.5 * (double)esa_ceil_div(Nq, ESA_ADA_GROUP) * ESA_ADA_GROUP *
               (double)esa_ceil_div(kv_len, ESA_ADA_GROUP) / all;
    case ESA_WORK_MEANS: {
        const int64_t rows = esa_ceil_div(Nq, esa_error_queries(p));
        int64_t columns = esa_ceil_div(kv_len, esa_error_keys(p));
        if (p->tail != ESA_TAIL_NONE) columns += nk;
        if (p->tail == ESA_TAIL_LEVELS)
            columns += kv_len / p->block_k * p->fine +
                       esa_ceil_div(kv_len % p->block_k, p->block_k / p->fine);
        return (double)rows * (double)columns / all;
    }
    default: return 0.0;
    }
}

/* Least density of a mask: each row keeps its forced blocks and its best one, which may be forced:
 * it counts as if any block could be the best. Skipped blocks cost `mean` of a kept one. */
static inline double esa_work_floor(const esa_select_args *a, int64_t kv_len, double mean)
{
    const int64_t existing = esa_blocks_existing(a, kv_len);
    double least = 0.0, seen = 0.0;
    for (int64_t i = 0; i < a->nq; i++) {
        const int64_t visible = esa_row_visible(a, kv_len, existing, i),
                      diagonal = esa_row_diagonal(a, kv_len, visible, i);
        int32_t columns = 0;
        for (int64_t j = 0; j < diagonal; j++) columns += esa_column_forced(a, kv_len, existing, j);
        const double v = (double)visible,
                     n = esa_row_dense(a, i) ? v : (double)(visible - diagonal + columns);
        least += visible ? n + (v - n) / v : 0.0;
        seen += v;
    }
    const double kept = seen > 0.0 ? least / seen : 1.0;
    return kept + (1.0 - kept) * mean;
}

/* Work of one adaptive order of all heads. */
static inline double esa_work_order(const esa_select_params *p, int64_t Hq, int64_t Hkv, int64_t Nq,
                                    int64_t Nk, int64_t D)
{
    const double q = esa_order_work(esa_order_root(&p->layout, 0, p->mode, Nq),
                                    (uint32_t)p->block_q, D, (double)Nk),
                 k = esa_order_work(esa_order_root(&p->layout, 1, p->mode, Nk),
                                    (uint32_t)p->block_k, D, (double)Nq * (double)(Hq / Hkv));
    return ((double)Hq * q + (double)Hkv * k) /
           (2.0 * (double)Hq * (double)Nq * (double)Nk * (double)D);
}

#endif
