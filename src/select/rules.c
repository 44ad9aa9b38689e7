/* rules.c - which blocks a row sees, which ones it must keep, and how it picks the others.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The rules are the pure functions of rules/rows.h, which the GPU uses too. */
#include <math.h>
#include <string.h>
#include "select/rules.h"

int64_t esa_args_kv_len(const esa_select_args *args, int64_t b)
{
    return esa_kv_len(args->params.kv_len ? args->params.kv_len[b] : args->Nk, args->Nk);
}

const void *esa_args_q(const esa_select_args *args, int64_t b, int64_t h)
{
    return (const char *)args->q +
           (b * args->q_stride[0] + h * args->q_stride[1]) * esa_dtype_size(args->dtype);
}

const void *esa_args_k(const esa_select_args *args, int64_t b, int64_t h)
{
    const int64_t g = h / (args->Hq / args->Hkv);
    return (const char *)args->k +
           (b * args->k_stride[0] + g * args->k_stride[1]) * esa_dtype_size(args->dtype);
}

int64_t esa_args_window(const esa_select_args *args, int64_t bytes, int64_t limit,
                        int64_t *kv_heads)
{
    const int64_t ratio = args->Hq / args->Hkv;
    if (args->window > 0) limit = args->window;
    int64_t heads = esa_min64(args->Hq, esa_max64(1, limit / esa_max64(1, bytes)));
    /* Whole groups of query heads share their keys. */
    if (heads >= ratio) heads = heads / ratio * ratio;
    *kv_heads = esa_min64(args->Hkv, (heads - 1) / ratio + 1 + (heads < ratio));
    return heads;
}

void esa_block_stats(const esa_cpu_kernels *kern, float *top, float *sum, int64_t ld_out,
                     const float *s, int64_t ld, int64_t rows, int64_t keys, int64_t group)
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
            for (int64_t c = 0; c < n; c++)
                if (x[c] > high || x[c] != x[c]) high = x[c];
            if (high != -INFINITY)
                for (int64_t c = 0; c < n; c++) e += exp2f(x[c] - high);
            top[r * ld_out + g] = high;
            sum[r * ld_out + g] = e;
        }
}

double esa_row_masses(double *mass, float *top, const float *tops, const float *sums, int64_t n)
{
    float high = -INFINITY;
    double total = 0.0;
    for (int64_t j = 0; j < n; j++)
        if (tops[j] > high) high = tops[j];
    *top = high;
    for (int64_t j = 0; j < n; j++) {
        /* A block without visible keys has sum 0 and maximum -inf. NaN must stay NaN. */
        mass[j] = sums[j] == 0.0f ? 0.0 : (double)sums[j] * (double)exp2f(tops[j] - high);
        total += mass[j];
    }
    return total;
}

void esa_rules_carve(esa_rules *rules, esa_carve *carve, const esa_select_args *args)
{
    rules->visible = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->diagonal = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->least = esa_carve_take(carve, args->nq * (int64_t)sizeof(int32_t));
    rules->dense = esa_carve_take(carve, args->nq);
    rules->column = esa_carve_take(carve, args->nk);
}

void esa_rules_fill(esa_rules *r, const esa_select_args *args, int64_t b)
{
    r->kv_len = esa_args_kv_len(args, b);
    r->existing = esa_blocks_existing(args, r->kv_len);
    r->seen = 0;
    for (int64_t j = 0; j < args->nk; j++)
        r->column[j] = (uint8_t)esa_column_forced(args, r->kv_len, r->existing, j);
    for (int64_t i = 0; i < args->nq; i++) {
        const int64_t visible = esa_row_visible(args, r->kv_len, r->existing, i);
        r->visible[i] = (int32_t)visible;
        r->diagonal[i] = (int32_t)esa_row_diagonal(args, r->kv_len, visible, i);
        r->dense[i] = (uint8_t)esa_row_dense(args, i);
        r->seen += visible;
        int32_t columns = 0;
        for (int32_t j = 0; j < r->diagonal[i]; j++) columns += r->column[j];
        r->least[i] = esa_row_least(r->visible[i], r->diagonal[i], r->dense[i], columns);
    }
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

void esa_rules_pick(esa_picker *p, const esa_rules *rules, const float *value, int64_t i,
                    int64_t quota, int64_t nk)
{
    const int64_t v = rules->visible[i], forced = esa_rules_forced(p->keep, rules, i, nk);
    if (forced >= v) return;
    if (quota > forced) {
        for (int64_t j = 0; j < v; j++) p->allow[j] = !p->keep[j];
        esa_top_k(p->keep, value, p->allow, v, quota - forced, p->key);
        return; /* the best block is forced or was taken first */
    }
    uint64_t best = 0; /* the budget is used up, but a row always keeps its best block */
    for (int64_t j = 0; j < v; j++) {
        const uint64_t key = esa_rank_key(value[j], j);
        if (key > best) best = key;
    }
    p->keep[esa_rank_index(best)] = 1;
}
