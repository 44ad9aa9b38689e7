/* order_kit.h - problems for the adaptive order, a plain reference, and what a good order is.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The reference follows rules/order.h literally, in double and by recursion, with a Cholesky factor
 * and tokens in metric coordinates. It shares no code with the library but the place of the cuts
 * and the start weights. */
#ifndef ESA_TESTS_SELECT_ORDER_KIT_H
#define ESA_TESTS_SELECT_ORDER_KIT_H

#include "mask/mask.h"
#include "rules/order.h"
#include "select/kit.h"
#include "common/case_run.h"

typedef struct order_case {
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int32_t block_q, block_k, dtype, bsnd;
    int32_t grid_q[3], grid_k[3]; /* zeros: none, raster start */
    int32_t front, back, protect;
    int32_t cut;      /* keys that do not exist at the end */
    int32_t clusters; /* 0: independent tokens */
} order_case;

typedef struct order_world {
    order_case c;
    kit_tensor q, k;
    esa_select_args args;
    int32_t kv_len[8];
    int32_t *start_q, *start_k;
    char name[200];
} order_world;

/* Tokens near one of `clusters` centres, a random one each. Around them a common mean, which must
 * not matter. */
static inline void order_fill(kit_tensor *t, esa_rng *r, int32_t clusters)
{
    const esa_tensor *v = &t->view;
    const int64_t D = v->dim[3];
    float *centre = malloc((size_t)((clusters + 1) * D) * sizeof *centre);
    assert_non_null(centre);
    for (int64_t b = 0; b < v->dim[0]; b++)
        for (int64_t h = 0; h < v->dim[1]; h++) {
            for (int64_t i = 0; i < (clusters + 1) * D; i++) centre[i] = 1.5f * kit_normal(r);
            for (int64_t n = 0; n < v->dim[2]; n++) {
                const int64_t pick = clusters ? 1 + esa_rng_below(r, (uint32_t)clusters) : 0;
                for (int64_t d = 0; d < D; d++) {
                    const float x = 2.0f * centre[d] + (pick ? centre[pick * D + d] : 0.0f) +
                                    (clusters ? 0.25f : 1.0f) * kit_normal(r);
                    esa_store_f32(t->data,
                                  b * v->stride[0] + h * v->stride[1] + n * v->stride[2] + d,
                                  v->dtype, x);
                }
            }
        }
    free(centre);
}

static inline kit_tensor order_tensor(const order_case *c, int64_t H, int64_t N)
{
    kit_tensor t;
    t.data = malloc((size_t)(c->B * H * N * c->D * esa_dtype_size(c->dtype)));
    assert_non_null(t.data);
    t.view = c->bsnd ? esa_tensor_bsnd(t.data, c->dtype, c->B, H, N, c->D)
                     : esa_tensor_bnsd(t.data, c->dtype, c->B, H, N, c->D);
    return t;
}

