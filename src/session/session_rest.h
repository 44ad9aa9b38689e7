/* session_rest.h - masks at rest: bits that a session keeps on the device between calls.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two kinds. The bits of a mask file, brought to the device layer by layer as they are needed. And,
 * with refresh_every > 1, the mask of each layer and branch between the steps that make it. */
#ifndef ESA_SESSION_SESSION_REST_H
#define ESA_SESSION_SESSION_REST_H

#include "attn/attn.h"
#include "maskfile/mask_file.h"

/* A mask kept between refreshes, per (branch, layer). */
typedef struct esa_session_rest {
    const esa_backend *backend; /* whose memory bits and facts lie in */
    uint8_t *bits;              /* [B][H][nq][ceil(nk/8)], NULL: none */
    int64_t *facts;             /* [2] behind the bits: blocks that exist, blocks kept */
    int64_t bytes;              /* bits and facts together */
    int32_t made;               /* 1: bits hold a mask of this video */
    esa_shapes shapes;          /* the mask's; a mask of another shape is not reused */
    /* key lengths the mask was made for: a copy [B] where the host can read them, otherwise only
     * their address; NULL: all keys */
    int32_t *kv_len;
    const int32_t *kv_address;
    int64_t kv_bytes;
    int32_t sparse_steps; /* seen since begin */
    int32_t last_step;    /* the last of them, -1: none */
    double mass;
} esa_session_rest;

/* Bits of a mask file on the device. */
typedef struct esa_session_chunks {
    esa_ctx *ctx;
    const esa_backend *backend; /* NULL: nothing was uploaded yet */
    uint8_t **chunk; /* all groups of one stored layer and branch; NULL: not needed yet */
    int64_t chunks, chunk_bytes;
    int64_t bytes; /* held on the device, masks between refreshes included */
} esa_session_chunks;

/* *bits = a cell of a mask file in the memory of backend, uploaded when first needed. */
esa_status esa_session_chunks_cell(esa_session_chunks *c, const esa_backend *backend,
                                   const uint8_t **bits, const esa_mask_file *file,
                                   const esa_budget_masks *masks, int64_t cell);
void esa_session_chunks_free(esa_session_chunks *c);

/* 1 if the rest holds a mask for this plan, so that it need not be made again. */
int32_t esa_session_rest_fits(const esa_session_rest *rest, const esa_plan *plan);
/* Stores the mask that was just made for the plan. On failure the rest holds no mask. */
esa_status esa_session_rest_store(esa_session_chunks *c, esa_session_rest *rest,
                                  const esa_plan *plan, const esa_mask *mask);
void esa_session_rest_free(esa_session_chunks *c, esa_session_rest *rest);

#endif
