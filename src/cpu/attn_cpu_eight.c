/* attn_cpu_eight.c - 8-bit attention on the CPU: the reference for the 8-bit kernels of GPUs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/precision.md has the arithmetic. This file follows it step by step and is not written to be
 * fast: it takes two to four times as long as attention in f32.
 *
 * kv heads are taken in windows that fit into WINDOW_BYTES. Each window has four phases: centres,
 * codes, their mean errors, attention. One worker computes one query block, so the bits do not
 * depend on the number of threads. Its stages are
 *
 *     the listed blocks, last to first
 *     then the tail: stages of 128 fine means, in the order of their list, spread evenly among the
 *     stages of 128 block means, in ascending order, without those where no mean stands in
 *
 * Per stage, for nr queries side by side:
 *
 *     x = S scale log2(e) s_q s_k + bias,   m' = max(m, max x),   alpha = exp2(m - m')
 *     P = E4M3(448 exp2(x - m')),   l = l alpha + sum P,   o = o alpha + V^T P
 *
 * With kern->eight_f16 P and v have f16 instead of E4M3. With kern->eight_steps a stage has 64 keys
 * or means, and stages of fine means come before those of block means, both last to first. */
#include "cpu/attn_cpu_eight.h"

#include <math.h>
#include <string.h>
#include "cpu/exp2_poly.h"

#define WINDOW_BYTES (INT64_C(200) << 20)
#define LOG2_E       1.4426950408889634
#define LN_2         0.6931471805599453
#define ROUND        0x1.8p23f /* adding and subtracting it rounds to whole numbers */

int32_t esa_attn_cpu_eight_takes(const esa_attn_args *a)
{
    return a->precision == 8 && !a->causal && a->tail != ESA_TAIL_CENTROID;
}

static void carve_worker(eight_worker *w, const eight_run *run, esa_carve *carve)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr, fine = a->fine ? ESA_EIGHT_ROWS * a->D * 4 : 0;
    w->q = esa_carve_take(carve, run->rows_pad * a->D * 4);
    w->rows = esa_carve_take(carve, nr * a->D * 4);
    w->factor = esa_carve_take(carve, run->rows_pad * 4);
    w->o = esa_carve_take(carve, run->rows_pad * a->D * 4);
    w->t = esa_carve_take(carve, nr * a->D * 4);
    w->s = esa_carve_take(carve, run->keys * nr * 4);
    w->m = esa_carve_take(carve, run->rows_pad * 4);
    w->l = esa_carve_take(carve, run->rows_pad * 4);
    w->alpha = esa_carve_take(carve, nr * 4);
    w->top = esa_carve_take(carve, nr * 4);
    w->sum = esa_carve_take(carve, nr * 4);
    w->scale = esa_carve_take(carve, run->keys * 4);
    w->bias = esa_carve_take(carve, run->keys * 4);
    w->fine_k = esa_carve_take(carve, fine);
    w->fine_v = esa_carve_take(carve, fine);
    w->stands = esa_carve_take(carve, a->tail ? a->nk : 0);
}

