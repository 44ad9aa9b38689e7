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
    float *m0,
        *m1; /* [count] on nn's device: predictions of x0 in the last step and in the one before */
    float *last;   /* [count] likewise: the sample where the last predictor started */
    int32_t order; /* order of the last predictor */
};

/* Sets the coefficients of step i of UniPC. */
void esa_sched_unipc(esa_sched *s, int32_t i, esa_step_args *args);

#endif
