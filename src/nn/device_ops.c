/* device_ops.c - the operations of ops.h on a device whose backend has the groups of
 * backend/engine.h: BF16 activations, one product for q, k and v, times by marks.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/marks.h"
#include "nn/ops.h"

static esa_view device_input(const esa_nn *nn, const esa_view *room, const esa_linear *l)
{
    (void)nn;
    esa_view v = *room;
    if (l->weight.dtype != ESA_DTYPE_F8) {
        v.scale = NULL;
        return v;
    }
    v.ld *= esa_view_element(room->dtype);
    v.dtype = ESA_DTYPE_F8;
    return v;
}

static esa_view device_attended(const esa_nn *nn, const esa_view *room)
{
    (void)nn;
    return *room;
}

/* ---------------------------------------------------------------- linear layers */

/* Completes the arguments with the weights of l, and runs or prepares the product. count: the
 * number of layers with weights that follow one another. */
static esa_status run_product(esa_nn *nn, esa_product_args *a, const esa_linear *l, int64_t count)
{
    const esa_weight *w = &l->weight;
    const int64_t out = w->dim[0];
    a->bias = l->bias.data;
    a->fast = nn->fast;
    a->w = esa_view_of((void *)(uintptr_t)w->data, w->dtype, nn->be->device, count * out,
                       esa_weight_count(w) / out);
    a->w.scale = (float *)(uintptr_t)w->scale;
    if (nn->preparing) return nn->be->products->prepare(nn->ctx, a);
    ESA_TRY(esa_nn_mark(nn, ESA_NN_GEMM));
    return nn->be->products->product(nn->ctx, a, NULL);
}

static esa_status product(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_linear *l,
                          int32_t act, int64_t count)
{
    esa_product_args a = { .y = *y, .x = *x, .act = act };
    return run_product(nn, &a, l, count);
}

static esa_status device_linear(esa_nn *nn, const esa_view *y, const esa_view *x,
                                const esa_linear *l, int32_t act)
{
    return product(nn, y, x, l, act, 1);
}

/* 1 if b begins where a ends. An absent one follows an absent one. */
static int32_t follows(const esa_weight *b, const esa_weight *a)
{
    const int64_t bytes = esa_weight_count(a) * esa_view_element(a->dtype);
    if (!a->data || !b->data) return !a->data && !b->data;
    return a->dtype == b->dtype && (const char *)a->data + bytes == (const char *)b->data &&
           (!a->scale || a->scale + a->dim[0] == b->scale);
}

static esa_status device_qkv(esa_nn *nn, const esa_view y[3], const esa_view *x,
                             const esa_linear *const l[3])
{
    const int64_t out = l[0]->weight.dim[0];
    int32_t joined = 1;
    for (int32_t i = 1; i < 3; i++)
        joined &= follows(&l[i]->weight, &l[i - 1]->weight) &&
                  follows(&l[i]->bias, &l[i - 1]->bias) &&
                  (char *)y[i].data == (char *)y[0].data + i * out * esa_view_element(y[0].dtype);
    if (joined) {
        esa_view all = y[0];
        all.cols = 3 * out;
        return product(nn, &all, x, l[0], ESA_ACT_NONE, 3);
    }
    for (int32_t i = 0; i < 3; i++) ESA_TRY(product(nn, &y[i], x, l[i], ESA_ACT_NONE, 1));
    return ESA_OK;
}

static esa_status device_norm(esa_nn *nn, const esa_norm_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->rows->norm(nn->ctx, args);
}

static esa_status device_act(esa_nn *nn, const esa_act_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->rows->act(nn->ctx, args);
}

/* x += gate * t, then the norm. */
static esa_status add_norm(esa_nn *nn, const esa_norm_args *n, const esa_view *t)
{
    esa_norm_args a = *n;
    a.add = *t;
    return device_norm(nn, &a);
}

