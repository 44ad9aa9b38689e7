/* importance.c - block importance: softmax mass of a few sampled queries per query block, summed
 * per key block.
 * SPDX-License-Identifier: Apache-2.0
 *
 * importance[i][j] = mean over the samples r of block i of sum_{keys in block j} softmax_keys(scale
 * q_r.k). A block of n rows is sampled at floor((2s+1) n / (2 samples)), s = 0 .. samples-1. A
 * block with fewer rows than samples uses all of its rows.
 *
 * One pass over the keys, in three steps per window of heads (a few MB):
 *   1. Pack the sampled queries of each head, multiplied by scale*log2(e).
 *   2. Work items (head, chunk of key blocks): pack the keys once, multiply with every packed
 *      group, and keep the maximum and sum exp2(s - maximum) per (sample, key block). The scores
 *      themselves never leave the tile.
 *   3. Work items (head, query block): turn maxima and sums into shares of the row and average them
 *      over the samples.
 * compat-round repeats step 2 once the maximum and sum of the row are known, to
 * round every probability. */
#include <math.h>
#include "select/importance.h"

enum { STATS_BYTES = 16 << 20, CHUNK_KEYS = 256 };

typedef struct job {
    const esa_select_args *args;
    const esa_importance_work *w;
    const esa_rules *rules;
    float *out;              /* [Hq][nq][nk] */
    int64_t b, h0, heads;    /* heads of this window */
    int64_t i0, blocks;      /* query blocks of this window */
    int64_t row0, rows;      /* their samples */
    int64_t chunks, groups;  /* key chunks; groups of mr rows */
    int32_t rounded, second; /* compat-round; its second pass */
} job;

static int64_t samples_of(const esa_select_args *a, int64_t i)
{
    const int64_t n = esa_min64(a->params.block_q, a->Nq - i * a->params.block_q);
    return esa_min64(n, a->params.samples);
}

void esa_importance_carve(esa_importance_work *w, esa_carve *carve, const esa_select_args *a)
{
    const int64_t threads = esa_pool_threads(a->pool), mr = a->kern->mr, f = (int64_t)sizeof(float);
    w->per_block = samples_of(a, 0);
    w->samples = (a->nq - 1) * w->per_block + samples_of(a, a->nq - 1);
    const int64_t head_bytes = 2 * f * w->samples * a->nk,
                  limit = a->window > 0 ? a->window : STATS_BYTES;
    if (head_bytes <= limit) {
        w->heads = esa_min64(a->Hq, limit / head_bytes);
        w->blocks = a->nq;
    } else {
        w->heads = 1;
        w->blocks = esa_max64(1, limit / (2 * f * w->per_block * a->nk));
        w->blocks = esa_min64(w->blocks, a->nq);
    }
    w->rows = esa_min64(w->samples, w->blocks * w->per_block);
    w->chunk = esa_max64(1, CHUNK_KEYS / a->params.block_k);
    w->ld = esa_ceil_div(w->chunk * a->params.block_k, a->kern->nr) * a->kern->nr;
    w->q_bytes = esa_q_pack_bytes(a->kern, w->rows, a->D);
    w->k_bytes = esa_ceil_div(esa_k_pack_bytes(a->kern, w->chunk * a->params.block_k, a->D), 64) *
                 64;
    w->position = esa_carve_take(carve, w->samples * (int64_t)sizeof(int32_t));
    w->source = esa_carve_take(carve, w->samples * (int64_t)sizeof(int32_t));
    w->q = esa_carve_take(carve, w->heads * w->q_bytes);
    w->top = esa_carve_take(carve, w->heads * w->rows * a->nk * f);
    w->sum = esa_carve_take(carve, w->heads * w->rows * a->nk * f);
    const int64_t rounded = a->params.mode == ESA_MODE_COMPAT_ROUND ? w->heads * w->rows : 0;
    w->row_top = esa_carve_take(carve, rounded * f);
    w->row_sum = esa_carve_take(carve, rounded * f);
    w->k = esa_carve_take(carve, threads * w->k_bytes);
    w->tile = esa_carve_take(carve, threads * mr * w->ld * f);
    w->line = esa_carve_take(carve, threads * 2 * a->nk * (int64_t)sizeof(double));
}

