/* rf_v2.c - RainFusion 2.0: scores block means against block means and keeps the best of each row.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     score[i][j] = scale * mean(q of block i) . mean(k of block j)
 *     keep        = ceil(n (1 - sparsity)) of n visible blocks
 *
 * fixed: blocks are those of the kernel, cut from the ordered sequence. Counts are exact and ties
 * go to the lower index. Text and first frame are forced inside the budget. Softmax is monotone, so
 * ranking the scores gives the same result without rounding ties.
 *
 * compat: softmax is in fp32, every block at or above the keep-th value stays, and forced rows and
 * columns come on top. Release 3.0 of the original pools image and text separately.
 *
 * compat-round: also rounds the means, the dot product, the scaled dot product and the softmax to
 * the input dtype. */
#include <string.h>
#include "rules/compat_rows.h"
#include "select/rules.h"

enum { WINDOW_BYTES = 32 << 20 };

typedef struct rf_work {
    int64_t heads, kv_heads;      /* heads per window */
    int64_t q_bytes, k_bytes, ld; /* packed means of one head; pitch of a score tile */
    esa_rules rules;
    float *q_mean, *k_mean; /* [heads][nq][D], [kv_heads][nk][D] */
    char *q, *k;            /* [heads][q_bytes], [kv_heads][k_bytes] */
    int32_t *quota;         /* [nq] */
    float *tile;            /* [threads][mr][ld] */
    esa_picker *picker;     /* [threads] */
} rf_work;

typedef struct job {
    const esa_select_args *args;
    const rf_work *w;
    esa_mask *mask;
    int64_t b, h0, heads, g0, kv_heads, groups;
    int32_t compat, round; /* round: the dtype compat-round rounds to; f32: no rounding */
} job;

static void carve(rf_work *w, esa_carve *c, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool), f = (int64_t)sizeof(float);
    w->q_bytes = esa_q_pack_bytes(a->kern, a->nq, a->D);
    w->k_bytes = esa_k_pack_bytes(a->kern, a->nk, a->D);
    w->ld = esa_ceil_div(a->nk, a->kern->nr) * a->kern->nr;
    w->heads = esa_args_window(a, w->q_bytes + w->k_bytes + (a->nq + a->nk) * a->D * f,
                               WINDOW_BYTES, &w->kv_heads);
    esa_rules_carve(&w->rules, c, a);
    w->q_mean = esa_carve_take(c, w->heads * a->nq * a->D * f);
    w->k_mean = esa_carve_take(c, w->kv_heads * a->nk * a->D * f);
    w->q = esa_carve_take(c, w->heads * w->q_bytes);
    w->k = esa_carve_take(c, w->kv_heads * w->k_bytes);
    w->quota = esa_carve_take(c, a->nq * (int64_t)sizeof(int32_t));
    w->tile = esa_carve_take(c, threads * a->kern->mr * w->ld * f);
    w->picker = esa_carve_take(c, threads * (int64_t)sizeof(esa_picker));
    for (int64_t t = 0; t < threads; t++) {
        esa_picker p;
        esa_picker_carve(&p, c, a->nk);
        if (w->picker) w->picker[t] = p;
    }
}

void esa_rf_v2_carve(const esa_select_args *args, esa_carve *c)
{
    rf_work w;
    carve(&w, c, args);
}

/* item = mean of a query block of a head; after those, mean of a key block of a kv head. */
static void mean_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const int64_t q_items = x->heads * a->nq, size = esa_dtype_size(a->dtype);
    const int32_t side = item >= q_items;
    const int64_t n = side ? a->nk : a->nq, at = side ? item - q_items : item, head = at / n,
                  i = at % n;
    const int64_t stride = side ? a->k_stride[2] : a->q_stride[2];
    int64_t end;
    const int64_t first = esa_args_block(a, side, i, side ? x->w->rules.kv_len : a->Nq, &end);
    const int32_t *perm = side ? a->perm_k : a->perm_q;
    const char *src = side ? esa_args_k(a, x->b, (x->g0 + head) * (a->Hq / a->Hkv))
                           : esa_args_q(a, x->b, x->h0 + head);
    float *dst = (side ? x->w->k_mean : x->w->q_mean) + at * a->D;
    (void)worker;
    if (end <= first) { /* beyond kv_len: never used, but packed with the others */
        memset(dst, 0, (size_t)a->D * sizeof *dst);
        return;
    }
    if (perm)
        a->kern->mean(dst, src, a->dtype, stride, perm + first, end - first, a->D);
    else
        a->kern->mean(dst, src + first * stride * size, a->dtype, stride, NULL, end - first, a->D);
    if (x->round != ESA_DTYPE_F32)
        for (int64_t d = 0; d < a->D; d++) dst[d] = esa_round_to(dst[d], x->round);
}

