/* dit_parts.h - what the transformers of all families share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_DIT_PARTS_H
#define ESA_MODEL_DIT_PARTS_H

#include "model/family.h"
#include "nn/ops.h"

/* Fails with ESA_ERR_ARGUMENT for latents (t, h, w) that the patches do not divide, and for too
 * many of them. *tokens: the number of patches, at most 2^26, so that sizes computed from it fit in
 * 64 bits. */
esa_status esa_dit_check_size(esa_ctx *ctx, const int32_t latent[3], const int32_t patch[3],
                              int64_t *tokens);

/* Makes the weights leave room for `during` bytes of activations and text, and for all that comes
 * beside and after them. given: what the caller needs; NULL: it is estimated from `elements`, the
 * size of one activation; adaptive: 1 if the calls of attention order the tokens. */
esa_status esa_dit_leave_room(esa_nn *nn, esa_store *store, const esa_dit_room *given,
                              int64_t during, int64_t elements, int32_t adaptive);

/* *in = x as input of the layer l: x itself, or a copy in room if the layer takes another type. */
esa_status esa_dit_input(esa_nn *nn, esa_view *in, const esa_view *x, const esa_view *room,
                         const esa_linear *l);

/* Self-attention of one layer. qkv [3] and o: [rows][heads * head_dim]. q, k and v are lost. *o,
 * the room for the output, becomes its view, which may have another type. */
esa_status esa_dit_attend(esa_nn *nn, esa_session *session, int32_t layer, const esa_view qkv[3],
                          esa_view *o, int32_t heads);

#endif
