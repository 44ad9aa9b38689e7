/* causal.c - see causal.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/causal.h"

#include <math.h>
#include "model/text/text.h"
#include "nn/ops.h"

typedef struct causal_norm {
    esa_weight weight, bias; /* Llama has no bias */
} causal_norm;

typedef struct causal_layer {
    esa_linear q, k, v, o, gate, up, down; /* CLIP has no gate */
    causal_norm norm1, norm2;
} causal_layer;

typedef struct esa_causal {
    esa_part part;
    esa_causal_config config;
    esa_weight words, places; /* [vocab][d], [positions][d], in host memory */
    causal_norm norm;
    causal_layer *layer; /* [layers] */
} esa_causal;

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

/* Only a few rows of the vocabulary are needed. The norms are in group 0, because the one at the
 * end of a layer is that of the next. */
#define END(field) offsetof(esa_causal, field)
#define AT(field)  offsetof(causal_layer, field)
static const esa_row llama_ends[] = {
    { ESA_ROW_TENSOR, END(words), "embed_tokens.weight", "v,d", ESA_WANT_HOST, 0 },
};
static const esa_row llama_unused[] = {
    { ESA_ROW_TENSOR, 0, "norm.weight", "d", ESA_WANT_F32, 0 },
};
static const esa_row llama_norms[] = {
    { ESA_ROW_TENSOR, AT(norm1.weight), "input_layernorm.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(norm2.weight), "post_attention_layernorm.weight", "d", ESA_WANT_F32, 0 },
};
static const esa_row llama_products[] = {
    { ESA_ROW_MATRIX, AT(q), "self_attn.q_proj", "i,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(k), "self_attn.k_proj", "s,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(v), "self_attn.v_proj", "s,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(o), "self_attn.o_proj", "d,i", 0, 0 },
    { ESA_ROW_MATRIX, AT(gate), "mlp.gate_proj", "f,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(up), "mlp.up_proj", "f,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(down), "mlp.down_proj", "d,f", 0, 0 },
};
static const esa_row clip_ends[] = {
    { ESA_ROW_TENSOR, END(words), "text_model.embeddings.token_embedding.weight", "v,d",
      ESA_WANT_HOST, 0 },
    { ESA_ROW_TENSOR, END(places), "text_model.embeddings.position_embedding.weight", "p,d",
      ESA_WANT_HOST, 0 },
    { ESA_ROW_NORM, END(norm), "text_model.final_layer_norm", "d", 0, 0 },
};
static const esa_row clip_norms[] = {
    { ESA_ROW_NORM, AT(norm1), "layer_norm1", "d", 0, 0 },
    { ESA_ROW_NORM, AT(norm2), "layer_norm2", "d", 0, 0 },
};
static const esa_row clip_products[] = {
    { ESA_ROW_LINEAR, AT(q), "self_attn.q_proj", "i,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(k), "self_attn.k_proj", "s,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(v), "self_attn.v_proj", "s,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(o), "self_attn.out_proj", "d,i", 0, 0 },
    { ESA_ROW_LINEAR, AT(up), "mlp.fc1", "f,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(down), "mlp.fc2", "d,f", 0, 0 },
};

/* Layers that are run. The last ones of Llama are checked, but not loaded. */
static int32_t used(const esa_causal_config *c) { return c->layers - c->skip; }

static void want_layers(esa_causal *e, const esa_row *rows, int32_t count, int32_t grouped,
                        const esa_sizes *sizes)
{
    const esa_causal_config *c = &e->config;
    for (int32_t i = 0; i < c->layers; i++) {
        esa_weights_group(e->part.weights, grouped && i < used(c) ? 1 + i : 0);
        esa_rows_want(e->part.weights, rows, count, i < used(c) ? &e->layer[i] : NULL, sizes,
                      c->kind == ESA_CAUSAL_LLAMA ? "layers.%d." : "text_model.encoder.layers.%d.",
                      i);
    }
}

static esa_status open_file(esa_causal *e, const char *folder)
{
    const esa_causal_config *c = &e->config;
    const int32_t llama = c->kind == ESA_CAUSAL_LLAMA;
    const esa_sizes sizes = { .letter = { ['v'] = c->vocab,
                                          ['p'] = c->positions,
                                          ['d'] = c->d,
                                          ['i'] = (int64_t)c->heads * c->head_dim,
                                          ['s'] = (int64_t)c->kv_heads * c->head_dim,
                                          ['f'] = c->ff } };
    ESA_TRY(esa_part_array(&e->part, (void **)&e->layer, c->layers, sizeof *e->layer));
    ESA_TRY(esa_part_open(&e->part, folder, "model", folder));
    esa_weights *w = e->part.weights;
    esa_weights_naming(w, llama ? &llama_naming : &clip_naming);
    if (llama) {
        esa_rows_want(w, ESA_ROWS(llama_ends), e, &sizes, "%s", "");
        want_layers(e, ESA_ROWS(llama_norms), 0, &sizes);
        esa_rows_want(w, ESA_ROWS(llama_unused), NULL, &sizes, "%s", "");
        want_layers(e, ESA_ROWS(llama_products), 1, &sizes);
    } else {
        esa_rows_want(w, ESA_ROWS(clip_ends), e, &sizes, "%s", "");
        want_layers(e, ESA_ROWS(clip_norms), 0, &sizes);
        want_layers(e, ESA_ROWS(clip_products), 1, &sizes);
    }
    esa_weights_ignore(w, "lm_head.");
    esa_weights_ignore(w, "text_model.embeddings.position_ids");
    esa_weights_ignore(w, "text_projection.");
    return esa_part_compare(&e->part);
}

esa_status esa_causal_make(const esa_part_env *env, esa_part **out, const esa_causal_config *config,
                           const char *folder)
{
    *out = NULL;
    esa_causal *e = esa_part_new(env, (int64_t)sizeof *e, "the text encoder");
    if (!e) return ESA_ERR_MEMORY;
    e->config = *config;
    const esa_status status = open_file(e, folder);
    if (status)
        esa_part_free(&e->part);
    else
        *out = &e->part;
    return status;
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
    esa_causal *e;
    float *out;         /* [n][d] in host memory */
    const int32_t *ids; /* [n] */
} causal_run;

static int64_t half_of(const esa_causal *e)
{
    return e->config.kind == ESA_CAUSAL_LLAMA ? e->config.head_dim / 2 : 0;
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(void *user, esa_carve *carve)
{
    causal_run *r = user;
    const esa_causal *e = r->e;
    const esa_causal_config *c = &e->config;
    esa_nn *nn = e->part.env.nn;
    const int32_t type = nn->ops->dtype;
    const int64_t n = r->n, inner = (int64_t)c->heads * c->head_dim,
                  shared = (int64_t)c->kv_heads * c->head_dim;
    r->x = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, c->d);
    r->t = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, c->d);
    r->h = esa_nn_take(nn, carve, type, n, c->d);
    r->o = esa_nn_take(nn, carve, type, n, inner);
    r->q = esa_nn_take(nn, carve, type, n, inner);
    r->k = esa_nn_take(nn, carve, type, n, shared);
    r->v = esa_nn_take(nn, carve, type, n, shared);
    r->up = esa_nn_take(nn, carve, type, n, c->ff);
    r->gate = c->kind == ESA_CAUSAL_LLAMA ? esa_nn_take(nn, carve, type, n, c->ff) : r->up;
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
static esa_status write_inputs(const causal_run *r, float *room)
{
    const esa_causal *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const int64_t d = e->config.d, n = r->n, table = n * half_of(e);
    for (int64_t i = 0; i < n; i++) {
        float *row = room + i * d, *place = room + n * d;
        esa_weight_to_f32(row, &e->words, r->ids[i] * d, d);
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

static esa_status begin(const causal_run *r)
{
    const esa_causal *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const int64_t floats = esa_max64((r->n + 1) * e->config.d, 2 * r->n * (half_of(e) + 1));
    float *room = esa_mem_alloc(&nn->ctx->mem, 4 * floats);
    if (!room) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    const esa_status status = write_inputs(r, room);
    esa_mem_free(&nn->ctx->mem, room, 4 * floats);
    return status;
}

/* The norm of x into y; norm NULL: none. */
static esa_norm_args norm_of(const causal_run *r, const esa_view *y, const causal_norm *norm)
{
    const int32_t kind = r->e->config.kind == ESA_CAUSAL_LLAMA ? ESA_NORM_RMS : ESA_NORM_LAYER;
    return (esa_norm_args){ .y = *y,
                            .x = r->x,
                            .norm = norm ? kind : ESA_NORM_NONE,
                            .eps = (float)r->e->config.eps,
                            .weight = norm ? norm->weight.data : NULL,
                            .bias = norm ? norm->bias.data : NULL };
}

static esa_status attend(const causal_run *r, const causal_layer *l)
{
    const esa_causal *e = r->e;
    esa_nn *nn = e->part.env.nn;
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
static esa_status run_layer(void *user, int32_t number)
{
    const causal_run *r = user;
    const esa_causal *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const esa_nn_ops *op = nn->ops;
    const causal_layer *l = &e->layer[number];
    const int32_t last = number + 1 == used(&e->config);
    const esa_norm_args middle = norm_of(r, &r->h, &l->norm2),
                        end = norm_of(r, &r->h, last ? NULL : &l[1].norm1);
    ESA_TRY(attend(r, l));
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

static esa_status run(void *user)
{
    causal_run *r = user;
    esa_causal *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const int32_t clip = e->config.kind == ESA_CAUSAL_CLIP;
    ESA_TRY(begin(r));
    const esa_norm_args first = norm_of(r, &r->h, &e->layer[0].norm1),
                        last = norm_of(r, &r->t, &e->norm);
    ESA_TRY(nn->ops->norm(nn, &first));
    ESA_TRY(esa_part_blocks(&e->part, used(&e->config), run_layer, r));
    if (clip) ESA_TRY(nn->ops->norm(nn, &last));
    return esa_nn_read(nn, r->out, clip ? &r->t : &r->x);
}

esa_status esa_causal_encode(esa_part *encoder, float *out, const int32_t *ids, int64_t n)
{
    static const esa_part_work work = { place, run, "the states of the text encoder" };
    esa_causal *e = (esa_causal *)encoder;
    esa_ctx *ctx = encoder->env.nn->ctx;
    if (e->config.kind == ESA_CAUSAL_CLIP && n > e->config.positions)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the text encoder got %lld tokens, it takes %d",
                        (long long)n, (int)e->config.positions);
    ESA_TRY(esa_text_check_ids(ctx, ids, n, e->config.vocab));
    causal_run r = { .n = n, .e = e, .out = out, .ids = ids };
    return esa_part_run(encoder, &work, &r);
}
