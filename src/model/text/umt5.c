/* umt5.c - see umt5.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/umt5.h"

#include <math.h>
#include "nn/ops.h"

#define ROOM (INT64_C(1) << 18) /* floats that go to the device at a time */

typedef struct umt5_layer {
    esa_linear q, k, v, o, gate, linear, out; /* without biases */
    esa_weight norm1, norm2;
    esa_weight bias; /* [buckets][heads], in host memory */
} umt5_layer;

struct esa_umt5 {
    esa_part_env env;
    esa_umt5_config config;
    esa_weights *weights;
    esa_store *store;
    esa_weight shared; /* [vocab][d_model], in host memory */
    esa_weight norm;
    umt5_layer *layer;
    int64_t layer_bytes;
};

/* Layers that have a table of biases. */
static int32_t tables(const esa_umt5_config *c) { return c->shared_bias ? 1 : c->layers; }

/* The norms are in group 0, because the one at the end of a layer is that of the next. Only a few
 * rows of the vocabulary are needed, and the biases by distance are looked up by the host. */
static void want_vectors(esa_umt5 *e)
{
    const esa_umt5_config *c = &e->config;
    const int64_t d = c->d_model, table[] = { c->buckets, c->heads }, words[] = { c->vocab, d };
    esa_weights *w = e->weights;
    esa_weights_want(w, &e->shared, ESA_WANT_HOST, 2, words, "shared.weight");
    for (int32_t i = 0; i < c->layers; i++) {
        umt5_layer *l = &e->layer[i];
        if (i < tables(c))
            esa_weights_want(
                w, &l->bias, ESA_WANT_F32 | ESA_WANT_HOST, 2, table,
                "encoder.block.%d.layer.0.SelfAttention.relative_attention_bias.weight", (int)i);
        esa_weights_want(w, &l->norm1, ESA_WANT_F32, 1, &d,
                         "encoder.block.%d.layer.0.layer_norm.weight", (int)i);
        esa_weights_want(w, &l->norm2, ESA_WANT_F32, 1, &d,
                         "encoder.block.%d.layer.1.layer_norm.weight", (int)i);
    }
    esa_weights_want(w, &e->norm, ESA_WANT_F32, 1, &d, "encoder.final_layer_norm.weight");
    /* some files have the embedding under both of its names */
    esa_weights_ignore(w, "encoder.embed_tokens.");
}

static void want_layer(esa_umt5 *e, int32_t number)
{
    const esa_umt5_config *c = &e->config;
    const int64_t d = c->d_model, inner = (int64_t)c->heads * c->d_kv, in[] = { inner, d },
                  out[] = { d, inner }, up[] = { c->ff, d }, down[] = { d, c->ff };
    umt5_layer *l = &e->layer[number];
    const struct {
        esa_linear *layer;
        const int64_t *dim;
        int32_t flags;
        const char *name;
    } list[] = { { &l->q, in, 0, "0.SelfAttention.q" },
                 { &l->k, in, ESA_WANT_JOIN, "0.SelfAttention.k" },
                 { &l->v, in, ESA_WANT_JOIN, "0.SelfAttention.v" },
                 { &l->o, out, 0, "0.SelfAttention.o" },
                 { &l->gate, up, 0, "1.DenseReluDense.wi_0" },
                 { &l->linear, up, 0, "1.DenseReluDense.wi_1" },
                 { &l->out, down, 0, "1.DenseReluDense.wo" } };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        esa_weights_want(e->weights, &list[i].layer->weight, ESA_WANT_PRODUCT | list[i].flags, 2,
                         list[i].dim, "encoder.block.%d.layer.%s.weight", (int)number,
                         list[i].name);
}

static void want_all(esa_umt5 *e)
{
    want_vectors(e);
    for (int32_t i = 0; i < e->config.layers; i++) {
        esa_weights_group(e->weights, 1 + i);
        want_layer(e, i);
    }
}