static void carve_run(eight_run *run, const esa_attn_args *a, esa_carve *carve)
{
    const int64_t threads = esa_pool_threads(a->pool), nr = a->kern->nr,
                  means = a->tail ? a->nk * (1 + a->fine) : 0,
                  per_head = (a->nk * a->block_k + means) * 2 * a->D * 4;
    memset(run, 0, sizeof *run);
    run->a = a;
    run->factor = (float)(a->scale * LOG2_E);
    run->window = esa_min64(a->B * a->Hkv, esa_max64(1, WINDOW_BYTES / per_head));
    run->rows_pad = esa_ceil_div(a->block_q, nr) * nr;
    run->keys = esa_max64(a->block_k, ESA_EIGHT_ROWS);
    run->means = a->kern->eight_steps ? ESA_EIGHT_STEP : ESA_EIGHT_ROWS;
    const int64_t channels = run->window * a->D * 4, blocks = run->window * a->nk;
    run->k_centre = esa_carve_take(carve, channels);
    run->v_centre = esa_carve_take(carve, channels);
    run->v_scale = esa_carve_take(carve, channels);
    run->v_added = esa_carve_take(carve, channels);
    run->v_inverse = esa_carve_take(carve, channels);
    run->k_scale = esa_carve_take(carve, blocks * 4);
    run->k = esa_carve_take(carve, blocks * a->block_k * a->D * 4);
    run->v = esa_carve_take(carve, blocks * a->block_k * a->D * 4);
    if (a->tail) {
        run->k_mean = esa_carve_take(carve, blocks * a->D * 4);
        run->v_mean = esa_carve_take(carve, blocks * a->D * 4);
        run->k_fine = esa_carve_take(carve, blocks * a->fine * a->D * 4);
        run->v_fine = esa_carve_take(carve, blocks * a->fine * a->D * 4);
    }
    run->worker = esa_carve_take(carve, threads * (int64_t)sizeof(eight_worker));
    for (int64_t t = 0; t < threads; t++) {
        eight_worker w;
        carve_worker(&w, run, carve);
        if (carve->base) run->worker[t] = w;
    }
}

int64_t esa_attn_cpu_eight_workspace(const esa_attn_args *args)
{
    eight_run run;
    esa_carve carve = { NULL, 0 };
    carve_run(&run, args, &carve);
    return carve.used;
}

/* ---------------------------------------------------------------- one stage */

typedef struct eight_stage { /* keys as rows of codes; their scales and biases are the worker's */
    const float *k, *v;
    int64_t keys;
} eight_stage;

/* 448 2^x, for x <= 0 or NaN. Below `least` x counts as least, whose result is rounded to 0. */
static inline float probability(float x, float least)
{
    const float y = x < least ? least : x, whole = (y + ROUND) - ROUND, f = y - whole;
    const float fraction = 1.0f + f * (EXP2_C1 +
                                       f * (EXP2_C2 + f * (EXP2_C3 + f * (EXP2_C4 + f * EXP2_C5))));
    const int32_t exponent = (int32_t)(whole > -64.0f ? whole : 0.0f); /* NaN: 0 */
    const float power = esa_f32_from_bits((uint32_t)(exponent + 127) << 23);
    return ESA_EIGHT_TOP * fraction * power;
}

/* One key's P of nr queries from their logits, rounded, and its part of their sums: after rounding
 * to E4M3, but before rounding to f16, whose errors are small. */
static void weigh_e4m3(float *x, float *sum, const float *m, int64_t nr)
{
    for (int64_t c = 0; c < nr; c++) {
        x[c] = x[c] == -INFINITY ? 0.0f : esa_eight_weight(probability(x[c] - m[c], -20.0f), 0);
        sum[c] += x[c];
    }
}

static void weigh_f16(float *x, float *sum, const float *m, int64_t nr)
{
    for (int64_t c = 0; c < nr; c++) {
        const float p = x[c] == -INFINITY ? 0.0f : probability(x[c] - m[c], -40.0f);
        x[c] = esa_eight_weight(p, 1);
        sum[c] += p;
    }
}

/* Turns sums of codes s[keys][nr] of one panel into P, and updates m, l and alpha. */
static void soften(eight_worker *w, int64_t keys, int64_t nr, const float *factor, float *m,
                   float *l, int32_t f16)
{
    float *const s = w->s, *const top = w->top, *const sum = w->sum, *const alpha = w->alpha;
    for (int64_t c = 0; c < nr; c++) top[c] = m[c], sum[c] = 0.0f;
    for (int64_t i = 0; i < keys; i++) {
        const float scale = w->scale[i], bias = w->bias[i];
        float *const row = s + i * nr;
        if (bias == -INFINITY) { /* absent, whatever its scale */
            for (int64_t c = 0; c < nr; c++) row[c] = -INFINITY;
            continue;
        }
        for (int64_t c = 0; c < nr; c++) {
            row[c] = row[c] * (factor[c] * scale) + bias;
            top[c] = row[c] > top[c] ? row[c] : top[c];
        }
    }
    for (int64_t c = 0; c < nr; c++) {
        alpha[c] = m[c] == -INFINITY ? 0.0f : exp2f(m[c] - top[c]);
        m[c] = top[c];
    }
    for (int64_t i = 0; i < keys; i++) {
        if (f16)
            weigh_f16(s + i * nr, sum, m, nr);
        else
            weigh_e4m3(s + i * nr, sum, m, nr);
    }
    for (int64_t c = 0; c < nr; c++) l[c] = l[c] * alpha[c] + sum[c];
}

