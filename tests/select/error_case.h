/* error_case.h - a random problem for the error selector, and its scores and choice by brute force.
 * Everything in double, token by token, straight from the rule: none of the library's code.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SELECT_ERROR_CASE_H
#define ESA_TESTS_SELECT_ERROR_CASE_H

#include "select/kit.h"
#include "select/select.h"

typedef struct error_case {
    int64_t B, Hq, Hkv, Nq, Nk, D, nq, nk, levels;
    int64_t group_q, group_k; /* after defaults */
    kit_tensor q, k, v;
    int32_t kv_len[4];
    int32_t *perm_q, *perm_k; /* [B][H][N], a permutation per head; NULL: as given */
    esa_select_args args;     /* without kernels and threads */
    char name[300];
} error_case;

static inline int64_t case_min(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int32_t *case_orders(esa_rng *r, int64_t rows, int64_t N)
{
    int32_t *p = malloc((size_t)(rows * N) * 4);
    assert_non_null(p);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < N; n++) { /* Fisher-Yates, inside out */
            const int64_t j = esa_rng_below(r, (uint32_t)n + 1);
            p[i * N + n] = p[i * N + j];
            p[i * N + j] = (int32_t)n;
        }
    return p;
}

/* The params and sizes are set; makes tensors, orders and args. */
static inline void case_fill(error_case *c, esa_rng *r, int32_t dtype, int32_t bsnd, float spread,
                             int32_t ordered)
{
    esa_select_args *a = &c->args;
    esa_select_params *p = &a->params;
    c->nq = (c->Nq + p->block_q - 1) / p->block_q;
    c->nk = (c->Nk + p->block_k - 1) / p->block_k;
    c->levels = p->tail == ESA_TAIL_LEVELS ? 2 : 1;
    c->group_q = p->group_q ? p->group_q : p->block_q >= 128 ? 16 : 8;
    c->group_k = p->group_k ? p->group_k : 4;
    if (!p->group_k && c->levels == 2)
        while (c->group_k > 1 &&
               (c->group_k * p->fine * 2 > p->block_k || p->block_k / p->fine % c->group_k != 0))
            c->group_k /= 2;
    c->q = kit_random(r, dtype, c->B, c->Hq, c->Nq, c->D, bsnd, spread);
    c->k = kit_random(r, dtype, c->B, c->Hkv, c->Nk, c->D, bsnd, spread);
    c->v = kit_random(r, dtype, c->B, c->Hkv, c->Nk, c->D, bsnd, 1.0f);
    c->perm_q = ordered ? case_orders(r, c->B * c->Hq, c->Nq) : NULL;
    c->perm_k = ordered ? case_orders(r, c->B * c->Hkv, c->Nk) : NULL;
    p->scale = 1.0 / sqrt((double)c->D);
    a->dtype = dtype;
    a->B = c->B;
    a->Hq = c->Hq;
    a->Hkv = c->Hkv;
    a->Nq = c->Nq;
    a->Nk = c->Nk;
    a->D = c->D;
    a->nq = c->nq;
    a->nk = c->nk;
    a->q = c->q.data;
    a->k = c->k.data;
    a->v = c->v.data;
    memcpy(a->q_stride, c->q.view.stride, sizeof a->q_stride);
    memcpy(a->k_stride, c->k.view.stride, sizeof a->k_stride);
    memcpy(a->v_stride, c->v.view.stride, sizeof a->v_stride);
    a->perm_q = c->perm_q;
    a->perm_k = c->perm_k;
    a->perm_q_stride[0] = c->Hq * c->Nq;
    a->perm_q_stride[1] = c->Nq;
    a->perm_k_stride[0] = c->Hkv * c->Nk;
    a->perm_k_stride[1] = c->Nk;
    snprintf(c->name, sizeof c->name,
             "B %d H %d/%d N %d/%d D %d block %dx%d group %dx%d tail %d fine %d budget %g kv_len "
             "%d dtype %d ordered %d text %d,%d",
             (int)c->B, (int)c->Hq, (int)c->Hkv, (int)c->Nq, (int)c->Nk, (int)c->D, p->block_q,
             p->block_k, (int)c->group_q, (int)c->group_k, p->tail, p->fine, p->budget,
             p->kv_len ? (int)p->kv_len[0] : -1, (int)dtype, (int)ordered, p->layout.text_front_k,
             p->layout.text_back_k);
}

