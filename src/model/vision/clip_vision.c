/* clip_vision.c - see clip_vision.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vision/clip_vision.h"

#include <math.h>
#include <string.h>
#include "model/config/json_file.h"
#include "nn/ops.h"

typedef struct vision_norm {
    esa_weight weight, bias;
} vision_norm;

typedef struct vision_layer {
    esa_linear q, k, v, o, up, down;
    vision_norm norm1, norm2;
} vision_layer;

typedef struct esa_clip_vision {
    esa_part part;
    esa_clip_vision_config config;
    esa_linear patch;         /* [d][3][patch][patch], no bias */
    esa_weight first, places; /* [d], [rows][d], in host memory */
    vision_norm before;       /* in host memory */
    vision_layer *layer;      /* [layers] */
} esa_clip_vision;

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

#define END(field) offsetof(esa_clip_vision, field)
#define AT(field)  offsetof(vision_layer, field)
static const esa_row ends[] = {
    { ESA_ROW_TENSOR, END(first), "embeddings.class_embedding", "d", ESA_WANT_HOST, 0 },
    { ESA_ROW_TENSOR, END(places), "embeddings.position_embedding.weight", "n,d", ESA_WANT_HOST,
      0 },
    { ESA_ROW_MATRIX, END(patch), "embeddings.patch_embedding", "d,3,p,p", 0, 0 },
    { ESA_ROW_NORM, END(before), "pre_layrnorm", "d", ESA_WANT_HOST, 0 },
};
static const esa_row unused[] = { { ESA_ROW_NORM, 0, "post_layernorm", "d", 0, 0 } };
static const esa_row norms[] = {
    { ESA_ROW_NORM, AT(norm1), "layer_norm1", "d", 0, 0 },
    { ESA_ROW_NORM, AT(norm2), "layer_norm2", "d", 0, 0 },
};
static const esa_row products[] = {
    { ESA_ROW_LINEAR, AT(q), "self_attn.q_proj", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(k), "self_attn.k_proj", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(v), "self_attn.v_proj", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(o), "self_attn.out_proj", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(up), "mlp.fc1", "f,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(down), "mlp.fc2", "d,f", 0, 0 },
};

/* The last layer is checked, but not loaded. */
static int32_t used(const esa_clip_vision *e) { return e->config.layers - 1; }

static void want_layers(esa_clip_vision *e, const esa_row *rows, int32_t count, int32_t grouped,
                        const esa_sizes *sizes)
{
    for (int32_t i = 0; i < e->config.layers; i++) {
        esa_weights_group(e->part.weights, grouped && i < used(e) ? 1 + i : 0);
        esa_rows_want(e->part.weights, rows, count, i < used(e) ? &e->layer[i] : NULL, sizes,
                      "vision_model.encoder.layers.%d.", i);
    }
}

static esa_status open_file(esa_clip_vision *e)
{
    const esa_clip_vision_config *c = &e->config;
    const esa_part_env *env = &e->part.env;
    const esa_sizes sizes = {
        .letter = { ['d'] = c->d, ['f'] = c->ff, ['p'] = c->patch, ['n'] = esa_clip_vision_rows(c) }
    };
    ESA_TRY(esa_part_array(&e->part, (void **)&e->layer, c->layers, sizeof *e->layer));
    ESA_TRY(esa_weights_open_part(env->nn->ctx, &e->part.weights, env->folder, "image_encoder",
                                  "model", "image_encoder"));
    esa_weights *w = e->part.weights;
    esa_weights_naming(w, &naming);
    esa_rows_want(w, ESA_ROWS(ends), e, &sizes, "vision_model.");
    esa_rows_want(w, ESA_ROWS(unused), NULL, &sizes, "vision_model.");
    want_layers(e, ESA_ROWS(norms), 0, &sizes);
    want_layers(e, ESA_ROWS(products), 1, &sizes);
    esa_weights_ignore(w, "vision_model.embeddings.position_ids");
    esa_weights_ignore(w, "visual_projection.");
    return esa_part_compare(&e->part);
}

esa_status esa_clip_vision_make(const esa_part_env *env, esa_part **out,
                                const esa_clip_vision_config *config)
{
    *out = NULL;
    esa_clip_vision *e = esa_part_new(env, (int64_t)sizeof *e, "the image encoder");
    if (!e) return ESA_ERR_MEMORY;
    e->config = *config;
    const esa_status status = open_file(e);
    if (status)
        esa_part_free(&e->part);
    else
        *out = &e->part;
    return status;
}

/* ---------------------------------------------------------------- one image */

/* The buffers of one call, on the device. The stream x is f32: there are few tokens. */
typedef struct vision_run {
    esa_view x, t;          /* [n][d] f32 */
    esa_view h, o, q, k, v; /* [n][d] */
    esa_view up;            /* [n][ff] */
    esa_view pixels, cut;   /* [n - 1][3 patch^2], its embedding [n - 1][d] f32 */
    int64_t n;
    esa_clip_vision *e;
    const float *rgb;
    float *out;  /* [n][d] in host memory */
    float *room; /* [half] twice, in host memory */
    int64_t half;
} vision_run;

static void place(void *user, esa_carve *carve)
{
    vision_run *r = user;
    const esa_clip_vision_config *c = &r->e->config;
    esa_nn *nn = r->e->part.env.nn;
    const int32_t type = nn->ops->dtype;
    const int64_t n = r->n, d = c->d;
    r->x = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, d);
    r->t = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, d);
    esa_view *const list[] = { &r->h, &r->o, &r->q, &r->k, &r->v };
    for (size_t i = 0; i < 5; i++) *list[i] = esa_nn_take(nn, carve, type, n, d);
    r->up = esa_nn_take(nn, carve, type, n, c->ff);
    r->pixels = esa_nn_take(nn, carve, type, n - 1, (int64_t)3 * c->patch * c->patch);
    r->cut = esa_nn_take(nn, carve, ESA_DTYPE_F32, n - 1, d);
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

