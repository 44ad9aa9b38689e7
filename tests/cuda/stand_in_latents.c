/* stand_in_latents.c - the operations on latents of the stand-in GPU in plain C.
 * SPDX-License-Identifier: Apache-2.0 */
#include "stand_in_latents.h"

#include <math.h>
#include <string.h>
#include "base/half.h"

/* The latent that element col of a row is: its offset. */
static int64_t latent_of(const esa_patch_args *a, int64_t row, int64_t col)
{
    const int32_t *s = a->size, *p = a->patch;
    const int64_t volume = (int64_t)p[0] * p[1] * p[2], gh = s[1] / p[1], gw = s[2] / p[2];
    const int64_t n = a->perm ? a->perm[row] : row;
    const int32_t first = a->gather || a->channel_first;
    const int64_t c = first ? col / volume : col % a->channels,
                  m = first ? col % volume : col / a->channels;
    const int64_t t = n / (gh * gw) * p[0] + m / (p[1] * p[2]),
                  y = n / gw % gh * p[1] + m / p[2] % p[1], x = n % gw * p[2] + m % p[2];
    return ((c * s[0] + t) * s[1] + y) * s[2] + x;
}

void stand_in_patches(const esa_patch_args *a)
{
    const esa_view *v = &a->rows;
    for (int64_t r = 0; r < v->rows; r++)
        for (int64_t c = 0; c < v->cols; c++) {
            float *latent = a->latent + latent_of(a, r, c);
            float *wide = (float *)v->data + r * v->ld + c;
            uint16_t *half = (uint16_t *)v->data + r * v->ld + c;
            if (v->dtype == ESA_DTYPE_F32 && a->gather)
                *wide = *latent;
            else if (v->dtype == ESA_DTYPE_F32)
                *latent = *wide;
            else if (a->gather)
                *half = esa_f32_to_bf16(*latent);
            else
                *latent = esa_bf16_to_f32(*half);
        }
}

void stand_in_guide(float *v, const float *negative, float scale, int64_t count)
{
    for (int64_t i = 0; i < count; i++) v[i] = negative[i] + scale * (v[i] - negative[i]);
}

static void stand_in_mix(const esa_step_args *a)
{
    for (int64_t i = 0; i < a->count; i++) {
        const float m = a->keep[0] * a->x[i] - a->pull[0] * a->v[i],
                    d = a->order[1] > 1 ? a->rho1 * m - a->rho2 * a->m0[i] : m;
        a->x[i] = a->keep[1] * a->x[i] - a->pull[1] * d;
        if (a->noise) a->x[i] += a->sigma * a->noise[i];
        if (a->m0) a->m0[i] = m;
    }
}

void stand_in_step(const esa_step_args *a)
{
    if (a->kind == ESA_STEP_MIX) stand_in_mix(a);
    for (int64_t i = 0; i < a->count && a->kind == ESA_STEP_EULER; i++) a->x[i] += a->dt * a->v[i];
    for (int64_t i = 0; i < a->count && a->kind == ESA_STEP_UNIPC; i++) {
        const float m = a->x[i] - a->sigma * a->v[i];
        if (a->correct) {
            const float m0 = a->m0[i],
                        old = a->order[0] > 1 ? a->rho1 * ((a->m1[i] - m0) / a->r[0]) : 0;
            a->x[i] = (a->keep[0] * a->last[i] - a->pull[0] * m0) -
                      a->pull[0] * (old + a->rho2 * (m - m0));
            a->m1[i] = m0;
        }
        a->m0[i] = m;
        a->last[i] = a->x[i];
        const float ahead = a->order[1] > 1 ? 0.5f * ((a->m1[i] - m) / a->r[1]) : 0;
        a->x[i] = (a->keep[1] * a->x[i] - a->pull[1] * m) - a->pull[1] * ahead;
    }
}

void stand_in_figures(const esa_figures_args *a)
{
    esa_step_figures f = { 0 };
    for (int64_t i = 0; i < a->count; i++) {
        if (a->x) f.wrong += !isfinite(a->x[i]);
        if (a->x && a->x_before) f.x_change += fabs((double)a->x[i] - a->x_before[i]);
        for (int32_t b = 0; b < 2; b++) {
            if (!a->v[b]) continue;
            f.v_size[b] += fabs((double)a->v[b][i]);
            if (a->v_before[b]) f.v_change[b] += fabs((double)a->v[b][i] - a->v_before[b][i]);
        }
    }
    memset(a->out, 0x7f, (1 + ESA_STEP_PARTS) * sizeof *a->out); /* the rest is scratch */
    *a->out = f;
}
