/* prepare.c - the settings of a run, and what it needs: scheduler, session, memory, latents.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/run/run.h"

#include <math.h>
#include <string.h>
#include <unistd.h>
#include "attn/attn.h"
#include "media/frames.h"
#include "model/run/random.h"
#include "model/run/tensor_file.h"
#include "nn/ops.h"
#include "session/session.h"

#define MAX_STEPS 10000

/* ---------------------------------------------------------------- settings */

static esa_status check_sizes(esa_model *m, esa_run *r)
{
    esa_generate_params *p = &r->p;
    const esa_model_info *i = &m->facts.info;
    if (p->frames == 0) p->frames = i->frames;
    ESA_TRY(esa_run_image_size(m, p));
    if (p->height == 0) p->height = i->height;
    if (p->width == 0) p->width = i->width;
    const int32_t listed = p->sigmas ? p->sigma_count : 0;
    if (p->sigmas && (listed < 1 || (p->steps && p->steps != listed)))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "there are %d sigmas for %d steps", listed,
                        p->steps);
    if (p->steps == 0) p->steps = listed ? listed : i->steps;
    if (!isnan(p->guidance_2) && i->boundary <= 0)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "guidance_2 is %g, but this model has one transformer", p->guidance_2);
    if (isnan(p->guidance_2) && i->boundary > 0)
        p->guidance_2 = isnan(p->guidance) ? i->guidance_2 : p->guidance;
    if (isnan(p->guidance)) p->guidance = i->guidance;
    if (p->frames < 1 || p->frames > ESA_FRAMES_MAX_COUNT)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "frames is %d, expected 1 .. %d", p->frames,
                        ESA_FRAMES_MAX_COUNT);
    if (p->steps < 1 || p->steps > MAX_STEPS)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "steps is %d, expected 1 .. %d", p->steps,
                        MAX_STEPS);
    const double asked[2] = { p->guidance, i->boundary > 0 ? p->guidance_2 : 0 };
    for (int k = 0; k < 2; k++)
        if (!isfinite(asked[k]) || fabs(asked[k]) > 1000)
            return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "guidance is %g, expected -1000 .. 1000",
                            asked[k]);
    const int32_t side[2] = { p->height, p->width };
    for (int s = 0; s < 2; s++) {
        const int32_t unit = i->factor[1 + s] * i->patch[1 + s];
        if (side[s] < unit || side[s] % unit || side[s] > ESA_FRAMES_MAX_SIDE)
            return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                            "%s is %d, expected a multiple of %d from %d to %d for this model",
                            s ? "width" : "height", side[s], unit, unit,
                            ESA_FRAMES_MAX_SIDE / unit * unit);
        r->latent[1 + s] = side[s] / i->factor[1 + s];
    }
    const int32_t tile_unit = m->facts.tile_unit; /* the decoder's rule, checked before the work */
    if (p->decode && (p->vae_tile < 0 || p->vae_tile % tile_unit))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "vae_tile is %d pixels, expected 0 or a multiple of %d", p->vae_tile,
                        tile_unit);
    r->latent[0] = (p->frames - 1) / i->factor[0] + 1;
    int32_t size[3];
    esa_model_size(m, r->latent, size);
    p->frames = size[0];
    r->branches = p->guidance > 1 && !m->family->embedded_guidance ? 2 : 1;
    r->count = (int64_t)i->latent_channels * r->latent[0] * r->latent[1] * r->latent[2];
    r->tokens = (int64_t)(r->latent[0] / i->patch[0]) * (r->latent[1] / i->patch[1]) *
                (r->latent[2] / i->patch[2]);
    if (esa_dit_text_place(m->family->dit) != ESA_TEXT_APART)
        r->text = p->max_text_tokens ? p->max_text_tokens : i->text_tokens;
    r->tokens += r->text;
    return ESA_OK;
}

void esa_run_layout(const esa_model *m, const esa_run *r, esa_layout *layout)
{
    const int32_t place = esa_dit_text_place(m->family->dit);
    for (int d = 0; d < 3; d++)
        layout->grid_q[d] = layout->grid_k[d] = r->latent[d] / m->facts.info.patch[d];
    layout->text_front_q = layout->text_front_k = place == ESA_TEXT_FRONT ? r->text : 0;
    layout->text_back_q = layout->text_back_k = place == ESA_TEXT_BACK ? r->text : 0;
}

