/* cpu_ops.c - the operations of ops.h in host memory: f32, or bf16 for the inputs of layers and
 * attention (nn->bf16), through the functions of nn.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/ops.h"

#include <math.h>
#include <string.h>
#include "nn/leaf.h"

#define PATCHES 64    /* patches per task */
#define LATENTS 16384 /* elements of latents per task */

/* The rows begin where those of the room begin, as on devices. */
static esa_view as_bf16(const esa_view *room)
{
    esa_view v = *room;
    if (v.dtype == ESA_DTYPE_F32) v.ld *= 2;
    v.dtype = ESA_DTYPE_BF16;
    return v;
}

static esa_view cpu_input(const esa_nn *nn, const esa_view *room, const esa_linear *l)
{
    return esa_nn_product_set(nn, &l->weight)->packed_bytes == 2 ? as_bf16(room) : *room;
}

static esa_view cpu_attended(const esa_nn *nn, const esa_view *room)
{
    return nn->bf16 ? as_bf16(room) : *room;
}

/* ---------------------------------------------------------------- linear layers */

static esa_status product(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_linear *l,
                          const esa_epilogue *e)
{
    return esa_nn_linear(nn, y, x, &l->weight, &l->bias, e);
}

static esa_status cpu_linear(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_linear *l,
                             int32_t act)
{
    const esa_epilogue e = { .act = act };
    return product(nn, y, x, l, act ? &e : NULL);
}

static esa_status cpu_qkv(esa_nn *nn, const esa_view y[3], const esa_view *x,
                          const esa_linear *const l[3])
{
    for (int32_t i = 0; i < 3; i++) ESA_TRY(product(nn, &y[i], x, l[i], NULL));
    return ESA_OK;
}

/* x += gate * linear(in) */
static esa_status add(esa_nn *nn, const esa_view *x, const float *gate, const esa_view *in,
                      const esa_linear *l)
{
    const esa_epilogue e = { .gate = gate, .residual = x->data, .residual_ld = x->ld };
    return product(nn, x, in, l, &e);
}

static esa_status cpu_linear_add(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                                 const esa_linear *l, const esa_view *t)
{
    (void)t;
    ESA_TRY(add(nn, &n->x, n->gate, in, l));
    return esa_nn_norm(nn, n);
}

static esa_status cpu_feed_forward(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                                   const esa_linear *up, const esa_linear *down,
                                   const esa_view *hidden, const esa_view *t)
{
    (void)t;
    const esa_view room = cpu_input(nn, hidden, down);
    for (int64_t r = 0; r < in->rows; r += hidden->rows) {
        const int64_t count = esa_min64(hidden->rows, in->rows - r);
        const esa_view from = esa_view_rows(*in, r, count), h = esa_view_rows(room, 0, count),
                       to = esa_view_rows(n->x, r, count);
        ESA_TRY(cpu_linear(nn, &h, &from, up, ESA_ACT_GELU_TANH));
        ESA_TRY(add(nn, &to, n->gate, &h, down));
    }
    return esa_nn_norm(nn, n);
}

/* ---------------------------------------------------------------- rows */

static esa_status cpu_qk(esa_nn *nn, const esa_qk_args *a)
{
    const esa_view *v[2] = { &a->q, &a->k };
    const float *weight[2] = { a->q_weight, a->k_weight };
    if (a->norm != ESA_QK_ALL || a->halves) return esa_nn_qk_heads(nn, a);
    for (int32_t i = 0; i < 2; i++)
        if (v[i]->data)
            esa_nn_rms_norm(nn, v[i]->data, v[i]->ld, v[i]->data, v[i]->ld, v[i]->rows, v[i]->cols,
                            a->eps, weight[i]);
    for (int32_t i = 0; i < 2; i++)
        if (v[i]->data && a->cos)
            esa_nn_rope(nn, v[i]->data, v[i]->ld, v[i]->rows, v[i]->cols / a->D, a->D, a->cos,
                        a->sin);
    return ESA_OK;
}

typedef struct act_job {
    const esa_nn_leaf *leaf;
    const esa_act_args *a;
    float *room; /* [threads][3][cols]: not all types are F32 */
} act_job;

/* Row i in f32: where it lies, or converted into room. */
static const float *row_of(const act_job *j, const esa_view *v, int64_t i, float *room)
{
    const char *at = (const char *)v->data + i * v->ld * esa_view_element(v->dtype);
    if (v->dtype == ESA_DTYPE_F32) return (const float *)at;
    j->leaf->from_bf16(room, (const uint16_t *)at, v->cols);
    return room;
}

