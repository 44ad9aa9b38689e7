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
    return (double)esa_load_f32(t->data, b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d, t->dtype);
}

/* The inputs in double, in their order, with the block means: made once per case. */
typedef struct naive_data {
    double *q, *k, *v;              /* [B*H][N][D] */
    double *mean_q, *mean_k, *mean_v;   /* [B*H][blocks][D]; same-precision runs round k and v means to the dtype */
    double *score, *value;          /* one row's columns: [Nk + nk], [Nk + nk][D] */
    int64_t nq, nk;
} naive_data;

static double *ordered(const esa_tensor *t, const int32_t *perm)
{
    double *x = malloc(sizeof(double) * (size_t)(t->dim[0] * t->dim[1] * t->dim[2] * t->dim[3]));
    for (int64_t b = 0, o = 0; b < t->dim[0]; b++)
        for (int64_t h = 0; h < t->dim[1]; h++)
            for (int64_t n = 0; n < t->dim[2]; n++)
                for (int64_t d = 0; d < t->dim[3]; d++) x[o++] = element(t, b, h, perm ? perm[n] : n, d);
    return x;
}

static double *block_means(const double *x, int64_t B, int64_t H, int64_t N, int64_t D, int64_t block, const int32_t *kv_len, int32_t round, int32_t dtype)
{
    const int64_t blocks = (N + block - 1) / block;
    double *mean = calloc((size_t)(B * H * blocks * D), sizeof(double));
    for (int64_t bh = 0; bh < B * H; bh++)
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t length = kv_len ? kv_len[bh / H] : N, from = j * block, to = length < from + block ? length : from + block;
            for (int64_t d = 0; d < D && to > from; d++) {
                double sum = 0.0;
                for (int64_t n = from; n < to; n++) sum += x[(bh * N + n) * D + d];
                sum /= (double)(to - from);
                mean[(bh * blocks + j) * D + d] = round ? (double)esa_round_to((float)sum, dtype) : sum;
            }
        }
    return mean;
}

static naive_data naive_open(const naive_case *c, int32_t same)
{
    naive_data x;
    x.nq = (c->Nq + c->block_q - 1) / c->block_q;
    x.nk = (c->Nk + c->block_k - 1) / c->block_k;
    x.q = ordered(c->q, c->perm_q);
    x.k = ordered(c->k, c->perm_k);
    x.v = ordered(c->v, c->perm_k);
    x.mean_q = block_means(x.q, c->B, c->Hq, c->Nq, c->D, c->block_q, NULL, 0, c->dtype);
    x.mean_k = block_means(x.k, c->B, c->Hkv, c->Nk, c->D, c->block_k, c->kv_len, same, c->dtype);
    x.mean_v = block_means(x.v, c->B, c->Hkv, c->Nk, c->D, c->block_k, c->kv_len, same, c->dtype);
    x.score = malloc(sizeof(double) * (size_t)(c->Nk + x.nk));
    x.value = malloc(sizeof(double) * (size_t)((c->Nk + x.nk) * c->D));
    return x;
}

static void naive_close(naive_data *x)
{
    free(x->q); free(x->k); free(x->v); free(x->mean_q); free(x->mean_k); free(x->mean_v); free(x->score); free(x->value);
}

static double dot_of(const double *a, const double *b, int64_t D, int32_t same)
{
    double dot = 0.0;
    float dot32 = 0.0f;
    for (int64_t d = 0; d < D; d++) {
        dot += a[d] * b[d];
        dot32 += (float)a[d] * (float)b[d];
    }
    return same ? (double)dot32 : dot;
}

