/* clip_vision.c - see clip_vision.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vision/clip_vision.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "model/json_file.h"
#include "model/store.h"
#include "nn/ops.h"

typedef struct vision_norm {
    esa_weight weight, bias;
} vision_norm;

typedef struct vision_layer {
    esa_linear q, k, v, o, up, down;
    vision_norm norm1, norm2;
} vision_layer;

struct esa_clip_vision {
    esa_part_env env;
    esa_clip_vision_config config;
    esa_weights *weights;
    esa_store *store;
    esa_linear patch;         /* [d][3][patch][patch], no bias */
    esa_weight first, places; /* [d], [rows][d], in host memory */
    vision_norm before;       /* in host memory */
    vision_layer *layer;      /* [layers] */
};

esa_status esa_config_clip_vision(esa_ctx *ctx, esa_clip_vision_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (!esa_json_file_open(ctx, &f, path)) {
        esa_json_only_text(&f, "model_type", "clip_vision_model");
        c->d = (int32_t)esa_json_int(&f, "hidden_size", 1, 16384, ESA_JSON_REQUIRED);
        c->heads = (int32_t)esa_json_int(&f, "num_attention_heads", 1, 1024, ESA_JSON_REQUIRED);
        c->layers = (int32_t)esa_json_int(&f, "num_hidden_layers", 2, 1024, ESA_JSON_REQUIRED);
        c->ff = (int32_t)esa_json_int(&f, "intermediate_size", 1, 65536, ESA_JSON_REQUIRED);
        c->image = (int32_t)esa_json_int(&f, "image_size", 1, 4096, 224);
        c->patch = (int32_t)esa_json_int(&f, "patch_size", 1, 1024, 32);
        c->eps = esa_json_real(&f, "layer_norm_eps", 1e-12, 1e-1, 1e-5);
        const char *act = esa_json_text(&f, "hidden_act", "quick_gelu");
        c->act = strcmp(act, "gelu") == 0 ? ESA_ACT_GELU : ESA_ACT_QUICK_GELU;
        if (c->act != ESA_ACT_GELU && strcmp(act, "quick_gelu") != 0)
            esa_json_fail(&f, ESA_ERR_UNSUPPORTED, "hidden_act is %s, expected gelu or quick_gelu",
                          esa_quote(act).text);
        if (!f.status && (c->d % c->heads || c->image % c->patch))
            esa_json_fail(&f, ESA_ERR_FORMAT,
                          "%d channels of %d heads, or patches of %d in %d pixels, do not divide",
                          c->d, c->heads, c->patch, c->image);
    }
    const esa_status status = f.status;
    esa_json_file_close(&f);
    return status;
}

int64_t esa_clip_vision_rows(const esa_clip_vision_config *c)
{
    const int64_t side = c->image / c->patch;
    return 1 + side * side;
}

/* ---------------------------------------------------------------- tensors */

/* CLIPVisionModel lost its prefix in transformers 5. */
static const esa_naming_rule rules[] = { { "vision_model.embeddings", "embeddings" },
                                         { "vision_model.encoder", "encoder" },
                                         { "vision_model.pre_layrnorm", "pre_layrnorm" },
                                         { "vision_model.post_layernorm", "post_layernorm" } };
static const esa_naming naming = { "transformers 5", "embeddings.class_embedding", rules, 4, NULL };

static void want_norm(esa_clip_vision *e, vision_norm *n, int32_t flags, const char *name)
{
    const int64_t d = e->config.d;
    esa_weights_want(e->weights, n ? &n->weight : NULL, ESA_WANT_F32 | flags, 1, &d, "%s.weight",
                     name);
    esa_weights_want(e->weights, n ? &n->bias : NULL, ESA_WANT_F32 | flags, 1, &d, "%s.bias", name);
}