static void act_row(const act_job *j, float *y, const float *x, const float *gate)
{
    const esa_act_args *a = j->a;
    const int64_t n = a->x.cols;
    const float *from = gate ? gate : x;
    if (gate && a->act == ESA_ACT_GELU_TANH) {
        j->leaf->geglu(y, gate, x, n);
        return;
    }
    if (a->act == ESA_ACT_SILU)
        j->leaf->silu(y, from, n);
    else if (a->act == ESA_ACT_GELU_TANH)
        j->leaf->gelu_tanh(y, from, n);
    else if (a->act == ESA_ACT_QUICK_GELU)
        j->leaf->quick_gelu(y, from, n);
    else if (a->act == ESA_ACT_GELU)
        j->leaf->gelu(y, from, n);
    else if (y != from)
        memcpy(y, from, (size_t)n * 4);
    for (int64_t c = 0; gate && c < n; c++) y[c] *= x[c];
}

static void act_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const act_job *j = arg;
    const esa_act_args *a = j->a;
    const int64_t n = a->x.cols;
    float *room = j->room ? j->room + 3 * worker * n : NULL; /* f32 needs none */
    for (int64_t i = first; i < first + count; i++) {
        const float *x = row_of(j, &a->x, i, room),
                    *gate = a->gate.data ? row_of(j, &a->gate, i, room ? room + n : NULL) : NULL;
        const int32_t wide = a->y.dtype == ESA_DTYPE_F32;
        char *to = (char *)a->y.data + i * a->y.ld * esa_view_element(a->y.dtype);
        float *y = wide ? (float *)to : room + 2 * n;
        act_row(j, y, x, gate);
        if (!wide) j->leaf->to_bf16((uint16_t *)to, y, n);
    }
}

static esa_status cpu_act(esa_nn *nn, const esa_act_args *a)
{
    act_job j = { esa_nn_leaf_get(nn->ctx->kern->level), a, NULL };
    void *room;
    const double start = esa_nn_now();
    if (a->x.dtype != ESA_DTYPE_F32 || a->y.dtype != ESA_DTYPE_F32) {
        ESA_TRY(esa_nn_scratch(nn, &room, 12 * a->x.cols * esa_pool_threads(nn->ctx->pool)));
        j.room = room;
    }
    esa_nn_parallel(nn, act_rows, &j, a->x.rows, esa_max64(1, 16384 / a->x.cols));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
    return ESA_OK;
}

static esa_status cpu_biased(esa_nn *nn, const esa_biased_args *a)
{
    const esa_nn_bias bias = { a->key, a->distance, a->distance_ld, a->center };
    if (a->q_weight) {
        const esa_qk_args norm = { .q = a->q, .q_weight = a->q_weight, .D = a->D, .eps = a->eps };
        ESA_TRY(cpu_qk(nn, &norm));
    }
    return esa_nn_attention(nn, a->o.data, a->o.ld, a->q.data, a->q.ld, a->k.data, a->k.ld,
                            a->v.data, a->v.ld, a->q.rows, a->k.rows, a->heads,
                            a->kv_heads ? a->kv_heads : a->heads, a->D, a->scale, &bias);
}

/* ---------------------------------------------------------------- patches and timestep */

static void move_patches(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const esa_patch_args *a = arg;
    const int32_t *p = a->patch, *s = a->size;
    const int64_t gh = s[1] / p[1], gw = s[2] / p[2];
    const int64_t W = s[2], HW = s[1] * W, THW = s[0] * HW;
    const int64_t volume = (int64_t)p[0] * p[1] * p[2];
    for (int64_t i = first; i < first + count; i++) {
        const int64_t n = a->perm ? a->perm[i] : i;
        const int64_t t = n / (gh * gw) * p[0], y = n / gw % gh * p[1], x = n % gw * p[2];
        float *row = (float *)a->rows.data + i * a->rows.ld, *base = a->latent + t * HW + y * W + x;
        for (int64_t c = 0; c < a->channels; c++)
            for (int64_t m = 0; m < volume; m++) {
                float *at = base + c * THW + m / ((int64_t)p[1] * p[2]) * HW + m / p[2] % p[1] * W +
                            m % p[2];
                if (a->gather)
                    row[c * volume + m] = *at;
                else
                    *at = row[a->channel_first ? c * volume + m : m * a->channels + c];
            }
    }
}

static esa_status cpu_patches(esa_nn *nn, const esa_patch_args *args)
{
    esa_patch_args a = *args;
    const double start = esa_nn_now();
    esa_nn_parallel(nn, move_patches, &a, a.rows.rows, PATCHES);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
    return ESA_OK;
}

static esa_status cpu_modulate(esa_nn *nn, float *e, const float *table, const float *add,
                               int64_t rows, int64_t cols)
{
    (void)nn;
    for (int64_t r = 0; r < rows; r++, e += cols, table += cols)
        for (int64_t n = 0; n < cols; n++) e[n] = table[n] + add[n];
    return ESA_OK;
}

/* ---------------------------------------------------------------- latents */

typedef struct guide_job {
    float *v;
    const float *negative;
    float scale;
} guide_job;

