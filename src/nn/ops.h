/* ops.h - the operations of networks for every device: one table of functions, filled by cpu_ops.c
 * (host memory) and device_ops.c (devices whose backend has the groups of backend/engine.h).
 * SPDX-License-Identifier: Apache-2.0
 *
 * A model describes itself once, over views (base/view.h) that are on the device of nn, and calls
 * nn->ops. An operation covers what some device does in one pass; a device that cannot do this
 * takes several. Arguments are those of base/nn_args.h.
 *
 * Operations on a device only enqueue work and allocate nothing, unless a comment says otherwise.
 * They fail for lack of memory or because the device failed. */
#ifndef ESA_NN_OPS_H
#define ESA_NN_OPS_H

#include "nn/nn.h"
#include "nn/planes.h"

struct esa_nn_ops {
    int32_t dtype; /* of activations: ESA_DTYPE_F32 or BF16 */
    /* 1: q, k and v are columns of one matrix, and a product does not write where another operation
     * reads. 0: a layer's output may take the place of an input that is no longer needed. */
    int32_t joined;
    /* 1: layers also take inputs of the type dtype, which they convert while they read. */
    int32_t converts;

    /* 1: while nn->preparing is 1, products are measured instead of computed, which makes later
     * ones of the same sizes faster. The contents of their inputs and outputs are lost. They may
     * allocate and wait then. */
    int32_t prepares;

    /* The view of `room` as input of a layer: in the type that the layer's weights are multiplied
     * with, and with rows at the same places. room->scale is memory for the scales of rows, which
     * only F8 uses. */
    esa_view (*input)(const esa_nn *nn, const esa_view *room, const esa_linear *l);
    /* The same for q, k, v and the output of attention through a session. */
    esa_view (*attended)(const esa_nn *nn, const esa_view *room);
    /* y = act(x W^T + b). x has the type that `input` gives, or dtype if converts is 1. */
    esa_status (*linear)(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_linear *l,
                         int32_t act);
    /* Three layers with one input. Their weights and their biases follow one another in memory if
     * joined is 1 (ESA_WANT_JOIN). */
    esa_status (*qkv)(esa_nn *nn, const esa_view y[3], const esa_view *x,
                      const esa_linear *const l[3]);
    /* n->x += n->gate * linear(in), then n->y = norm(n->x) as n says; n->add is not used. t: room
     * for the product; not used if joined is 0. A device computes the sum in another way if there
     * is no gate, so a call that prepares must have a gate where the forward has one. */
    esa_status (*linear_add)(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                             const esa_linear *l, const esa_view *t);
    /* The same for down(gelu(up(in))), in pieces of hidden->rows rows. hidden is a room as for
     * `input`. */
    esa_status (*feed_forward)(esa_nn *nn, const esa_norm_args *n, const esa_view *in,
                               const esa_linear *up, const esa_linear *down, const esa_view *hidden,
                               const esa_view *t);

    esa_status (*norm)(esa_nn *nn, const esa_norm_args *args); /* add is absent */
    esa_status (*qk)(esa_nn *nn, const esa_qk_args *args);
    esa_status (*act)(esa_nn *nn, const esa_act_args *args);
    esa_status (*biased)(esa_nn *nn, const esa_biased_args *args);
    esa_status (*patches)(esa_nn *nn, const esa_patch_args *args);
    /* e[rows][cols] = table[rows][cols] + add[cols] */
    esa_status (*modulate)(esa_nn *nn, float *e, const float *table, const float *add, int64_t rows,
                           int64_t cols);

    /* Latents, f32. v = negative + scale (v - negative); a step of a scheduler; sums over a step.
     * guide and step give the same bits on every device; the sums run in the order of the device.
     */
    esa_status (*guide)(esa_nn *nn, float *v, const float *negative, float scale, int64_t count);
    esa_status (*step)(esa_nn *nn, const esa_step_args *args);
    esa_status (*figures)(esa_nn *nn, const esa_figures_args *args);

    const esa_nn_planes *planes;

    /* Put around attention through a session: its time counts as ESA_NN_SELF. */
    esa_status (*self_begin)(esa_nn *nn);
    esa_status (*self_end)(esa_nn *nn);
    /* Called after each block: lets the host be only a few blocks ahead of the device, so that a
     * call can be cancelled within that time. */
    esa_status (*pace)(esa_nn *nn);
    /* Called where the host has waited for the device: the times of the work so far are added to
     * nn->seconds a little later, when the device has work again. */
    esa_status (*turn)(esa_nn *nn);
    /* Adds the time of the work so far to nn->seconds; waits for that work. */
    esa_status (*settle)(esa_nn *nn);
};

extern const esa_nn_ops esa_nn_cpu_ops, esa_nn_device_ops;

#endif