static esa_status device_linear_add(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                                    const esa_linear *l, const esa_view *t)
{
    /* Without a gate the product adds to x itself. Not in F8: there a sum costs more than the pass
     * over t that it saves. */
    if (!n->gate && in->rows > 1 && l->weight.dtype != ESA_DTYPE_F8) {
        esa_product_args a = { .y = n->x, .x = *in, .add = 1 };
        ESA_TRY(run_product(nn, &a, l, 1));
        return n->norm == ESA_NORM_NONE ? ESA_OK : device_norm(nn, n);
    }
    ESA_TRY(product(nn, t, in, l, ESA_ACT_NONE, 1));
    return add_norm(nn, n, t);
}

static esa_status device_feed_forward(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                                      const esa_linear *up, const esa_linear *down,
                                      const esa_view *hidden, const esa_view *t)
{
    /* If down takes another type, GELU is part of the conversion. */
    const int32_t converts = device_input(nn, hidden, down).dtype != hidden->dtype;
    for (int64_t r = 0; r < in->rows; r += hidden->rows) {
        const int64_t count = esa_min64(hidden->rows, in->rows - r);
        const esa_view from = esa_view_rows(*in, r, count), to = esa_view_rows(*t, r, count);
        esa_view h = esa_view_rows(*hidden, 0, count);
        const esa_view h_in = device_input(nn, &h, down);
        h.scale = NULL;
        ESA_TRY(product(nn, &h, &from, up, converts ? ESA_ACT_NONE : ESA_ACT_GELU_TANH, 1));
        if (converts) {
            const esa_act_args gelu = { .y = h_in, .x = h, .act = ESA_ACT_GELU_TANH };
            ESA_TRY(device_act(nn, &gelu));
        }
        ESA_TRY(product(nn, &to, &h_in, down, ESA_ACT_NONE, 1));
    }
    return add_norm(nn, n, t);
}

/* ---------------------------------------------------------------- the rest */

static esa_status device_qk(esa_nn *nn, const esa_qk_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->rows->qk(nn->ctx, args);
}

static esa_status device_biased(esa_nn *nn, const esa_biased_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_ATTENTION));
    return nn->be->biased->attention(nn->ctx, args);
}

static esa_status device_patches(esa_nn *nn, const esa_patch_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->latents->patches(nn->ctx, args);
}

static esa_status device_modulate(esa_nn *nn, float *e, const float *table, const float *add,
                                  int64_t rows, int64_t cols)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->latents->modulate(nn->ctx, e, table, add, rows, cols);
}

static esa_status device_guide(esa_nn *nn, float *v, const float *negative, float scale,
                               int64_t count)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->latents->guide(nn->ctx, v, negative, scale, count);
}

static esa_status device_step(esa_nn *nn, const esa_step_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->latents->step(nn->ctx, args);
}

static esa_status device_figures(esa_nn *nn, const esa_figures_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->latents->figures(nn->ctx, args);
}

static esa_status device_self_begin(esa_nn *nn) { return esa_nn_mark(nn, ESA_NN_SELF); }

static esa_status device_self_end(esa_nn *nn) { return esa_nn_mark(nn, ESA_NN_OTHER); }

const esa_nn_ops esa_nn_device_ops = {
    .dtype = ESA_DTYPE_BF16,
    .joined = 1,
    .prepares = 1,
    .input = device_input,
    .attended = device_attended,
    .linear = device_linear,
    .qkv = device_qkv,
    .linear_add = device_linear_add,
    .feed_forward = device_feed_forward,
    .norm = device_norm,
    .qk = device_qk,
    .act = device_act,
    .biased = device_biased,
    .patches = device_patches,
    .modulate = device_modulate,
    .guide = device_guide,
    .step = device_step,
    .figures = device_figures,
    .planes = &esa_nn_device_planes,
    .self_begin = device_self_begin,
    .self_end = device_self_end,
    .pace = esa_nn_marks_pace,
    .turn = esa_nn_marks_turn,
    .settle = esa_nn_marks_settle,
};