static void want_layer(esa_clip_vision *e, int32_t number)
{
    const int64_t d = e->config.d, ff = e->config.ff;
    vision_layer *l = &e->layer[number];
    const int32_t used = number + 1 < e->config.layers;
    const struct {
        esa_linear *layer;
        int64_t dim[2];
        const char *name;
    } list[] = { { &l->q, { d, d }, "self_attn.q_proj" }, { &l->k, { d, d }, "self_attn.k_proj" },
                 { &l->v, { d, d }, "self_attn.v_proj" }, { &l->o, { d, d }, "self_attn.out_proj" },
                 { &l->up, { ff, d }, "mlp.fc1" },        { &l->down, { d, ff }, "mlp.fc2" } };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        esa_weights_want(e->weights, used ? &list[i].layer->weight : NULL, ESA_WANT_PRODUCT, 2,
                         list[i].dim, "vision_model.encoder.layers.%d.%s.weight", (int)number,
                         list[i].name);
        esa_weights_want(e->weights, used ? &list[i].layer->bias : NULL, 0, 1, list[i].dim,
                         "vision_model.encoder.layers.%d.%s.bias", (int)number, list[i].name);
    }
}

static void want_all(esa_clip_vision *e)
{
    const esa_clip_vision_config *c = &e->config;
    const int64_t d = c->d, places[] = { esa_clip_vision_rows(c), d },
                  patch[] = { d, 3, c->patch, c->patch };
    char name[96];
    esa_weights_naming(e->weights, &naming);
    esa_weights_want(e->weights, &e->first, ESA_WANT_HOST, 1, &d,
                     "vision_model.embeddings.class_embedding");
    esa_weights_want(e->weights, &e->places, ESA_WANT_HOST, 2, places,
                     "vision_model.embeddings.position_embedding.weight");
    esa_weights_want(e->weights, &e->patch.weight, ESA_WANT_PRODUCT, 4, patch,
                     "vision_model.embeddings.patch_embedding.weight");
    want_norm(e, &e->before, ESA_WANT_HOST, "vision_model.pre_layrnorm");
    want_norm(e, NULL, 0, "vision_model.post_layernorm");
    for (int32_t i = 0; i < c->layers; i++) {
        vision_layer *l = i + 1 < c->layers ? &e->layer[i] : NULL;
        snprintf(name, sizeof name, "vision_model.encoder.layers.%d.layer_norm1", (int)i);
        want_norm(e, l ? &l->norm1 : NULL, 0, name);
        snprintf(name, sizeof name, "vision_model.encoder.layers.%d.layer_norm2", (int)i);
        want_norm(e, l ? &l->norm2 : NULL, 0, name);
    }
    for (int32_t i = 0; i < c->layers; i++) {
        esa_weights_group(e->weights, i + 1 < c->layers ? 1 + i : 0);
        want_layer(e, i);
    }
    esa_weights_ignore(e->weights, "vision_model.embeddings.position_ids");
    esa_weights_ignore(e->weights, "visual_projection.");
}

static esa_status read_file(esa_clip_vision *e, int32_t load)
{
    const esa_part_env *env = &e->env;
    esa_ctx *ctx = env->nn->ctx;
    e->layer = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof(vision_layer) * e->config.layers);
    if (!e->layer) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the image encoder");
    ESA_TRY(esa_weights_open_part(ctx, &e->weights, env->folder, "image_encoder", "model",
                                  "image_encoder"));
    want_all(e);
    ESA_TRY(esa_weights_check(e->weights, env->report, env->report_user));
    if (!load) return ESA_OK;
    return esa_part_load(env, &e->store, e->weights, ESA_LOAD_ENCODER);
}

static esa_status make(const esa_part_env *env, esa_clip_vision **out,
                       const esa_clip_vision_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_clip_vision *e = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *e);
    if (!e) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the image encoder");
    e->env = *env;
    e->config = *config;
    const esa_status status = read_file(e, load);
    if (!status && load)
        *out = e;
    else
        esa_clip_vision_free(e);
    return status;
}

esa_status esa_clip_vision_check(const esa_part_env *env, const esa_clip_vision_config *config)
{
    esa_clip_vision *none;
    return make(env, &none, config, 0);
}

