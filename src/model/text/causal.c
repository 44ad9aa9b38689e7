/* causal.c - see causal.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/causal.h"

#include <math.h>
#include <stdio.h>
#include "nn/ops.h"

typedef struct causal_norm {
    esa_weight weight, bias;
} causal_norm;

typedef struct causal_layer {
    esa_linear q, k, v, o, gate, up, down; /* CLIP has no gate */
    causal_norm norm1, norm2;
} causal_layer;

struct esa_causal {
    esa_part_env env;
    esa_causal_config config;
    esa_weights *weights;
    esa_store *store;
    esa_weight words, places; /* [vocab][d], [positions][d], in host memory */
    causal_norm norm;
    causal_layer *layer; /* [layers] */
    int64_t layer_bytes;
};

/* ---------------------------------------------------------------- tensors */

/* LlamaForCausalLM has a prefix, and CLIPTextModel lost its own in transformers 5. */
static const esa_naming_rule llama_rules[] = { { "embed_tokens", "model.embed_tokens" },
                                               { "layers", "model.layers" },
                                               { "norm", "model.norm" } },
                             clip_rules[] = { { "text_model.embeddings", "embeddings" },
                                              { "text_model.encoder", "encoder" },
                                              { "text_model.final_layer_norm",
                                                "final_layer_norm" } };
static const esa_naming llama_naming = { "LlamaForCausalLM", "model.embed_tokens.weight",
                                         llama_rules, 3, NULL },
                        clip_naming = { "transformers 5", "embeddings.token_embedding.weight",
                                        clip_rules, 3, NULL };

typedef struct causal_names {
    const char *words, *places, *norm, *layer;
    const char *norm1, *norm2;
    const char *q, *k, *v, *o, *gate, *up, *down;
} causal_names;

