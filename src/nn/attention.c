/* attention.c - plain attention with biases, on the kernels of attention (cpu/cpu.h).
 * SPDX-License-Identifier: Apache-2.0
 *
 * For the attention calls around the transformer's own: text encoders (bias by distance, padding),
 * the decoder's frames (one wide head), cross-attention over a folded prompt. An item is one panel
 * of queries of one head. Keys and values are read where they lie, block by block. Per block: S = k
 * q^T in log2 units, plus the biases; one step of the online softmax; O = O alpha + v^T P. */
#include "nn/nn.h"

#include <math.h>
#include <string.h>

#define BLOCK  256 /* keys of a step: their scores stay in the first-level cache */
#define LOG2_E 1.44269504088896341f

typedef struct attention_job {
    const esa_cpu_kernels *kern;
    float *o;
    const float *q, *k, *v;
    int64_t ldo, ldq, ldk, ldv, Nq, Nk, heads, kv_heads, D;
    float scale;
    const esa_nn_bias *bias;
    const float *key; /* [Nk] biases of keys in log2 units; NULL: none */
    char *room;       /* of the workers */
    int64_t room_bytes;
} attention_job;

/* Scratch of one worker. */
typedef struct attention_room {
    float *q, *o, *s, *m, *l, *alpha;
} attention_room;

static attention_room carve_room(const attention_job *j, esa_carve *carve)
{
    const int64_t nr = j->kern->nr;
    attention_room w;
    w.q = esa_carve_take(carve, nr * j->D * 4);
    w.o = esa_carve_take(carve, nr * j->D * 4);
    w.s = esa_carve_take(carve, nr * esa_min64(BLOCK, j->Nk) * 4);
    w.m = esa_carve_take(carve, nr * 4);
    w.l = esa_carve_take(carve, nr * 4);
    w.alpha = esa_carve_take(carve, nr * 4);
    return w;
}

/* s[keys][nr] += distance[k - q + center] for the queries first .. first+n-1 of head h. */
static void add_distances(const attention_job *j, float *s, int64_t h, int64_t first, int64_t n,
                          int64_t key, int64_t keys)
{
    const esa_nn_bias *b = j->bias;
    if (!b || !b->distance) return;
    for (int64_t k = 0; k < keys; k++, s += j->kern->nr) {
        const float *at = b->distance + h * b->distance_ld + b->center + key + k - first;
        for (int64_t i = 0; i < n; i++) s[i] += LOG2_E * at[-i];
    }
}

static void attend_panel(void *arg, int64_t item, int32_t worker)
{
    const attention_job *j = arg;
    const esa_cpu_kernels *kern = j->kern;
    const int64_t nr = kern->nr, D = j->D, h = item % j->heads, first = item / j->heads * nr,
                  n = esa_min64(nr, j->Nq - first), at = h * D,
                  kv = h / (j->heads / j->kv_heads) * D;
    esa_carve carve = { .base = j->room + worker * j->room_bytes };
    const attention_room w = carve_room(j, &carve);
    kern->panel_q(w.q, j->q + first * j->ldq + at, ESA_DTYPE_F32, j->ldq, NULL, n, D,
                  j->scale * LOG2_E);
    for (int64_t i = 0; i < nr; i++) w.m[i] = -INFINITY;
    memset(w.l, 0, (size_t)nr * 4);
    memset(w.o, 0, (size_t)(nr * D) * 4);
    for (int64_t key = 0; key < j->Nk; key += BLOCK) {
        const int64_t keys = esa_min64(BLOCK, j->Nk - key);
        kern->kq(w.s, w.q, j->k + key * j->ldk + kv, j->ldk, keys, D, 1.0f);
        add_distances(j, w.s, h, first, n, key, keys);
        const int32_t moved = kern->softmax(w.s, w.s, keys, 1.0f, NULL,
                                            j->key ? j->key + key : NULL, w.m, w.l, w.alpha);
        kern->pv(w.o, w.s, j->v + key * j->ldv + kv, j->ldv, keys, D, moved ? w.alpha : NULL, 1);
    }
    /* If no key is visible, the sum and o are 0. NaN differs from 0 and passes. */
    for (int64_t i = 0; i < nr; i++) w.l[i] = w.l[i] == 0.0f ? 0.0f : 1.0f / w.l[i];
    kern->store(j->o + first * j->ldo + at, ESA_DTYPE_F32, j->ldo, NULL, w.o, w.l, n, D);
}

/* Fills j->key and the workers' room; only counts bytes if carve->base is NULL. */
static void place(attention_job *j, esa_carve *carve, int32_t threads)
{
    const float *key = j->bias ? j->bias->key : NULL;
    float *scaled = key ? esa_carve_take(carve, j->Nk * 4) : NULL;
    esa_carve one = { 0 };
    carve_room(j, &one);
    j->room_bytes = esa_ceil_div(one.used, 64) * 64;
    j->room = esa_carve_take(carve, threads * j->room_bytes);
    j->key = scaled;
    for (int64_t i = 0; scaled && carve->base && i < j->Nk; i++) scaled[i] = LOG2_E * key[i];
}

esa_status esa_nn_attention(esa_nn *nn, float *o, int64_t ldo, const float *q, int64_t ldq,
                            const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t Nq,
                            int64_t Nk, int64_t heads, int64_t kv_heads, int64_t D, float scale,
                            const esa_nn_bias *bias)
{
    attention_job j = { .kern = nn->ctx->kern,
                        .o = o,
                        .q = q,
                        .k = k,
                        .v = v,
                        .ldo = ldo,
                        .ldq = ldq,
                        .ldk = ldk,
                        .ldv = ldv,
                        .Nq = Nq,
                        .Nk = Nk,
                        .heads = heads,
                        .kv_heads = kv_heads,
                        .D = D,
                        .scale = scale,
                        .bias = bias };
    const int32_t threads = esa_pool_threads(nn->ctx->pool);
    void *scratch = NULL;
    for (int32_t pass = 0; pass < 2; pass++) {
        esa_carve carve = { .base = scratch };
        place(&j, &carve, threads);
        if (pass == 0) ESA_TRY(esa_nn_scratch(nn, &scratch, carve.used));
    }
    const double start = esa_nn_now();
    esa_pool_run(nn->ctx->pool, attend_panel, &j, esa_ceil_div(Nq, j.kern->nr) * heads);
    nn->seconds[ESA_NN_ATTENTION] += esa_nn_now() - start;
    return ESA_OK;
}
