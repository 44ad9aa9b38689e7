/* pipeline.c - esa_generate: text, noise, denoising loop with guidance, decoder, frames.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ctx/engine_door.h"
#include "model/run/run.h"

#include <math.h>
#include <string.h>
#include "attn/attn.h"
#include "media/frames.h"
#include "model/run/tensor_file.h"
#include "nn/ops.h"
#include "session/session.h"

esa_generate_params esa_generate_params_default(void)
{
    esa_generate_params p = {
        .struct_size = sizeof p, .decode = 1, .guidance = NAN, .guidance_2 = NAN
    };
    p.session = esa_session_params_default();
    p.session.mode = ESA_SESSION_DENSE;
    return p;
}

/* ---------------------------------------------------------------- progress */

esa_status esa_model_progress(esa_model *m, int32_t stage, int32_t done, int32_t total)
{
    const double now = esa_nn_now();
    if (stage != m->stage) {
        m->stage = stage;
        m->stage_began = now;
    }
    m->done = done;
    m->total = total;
    if (!m->call || !m->call->progress) return ESA_OK;
    const esa_progress p = { .struct_size = sizeof p,
                             .stage = stage,
                             .done = done,
                             .total = total,
                             .seconds = now - m->began,
                             .unit_seconds = done ? (now - m->stage_began) / done : 0,
                             .density = m->density };
    if (!m->cancelled) m->cancelled = m->call->progress(m->call->progress_user, &p) != 0;
    return m->cancelled ? esa_fail(m->ctx, ESA_ERR_STATE, "cancelled") : ESA_OK;
}

/* ---------------------------------------------------------------- the call */

static esa_status save_latents(esa_model *m, const esa_run *r)
{
    float *latents = esa_mem_alloc(&m->ctx->mem, r->bytes);
    if (!latents) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the latents");
    const esa_to_save save = { "latents",
                               latents,
                               { m->facts.info.latent_channels, r->latent[0], r->latent[1],
                                 r->latent[2] } };
    esa_status status = esa_nn_download(&m->nn, latents, r->x, r->bytes);
    if (!status) status = esa_loaded_write(m->ctx, r->p.save_latents, &save, 1, 4);
    esa_mem_free(&m->ctx->mem, latents, r->bytes);
    return status;
}

/* Writes files after everything else: a call that fails or is cancelled writes nothing. */
static esa_status keep_results(esa_model *m, esa_run *r)
{
    if (r->p.save_embeds) ESA_TRY(esa_embeds_save(m, &r->embeds, r->p.save_embeds));
    if (r->p.save_latents) ESA_TRY(save_latents(m, r));
    if (r->p.session.mode == ESA_SESSION_RECORD) ESA_TRY(esa_session_save(m->session, r->p.record));
    return ESA_OK;
}

static esa_status run_stages(esa_model *m, esa_run *r)
{
    esa_generate_stats *s = &r->stats;
    ESA_TRY(esa_run_prepare(m, r));
    const double t0 = esa_nn_now();
    ESA_TRY(esa_embeds_get(m, &r->embeds, &r->p, r->branches));
    ESA_TRY(m->nn.ops->settle(&m->nn)); /* the products of the text are not those of denoising */
    s->text_seconds = esa_nn_now() - t0;
    ESA_TRY(esa_run_image(m, r));
    ESA_TRY(esa_run_begin(m, r));
    const double t1 = esa_nn_now(), gemm = m->nn.seconds[ESA_NN_GEMM];
    const int64_t peak = m->nn.peak;
    m->nn.peak = m->nn.held; /* of the steps, when the session has memory too */
    ESA_TRY(esa_run_denoise(m, r));
    ESA_TRY(m->nn.ops->settle(&m->nn));
    const double t2 = esa_nn_now();
    s->denoise_seconds = t2 - t1;
    s->gemm_seconds = m->nn.seconds[ESA_NN_GEMM] - gemm;
    s->session.struct_size = sizeof s->session;
    ESA_TRY(esa_session_sum(m->session, &s->session, -1, -1));
    if (r->p.denoised) { /* it reads statistics through public calls, which take the guard */
        esa_ctx_lend(m->ctx);
        r->p.denoised(r->p.denoised_user, m->session);
        esa_ctx_take_back(m->ctx);
    }
    r->steps_peak = m->nn.peak + s->session.device_bytes + s->session.carry_bytes;
    m->nn.peak = esa_max64(m->nn.peak, peak);
    if (r->p.session.mode != ESA_SESSION_RECORD) { /* the decoder gets its memory */
        esa_session_free(m->session);
        m->session = NULL;
    }
    s->attention_seconds = s->session.select_seconds + s->session.attention_seconds;
    s->tokens = (int32_t)r->tokens;
    s->vae_tile = r->tile;
    esa_pair_end(m->dit);
    if (r->p.decode) ESA_TRY(esa_model_decode(m, &r->frames, r->x, r->latent, r->tile));
    ESA_TRY(m->nn.ops->settle(&m->nn));
    s->decode_seconds = esa_nn_now() - t2;
    return keep_results(m, r);
}