/* Small, awkward, every feature sometimes. */
static inline void case_make(error_case *c, esa_rng *r)
{
    static const int32_t blocks[] = { 16, 32, 48, 64, 80, 128, 256 }, groups[] = { 0, 1, 2, 8, 16 };
    static const int64_t dims[] = { 1, 7, 40, 64, 72, 128 },
                         lengths[] = { 1, 3, 17, 64, 113, 203, 256, 300, 500 };
    static const double budgets[] = { 0.0, 0.08, 0.25, 0.5, 0.77, 0.95, 1.0 };
    memset(c, 0, sizeof *c);
    esa_select_params *p = &c->args.params;
    *p = esa_select_params_default(ESA_SELECT_ENTROPY);
    p->selector = ESA_SELECT_ERROR;
    p->block_q = blocks[esa_rng_below(r, 7)];
    p->block_k = blocks[esa_rng_below(r, 7)];
    p->budget = budgets[esa_rng_below(r, 7)];
    p->group_q = groups[esa_rng_below(r, 5)];
    p->group_k = groups[esa_rng_below(r, 5)];
    p->tail = (int32_t[]){ ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_LEVELS }[esa_rng_below(r, 3)];
    p->fine = 2 << esa_rng_below(r, 4);
    if (p->tail == ESA_TAIL_LEVELS) {
        while (p->block_k / p->fine < 2) p->fine /= 2;
        const int32_t part = p->block_k / p->fine;
        if (p->group_k && (p->group_k >= part || part % p->group_k)) p->group_k = 0;
    }
    c->B = 1 + esa_rng_below(r, 2);
    c->Hkv = 1 + esa_rng_below(r, 2);
    c->Hq = c->Hkv * (1 + esa_rng_below(r, 3));
    c->Nq = lengths[esa_rng_below(r, 9)];
    c->Nk = lengths[esa_rng_below(r, 9)];
    c->D = dims[esa_rng_below(r, 6)];
    p->layout.protect_first_frame = 0;
    p->layout.order = ESA_ORDER_RASTER;
    if (esa_rng_below(r, 2)) {
        p->layout.text_front_k = (int32_t)esa_rng_below(r, (uint32_t)case_min(c->Nk, 20));
        p->layout.text_back_q = (int32_t)esa_rng_below(r, (uint32_t)case_min(c->Nq, 20));
    }
    for (int b = 0; b < 4; b++) c->kv_len[b] = (int32_t)esa_rng_below(r, (uint32_t)c->Nk + 1);
    if (esa_rng_below(r, 2)) p->kv_len = c->kv_len;
    case_fill(c, r, (int32_t)esa_rng_below(r, 3), (int32_t)esa_rng_below(r, 2),
              esa_rng_below(r, 2) ? 1.0f : 2.5f, (int32_t)esa_rng_below(r, 2));
}

static inline void case_free(error_case *c)
{
    free(c->q.data);
    free(c->k.data);
    free(c->v.data);
    free(c->perm_q);
    free(c->perm_k);
}

static inline int64_t case_kv_len(const error_case *c, int64_t b)
{
    return c->args.params.kv_len ? c->args.params.kv_len[b] : c->Nk;
}

/* Rows of one head in order, in double: [N][D]. side 0: q, 1: k, 2: v. The caller frees. */
static inline double *case_head(const error_case *c, int32_t side, int64_t b, int64_t h)
{
    const kit_tensor *t = side == 0 ? &c->q : side == 1 ? &c->k : &c->v;
    const int64_t N = side ? c->Nk : c->Nq, H = side ? c->Hkv : c->Hq,
                  head = side ? h / (c->Hq / c->Hkv) : h;
    const int32_t *perm = side ? c->perm_k : c->perm_q;
    double *x = malloc((size_t)(N * c->D) * sizeof *x);
    assert_non_null(x);
    for (int64_t n = 0; n < N; n++)
        for (int64_t d = 0; d < c->D; d++)
            x[n * c->D + d] = (double)kit_at(&t->view, b, head,
                                             perm ? perm[(b * H + head) * N + n] : n, d);
    return x;
}

static inline void case_mean(double *dst, const double *x, int64_t first, int64_t end, int64_t D)
{
    for (int64_t d = 0; d < D; d++) {
        double sum = 0.0;
        for (int64_t n = first; n < end; n++) sum += x[n * D + d];
        dst[d] = sum / (double)(end - first);
    }
}