static void attend(const eight_run *run, eight_worker *w, int64_t rows, const eight_stage *stage)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr, D = a->D;
    for (int64_t r = 0; r < rows; r += nr) {
        a->kern->kq(w->s, w->q + r * D, stage->k, D, stage->keys, D, 1.0f);
        soften(w, stage->keys, nr, w->factor + r, w->m + r, w->l + r, a->kern->eight_f16);
        a->kern->pv(w->t, w->s, stage->v, D, stage->keys, D, NULL, 0);
        float *const o = w->o + r * D;
        for (int64_t d = 0; d < D; d++)
            for (int64_t c = 0; c < nr; c++)
                o[d * nr + c] = o[d * nr + c] * w->alpha[c] + w->t[d * nr + c];
    }
}

/* ---------------------------------------------------------------- one query block */

typedef struct eight_pass {
    int64_t b, h, slot, row0, rows, kv_len, blocks, mask_row;
} eight_pass;

/* Codes of the queries in panels, and the factors of their rows. */
static void take_queries(const eight_run *run, eight_worker *w, const eight_pass *p)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr, D = a->D;
    for (int64_t r0 = 0; r0 < p->rows; r0 += nr) {
        const int64_t n = esa_min64(nr, p->rows - r0);
        for (int64_t r = 0; r < n; r++)
            w->factor[r0 + r] = run->factor *
                                esa_eight_query(w->rows + r * D, a, p->b, p->h, p->row0 + r0 + r);
        for (int64_t r = n; r < nr; r++) w->factor[r0 + r] = 0.0f;
        a->kern->panel_q(w->q + r0 * D, w->rows, ESA_DTYPE_F32, D, NULL, n, D, 1.0f);
    }
}

static void attend_block(const eight_run *run, eight_worker *w, const eight_pass *p, int64_t j)
{
    const esa_attn_args *a = run->a;
    const int64_t at = p->slot * a->nk + j,
                  keys = esa_min64(a->block_k, p->kv_len - j * a->block_k),
                  most = a->kern->eight_steps ? ESA_EIGHT_STEP : a->block_k;
    for (int64_t i = 0; i < keys; i++) w->scale[i] = run->k_scale[at], w->bias[i] = 0.0f;
    for (int64_t i = (keys - 1) / most * most; i >= 0; i -= most) {
        const int64_t first = (at * a->block_k + i) * a->D;
        const eight_stage stage = { run->k + first, run->v + first, esa_min64(most, keys - i) };
        attend(run, w, p->rows, &stage);
    }
}

/* Finds the blocks that one mean replaces, and returns how many stages of means hold one. */
static int64_t find_standing(const eight_run *run, eight_worker *w, const eight_pass *p)
{
    const esa_attn_args *a = run->a;
    const uint16_t *list = a->index + p->mask_row * a->cap;
    memset(w->stands, 1, (size_t)p->blocks);
    for (int64_t c = 0; c < a->count[p->mask_row] && list[c] < p->blocks; c++)
        w->stands[list[c]] = 0;
    if (a->fine_count) {
        const uint16_t *fine = a->fine_index + p->mask_row * a->cap;
        for (int64_t c = 0; c < a->fine_count[p->mask_row] && fine[c] < p->blocks; c++)
            w->stands[fine[c]] = 0;
    }
    int64_t stages = 0;
    for (int64_t j = 0; j < p->blocks; j += run->means) {
        const int64_t n = esa_min64(run->means, p->blocks - j);
        stages += memchr(w->stands + j, 1, (size_t)n) != NULL;
    }
    return stages;
}

