/* error_scores.c - the squared error of the output if the tail stands in for a key block, estimated
 * from means of a few queries and keys.
 * SPDX-License-Identifier: Apache-2.0
 *
 * For a mean query and the mean keys m of block j, with weights p_m = n_m exp(logit - reference):
 *
 *     w_j = sum p_m,  a_j = sum p_m v_m,  Z = sum w_j,  o = sum a_j / Z
 *     e_j = | a_j - sum t_i v_i - (w_j - sum t_i) o |^2 / Z^2
 *
 * where the t_i and v_i are the weights and values of the means that the tail puts there. The score
 * of a block is the mean of e_j over the mean queries of the query block, weighted by their tokens.
 *
 * Two steps per window of kv heads:
 *   1. Work items (kv head, key block): means of keys and values.
 *   2. Work items (head, a few query blocks): one panel of mean queries against all mean keys. The
 *      logits of the tail's means are means of logits, so they need no product. The sums a_j of all
 *      blocks are kept for a few columns of the head dimension at a time, because o must be known
 *      before any e_j: so both products are computed once, and the sums fit into the cache.
 * Weights are in units of group_k tokens, so that only the last, short group needs a factor. */
#include <math.h>
#include <string.h>
#include "select/error.h"

enum { WINDOW_BYTES = 24 << 20, SUM_BYTES = 384 << 10 };

typedef struct job {
    const esa_select_args *args;
    const esa_error_scores *w;
    const esa_rules *rules;
    float *out;
    int64_t level_stride;
    int64_t b, g0, kv_heads; /* kv heads of this window */
    int64_t rows;            /* mean keys that exist */
    float last;              /* tokens of the last mean key / group_k */
} job;

static void carve_panel(esa_error_panel *p, esa_carve *c, const esa_select_args *a,
                        const esa_error_scores *w)
{
    const int64_t nr = a->kern->nr, f = (int64_t)sizeof(float), line = nr * f;
    p->mean_q = esa_carve_take(c, nr * a->D * f);
    p->q = esa_carve_take(c, esa_k_pack_bytes(a->kern, nr, a->D));
    p->p = esa_carve_take(c, w->rows * line);
    p->t = esa_carve_take(c, a->nk * w->parts * line);
    p->w = esa_carve_take(c, a->nk * line);
    p->a = esa_carve_take(c, a->nk * w->columns * line);
    p->o = esa_carve_take(c, w->columns * line);
    p->e = esa_carve_take(c, w->levels * a->nk * line);
    p->m = esa_carve_take(c, line);
    p->l = esa_carve_take(c, line);
    p->alpha = esa_carve_take(c, line);
    p->z = esa_carve_take(c, line);
    p->row = esa_carve_take(c, w->per_k * a->D * f);
    p->sum = esa_carve_take(c, w->blocks * w->levels * a->nk * (int64_t)sizeof(double));
}

void esa_error_scores_carve(esa_error_scores *w, esa_carve *c, const esa_select_args *a)
{
    const esa_select_params *p = &a->params;
    const int64_t nr = a->kern->nr, mr = a->kern->mr, f = (int64_t)sizeof(float),
                  threads = esa_pool_threads(a->pool);
    w->levels = esa_level_costs_of(p).levels;
    w->fine = p->tail == ESA_TAIL_LEVELS ? p->fine : 0;
    w->parts = p->tail == ESA_TAIL_NONE ? 0 : 1 + w->fine;
    w->group_q = esa_error_queries(p);
    w->group_k = esa_error_keys(p);
    w->per_q = p->block_q / w->group_q;
    w->per_k = p->block_k / w->group_k;
    w->rows = esa_ceil_div(a->Nk, w->group_k);
    w->blocks = esa_min64(a->nq, esa_max64(1, nr / w->per_q));
    w->items = esa_ceil_div(a->nq, w->blocks);
    w->columns = esa_max64(1, SUM_BYTES / (a->nk * nr * f) / mr) * mr;
    w->columns = esa_min64(w->columns, a->D);
    w->chunks = esa_ceil_div(a->D, w->columns);
    const int64_t values = w->chunks * w->columns,
                  bytes = (w->rows * (a->D + values) + a->nk * w->parts * values) * f,
                  limit = a->window > 0 ? a->window : WINDOW_BYTES;
    w->kv_heads = esa_min64(a->Hkv, esa_max64(1, limit / bytes));
    w->k = esa_carve_take(c, w->kv_heads * w->rows * a->D * f);
    w->v = esa_carve_take(c, w->kv_heads * w->rows * values * f);
    w->tail = esa_carve_take(c, w->kv_heads * a->nk * w->parts * values * f);
    w->panel = esa_carve_take(c, threads * (int64_t)sizeof(esa_error_panel));
    for (int64_t t = 0; t < threads; t++) {
        esa_error_panel panel;
        carve_panel(&panel, c, a, w);
        if (w->panel) w->panel[t] = panel;
    }
}

