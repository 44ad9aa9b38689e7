/* importance.h - block importance: sampled queries against all keys, one batch entry at a time.
 * Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_IMPORTANCE_H
#define ESA_SELECT_IMPORTANCE_H

#include "select/rules.h"

/* Sizes that follow from the args, and the parts of the workspace. */
typedef struct esa_importance_work {
    int64_t per_block; /* samples of a full query block */
    int64_t samples;   /* samples of all query blocks */
    /* A window: heads, query blocks, and the samples of those blocks. */
    int64_t heads, blocks, rows;
    int64_t chunk;            /* key blocks per work item */
    int64_t ld;               /* pitch of a score tile, floats */
    int64_t q_bytes, k_bytes; /* packed queries of a window of one head; packed keys of one chunk */
    int32_t *position, *source; /* [samples] position in the ordered sequence; row of q */
    char *q;                    /* [heads][q_bytes] */
    float *top, *sum; /* [heads][rows][nk] log2 maximum and sum of exp2 per (sample, key block) */
    float *row_top, *row_sum; /* [heads][rows] compat-round: maximum and sum of the row */
    char *k;                  /* [threads][k_bytes] */
    float *tile;              /* [threads][mr][ld] */
    double *line;             /* [threads][2][nk] */
} esa_importance_work;

void esa_importance_carve(esa_importance_work *work, esa_carve *carve, const esa_select_args *args);
/* out[Hq][nq][nk] of batch entry b with the given rules. Rows sum to 1, or are 0 if
 * nothing is visible. */
void esa_importance_run(float *out, const esa_importance_work *work, const esa_select_args *args,
                        const esa_rules *rules, int64_t b);

#endif