/* Stage t of block means. Returns 0 if none of them stands in. */
static int32_t attend_means(const eight_run *run, eight_worker *w, const eight_pass *p, int64_t t)
{
    const esa_attn_args *a = run->a;
    const int64_t j0 = t * run->means, n = esa_min64(run->means, p->blocks - j0),
                  at = p->slot * a->nk + j0;
    if (!memchr(w->stands + j0, 1, (size_t)n)) return 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t keys = esa_min64(a->block_k, p->kv_len - (j0 + i) * a->block_k);
        w->scale[i] = run->k_scale[at + i];
        w->bias[i] = w->stands[j0 + i] ? log2f((float)keys) : -INFINITY;
    }
    const eight_stage stage = { run->k_mean + at * a->D, run->v_mean + at * a->D, n };
    attend(run, w, p->rows, &stage);
    return 1;
}

/* Number of fine means of the row: those of all its fine blocks that have keys. */
static int64_t fine_columns(const esa_attn_args *a, const eight_pass *p)
{
    if (!a->fine_count) return 0;
    const uint16_t *list = a->fine_index + p->mask_row * a->cap;
    const int64_t size = a->block_k / a->fine;
    int64_t columns = 0;
    for (int64_t c = 0; c < a->fine_count[p->mask_row] && list[c] < p->blocks; c++)
        columns += esa_ceil_div(esa_min64(a->block_k, p->kv_len - list[c] * a->block_k), size);
    return columns;
}

/* Stage t of fine means. All blocks but the last have `fine` of them. */
static void attend_fine(const eight_run *run, eight_worker *w, const eight_pass *p, int64_t t,
                        int64_t columns)
{
    const esa_attn_args *a = run->a;
    const uint16_t *list = a->fine_index + p->mask_row * a->cap;
    const int64_t size = a->block_k / a->fine, first = t * run->means,
                  n = esa_min64(run->means, columns - first), D = a->D;
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = list[(first + i) / a->fine], part = (first + i) % a->fine,
                      at = p->slot * a->nk + j,
                      tokens = esa_min64(size, p->kv_len - j * a->block_k - part * size);
        memcpy(w->fine_k + i * D, run->k_fine + (at * a->fine + part) * D, (size_t)D * 4);
        memcpy(w->fine_v + i * D, run->v_fine + (at * a->fine + part) * D, (size_t)D * 4);
        w->scale[i] = run->k_scale[at];
        w->bias[i] = log2f((float)tokens);
    }
    const eight_stage stage = { w->fine_k, w->fine_v, n };
    attend(run, w, p->rows, &stage);
}

static void attend_tail(const eight_run *run, eight_worker *w, const eight_pass *p)
{
    const int64_t columns = fine_columns(run->a, p), fine = esa_ceil_div(columns, run->means),
                  stages = fine + find_standing(run, w, p);
    if (run->a->kern->eight_steps) {
        for (int64_t t = fine - 1; t >= 0; t--) attend_fine(run, w, p, t, columns);
        for (int64_t t = (p->blocks - 1) / run->means; t >= 0; t--) attend_means(run, w, p, t);
        return;
    }
    int64_t means = 0; /* the next stage of block means */
    for (int64_t t = 0; t < stages; t++) {
        if (t * fine % stages < fine) {
            attend_fine(run, w, p, t * fine / stages, columns);
        } else {
            while (!attend_means(run, w, p, means)) means++;
            means++;
        }
    }
}