static void finish(esa_model *m, esa_run *r)
{
    esa_nn_free(&m->nn, r->x, r->x ? r->bytes : 0);
    for (int i = 0; i < 2; i++) esa_nn_free(&m->nn, r->v[i], r->v[i] ? r->bytes : 0);
    float *const cache[4] = { r->before, r->guided, r->kept[0], r->kept[1] };
    for (int i = 0; i < 4; i++) esa_nn_free(&m->nn, cache[i], cache[i] ? r->bytes : 0);
    esa_nn_free(&m->nn, r->figures, ESA_FIGURES_BYTES);
    esa_nn_free(&m->nn, r->noise, r->noise ? r->bytes : 0);
    if (r->draw) esa_mem_free(&m->ctx->mem, r->draw, 2 * r->bytes);
    esa_embeds_free(m, &r->embeds);
    esa_image_free(m->ctx, &r->image);
    if (m->dit) esa_pair_end(m->dit); /* after a failure it still has its activations */
    esa_session_free(m->session);
    m->session = NULL;
    esa_mask_file_free(r->masks);
    esa_work_plan_free(r->plan);
    esa_mem_free(&m->ctx->mem, r->sigma, 8 * (int64_t)r->p.steps);
    esa_mem_free(&m->ctx->mem, r->anchors, 4 * (int64_t)r->p.steps);
    esa_sched_free(r->sched);
    m->call = NULL;
}

/* The seconds of all kinds of work of a model so far. */
static void count_work(const esa_model *m, double *seconds)
{
    static const int32_t kind[ESA_NN_KINDS] = {
        [ESA_NN_GEMM] = ESA_WORK_PRODUCTS,   [ESA_NN_SELF] = ESA_WORK_ATTENTION,
        [ESA_NN_ATTENTION] = ESA_WORK_CROSS, [ESA_NN_CONV] = ESA_WORK_CONVOLUTIONS,
        [ESA_NN_OTHER] = ESA_WORK_OTHER,
    };
    memset(seconds, 0, ESA_WORK_KINDS * sizeof *seconds);
    for (int32_t k = 0; k < ESA_NN_KINDS; k++) seconds[kind[k]] += m->nn.seconds[k];
}

static void fill_stats(const esa_model *m, const esa_run *r, esa_generate_stats *stats)
{
    esa_model_info info = { .struct_size = sizeof info };
    int64_t held = 0, peak = 0, vae[3] = { 0, 0, 0 };
    esa_model_get_info(m, &info);
    /* The VAE's weights are in nn's memory already and must not count twice. */
    if (m->vae) esa_vae_memory(m->vae, &vae[0], &vae[1], &vae[2]);
    esa_ctx_memory(m->ctx, &held, &peak);
    *stats = r->stats;
    stats->struct_size = sizeof *stats;
    count_work(m, stats->work_seconds);
    for (int32_t k = 0; k < ESA_WORK_KINDS; k++) stats->work_seconds[k] -= r->work_before[k];
    /* The session knows its parts; what else it does (orders, means) is part of choosing. */
    stats->work_seconds[ESA_WORK_SELECTION] = fmax(0, stats->work_seconds[ESA_WORK_ATTENTION] -
                                                          r->stats.session.attention_seconds);
    stats->work_seconds[ESA_WORK_ATTENTION] = r->stats.session.attention_seconds;
    stats->frames = r->p.frames;
    stats->height = r->p.height;
    stats->width = r->p.width;
    stats->steps = r->p.steps;
    stats->seconds = esa_nn_now() - m->began;
    const int64_t used = esa_max64(m->nn.peak, r->steps_peak);
    stats->peak_bytes = peak + info.held_bytes - vae[1] + (r->frames ? r->frames->bytes : 0);
    if (m->nn.be->host_memory) {
        stats->peak_bytes += used;
        return;
    }
    stats->peak_bytes += r->stats.session.carry_host_bytes;
    esa_device_memory(m->ctx, NULL, &peak);
    stats->device_peak_bytes = used + peak;
}

