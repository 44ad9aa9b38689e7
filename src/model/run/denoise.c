/* denoise.c - the loop over the steps: the transformer for each branch, guidance, the scheduler.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Follows diffusers' pipelines: each step computes v = v_negative + guidance (v_prompt -
 * v_negative) and calls the scheduler. The prompt is branch 0 of the session, the negative prompt
 * branch 1. */
#include "model/run/run.h"

#include "nn/ops.h"
#include "session/session.h"

static void note_density(esa_model *m)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    if (!esa_session_sum(m->session, &stats, -1, -1)) m->density = stats.density;
}

/* The end of a step, where the host waits for the device. Without the check, damaged weights would
 * end in a black video hours later. */
static esa_status end_step(esa_model *m, const esa_figures_args *args, esa_step_figures *figures,
                           int32_t step, int32_t steps)
{
    ESA_TRY(m->nn.ops->figures(&m->nn, args));
    ESA_TRY(esa_nn_download(&m->nn, figures, args->out, (int64_t)sizeof *figures));
    ESA_TRY(m->nn.ops->turn(&m->nn));
    if (figures->wrong > 0)
        return esa_fail(m->ctx, ESA_ERR_FORMAT,
                        "step %d of %d gave numbers that are not finite: the weights, embeddings "
                        "or settings do not belong to this model",
                        step + 1, steps);
    note_density(m);
    return ESA_OK;
}

static esa_status forward(esa_model *m, esa_run *r, int32_t i)
{
    const int32_t second = esa_run_is_second(m, r, i);
    for (int32_t b = 0; b < r->branches; b++) {
        ESA_TRY(esa_session_place(m->session, i, b + (r->apart && second ? r->branches : 0)));
        const esa_dit_call call = { .session = m->session,
                                    .branch = b,
                                    .v = r->v[b],
                                    .x = r->x,
                                    .t = esa_sched_timestep(r->sched, i),
                                    .guidance = r->p.guidance,
                                    .second = second };
        ESA_TRY(esa_pair_forward(m->dit, &call));
    }
    r->stats.computed_steps++;
    return ESA_OK;
}

static esa_status guide(esa_model *m, const esa_run *r, int32_t i, float *v, const float *negative)
{
    double guidance = esa_run_is_second(m, r, i) ? r->p.guidance_2 : r->p.guidance;
    if (r->branches < 2) return ESA_OK;
    if (m->family->guidance)
        guidance = m->family->guidance(&r->p, i, esa_sched_timestep(r->sched, i));
    return m->nn.ops->guide(&m->nn, v, negative, (float)guidance, r->count);
}

/* Draws the noise of step i, if its scheduler wants some. */
static esa_status draw_noise(esa_model *m, esa_run *r, int32_t i)
{
    const esa_view to = esa_view_of(r->noise, ESA_DTYPE_F32, m->nn.be->device, 1, r->count);
    const int32_t draws = esa_sched_draws(r->sched, i);
    for (int32_t k = 0; k < draws; k++) esa_run_draw(m, r);
    return draws ? esa_nn_write(&m->nn, &to, r->draw) : ESA_OK;
}

static esa_status step(esa_model *m, esa_run *r, int32_t i, const float *v)
{
    ESA_TRY(draw_noise(m, r, i));
    return esa_sched_step(r->sched, i, r->x, v, r->noise);
}

static esa_status denoise_step(esa_model *m, esa_run *r, int32_t i)
{
    const esa_figures_args args = { .out = r->figures, .x = r->x, .count = r->count };
    esa_step_figures figures;
    ESA_TRY(forward(m, r, i));
    ESA_TRY(guide(m, r, i, r->v[0], r->v[1]));
    ESA_TRY(step(m, r, i, r->v[0]));
    ESA_TRY(end_step(m, &args, &figures, i, r->p.steps));
    return esa_run_preview(m, r, i, r->v[0]);
}

/* A step with the step cache; *skip says whether it is left out, and then whether the next is. */
static esa_status cached_step(esa_model *m, esa_run *r, int32_t i, int32_t *skip)
{
    const int32_t changed = i > 0 && esa_run_is_second(m, r, i) != esa_run_is_second(m, r, i - 1);
    if (changed) r->cache.known = *skip = 0; /* another transformer starts anew */
    const int32_t computed = !*skip;
    esa_step_figures figures;
    if (computed) ESA_TRY(forward(m, r, i));
    float *const *v = computed ? r->v : r->kept;
    ESA_TRY(esa_nn_copy(&m->nn, r->guided, v[0], r->bytes));
    ESA_TRY(guide(m, r, i, r->guided, v[1]));
    ESA_TRY(esa_nn_copy(&m->nn, r->before, r->x, r->bytes));
    ESA_TRY(step(m, r, i, r->guided));
    esa_figures_args args = { .out = r->figures, .x = r->x, .x_before = r->before };
    args.count = r->count;
    for (int32_t b = 0; b < r->branches && computed; b++) {
        args.v[b] = r->v[b];
        if (i > 0) args.v_before[b] = r->kept[b];
    }
    ESA_TRY(end_step(m, &args, &figures, i, r->p.steps));
    for (int32_t b = 0; b < r->branches && computed; b++) {
        float *const last = r->kept[b];
        r->kept[b] = r->v[b];
        r->v[b] = last;
    }
    *skip = esa_step_cache_next(&r->cache, i, computed, &figures);
    return esa_run_preview(m, r, i, r->guided);
}

esa_status esa_run_denoise(esa_model *m, esa_run *r)
{
    ESA_TRY(esa_model_progress(m, ESA_STAGE_DENOISE, 0, r->p.steps));
    for (int32_t b = 0; b < r->branches; b++) ESA_TRY(esa_pair_text(m->dit, b, &r->embeds.text[b]));
    if (r->image.condition) ESA_TRY(esa_pair_image(m->dit, &r->image));
    ESA_TRY(esa_run_carry(m, r));
    esa_run_say(m, r);
    int32_t skip = 0;
    for (int32_t i = 0; i < r->p.steps; i++) {
        ESA_TRY(r->p.cache > 0 ? cached_step(m, r, i, &skip) : denoise_step(m, r, i));
        ESA_TRY(esa_model_progress(m, ESA_STAGE_DENOISE, i + 1, r->p.steps));
    }
    return ESA_OK;
}
