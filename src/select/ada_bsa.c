/* ada_bsa.c - the ada_bsa selector: anti-diagonal group scores, softmax mass per block, and a
 * threshold on the sum.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tokens form groups of 8: x_ij = scale/8 * sum_{u=0..7} q[8i+7-u] . k[8j+u], p = softmax over the
 * columns of a row, and score[I][J] = sum of p over the groups of query block I and key block J.
 * This is a product of depth 8D over N/8 x N/8, 1/16 of attention. It takes eight calls of the qk
 * kernel; chunk u is packed with stride 8 from row 7-u of q and row u of k.
 *
 * A window of kv heads is packed once and shared by the threads. A work item is a run of query
 * blocks of one head. It goes over the columns in chunks that stay in cache, keeps the maximum and
 * sum per (row, block), and picks its blocks at once.
 *
 * fixed: x leaves out pairs that do not exist (ends of q and k) or are not visible (causal). It is
 * the mean of the remaining pairs, weighted by their number.
 *
 * compat: missing queries are zeros, the last klen % 8 keys are not scored, and with causal a row
 * sees all columns up to the end of its tile of 1024 queries (the original has no finer mask). */
#include <math.h>
#include <string.h>
#include "select/ada.h"

enum {
    G = ESA_ADA_GROUP,
    LONG_RUN = 192,
    SHORT_RUN = 96,
    ENOUGH_ITEMS = 32,
    CHUNK_COLUMNS = 64,
    WINDOW_BYTES = 48 << 20
};

typedef struct ada_worker {
    char *q;     /* [8][q_bytes] */
    float *tile; /* [mr][ld]; compat-round: [rows of a block, padded to mr][ld of all columns] */
    float *top, *sum;     /* [run rows][nk] */
    float *value;         /* [nk] block scores */
    double *score, *mass; /* [nk] */
    float *half;          /* compat-round: [rows of a block][nk] */
    int64_t *limit;       /* compat-round: [rows of a block] */
    uint64_t *key;        /* [roundup(nk, 32)] */
    esa_picker picker;
} ada_worker;

typedef struct ada_work {
    int64_t heads, kv_heads;  /* heads per window */
    int64_t rows, columns;    /* groups of q; groups of k at full length */
    int64_t run, run_rows;    /* query blocks per item and their rows */
    int64_t chunk, ld, all;   /* columns per chunk; pitches of a tile and of a whole row */
    int64_t q_bytes, k_bytes; /* bytes of one of the eight chunks: of a run; of a head */
    int32_t rounded;
    esa_rules rules;
    char *k; /* [kv_heads][8][k_bytes] */
    /* [8][rows], [8][columns]: source rows. Empty if no order is gathered. */
    int32_t *q_row, *k_row;
    int32_t *quota;     /* [nq] */
    ada_worker *worker; /* [threads] */
} ada_work;

typedef struct job {
    const esa_select_args *args;
    const ada_work *w;
    esa_mask *mask;
    int64_t b, h0, heads, g0, kv_heads;
    int64_t columns; /* groups scored in this batch entry */
    int64_t runs, pack_runs;
    int32_t fixed;
} job;

static int64_t lcm(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y) {
        const int64_t t = x % y;
        x = y;
        y = t;
    }
    return a / x * b;
}