static void find_samples(const esa_importance_work *w, const esa_select_args *a)
{
    int64_t r = 0;
    for (int64_t i = 0; i < a->nq; i++) {
        const int64_t first = i * a->params.block_q,
                      n = esa_min64(a->params.block_q, a->Nq - first), count = samples_of(a, i);
        for (int64_t s = 0; s < count; s++, r++) {
            const int64_t p = first + (2 * s + 1) * n / (2 * count);
            w->position[r] = (int32_t)p;
            w->source[r] = a->perm_q ? a->perm_q[p] : (int32_t)p;
        }
    }
}

static char *q_group(const job *x, int64_t head, int64_t group)
{
    const esa_cpu_kernels *kern = x->args->kern;
    return x->w->q + head * x->w->q_bytes + group * esa_q_pack_bytes(kern, kern->mr, x->args->D);
}

/* Of the products: compat-round multiplies them itself. */
static float factor_of(const job *x)
{
    return x->rounded ? 1.0f : (float)(x->args->params.scale * ESA_LOG2E);
}

/* Step 1. item = (head, run of 8 groups). */
static void pack_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const int64_t runs = esa_ceil_div(x->groups, 8), head = item / runs, g = item % runs * 8,
                  mr = a->kern->mr;
    const int64_t row = g * mr, rows = esa_min64(8 * mr, x->rows - row);
    (void)worker;
    a->kern->pack_q(q_group(x, head, g), esa_args_q(a, x->b, x->h0 + head), a->dtype,
                    a->q_stride[2], x->w->source + x->row0 + row, rows, a->D, factor_of(x));
}

/* Number of keys the sample sees. */
static int64_t limit_of(const job *x, int64_t row)
{
    const esa_select_args *a = x->args;
    if (!a->params.causal) return x->rules->kv_len;
    return esa_max64(
        0, esa_min64(x->rules->kv_len, x->w->position[x->row0 + row] + a->Nk - a->Nq + 1));
}

/* Sum of the rounded probabilities of one key block. s: log2 scores of one row, n keys. */
static float rounded_mass(const float *s, int64_t n, float top, float total, int32_t dtype)
{
    double mass = 0.0;
    for (int64_t c = 0; c < n; c++) mass += (double)esa_round_to(exp2f(s[c] - top) / total, dtype);
    return (float)mass;
}

/* Step 2. item = (head, chunk of key blocks). */
static void score_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const esa_importance_work *w = x->w;
    const esa_cpu_kernels *kern = a->kern;
    const int64_t head = item / x->chunks, j0 = item % x->chunks * w->chunk, Bk = a->params.block_k,
                  nk = a->nk;
    const int64_t key0 = j0 * Bk, keys = esa_min64(w->chunk * Bk, x->rules->kv_len - key0),
                  blocks = esa_ceil_div(keys, Bk);
    const int32_t dtype = a->dtype == ESA_DTYPE_F32 ? ESA_DTYPE_F16 : a->dtype;
    const char *src = esa_args_k(a, x->b, x->h0 + head);
    char *k = w->k + worker * w->k_bytes;
    float *tile = w->tile + worker * kern->mr * w->ld;

    if (a->perm_k)
        kern->pack_k(k, src, a->dtype, a->k_stride[2], a->perm_k + key0, keys, a->D);
    else
        kern->pack_k(k, src + key0 * a->k_stride[2] * esa_dtype_size(a->dtype), a->dtype,
                     a->k_stride[2], NULL, keys, a->D);

    esa_kernels_begin(kern);
    for (int64_t g = 0; g < x->groups; g++) {
        const int64_t row = g * kern->mr, rows = esa_min64(kern->mr, x->rows - row);
        const int64_t at = (head * w->rows + row) * nk + j0;
        /* Samples ascend, so none of this group sees the chunk. */
        if (limit_of(x, row + rows - 1) <= key0) {
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < blocks; j++) {
                    w->top[at + r * nk + j] = -INFINITY;
                    w->sum[at + r * nk + j] = 0.0f;
                }
            continue;
        }
        kern->qk(tile, w->ld, q_group(x, head, g), k, rows, keys, a->D, factor_of(x), 0);
        for (int64_t r = 0; r < rows; r++) {
            float *s = tile + r * w->ld;
            if (x->rounded)
                for (int64_t c = 0; c < keys; c++)
                    s[c] = (float)ESA_LOG2E * esa_round_to(s[c] * (float)a->params.scale, dtype);
            for (int64_t c = esa_max64(0, limit_of(x, row + r) - key0); c < keys; c++)
                s[c] = -INFINITY;
        }
        if (!x->second) {
            kern->stats(w->top + at, w->sum + at, nk, tile, w->ld, rows, keys, Bk);
            continue;
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < blocks; j++)
                w->sum[at + r * nk + j] = rounded_mass(tile + r * w->ld + j * Bk,
                                                       esa_min64(Bk, keys - j * Bk),
                                                       w->row_top[head * w->rows + row + r],
                                                       w->row_sum[head * w->rows + row + r], dtype);
    }
    esa_kernels_end(kern);
}