/* ---------------------------------------------------------------- means */

/* Mean of the tokens first .. first+n-1 of one head, in order. */
static void mean_of(float *dst, const esa_select_args *a, const void *head, int64_t stride,
                    const int32_t *perm, int64_t first, int64_t n)
{
    const char *src = head;
    if (perm)
        a->kern->mean(dst, src, a->dtype, stride, perm + first, n, a->D);
    else
        a->kern->mean(dst, src + first * stride * esa_dtype_size(a->dtype), a->dtype, stride, NULL,
                      n, a->D);
}

/* Spreads a row of D values over the chunks: row `at` of [chunks][rows][columns]. */
static void spread(float *dst, const esa_error_scores *w, int64_t rows, int64_t at,
                   const float *row, int64_t D)
{
    for (int64_t c = 0; c < w->chunks; c++) {
        const int64_t d = c * w->columns, n = esa_min64(w->columns, D - d);
        memcpy(dst + (c * rows + at) * w->columns, row + d, (size_t)n * sizeof *dst);
    }
}

static const int32_t *order_of(const int32_t *perm, const int64_t stride[2], int64_t b, int64_t h)
{
    return perm ? perm + b * stride[0] + h * stride[1] : NULL;
}

/* Mean value of the tokens first .. first+n-1 of a block, as row `at` of the tail's means. Whole
 * groups are averaged from their means, the first of which is row[group]. */
static void tail_mean(const job *x, float *tail, int64_t at, esa_error_panel *p, const void *head,
                      const int32_t *perm, int64_t first, int64_t n, int64_t group)
{
    const esa_select_args *a = x->args;
    const esa_error_scores *w = x->w;
    if (n % w->group_k == 0)
        a->kern->mean(p->mean_q, p->row + group * a->D, ESA_DTYPE_F32, a->D, NULL, n / w->group_k,
                      a->D);
    else
        mean_of(p->mean_q, a, head, a->v_stride[2], perm, first, n);
    spread(tail, w, a->nk * w->parts, at, p->mean_q, a->D);
}

/* Step 1. item = (kv head, key block). */
static void mean_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const esa_error_scores *w = x->w;
    esa_error_panel *p = &w->panel[worker];
    const int64_t n = x->rules->existing, g = item / n, j = item % n, kv = x->g0 + g,
                  size = esa_dtype_size(a->dtype), Bk = a->params.block_k, first = j * Bk,
                  tokens = esa_min64(Bk, x->rules->kv_len - first);
    const char *k = (const char *)a->k + (x->b * a->k_stride[0] + kv * a->k_stride[1]) * size,
               *v = (const char *)a->v + (x->b * a->v_stride[0] + kv * a->v_stride[1]) * size;
    const int32_t *perm = order_of(a->perm_k, a->perm_k_stride, x->b, kv);
    const int64_t values = w->chunks * w->columns;
    float *mean_k = w->k + (g * w->rows + j * w->per_k) * a->D,
          *mean_v = w->v + g * w->rows * values, *tail = w->tail + g * a->nk * w->parts * values;

    for (int64_t m = 0, at = 0; at < tokens; m++, at += w->group_k) {
        const int64_t len = esa_min64(w->group_k, tokens - at);
        mean_of(mean_k + m * a->D, a, k, a->k_stride[2], perm, first + at, len);
        mean_of(p->row + m * a->D, a, v, a->v_stride[2], perm, first + at, len);
        spread(mean_v, w, w->rows, j * w->per_k + m, p->row + m * a->D, a->D);
    }
    if (!w->parts) return;
    tail_mean(x, tail, j * w->parts, p, v, perm, first, tokens, 0);
    for (int64_t f = 0; f < w->fine; f++) {
        const int64_t part = Bk / w->fine, at = f * part, len = esa_min64(part, tokens - at);
        if (len <= 0) break;
        tail_mean(x, tail, j * w->parts + 1 + f, p, v, perm, first + at, len, at / w->group_k);
    }
}

/* ---------------------------------------------------------------- one panel */

/* Packs the mean queries s .. s+n-1 of head h. */
static void pack_queries(const job *x, esa_error_panel *p, int64_t h, int64_t s, int64_t n)
{
    const esa_select_args *a = x->args;
    const int64_t group = x->w->group_q;
    const int32_t *perm = order_of(a->perm_q, a->perm_q_stride, x->b, h);
    for (int64_t i = 0; i < n; i++)
        mean_of(p->mean_q + i * a->D, a, esa_args_q(a, x->b, h), a->q_stride[2], perm,
                (s + i) * group, esa_min64(group, a->Nq - (s + i) * group));
    a->kern->panel_q(p->q, p->mean_q, ESA_DTYPE_F32, a->D, NULL, n, a->D,
                     (float)(a->params.scale * ESA_LOG2E));
}