/* Fills score and value with the columns of query position i: real keys, then pooled ones; returns their number. */
static int64_t row_columns(naive_data *x, const naive_case *c, int64_t b, int64_t h, int64_t i, int32_t same)
{
    const int64_t hk = b * c->Hkv + h / (c->Hq / c->Hkv), hq = b * c->Hq + h, kv = c->kv_len ? c->kv_len[b] : c->Nk, I = i / c->block_q;
    const uint8_t *keep = c->keep ? c->keep + (hq * x->nq + I) * x->nk : NULL;
    const double *q = x->q + (hq * c->Nq + i) * c->D;
    int64_t n = 0;
    for (int64_t j = 0; j < x->nk; j++) {
        const int64_t from = j * c->block_k, to = kv < from + c->block_k ? kv : from + c->block_k;
        if (to <= from) break;
        if (!keep || keep[j]) {
            for (int64_t t = from; t < to; t++) {
                if (c->causal && t > i + c->Nk - c->Nq) continue;
                x->score[n] = dot_of(q, x->k + (hk * c->Nk + t) * c->D, c->D, same) * c->scale;
                memcpy(x->value + n++ * c->D, x->v + (hk * c->Nk + t) * c->D, sizeof(double) * (size_t)c->D);
            }
        } else if (c->tail && !(c->causal && to - 1 > I * c->block_q + c->Nk - c->Nq)) {
            const double *from_q = c->tail == ESA_TAIL_CENTROID ? x->mean_q + (hq * x->nq + I) * c->D : q;
            x->score[n] = dot_of(from_q, x->mean_k + (hk * x->nk + j) * c->D, c->D, same) * c->scale + log((double)(to - from));
            memcpy(x->value + n++ * c->D, x->mean_v + (hk * x->nk + j) * c->D, sizeof(double) * (size_t)c->D);
        }
    }
    return n;
}

void naive_attention(double *out, double *lse, const naive_case *c)
{
    naive_data x = naive_open(c, 0);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t h = 0; h < c->Hq; h++)
            for (int64_t i = 0; i < c->Nq; i++) {
                const int64_t n = row_columns(&x, c, b, h, i, 0), row = (b * c->Hq + h) * c->Nq + (c->perm_q ? c->perm_q[i] : i);
                double top = -INFINITY, sum = 0.0;
                for (int64_t j = 0; j < n; j++) if (x.score[j] > top) top = x.score[j];
                for (int64_t d = 0; d < c->D; d++) out[row * c->D + d] = 0.0;
                for (int64_t j = 0; j < n; j++) {
                    const double p = x.score[j] == -INFINITY ? 0.0 : exp(x.score[j] - top);
                    sum += p;
                    for (int64_t d = 0; d < c->D; d++) out[row * c->D + d] += p * x.value[j * c->D + d];
                }
                if (sum > 0.0) for (int64_t d = 0; d < c->D; d++) out[row * c->D + d] /= sum;
                if (lse) lse[row] = sum > 0.0 ? top + log(sum) : -INFINITY;
            }
    naive_close(&x);
}

void naive_attention_same(double *out, const naive_case *c)
{
    naive_data x = naive_open(c, 1);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t h = 0; h < c->Hq; h++)
            for (int64_t i = 0; i < c->Nq; i++) {
                const int64_t n = row_columns(&x, c, b, h, i, 1), row = (b * c->Hq + h) * c->Nq + (c->perm_q ? c->perm_q[i] : i);
                float top = -INFINITY, sum = 0.0f;
                for (int64_t j = 0; j < n; j++) if ((float)x.score[j] > top) top = (float)x.score[j];
                for (int64_t j = 0; j < n; j++) sum += expf((float)x.score[j] - top);
                for (int64_t j = 0; j < n; j++) x.score[j] = (double)esa_round_to(expf((float)x.score[j] - top) / sum, c->dtype);
                for (int64_t d = 0; d < c->D; d++) {
                    float o = 0.0f;
                    for (int64_t j = 0; j < n; j++) o += (float)x.score[j] * (float)x.value[j * c->D + d];
                    out[row * c->D + d] = (double)esa_round_to(o, c->dtype);
                }
            }
    naive_close(&x);
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
    for (int64_t i = 0; i < n; i++) if (fabs(a[i]) > m) m = fabs(a[i]);
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
                    esa_store_f32(t->data, b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d, t->dtype,
                                  (float)(range * (2.0 * (double)esa_rng_unit(&r) - 1.0)));
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
    const unsigned char *lo = g->block, *data = g->data, *hi = g->block + g->bytes + 2 * GUARD + 128;
    for (const unsigned char *p = lo; p < data; p++) if (*p != GUARD_BYTE) return 0;
    for (const unsigned char *p = data + g->bytes; p < hi; p++) if (*p != GUARD_BYTE) return 0;
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