/* Between the passes of compat-round. item = (head, sample). */
static void row_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const int64_t nk = x->args->nk, at = (item / x->rows) * x->w->rows + item % x->rows;
    double *mass = x->w->line + worker * 2 * nk;
    x->w->row_sum[at] = (float)esa_row_masses(mass, &x->w->row_top[at], x->w->top + at * nk,
                                              x->w->sum + at * nk, x->rules->existing);
}

/* Step 3. item = (head, query block). */
static void average_item(void *arg, int64_t item, int32_t worker)
{
    const job *x = arg;
    const esa_select_args *a = x->args;
    const esa_importance_work *w = x->w;
    const int64_t nk = a->nk, n = x->rules->existing, head = item / x->blocks,
                  i = x->i0 + item % x->blocks;
    const int64_t first = (i - x->i0) * w->per_block, count = samples_of(a, i);
    double *mass = w->line + worker * 2 * nk, *mean = mass + nk;
    float *out = x->out + ((x->h0 + head) * a->nq + i) * nk;
    int64_t seeing = 0; /* samples that see any key */
    for (int64_t j = 0; j < n; j++) mean[j] = 0.0;
    for (int64_t r = first; r < first + count; r++) {
        const int64_t at = head * w->rows + r;
        float top;
        if (limit_of(x, r) == 0) continue;
        if (x->rounded) {
            seeing++;
            for (int64_t j = 0; j < n; j++) mean[j] += (double)w->sum[at * nk + j];
            continue;
        }
        const double total = esa_row_masses(mass, &top, w->top + at * nk, w->sum + at * nk, n);
        if (total == 0.0) continue; /* every score is -inf: no key exists */
        seeing++;
        for (int64_t j = 0; j < n; j++) mean[j] += mass[j] / total;
    }
    for (int64_t j = 0; j < n; j++) out[j] = seeing ? (float)(mean[j] / (double)seeing) : 0.0f;
    for (int64_t j = n; j < nk; j++) out[j] = 0.0f;
}

void esa_importance_run(float *out, const esa_importance_work *w, const esa_select_args *a,
                        const esa_rules *rules, int64_t b)
{
    job x = { .args = a,
              .w = w,
              .rules = rules,
              .out = out,
              .b = b,
              .rounded = a->params.mode == ESA_MODE_COMPAT_ROUND,
              .chunks = esa_ceil_div(rules->existing, w->chunk) };
    find_samples(w, a);
    for (x.h0 = 0; x.h0 < a->Hq; x.h0 += w->heads) {
        x.heads = esa_min64(w->heads, a->Hq - x.h0);
        for (x.i0 = 0; x.i0 < a->nq; x.i0 += w->blocks) {
            x.blocks = esa_min64(w->blocks, a->nq - x.i0);
            x.row0 = x.i0 * w->per_block;
            x.rows = esa_min64(w->samples, (x.i0 + x.blocks) * w->per_block) - x.row0;
            x.groups = esa_ceil_div(x.rows, a->kern->mr);
            x.second = 0;
            esa_pool_run(a->pool, pack_item, &x, x.heads * esa_ceil_div(x.groups, 8));
            esa_pool_run(a->pool, score_item, &x, x.heads * x.chunks);
            if (x.rounded) {
                esa_pool_run(a->pool, row_item, &x, x.heads * x.rows);
                x.second = 1;
                esa_pool_run(a->pool, score_item, &x, x.heads * x.chunks);
            }
            esa_pool_run(a->pool, average_item, &x, x.heads * x.blocks);
        }
    }
}