static esa_status read_file(esa_umt5 *e, int32_t load)
{
    const esa_part_env *env = &e->env;
    esa_ctx *ctx = env->nn->ctx;
    e->layer_bytes = (int64_t)sizeof(umt5_layer) * e->config.layers;
    e->layer = esa_mem_zalloc(&ctx->mem, e->layer_bytes);
    if (!e->layer) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    ESA_TRY(esa_part_open(env, &e->weights, "text_encoder", "model", "text encoder"));
    want_all(e);
    ESA_TRY(esa_weights_check(e->weights, env->report, env->report_user));
    return load ? esa_part_load(env, &e->store, e->weights, ESA_LOAD_ENCODER) : ESA_OK;
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
    esa_store_free(e->store);
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

/* The buffers of one call, on the device. The stream x and what is added to it are f32 on every
 * device: its values grow to thousands, and there are few tokens. */
typedef struct umt5_run {
    esa_view x, t;         /* [n][d] */
    esa_view h, o;         /* [n][d], [n][inner]: the same memory */
    esa_view qkv[3];       /* [n][inner] */
    esa_view gate, linear; /* [n][ff]: in the place of q, k and v */
    float *distance;       /* [tables][heads][2n - 1] */
    int64_t n, inner, span, heads;
} umt5_run;

/* The same memory as another matrix, from byte `at` on. */
static esa_view reuse(const esa_view *v, int64_t at, int64_t rows, int64_t cols)
{
    return esa_view_of((char *)v->data + at, v->dtype, v->device, rows, cols);
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(const esa_umt5 *e, umt5_run *r, esa_carve *carve)
{
    const esa_umt5_config *c = &e->config;
    const esa_nn_ops *op = e->env.nn->ops;
    const int64_t n = r->n, d = c->d_model, inner = r->inner, ff = c->ff,
                  element = esa_view_element(op->dtype);
    r->x = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, d);
    r->t = esa_nn_take(e->env.nn, carve, ESA_DTYPE_F32, n, d);
    r->h = esa_nn_take(e->env.nn, carve, op->dtype, n, esa_max64(d, inner));
    r->o = esa_view_of(r->h.data, r->h.dtype, r->h.device, n, inner);
    r->h.cols = r->h.ld = d;
    r->distance = esa_carve_take(carve, 4 * tables(c) * r->heads * r->span);
    /* Attention is done when the feed-forward begins, so they share memory. */
    const esa_view all = esa_nn_take(e->env.nn, carve, op->dtype, n, esa_max64(3 * inner, 2 * ff));
    if (!carve->base) return;
    const esa_view joined = reuse(&all, 0, n, 3 * inner);
    for (int32_t i = 0; i < 3; i++)
        r->qkv[i] = op->joined ? esa_view_cols(joined, i * inner, inner)
                               : reuse(&all, i * n * inner * element, n, inner);
    r->gate = reuse(&all, 0, n, ff);
    r->linear = reuse(&all, n * ff * element, n, ff);
}

/* What the threads write for the device: rows of words, or rows of biases. */
typedef struct look_up {
    const esa_umt5 *e;
    const umt5_run *r;
    const int32_t *ids;    /* [n] */
    const int32_t *bucket; /* [span] */
    float *room;
    int64_t first; /* the row of room[0] */
} look_up;

static void look_up_words(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const look_up *job = arg;
    const int64_t d = job->e->config.d_model;
    for (int64_t i = first; i < first + count; i++)
        esa_weight_to_f32(job->room + i * d, &job->e->shared, job->ids[job->first + i] * d, d);
}

/* Rows are heads of layers with a table. */
static void look_up_biases(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const look_up *job = arg;
    const int64_t heads = job->r->heads, span = job->r->span;
    for (int64_t i = first; i < first + count; i++) {
        const int64_t row = job->first + i;
        const float *table = (const float *)job->e->layer[row / heads].bias.data + row % heads;
        float *to = job->room + i * span;
        for (int64_t k = 0; k < span; k++) to[k] = table[job->bucket[k] * heads];
    }
}

/* Writes rows of cols floats to the device, as many at a time as the room holds. The room is small,
 * so it stays in the cache; memory for all of it would cost more than the work, page by page. */
static esa_status write_rows(esa_nn *nn, float *to, look_up *job, esa_nn_rows_fn fn, int64_t rows,
                             int64_t cols)
{
    const int64_t most = esa_max64(1, ROOM / cols);
    for (job->first = 0; job->first < rows; job->first += most) {
        const int64_t count = esa_min64(most, rows - job->first);
        esa_nn_parallel(nn, fn, job, count, 4);
        ESA_TRY(esa_nn_upload(nn, to + job->first * cols, job->room, 4 * count * cols));
    }
    return ESA_OK;
}

/* Words and biases, from host memory to the device. */
static esa_status begin(esa_umt5 *e, umt5_run *r, const int32_t *ids)
{
    esa_nn *nn = e->env.nn;
    const int64_t d = e->config.d_model, rows = tables(&e->config) * r->heads,
                  floats = esa_max64(ROOM, esa_max64(d, r->span)), bytes = 4 * (floats + r->span);
    float *room = esa_mem_alloc(&nn->ctx->mem, bytes);
    if (!room) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    int32_t *bucket = (int32_t *)(room + floats);
    for (int64_t k = 0; k < r->span; k++) bucket[k] = esa_umt5_bucket(&e->config, k - (r->n - 1));
    look_up job = { .e = e, .r = r, .ids = ids, .bucket = bucket, .room = room };
    esa_status status = write_rows(nn, r->x.data, &job, look_up_words, r->n, d);
    if (!status) status = write_rows(nn, r->distance, &job, look_up_biases, rows, r->span);
    esa_mem_free(&nn->ctx->mem, room, bytes);
    return status;
}

/* The norm of x with a weight, into y; weight NULL: none. */
static esa_norm_args norm_of(const esa_umt5 *e, const umt5_run *r, const esa_view *y,
                             const esa_weight *weight)
{
    return (esa_norm_args){ .y = *y,
                            .x = r->x,
                            .norm = weight ? ESA_NORM_RMS : ESA_NORM_NONE,
                            .eps = (float)e->config.eps,
                            .weight = weight ? weight->data : NULL };
}

/* From h, the norm of x, to the norm of the new x for the next layer. */
static esa_status run_layer(esa_umt5 *e, umt5_run *r, int32_t number)
{
    esa_nn *nn = e->env.nn;
    const esa_nn_ops *op = nn->ops;
    const umt5_layer *l = &e->layer[number], *next = number + 1 < e->config.layers ? l + 1 : NULL;
    const int64_t table = e->config.shared_bias ? 0 : number;
    const esa_linear *const qkv[3] = { &l->q, &l->k, &l->v };
    ESA_TRY(op->qkv(nn, r->qkv, &r->h, qkv));
    const esa_biased_args attention = { .o = r->o,
                                        .q = r->qkv[0],
                                        .k = r->qkv[1],
                                        .v = r->qkv[2],
                                        .heads = r->heads,
                                        .D = e->config.d_kv,
                                        .scale = 1.0f,
                                        .distance = r->distance + table * r->heads * r->span,
                                        .distance_ld = r->span,
                                        .center = r->n - 1 };
    ESA_TRY(op->biased(nn, &attention));
    const esa_norm_args middle = norm_of(e, r, &r->h, &l->norm2),
                        end = norm_of(e, r, &r->h, next ? &next->norm1 : NULL);
    ESA_TRY(op->linear_add(nn, &middle, &r->o, &l->o, &r->t));
    ESA_TRY(op->linear(nn, &r->gate, &r->h, &l->gate, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->linear, &r->h, &l->linear, ESA_ACT_NONE));
    const esa_act_args gated = {
        .y = r->gate, .x = r->linear, .gate = r->gate, .act = ESA_ACT_GELU_TANH
    };
    ESA_TRY(op->act(nn, &gated));
    return op->linear_add(nn, &end, &r->gate, &l->out, &r->t);
}

static esa_status run_layers(esa_umt5 *e, umt5_run *r)
{
    esa_nn *nn = e->env.nn;
    const esa_norm_args first = norm_of(e, r, &r->h, &e->layer[0].norm1),
                        last = norm_of(e, r, &r->t, &e->norm);
    ESA_TRY(nn->ops->norm(nn, &first));
    for (int32_t i = 0; i < e->config.layers; i++) {
        ESA_TRY(esa_store_begin(e->store, 1 + i));
        ESA_TRY(run_layer(e, r, i));
        ESA_TRY(esa_store_end(e->store, 1 + i));
        ESA_TRY(nn->ops->pace(nn));
        if (e->env.tick && e->env.tick(e->env.tick_user, i + 1, e->config.layers))
            return esa_fail(nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return nn->ops->norm(nn, &last);
}

static esa_status run_in_memory(esa_umt5 *e, umt5_run *r, float *out, const int32_t *ids)
{
    ESA_TRY(begin(e, r, ids));
    ESA_TRY(run_layers(e, r));
    return esa_nn_read(e->env.nn, out, &r->t);
}

esa_status esa_umt5_encode(esa_umt5 *e, float *out, const int32_t *ids, int64_t n)
{
    esa_nn *nn = e->env.nn;
    if (n < 1) return esa_fail(nn->ctx, ESA_ERR_ARGUMENT, "the text encoder got no tokens");
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->config.vocab)
            return esa_fail(nn->ctx, ESA_ERR_ARGUMENT,
                            "token id is %d, expected 0 .. %d for this text encoder", (int)ids[i],
                            (int)e->config.vocab - 1);
    umt5_run r = { .n = n,
                   .inner = (int64_t)e->config.heads * e->config.d_kv,
                   .span = 2 * n - 1,
                   .heads = e->config.heads };
    esa_carve carve = { 0 };
    void *block = NULL;
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