/* Everything but the values of q and k. */
static inline void order_open(order_world *w, const order_case *c)
{
    memset(w, 0, sizeof *w);
    w->c = *c;
    w->q = order_tensor(c, c->Hq, c->Nq);
    w->k = order_tensor(c, c->Hkv, c->Nk);
    esa_select_args *a = &w->args;
    a->params = esa_select_params_default(ESA_SELECT_ERROR);
    a->params.mode = ESA_MODE_FIXED;
    a->params.block_q = c->block_q;
    a->params.block_k = c->block_k;
    a->params.scale = 1.0 / sqrt((double)c->D);
    esa_layout l = esa_layout_default();
    memcpy(l.grid_q, c->grid_q, sizeof l.grid_q);
    memcpy(l.grid_k, c->grid_k, sizeof l.grid_k);
    l.text_front_q = l.text_front_k = c->front;
    l.text_back_q = l.text_back_k = c->back;
    l.protect_first_frame = c->protect;
    l.order = c->grid_q[0] ? ESA_ORDER_HILBERT : ESA_ORDER_RASTER;
    w->start_q = malloc((size_t)c->Nq * 4);
    w->start_k = malloc((size_t)c->Nk * 4);
    assert_true(w->start_q && w->start_k);
    esa_order_build(w->start_q, c->Nq, &l, 0, ESA_MODE_FIXED);
    esa_order_build(w->start_k, c->Nk, &l, 1, ESA_MODE_FIXED);
    l.order = ESA_ORDER_ADAPTIVE;
    a->params.layout = l;
    a->dtype = c->dtype;
    a->B = c->B, a->Hq = c->Hq, a->Hkv = c->Hkv, a->Nq = c->Nq, a->Nk = c->Nk, a->D = c->D;
    a->nq = (c->Nq + c->block_q - 1) / c->block_q;
    a->nk = (c->Nk + c->block_k - 1) / c->block_k;
    a->q = w->q.data, a->k = w->k.data;
    memcpy(a->q_stride, w->q.view.stride, sizeof a->q_stride);
    memcpy(a->k_stride, w->k.view.stride, sizeof a->k_stride);
    if (c->grid_q[0]) a->perm_q = w->start_q, a->perm_k = w->start_k;
    for (int64_t b = 0; b < c->B && b < 8; b++)
        w->kv_len[b] = (int32_t)(c->Nk - (b + 1) * c->cut / c->B);
    if (c->cut) a->params.kv_len = w->kv_len;
    snprintf(w->name, sizeof w->name,
             "B %d H %d/%d N %d/%d D %d block %dx%d dtype %d grid %d,%d,%d text %d,%d protect %d "
             "cut %d clusters %d",
             (int)c->B, (int)c->Hq, (int)c->Hkv, (int)c->Nq, (int)c->Nk, (int)c->D, c->block_q,
             c->block_k, c->dtype, c->grid_q[0], c->grid_q[1], c->grid_q[2], c->front, c->back,
             c->protect, c->cut, c->clusters);
}

static inline void order_make(order_world *w, const order_case *c, uint64_t seed)
{
    esa_rng r = { seed };
    order_open(w, c);
    order_fill(&w->q, &r, c->clusters);
    order_fill(&w->k, &r, c->clusters);
}

static inline void order_free(order_world *w)
{
    free(w->q.data);
    free(w->k.data);
    free(w->start_q);
    free(w->start_k);
}

static const struct {
    const char *name;
    order_case c;
} order_cases[] = {
#define ORDER_CASE(name, ...) { name, { __VA_ARGS__ } },
#include "cases/selection.def"
};
/* The last two are long. */
enum { ORDER_CASES = sizeof order_cases / sizeof order_cases[0] - 2 };

/* ---- one head of a side ---- */

typedef struct order_head {
    const order_world *w;
    int32_t side;
    int64_t b, h, N;
    const int32_t *start;
    uint32_t block;
} order_head;

static inline int64_t order_heads(const order_world *w) { return w->c.B * (w->c.Hq + w->c.Hkv); }

/* Head number i of both sides; *perm receives its part of perm_q or perm_k. */
static inline order_head order_head_at(const order_world *w, int64_t i, const int32_t *perm_q,
                                       const int32_t *perm_k, const int32_t **perm)
{
    const int32_t side = i >= w->c.B * w->c.Hq;
    const int64_t at = side ? i - w->c.B * w->c.Hq : i, heads = side ? w->c.Hkv : w->c.Hq,
                  N = side ? w->c.Nk : w->c.Nq;
    const order_head x = { w,
                           side,
                           at / heads,
                           at % heads,
                           N,
                           side ? w->start_k : w->start_q,
                           (uint32_t)(side ? w->c.block_k : w->c.block_q) };
    *perm = (side ? perm_k : perm_q) + at * N;
    return x;
}

static inline double order_at(const order_head *x, int64_t token, int64_t d)
{
    return (double)kit_at(x->side ? &x->w->k.view : &x->w->q.view, x->b, x->h, token, d);
}

