/* session_carry.h - the differences that a session carries: their memory, and who made them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A difference belongs to the mask of its (branch, layer), so it is a part of the rest that keeps
 * the mask (session_rest.h). All differences of a branch get their memory at once, at the first
 * call of the branch that carries. */
#ifndef ESA_SESSION_SESSION_CARRY_H
#define ESA_SESSION_SESSION_CARRY_H

#include "backend/backend.h"
#include "esa/esa_session.h"

/* The difference of one (branch, layer). */
typedef struct esa_session_diff {
    void *memory; /* on the device; NULL: none */
    void *host;   /* page-locked, in place of memory; NULL: none */
    int64_t bytes;
    esa_shapes shapes; /* of the calls it has room for */
    int32_t made;      /* 1: holds the difference of the mask in its rest */
} esa_session_diff;

/* Differences of a session. */
typedef struct esa_session_carry {
    int32_t *anchors, anchor_count; /* 0: the session does not carry */
    const esa_backend *backend;     /* owns the memory; NULL: there is none yet */
    int64_t bytes, host_bytes;      /* what all differences hold */
} esa_session_carry;

/* Bytes of one difference of calls with these shapes. */
int64_t esa_session_diff_bytes(const esa_session_params *params, const esa_shapes *shapes);
/* 1 if a mask that was made at step `at` (-1: none) must be made anew at a step. */
int32_t esa_session_anchor_due(const esa_session *s, int32_t step, int32_t at);
/* Copies or places the anchors. */
esa_status esa_session_carry_make(esa_session *s, const esa_session_params *p);
/* Makes sure that the difference of this layer and the current branch has memory for calls of this
 * plan. If it has none yet, all layers of the branch get theirs, and branches that run no more lose
 * theirs. Without room a strict session fails; in others the differences that found none have
 * neither memory nor host. */
esa_status esa_session_carry_reserve(esa_session *s, int32_t layer, const esa_plan *plan);
/* The view of a difference that has memory. */
esa_carry esa_session_diff_view(const esa_session *s, const esa_session_diff *diff);
/* Frees all memory. */
void esa_session_carry_free(esa_session *s);

#endif
