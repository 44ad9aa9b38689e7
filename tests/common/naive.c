/* naive.c - see naive.h. Every sum is a plain loop in the order of its index.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/naive.h"
#include "base/half.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double element(const esa_tensor *t, int64_t b, int64_t h, int64_t n, int64_t d)
{
    return (double)esa_load_f32(t->data, b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d,
                                t->dtype);
}

/* One tensor of a case in its order: [B*H][N + blocks + blocks*fine][D], the rows of a head, behind
 * them the means of its blocks, and behind those its fine means. */
typedef struct naive_rows {
    double *exact;
    float *same;     /* the same numbers in f32, for runs in the precision of the call; else NULL */
    int64_t head, D; /* head: elements per head */
} naive_rows;

/* All that rows of a case are made of, laid out once per case: emulators and sanitizers make every
 * element dear. */
typedef struct naive_data {
    naive_rows q, k, v;
    double *score;   /* one row's columns: [Nk + nk + nk*fine] */
    int64_t *column; /* which row of k and v each is, likewise */
    int64_t nq, nk;
} naive_data;

/* Means of each `block` of the first `length` of the rows, until these end. round: they are rounded
 * to this dtype; -1: not. */
static void means_of(double *mean, const double *row, int64_t length, int64_t block, int64_t D,
                     int32_t round)
{
    for (int64_t from = 0; from < length; from += block, mean += D) {
        const int64_t to = length < from + block ? length : from + block;
        for (int64_t n = from; n < to; n++)
            for (int64_t d = 0; d < D; d++) mean[d] += row[n * D + d];
        for (int64_t d = 0; d < D; d++) {
            mean[d] /= (double)(to - from);
            if (round >= 0) mean[d] = (double)esa_round_to((float)mean[d], round);
        }
    }
}

/* perm: the order of every (b,h), found with perm_stride, or NULL. kv_len: lengths per batch entry,
 * or NULL. fine: fine means per block; 0: none. round: means are rounded to the tensor's type. */
static naive_rows rows_open(const esa_tensor *t, const int32_t *perm, const int64_t *perm_stride,
                            int64_t block, int64_t fine, const int32_t *kv_len, int32_t same,
                            int32_t round)
{
    const int64_t B = t->dim[0], H = t->dim[1], N = t->dim[2], D = t->dim[3],
                  blocks = (N + block - 1) / block, rows = N + blocks + blocks * fine;
    const int64_t total = B * H * rows * D;
    naive_rows x = { calloc((size_t)total, sizeof(double)),
                     same ? malloc(sizeof(float) * (size_t)total) : NULL, rows * D, D };
    for (int64_t bh = 0; bh < B * H; bh++) {
        const int64_t b = bh / H, h = bh % H, length = kv_len ? kv_len[b] : N;
        const int32_t *order = perm ? perm + b * perm_stride[0] + h * perm_stride[1] : NULL;
        double *row = x.exact + bh * x.head;
        for (int64_t n = 0; n < N; n++)
            for (int64_t d = 0; d < D; d++)
                row[n * D + d] = element(t, b, h, order ? order[n] : n, d);
        means_of(row + N * D, row, length, block, D, round ? t->dtype : -1);
        if (fine)
            means_of(row + (N + blocks) * D, row, length, block / fine, D, round ? t->dtype : -1);
    }
    if (same)
        for (int64_t i = 0; i < total; i++) x.same[i] = (float)x.exact[i];
    return x;
}

static naive_data naive_open(const naive_case *c, int32_t same)
{
    naive_data x;
    x.nq = (c->Nq + c->block_q - 1) / c->block_q;
    x.nk = (c->Nk + c->block_k - 1) / c->block_k;
    const int64_t fine = c->tail == ESA_TAIL_LEVELS ? c->fine : 0,
                  columns = c->Nk + x.nk + x.nk * fine;
    x.q = rows_open(c->q, c->perm_q, c->perm_q_stride, c->block_q, 0, NULL, same, 0);
    x.k = rows_open(c->k, c->perm_k, c->perm_k_stride, c->block_k, fine, c->kv_len, same, same);
    x.v = rows_open(c->v, c->perm_k, c->perm_k_stride, c->block_k, fine, c->kv_len, same, same);
    x.score = malloc(sizeof(double) * (size_t)columns);
    x.column = malloc(sizeof(int64_t) * (size_t)columns);
    return x;
}

