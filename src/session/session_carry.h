/* session_carry.h - the differences that a session carries: their memory, and who made them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A difference belongs to the mask of its (branch, layer), so it is a part of the kept mask
 * (session_kept.h). All differences of a branch get their memory at once, at the first call of the
 * branch that carries.
 *
 * Those that do not fit on the device live in page-locked host memory. They pass through a few
 * lanes: pieces of device memory that are filled and emptied beside the work (backend/engine.h). A
 * difference is in one lane at most. */
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
    int32_t made;      /* 1: holds the difference of its kept mask */
} esa_session_diff;

typedef struct esa_session_lane {
    void *memory; /* NULL: nothing is streamed */
    int64_t bytes;
    esa_session_diff *diff; /* whose difference it holds or waits for; NULL: nobody's */
    int64_t used;           /* tick of its last use */
} esa_session_lane;

/* Differences of a session. */
typedef struct esa_session_carry {
    int32_t *anchors, anchor_count; /* 0: the session does not carry */
    const esa_backend *backend;     /* owns the memory; NULL: there is none yet */
    int64_t bytes, host_bytes;      /* what differences and lanes hold on the device, and pinned */
    esa_session_lane lane[ESA_CARRY_LANES];
    int64_t tick;
    int32_t checked; /* 1: a first difference was checked (session_check.c) */
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
/* The view of a difference in its memory on the device. */
esa_carry esa_session_diff_view(const esa_session *s, const esa_session_diff *diff);
/* Before and after the call that makes a difference (make 1) or adds it. *view is the difference in
 * device memory, valid for work that is enqueued between the two. next: the difference that the
 * session will add next, whose copy then begins; NULL: none. */
esa_status esa_session_diff_begin(esa_session *s, esa_session_diff *diff, int32_t make,
                                  esa_carry *view);
esa_status esa_session_diff_end(esa_session *s, esa_session_diff *diff, int32_t make,
                                esa_session_diff *next);
/* Frees all memory; or that of differences which are not streamed. */
void esa_session_carry_free(esa_session *s);
void esa_session_carry_trim(esa_session *s);

/* ---------------------------------------------------------------- between the files here */

/* Device memory for differences; ESA_ERR_MEMORY if carry_room or the device refuse. */
esa_status esa_session_carry_take(esa_session *s, void **memory, int64_t bytes);
void esa_session_carry_give(esa_session *s, void *memory, int64_t bytes);
/* (session_lanes.c) Gives a difference host memory, and makes lanes for such sizes: out of the
 * memory of resident differences of this branch where the device has no more. ESA_ERR_MEMORY if
 * there is no room. */
esa_status esa_session_stream(esa_session *s, esa_session_diff *diff, int64_t bytes);
/* Waits until no lane uses the host memory of this difference, and forgets it there. */
void esa_session_lanes_leave(esa_session *s, const esa_session_diff *diff);
void esa_session_lanes_free(esa_session *s);

#endif
