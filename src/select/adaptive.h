/* adaptive.h - the parts of the adaptive order. Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_ADAPTIVE_H
#define ESA_SELECT_ADAPTIVE_H

#include "rules/order.h"
#include "rules/rank.h"
#include "select/rules.h"

/* One side, q or k. */
typedef struct esa_adaptive_side {
    const char *data;
    const int64_t *stride;
    int64_t N, heads; /* heads of one batch entry */
    uint32_t block, small;
    esa_order_node root;
    int32_t levels;       /* of nodes with more than `small` tokens */
    const int32_t *start; /* [N] or NULL */
    int32_t *perm;        /* [B][heads][N] */
    int64_t at;           /* first head of this side among all heads */
    int64_t tokens_at;    /* first token of this side among the tokens of all heads */
} esa_adaptive_side;

/* Scratch of one worker. Rows have D floats. */
typedef struct esa_adaptive_room {
    float *rows;    /* [SAMPLE][D] tokens */
    float *y_panel; /* tokens as keys: pack_k */
    float *z_panel; /* head-dim columns as keys: [ceil(D/nr)][SAMPLE][nr] */
    float *group;   /* one group of pack_q, at most SAMPLE or D deep; for vectors: row 0 of it */
    float *y, *z, *w;
    float *tile; /* [mr][ld]; ld covers D and SAMPLE */
    float *pair; /* [small][ld] K */
    float *part; /* [small][small] K of a part, centred */
    float *q;    /* pack_q of `small` rows */
} esa_adaptive_room;

typedef struct esa_adaptive_job {
    const esa_select_args *args;
    esa_adaptive_side side[2];
    int64_t heads, ld;       /* heads of both sides and all batch entries */
    int64_t metric_bytes;    /* of one packed metric */
    int64_t slots;           /* most nodes of a level that is cut */
    char *metric;            /* [heads] C as pack_k */
    float *direction;        /* [heads][slots][D] */
    uint32_t *key;           /* [tokens of all heads] coordinates, as esa_rank_bits */
    int32_t *spare;          /* [tokens of all heads] */
    esa_adaptive_room *room; /* [threads] */
    int32_t level;
    int64_t chunks; /* pieces of a node in the pass over coordinates */
} esa_adaptive_job;

/* A head of the job. */
typedef struct esa_adaptive_head {
    const esa_adaptive_side *side;
    int64_t b, h;
    const char *data; /* first token */
    int32_t *perm;    /* [N] */
    uint32_t *key;    /* [N] */
    int32_t *spare;   /* [N] */
} esa_adaptive_head;

esa_adaptive_head esa_adaptive_head_of(const esa_adaptive_job *job, int64_t head);

/* adaptive_direction.c. metric: C of a head. direction: w of node `slot` on the job's level; zeros
 * if the tokens do not differ. */
void esa_adaptive_metric(const esa_adaptive_job *job, int64_t head, int32_t worker);
void esa_adaptive_direction(const esa_adaptive_job *job, int64_t head, uint32_t slot,
                            int32_t worker);
/* adaptive_block.c. Makes all cuts of a small node. */
void esa_adaptive_block(const esa_adaptive_job *job, int64_t head, esa_order_node node,
                        int32_t worker);

/* Stable partition: the k tokens of perm[n] with the smallest keys come first, equal keys by
 * position. spare: n. */
void esa_adaptive_partition(int32_t *perm, const uint32_t *key, int32_t *spare, int64_t n,
                            int64_t k);

/* out[0 .. keys-1] = panel . vector, with a panel as pack_k makes it. The vector lies in row 0 of
 * room->group: element i at group[i * mr]; the other rows do not matter. */
static inline void esa_adaptive_product(const esa_adaptive_job *job, const esa_adaptive_room *room,
                                        float *out, const float *panel, int64_t keys, int64_t depth)
{
    const esa_cpu_kernels *kern = job->args->kern;
    kern->qk(room->tile, job->ld, room->group, panel, 1, keys, depth, 1.0f, 0);
    for (int64_t i = 0; i < keys; i++) out[i] = room->tile[i];
}

#endif
