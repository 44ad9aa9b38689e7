/* mass.c - recall: the share of the true attention mass that a mask keeps.
 * SPDX-License-Identifier: Apache-2.0
 *
 * mass[b][h] = mean over the measured queries i of sum_{keys of the kept blocks} softmax_keys(scale
 * q_i.k). Rows that see no key are left out; a head with only such rows lost nothing and counts as
 * 1.
 *
 * It works like attention without values: the keys of a window of kv heads are packed once, a work
 * item is a run of queries of one head, and scores stay in one tile. O(N D) memory. */
#include <math.h>
#include "select/rules.h"

enum { RUN_ROWS = 64, CHUNK_KEYS = 128, WINDOW_BYTES = 48 << 20 };

typedef struct mass_work {
    int64_t heads, kv_heads;  /* heads per window */
    int64_t chunk;            /* keys per step: whole packed panels and whole blocks */
    int64_t q_bytes, k_bytes; /* packed queries of a run; packed keys of a head */
    int64_t runs;             /* runs per head if every query is measured */
    int32_t *source;          /* [threads][RUN_ROWS] rows of q that a run measures */
    char *k, *q;              /* [kv_heads][k_bytes], [threads][q_bytes] */
    float *tile, *top, *sum;  /* [threads][mr][chunk], [threads][run][nk] twice */
    double *line;             /* [threads][nk] */
    double *part;             /* [heads][runs] sums of kept shares */
    int64_t *seen;            /* [heads][runs] rows that see a key */
} mass_work;

typedef struct job {
    const esa_select_args *args;
    const mass_work *w;
    const esa_mask *mask;
    int64_t b, h0, heads, g0, kv_heads, kv_len;
    int64_t rows, runs, step, pack_runs;
} job;

static void carve(mass_work *w, esa_carve *c, const esa_select_args *a, const esa_mask *m)
{
    const int64_t threads = esa_pool_threads(a->pool), f = (int64_t)sizeof(float), nr = a->kern->nr,
                  Bk = m->block_k;
    int64_t unit = Bk;
    while (unit % nr) unit += Bk;
    w->chunk = esa_ceil_div(CHUNK_KEYS, unit) * unit;
    w->q_bytes = esa_ceil_div(esa_q_pack_bytes(a->kern, RUN_ROWS, a->D), 64) * 64;
    w->k_bytes = esa_ceil_div(esa_k_pack_bytes(a->kern, a->Nk, a->D), 64) * 64;
    w->heads = esa_args_window(a, w->k_bytes, WINDOW_BYTES, &w->kv_heads);
    w->runs = esa_ceil_div(a->Nq, RUN_ROWS);
    w->source = esa_carve_take(c, threads * RUN_ROWS * (int64_t)sizeof(int32_t));
    w->k = esa_carve_take(c, w->kv_heads * w->k_bytes);
    w->q = esa_carve_take(c, threads * w->q_bytes);
    w->tile = esa_carve_take(c, threads * a->kern->mr * w->chunk * f);
    w->top = esa_carve_take(c, threads * RUN_ROWS * m->nk * f);
    w->sum = esa_carve_take(c, threads * RUN_ROWS * m->nk * f);
    w->line = esa_carve_take(c, threads * m->nk * (int64_t)sizeof(double));
    w->part = esa_carve_take(c, w->heads * w->runs * (int64_t)sizeof(double));
    w->seen = esa_carve_take(c, w->heads * w->runs * (int64_t)sizeof(int64_t));
}

int64_t esa_select_mass_workspace(const esa_select_args *args, const esa_mask *mask)
{
    esa_carve c = { NULL, 0 };
    mass_work w;
    carve(&w, &c, args, mask);
    return c.used;
}

/* item = (kv head, run of 16 panels). */
static void pack_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const int64_t head = item / x->pack_runs, first = item % x->pack_runs * 16 * a->kern->nr;
    const int64_t n = esa_min64(16 * a->kern->nr, x->kv_len - first);
    const char *src = esa_args_k(a, x->b, (x->g0 + head) * (a->Hq / a->Hkv));
    char *dst = x->w->k + head * x->w->k_bytes +
                first / a->kern->nr * esa_k_pack_bytes(a->kern, a->kern->nr, a->D);
    (void)worker;
    if (a->perm_k)
        a->kern->pack_k(dst, src, a->dtype, a->k_stride[2],
                        a->perm_k + x->b * a->perm_k_stride[0] +
                            (x->g0 + head) * a->perm_k_stride[1] + first,
                        n, a->D);
    else
        a->kern->pack_k(dst, src + first * a->k_stride[2] * esa_dtype_size(a->dtype), a->dtype,
                        a->k_stride[2], NULL, n, a->D);
}

/* Number of keys that the query at position p sees. */
static int64_t limit_of(const job *x, int64_t p)
{
    if (!x->args->params.causal) return x->kv_len;
    return esa_max64(0, esa_min64(x->kv_len, p + x->args->Nk - x->args->Nq + 1));
}

