/* pipeline.c - esa_generate: text, noise, denoising loop with guidance, decoder, frames.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Follows diffusers' WanPipeline in f32: each step computes v = v_negative + guidance (v_prompt -
 * v_negative) and calls the scheduler. The prompt is branch 0 of the session, the negative prompt
 * branch 1. */
#include "ctx/engine_door.h"
#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "attn/attn.h"
#include "media/frames.h"
#include "model/random.h"
#include "model/sched/sched.h"
#include "model/tensor_file.h"
#include "nn/ops.h"
#include "session/session.h"
#include "workplan/work_plan.h"

#define MAX_STEPS 10000

esa_generate_params esa_generate_params_default(void)
{
    esa_generate_params p = { .struct_size = sizeof p, .decode = 1, .guidance = NAN };
    p.session = esa_session_params_default();
    p.session.mode = ESA_SESSION_DENSE;
    return p;
}

/* The state of one run; finish() frees it. */
typedef struct run {
    esa_generate_params p; /* sizes filled in */
    int32_t latent[3];     /* t, h, w */
    int32_t branches;
    int64_t count;  /* elements of the latents */
    int64_t tokens; /* tokens of a self-attention call */
    /* on the device: [C][T][H][W] sample, velocities of the branches; sums over a step */
    float *x, *v[2];
    esa_step_figures *figures;
    int64_t bytes; /* size of x and of each v */
    esa_embeds embeds;
    esa_mask_file *masks;
    esa_work_plan *plan;
    double *sigma; /* [steps] noise levels, for the plan */
    esa_sched *sched;
    esa_frames *frames;
    esa_generate_stats stats;
    double work_before[ESA_WORK_KINDS]; /* seconds of the model before this call */
} run;

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

/* ---------------------------------------------------------------- settings */

static esa_status check_sizes(esa_model *m, run *r)
{
    esa_generate_params *p = &r->p;
    const esa_model_info *i = &m->info;
    if (p->frames == 0) p->frames = i->frames;
    if (p->height == 0) p->height = i->height;
    if (p->width == 0) p->width = i->width;
    if (p->steps == 0) p->steps = i->steps;
    if (isnan(p->guidance)) p->guidance = i->guidance;
    if (p->frames < 1 || p->frames > ESA_FRAMES_MAX_COUNT)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "frames is %d, expected 1 .. %d", p->frames,
                        ESA_FRAMES_MAX_COUNT);
    if (p->steps < 1 || p->steps > MAX_STEPS)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "steps is %d, expected 1 .. %d", p->steps,
                        MAX_STEPS);
    if (!isfinite(p->guidance) || fabs(p->guidance) > 1000)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "guidance is %g, expected -1000 .. 1000",
                        p->guidance);
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
    const int32_t tile_unit = 4 * i->factor[1]; /* the decoder's rule, checked before the work */
    if (p->decode && (p->vae_tile < 0 || p->vae_tile % tile_unit))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "vae_tile is %d pixels, expected 0 or a multiple of %d", p->vae_tile,
                        tile_unit);
    r->latent[0] = (p->frames - 1) / i->factor[0] + 1;
    p->frames = (r->latent[0] - 1) * i->factor[0] + 1;
    r->branches = p->guidance > 1 ? 2 : 1;
    r->count = (int64_t)i->latent_channels * r->latent[0] * r->latent[1] * r->latent[2];
    r->tokens = (int64_t)(r->latent[0] / i->patch[0]) * (r->latent[1] / i->patch[1]) *
                (r->latent[2] / i->patch[2]);
    return ESA_OK;
}

static esa_status check_settings(esa_model *m, run *r, const esa_generate_params *params)
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
                        "max_text_tokens is %d, expected 0 (512) .. 65536", p->max_text_tokens);
    if (p->scheduler < ESA_SCHEDULER_MODEL || p->scheduler > ESA_SCHEDULER_EULER)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "scheduler is %d, expected 0 .. %d", p->scheduler,
                        ESA_SCHEDULER_EULER);
    if (!(p->flow_shift >= 0 && p->flow_shift <= 1000))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "flow_shift is %g, expected 0 .. 1000",
                        p->flow_shift);
    return check_sizes(m, r);
}

static esa_status check_inputs(const esa_model *m, const esa_generate_params *p)
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

/* Reports wrong settings of the selection before the first step, not at the first sparse call after
 * the warm-up. */
static esa_status check_selection(esa_model *m, const run *r, const esa_session_params *s)
{
    const esa_model_info *i = &m->info;
    esa_shapes shapes = esa_shapes_default();
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = i->heads;
    shapes.Nq = shapes.Nk = r->tokens;
    shapes.D = i->head_dim;
    esa_plan *plan = NULL;
    const esa_status status = esa_plan_make(m->ctx, &plan, &shapes, &s->select, &s->attention);
    esa_plan_free(plan);
    return status;
}

