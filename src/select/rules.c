/* rules.c - what a row may see, what is forced on it, how it picks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Visibility: key j exists if j < kv_len, and under causal is seen by query i if j <= i + Nk - Nq (positions of the ordered
 * sequence). A block is visible to a query block if one of its queries sees one of its keys; visible blocks are always the
 * first ones of the row.
 * Forced (fixed mode): every block that holds a text token or a token of a protected frame 0, as row and as column; under causal
 * every block the diagonal passes through, so that no query loses itself. Forced blocks count inside the row's quota. */
#include <math.h>
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

int64_t esa_args_window(const esa_select_args *args, int64_t bytes, int64_t limit, int64_t *kv_heads)
{
    const int64_t ratio = args->Hq / args->Hkv;
    if (args->window > 0) limit = args->window;
    int64_t heads = esa_min64(args->Hq, esa_max64(1, limit / esa_max64(1, bytes)));
    if (heads >= ratio) heads = heads / ratio * ratio;  /* whole groups of query heads share their keys */
    *kv_heads = esa_min64(args->Hkv, (heads - 1) / ratio + 1 + (heads < ratio));
    return heads;
}

void esa_block_stats(const esa_cpu_kernels *kern, float *top, float *sum, int64_t ld_out, const float *s, int64_t ld,
                     int64_t rows, int64_t keys, int64_t group)
{
    if (group % 16 == 0) {
        kern->stats(top, sum, ld_out, s, ld, rows, keys, group);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0, g = 0; first < keys; first += group, g++) {
            const float *x = s + r * ld + first;
            const int64_t n = esa_min64(group, keys - first);
            float high = -INFINITY, e = 0.0f;
            for (int64_t c = 0; c < n; c++) if (x[c] > high || x[c] != x[c]) high = x[c];
            if (high != -INFINITY) for (int64_t c = 0; c < n; c++) e += exp2f(x[c] - high);
            top[r * ld_out + g] = high;
            sum[r * ld_out + g] = e;
        }
}

double esa_row_masses(double *mass, float *top, const float *tops, const float *sums, int64_t n)
{
    float high = -INFINITY;
    double total = 0.0;
    for (int64_t j = 0; j < n; j++) if (tops[j] > high) high = tops[j];
    *top = high;
    for (int64_t j = 0; j < n; j++) {
        /* A block without visible keys has sum 0 and maximum -inf; a NaN anywhere must stay visible as NaN. */
        mass[j] = sums[j] == 0.0f ? 0.0 : (double)sums[j] * (double)exp2f(tops[j] - high);
        total += mass[j];
    }
    return total;
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

/* 1 for compat rf_v2, which pools image and text apart and forces its own rows and columns. */
static int32_t pools_apart(const esa_select_params *p) { return p->selector == ESA_SELECT_RF_V2 && p->mode != ESA_MODE_FIXED; }

int64_t esa_args_block(const esa_select_args *args, int32_t side, int64_t i, int64_t N, int64_t *end)
{
    const esa_layout *l = &args->params.layout;
    const int64_t B = side ? args->params.block_k : args->params.block_q;
    int64_t first = i * B, stop = N;
    if (pools_apart(&args->params)) {
        const int64_t image = side ? args->Nk - l->text_front_k - l->text_back_k : args->Nq - l->text_front_q - l->text_back_q;
        const int64_t n = esa_ceil_div(image, B);
        if (i < n) stop = esa_min64(stop, image);
        else first = image + (i - n) * B;
    }
    *end = esa_min64(stop, first + B);
    return first;
}

/* The original's forced rows and columns: the last text blocks, and the first frame rounded up to blocks. No causal. */
static void fill_apart(esa_rules *r, const esa_select_args *args)
{
    const esa_layout *l = &args->params.layout;
    const int64_t Bq = args->params.block_q, Bk = args->params.block_k, frame = (int64_t)l->grid_q[1] * l->grid_q[2];
    const int64_t text = (int64_t)l->text_front_q + l->text_back_q, tq = esa_ceil_div(text, Bq), tk = esa_ceil_div(text, Bk);
    const int64_t fq = l->protect_first_frame ? esa_ceil_div(frame, Bq) : 0, fk = l->protect_first_frame ? esa_ceil_div(frame, Bk) : 0;
    int64_t end;
    r->existing = 0;
    while (r->existing < args->nk && esa_args_block(args, 1, r->existing, r->kv_len, &end) < r->kv_len) r->existing++;
    for (int64_t j = 0; j < args->nk; j++) r->column[j] = j < fk || j >= args->nk - tk;
    for (int64_t i = 0; i < args->nq; i++) {
        r->dense[i] = i < fq || i >= args->nq - tq;
        r->visible[i] = r->diagonal[i] = (int32_t)r->existing;
    }
    r->seen = args->nq * r->existing;
    count_least(r, args);
}

void esa_rules_fill(esa_rules *r, const esa_select_args *args, int64_t b)
{
    const int64_t Bq = args->params.block_q, Bk = args->params.block_k, offset = args->Nk - args->Nq;
    const int32_t fixed = args->params.mode == ESA_MODE_FIXED;
    r->kv_len = esa_args_kv_len(args, b);
    if (pools_apart(&args->params)) { fill_apart(r, args); return; }
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
        r->diagonal[i] = fixed && own < end ? (int32_t)(own / Bk) : r->visible[i];
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