/* dst[nr] = mean of the logits of rows first .. first+n-1, weighted by their tokens. */
static void mean_logit(const job *x, const esa_error_panel *p, float *dst, int64_t first, int64_t n)
{
    const int64_t nr = x->args->kern->nr;
    const int32_t cut = first + n == x->rows;
    const float last = cut ? x->last : 1.0f, all = (float)(n - 1) + last;
    const float *final = p->p + (first + n - 1) * nr;
    x->args->kern->fold(dst, p->p + first * nr, n - 1, nr, 0);
    for (int64_t c = 0; c < nr; c++) dst[c] = (dst[c] + last * final[c]) / all;
}

/* Number of mean keys of part i of block j that exist; *first is the first of them. Part 0 is the
 * block, the others are its fine parts. */
static int64_t part_rows(const job *x, int64_t j, int64_t i, int64_t *first)
{
    const esa_error_scores *w = x->w;
    const int64_t per = i == 0 ? w->per_k : w->per_k / w->fine,
                  at = j * w->per_k + (i == 0 ? 0 : (i - 1) * per);
    *first = at;
    return esa_max64(0, esa_min64(per, x->rows - at));
}

/* Fills the weights of the mean keys, of the tail's means and of the blocks, and 1/Z. */
static void weigh(const job *x, esa_error_panel *p, const float *mean_k)
{
    const esa_select_args *a = x->args;
    const esa_error_scores *w = x->w;
    const int64_t nr = a->kern->nr, n = x->rules->existing;
    a->kern->kq(p->p, p->q, mean_k, a->D, x->rows, a->D, 1.0f);
    for (int64_t j = 0; j < n && w->parts; j++)
        for (int64_t i = 0; i < w->parts; i++) {
            int64_t first;
            const int64_t rows = part_rows(x, j, i, &first);
            float *t = p->t + (j * w->parts + i) * nr;
            if (rows > 0)
                mean_logit(x, p, t, first, rows);
            else
                for (int64_t c = 0; c < nr; c++) t[c] = -INFINITY;
        }
    for (int64_t c = 0; c < nr; c++) {
        p->m[c] = -INFINITY;
        p->l[c] = 0.0f;
    }
    a->kern->softmax(p->p, p->p, x->rows, 1.0f, NULL, NULL, p->m, p->l, p->alpha);
    /* No mean of logits is above their maximum m by more than rounding, so m stays. */
    if (w->parts)
        a->kern->softmax(p->t, p->t, n * w->parts, 1.0f, NULL, NULL, p->m, p->l, p->alpha);
    for (int64_t j = 0; j < n && w->parts; j++)
        for (int64_t i = 0; i < w->parts; i++) {
            int64_t first;
            const int64_t rows = part_rows(x, j, i, &first);
            if (rows == 0) continue;
            const float tokens = (float)(rows - 1) + (first + rows == x->rows ? x->last : 1.0f);
            float *t = p->t + (j * w->parts + i) * nr;
            for (int64_t c = 0; c < nr; c++) t[c] *= tokens;
        }
    float *last = p->p + (x->rows - 1) * nr;
    for (int64_t c = 0; c < nr; c++) last[c] *= x->last;
    for (int64_t j = 0; j < n; j++) {
        int64_t first;
        const int64_t rows = part_rows(x, j, 0, &first);
        a->kern->fold(p->w + j * nr, p->p + first * nr, rows, nr, 0);
    }
    a->kern->fold(p->z, p->w, n, nr, 0);
    /* Every logit is -inf: no key counts, and no block can be wrong. */
    for (int64_t c = 0; c < nr; c++) p->z[c] = p->z[c] == 0.0f ? 0.0f : 1.0f / p->z[c];
}