static const causal_names names[] = {
    [ESA_CAUSAL_LLAMA] = { "embed_tokens", NULL, "norm", "layers", "input_layernorm",
                           "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
                           "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                           "mlp.down_proj" },
    [ESA_CAUSAL_CLIP] = { "text_model.embeddings.token_embedding",
                          "text_model.embeddings.position_embedding", "text_model.final_layer_norm",
                          "text_model.encoder.layers", "layer_norm1", "layer_norm2",
                          "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                          "self_attn.out_proj", NULL, "mlp.fc1", "mlp.fc2" },
};

/* used 0: the tensor is checked, but not loaded. */
static void want_norm(esa_causal *e, causal_norm *n, const char *name, int32_t used)
{
    const int64_t d = e->config.d;
    esa_weights_want(e->weights, used ? &n->weight : NULL, ESA_WANT_F32, 1, &d, "%s.weight", name);
    if (e->config.kind == ESA_CAUSAL_CLIP)
        esa_weights_want(e->weights, used ? &n->bias : NULL, ESA_WANT_F32, 1, &d, "%s.bias", name);
}

/* The norms are in group 0, because the one at the end of a layer is that of the next. Only a few
 * rows of the vocabulary are needed. */
static void want_vectors(esa_causal *e)
{
    const esa_causal_config *c = &e->config;
    const causal_names *n = &names[c->kind];
    const int64_t words[] = { c->vocab, c->d }, places[] = { c->positions, c->d };
    char name[96];
    esa_weights_want(e->weights, &e->words, ESA_WANT_HOST, 2, words, "%s.weight", n->words);
    if (n->places)
        esa_weights_want(e->weights, &e->places, ESA_WANT_HOST, 2, places, "%s.weight", n->places);
    for (int32_t i = 0; i < c->layers; i++) {
        const int32_t used = i < c->layers - c->skip;
        snprintf(name, sizeof name, "%s.%d.%s", n->layer, (int)i, n->norm1);
        want_norm(e, &e->layer[i].norm1, name, used);
        snprintf(name, sizeof name, "%s.%d.%s", n->layer, (int)i, n->norm2);
        want_norm(e, &e->layer[i].norm2, name, used);
    }
    want_norm(e, &e->norm, n->norm, c->kind == ESA_CAUSAL_CLIP);
    esa_weights_ignore(e->weights, "lm_head.");
    esa_weights_ignore(e->weights, "text_model.embeddings.position_ids");
    esa_weights_ignore(e->weights, "text_projection.");
}

static void want_layer(esa_causal *e, int32_t number)
{
    const esa_causal_config *c = &e->config;
    const causal_names *n = &names[c->kind];
    causal_layer *l = &e->layer[number];
    const int64_t d = c->d, inner = (int64_t)c->heads * c->head_dim,
                  shared = (int64_t)c->kv_heads * c->head_dim;
    const struct {
        esa_linear *layer;
        int64_t dim[2];
        const char *name;
    } list[] = { { &l->q, { inner, d }, n->q },       { &l->k, { shared, d }, n->k },
                 { &l->v, { shared, d }, n->v },      { &l->o, { d, inner }, n->o },
                 { &l->gate, { c->ff, d }, n->gate }, { &l->up, { c->ff, d }, n->up },
                 { &l->down, { d, c->ff }, n->down } };
    const int32_t used = number < c->layers - c->skip;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        if (!list[i].name) continue;
        esa_weights_want(e->weights, used ? &list[i].layer->weight : NULL, ESA_WANT_PRODUCT, 2,
                         list[i].dim, "%s.%d.%s.weight", n->layer, (int)number, list[i].name);
        if (c->kind == ESA_CAUSAL_CLIP)
            esa_weights_want(e->weights, used ? &list[i].layer->bias : NULL, 0, 1, list[i].dim,
                             "%s.%d.%s.bias", n->layer, (int)number, list[i].name);
    }
}

static void want_all(esa_causal *e)
{
    esa_weights_naming(e->weights,
                       e->config.kind == ESA_CAUSAL_LLAMA ? &llama_naming : &clip_naming);
    want_vectors(e);
    for (int32_t i = 0; i < e->config.layers; i++) {
        esa_weights_group(e->weights, i < e->config.layers - e->config.skip ? 1 + i : 0);
        want_layer(e, i);
    }
}

static esa_status read_file(esa_causal *e, const char *folder, int32_t load)
{
    const esa_part_env *env = &e->env;
    esa_ctx *ctx = env->nn->ctx;
    e->layer_bytes = (int64_t)sizeof(causal_layer) * e->config.layers;
    e->layer = esa_mem_zalloc(&ctx->mem, e->layer_bytes);
    if (!e->layer) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    ESA_TRY(esa_part_open(env, &e->weights, folder, "model", folder));
    want_all(e);
    ESA_TRY(esa_weights_check(e->weights, env->report, env->report_user));
    return load ? esa_part_load(env, &e->store, e->weights, ESA_LOAD_ENCODER) : ESA_OK;
}

static esa_status open_encoder(const esa_part_env *env, esa_causal **out,
                               const esa_causal_config *config, const char *folder, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_causal *e = esa_mem_zalloc(&ctx->mem, sizeof *e);
    if (!e) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    e->env = *env;
    e->config = *config;
    const esa_status status = read_file(e, folder, load);
    if (!status && load)
        *out = e;
    else
        esa_causal_free(e);
    return status;
}

esa_status esa_causal_check(const esa_part_env *env, const esa_causal_config *config,
                            const char *folder)
{
    esa_causal *none;
    return open_encoder(env, &none, config, folder, 0);
}

esa_status esa_causal_open(const esa_part_env *env, esa_causal **encoder,
                           const esa_causal_config *config, const char *folder)
{
    return open_encoder(env, encoder, config, folder, 1);
}

void esa_causal_free(esa_causal *e)
{
    if (!e) return;
    esa_ctx *ctx = e->env.nn->ctx;
    esa_store_free(e->store);
    esa_weights_free(e->weights);
    esa_mem_free(&ctx->mem, e->layer, e->layer_bytes);
    esa_mem_free(&ctx->mem, e, sizeof *e);
}

void esa_causal_memory(const esa_causal *e, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = esa_weights_parameters(e->weights);
    esa_weights_memory(e->weights, held, mapped);
}

/* ---------------------------------------------------------------- one text */

/* The buffers of one call, on the device. The stream x and what is added to it are f32 on every
 * device: there are few tokens. */
typedef struct causal_run {
    esa_view x, t;             /* [n][d] */
    esa_view h, o;             /* [n][d], [n][inner] */
    esa_view q, k, v;          /* [n][inner], [n][shared] twice */
    esa_view gate, up;         /* [n][ff] */
    float *cos, *sin, *future; /* [n][head_dim/2] twice; [2n - 1]: 0 up to a token, then -inf */
    int64_t n;
} causal_run;

static int64_t half_of(const esa_causal *e)
{
    return e->config.kind == ESA_CAUSAL_LLAMA ? e->config.head_dim / 2 : 0;
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(const esa_causal *e, causal_run *r, esa_carve *carve)
{
    const esa_causal_config *c = &e->config;
    const int32_t type = e->env.nn->ops->dtype;
    const int64_t n = r->n, inner = (int64_t)c->heads * c->head_dim,
                  shared = (int64_t)c->kv_heads * c->head_dim;
    r->x = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, c->d);
    r->t = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, c->d);
    r->h = esa_nn_take(e->env.nn, carve, type, n, c->d);
    r->o = esa_nn_take(e->env.nn, carve, type, n, inner);
    r->q = esa_nn_take(e->env.nn, carve, type, n, inner);
    r->k = esa_nn_take(e->env.nn, carve, type, n, shared);
    r->v = esa_nn_take(e->env.nn, carve, type, n, shared);
    r->up = esa_nn_take(e->env.nn, carve, type, n, c->ff);
    r->gate = c->kind == ESA_CAUSAL_LLAMA ? esa_nn_take(e->env.nn, carve, type, n, c->ff) : r->up;
    r->cos = esa_carve_take(carve, 4 * n * half_of(e));
    r->sin = esa_carve_take(carve, 4 * n * half_of(e));
    r->future = esa_carve_take(carve, 4 * (2 * n - 1));
}