/* Opens the work plan, turns a quality into a work, and notes the noise levels of the steps. */
static esa_status prepare_work(esa_model *m, run *r, esa_session_params *s)
{
    esa_tensors *tensors;
    if (r->p.plan) {
        ESA_TRY(esa_st_open(m->ctx, &tensors, r->p.plan));
        ESA_TRY(esa_work_plan_read(m->ctx, &r->plan, tensors));
    }
    if (r->p.quality) ESA_TRY(esa_work_plan_find(m->ctx, r->plan, r->p.quality, &s->work));
    r->sigma = esa_mem_alloc(&m->ctx->mem, 8 * (int64_t)r->p.steps);
    if (!r->sigma) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the noise levels");
    for (int32_t i = 0; i < r->p.steps; i++) r->sigma[i] = esa_sched_sigma(r->sched, i);
    s->sigma = r->sigma;
    s->plan = r->plan;
    return ESA_OK;
}

static esa_status make_session(esa_model *m, run *r)
{
    esa_session_params s = r->p.session;
    int32_t selector = s.select.selector, mode = s.select.mode;
    if (s.mode == ESA_SESSION_CACHED) {
        /* Tokens must be in the order that the masks were made for. */
        esa_mask_file_info info = { .struct_size = sizeof info };
        esa_tensors *tensors;
        ESA_TRY(esa_st_open(m->ctx, &tensors, r->p.masks));
        ESA_TRY(esa_mask_file_make(m->ctx, &r->masks, tensors));
        ESA_TRY(esa_mask_file_get_info(r->masks, &info));
        if (s.select.layout.order == ESA_ORDER_DEFAULT) s.select.layout = info.layout;
        selector = info.selector;
        mode = info.mode;
        s.masks = r->masks;
    }
    ESA_TRY(esa_wan_dit_begin(m->dit, r->latent, &s.select.layout, selector, mode, r->branches));
    if (s.mode == ESA_SESSION_ONLINE || s.mode == ESA_SESSION_RECORD || s.mode == ESA_SESSION_PROBE)
        ESA_TRY(check_selection(m, r, &s));
    ESA_TRY(prepare_work(m, r, &s));
    s.layers = m->wan.layers;
    s.steps = r->p.steps;
    s.branches = r->branches;
    s.model = m->info.name;
    s.config_hash = m->info.config_hash;
    ESA_TRY(esa_session_make(m->ctx, &m->session, &s));
    if (s.mode == ESA_SESSION_RECORD && access(r->p.record, F_OK) == 0)
        ESA_TRY(esa_session_resume(m->session, r->p.record));
    return esa_session_start(m->session);
}

/* Allocates the decoder's memory once and frees it again, so that a lack of memory is reported
 * before the first step and not after the last. */
static esa_status check_memory(esa_model *m, const run *r)
{
    if (!r->p.decode) return ESA_OK;
    const int64_t bytes = esa_wan_vae_bytes(m->vae, r->latent, r->p.vae_tile);
    void *probe = NULL;
    if (bytes < INT64_MAX && !m->nn.be->alloc(m->ctx, &probe, bytes)) {
        m->nn.be->release(m->ctx, probe, bytes);
        return ESA_OK;
    }
    const int32_t tile = 64 * m->info.factor[1] / 2;
    const double least = (double)esa_wan_vae_bytes(m->vae, r->latent, tile);
    if (r->p.vae_tile == 0 && least < 0.5 * (double)bytes)
        return esa_fail(m->ctx, ESA_ERR_MEMORY,
                        "out of memory: decoding %d x %d pixels takes %.1f GB; in VAE tiles of %d "
                        "pixels it takes %.1f GB",
                        r->p.width, r->p.height, 1e-9 * (double)bytes, tile, 1e-9 * least);
    return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory: decoding %d x %d pixels takes %.1f GB",
                    r->p.width, r->p.height, 1e-9 * (double)bytes);
}

static esa_status make_sched(esa_model *m, run *r)
{
    static const int32_t kinds[] = { 0, ESA_SCHED_UNIPC, ESA_SCHED_UNIPC_036, ESA_SCHED_EULER };
    esa_sched_config c = m->sched;
    if (r->p.scheduler != ESA_SCHEDULER_MODEL) c.kind = kinds[r->p.scheduler];
    if (r->p.flow_shift > 0) c.shift = r->p.flow_shift;
    return esa_sched_create(&m->nn, &r->sched, &c, r->p.steps, r->count);
}

