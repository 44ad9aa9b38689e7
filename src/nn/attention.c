/* attention.c - plain attention with biases: one tile of queries at a time, on matrix products.
 * SPDX-License-Identifier: Apache-2.0
 *
 * For the attention calls around the transformer's own: text encoders (bias by distance, padding),
 * the decoder's frames (one wide head), cross-attention over a folded prompt. Per tile and head: S
 * = q k^T, softmax(S * scale + bias) by rows, o = S v. */
#include "nn/nn.h"

#include "nn/leaf.h"

#define TILE 128 /* queries; their scores for 512 keys take 256 KB */

typedef struct attention_job {
    const esa_nn_leaf *leaf;
    float *o, *s; /* s [threads][TILE][Nk] */
    const float *q, *k, *v;
    int64_t ldo, ldq, ldk, ldv, Nq, Nk, heads, kv_heads, D, lds;
    float scale;
    const esa_nn_bias *bias;
} attention_job;

static void attend_tile(void *arg, int64_t item, int32_t worker)
{
    const attention_job *j = arg;
    const int64_t h = item % j->heads, first = item / j->heads * TILE,
                  n = esa_min64(TILE, j->Nq - first), at = h * j->D,
                  kv = h / (j->heads / j->kv_heads) * j->D;
    float *s = j->s + worker * TILE * j->lds;
    esa_nn_gemm_one(s, j->lds, j->q + first * j->ldq + at, j->ldq, j->k + kv, j->ldk, n, j->Nk,
                    j->D, 1, 1, 0);
    const esa_nn_bias *b = j->bias;
    for (int64_t i = 0; i < n; i++) {
        const float *distance = b && b->distance
                                    ? b->distance + h * b->distance_ld + b->center - (first + i)
                                    : NULL;
        j->leaf->softmax(s + i * j->lds, j->Nk, j->scale, distance, b ? b->key : NULL);
    }
    esa_nn_gemm_one(j->o + first * j->ldo + at, j->ldo, s, j->lds, j->v + kv, j->ldv, n, j->D,
                    j->Nk, 0, 1, 0);
}

esa_status esa_nn_attention(esa_nn *nn, float *o, int64_t ldo, const float *q, int64_t ldq,
                            const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t Nq,
                            int64_t Nk, int64_t heads, int64_t kv_heads, int64_t D, float scale,
                            const esa_nn_bias *bias)
{
    const int64_t lds = esa_ceil_div(Nk, 16) * 16;
    void *s = NULL;
    ESA_TRY(esa_nn_scratch(
        nn, &s, esa_size_mul(esa_size_mul(esa_pool_threads(nn->ctx->pool), TILE * 4), lds)));
    attention_job j = { .leaf = esa_nn_leaf_get(nn->ctx->kern->level),
                        .o = o,
                        .s = s,
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
                        .lds = lds,
                        .scale = scale,
                        .bias = bias };
    const double start = esa_nn_now();
    esa_nn_enter(nn);
    esa_pool_run(nn->ctx->pool, attend_tile, &j, esa_ceil_div(Nq, TILE) * heads);
    esa_nn_leave(nn);
    nn->seconds[ESA_NN_ATTENTION] += esa_nn_now() - start;
    return ESA_OK;
}