static void carve(ada_work *w, esa_carve *c, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool), f = (int64_t)sizeof(float);
    const int64_t Rq = a->params.block_q / G, Rk = a->params.block_k / G, mr = a->kern->mr,
                  nr = a->kern->nr;
    w->rows = esa_ceil_div(a->Nq, G);
    w->columns = esa_ceil_div(a->Nk, G);
    w->rounded = a->params.mode == ESA_MODE_COMPAT_ROUND;
    w->k_bytes = esa_ceil_div(esa_k_pack_bytes(a->kern, w->columns, a->D), 64) * 64;
    w->heads = esa_args_window(a, G * w->k_bytes, WINDOW_BYTES, &w->kv_heads);
    /* Long runs read the packed keys less often; short runs leave work for every thread. Both
     * are multiples of 6 and of 12 rows. The choice depends on the shape alone, never on the
     * number of threads. */
    const int64_t rows = w->heads * w->rows / LONG_RUN >= ENOUGH_ITEMS ? LONG_RUN : SHORT_RUN;
    w->run = w->rounded ? 1 : esa_max64(1, rows / Rq);
    w->run_rows = w->run * Rq;
    const int64_t unit = lcm(nr, Rk); /* a chunk holds whole packed panels and whole blocks */
    w->chunk = esa_ceil_div(CHUNK_COLUMNS, unit) * unit;
    w->ld = w->chunk;
    w->all = esa_ceil_div(w->columns, w->chunk) * w->chunk;
    w->q_bytes = esa_ceil_div(esa_q_pack_bytes(a->kern, w->run_rows, a->D), 64) * 64;
    esa_rules_carve(&w->rules, c, a);
    w->k = esa_carve_take(c, w->kv_heads * G * w->k_bytes);
    /* The size follows from the layout, because scratch is also measured without permutations. */
    const int64_t gather_q = esa_layout_moves(&a->params.layout, 0, a->params.mode),
                  gather_k = esa_layout_moves(&a->params.layout, 1, a->params.mode);
    w->q_row = esa_carve_take(c, gather_q * G * w->rows * (int64_t)sizeof(int32_t));
    w->k_row = esa_carve_take(c, gather_k * G * w->columns * (int64_t)sizeof(int32_t));
    w->quota = esa_carve_take(c, a->nq * (int64_t)sizeof(int32_t));
    w->worker = esa_carve_take(c, threads * (int64_t)sizeof(ada_worker));
    for (int64_t t = 0; t < threads; t++) {
        ada_worker k;
        const int64_t block_rows = esa_ceil_div(Rq, mr) * mr;
        k.q = esa_carve_take(c, G * w->q_bytes);
        k.tile = esa_carve_take(c, (w->rounded ? block_rows * w->all : mr * w->ld) * f);
        k.top = esa_carve_take(c, w->run_rows * a->nk * f);
        k.sum = esa_carve_take(c, w->run_rows * a->nk * f);
        k.value = esa_carve_take(c, a->nk * f);
        k.score = esa_carve_take(c, a->nk * (int64_t)sizeof(double));
        k.mass = esa_carve_take(c, a->nk * (int64_t)sizeof(double));
        k.half = esa_carve_take(c, w->rounded ? Rq * a->nk * f : 0);
        k.limit = esa_carve_take(c, Rq * (int64_t)sizeof(int64_t));
        k.key = esa_carve_take(c, esa_ceil_div(a->nk, 32) * 32 * (int64_t)sizeof(uint64_t));
        esa_picker_carve(&k.picker, c, a->nk);
        if (w->worker) w->worker[t] = k;
    }
}

void esa_ada_bsa_carve(const esa_select_args *args, esa_carve *c)
{
    ada_work w;
    carve(&w, c, args);
}

/* Source rows of the eight chunks if an order is gathered. */
static void find_rows(const ada_work *w, const esa_select_args *a)
{
    for (int64_t u = 0; u < G; u++) {
        for (int64_t i = 0; a->perm_q && i < w->rows; i++)
            w->q_row[u * w->rows + i] = a->perm_q[esa_min64(G * i + G - 1 - u, a->Nq - 1)];
        for (int64_t j = 0; a->perm_k && j < w->columns; j++)
            w->k_row[u * w->columns + j] = a->perm_k[esa_min64(G * j + u, a->Nk - 1)];
    }
}

/* item = (kv head, chunk u, run of 16 panels). Missing keys are packed as zeros. */
static void pack_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const int64_t head = item / (G * x->pack_runs), u = item / x->pack_runs % G, nr = a->kern->nr;
    const int64_t first = item % x->pack_runs * 16 * nr,
                  end = esa_min64(first + 16 * nr, x->columns);
    /* Groups that have a key u. */
    const int64_t there = esa_max64(0, (x->w->rules.kv_len - u + G - 1) / G);
    const int64_t n = esa_max64(0, esa_min64(end, there) - first),
                  panel = esa_k_pack_bytes(a->kern, nr, a->D);
    const char *src = esa_args_k(a, x->b, (x->g0 + head) * (a->Hq / a->Hkv));
    char *dst = w->k + (head * G + u) * w->k_bytes + first / nr * panel;
    (void)worker;
    memset(dst + esa_ceil_div(n, nr) * panel, 0,
           (size_t)((esa_ceil_div(end - first, nr) - esa_ceil_div(n, nr)) * panel));
    if (n == 0) return;
    if (a->perm_k)
        a->kern->pack_k(dst, src, a->dtype, a->k_stride[2], w->k_row + u * w->columns + first, n,
                        a->D);
    else
        a->kern->pack_k(dst, src + (G * first + u) * a->k_stride[2] * esa_dtype_size(a->dtype),
                        a->dtype, G * a->k_stride[2], NULL, n, a->D);
}