esa_status esa_run_settings(esa_model *m, esa_run *r, const esa_generate_params *params)
{
    if (params->struct_size != sizeof *params)
        return esa_fail(m->ctx, ESA_ERR_VERSION,
                        "esa_generate_params has struct_size %u, this library expects %u",
                        params->struct_size, (unsigned)sizeof *params);
    r->p = *params;
    const esa_generate_params *p = &r->p;
    if (!m->dit)
        return esa_fail(m->ctx, ESA_ERR_STATE, "this model was opened without its transformer");
    if (p->decode && !m->vae)
        return esa_fail(m->ctx, ESA_ERR_STATE,
                        "this model was opened without its VAE; it can make latents only");
    if (p->max_text_tokens < 0 || p->max_text_tokens > 65536)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "max_text_tokens is %d, expected 0 (the model's) .. 65536",
                        p->max_text_tokens);
    if (p->scheduler < ESA_SCHEDULER_MODEL || p->scheduler > ESA_SCHEDULER_DPM)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "scheduler is %d, expected 0 .. %d", p->scheduler,
                        ESA_SCHEDULER_DPM);
    if (!(p->cache >= 0 && p->cache <= 100))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "cache is %g, expected 0 (off) .. 100", p->cache);
    if (p->cache > 0 &&
        (p->session.mode == ESA_SESSION_RECORD || p->session.mode == ESA_SESSION_PROBE))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "a step cache cannot be used while a session records or probes");
    if (!(p->flow_shift >= 0 && p->flow_shift <= 1000))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "flow_shift is %g, expected 0 .. 1000",
                        p->flow_shift);
    ESA_TRY(esa_run_preview_check(m, p));
    return check_sizes(m, r);
}

esa_status esa_run_inputs(const esa_model *m, const esa_generate_params *p)
{
    if (!p->prompt && !p->prompt_embeds && !m->random)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "neither a prompt nor embeddings were given");
    if (p->prompt && p->prompt_embeds)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "both a prompt and embeddings were given, expected only one of them");
    if (p->session.mode == ESA_SESSION_CACHED && !p->masks)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "session mode CACHED needs a mask file");
    if ((p->plan || p->quality) && p->session.mode != ESA_SESSION_ONLINE)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "a work plan and a quality need session mode "
                        "ONLINE");
    if (p->quality && !p->plan)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "quality is %g dB, but there is no work plan that knows what to expect",
                        p->quality);
    if (p->session.mode == ESA_SESSION_RECORD && !p->record)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "session mode RECORD needs a recording file");
    return ESA_OK;
}

/* ---------------------------------------------------------------- preparation */

/* What carry reaches with a work, no run without it does. */
static esa_status check_quality(esa_model *m, const esa_run *r, const esa_session_params *s)
{
    esa_work_plan_info f = { .struct_size = sizeof f };
    ESA_TRY(esa_work_plan_get_info(r->plan, &f));
    if (!f.anchors || s->anchor_count || esa_carry_anchors(NULL, s->carry, r->p.steps, r->branches))
        return ESA_OK;
    return esa_fail(m->ctx, ESA_ERR_MISMATCH,
                    "quality is %g dB, but the curve of the work plan was measured with carry (%d "
                    "anchors), and this run has none: turn carry on, or give a work",
                    r->p.quality, f.anchors);
}

/* Opens the work plan, turns a quality into a work, and notes the noise levels of the steps. */
static esa_status prepare_work(esa_model *m, esa_run *r, esa_session_params *s)
{
    esa_tensors *tensors;
    if (r->p.plan) {
        ESA_TRY(esa_st_open(m->ctx, &tensors, r->p.plan));
        ESA_TRY(esa_work_plan_read(m->ctx, &r->plan, tensors));
    }
    if (r->p.quality) {
        ESA_TRY(check_quality(m, r, s));
        ESA_TRY(esa_work_plan_find(m->ctx, r->plan, r->p.quality, &s->work));
    }
    r->sigma = esa_mem_alloc(&m->ctx->mem, 8 * (int64_t)r->p.steps);
    if (!r->sigma) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the noise levels");
    for (int32_t i = 0; i < r->p.steps; i++) r->sigma[i] = esa_sched_sigma(r->sched, i);
    s->sigma = r->sigma;
    s->plan = r->plan;
    return ESA_OK;
}

