/* denoise.c - the loop over the steps: the transformer for each branch, guidance, the scheduler.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Follows diffusers' WanPipeline: each step computes v = v_negative + guidance (v_prompt -
 * v_negative) and calls the scheduler. The prompt is branch 0 of the session, the negative prompt
 * branch 1. */
#include "model/run.h"

#include "nn/ops.h"
#include "session/session.h"

static void note_density(esa_model *m)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    if (!esa_session_sum(m->session, &stats, -1, -1)) m->density = stats.density;
}

/* The end of a step, where the host waits for the device. Without the check, damaged weights would
 * end in a black video hours later. */
static esa_status end_step(esa_model *m, const esa_run *r, int32_t step)
{
    const esa_figures_args args = { .out = r->figures, .x = r->x, .count = r->count };
    esa_step_figures figures;
    ESA_TRY(m->nn.ops->figures(&m->nn, &args));
    ESA_TRY(esa_nn_download(&m->nn, &figures, r->figures, (int64_t)sizeof figures));
    ESA_TRY(m->nn.ops->settle(&m->nn));
    if (figures.wrong > 0)
        return esa_fail(m->ctx, ESA_ERR_FORMAT,
                        "step %d of %d gave numbers that are not finite: the weights, embeddings "
                        "or settings do not belong to this model",
                        step + 1, r->p.steps);
    note_density(m);
    return ESA_OK;
}

static esa_status denoise_step(esa_model *m, esa_run *r, int32_t i)
{
    for (int32_t b = 0; b < r->branches; b++) {
        ESA_TRY(esa_session_place(m->session, i, b));
        ESA_TRY(esa_wan_dit_forward(m->dit, m->session, b, r->v[b], r->x,
                                    esa_sched_timestep(r->sched, i)));
    }
    if (r->branches == 2)
        ESA_TRY(m->nn.ops->guide(&m->nn, r->v[0], r->v[1], (float)r->p.guidance, r->count));
    ESA_TRY(esa_sched_step(r->sched, i, r->x, r->v[0]));
    ESA_TRY(end_step(m, r, i));
    return esa_model_progress(m, ESA_STAGE_DENOISE, i + 1, r->p.steps);
}

esa_status esa_run_denoise(esa_model *m, esa_run *r)
{
    ESA_TRY(esa_model_progress(m, ESA_STAGE_DENOISE, 0, r->p.steps));
    for (int32_t b = 0; b < r->branches; b++)
        ESA_TRY(esa_wan_dit_text(m->dit, b, r->embeds.data[b], r->embeds.rows[b]));
    for (int32_t i = 0; i < r->p.steps; i++) ESA_TRY(denoise_step(m, r, i));
    return ESA_OK;
}
