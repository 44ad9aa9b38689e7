/* session.h - what a session holds. Policy is in session.c, one attention call in session_call.c,
 * figures in session_stats.c, recordings in recorder.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SESSION_SESSION_INTERNAL_H
#define ESA_SESSION_SESSION_INTERNAL_H

#include "attn/attn.h"
#include "maskfile/mask_file.h"
#include "maskfile/recording.h"
#include "session/session_gpu.h"

#define ESA_SESSION_PLANS 8 /* shapes kept ready; the least recently used one makes room */

/* What one call does. */
enum {
    ESA_ACTION_DENSE,
    ESA_ACTION_RECORD,
    ESA_ACTION_ONLINE,
    ESA_ACTION_CACHED,
    ESA_ACTION_FALLBACK
};

/* A plan for one shape. Dense calls and cross-attention have plans without a selector. */
typedef struct esa_session_plan {
    esa_plan *plan; /* NULL: free place */
    esa_mask *mask; /* ONLINE: [B,...]; CACHED: [1,...]; NULL for dense plans */
    /* f32[B][H][nq][nk]: RECORD, and ONLINE with the entropy selector (for the kept mass); else
     * NULL */
    float *importance;
    int64_t importance_bytes;
    int32_t kind; /* ESA_CALL_*: cross-attention is never causal and has no tail */
    int32_t sparse;
    const int32_t *kv_len;
    uint64_t used; /* tick of the last use */
} esa_session_plan;

/* Mask kept between refreshes, per (branch, layer). */
typedef struct esa_session_rest {
    uint8_t *bits; /* [B][H][nq][ceil(nk/8)], NULL: none */
    /* CUDA: [2] blocks that exist, blocks kept, behind the bits in the same memory */
    int64_t *facts;
    int64_t bytes;     /* of both */
    int32_t device;    /* ESA_DEVICE_* on which bits lie */
    int32_t made;      /* 1: bits hold a mask of this video */
    esa_shapes shapes; /* it was made for; a mask of another shape is not reused */
    /* [B] copy of the key lengths it was made for, NULL: all keys, or lengths on a GPU: */
    int32_t *kv_len;
    /* those are told apart by their address, as nobody can read them without waiting */
    const int32_t *kv_gpu;
    int64_t kv_bytes;
    int32_t sparse_steps; /* sparse steps seen since begin */
    int32_t last_step;    /* of them, -1: none */
    double density, mass;
    int64_t existing; /* blocks that density counts against */
} esa_session_rest;

/* Sums of one (layer, step), over branches and calls. */
typedef struct esa_session_cell { /* on a GPU density and times follow later, see session_gpu.h */
    int64_t calls, dense, sparse, fallback, made, loaded, with_mass, by_head;
    /* sums over sparse calls (with_mass of them for mass; by_head of them are in
     * esa_session.head) */
    double asked, density, mass;
    double select_seconds, attention_seconds;
    const char *kernel; /* of the last call, static storage; NULL: none */
    int64_t when;       /* order of that call */
} esa_session_cell;

struct esa_session {
    esa_ctx *ctx;
    /* pointers in it are ours (dense layers) or the caller's (masks); model and hash are not
     * kept here */
    esa_session_params params;
    char model[128], config_hash[80];
    int32_t warmup;       /* dense steps at the beginning */
    uint8_t *dense_layer; /* [L] flags */
    int32_t step, branch; /* -1: not told yet */
    int32_t begun;
    const int32_t *kv_len;
    const esa_budget_masks *masks; /* CACHED */
    int32_t permille;
    esa_session_plan plan[ESA_SESSION_PLANS];
    uint64_t tick;
    esa_session_rest *rest; /* [branches][L]; ONLINE with refresh_every > 1 */
    esa_session_cell *cell; /* [L][T] */
    double *head;  /* [L][T][heads] densities of sparse calls on the CPU, summed; NULL: none yet */
    int64_t heads; /* of the first such call */
    esa_recorder recorder; /* RECORD */
    esa_session_gpu gpu;   /* calls with CUDA views */
};

/* The figures of the current (layer, step). */
static inline esa_session_cell *esa_session_at(esa_session *s, int32_t layer)
{
    return &s->cell[(int64_t)layer * s->params.steps + s->step];
}
/* Seconds of a clock that never goes back. */
double esa_session_now(void);
/* 1 if calls of these shapes can share a plan. */
int esa_session_same_shapes(const esa_shapes *a, const esa_shapes *b);
/* Frees the bits of a mask at rest. */
void esa_session_drop_rest(esa_session *s, esa_session_rest *rest);
/* Frees the plans. */
void esa_session_drop_plans(esa_session *s);

#endif
