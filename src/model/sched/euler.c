/* euler.c - one step of flow matching: x += (sigma_{i+1} - sigma_i) v.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/sched/sched_internal.h"

void esa_sched_step_euler(const esa_sched *s, int32_t i, float *x, const float *v)
{
    const float dt = s->sigma[i + 1] - s->sigma[i];
    for (int64_t n = 0; n < s->count; n++) x[n] += dt * v[n];
}