static void guide_piece(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const guide_job *j = arg;
    (void)worker;
    for (int64_t i = first; i < first + count; i++)
        j->v[i] = j->negative[i] + j->scale * (j->v[i] - j->negative[i]);
}

static esa_status cpu_guide(esa_nn *nn, float *v, const float *negative, float scale, int64_t count)
{
    guide_job j = { v, negative, scale };
    esa_nn_parallel(nn, guide_piece, &j, count, LATENTS);
    return ESA_OK;
}

static void mix_piece(const esa_step_args *a, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) {
        const float m = a->keep[0] * a->x[i] - a->pull[0] * a->v[i],
                    d = a->order[1] > 1 ? a->rho1 * m - a->rho2 * a->m0[i] : m,
                    x = a->keep[1] * a->x[i] - a->pull[1] * d;
        a->x[i] = a->noise ? x + a->sigma * a->noise[i] : x;
        if (a->m0) a->m0[i] = m;
    }
}

static void unipc_piece(const esa_step_args *a, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) {
        const float m = a->x[i] - a->sigma * a->v[i];
        float x = a->x[i], m1 = 0;
        if (a->correct) {
            const float m0 = a->m0[i],
                        old = a->order[0] > 1 ? a->rho1 * ((a->m1[i] - m0) / a->r[0]) : 0;
            x = (a->keep[0] * a->last[i] - a->pull[0] * m0) -
                a->pull[0] * (old + a->rho2 * (m - m0));
            a->m1[i] = m1 = m0;
        }
        a->m0[i] = m;
        a->last[i] = x;
        const float ahead = a->order[1] > 1 ? 0.5f * ((m1 - m) / a->r[1]) : 0;
        a->x[i] = (a->keep[1] * x - a->pull[1] * m) - a->pull[1] * ahead;
    }
}

static void step_piece(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const esa_step_args *a = arg;
    const int64_t end = first + count;
    (void)worker;
    if (a->kind == ESA_STEP_EULER)
        for (int64_t i = first; i < end; i++) a->x[i] += a->dt * a->v[i];
    else if (a->kind == ESA_STEP_MIX)
        mix_piece(a, first, end);
    else
        unipc_piece(a, first, end);
}

static esa_status cpu_step(esa_nn *nn, const esa_step_args *args)
{
    esa_step_args a = *args;
    esa_nn_parallel(nn, step_piece, &a, a.count, LATENTS);
    return ESA_OK;
}

/* In one thread: the sums do not depend on the number of threads. */
static esa_status cpu_figures(esa_nn *nn, const esa_figures_args *a)
{
    esa_step_figures f = { 0 };
    int64_t wrong = 0;
    (void)nn;
    for (int64_t i = 0; a->x && i < a->count; i++) wrong += !isfinite(a->x[i]);
    for (int64_t i = 0; a->x && a->x_before && i < a->count; i++)
        f.x_change += fabs((double)a->x[i] - (double)a->x_before[i]);
    for (int32_t b = 0; b < 2; b++) {
        for (int64_t i = 0; a->v[b] && i < a->count; i++) f.v_size[b] += fabs((double)a->v[b][i]);
        for (int64_t i = 0; a->v[b] && a->v_before[b] && i < a->count; i++)
            f.v_change[b] += fabs((double)a->v[b][i] - (double)a->v_before[b][i]);
    }
    f.wrong = (double)wrong;
    *a->out = f;
    return ESA_OK;
}

/* ---------------------------------------------------------------- time */

static esa_status cpu_self_begin(esa_nn *nn)
{
    nn->self_began = esa_nn_now();
    return ESA_OK;
}

static esa_status cpu_self_end(esa_nn *nn)
{
    nn->seconds[ESA_NN_SELF] += esa_nn_now() - nn->self_began;
    return ESA_OK;
}

/* The work is done, and its time is counted. */
static esa_status cpu_nothing(esa_nn *nn)
{
    (void)nn;
    return ESA_OK;
}

const esa_nn_ops esa_nn_cpu_ops = {
    .dtype = ESA_DTYPE_F32,
    .joined = 0,
    .converts = 1,
    .prepares = 0,
    .input = cpu_input,
    .attended = cpu_attended,
    .linear = cpu_linear,
    .qkv = cpu_qkv,
    .linear_add = cpu_linear_add,
    .feed_forward = cpu_feed_forward,
    .norm = esa_nn_norm,
    .qk = cpu_qk,
    .act = cpu_act,
    .biased = cpu_biased,
    .patches = cpu_patches,
    .modulate = cpu_modulate,
    .guide = cpu_guide,
    .step = cpu_step,
    .figures = cpu_figures,
    .planes = &esa_nn_cpu_planes,
    .self_begin = cpu_self_begin,
    .self_end = cpu_self_end,
    .pace = cpu_nothing,
    .turn = cpu_nothing,
    .settle = cpu_nothing,
};