/* Rotations as in transformers, where frequencies and angles are f32. */
static void rotations(const esa_causal *e, float *cos_out, float *sin_out, int64_t n)
{
    const int64_t half = half_of(e);
    for (int64_t i = 0; i < n * half; i++) {
        const float power = powf((float)e->config.theta,
                                 (float)(2 * (i % half)) / (float)e->config.head_dim),
                    angle = (float)(i / half) * (1.0f / power);
        cos_out[i] = cosf(angle);
        sin_out[i] = sinf(angle);
    }
}

/* Words, positions and what a token may see, from host memory to the device. */
static esa_status write_inputs(esa_causal *e, causal_run *r, const int32_t *ids, float *room)
{
    esa_nn *nn = e->env.nn;
    const int64_t d = e->config.d, n = r->n, table = n * half_of(e);
    for (int64_t i = 0; i < n; i++) {
        float *row = room + i * d, *place = room + n * d;
        esa_weight_to_f32(row, &e->words, ids[i] * d, d);
        if (e->config.kind != ESA_CAUSAL_CLIP) continue;
        esa_weight_to_f32(place, &e->places, i * d, d);
        for (int64_t c = 0; c < d; c++) row[c] += place[c];
    }
    ESA_TRY(esa_nn_upload(nn, r->x.data, room, 4 * n * d));
    for (int64_t i = 0; i < 2 * n - 1; i++) room[i] = i < n ? 0.0f : -INFINITY;
    ESA_TRY(esa_nn_upload(nn, r->future, room, 4 * (2 * n - 1)));
    if (!table) return ESA_OK;
    rotations(e, room, room + table, n);
    ESA_TRY(esa_nn_upload(nn, r->cos, room, 4 * table));
    return esa_nn_upload(nn, r->sin, room + table, 4 * table);
}

static esa_status begin(esa_causal *e, causal_run *r, const int32_t *ids)
{
    esa_nn *nn = e->env.nn;
    const int64_t floats = esa_max64((r->n + 1) * e->config.d, 2 * r->n * (half_of(e) + 1));
    float *room = esa_mem_alloc(&nn->ctx->mem, 4 * floats);
    if (!room) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    const esa_status status = write_inputs(e, r, ids, room);
    esa_mem_free(&nn->ctx->mem, room, 4 * floats);
    return status;
}

/* The norm of x into y; norm NULL: none. */
static esa_norm_args norm_of(const esa_causal *e, const causal_run *r, const esa_view *y,
                             const causal_norm *norm)
{
    const int32_t kind = e->config.kind == ESA_CAUSAL_LLAMA ? ESA_NORM_RMS : ESA_NORM_LAYER;
    return (esa_norm_args){ .y = *y,
                            .x = r->x,
                            .norm = norm ? kind : ESA_NORM_NONE,
                            .eps = (float)e->config.eps,
                            .weight = norm ? norm->weight.data : NULL,
                            .bias = norm ? norm->bias.data : NULL };
}

static esa_status attend(esa_causal *e, const causal_run *r, const causal_layer *l)
{
    esa_nn *nn = e->env.nn;
    const esa_nn_ops *op = nn->ops;
    const esa_causal_config *c = &e->config;
    const esa_qk_args turn = { .q = r->q,
                               .k = r->k,
                               .cos = r->cos,
                               .sin = r->sin,
                               .D = c->head_dim,
                               .norm = ESA_QK_NONE,
                               .halves = 1 };
    const esa_biased_args attention = { .o = r->o,
                                        .q = r->q,
                                        .k = r->k,
                                        .v = r->v,
                                        .heads = c->heads,
                                        .kv_heads = c->kv_heads,
                                        .D = c->head_dim,
                                        .scale = (float)(1 / sqrt((double)c->head_dim)),
                                        .distance = r->future,
                                        .center = r->n - 1 };
    ESA_TRY(op->linear(nn, &r->q, &r->h, &l->q, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->k, &r->h, &l->k, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->v, &r->h, &l->v, ESA_ACT_NONE));
    if (c->kind == ESA_CAUSAL_LLAMA) ESA_TRY(op->qk(nn, &turn));
    return op->biased(nn, &attention);
}

