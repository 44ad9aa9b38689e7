/* stand_in_latents.h - the operations on latents of tests/cuda/stand_in.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_STAND_IN_LATENTS_H
#define ESA_TESTS_CUDA_STAND_IN_LATENTS_H

#include "base/nn_args.h"

void stand_in_patches(const esa_patch_args *args);
void stand_in_guide(float *v, const float *negative, float scale, int64_t count);
void stand_in_step(const esa_step_args *args);
void stand_in_figures(const esa_figures_args *args);

#endif
