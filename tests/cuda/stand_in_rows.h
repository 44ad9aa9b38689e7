/* stand_in_rows.h - the operations on rows of tests/cuda/stand_in.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_STAND_IN_ROWS_H
#define ESA_TESTS_CUDA_STAND_IN_ROWS_H

#include "base/nn_args.h"

/* room: [cols] for one row. */
void stand_in_norm(const esa_norm_args *args, float *room);
void stand_in_qk(const esa_qk_args *args, float *room);
void stand_in_act(const esa_act_args *args, float *room);

#endif