esa_status esa_clip_vision_open(const esa_part_env *env, esa_clip_vision **encoder,
                                const esa_clip_vision_config *config)
{
    return make(env, encoder, config, 1);
}

void esa_clip_vision_free(esa_clip_vision *e)
{
    if (!e) return;
    esa_ctx *ctx = e->env.nn->ctx;
    esa_store_free(e->store);
    esa_weights_free(e->weights);
    esa_mem_free(&ctx->mem, e->layer, (int64_t)sizeof(vision_layer) * e->config.layers);
    esa_mem_free(&ctx->mem, e, (int64_t)sizeof *e);
}

/* ---------------------------------------------------------------- one image */

/* The buffers of one call, on the device. The stream x is f32: there are few tokens. */
typedef struct vision_run {
    esa_view x, t;          /* [n][d] f32 */
    esa_view h, o, q, k, v; /* [n][d] */
    esa_view up;            /* [n][ff] */
    esa_view pixels, cut;   /* [n - 1][3 patch^2], its embedding [n - 1][d] f32 */
    int64_t n;
} vision_run;

static void place(const esa_clip_vision *e, vision_run *r, esa_carve *carve)
{
    const esa_clip_vision_config *c = &e->config;
    const int32_t type = e->env.nn->ops->dtype;
    const int64_t n = r->n, d = c->d;
    r->x = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, d);
    r->t = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, d);
    esa_view *const list[] = { &r->h, &r->o, &r->q, &r->k, &r->v };
    for (size_t i = 0; i < 5; i++) *list[i] = esa_nn_take(e->env.nn, carve, type, n, d);
    r->up = esa_nn_take(e->env.nn, carve, type, n, c->ff);
    r->pixels = esa_nn_take(e->env.nn, carve, type, n - 1, (int64_t)3 * c->patch * c->patch);
    r->cut = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n - 1, d);
}

/* Rows of patches, each in the order channel, row, column. */
static void cut_patches(const esa_clip_vision_config *c, float *rows, const float *rgb)
{
    const int64_t p = c->patch, side = c->image / p;
    for (int64_t i = 0; i < side * side * 3 * p * p; i++) {
        const int64_t x = i % p, y = i / p % p, ch = i / (p * p) % 3, row = i / (3 * p * p);
        rows[i] = rgb[((row / side * p + y) * c->image + row % side * p + x) * 3 + ch];
    }
}

/* x [n][d] = norm of the class token and the patches, each with its place. */
static void add_places(const esa_clip_vision *e, float *x, const float *cut, int64_t n)
{
    const int64_t d = e->config.d;
    const float *weight = e->before.weight.data, *bias = e->before.bias.data;
    for (int64_t i = 0; i < n; i++) {
        float *row = x + i * d;
        double mean = 0, var = 0;
        esa_weight_to_f32(row, &e->places, i * d, d);
        for (int64_t c = 0; c < d; c++) {
            float first;
            if (i)
                first = cut[(i - 1) * d + c];
            else
                esa_weight_to_f32(&first, &e->first, c, 1);
            row[c] = first + row[c];
            mean += (double)row[c] / (double)d;
        }
        for (int64_t c = 0; c < d; c++) var += ((double)row[c] - mean) * ((double)row[c] - mean);
        const double f = 1 / sqrt(var / (double)d + e->config.eps);
        for (int64_t c = 0; c < d; c++)
            row[c] = (float)(((double)row[c] - mean) * f) * weight[c] + bias[c];
    }
}

/* The first states; room: [n][max(d, 3 patch^2)] twice in host memory. */
static esa_status begin(esa_clip_vision *e, vision_run *r, const float *rgb, float *room,
                        int64_t half)
{
    esa_nn *nn = e->env.nn;
    cut_patches(&e->config, room, rgb);
    ESA_TRY(esa_nn_write(nn, &r->pixels, room));
    ESA_TRY(nn->ops->linear(nn, &r->cut, &r->pixels, &e->patch, ESA_ACT_NONE));
    ESA_TRY(esa_nn_read(nn, room, &r->cut));
    add_places(e, room + half, room, r->n);
    return esa_nn_write(nn, &r->x, room + half);
}

