/* session_kept.h - mask bits that a session keeps on the device between calls.
 * SPDX-License-Identifier: Apache-2.0
 *
 * There are two kinds:
 *  - chunks: the bits of a mask file, uploaded layer by layer when they are first needed;
 *  - kept masks: the latest mask and order of each layer and branch, if they are used again. */
#ifndef ESA_SESSION_SESSION_KEPT_H
#define ESA_SESSION_SESSION_KEPT_H

#include "attn/attn.h"
#include "maskfile/mask_file.h"
#include "session/session_carry.h"

/* The mask and the adaptive order of one (branch, layer), kept until the next refresh, and the
 * difference that belongs to them. One allocation holds bits, fine, facts and orders. A CACHED
 * session that carries keeps no bits here, but the number of the stored mask. */
typedef struct esa_session_kept {
    const esa_backend *backend; /* owns the memory */
    uint8_t *bits;              /* [B][H][nq][ceil(nk/8)]; NULL: nothing is kept yet */
    uint8_t *fine;              /* the same for the fine level; NULL: the masks have none */
    int64_t *facts;             /* [ESA_FACTS] */
    int32_t *perm_q, *perm_k;   /* adaptive: as in esa_mask; else NULL */
    int64_t bytes;
    int32_t made;      /* 1: bits holds a mask of this video */
    int32_t ordered;   /* 1: perm_q and perm_k hold orders of this video */
    esa_shapes shapes; /* shapes the mask was made for; other shapes need a new mask */
    /* key lengths the mask was made for: a copy [B] where the host can read them, otherwise only
     * their address; NULL: all keys */
    int32_t *kv_len;
    const int32_t *kv_address;
    int64_t kv_bytes;
    int32_t sparse_steps; /* sparse steps since esa_session_begin */
    int32_t last_step;    /* the last of these steps; -1: none */
    int32_t own_step;     /* the last step that used this mask and no other branch's; -1: none */
    int32_t mask_at, order_at; /* turns at which mask and order were made */
    int32_t made_step;         /* carry: the step at which the mask was made */
    int64_t cell;              /* CACHED: number of the stored mask */
    esa_session_diff diff;
    double mass;  /* kept mass of the mask; NaN: unknown */
    double asked; /* budget of the mask */
} esa_session_kept;

/* Bits of a mask file on the device. */
typedef struct esa_session_chunks {
    esa_ctx *ctx;
    const esa_backend *backend; /* NULL: nothing is uploaded yet */
    /* [chunks], each with all groups of one stored layer and branch, first their bits, then their
     * bits of the fine level, if there is one; NULL: not needed yet */
    uint8_t **chunk;
    int64_t chunks, chunk_bytes;
    int64_t bytes; /* device memory of chunks and kept masks together */
} esa_session_chunks;

/* *bits = the bits of a cell in the memory of backend, uploaded if needed, and *fine = those of its
 * fine level, or NULL. They belong to c or, with host_memory, to the file. */
esa_status esa_session_chunks_cell(esa_session_chunks *c, const esa_backend *backend,
                                   const uint8_t **bits, const uint8_t **fine,
                                   const esa_mask_file *file, const esa_budget_masks *masks,
                                   int64_t cell);
void esa_session_chunks_free(esa_session_chunks *c);

/* 1 if the kept mask was made for the shapes and key lengths of this plan. */
int32_t esa_session_kept_fits(const esa_session_kept *kept, const esa_plan *plan);
/* Stores the bits and the order of mask, which was made for the plan. On failure kept holds
 * neither. */
esa_status esa_session_kept_store(esa_session_chunks *c, esa_session_kept *kept,
                                  const esa_plan *plan, const esa_mask *mask);
/* Notes that a mask was made for the plan, without storing it. */
esa_status esa_session_kept_note(esa_session_chunks *c, esa_session_kept *kept,
                                 const esa_plan *plan);
/* Writes the kept order into mask; then the mask of that order. */
esa_status esa_session_kept_order(esa_session_chunks *c, const esa_session_kept *kept,
                                  esa_mask *mask);
esa_status esa_session_kept_mask(esa_session_chunks *c, const esa_session_kept *kept,
                                 esa_mask *mask);
/* Forgets the mask and order of the last video; keeps the memory. */
void esa_session_kept_forget(esa_session_kept *kept);
void esa_session_kept_free(esa_session_chunks *c, esa_session_kept *kept);

#endif
