/* umt5.c - see umt5.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/umt5.h"

#include <math.h>
#include <string.h>

#define LARGE (INT64_C(1) << 30) /* an encoder of this many bytes in f32 stays in its file */

typedef struct umt5_layer {
    esa_weight norm1, q, k, v, o, bias, norm2, gate, linear, out;
} umt5_layer;

struct esa_umt5 {
    esa_part_env env;
    esa_umt5_config config;
    esa_weights *weights;
    esa_weight shared, norm;
    umt5_layer *layer;
    int64_t layer_bytes;
};

static void want_all(esa_umt5 *e)
{
    const esa_umt5_config *c = &e->config;
    const int64_t d = c->d_model, inner = (int64_t)c->heads * c->d_kv, one[] = { d },
                  in[] = { inner, d }, out[] = { d, inner }, up[] = { c->ff, d };
    const int64_t down[] = { d, c->ff }, table[] = { c->buckets, c->heads },
                  words[] = { c->vocab, d };
    esa_weights *w = e->weights;
    esa_weights_want(w, &e->shared, 0, 2, words, "shared.weight");
    for (int32_t i = 0; i < c->layers; i++) {
        umt5_layer *l = &e->layer[i];
        struct {
            esa_weight *view;
            const int64_t *dim;
            const char *name;
        } attention[] = {
            { &l->q, in, "q" }, { &l->k, in, "k" }, { &l->v, in, "v" }, { &l->o, out, "o" }
        };
        for (int32_t k = 0; k < 4; k++)
            esa_weights_want(w, attention[k].view, 0, 2, attention[k].dim,
                             "encoder.block.%d.layer.0.SelfAttention.%s.weight", (int)i,
                             attention[k].name);
        esa_weights_want(w, &l->bias, ESA_WANT_F32, 2, table,
                         "encoder.block.%d.layer.0.SelfAttention.relative_attention_bias.weight",
                         (int)i);
        esa_weights_want(w, &l->norm1, 0, 1, one, "encoder.block.%d.layer.0.layer_norm.weight",
                         (int)i);
        esa_weights_want(w, &l->gate, 0, 2, up,
                         "encoder.block.%d.layer.1.DenseReluDense.wi_0.weight", (int)i);
        esa_weights_want(w, &l->linear, 0, 2, up,
                         "encoder.block.%d.layer.1.DenseReluDense.wi_1.weight", (int)i);
        esa_weights_want(w, &l->out, 0, 2, down,
                         "encoder.block.%d.layer.1.DenseReluDense.wo.weight", (int)i);
        esa_weights_want(w, &l->norm2, 0, 1, one, "encoder.block.%d.layer.1.layer_norm.weight",
                         (int)i);
    }
    esa_weights_want(w, &e->norm, 0, 1, one, "encoder.final_layer_norm.weight");
    /* some files have the embedding under both of its names */
    esa_weights_ignore(w, "encoder.embed_tokens.");
}

static esa_status read_file(esa_umt5 *e, int32_t load)
{
    const esa_part_env *env = &e->env;
    esa_ctx *ctx = env->nn->ctx;
    e->layer_bytes = (int64_t)sizeof(umt5_layer) * e->config.layers;
    e->layer = esa_mem_zalloc(&ctx->mem, e->layer_bytes);
    if (!e->layer) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    ESA_TRY(esa_weights_open_part(ctx, &e->weights, env->folder, "text_encoder", "model",
                                  "text encoder"));
    want_all(e);
    ESA_TRY(esa_weights_check(e->weights, env->report, env->report_user));
    if (!load) return ESA_OK;
    const int32_t large = esa_weights_parameters(e->weights) >= LARGE / 4;
    esa_weights_watch(e->weights, env->tick, env->tick_user);
    return esa_weights_load(e->weights,
                            env->hold == ESA_HOLD_AUTO && large ? ESA_HOLD_FILE : env->hold);
}

