/* rules.c - what a row may see, what is forced on it, how it picks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Visibility: key j exists if j < kv_len, and under causal is seen by query i if j <= i + Nk - Nq (positions of the ordered
 * sequence). A block is visible to a query block if one of its queries sees one of its keys; visible blocks are always the
 * first ones of the row.
 * Forced (fixed mode): every block that holds a text token or a token of a protected frame 0, as row and as column; under causal
 * every block the diagonal passes through, so that no query loses itself. Forced blocks count inside the row's quota. */
#include <string.h>
#include "select/rules.h"

int64_t esa_args_kv_len(const esa_select_args *args, int64_t b)
{
    const int64_t len = args->params.kv_len ? args->params.kv_len[b] : args->Nk;
    return len < 0 ? 0 : esa_min64(len, args->Nk);
}

const void *esa_args_q(const esa_select_args *args, int64_t b, int64_t h)
{
    return (const char *)args->q + (b * args->q_stride[0] + h * args->q_stride[1]) * esa_dtype_size(args->dtype);
}

const void *esa_args_k(const esa_select_args *args, int64_t b, int64_t h)
{
    const int64_t g = h / (args->Hq / args->Hkv);
    return (const char *)args->k + (b * args->k_stride[0] + g * args->k_stride[1]) * esa_dtype_size(args->dtype);
}

/* Flags the blocks of size `block` that hold a token of first .. end-1. */
static void flag_run(uint8_t *flags, int64_t n, int64_t block, int64_t first, int64_t end)
{
    if (first >= end) return;
    for (int64_t i = first / block; i < n && i * block < end; i++) flags[i] = 1;
}

void esa_select_forced(uint8_t *flags_q, uint8_t *flags_k, const esa_select_args *args, int64_t kv_len)
{
    const esa_layout *l = &args->params.layout;
    const int64_t Bq = args->params.block_q, Bk = args->params.block_k;
    memset(flags_q, 0, (size_t)args->nq);
    memset(flags_k, 0, (size_t)args->nk);
    flag_run(flags_q, args->nq, Bq, 0, l->text_front_q);
    flag_run(flags_q, args->nq, Bq, args->Nq - l->text_back_q, args->Nq);
    flag_run(flags_k, args->nk, Bk, 0, esa_min64(l->text_front_k, kv_len));
    flag_run(flags_k, args->nk, Bk, args->Nk - l->text_back_k, kv_len);
    if (esa_layout_protects(l, 0, args->params.mode))
        flag_run(flags_q, args->nq, Bq, l->text_front_q, l->text_front_q + (int64_t)l->grid_q[1] * l->grid_q[2]);
    if (esa_layout_protects(l, 1, args->params.mode))
        flag_run(flags_k, args->nk, Bk, l->text_front_k,
                 esa_min64(kv_len, l->text_front_k + (int64_t)l->grid_k[1] * l->grid_k[2]));
}

void esa_rules_carve(esa_rules *rules, esa_carve *carve, const esa_select_args *args)
{
    rules->visible = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->diagonal = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->least = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->dense = esa_carve_take(carve, args->nq);
    rules->column = esa_carve_take(carve, args->nk);
}

/* least[i] from the flags. */
static void count_least(esa_rules *r, const esa_select_args *args)
{
    for (int64_t i = 0; i < args->nq; i++) {
        const int32_t v = r->visible[i];
        int32_t n = v - r->diagonal[i];
        for (int32_t j = 0; j < r->diagonal[i]; j++) n += r->column[j];
        if (r->dense[i]) n = v;
        r->least[i] = n > 0 ? n : v > 0;
    }
}

void esa_rules_fill(esa_rules *r, const esa_select_args *args, int64_t b)
{
    const int64_t Bq = args->params.block_q, Bk = args->params.block_k, offset = args->Nk - args->Nq;
    const int32_t fixed = args->params.mode == ESA_MODE_FIXED;
    r->kv_len = esa_args_kv_len(args, b);
    r->existing = esa_ceil_div(r->kv_len, Bk);
    r->seen = 0;
    if (fixed) esa_select_forced(r->dense, r->column, args, r->kv_len);
    else {
        memset(r->dense, 0, (size_t)args->nq);
        memset(r->column, 0, (size_t)args->nk);
    }
    for (int64_t i = 0; i < args->nq; i++) {
        int64_t end = r->kv_len, own = end;             /* one past the last key seen; first key on the diagonal */
        if (args->params.causal) {
            end = esa_min64(end, esa_min64(args->Nq, (i + 1) * Bq) + offset);
            own = esa_max64(0, i * Bq + offset);
        }
        r->visible[i] = (int32_t)(end > 0 ? esa_ceil_div(end, Bk) : 0);
        r->diagonal[i] = args->params.causal && fixed ? (int32_t)esa_min64(own / Bk, r->visible[i]) : r->visible[i];
        r->seen += r->visible[i];
    }
    count_least(r, args);
}

void esa_rules_force_column(esa_rules *rules, const esa_select_args *args, int64_t j)
{
    if (j < 0 || j >= args->nk) return;
    rules->column[j] = 1;
    count_least(rules, args);
}

void esa_picker_carve(esa_picker *picker, esa_carve *carve, int64_t nk)
{
    picker->key = esa_carve_take(carve, nk * (int64_t)sizeof(uint64_t));
    picker->keep = esa_carve_take(carve, nk);
    picker->allow = esa_carve_take(carve, nk);
}

int64_t esa_rules_forced(uint8_t *keep, const esa_rules *rules, int64_t i, int64_t nk)
{
    const int32_t v = rules->visible[i];
    memset(keep, 0, (size_t)nk);
    if (rules->dense[i]) {
        memset(keep, 1, (size_t)v);
        return v;
    }
    int64_t n = 0;
    for (int32_t j = 0; j < v; j++) {
        keep[j] = rules->column[j] || j >= rules->diagonal[i];
        n += keep[j];
    }
    return n;
}

void esa_rules_pick(esa_picker *p, const esa_rules *rules, const float *value, int64_t i, int64_t quota, int64_t nk)
{
    const int64_t v = rules->visible[i], forced = esa_rules_forced(p->keep, rules, i, nk);
    if (forced >= v) return;
    if (quota > forced) {
        for (int64_t j = 0; j < v; j++) p->allow[j] = !p->keep[j];
        esa_top_k(p->keep, value, p->allow, v, quota - forced, p->key);
        return;                     /* the best block is forced, or the first one taken */
    }
    uint64_t best = 0;              /* the budget is used up, but a row never loses its best block */
    for (int64_t j = 0; j < v; j++) {
        const uint64_t key = esa_rank_key(value[j], j);
        if (key > best) best = key;
    }
    p->keep[esa_rank_index(best)] = 1;
}