/* From h, the norm of x, to the norm of the new x for the next layer. */
static esa_status run_layer(esa_causal *e, const causal_run *r, int32_t number)
{
    esa_nn *nn = e->env.nn;
    const esa_nn_ops *op = nn->ops;
    const causal_layer *l = &e->layer[number];
    const int32_t last = number + 1 == e->config.layers - e->config.skip;
    const esa_norm_args middle = norm_of(e, r, &r->h, &l->norm2),
                        end = norm_of(e, r, &r->h, last ? NULL : &l[1].norm1);
    ESA_TRY(attend(e, r, l));
    ESA_TRY(op->linear_add(nn, &middle, &r->o, &l->o, &r->t));
    if (e->config.kind == ESA_CAUSAL_CLIP) {
        ESA_TRY(op->linear(nn, &r->up, &r->h, &l->up, ESA_ACT_QUICK_GELU));
    } else {
        const esa_act_args gated = {
            .y = r->gate, .x = r->up, .gate = r->gate, .act = ESA_ACT_SILU
        };
        ESA_TRY(op->linear(nn, &r->gate, &r->h, &l->gate, ESA_ACT_NONE));
        ESA_TRY(op->linear(nn, &r->up, &r->h, &l->up, ESA_ACT_NONE));
        ESA_TRY(op->act(nn, &gated));
    }
    return op->linear_add(nn, &end, &r->gate, &l->down, &r->t);
}

static esa_status run_layers(esa_causal *e, const causal_run *r)
{
    esa_nn *nn = e->env.nn;
    const int32_t layers = e->config.layers - e->config.skip;
    const esa_norm_args first = norm_of(e, r, &r->h, &e->layer[0].norm1),
                        last = norm_of(e, r, &r->t, &e->norm);
    ESA_TRY(nn->ops->norm(nn, &first));
    for (int32_t i = 0; i < layers; i++) {
        ESA_TRY(esa_store_begin(e->store, 1 + i));
        ESA_TRY(run_layer(e, r, i));
        ESA_TRY(esa_store_end(e->store, 1 + i));
        ESA_TRY(nn->ops->pace(nn));
        if (e->env.tick && e->env.tick(e->env.tick_user, i + 1, layers))
            return esa_fail(nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return e->config.kind == ESA_CAUSAL_CLIP ? nn->ops->norm(nn, &last) : ESA_OK;
}

static esa_status run_in_memory(esa_causal *e, causal_run *r, float *out, const int32_t *ids)
{
    ESA_TRY(begin(e, r, ids));
    ESA_TRY(run_layers(e, r));
    return esa_nn_read(e->env.nn, out, e->config.kind == ESA_CAUSAL_CLIP ? &r->t : &r->x);
}

static esa_status check_ids(const esa_causal *e, const int32_t *ids, int64_t n)
{
    esa_ctx *ctx = e->env.nn->ctx;
    if (n < 1) return esa_fail(ctx, ESA_ERR_ARGUMENT, "the text encoder got no tokens");
    if (e->config.kind == ESA_CAUSAL_CLIP && n > e->config.positions)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the text encoder got %lld tokens, it takes %d",
                        (long long)n, (int)e->config.positions);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->config.vocab)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "token id is %d, expected 0 .. %d for this text encoder", (int)ids[i],
                            (int)e->config.vocab - 1);
    return ESA_OK;
}

esa_status esa_causal_encode(esa_causal *e, float *out, const int32_t *ids, int64_t n)
{
    esa_nn *nn = e->env.nn;
    causal_run r = { .n = n };
    esa_carve carve = { 0 };
    void *block = NULL;
    ESA_TRY(check_ids(e, ids, n));
    place(e, &r, &carve);
    const int64_t bytes = carve.used;
    int64_t products;
    ESA_TRY(esa_nn_reserve(nn, -1, &products));
    ESA_TRY(esa_store_leave(e->store, bytes, products));
    ESA_TRY(esa_nn_alloc(nn, &block, bytes, "the states of the text encoder"));
    carve = (esa_carve){ .base = block };
    place(e, &r, &carve);
    const esa_status status = run_in_memory(e, &r, out, ids);
    esa_nn_free(nn, block, bytes);
    return status;
}