static esa_status open_encoder(const esa_part_env *env, esa_umt5 **out,
                               const esa_umt5_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_umt5 *e = esa_mem_zalloc(&ctx->mem, sizeof *e);
    if (!e) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    e->env = *env;
    e->config = *config;
    const esa_status status = read_file(e, load);
    if (!status && load)
        *out = e;
    else
        esa_umt5_free(e);
    return status;
}

esa_status esa_umt5_check(const esa_part_env *env, const esa_umt5_config *config)
{
    esa_umt5 *none;
    return open_encoder(env, &none, config, 0);
}

esa_status esa_umt5_open(const esa_part_env *env, esa_umt5 **encoder, const esa_umt5_config *config)
{
    return open_encoder(env, encoder, config, 1);
}

void esa_umt5_free(esa_umt5 *e)
{
    if (!e) return;
    esa_ctx *ctx = e->env.nn->ctx;
    esa_weights_free(e->weights);
    esa_mem_free(&ctx->mem, e->layer, e->layer_bytes);
    esa_mem_free(&ctx->mem, e, sizeof *e);
}

void esa_umt5_memory(const esa_umt5 *e, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = esa_weights_parameters(e->weights);
    esa_weights_memory(e->weights, held, mapped);
}

/* In f32, as in transformers, because the edges of the buckets depend on it. */
int32_t esa_umt5_bucket(const esa_umt5_config *c, int64_t distance)
{
    const int32_t half = c->buckets / 2, exact = half / 2 > 0 ? half / 2 : 1,
                  side = distance > 0 ? half : 0;
    const int64_t away = distance < 0 ? -distance : distance;
    if (away < exact) return side + (int32_t)away;
    const float ratio = logf((float)away / (float)exact) /
                        (float)log((double)c->max_distance / exact);
    const float far = ratio * (float)(half - exact);
    return side + (far < (float)(half - exact) ? exact + (int32_t)far : half - 1);
}

/* The buffers of one call; [n][...] unless noted. */
typedef struct umt5_run {
    float *x, *h, *q, *k, *v, *gate, *linear;
    float *distance, *norm; /* [heads][2n - 1], [d] */
    int32_t *bucket;        /* [2n - 1] */
    int64_t n, inner;
} umt5_run;

static esa_status carve_run(esa_umt5 *e, umt5_run *r, void **block, int64_t *bytes)
{
    const esa_umt5_config *c = &e->config;
    const int64_t n = r->n, d = c->d_model;
    r->inner = (int64_t)c->heads * c->d_kv;
    esa_carve carve = { 0 };
    for (int32_t pass = 0; pass < 2; pass++) {
        r->x = esa_carve_take(&carve, 4 * n * d);
        r->h = esa_carve_take(&carve, 4 * n * esa_max64(d, r->inner));
        r->distance = esa_carve_take(&carve, 4 * c->heads * (2 * n - 1));
        r->bucket = esa_carve_take(&carve, 4 * (2 * n - 1));
        r->norm = esa_carve_take(&carve, 4 * d);
        /* Attention is done when the feed-forward begins, so they share memory. */
        char *shared = esa_carve_take(&carve,
                                      esa_max64(4 * 3 * n * r->inner, 4 * 2 * n * c->ff) + 256);
        if (pass == 1) {
            r->q = (float *)shared;
            r->k = r->q + n * r->inner;
            r->v = r->k + n * r->inner;
            r->gate = (float *)shared;
            r->linear = r->gate + n * c->ff;
            break;
        }
        *bytes = carve.used;
        ESA_TRY(esa_nn_alloc(e->env.nn, block, *bytes, "the states of the text encoder"));
        carve = (esa_carve){ .base = *block };
    }
    return ESA_OK;
}

static void t5_norm(esa_umt5 *e, umt5_run *r, float *y, const esa_weight *weight)
{
    const int64_t d = e->config.d_model;
    esa_weight_to_f32(r->norm, weight, 0, d);
    esa_nn_rms_norm(e->env.nn, y, d, r->x, d, r->n, d, (float)e->config.eps, r->norm);
}