/* Of the products: compat-round scales the finished fp32 product, as the original does. */
static float factor_of(const job *x)
{
    return x->w->rounded ? 1.0f : (float)(x->args->params.scale / G * ESA_LOG2E);
}

/* Packs the eight chunks of query groups first .. first+n-1. Missing queries are zeros. */
static void pack_run(const job *x, char *q, int64_t head, int64_t first, int64_t n)
{
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const int64_t mr = a->kern->mr, group = esa_q_pack_bytes(a->kern, mr, a->D);
    const char *src = esa_args_q(a, x->b, x->h0 + head);
    const float factor = factor_of(x);
    for (int64_t u = 0; u < G; u++) {
        const int64_t there = esa_max64(0, esa_min64(n, (a->Nq - (G - 1 - u) + G - 1) / G - first));
        char *dst = q + u * w->q_bytes;
        memset(dst + esa_ceil_div(there, mr) * group, 0,
               (size_t)((esa_ceil_div(n, mr) - esa_ceil_div(there, mr)) * group));
        if (there == 0) continue;
        if (a->perm_q)
            a->kern->pack_q(dst, src, a->dtype, a->q_stride[2], w->q_row + u * w->rows + first,
                            there, a->D, factor);
        else
            a->kern->pack_q(
                dst, src + (G * first + G - 1 - u) * a->q_stride[2] * esa_dtype_size(a->dtype),
                a->dtype, G * a->q_stride[2], NULL, there, a->D, factor);
    }
}

/* q[row] . k[row] over D; rows are positions in the ordered sequence. */
static double dot(const job *x, const char *q, const char *k, int64_t qi, int64_t kj)
{
    const esa_select_args *a = x->args;
    const int64_t qo = (a->perm_q ? a->perm_q[qi] : qi) * a->q_stride[2],
                  ko = (a->perm_k ? a->perm_k[kj] : kj) * a->k_stride[2];
    double sum = 0.0;
    for (int64_t d = 0; d < a->D; d++)
        sum += (double)esa_load_f32(q, qo + d, a->dtype) *
               (double)esa_load_f32(k, ko + d, a->dtype);
    return sum;
}

/* x_ij in log2 units, from the pairs that exist and are visible. */
static float partial(const job *x, int64_t head, int64_t i, int64_t j)
{
    const esa_select_args *a = x->args;
    const char *q = esa_args_q(a, x->b, x->h0 + head), *k = esa_args_k(a, x->b, x->h0 + head);
    double sum = 0.0;
    int64_t n = 0;
    for (int64_t u = 0; u < G; u++) {
        const int64_t qi = G * i + G - 1 - u, kj = G * j + u;
        if (qi >= a->Nq || kj >= x->w->rules.kv_len ||
            (a->params.causal && kj > qi + a->Nk - a->Nq))
            continue;
        sum += dot(x, q, k, qi, kj);
        n++;
    }
    return n ? (float)(a->params.scale * ESA_LOG2E * sum / (double)n + log2((double)n / G))
             : -INFINITY;
}

/* Recomputes the elements of row i that lack pairs, for columns c0 .. c1-1 of s. */
static void mend(const job *x, float *s, int64_t head, int64_t i, int64_t c0, int64_t c1)
{
    const esa_select_args *a = x->args;
    int64_t from = c1, to = c1; /* columns on the diagonal */
    /* A short last group of queries: every column lacks pairs. */
    if (G * (i + 1) > a->Nq)
        from = c0;
    else if (a->params.causal) {
        /* Pair u is visible if 2u <= reach - 8j. */
        const int64_t reach = G * i + a->Nk - a->Nq + G - 1;
        from = reach < 2 * (G - 1) ? c0 : esa_max64(c0, (reach - 2 * (G - 1)) / G + 1);
    }
    for (int64_t j = from; j < to; j++) s[j - c0] = partial(x, head, i, j);
    const int64_t last = x->w->rules.kv_len / G; /* the short last group of keys, if any */
    if (x->w->rules.kv_len % G && last >= c0 && last < esa_min64(from, c1))
        s[last - c0] = partial(x, head, i, last);
}

