/* sched_internal.h - the state of a scheduler between steps.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_SCHED_INTERNAL_H
#define ESA_MODEL_SCHED_INTERNAL_H

#include "model/sched/sched.h"

struct esa_sched {
    esa_ctx *ctx;
    esa_sched_config config;
    int32_t steps, next;  /* next: the step that must come next */
    int64_t count, bytes; /* elements and bytes of the latents */
    float *sigma;         /* [steps + 1]; the last is 0 */
    double *timestep;     /* [steps] */
    /* UniPC */
    float *m0, *m1; /* [count] predictions of x0 in the last step and in the one before */
    float *last;    /* [count] the sample where the last predictor started */
    int32_t order;  /* order of the last predictor */
};

void esa_sched_step_unipc(esa_sched *s, int32_t i, float *x, const float *v);
void esa_sched_step_euler(const esa_sched *s, int32_t i, float *x, const float *v);

#endif
