/* umt5.c - see umt5.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/umt5.h"

#include <math.h>
#include "model/text/text.h"
#include "nn/ops.h"

#define ROOM (INT64_C(1) << 18) /* floats that go to the device at a time */

typedef struct umt5_layer {
    esa_linear q, k, v, o, gate, linear, out; /* without biases */
    esa_weight norm1, norm2;
    esa_weight bias; /* [buckets][heads], in host memory */
} umt5_layer;

typedef struct esa_umt5 {
    esa_part part;
    esa_umt5_config config;
    esa_weight shared; /* [vocab][d_model], in host memory */
    esa_weight norm;
    umt5_layer *layer;
} esa_umt5;

/* ---------------------------------------------------------------- tensors */

enum { TABLE = 1 }; /* the layer has a table of biases */

/* Only a few rows of the vocabulary are needed, and the biases by distance are looked up by the
 * host. */
static const esa_row ends[] = {
    { ESA_ROW_TENSOR, offsetof(esa_umt5, shared), "shared.weight", "v,d", ESA_WANT_HOST, 0 },
    { ESA_ROW_TENSOR, offsetof(esa_umt5, norm), "encoder.final_layer_norm.weight", "d",
      ESA_WANT_F32, 0 },
};
#define AT(field) offsetof(umt5_layer, field)
/* In group 0, because the norm at the end of a layer is that of the next. */
static const esa_row vectors[] = {
    { ESA_ROW_TENSOR, AT(bias), "0.SelfAttention.relative_attention_bias.weight", "b,h",
      ESA_WANT_F32 | ESA_WANT_HOST, TABLE },
    { ESA_ROW_TENSOR, AT(norm1), "0.layer_norm.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(norm2), "1.layer_norm.weight", "d", ESA_WANT_F32, 0 },
};
static const esa_row products[] = {
    { ESA_ROW_QKV, AT(q), "0.SelfAttention.*", "i,d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_MATRIX, AT(o), "0.SelfAttention.o", "d,i", 0, 0 },
    { ESA_ROW_MATRIX, AT(gate), "1.DenseReluDense.wi_0", "f,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(linear), "1.DenseReluDense.wi_1", "f,d", 0, 0 },
    { ESA_ROW_MATRIX, AT(out), "1.DenseReluDense.wo", "d,f", 0, 0 },
};

/* Layers that have a table of biases. */
static int32_t tables(const esa_umt5_config *c) { return c->shared_bias ? 1 : c->layers; }

static esa_status open_file(esa_umt5 *e)
{
    const esa_umt5_config *c = &e->config;
    esa_sizes sizes = { .letter = { ['v'] = c->vocab,
                                    ['d'] = c->d_model,
                                    ['i'] = (int64_t)c->heads * c->d_kv,
                                    ['f'] = c->ff,
                                    ['b'] = c->buckets,
                                    ['h'] = c->heads } };
    ESA_TRY(esa_part_array(&e->part, (void **)&e->layer, c->layers, sizeof *e->layer));
    ESA_TRY(esa_part_open(&e->part, "text_encoder", "model", "text encoder"));
    esa_weights *w = e->part.weights;
    esa_rows_want(w, ESA_ROWS(ends), e, &sizes, "%s", "");
    for (int32_t i = 0; i < c->layers; i++) {
        sizes.have = i < tables(c) ? TABLE : 0;
        esa_rows_want(w, ESA_ROWS(vectors), &e->layer[i], &sizes, "encoder.block.%d.layer.", i);
    }
    for (int32_t i = 0; i < c->layers; i++) {
        esa_weights_group(w, 1 + i);
        esa_rows_want(w, ESA_ROWS(products), &e->layer[i], &sizes, "encoder.block.%d.layer.", i);
    }
    /* some files have the embedding under both of its names */
    esa_weights_ignore(w, "encoder.embed_tokens.");
    return esa_part_compare(&e->part);
}

esa_status esa_umt5_make(const esa_part_env *env, esa_part **out, const esa_umt5_config *config)
{
    *out = NULL;
    esa_umt5 *e = esa_part_new(env, (int64_t)sizeof *e, "the text encoder");
    if (!e) return ESA_ERR_MEMORY;
    e->config = *config;
    const esa_status status = open_file(e);
    if (status)
        esa_part_free(&e->part);
    else
        *out = &e->part;
    return status;
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
    esa_umt5 *e;
    float *out;         /* [n][d] in host memory */
    const int32_t *ids; /* [n] */
} umt5_run;

/* The same memory as another matrix, from byte `at` on. */
static esa_view reuse(const esa_view *v, int64_t at, int64_t rows, int64_t cols)
{
    return esa_view_of((char *)v->data + at, v->dtype, v->device, rows, cols);
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(void *user, esa_carve *carve)
{
    umt5_run *r = user;
    const esa_umt5_config *c = &r->e->config;
    esa_nn *nn = r->e->part.env.nn;
    const esa_nn_ops *op = nn->ops;
    const int64_t n = r->n, d = c->d_model, inner = r->inner, ff = c->ff,
                  element = esa_view_element(op->dtype);
    r->x = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, d);
    r->t = esa_nn_take(nn, carve, ESA_DTYPE_F32, n, d);
    r->h = esa_nn_take(nn, carve, op->dtype, n, esa_max64(d, inner));
    r->o = esa_view_of(r->h.data, r->h.dtype, r->h.device, n, inner);
    r->h.cols = r->h.ld = d;
    r->distance = esa_carve_take(carve, 4 * tables(c) * r->heads * r->span);
    /* Attention is done when the feed-forward begins, so they share memory. */
    const esa_view all = esa_nn_take(nn, carve, op->dtype, n, esa_max64(3 * inner, 2 * ff));
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
static esa_status begin(const umt5_run *r)
{
    const esa_umt5 *e = r->e;
    esa_nn *nn = e->part.env.nn;
    const int64_t d = e->config.d_model, rows = tables(&e->config) * r->heads,
                  floats = esa_max64(ROOM, esa_max64(d, r->span)), bytes = 4 * (floats + r->span);
    float *room = esa_mem_alloc(&nn->ctx->mem, bytes);
    if (!room) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    int32_t *bucket = (int32_t *)(room + floats);
    for (int64_t k = 0; k < r->span; k++) bucket[k] = esa_umt5_bucket(&e->config, k - (r->n - 1));
    look_up job = { .e = e, .r = r, .ids = r->ids, .bucket = bucket, .room = room };
    esa_status status = write_rows(nn, r->x.data, &job, look_up_words, r->n, d);
    if (!status) status = write_rows(nn, r->distance, &job, look_up_biases, rows, r->span);
    esa_mem_free(&nn->ctx->mem, room, bytes);
    return status;
}

/* The norm of x with a weight, into y; weight NULL: none. */
static esa_norm_args norm_of(const umt5_run *r, const esa_view *y, const esa_weight *weight)
{
    return (esa_norm_args){ .y = *y,
                            .x = r->x,
                            .norm = weight ? ESA_NORM_RMS : ESA_NORM_NONE,
                            .eps = (float)r->e->config.eps,
                            .weight = weight ? weight->data : NULL };
}

/* From h, the norm of x, to the norm of the new x for the next layer. */
static esa_status run_layer(void *user, int32_t number)
{
    const umt5_run *r = user;
    const esa_umt5 *e = r->e;
    esa_nn *nn = e->part.env.nn;
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
    const esa_norm_args middle = norm_of(r, &r->h, &l->norm2),
                        end = norm_of(r, &r->h, next ? &next->norm1 : NULL);
    ESA_TRY(op->linear_add(nn, &middle, &r->o, &l->o, &r->t));
    ESA_TRY(op->linear(nn, &r->gate, &r->h, &l->gate, ESA_ACT_NONE));
    ESA_TRY(op->linear(nn, &r->linear, &r->h, &l->linear, ESA_ACT_NONE));
    const esa_act_args gated = {
        .y = r->gate, .x = r->linear, .gate = r->gate, .act = ESA_ACT_GELU_TANH
    };
    ESA_TRY(op->act(nn, &gated));
    return op->linear_add(nn, &end, &r->gate, &l->out, &r->t);
}

static esa_status run(void *user)
{
    umt5_run *r = user;
    esa_umt5 *e = r->e;
    esa_nn *nn = e->part.env.nn;
    ESA_TRY(begin(r));
    const esa_norm_args first = norm_of(r, &r->h, &e->layer[0].norm1),
                        last = norm_of(r, &r->t, &e->norm);
    ESA_TRY(nn->ops->norm(nn, &first));
    ESA_TRY(esa_part_blocks(&e->part, e->config.layers, run_layer, r));
    ESA_TRY(nn->ops->norm(nn, &last));
    return esa_nn_read(nn, r->out, &r->t);
}

esa_status esa_umt5_encode(esa_part *encoder, float *out, const int32_t *ids, int64_t n)
{
    static const esa_part_work work = { place, run, "the states of the text encoder" };
    esa_umt5 *e = (esa_umt5 *)encoder;
    const esa_umt5_config *c = &e->config;
    ESA_TRY(esa_text_check_ids(encoder->env.nn->ctx, ids, n, c->vocab));
    umt5_run r = { .n = n,
                   .inner = (int64_t)c->heads * c->d_kv,
                   .span = 2 * n - 1,
                   .heads = c->heads,
                   .e = e,
                   .out = out,
                   .ids = ids };
    return esa_part_run(encoder, &work, &r);
}
