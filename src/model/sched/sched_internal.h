/* sched_internal.h - the state of a scheduler between steps.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_SCHED_INTERNAL_H
#define ESA_MODEL_SCHED_INTERNAL_H

#include "model/sched/sched.h"

struct esa_sched {
    esa_nn *nn;
    esa_sched_config config;
    int32_t steps, next;  /* next: the step that must come next */
    int64_t count, bytes; /* elements and bytes of the latents */
    float *sigma;         /* [steps + 1]; the last is 0 */
    double *timestep;     /* [steps] */
    /* UniPC */
    float *m0, *m1; /* [count] on nn's device: predictions of x0 in the last step and in the one
                     * before; DPM has m0 alone */
    float *last;    /* [count] likewise: the sample where the last predictor started */
    int32_t order;  /* order of the last predictor */
    /* DDIM and DPM: [steps] signal at a step and at its end; 1 where the end is the clean sample */
    double *signal, *next_signal;
    int32_t *clean;
};

/* Sets the coefficients of step i of UniPC. */
void esa_sched_unipc(esa_sched *s, int32_t i, esa_step_args *args);

/* v_sched.c: fills in timesteps, sigmas and signals; sets the coefficients of step i. */
esa_status esa_sched_v_fill(esa_sched *s);
void esa_sched_v(const esa_sched *s, int32_t i, esa_step_args *args);
/* The training step of step i. */
int64_t esa_v_step_of(const esa_sched_config *config, int32_t steps, int32_t i);

#endif
