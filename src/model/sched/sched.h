/* sched.h - schedulers: turn a velocity into the next latent. UniPC for flow models, flow-match
 * Euler, and CogVideoX's DDIM and DPM (v_sched.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sigmas for n steps and shift s, with u' = s u / (1 + (s - 1) u); the last one is 0:
 *   UNIPC      u = linspace(1, 0.001, n+1) without its last value; the first is lowered by 1e-6
 *              (diffusers 0.37 and newer)
 *   UNIPC_036  u = linspace(0.999, 0, n+1) without its last value
 *              (diffusers 0.36 and older, Wan's own code)
 *   EULER      u = linspace(1, sigma_min, n)
 *              (FlowMatchEulerDiscreteScheduler)
 *              or linspace(1, 0, n+1) without its last value, if the config says to_zero
 *              (what HunyuanVideoPipeline gives to that scheduler)
 * A list of u in the config takes the place of these rules, as sigmas of set_timesteps do in
 * diffusers; it is shifted too.
 * Everything is f32 as in diffusers; tests compare each step with both versions. */
#ifndef ESA_MODEL_SCHED_H
#define ESA_MODEL_SCHED_H

#include "model/config/config.h"
#include "nn/nn.h"

typedef struct esa_sched esa_sched;

/* The group of a kind, and its name for messages. */
int32_t esa_sched_group(int32_t kind);
const char *esa_sched_name(int32_t kind);

/* For steps >= 1 and latents of count elements on the device of nn, which must outlive it. Fails
 * with ESA_ERR_ARGUMENT or ESA_ERR_MEMORY. */
esa_status esa_sched_create(esa_nn *nn, esa_sched **sched, const esa_sched_config *config,
                            int32_t steps, int64_t count);
void esa_sched_free(esa_sched *sched);
/* The model's timestep at step i, and sigma_i (0 for i = steps). */
double esa_sched_timestep(const esa_sched *sched, int32_t i);
double esa_sched_sigma(const esa_sched *sched, int32_t i);
/* How many times the caller draws noise for step i; the last draw is what the step takes. DPM draws
 * twice in most of its steps and leaves the first unused, as in diffusers. */
int32_t esa_sched_draws(const esa_sched *sched, int32_t i);
/* Turns x[count] from the sample at step i into that at step i + 1; v[count] is the model's output,
 * noise[count] may be NULL where nothing is drawn. Steps must come in order from 0. */
esa_status esa_sched_step(esa_sched *sched, int32_t i, float *x, const float *v,
                          const float *noise);
/* The clean sample that step i expects, from the sample x behind the step and the model's output v
 * in it: of_x * x + of_v * v. Exact where the step is of first order and draws no noise. */
void esa_sched_clean(const esa_sched *sched, int32_t i, float *of_x, float *of_v);

#endif
