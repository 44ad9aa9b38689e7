/* mask_build.h - builds masks from recordings of errors. Private to src/maskfile.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   mask_build.c   builds a mask file from recordings: which cells, which budgets
 *   mask_errors.c  one cell: from sums to scores, masks, remaining errors and costs
 *   mask_spend.c   all cells: spreads a total work over them and writes their masks */
#ifndef ESA_MASKFILE_MASK_BUILD_H
#define ESA_MASKFILE_MASK_BUILD_H

#include "maskfile/mask_file.h"
#include "maskfile/recording.h"

/* The error scores of one cell, and the masks that the rule of rules/levels.h makes from them. */
typedef struct esa_error_cell {
    esa_ctx *ctx;
    esa_mask_file_info info;
    esa_select_args args;
    float *errors; /* [levels][H][nq][nk]: means over the contributions */
    uint64_t *sum; /* [threads][nk] scratch */
    int64_t errors_bytes, sum_bytes;
    esa_mask *mask; /* B = 1 */
    double *left;   /* [2][H]: errors that the mask leaves; errors of a mask without any block */
    void *ws;
    int64_t ws_bytes;
} esa_error_cell;

/* Allocates buffers for cells of these recordings. On failure cell is empty. */
esa_status esa_error_cell_create(esa_ctx *ctx, esa_error_cell *cell,
                                 const esa_mask_file_info *info);
void esa_error_cell_free(esa_error_cell *cell);
/* Loads the scores of a recorded cell. */
void esa_error_cell_load(esa_error_cell *cell, const esa_recording *rec, int32_t count,
                         int64_t index);
/* Makes the mask of a budget (esa_select_qkv; 1: every block) and fills left. */
void esa_error_cell_choose(esa_error_cell *cell, double budget);
/* Mean over heads and rows of the errors that the mask leaves, and its work with exact rows. */
double esa_error_cell_error(const esa_error_cell *cell);
double esa_error_cell_work(const esa_error_cell *cell);

/* Writes the masks of every budget of out, which has densities. plan: as in esa_mask_build. */
esa_status esa_mask_build_errors(esa_mask_output *out, const esa_recording *rec, int32_t count,
                                 const esa_mask_axes *axes, const esa_work_plan *plan);

#endif