/* The metric: C [D][D]; the caller frees. */
static inline double *order_metric(const order_head *x)
{
    const order_case *c = &x->w->c;
    const int64_t D = c->D, ratio = c->Hq / c->Hkv;
    const int64_t heads = x->side ? ratio : 1,
                  N = x->side  ? c->Nq
                      : c->cut ? x->w->kv_len[x->b]
                               : c->Nk,
                  all = heads * N, count = all < ESA_ORDER_MOMENTS ? all : ESA_ORDER_MOMENTS;
    double *C = calloc((size_t)(D * D), sizeof *C), mean = 0.0;
    assert_non_null(C);
    for (int64_t s = 0; s < count; s++) {
        const int64_t at = (2 * s + 1) * all / (2 * count);
        const int64_t h = x->side ? x->h * ratio + at / N : x->h / ratio;
        const esa_tensor *t = x->side ? &x->w->q.view : &x->w->k.view;
        for (int64_t i = 0; i < D; i++)
            for (int64_t j = 0; j < D; j++)
                C[i * D + j] += (double)kit_at(t, x->b, h, at % N, i) *
                                (double)kit_at(t, x->b, h, at % N, j);
    }
    for (int64_t d = 0; d < D; d++) mean += C[d * D + d] / (double)D;
    const int32_t usable = mean > 0.0 && isfinite(mean);
    for (int64_t i = 0; i < D; i++)
        for (int64_t j = 0; j < D; j++)
            C[i * D + j] = usable ? C[i * D + j] / mean + (i == j) * (double)ESA_ORDER_RIDGE
                                  : (double)(i == j);
    return C;
}

/* All tokens of the head in metric coordinates, x L with C = L L^T: [N][D]; the caller frees. */
static inline double *order_turned(const order_head *x)
{
    const int64_t D = x->w->c.D;
    double *L = order_metric(x), *out = calloc((size_t)(x->N * D), sizeof *out);
    assert_non_null(out);
    for (int64_t j = 0; j < D; j++)
        for (int64_t i = j; i < D; i++) {
            double s = L[i * D + j];
            for (int64_t k = 0; k < j; k++) s -= L[i * D + k] * L[j * D + k];
            L[i * D + j] = i == j ? sqrt(s) : s / L[j * D + j];
        }
    for (int64_t n = 0; n < x->N; n++)
        for (int64_t i = 0; i < D; i++)
            for (int64_t j = 0; j <= i; j++) out[n * D + j] += order_at(x, n, i) * L[i * D + j];
    free(L);
    return out;
}

/* Mean over the blocks that lie inside the moved range of the squared distance of their tokens to
 * the mean of the group of `unit` positions, in the metric. */
static inline double order_spread(const double *turned, const int32_t *perm, esa_order_node root,
                                  int64_t unit, int64_t D)
{
    double sum = 0.0, mean[ESA_MAX_HEAD_DIM];
    int64_t tokens = 0;
    for (int64_t f = root.first / unit * unit; f < root.first + root.n; f += unit) {
        const int64_t a = f < root.first ? root.first : f,
                      e = f + unit < root.first + root.n ? f + unit : root.first + root.n;
        memset(mean, 0, sizeof mean);
        for (int64_t p = a; p < e; p++)
            for (int64_t d = 0; d < D; d++) mean[d] += turned[perm[p] * D + d] / (double)(e - a);
        for (int64_t p = a; p < e; p++)
            for (int64_t d = 0; d < D; d++) {
                const double x = turned[perm[p] * D + d] - mean[d];
                sum += x * x;
            }
        tokens += e - a;
    }
    return tokens ? sum / (double)tokens : 0.0;
}

/* ---- the reference ---- */

typedef struct order_pair {
    double y;
    int32_t at; /* position */
} order_pair;