/* The first states. */
static esa_status begin(const vision_run *r)
{
    const esa_clip_vision *e = r->e;
    esa_nn *nn = e->part.env.nn;
    float *room = r->room;
    cut_patches(&e->config, room, r->rgb);
    ESA_TRY(esa_nn_write(nn, &r->pixels, room));
    ESA_TRY(nn->ops->linear(nn, &r->cut, &r->pixels, &e->patch, ESA_ACT_NONE));
    ESA_TRY(esa_nn_read(nn, room, &r->cut));
    add_places(e, room + r->half, room, r->n);
    return esa_nn_write(nn, &r->x, room + r->half);
}

static esa_norm_args norm_of(const vision_run *r, const vision_norm *n)
{
    return (esa_norm_args){ .y = r->h,
                            .x = r->x,
                            .norm = n ? ESA_NORM_LAYER : ESA_NORM_NONE,
                            .eps = (float)r->e->config.eps,
                            .weight = n ? n->weight.data : NULL,
                            .bias = n ? n->bias.data : NULL };
}

/* From h, the norm of x, to the norm of the new x for the next layer. */
static esa_status run_layer(void *user, int32_t number)
{
    const vision_run *r = user;
    const esa_clip_vision *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const esa_nn_ops *op = nn->ops;
    const vision_layer *l = &e->layer[number];
    const int64_t D = e->config.d / e->config.heads;
    const int32_t last = number + 2 == e->config.layers;
    const esa_norm_args middle = norm_of(r, &l->norm2), end = norm_of(r, last ? NULL : &l[1].norm1);
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

static esa_status run(void *user)
{
    vision_run *r = user;
    esa_nn *nn = r->e->part.env.nn;
    const esa_norm_args first = norm_of(r, &r->e->layer[0].norm1);
    ESA_TRY(begin(r));
    ESA_TRY(nn->ops->norm(nn, &first));
    ESA_TRY(esa_part_blocks(&r->e->part, used(r->e), run_layer, r));
    return esa_nn_read(nn, r->out, &r->x);
}

esa_status esa_clip_vision_encode(esa_part *encoder, float *out, const float *rgb)
{
    static const esa_part_work work = { place, run, "the image encoder" };
    esa_clip_vision *e = (esa_clip_vision *)encoder;
    esa_ctx *ctx = encoder->env.nn->ctx;
    const esa_clip_vision_config *c = &e->config;
    vision_run r = { .n = esa_clip_vision_rows(c), .e = e, .rgb = rgb, .out = out };
    r.half = r.n * esa_max64(c->d, (int64_t)3 * c->patch * c->patch);
    r.room = esa_mem_alloc(&ctx->mem, 8 * r.half);
    if (!r.room) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the image encoder");
    const esa_status status = esa_part_run(encoder, &work, &r);
    esa_mem_free(&ctx->mem, r.room, 8 * r.half);
    return status;
}