/* What self-attention of this video takes on the device. */
static esa_status measure_session(esa_model *m, esa_run *r)
{
    esa_shapes shapes = esa_shapes_default();
    const esa_view row = esa_view_of(NULL, m->nn.ops->dtype, m->nn.be->device, 1, 1);
    shapes.dtype = m->nn.ops->attended(&m->nn, &row).dtype;
    shapes.device = m->nn.be->device;
    shapes.device_index = m->nn.be->ordinal(m->ctx);
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = m->facts.info.heads;
    shapes.Nq = shapes.Nk = r->tokens;
    shapes.D = m->facts.info.head_dim;
    esa_session_bytes bytes;
    ESA_TRY(esa_session_room(m->session, &shapes, &bytes));
    r->scratch = bytes.scratch;
    r->mask_bytes = bytes.kept;
    if (r->p.session.mode == ESA_SESSION_PROBE) { /* a mask and a difference for every density */
        r->mask_bytes += esa_size_mul(bytes.carry, r->p.session.probe_count);
        return ESA_OK;
    }
    r->carry_bytes = bytes.carry;
    r->carry_least = bytes.carry_least;
    return ESA_OK;
}

static esa_status make_session(esa_model *m, esa_run *r)
{
    esa_session_params s = r->p.session;
    r->selector = s.select.selector;
    r->mode = s.select.mode;
    if (s.mode == ESA_SESSION_CACHED) {
        /* Tokens must be in the order that the masks were made for. */
        esa_mask_file_info info = { .struct_size = sizeof info };
        esa_tensors *tensors;
        ESA_TRY(esa_st_open(m->ctx, &tensors, r->p.masks));
        ESA_TRY(esa_mask_file_make(m->ctx, &r->masks, tensors));
        ESA_TRY(esa_mask_file_get_info(r->masks, &info));
        esa_layout *l = &s.select.layout;
        if (l->order == ESA_ORDER_DEFAULT) *l = info.layout;
        if (l->protect_first_frame < 0) l->protect_first_frame = info.layout.protect_first_frame;
        r->selector = info.selector;
        r->mode = info.mode;
        s.masks = r->masks;
    }
    if (s.select.layout.protect_first_frame < 0)
        s.select.layout.protect_first_frame = esa_protects_by_default(r->selector, m->facts.image);
    esa_run_layout(m, r, &s.select.layout);
    r->layout = s.select.layout;
    s.layers = m->facts.info.layers;
    s.steps = r->p.steps;
    /* Masks that serve several steps stay with the transformer that made them; files hold one mask
     * per step, so of one transformer. */
    r->apart = m->facts.boundary > 0 && s.mode != ESA_SESSION_CACHED &&
               s.mode != ESA_SESSION_RECORD && s.mode != ESA_SESSION_PROBE;
    s.branches = r->branches * (r->apart ? 2 : 1);
    s.step_branches = r->branches;
    s.model = m->facts.info.name;
    s.config_hash = m->facts.info.config_hash;
    ESA_TRY(
        esa_dit_layout(esa_pair_active(m->dit), r->latent, &s.select.layout, r->selector, r->mode));
    ESA_TRY(prepare_work(m, r, &s));
    ESA_TRY(esa_run_anchors(m, r, &s));
    ESA_TRY(esa_session_make(m->ctx, &m->session, &s));
    ESA_TRY(measure_session(m, r));
    if (s.mode == ESA_SESSION_RECORD && access(r->p.record, F_OK) == 0)
        ESA_TRY(esa_session_resume(m->session, r->p.record));
    return esa_session_start(m->session);
}

static esa_status make_sched(esa_model *m, esa_run *r)
{
    static const int32_t kinds[] = {
        0, ESA_SCHED_UNIPC, ESA_SCHED_UNIPC_036, ESA_SCHED_EULER, ESA_SCHED_DDIM, ESA_SCHED_DPM
    };
    esa_sched_config c = m->sched;
    if (r->p.scheduler != ESA_SCHEDULER_MODEL) c.kind = kinds[r->p.scheduler];
    ESA_TRY(esa_family_check_sched(m->ctx, m->family, c.kind));
    if (r->p.flow_shift > 0) c.shift = r->p.flow_shift;
    c.list = r->p.sigmas;
    return esa_sched_create(&m->nn, &r->sched, &c, r->p.steps, r->count);
}

