/* ada.h - the row rules of ada_bsa. Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_ADA_H
#define ESA_SELECT_ADA_H

#include "select/rules.h"

/* The original's choice for one block row: keep[n] from score[n] (n candidates), scratch key[roundup(n, 32)].
 * rounded: sums and scores are fp16 numbers, as on the original's device. */
void esa_ada_pick_compat(uint8_t *keep, const double *score, int64_t n, const esa_select_params *params, int32_t rounded,
                         uint64_t *key);
/* Ours: forced blocks first, then the best until cdf_threshold of the row's mass or the quota is reached. */
void esa_ada_pick_fixed(esa_picker *picker, const esa_rules *rules, const float *score, int64_t i, int64_t quota, double threshold,
                        int64_t nk);
/* Block scores of one block row with the original's fp16 rounding points. x: logits [rows][ld], limit[rows] columns each;
 * score[blocks] of `group` columns; half: scratch [rows][blocks]. tile: columns per online-softmax step. */
void esa_ada_scores_rounded(double *score, const float *x, int64_t ld, int64_t rows, const int64_t *limit, int64_t blocks,
                            int64_t group, int64_t tile, float *half);

#endif