/* Adds the errors of one chunk of columns to p->e. */
static void add_errors(const job *x, esa_error_panel *p, int64_t g, int64_t chunk)
{
    const esa_select_args *a = x->args;
    const esa_error_scores *w = x->w;
    const esa_cpu_kernels *kern = a->kern;
    const int64_t nr = kern->nr, n = x->rules->existing, col = w->columns,
                  D = esa_min64(col, a->D - chunk * col), parts = w->parts;
    const float *v = w->v + (g * w->chunks + chunk) * w->rows * col,
                *tail = w->tail + (g * w->chunks + chunk) * a->nk * parts * col;
    for (int64_t j = 0; j < n; j++) {
        int64_t first;
        const int64_t rows = part_rows(x, j, 0, &first);
        float *sum = p->a + j * col * nr;
        kern->pv(sum, p->p + first * nr, v + first * col, col, rows, D, NULL, 0);
        kern->fold(p->o, sum, 1, D * nr, j > 0);
    }
    for (int64_t d = 0; d < D; d++)
        for (int64_t c = 0; c < nr; c++) p->o[d * nr + c] *= p->z[c];
    for (int64_t j = 0; j < n; j++) {
        const float *sum = p->a + j * col * nr, *t = p->t + j * parts * nr,
                    *value = tail + j * parts * col;
        int64_t first, means = 0;
        kern->residue(p->e + j * nr, sum, p->o, p->w + j * nr, t, value, col, parts > 0, D);
        while (means < w->fine && part_rows(x, j, 1 + means, &first) > 0) means++;
        if (w->fine)
            kern->residue(p->e + (n + j) * nr, sum, p->o, p->w + j * nr, t + nr, value + col, col,
                          means, D);
    }
}

/* Adds the errors of the panel to the sums of its query blocks. s: first mean query of the panel;
 * i0: first query block of the item. */
static void add_sums(const job *x, const esa_error_panel *p, int64_t s, int64_t n, int64_t i0)
{
    const esa_error_scores *w = x->w;
    const int64_t nr = x->args->kern->nr, blocks = x->rules->existing;
    for (int64_t c = 0; c < n; c++) {
        const int64_t tokens = esa_min64(w->group_q, x->args->Nq - (s + c) * w->group_q),
                      i = (s + c) / w->per_q - i0;
        const double factor = (double)tokens * (double)p->z[c] * (double)p->z[c];
        double *sum = p->sum + i * w->levels * blocks;
        for (int64_t j = 0; j < w->levels * blocks; j++)
            sum[j] += factor * (double)p->e[j * nr + c];
    }
}

/* Step 2. item = (head, run of query blocks). */
static void score_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const esa_error_scores *w = x->w;
    esa_error_panel *p = &w->panel[worker];
    const int64_t ratio = a->Hq / a->Hkv, head = item / w->items, h = x->g0 * ratio + head,
                  g = head / ratio, i0 = item % w->items * w->blocks,
                  i1 = esa_min64(a->nq, i0 + w->blocks), nr = a->kern->nr, n = x->rules->existing,
                  nk = a->nk, end = esa_min64(i1 * w->per_q, esa_ceil_div(a->Nq, w->group_q));
    memset(p->sum, 0, (size_t)(w->blocks * w->levels * n) * sizeof *p->sum);
    for (int64_t s = i0 * w->per_q; s < end; s += nr) {
        const int64_t count = esa_min64(nr, end - s);
        pack_queries(x, p, h, s, count);
        weigh(x, p, w->k + g * w->rows * a->D);
        memset(p->e, 0, (size_t)(w->levels * n * nr) * sizeof *p->e);
        for (int64_t c = 0; c < w->chunks; c++) add_errors(x, p, g, c);
        add_sums(x, p, s, count, i0);
    }
    for (int64_t i = i0; i < i1; i++)
        for (int64_t l = 0; l < w->levels; l++) {
            const int64_t tokens = esa_min64(a->params.block_q, a->Nq - i * a->params.block_q);
            const double *sum = p->sum + ((i - i0) * w->levels + l) * n;
            float *out = x->out + l * x->level_stride + (h * a->nq + i) * nk;
            for (int64_t j = 0; j < n; j++) out[j] = (float)(sum[j] / (double)tokens);
            for (int64_t j = n; j < nk; j++) out[j] = 0.0f;
        }
}

void esa_error_scores_run(float *out, int64_t level_stride, const esa_error_scores *w,
                          const esa_select_args *a, const esa_rules *rules, int64_t b)
{
    job x = { .args = a,
              .w = w,
              .rules = rules,
              .out = out,
              .level_stride = level_stride,
              .b = b,
              .rows = esa_ceil_div(rules->kv_len, w->group_k) };
    if (rules->existing == 0) {
        for (int64_t l = 0; l < w->levels; l++)
            memset(out + l * level_stride, 0, (size_t)(a->Hq * a->nq * a->nk) * sizeof *out);
        return;
    }
    x.last = (float)(rules->kv_len - (x.rows - 1) * w->group_k) / (float)w->group_k;
    for (x.g0 = 0; x.g0 < a->Hkv; x.g0 += w->kv_heads) {
        x.kv_heads = esa_min64(w->kv_heads, a->Hkv - x.g0);
        esa_pool_run(a->pool, mean_item, &x, x.kv_heads * rules->existing);
        esa_pool_run(a->pool, score_item, &x, x.kv_heads * (a->Hq / a->Hkv) * w->items);
    }
}