static esa_norm_args norm_of(const esa_clip_vision *e, const vision_run *r, const vision_norm *n)
{
    return (esa_norm_args){ .y = r->h,
                            .x = r->x,
                            .norm = n ? ESA_NORM_LAYER : ESA_NORM_NONE,
                            .eps = (float)e->config.eps,
                            .weight = n ? n->weight.data : NULL,
                            .bias = n ? n->bias.data : NULL };
}

/* From h, the norm of x, to the norm of the new x for the next layer. */
static esa_status run_layer(esa_clip_vision *e, const vision_run *r, int32_t number)
{
    esa_nn *nn = e->env.nn;
    const esa_nn_ops *op = nn->ops;
    const vision_layer *l = &e->layer[number];
    const int64_t D = e->config.d / e->config.heads;
    const int32_t last = number + 2 == e->config.layers;
    const esa_norm_args middle = norm_of(e, r, &l->norm2),
                        end = norm_of(e, r, last ? NULL : &l[1].norm1);
    const esa_biased_args attention = { .o = r->o,
                                        .q = r->q,
                                        .k = r->k,
                                        .v = r->v,
                                        .heads = e->config.heads,
                                        .D = D,
                                        .scale = (float)(1 / sqrt((double)D)) };
    const esa_act_args act = { .y = r->up, .x = r->up, .act = e->config.act };
    ESA_TRY(op->linear(nn, &r->q, &r->h, &l->q, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->k, &r->h, &l->k, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->v, &r->h, &l->v, ESA_ACT_NONE));
    ESA_TRY(op->biased(nn, &attention));
    ESA_TRY(op->linear_add(nn, &middle, &r->o, &l->o, &r->t));
    ESA_TRY(op->linear(nn, &r->up, &r->h, &l->up, ESA_ACT_NONE));
    ESA_TRY(op->act(nn, &act));
    return op->linear_add(nn, &end, &r->up, &l->down, &r->t);
}

static esa_status run(esa_clip_vision *e, vision_run *r, float *out, const float *rgb, float *room,
                      int64_t half)
{
    esa_nn *nn = e->env.nn;
    const esa_norm_args first = norm_of(e, r, &e->layer[0].norm1);
    ESA_TRY(begin(e, r, rgb, room, half));
    ESA_TRY(nn->ops->norm(nn, &first));
    for (int32_t i = 0; i + 1 < e->config.layers; i++) {
        ESA_TRY(esa_store_begin(e->store, 1 + i));
        ESA_TRY(run_layer(e, r, i));
        ESA_TRY(esa_store_end(e->store, 1 + i));
    }
    return esa_nn_read(nn, out, &r->x);
}

esa_status esa_clip_vision_encode(esa_clip_vision *e, float *out, const float *rgb)
{
    esa_nn *nn = e->env.nn;
    const esa_clip_vision_config *c = &e->config;
    vision_run r = { .n = esa_clip_vision_rows(c) };
    const int64_t half = r.n * esa_max64(c->d, (int64_t)3 * c->patch * c->patch);
    esa_carve carve = { 0 };
    void *block = NULL;
    place(e, &r, &carve);
    float *room = esa_mem_alloc(&nn->ctx->mem, 8 * half);
    if (!room) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the image encoder");
    esa_status status = esa_nn_alloc(nn, &block, carve.used, "the image encoder");
    if (!status) {
        const int64_t bytes = carve.used;
        carve = (esa_carve){ .base = block };
        place(e, &r, &carve);
        status = run(e, &r, out, rgb, room, half);
        esa_nn_free(nn, block, bytes);
    }
    esa_mem_free(&nn->ctx->mem, room, 8 * half);
    return status;
}