static esa_status run_layer(esa_umt5 *e, umt5_run *r, const umt5_layer *l)
{
    esa_nn *nn = e->env.nn;
    const esa_umt5_config *c = &e->config;
    const int64_t d = c->d_model, span = 2 * r->n - 1;
    for (int64_t i = 0; i < span; i++)
        for (int32_t h = 0; h < c->heads; h++)
            esa_weight_to_f32(r->distance + h * span + i, &l->bias,
                              (int64_t)r->bucket[i] * c->heads + h, 1);
    t5_norm(e, r, r->h, &l->norm1);
    ESA_TRY(esa_nn_linear(nn, r->q, r->inner, r->h, d, r->n, &l->q, NULL, NULL));
    ESA_TRY(esa_nn_linear(nn, r->k, r->inner, r->h, d, r->n, &l->k, NULL, NULL));
    ESA_TRY(esa_nn_linear(nn, r->v, r->inner, r->h, d, r->n, &l->v, NULL, NULL));
    const esa_nn_bias bias = { .distance = r->distance, .distance_ld = span, .center = r->n - 1 };
    ESA_TRY(esa_nn_attention(nn, r->h, r->inner, r->q, r->inner, r->k, r->inner, r->v, r->inner,
                             r->n, r->n, c->heads, c->d_kv, 1.0f, &bias));
    const esa_epilogue add = { .residual = r->x, .residual_ld = d };
    ESA_TRY(esa_nn_linear(nn, r->x, d, r->h, r->inner, r->n, &l->o, NULL, &add));
    t5_norm(e, r, r->h, &l->norm2);
    ESA_TRY(esa_nn_linear(nn, r->gate, c->ff, r->h, d, r->n, &l->gate, NULL, NULL));
    ESA_TRY(esa_nn_linear(nn, r->linear, c->ff, r->h, d, r->n, &l->linear, NULL, NULL));
    esa_nn_geglu(nn, r->gate, r->gate, r->linear, r->n * c->ff);
    return esa_nn_linear(nn, r->x, d, r->gate, c->ff, r->n, &l->out, NULL, &add);
}

static esa_status run_layers(esa_umt5 *e, umt5_run *r)
{
    for (int32_t i = 0; i < e->config.layers; i++) {
        ESA_TRY(run_layer(e, r, &e->layer[i]));
        if (e->env.tick && e->env.tick(e->env.tick_user, i + 1, e->config.layers))
            return esa_fail(e->env.nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return ESA_OK;
}

esa_status esa_umt5_encode(esa_umt5 *e, float *out, const int32_t *ids, int64_t n)
{
    esa_nn *nn = e->env.nn;
    const int64_t d = e->config.d_model;
    if (n < 1) return esa_fail(nn->ctx, ESA_ERR_ARGUMENT, "the text encoder got no tokens");
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->config.vocab)
            return esa_fail(nn->ctx, ESA_ERR_ARGUMENT,
                            "token id is %d, expected 0 .. %d for this text encoder", (int)ids[i],
                            (int)e->config.vocab - 1);
    umt5_run r = { .n = n };
    void *block = NULL;
    int64_t bytes = 0;
    ESA_TRY(carve_run(e, &r, &block, &bytes));
    for (int64_t i = 0; i < 2 * n - 1; i++) r.bucket[i] = esa_umt5_bucket(&e->config, i - (n - 1));
    for (int64_t i = 0; i < n; i++) esa_weight_to_f32(r.x + i * d, &e->shared, ids[i] * d, d);
    esa_nn_enter(nn);
    const esa_status status = run_layers(e, &r);
    esa_nn_leave(nn);
    if (!status) {
        t5_norm(e, &r, r.h, &e->norm);
        memcpy(out, r.h, (size_t)(4 * n * d));
    }
    esa_nn_free(nn, block, bytes);
    return status;
}