/* item = (head, run of measured queries). */
static void measure_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const mass_work *w = x->w;
    const esa_mask *m = x->mask;
    const int64_t head = item / x->runs, first = item % x->runs * RUN_ROWS,
                  n = esa_min64(RUN_ROWS, x->rows - first);
    const int64_t mr = a->kern->mr, nk = m->nk, kv = (x->h0 + head) / (a->Hq / a->Hkv) - x->g0;
    const int64_t end = limit_of(x, (first + n - 1) * x->step); /* the last query sees the most */
    const char *k = w->k + kv * w->k_bytes;
    char *q = w->q + worker * w->q_bytes;
    float *tile = w->tile + worker * mr * w->chunk, *top = w->top + worker * RUN_ROWS * nk,
          *sum = w->sum + worker * RUN_ROWS * nk;
    double *mass = w->line + worker * nk, kept = 0.0;
    int64_t seen = 0;

    int32_t *source = w->source + worker * RUN_ROWS;
    const int32_t *perm = a->perm_q;
    if (perm) perm += x->b * a->perm_q_stride[0] + (x->h0 + head) * a->perm_q_stride[1];
    for (int64_t r = 0; r < n; r++) {
        const int64_t p = (first + r) * x->step;
        source[r] = perm ? perm[p] : (int32_t)p;
    }
    a->kern->pack_q(q, esa_args_q(a, x->b, x->h0 + head), a->dtype, a->q_stride[2], source, n, a->D,
                    (float)(a->params.scale * ESA_LOG2E));
    for (int64_t r = 0; r < n * nk; r++) {
        top[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int64_t c0 = 0; c0 < end; c0 += w->chunk) {
        const int64_t keys = esa_min64(w->chunk, end - c0);
        const char *panel = k + c0 / a->kern->nr * esa_k_pack_bytes(a->kern, a->kern->nr, a->D);
        for (int64_t g = 0; g * mr < n; g++) {
            const int64_t rows = esa_min64(mr, n - g * mr), at = g * mr * nk + c0 / m->block_k;
            a->kern->qk(tile, w->chunk, q + g * esa_q_pack_bytes(a->kern, mr, a->D), panel, rows,
                        keys, a->D, 1.0f, 0);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = esa_max64(0, limit_of(x, (first + g * mr + r) * x->step) - c0);
                     c < keys; c++)
                    tile[r * w->chunk + c] = -INFINITY;
            esa_block_stats(a->kern, top + at, sum + at, nk, tile, w->chunk, rows, keys,
                            m->block_k);
        }
    }
    for (int64_t r = 0; r < n; r++) {
        const int64_t p = (first + r) * x->step,
                      row = esa_mask_row(m, x->b, x->h0 + head, p / m->block_q);
        float high;
        if (limit_of(x, p) == 0) continue;
        const double total = esa_row_masses(mass, &high, top + r * nk, sum + r * nk, nk);
        if (total == 0.0) continue; /* every score is -inf: no key exists */
        double part = 0.0;
        for (int32_t c = 0; c < m->count[row]; c++) part += mass[m->index[row * m->cap + c]];
        kept += part / total;
        seen++;
    }
    w->part[head * w->runs + item % x->runs] = kept;
    w->seen[head * w->runs + item % x->runs] = seen;
}

void esa_select_mass(const esa_select_args *args, const esa_mask *mask, double *mass,
                     int32_t row_step, void *ws)
{
    esa_carve c = { ws, 0 };
    mass_work w;
    carve(&w, &c, args, mask);
    job x = { .args = args,
              .w = &w,
              .mask = mask,
              .step = row_step,
              .rows = esa_ceil_div(args->Nq, row_step) };
    const int64_t ratio = args->Hq / args->Hkv;
    x.runs = esa_ceil_div(x.rows, RUN_ROWS);
    for (x.b = 0; x.b < args->B; x.b++) {
        x.kv_len = esa_args_kv_len(args, x.b);
        x.pack_runs = esa_ceil_div(x.kv_len, 16 * args->kern->nr);
        for (x.h0 = 0; x.h0 < args->Hq; x.h0 += w.heads) {
            x.heads = esa_min64(w.heads, args->Hq - x.h0);
            x.g0 = x.h0 / ratio;
            x.kv_heads = (x.h0 + x.heads - 1) / ratio - x.g0 + 1;
            esa_pool_run(args->pool, pack_item, &x, x.kv_heads * x.pack_runs);
            esa_pool_run(args->pool, measure_item, &x, x.heads * x.runs);
            for (int64_t h = 0; h < x.heads; h++) {
                double kept = 0.0;
                int64_t seen = 0;
                for (int64_t r = 0; r < x.runs; r++) {
                    kept += w.part[h * w.runs + r];
                    seen += w.seen[h * w.runs + r];
                }
                mass[x.b * args->Hq + x.h0 + h] = seen ? kept / (double)seen : 1.0;
            }
        }
    }
}
