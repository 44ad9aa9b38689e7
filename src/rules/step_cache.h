/* step_cache.h - which steps of a denoising run can use the velocity of an earlier step.
 * SPDX-License-Identifier: Apache-2.0
 *
 * After step i, with |.| the sum of magnitudes, x_i the sample that step i began with, and v_b the
 * velocity of guidance branch b at the last computed step:
 *
 *     rate_b = |v_b - v_b'| / (|x - x'| summed over the steps between)   if step i was computed;
 *                                                        v_b' is the one computed before
 *     change += max over b of rate_b |x_{i+1} - x_i| / |v_b|
 *
 * change predicts how far the velocity is from the one that is kept, as a part of it. Step i+1 is
 * left out while change is below the threshold; a computed step sets it back to 0. The first steps
 * and the last one are always computed. All branches are left out together: guidance multiplies
 * their difference, so branches of different age would be far apart.
 *
 * A step that is left out uses the kept velocity as it is. Adding the movement of the sample to it,
 * as caches for models with other outputs do, is worse: 42.0 instead of 45.5 dB on wan-tiny (9
 * frames) with 10 of 25 steps left out.
 *
 * Pure arithmetic on the figures of a step (base/nn_args.h: esa_step_figures). */
#ifndef ESA_RULES_STEP_CACHE_H
#define ESA_RULES_STEP_CACHE_H

#include "base/inline.h"
#include "base/nn_args.h"

typedef struct esa_step_cache {
    double threshold;
    int32_t first, steps; /* the first step that may be left out; steps of the run */
    int32_t known;        /* velocities computed so far, at most 2: then rate is known */
    double rate[2], size[2];
    double moved;  /* sum |x_{j+1} - x_j| since the last computed step */
    double change; /* predicted */
} esa_step_cache;

/* warmup: steps of the session's warm-up, which are always computed. */
ESA_INLINE esa_step_cache esa_step_cache_begin(double threshold, int32_t steps, int32_t warmup)
{
    esa_step_cache c = { 0 };
    const int32_t tenth = (steps + 9) / 10;
    c.threshold = threshold;
    c.steps = steps;
    c.first = warmup > tenth ? warmup : tenth;
    return c;
}

/* Takes the figures of step i, whose velocities count if it was computed. Returns 1 if step i + 1
 * is left out. */
ESA_INLINE int32_t esa_step_cache_next(esa_step_cache *c, int32_t i, int32_t computed,
                                       const esa_step_figures *f)
{
    double worst = 0;
    if (computed) {
        for (int32_t b = 0; b < 2; b++) {
            c->rate[b] = c->moved > 0 ? f->v_change[b] / c->moved : 0;
            c->size[b] = f->v_size[b];
        }
        c->known += c->known < 2;
        c->moved = 0;
    }
    for (int32_t b = 0; b < 2; b++) {
        const double change = c->size[b] > 0 ? c->rate[b] * f->x_change / c->size[b] : 0;
        if (!(change <= worst)) worst = change; /* also if it is no number */
    }
    c->moved += f->x_change;
    c->change += worst;
    if (c->known == 2 && i + 1 >= c->first && i + 1 < c->steps - 1 && c->change < c->threshold)
        return 1;
    c->change = 0;
    return 0;
}

#endif