/* Logits of one packed group of the run for columns c0 .. c1-1, summed over the eight chunks. */
static void logits(const job *x, float *s, int64_t ld, const ada_worker *k, int64_t head,
                   int64_t group, int64_t rows, int64_t c0, int64_t c1)
{
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const int64_t kv = (x->h0 + head) / (a->Hq / a->Hkv) - x->g0;
    const int64_t q_at = group * esa_q_pack_bytes(a->kern, a->kern->mr, a->D);
    const int64_t k_at = c0 / a->kern->nr * esa_k_pack_bytes(a->kern, a->kern->nr, a->D);
    esa_kernels_begin(a->kern);
    for (int64_t u = 0; u < G; u++)
        a->kern->qk(s, ld, k->q + u * w->q_bytes + q_at, w->k + (kv * G + u) * w->k_bytes + k_at,
                    rows, c1 - c0, a->D, factor_of(x), u > 0);
    esa_kernels_end(a->kern);
}

/* Maximum and sum per (row, block) of a run: k->top, k->sum [n][nk]. */
static void run_stats(const job *x, const ada_worker *k, int64_t head, int64_t first, int64_t n)
{
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const int64_t nk = a->nk, mr = a->kern->mr, Rk = a->params.block_k / G;
    int64_t end = 0;
    for (int64_t r = 0; r < n * nk; r++) {
        k->top[r] = -INFINITY;
        k->sum[r] = 0.0f;
    }
    for (int64_t r = 0; r < n; r++) end = esa_max64(end, esa_ada_limit(a, x->columns, first + r));
    for (int64_t c0 = 0; c0 < end; c0 += w->chunk) {
        const int64_t c1 = esa_min64(end, c0 + w->chunk);
        for (int64_t g = 0; g * mr < n; g++) {
            const int64_t rows = esa_min64(mr, n - g * mr);
            logits(x, k->tile, w->ld, k, head, g, rows, c0, c1);
            for (int64_t r = 0; r < rows; r++) {
                float *s = k->tile + r * w->ld;
                const int64_t limit = esa_ada_limit(a, x->columns, first + g * mr + r);
                if (x->fixed)
                    mend(x, s, head, first + g * mr + r, c0, esa_min64(c1, esa_max64(c0, limit)));
                for (int64_t c = esa_max64(limit, c0); c < c1; c++) s[c - c0] = -INFINITY;
            }
            esa_block_stats(a->kern, k->top + g * mr * nk + c0 / Rk, k->sum + g * mr * nk + c0 / Rk,
                            nk, k->tile, w->ld, rows, c1 - c0, Rk);
        }
    }
}

/* Scores of query block I from the statistics of the run. row0: its first row within the run. */
static void block_scores(const job *x, const ada_worker *k, int64_t I, int64_t row0)
{
    const esa_select_args *a = x->args;
    const int64_t Rq = a->params.block_q / G, nk = a->nk, n = x->w->rules.existing;
    const int64_t rows = esa_min64(Rq, x->w->rows - I * Rq);
    for (int64_t j = 0; j < n; j++) k->score[j] = 0.0;
    for (int64_t r = 0; r < rows; r++) {
        float top;
        const int64_t i = I * Rq + r, queries = esa_min64(G, a->Nq - G * i);
        const double total = esa_row_masses(k->mass, &top, k->top + (row0 + r) * nk,
                                            k->sum + (row0 + r) * nk, n);
        if (total == 0.0) continue; /* the group sees nothing */
        const double weight = x->fixed ? (double)queries / G : 1.0;
        for (int64_t j = 0; j < n; j++) k->score[j] += weight * k->mass[j] / total;
    }
}