static esa_status run_all(esa_model *m, esa_run *r, const esa_generate_params *params,
                          esa_generate_stats *stats)
{
    const esa_generate_params fallback = esa_generate_params_default();
    ESA_TRY(esa_run_settings(m, r, params ? params : &fallback));
    ESA_TRY(esa_run_inputs(m, &r->p));
    if (stats && stats->struct_size != sizeof *stats)
        return esa_fail(m->ctx, ESA_ERR_VERSION,
                        "esa_generate_stats has struct_size %u, this library expects %u",
                        stats->struct_size, (unsigned)sizeof *stats);
    /* Marks of a call that was broken off must not count as work of this one. */
    ESA_TRY(m->nn.ops->settle(&m->nn));
    count_work(m, r->work_before);
    m->call = &r->p;
    const esa_status status = run_stages(m, r);
    if (!status && stats) fill_stats(m, r, stats);
    return status;
}

static esa_status generate(esa_model *m, esa_frames **frames, const esa_generate_params *params,
                           esa_generate_stats *stats)
{
    esa_run r;
    memset(&r, 0, sizeof r);
    m->cancelled = 0;
    m->density = NAN;
    m->began = m->stage_began = esa_nn_now();
    m->stage = ESA_STAGE_TEXT;
    m->done = m->total = 0;
    m->nn.peak = m->nn.held;
    const esa_status status = run_all(m, &r, params, stats);
    finish(m, &r);
    *frames = r.frames;
    return esa_frames_drop(status, frames);
}

esa_status esa_generate(esa_model *model, esa_frames **frames, const esa_generate_params *params,
                        esa_generate_stats *stats)
{
    if (frames) *frames = NULL;
    if (!model) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_engine_enter(model->ctx));
    esa_status status = frames ? esa_model_check_idle(model)
                               : esa_fail(model->ctx, ESA_ERR_ARGUMENT, "frames is NULL");
    if (!status) status = generate(model, frames, params, stats);
    esa_ctx_leave(model->ctx);
    return status;
}

/* Blocks, order, grid and text as the selection will use them; scale and the rest stay as they were
 * given. */
static esa_status resolve_selection(const esa_model *m, esa_run *r)
{
    esa_select_params *s = &r->p.session.select, given = *s, resolved;
    esa_run_layout(m, r, &given.layout);
    ESA_TRY(
        esa_check_select(m->ctx, &resolved, &given, r->tokens, r->tokens, m->facts.info.head_dim));
    s->block_q = resolved.block_q;
    s->block_k = resolved.block_k;
    s->layout = given.layout;
    s->layout.order = resolved.layout.order;
    return ESA_OK;
}

static esa_status resolve(esa_model *m, esa_generate_params *params, int64_t *tokens)
{
    esa_run r;
    memset(&r, 0, sizeof r);
    if (!params) return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "params is NULL");
    ESA_TRY(esa_run_settings(m, &r, params));
    const int32_t mode = r.p.session.mode;
    if (mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_RECORD || mode == ESA_SESSION_PROBE)
        ESA_TRY(resolve_selection(m, &r));
    if (mode != ESA_SESSION_DENSE) r.p.session.branches = r.branches;
    *params = r.p;
    if (tokens) *tokens = r.tokens;
    return ESA_OK;
}

esa_status esa_generate_resolve(esa_model *model, esa_generate_params *params, int64_t *tokens)
{
    if (!model) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_engine_enter(model->ctx));
    const esa_status status = resolve(model, params, tokens);
    esa_ctx_leave(model->ctx);
    return status;
}