static void naive_close(naive_data *x)
{
    naive_rows *all[] = { &x->q, &x->k, &x->v };
    for (int i = 0; i < 3; i++) {
        free(all[i]->exact);
        free(all[i]->same);
    }
    free(x->score);
    free(x->column);
}

/* Row i of q's head times row j of k's head, in double or in f32. */
static double dot_of(const naive_data *x, int64_t hq, int64_t i, int64_t hk, int64_t j)
{
    const int64_t D = x->q.D, a = hq * x->q.head + i * D, b = hk * x->k.head + j * D;
    if (x->q.same) {
        float dot = 0.0f;
        for (int64_t d = 0; d < D; d++) dot += x->q.same[a + d] * x->k.same[b + d];
        return (double)dot;
    }
    double dot = 0.0;
    for (int64_t d = 0; d < D; d++) dot += x->q.exact[a + d] * x->k.exact[b + d];
    return dot;
}

/* Adds the fine means of the block of keys from .. to - 1. */
static int64_t fine_columns(naive_data *x, const naive_case *c, int64_t n, int64_t hq, int64_t i,
                            int64_t hk, int64_t from, int64_t to)
{
    const int64_t part = c->block_k / c->fine;
    for (int64_t t = from; t < to; t += part) {
        const int64_t row = c->Nk + x->nk + t / part, tokens = to - t < part ? to - t : part;
        x->score[n] = dot_of(x, hq, i, hk, row) * c->scale + log((double)tokens);
        x->column[n++] = row;
    }
    return n;
}

/* Fills score and column with the columns of query position i: real keys, then pooled ones; returns
 * their number. */
static int64_t row_columns(naive_data *x, const naive_case *c, int64_t b, int64_t h, int64_t i,
                           int64_t hk)
{
    const int64_t hq = b * c->Hq + h, kv = c->kv_len ? c->kv_len[b] : c->Nk, I = i / c->block_q;
    const uint8_t *keep = c->keep ? c->keep + (hq * x->nq + I) * x->nk : NULL;
    int64_t n = 0;
    for (int64_t j = 0; j < x->nk; j++) {
        const int64_t from = j * c->block_k, to = kv < from + c->block_k ? kv : from + c->block_k;
        if (to <= from) break;
        if (!keep || keep[j] == 1) {
            for (int64_t t = from; t < to; t++) {
                if (c->causal && t > i + c->Nk - c->Nq) continue;
                x->score[n] = dot_of(x, hq, i, hk, t) * c->scale;
                x->column[n++] = t;
            }
        } else if (c->tail && !(c->causal && to - 1 > I * c->block_q + c->Nk - c->Nq)) {
            if (c->tail == ESA_TAIL_LEVELS && keep[j] == 2) {
                n = fine_columns(x, c, n, hq, i, hk, from, to);
                continue;
            }
            const int64_t from_q = c->tail == ESA_TAIL_CENTROID ? c->Nq + I : i;
            x->score[n] = dot_of(x, hq, from_q, hk, c->Nk + j) * c->scale +
                          log((double)(to - from));
            x->column[n++] = c->Nk + j;
        }
    }
    return n;
}

/* The token of query position i. */
static int64_t token_of(const naive_case *c, int64_t b, int64_t h, int64_t i)
{
    if (!c->perm_q) return i;
    return c->perm_q[b * c->perm_q_stride[0] + h * c->perm_q_stride[1] + i];
}

/* Adds the mean error of the exact rows of one block to its other rows: out [Nq][D] of one head is
 * sparse, exact is dense; both are found through order. round: sums are rounded to the dtype. */
