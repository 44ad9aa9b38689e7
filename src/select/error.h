/* error.h - the two halves of the error selector: scores from means, and the choice of levels.
 * Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_ERROR_H
#define ESA_SELECT_ERROR_H

#include "rules/levels.h"
#include "select/rules.h"

/* Scratch of one worker for the scores. A panel is nr mean queries, side by side. */
typedef struct esa_error_panel {
    float *mean_q;            /* [nr][D] mean queries */
    void *q;                  /* the same, packed and scaled */
    float *p;                 /* [mean keys][nr] logits, then weights */
    float *t;                 /* [nk][parts][nr] logits of the tail's means, then weights */
    float *w;                 /* [nk][nr] weights of the blocks */
    float *a;                 /* [nk][columns][nr] weighted sums of values, some columns of them */
    float *o;                 /* [columns][nr] outputs, the same columns */
    float *e;                 /* [levels][nk][nr] squared errors */
    float *m, *l, *alpha, *z; /* [nr] */
    float *row;               /* [mean keys of a block][D] mean values of a block */
    double *sum;              /* [blocks][levels][nk] */
} esa_error_panel;

/* Sizes that follow from the args, and the parts of the workspace. */
typedef struct esa_error_scores {
    int32_t levels;          /* 2 with tail LEVELS, else 1 */
    int64_t fine;            /* fine means of a block; 0: no fine level */
    int64_t parts;           /* means that stand in for a block on all levels: 0, 1 or 1 + fine */
    int64_t group_q;         /* queries of a mean query */
    int64_t group_k;         /* keys of a mean key */
    int64_t per_q, per_k;    /* mean queries, mean keys of a full block */
    int64_t rows;            /* mean keys of a head */
    int64_t blocks, items;   /* query blocks of a work item; items of a head */
    int64_t columns, chunks; /* the head dimension is cut into chunks of so many columns */
    int64_t kv_heads;        /* kv heads of a window */
    float *k;                /* [kv_heads][rows][D] mean keys */
    float *v;                /* [kv_heads][chunks][rows][columns] mean values */
    float *tail;             /* [kv_heads][chunks][nk][parts][columns] values of the tail's means */
    esa_error_panel *panel;  /* [threads] */
} esa_error_scores;

void esa_error_scores_carve(esa_error_scores *scores, esa_carve *carve,
                            const esa_select_args *args);
/* Scores of batch entry b, whose rules are filled: out[Hq][nq][nk] for one mean, and the same at
 * out + level_stride for fine means. Blocks that do not exist are 0. */
void esa_error_scores_run(float *out, int64_t level_stride, const esa_error_scores *scores,
                          const esa_select_args *args, const esa_rules *rules, int64_t b);

/* Parts of the workspace for the choice. */
typedef struct esa_error_choice {
    int32_t *best;   /* [Hq][nq] the block with the largest error of a row; -1: none */
    int64_t *weight; /* [Hq][nq] weight of the steps at the cut */
    int64_t *bins;   /* [threads][ESA_CUT_BINS] */
    uint8_t *keep;   /* [threads][nk] */
} esa_error_choice;

void esa_error_choice_carve(esa_error_choice *choice, esa_carve *carve,
                            const esa_select_args *args);
/* Fills the rows of batch entry b from scores laid out as above. */
void esa_error_choice_run(esa_mask *mask, const esa_error_choice *choice,
                          const esa_select_args *args, const esa_rules *rules, const float *errors,
                          int64_t level_stride, int64_t b);

#endif