static inline int order_compare(const void *a, const void *b)
{
    const order_pair *x = a, *y = b;
    if (x->y != y->y) return x->y < y->y ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

static inline void order_cut_node(const double *turned, int32_t *perm, esa_order_node node,
                                  uint32_t block, int64_t D)
{
    const uint32_t cut = esa_order_cut(node, block);
    if (!cut) return;
    const int64_t n = node.n, S = n < ESA_ORDER_SAMPLE ? n : ESA_ORDER_SAMPLE;
    double *X = malloc((size_t)(S * D) * sizeof *X), *y = malloc((size_t)S * sizeof *y),
           *u = calloc((size_t)D, sizeof *u), far = 0.0;
    order_pair *pair = malloc((size_t)n * sizeof *pair);
    int32_t *old = malloc((size_t)n * sizeof *old), low = 0, high = (int32_t)(cut - node.first);
    assert_true(X && y && u && pair && old);
    for (int64_t d = 0; d < D; d++) {
        double mean = 0.0;
        for (int64_t s = 0; s < S; s++) {
            X[s * D + d] = turned[perm[node.first + (2 * s + 1) * n / (2 * S)] * D + d];
            mean += X[s * D + d] / (double)S;
        }
        for (int64_t s = 0; s < S; s++) X[s * D + d] -= mean;
    }
    for (int64_t s = 0; s < S; s++) y[s] = (double)esa_order_weight((uint32_t)s);
    for (int32_t turn = 0; turn <= ESA_ORDER_ROUNDS; turn++) {
        double norm = 0.0;
        for (int64_t d = 0; d < D; d++) {
            u[d] = 0.0;
            for (int64_t s = 0; s < S; s++) u[d] += X[s * D + d] * y[s];
            norm += u[d] * u[d];
        }
        for (int64_t d = 0; d < D && norm > 0.0; d++) u[d] /= sqrt(norm);
        for (int64_t s = 0; s < S; s++) {
            y[s] = 0.0;
            for (int64_t d = 0; d < D; d++) y[s] += X[s * D + d] * u[d];
        }
    }
    for (int64_t s = 0; s < S; s++)
        if (fabs(y[s]) > fabs(far)) far = y[s];
    for (int64_t i = 0; i < n; i++) {
        pair[i].at = (int32_t)i;
        pair[i].y = 0.0;
        old[i] = perm[node.first + i];
        for (int64_t d = 0; d < D; d++) pair[i].y += turned[old[i] * D + d] * u[d];
        if (far < 0.0) pair[i].y = -pair[i].y;
    }
    qsort(pair, (size_t)n, sizeof *pair, order_compare);
    uint8_t *first = calloc((size_t)n, 1);
    assert_non_null(first);
    for (int64_t i = 0; i < (int64_t)(cut - node.first); i++) first[pair[i].at] = 1;
    for (int64_t i = 0; i < n; i++) perm[node.first + (first[i] ? low++ : high++)] = old[i];
    free(first);
    free(X);
    free(y);
    free(u);
    free(pair);
    free(old);
    order_cut_node(turned, perm, esa_order_half(node, cut, 0), block, D);
    order_cut_node(turned, perm, esa_order_half(node, cut, 1), block, D);
}

/* ---- checks ---- */

static inline esa_order_node order_root_of(const order_head *x)
{
    return esa_order_root(&x->w->args.params.layout, x->side, ESA_MODE_FIXED, x->N);
}

/* The order is a permutation, and what is not moved stands where it stood. */
static inline void order_check_valid(const order_world *w, const int32_t *perm_q,
                                     const int32_t *perm_k)
{
    for (int64_t i = 0; i < order_heads(w); i++) {
        const int32_t *perm;
        const order_head x = order_head_at(w, i, perm_q, perm_k, &perm);
        const esa_order_node root = order_root_of(&x);
        uint8_t *from = calloc((size_t)x.N, 1), *to = calloc((size_t)x.N, 1);
        assert_true(from && to);
        for (int64_t p = 0; p < x.N; p++) {
            const int32_t moved = p >= root.first && p < root.first + root.n;
            if (!moved && perm[p] != x.start[p])
                fail_msg("%s: head %d moved position %d, which stays", w->name, (int)i, (int)p);
            if (perm[p] < 0 || perm[p] >= x.N)
                fail_msg("%s: head %d has token %d at %d", w->name, (int)i, (int)perm[p], (int)p);
            from[x.start[p]] = (uint8_t)(1 + moved);
            to[perm[p]] = (uint8_t)(to[perm[p]] ? 3 : 1 + moved);
        }
        if (memcmp(from, to, (size_t)x.N) != 0)
            fail_msg("%s: head %d is no permutation inside its segments", w->name, (int)i);
        free(from);
        free(to);
    }
}

#endif