/* Families with frames before channels draw in that order. */
static void normals(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    esa_torch_normals(arg, first, count);
}

/* What esa_torch_randn does, by all threads: a scheduler that draws noise in every step would keep
 * a GPU waiting for one thread. */
static void draw(esa_nn *nn, esa_torch_rng *rng, float *out, int64_t count)
{
    if (count < 16) {
        esa_torch_randn(rng, out, count);
        return;
    }
    esa_torch_begin(rng, out, count);
    esa_nn_parallel(nn, normals, out, count / 16, 1024);
    esa_torch_end(rng, out, count);
}

void esa_run_draw(esa_model *m, esa_run *r)
{
    const int64_t C = m->facts.info.latent_channels, T = r->latent[0],
                  plane = (int64_t)r->latent[1] * r->latent[2];
    float *drawn = m->family->frames_first ? r->draw + r->count : r->draw;
    draw(&m->nn, &r->rng, drawn, r->count);
    if (!m->family->frames_first) return;
    for (int64_t c = 0; c < C; c++)
        for (int64_t t = 0; t < T; t++)
            memcpy(r->draw + (c * T + t) * plane, drawn + (t * C + c) * plane,
                   (size_t)plane * sizeof *drawn);
}

/* Room for noise, if the latents or the scheduler need some. */
static esa_status make_draws(esa_model *m, esa_run *r)
{
    int32_t draws = 0;
    for (int32_t i = 0; i < r->p.steps; i++) draws += esa_sched_draws(r->sched, i);
    esa_torch_seed(&r->rng, r->p.seed);
    if (draws) ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->noise, r->bytes, "the noise"));
    if (!draws && r->p.latents) return ESA_OK;
    r->draw = esa_mem_alloc(&m->ctx->mem, 2 * r->bytes);
    return r->draw ? ESA_OK : esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the noise");
}

/* Noise in host memory goes to the device. */
static esa_status make_noise(esa_model *m, esa_run *r)
{
    const esa_view x = esa_view_of(r->x, ESA_DTYPE_F32, m->nn.be->device, 1, r->count);
    esa_run_draw(m, r);
    return esa_nn_write(&m->nn, &x, r->draw);
}

static esa_status make_latents(esa_model *m, esa_run *r)
{
    r->bytes = r->count * 4;
    ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->x, r->bytes, "the latents"));
    for (int32_t i = 0; i < r->branches; i++)
        ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->v[i], r->bytes, "the velocities"));
    ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->figures, ESA_FIGURES_BYTES, "the figures of a step"));
    if (r->p.cache > 0) {
        float **const more[4] = { &r->before, &r->guided, &r->kept[0], &r->kept[1] };
        for (int32_t i = 0; i < 2 + r->branches; i++)
            ESA_TRY(esa_nn_alloc(&m->nn, (void **)more[i], r->bytes, "the step cache"));
    }
    ESA_TRY(make_draws(m, r));
    if (!r->p.latents) return make_noise(m, r);
    const int64_t expected[4] = { m->facts.info.latent_channels, r->latent[0], r->latent[1],
                                  r->latent[2] };
    esa_loaded t;
    ESA_TRY(esa_loaded_read(m->ctx, &t, r->p.latents, "latents", 4, expected));
    const esa_status status = esa_nn_upload(&m->nn, r->x, t.data, r->bytes);
    esa_loaded_free(m->ctx, &t);
    return status;
}

esa_status esa_run_prepare(esa_model *m, esa_run *r)
{
    const int64_t buffers = 5 + r->branches + (r->p.cache > 0 ? 2 + r->branches : 0);
    ESA_TRY(esa_store_clear(esa_dit_store(esa_pair_active(m->dit)),
                            buffers * r->count * 4 + ESA_FIGURES_BYTES, 0));
    ESA_TRY(make_sched(m, r));
    ESA_TRY(make_session(m, r));
    r->cache = esa_session_new_cache(m->session, r->p.cache);
    return make_latents(m, r);
}