#define FIGURES_BYTES ((1 + ESA_STEP_PARTS) * (int64_t)sizeof(esa_step_figures))

/* Noise in host memory goes to the device. */
static esa_status make_noise(esa_model *m, const run *r)
{
    const esa_view x = esa_view_of(r->x, ESA_DTYPE_F32, m->nn.be->device, 1, r->count);
    float *noise = esa_mem_alloc(&m->ctx->mem, r->bytes);
    if (!noise) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the noise");
    esa_torch_rng rng;
    esa_torch_seed(&rng, r->p.seed);
    esa_torch_randn(&rng, noise, r->count);
    const esa_status status = esa_nn_write(&m->nn, &x, noise);
    esa_mem_free(&m->ctx->mem, noise, r->bytes);
    return status;
}

static esa_status make_latents(esa_model *m, run *r)
{
    r->bytes = r->count * 4;
    ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->x, r->bytes, "the latents"));
    for (int32_t i = 0; i < r->branches; i++)
        ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->v[i], r->bytes, "the velocities"));
    ESA_TRY(esa_nn_alloc(&m->nn, (void **)&r->figures, FIGURES_BYTES, "the figures of a step"));
    if (!r->p.latents) return make_noise(m, r);
    const int64_t expected[4] = { m->info.latent_channels, r->latent[0], r->latent[1],
                                  r->latent[2] };
    esa_loaded t;
    ESA_TRY(esa_loaded_read(m->ctx, &t, r->p.latents, "latents", 4, expected));
    const esa_status status = esa_nn_upload(&m->nn, r->x, t.data, r->bytes);
    esa_loaded_free(m->ctx, &t);
    return status;
}

/* ---------------------------------------------------------------- denoising */

static void note_density(esa_model *m)
{
    esa_session_stats stats = { .struct_size = sizeof stats };
    if (!esa_session_sum(m->session, &stats, -1, -1)) m->density = stats.density;
}

/* The end of a step, where the host waits for the device. Without the check, damaged weights would
 * end in a black video hours later. */
static esa_status end_step(esa_model *m, const run *r, int32_t step)
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

static esa_status denoise_step(esa_model *m, run *r, int32_t i)
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

static esa_status denoise(esa_model *m, run *r)
{
    ESA_TRY(esa_model_progress(m, ESA_STAGE_DENOISE, 0, r->p.steps));
    for (int32_t b = 0; b < r->branches; b++)
        ESA_TRY(esa_wan_dit_text(m->dit, b, r->embeds.data[b], r->embeds.rows[b]));
    for (int32_t i = 0; i < r->p.steps; i++) ESA_TRY(denoise_step(m, r, i));
    return ESA_OK;
}

/* ---------------------------------------------------------------- the call */

static esa_status save_latents(esa_model *m, const run *r)
{
    float *latents = esa_mem_alloc(&m->ctx->mem, r->bytes);
    if (!latents) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the latents");
    const esa_to_save save = {
        "latents", latents, { m->info.latent_channels, r->latent[0], r->latent[1], r->latent[2] }
    };
    esa_status status = esa_nn_download(&m->nn, latents, r->x, r->bytes);
    if (!status) status = esa_loaded_write(m->ctx, r->p.save_latents, &save, 1, 4);
    esa_mem_free(&m->ctx->mem, latents, r->bytes);
    return status;
}

/* Writes files after everything else: a call that fails or is cancelled writes nothing. */
static esa_status keep_results(esa_model *m, run *r)
{
    if (r->p.save_embeds) ESA_TRY(esa_embeds_save(m, &r->embeds, r->p.save_embeds));
    if (r->p.save_latents) ESA_TRY(save_latents(m, r));
    if (r->p.session.mode == ESA_SESSION_RECORD) ESA_TRY(esa_session_save(m->session, r->p.record));
    return ESA_OK;
}

static esa_status run_stages(esa_model *m, run *r)
{
    esa_generate_stats *s = &r->stats;
    ESA_TRY(make_sched(m, r));
    ESA_TRY(make_session(m, r));
    ESA_TRY(check_memory(m, r)); /* the transformer's activations are allocated by now */
    ESA_TRY(make_latents(m, r));
    const double t0 = esa_nn_now();
    ESA_TRY(esa_embeds_get(m, &r->embeds, &r->p, r->branches));
    const double t1 = esa_nn_now(), gemm = m->nn.seconds[ESA_NN_GEMM];
    ESA_TRY(denoise(m, r));
    const double t2 = esa_nn_now();
    s->text_seconds = t1 - t0;
    s->denoise_seconds = t2 - t1;
    s->gemm_seconds = m->nn.seconds[ESA_NN_GEMM] - gemm;
    s->session.struct_size = sizeof s->session;
    ESA_TRY(esa_session_sum(m->session, &s->session, -1, -1));
    if (r->p.denoised) { /* it reads statistics through public calls, which take the guard */
        esa_ctx_lend(m->ctx);
        r->p.denoised(r->p.denoised_user, m->session);
        esa_ctx_take_back(m->ctx);
    }
    s->attention_seconds = s->session.select_seconds + s->session.attention_seconds;
    s->tokens = (int32_t)r->tokens;
    if (r->p.decode) ESA_TRY(esa_model_decode(m, &r->frames, r->x, r->latent, r->p.vae_tile));
    ESA_TRY(m->nn.ops->settle(&m->nn));
    s->decode_seconds = esa_nn_now() - t2;
    return keep_results(m, r);
}