static void mend_block(double *out, double *lse, const double *exact, const double *exact_lse,
                       const naive_case *c, const int64_t *token, int64_t rows, int32_t round)
{
    const int64_t R = c->exact_rows < rows ? c->exact_rows : rows, D = c->D;
    uint8_t sampled[256] = { 0 }; /* no block is longer */
    double *mean = calloc((size_t)D, sizeof(double)), size = 0.0, spread = 0.0, share = 0.0;
    for (int64_t i = 0; i < R; i++) {
        const int64_t r = (2 * i + 1) * rows / (2 * R);
        sampled[r] = 1;
        for (int64_t d = 0; d < D; d++)
            mean[d] += (exact[token[r] * D + d] - out[token[r] * D + d]) / (double)R;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < D && sampled[r]; d++) {
            const double x = exact[token[r] * D + d] - out[token[r] * D + d] - mean[d];
            spread += x * x;
        }
    for (int64_t d = 0; d < D; d++) size += mean[d] * mean[d];
    if (size > 0.0) share = R == 1 ? 1.0 : fmax(0.0, 1.0 - spread / (double)((R - 1) * R) / size);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < D; d++) {
            double *o = out + token[r] * D + d;
            *o = sampled[r] ? exact[token[r] * D + d] : *o + share * mean[d];
            if (round) *o = (double)esa_round_to((float)*o, c->dtype);
        }
        if (lse && sampled[r]) lse[token[r]] = exact_lse[token[r]];
    }
    free(mean);
}

/* Mends a sparse out [B][Hq][Nq][D] with the dense one. */
static void mend(double *out, double *lse, const naive_case *c, int32_t same)
{
    naive_case dense = *c;
    const int64_t rows = c->B * c->Hq * c->Nq;
    double *exact = malloc(sizeof(double) * (size_t)(rows * c->D)),
           *exact_lse = malloc(sizeof(double) * (size_t)rows);
    int64_t token[256];
    dense.keep = NULL;
    dense.tail = ESA_TAIL_NONE;
    dense.exact_rows = 0;
    dense.added = NULL;
    if (same)
        naive_attention_same(exact, &dense);
    else
        naive_attention(exact, exact_lse, &dense);
    for (int64_t bh = 0; bh < c->B * c->Hq; bh++)
        for (int64_t from = 0; from < c->Nq; from += c->block_q) {
            const int64_t n = c->Nq - from < c->block_q ? c->Nq - from : c->block_q;
            for (int64_t r = 0; r < n; r++)
                token[r] = token_of(c, bh / c->Hq, bh % c->Hq, from + r);
            mend_block(out + bh * c->Nq * c->D, lse ? lse + bh * c->Nq : NULL,
                       exact + bh * c->Nq * c->D, exact_lse + bh * c->Nq, c, token, n, same);
        }
    free(exact);
    free(exact_lse);
}

void naive_attention(double *out, double *lse, const naive_case *c)
{
    naive_data x = naive_open(c, 0);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t h = 0; h < c->Hq; h++)
            for (int64_t i = 0; i < c->Nq; i++) {
                const int64_t hk = b * c->Hkv + h / (c->Hq / c->Hkv),
                              n = row_columns(&x, c, b, h, i, hk);
                const int64_t row = (b * c->Hq + h) * c->Nq + token_of(c, b, h, i);
                double top = -INFINITY, sum = 0.0, *o = out + row * c->D;
                for (int64_t j = 0; j < n; j++)
                    if (x.score[j] > top) top = x.score[j];
                for (int64_t d = 0; d < c->D; d++) o[d] = 0.0;
                for (int64_t j = 0; j < n; j++) {
                    const double p = x.score[j] == -INFINITY ? 0.0 : exp(x.score[j] - top),
                                 *v = x.v.exact + hk * x.v.head + x.column[j] * c->D;
                    sum += p;
                    for (int64_t d = 0; d < c->D; d++) o[d] += p * v[d];
                }
                if (sum > 0.0)
                    for (int64_t d = 0; d < c->D; d++) o[d] /= sum;
                if (c->added)
                    for (int64_t d = 0; d < c->D; d++) o[d] += c->added[row * c->D + d];
                if (lse) lse[row] = sum > 0.0 ? top + log(sum) : -INFINITY;
            }
    naive_close(&x);
    if (c->keep && c->exact_rows) mend(out, lse, c, 0);
}