/* compat-round: all logits of the block at once, then the arithmetic of the original's device. */
static void block_scores_rounded(const job *x, const ada_worker *k, int64_t head, int64_t I)
{
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const int64_t Rq = a->params.block_q / G, Rk = a->params.block_k / G, mr = a->kern->mr;
    const int64_t rows = esa_min64(Rq, w->rows - I * Rq),
                  tile = esa_ada_tile(x->w->rules.kv_len) / Rk * Rk;
    const float factor = (float)(a->params.scale / G);
    int64_t end = 0;
    for (int64_t r = 0; r < rows; r++)
        end = esa_max64(end, k->limit[r] = esa_ada_limit(a, x->columns, I * Rq + r));
    /* In this mode a run is one block, so its first row starts a packed group. */
    for (int64_t g = 0; g * mr < rows; g++)
        for (int64_t c0 = 0; c0 < end; c0 += w->chunk)
            logits(x, k->tile + g * mr * w->all + c0, w->all, k, head, g,
                   esa_min64(mr, rows - g * mr), c0, esa_min64(end, c0 + w->chunk));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < end; c++) k->tile[r * w->all + c] *= factor;
    esa_ada_scores_rounded(k->score, k->tile, w->all, rows, k->limit, a->nk, Rk, tile, k->half);
}

/* item = (head, run of query blocks). */
static void run_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const ada_work *w = x->w;
    const ada_worker *k = &w->worker[worker];
    const int64_t Rq = a->params.block_q / G, head = item / x->runs, at = item % x->runs;
    /* Causal: long rows first. */
    const int64_t I0 = (a->params.causal ? x->runs - 1 - at : at) * w->run;
    const int64_t I1 = esa_min64(a->nq, I0 + w->run), first = I0 * Rq,
                  n = esa_min64(w->rows, I1 * Rq) - first;
    esa_picker p = k->picker;
    pack_run(x, k->q, head, first, n);
    if (!w->rounded) run_stats(x, k, head, first, n);
    for (int64_t I = I0; I < I1; I++) {
        const int64_t v = w->rules.visible[I];
        if (w->rounded)
            block_scores_rounded(x, k, head, I);
        else
            block_scores(x, k, I, (I - I0) * Rq);
        if (x->fixed) {
            for (int64_t j = 0; j < v; j++) k->value[j] = (float)k->score[j];
            esa_ada_pick_fixed(&p, &w->rules, k->value, I, w->quota[I], a->params.cdf_threshold,
                               a->nk);
        } else {
            memset(p.keep, 0, (size_t)a->nk);
            esa_ada_pick_compat(p.keep, k->score, v, &a->params, w->rounded, k->key);
        }
        esa_mask_set_row(x->mask, (x->b * a->Hq + x->h0 + head) * a->nq + I, p.keep);
    }
}

void esa_ada_bsa_run(const esa_select_args *args, esa_mask *mask, void *ws)
{
    esa_carve c = { ws, 0 };
    ada_work w;
    carve(&w, &c, args);
    find_rows(&w, args);
    job x = { .args = args,
              .w = &w,
              .mask = mask,
              .fixed = args->params.mode == ESA_MODE_FIXED,
              .runs = esa_ceil_div(args->nq, w.run) };
    const int64_t ratio = args->Hq / args->Hkv;
    for (x.b = 0; x.b < args->B; x.b++) {
        esa_rules_fill(&w.rules, args, x.b);
        x.columns = esa_ada_columns(args, w.rules.kv_len);
        x.pack_runs = esa_ceil_div(x.columns, 16 * args->kern->nr);
        if (x.fixed)
            esa_budget_spread(w.quota, w.rules.visible, w.rules.least, args->nq,
                              esa_ada_total(&args->params, w.rules.seen));
        for (x.h0 = 0; x.h0 < args->Hq; x.h0 += w.heads) {
            x.heads = esa_min64(w.heads, args->Hq - x.h0);
            x.g0 = x.h0 / ratio;
            x.kv_heads = (x.h0 + x.heads - 1) / ratio - x.g0 + 1;
            esa_pool_run(args->pool, pack_item, &x, x.kv_heads * G * x.pack_runs);
            esa_pool_run(args->pool, run_item, &x, x.heads * x.runs);
        }
    }
}