static void pack_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    (void)worker;
    if (item < x->heads)
        a->kern->pack_q(x->w->q + item * x->w->q_bytes, x->w->q_mean + item * a->nq * a->D,
                        ESA_DTYPE_F32, a->D, NULL, a->nq, a->D,
                        x->round != ESA_DTYPE_F32 ? 1.0f : (float)a->params.scale);
    else
        a->kern->pack_k(x->w->k + (item - x->heads) * x->w->k_bytes,
                        x->w->k_mean + (item - x->heads) * a->nk * a->D, ESA_DTYPE_F32, a->D, NULL,
                        a->nk, a->D);
}

/* item = (head, group of mr query blocks). */
static void pick_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const rf_work *w = x->w;
    const int64_t head = item / x->groups, first = item % x->groups * a->kern->mr,
                  rows = esa_min64(a->kern->mr, a->nq - first);
    const int64_t kv = (x->h0 + head) / (a->Hq / a->Hkv) - x->g0;
    float *tile = w->tile + worker * a->kern->mr * w->ld;
    esa_picker *p = &w->picker[worker];
    a->kern->qk(tile, w->ld,
                w->q + head * w->q_bytes +
                    item % x->groups * esa_q_pack_bytes(a->kern, a->kern->mr, a->D),
                w->k + kv * w->k_bytes, rows, a->nk, a->D, 1.0f, 0);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = first + r;
        if (x->compat) {
            const int32_t v = w->rules.visible[i];
            if (!w->rules.dense[i])
                esa_rf_pick_compat(p->keep, tile + r * w->ld, v, &a->params, x->round, p->key);
            for (int64_t j = 0; j < a->nk; j++)
                p->keep[j] = j < v && (w->rules.dense[i] || w->rules.column[j] || p->keep[j]);
        } else {
            esa_rules_pick(p, &w->rules, tile + r * w->ld, i, w->quota[i], a->nk);
        }
        esa_mask_set_row(x->mask, (x->b * a->Hq + x->h0 + head) * a->nq + i, p->keep);
    }
}

void esa_rf_v2_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    rf_work w;
    carve(&w, &c, args);
    job x = { .args = args,
              .w = &w,
              .mask = mask,
              .groups = esa_ceil_div(args->nq, args->kern->mr),
              .compat = args->params.mode != ESA_MODE_FIXED,
              .round = esa_rows_round(args) };
    const int64_t ratio = args->Hq / args->Hkv;
    for (x.b = 0; x.b < args->B; x.b++) {
        esa_rules_fill(&w.rules, args, x.b);
        if (!x.compat) {
            int64_t total = 0;
            for (int64_t i = 0; i < args->nq; i++)
                total += esa_row_wish(&args->params, w.rules.visible[i]);
            esa_budget_spread(w.quota, w.rules.visible, w.rules.least, args->nq, total);
        }
        for (x.h0 = 0; x.h0 < args->Hq; x.h0 += w.heads) {
            x.heads = esa_min64(w.heads, args->Hq - x.h0);
            x.g0 = x.h0 / ratio;
            x.kv_heads = (x.h0 + x.heads - 1) / ratio - x.g0 + 1;
            esa_pool_run(args->pool, mean_item, &x, x.heads * args->nq + x.kv_heads * args->nk);
            esa_pool_run(args->pool, pack_item, &x, x.heads + x.kv_heads);
            esa_pool_run(args->pool, pick_item, &x, x.heads * x.groups);
        }
    }
}
