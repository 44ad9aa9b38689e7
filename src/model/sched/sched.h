/* sched.h - the two ways a velocity becomes the next latent: UniPC for flow models, and flow-match
 * Euler.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sigmas (n steps, s = shift; u' = s u / (1 + (s - 1) u)):
 *   UNIPC      u = linspace(1, 0.001, n+1) without its last, first value lowered by 1e-6 diffusers
 * >= 0.37 UNIPC_036  u = linspace(0.999, 0, n+1) without its last diffusers <= 0.36, Wan's own code
 *   EULER      u = linspace(1, sigma_min, n) FlowMatchEulerDiscreteScheduler then 0. Everything is
 * f32 as there; tests hold each step against both versions. */
#ifndef ESA_MODEL_SCHED_H
#define ESA_MODEL_SCHED_H

#include "model/config.h"

typedef struct esa_sched esa_sched;

/* For steps >= 1 and latents of count elements. ESA_ERR_ARGUMENT, ESA_ERR_MEMORY. */
esa_status esa_sched_create(esa_ctx *ctx, esa_sched **sched, const esa_sched_config *config,
                            int32_t steps, int64_t count);
void esa_sched_free(esa_sched *sched);
/* What the model is told at step i, and sigma_i (i = steps: 0). */
double esa_sched_timestep(const esa_sched *sched, int32_t i);
double esa_sched_sigma(const esa_sched *sched, int32_t i);
/* x[count]: sample at step i in, at step i + 1 out; v[count]: the model's output. Steps come in
 * order, 0 first. */
esa_status esa_sched_step(esa_sched *sched, int32_t i, float *x, const float *v);

#endif