/* Adds weight and weighted value of the mean of tokens first .. end-1 to sum[D], returns the
 * weight. top: NULL, or receives the largest logit (then nothing is added). */
static inline double case_add(double *sum, double *top, const double *q, const double *k,
                              const double *v, int64_t first, int64_t end, const error_case *c,
                              double ref)
{
    double mk[256], mv[256], dot = 0.0;
    case_mean(mk, k, first, end, c->D);
    for (int64_t d = 0; d < c->D; d++) dot += q[d] * mk[d];
    dot *= c->args.params.scale;
    if (top) {
        if (dot > *top) *top = dot;
        return 0.0;
    }
    const double w = (double)(end - first) * exp(dot - ref);
    case_mean(mv, v, first, end, c->D);
    for (int64_t d = 0; d < c->D; d++) sum[d] += w * mv[d];
    return w;
}

/* Scores of one head, want[levels][nq][nk], and the rounding that f32 may cause, as the square of a
 * distance: room, laid out alike. Rounding moves a score e by at most 2 sqrt(e room) + room. */
static inline void case_scores(const error_case *c, double *want, double *room, int64_t b,
                               int64_t h)
{
    const esa_select_params *p = &c->args.params;
    const int64_t len = case_kv_len(c, b), D = c->D, cells = c->nq * c->nk,
                  n = (len + p->block_k - 1) / p->block_k;
    double *q = case_head(c, 0, b, h), *k = case_head(c, 1, b, h), *v = case_head(c, 2, b, h),
           *a = malloc((size_t)(n * D + 1) * sizeof *a), *w = malloc((size_t)(n + 1) * sizeof *w);
    double mq[256], o[256], t[256];
    assert_true(a && w);
    memset(want, 0, (size_t)(c->levels * cells) * sizeof *want);
    memset(room, 0, (size_t)(c->levels * cells) * sizeof *room);
    for (int64_t s = 0; s < c->Nq && n > 0; s += c->group_q) {
        const int64_t i = s / p->block_q, tokens = case_min(c->group_q, c->Nq - s),
                      block = case_min(p->block_q, c->Nq - i * p->block_q);
        const double share = (double)tokens / (double)block;
        double ref = -INFINITY, Z = 0.0, norm = 0.0;
        case_mean(mq, q, s, s + tokens, D);
        for (int64_t m = 0; m < len; m += c->group_k)
            case_add(NULL, &ref, mq, k, v, m, case_min(m + c->group_k, len), c, 0.0);
        memset(a, 0, (size_t)(n * D) * sizeof *a);
        memset(w, 0, (size_t)n * sizeof *w);
        for (int64_t m = 0; m < len; m += c->group_k)
            w[m / p->block_k] += case_add(a + m / p->block_k * D, NULL, mq, k, v, m,
                                          case_min(m + c->group_k, len), c, ref);
        memset(o, 0, sizeof o);
        for (int64_t j = 0; j < n; j++) {
            Z += w[j];
            for (int64_t d = 0; d < D; d++) o[d] += a[j * D + d];
        }
        for (int64_t d = 0; d < D; d++) o[d] /= Z;
        for (int64_t m = 0; m < len * D; m++) norm = fmax(norm, fabs(v[m]));
        for (int64_t l = 0; l < c->levels; l++)
            for (int64_t j = 0; j < n; j++) {
                const int64_t first = j * p->block_k, end = case_min(first + p->block_k, len),
                              step = l ? p->block_k / p->fine : p->block_k;
                double tw = 0.0, e = 0.0;
                memset(t, 0, sizeof t);
                if (p->tail != ESA_TAIL_NONE)
                    for (int64_t m = first; m < end; m += step)
                        tw += case_add(t, NULL, mq, k, v, m, case_min(m + step, end), c, ref);
                for (int64_t d = 0; d < D; d++) {
                    const double x = a[j * D + d] - t[d] - (w[j] - tw) * o[d];
                    e += x * x;
                }
                /* One part in 2^23 of every sum and logit, and a factor for their number. */
                const double slip = 32.0 * 1.2e-7 * (1.0 + fabs(ref)) * (w[j] + tw) / Z *
                                    sqrt((double)D) * norm;
                want[l * cells + i * c->nk + j] += share * e / (Z * Z);
                room[l * cells + i * c->nk + j] += share * slip * slip;
            }
    }
    free(q);
    free(k);
    free(v);
    free(a);
    free(w);
}

#endif