static void finish(esa_model *m, run *r)
{
    esa_nn_free(&m->nn, r->x, r->x ? r->bytes : 0);
    for (int i = 0; i < 2; i++) esa_nn_free(&m->nn, r->v[i], r->v[i] ? r->bytes : 0);
    esa_nn_free(&m->nn, r->figures, FIGURES_BYTES);
    esa_embeds_free(m, &r->embeds);
    esa_session_free(m->session);
    m->session = NULL;
    esa_mask_file_free(r->masks);
    esa_work_plan_free(r->plan);
    esa_mem_free(&m->ctx->mem, r->sigma, 8 * (int64_t)r->p.steps);
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

static void fill_stats(const esa_model *m, const run *r, esa_generate_stats *stats)
{
    esa_model_info info = { .struct_size = sizeof info };
    int64_t held = 0, peak = 0, vae[3] = { 0, 0, 0 };
    esa_model_get_info(m, &info);
    /* The VAE's weights are in nn's memory already and must not count twice. */
    if (m->vae) esa_wan_vae_memory(m->vae, &vae[0], &vae[1], &vae[2]);
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
    stats->peak_bytes = m->nn.peak + peak + info.held_bytes - vae[1] +
                        (r->frames ? r->frames->bytes : 0);
    if (m->nn.be->host_memory) return;
    stats->peak_bytes -= m->nn.peak;
    esa_device_memory(m->ctx, NULL, &peak);
    stats->device_peak_bytes = m->nn.peak + peak;
}

static esa_status run_all(esa_model *m, run *r, const esa_generate_params *params,
                          esa_generate_stats *stats)
{
    const esa_generate_params fallback = esa_generate_params_default();
    ESA_TRY(check_settings(m, r, params ? params : &fallback));
    ESA_TRY(check_inputs(m, &r->p));
    if (stats && stats->struct_size != sizeof *stats)
        return esa_fail(m->ctx, ESA_ERR_VERSION,
                        "esa_generate_stats has struct_size %u, this library expects %u",
                        stats->struct_size, (unsigned)sizeof *stats);
    m->call = &r->p;
    esa_nn_enter(&m->nn);
    const esa_status status = run_stages(m, r);
    esa_nn_leave(&m->nn);
    if (!status && stats) fill_stats(m, r, stats);
    return status;
}

static esa_status generate(esa_model *m, esa_frames **frames, const esa_generate_params *params,
                           esa_generate_stats *stats)
{
    run r;
    memset(&r, 0, sizeof r);
    m->cancelled = 0;
    m->density = NAN;
    m->began = m->stage_began = esa_nn_now();
    m->stage = ESA_STAGE_TEXT;
    m->done = m->total = 0;
    m->nn.peak = m->nn.held;
    count_work(m, r.work_before);
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

/* Blocks and order as the selection will use them; scale and the rest stay as they were given. */
static esa_status resolve_selection(const esa_model *m, run *r)
{
    esa_select_params *s = &r->p.session.select, given = *s, resolved;
    for (int d = 0; d < 3; d++)
        given.layout.grid_q[d] = given.layout.grid_k[d] = r->latent[d] / m->info.patch[d];
    ESA_TRY(esa_check_select(m->ctx, &resolved, &given, r->tokens, r->tokens, m->info.head_dim));
    s->block_q = resolved.block_q;
    s->block_k = resolved.block_k;
    s->layout.order = resolved.layout.order;
    return ESA_OK;
}

static esa_status resolve(esa_model *m, esa_generate_params *params, int64_t *tokens)
{
    run r;
    memset(&r, 0, sizeof r);
    if (!params) return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "params is NULL");
    ESA_TRY(check_settings(m, &r, params));
    const int32_t mode = r.p.session.mode;
    if (mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_RECORD || mode == ESA_SESSION_PROBE)
        ESA_TRY(resolve_selection(m, &r));
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