void naive_attention_same(double *out, const naive_case *c)
{
    naive_data x = naive_open(c, 1);
    float *o = malloc(sizeof(float) * (size_t)c->D);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t h = 0; h < c->Hq; h++)
            for (int64_t i = 0; i < c->Nq; i++) {
                const int64_t hk = b * c->Hkv + h / (c->Hq / c->Hkv),
                              n = row_columns(&x, c, b, h, i, hk);
                const int64_t row = (b * c->Hq + h) * c->Nq + token_of(c, b, h, i);
                float top = -INFINITY, sum = 0.0f;
                for (int64_t j = 0; j < n; j++)
                    if ((float)x.score[j] > top) top = (float)x.score[j];
                for (int64_t j = 0; j < n; j++) {
                    const float e = expf((float)x.score[j] - top);
                    x.score[j] = (double)e;
                    sum += e;
                }
                for (int64_t d = 0; d < c->D; d++) o[d] = 0.0f;
                for (int64_t j = 0; j < n; j++) {
                    const float p = esa_round_to((float)x.score[j] / sum, c->dtype),
                                *v = x.v.same + hk * x.v.head + x.column[j] * c->D;
                    for (int64_t d = 0; d < c->D; d++) o[d] += p * v[d];
                }
                for (int64_t d = 0; d < c->D; d++) {
                    if (c->added) o[d] += (float)c->added[row * c->D + d];
                    out[row * c->D + d] = (double)esa_round_to(o[d], c->dtype);
                }
            }
    free(o);
    naive_close(&x);
    if (c->keep && c->exact_rows) mend(out, NULL, c, 1);
}

double max_error(const double *a, const double *ref, int64_t n)
{
    double e = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(a[i]) != isnan(ref[i])) return INFINITY;
        if (fabs(a[i] - ref[i]) > e) e = fabs(a[i] - ref[i]);
    }
    return e;
}

double max_magnitude(const double *a, int64_t n)
{
    double m = 0.0;
    for (int64_t i = 0; i < n; i++)
        if (fabs(a[i]) > m) m = fabs(a[i]);
    return m;
}

void tensor_to_double(double *out, const esa_tensor *t)
{
    for (int64_t b = 0, o = 0; b < t->dim[0]; b++)
        for (int64_t h = 0; h < t->dim[1]; h++)
            for (int64_t n = 0; n < t->dim[2]; n++)
                for (int64_t d = 0; d < t->dim[3]; d++) out[o++] = element(t, b, h, n, d);
}

void tensor_fill(const esa_tensor *t, uint64_t seed, double range)
{
    esa_rng r = { seed };
    for (int64_t b = 0; b < t->dim[0]; b++)
        for (int64_t h = 0; h < t->dim[1]; h++)
            for (int64_t n = 0; n < t->dim[2]; n++)
                for (int64_t d = 0; d < t->dim[3]; d++)
                    esa_store_f32(
                        t->data, b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d,
                        t->dtype, (float)(range * (2.0 * (double)esa_rng_unit(&r) - 1.0)));
}

enum { GUARD = 192, GUARD_BYTE = 0xa5 };

guarded guard_alloc(int64_t bytes, int64_t misalign)
{
    guarded g = { malloc((size_t)(bytes + 2 * GUARD + 128)), NULL, bytes };
    memset(g.block, GUARD_BYTE, (size_t)(bytes + 2 * GUARD + 128));
    const uintptr_t base = ((uintptr_t)g.block + GUARD + 63) / 64 * 64;
    g.data = (void *)(base + (uintptr_t)misalign);
    return g;
}

int guard_check(const guarded *g)
{
    const unsigned char *lo = g->block, *data = g->data,
                        *hi = g->block + g->bytes + 2 * GUARD + 128;
    for (const unsigned char *p = lo; p < data; p++)
        if (*p != GUARD_BYTE) return 0;
    for (const unsigned char *p = data + g->bytes; p < hi; p++)
        if (*p != GUARD_BYTE) return 0;
    return 1;
}

void guard_free(guarded *g)
{
    free(g->block);
    g->block = NULL;
}

uint64_t test_seed(void)
{
    const char *s = getenv("ESA_SEED");
    return s ? strtoull(s, NULL, 10) : 20240607u;
}