static void finish_rows(const eight_run *run, const eight_worker *w, const eight_pass *p)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr, D = a->D;
    const float *k_centre = run->k_centre + p->slot * D, *v_added = run->v_added + p->slot * D,
                *v_scale = run->v_scale + p->slot * D;
    const int32_t *perm = order_at(a->perm_q, a->perm_q_stride, p->b, p->h);
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t n = perm ? perm[p->row0 + r] : p->row0 + r;
        const float *o = w->o + r / nr * nr * D + r % nr, l = w->l[r];
        float *x = w->rows;
        for (int64_t d = 0; d < D; d++)
            x[d] = l == 0.0f ? 0.0f : o[d * nr] / l * v_scale[d] + v_added[d];
        if (a->carry.value) {
            esa_attn_carry_row(a, p->b, p->h, n, x);
            if (a->carry.use == ESA_CARRY_MAKE) continue;
        } else {
            void *out = (void *)at(
                a->o, p->b * a->o_stride[0] + p->h * a->o_stride[1] + n * a->o_stride[2], a->dtype);
            for (int64_t d = 0; d < D; d++) esa_store_f32(out, d, a->dtype, x[d]);
        }
        if (!a->lse) continue;
        const void *q = at(a->q, p->b * a->q_stride[0] + p->h * a->q_stride[1] + n * a->q_stride[2],
                           a->dtype);
        double shift = 0.0; /* what the centre of the keys took from every logit */
        for (int64_t d = 0; d < D; d++)
            shift += (double)esa_load_f32(q, d, a->dtype) * (double)k_centre[d];
        const double sum = (double)l / (double)ESA_EIGHT_TOP;
        a->lse[p->b * a->lse_stride[0] + p->h * a->lse_stride[1] + n * a->lse_stride[2]] =
            l == 0.0f ? -INFINITY
                      : (float)(LN_2 * ((double)w->m[r] + log2(sum)) + a->scale * shift);
    }
}

static void query_block(void *arg, int64_t item, int32_t worker)
{
    const eight_run *run = arg;
    const esa_attn_args *a = run->a;
    eight_worker *w = &run->worker[worker];
    const int64_t group = a->Hq / a->Hkv, i = item % a->nq, slot = item / a->nq / group,
                  head = run->first + slot;
    eight_pass p = { .b = head / a->Hkv,
                     .h = head % a->Hkv * group + item / a->nq % group,
                     .slot = slot,
                     .row0 = i * a->block_q };
    p.rows = esa_min64(a->block_q, a->Nq - p.row0);
    p.kv_len = kv_len_of(a, p.b);
    p.blocks = esa_ceil_div(p.kv_len, a->block_k);
    p.mask_row = (p.b * a->mask_batch + p.h) * a->nq + i;
    for (int64_t r = 0; r < run->rows_pad; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0.0f;
    }
    memset(w->o, 0, (size_t)(run->rows_pad * a->D * 4));
    take_queries(run, w, &p);
    const uint16_t *list = a->count ? a->index + p.mask_row * a->cap : NULL;
    for (int64_t c = (a->count ? a->count[p.mask_row] : p.blocks) - 1; c >= 0; c--) {
        const int64_t j = list ? list[c] : c;
        if (j < p.blocks) attend_block(run, w, &p, j);
    }
    if (a->count && a->tail) attend_tail(run, w, &p);
    finish_rows(run, w, &p);
}

void esa_attn_cpu_eight(const esa_attn_args *args, void *ws)
{
    eight_run run;
    esa_carve carve = { ws, 0 };
    carve_run(&run, args, &carve);
    const int64_t all = args->B * args->Hkv, group = args->Hq / args->Hkv;
    for (run.first = 0; run.first < all; run.first += run.heads) {
        run.heads = esa_min64(run.window, all - run.first);
        esa_pool_run(args->pool, esa_eight_centres, &run, 2 * run.heads);
        esa_pool_run(args->pool, esa_eight_block, &run, run.heads * args->nk);
        esa_pool_run(args->pool, esa_eight_added, &run, run.heads);
        esa_pool_run(args->pool, query_block, &run, run.heads * group * args->nq);
    }
}
