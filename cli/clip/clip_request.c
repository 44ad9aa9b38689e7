/* clip_request.c - the settings of a clip: defaults, option rows, and what will run.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRAIN_STEPS 1000.0 /* timesteps of the largest noise level, in every family */

/* ---------------------------------------------------------------- settings */

static const struct {
    int mode, selector;
} methods[] = {
    /* METHOD_* */
    { ESA_SESSION_DENSE, ESA_SELECT_ENTROPY },  { ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY },
    { ESA_SESSION_ONLINE, ESA_SELECT_RF_V2 },   { ESA_SESSION_ONLINE, ESA_SELECT_ADA_BSA },
    { ESA_SESSION_CACHED, ESA_SELECT_ENTROPY }, { ESA_SESSION_ONLINE, ESA_SELECT_ERROR },
    { ESA_SESSION_RECORD, ESA_SELECT_ENTROPY }, { ESA_SESSION_PROBE, ESA_SELECT_ERROR },
    { ESA_SESSION_RECORD, ESA_SELECT_ERROR },
};

int clip_method(const char *names, int64_t i)
{
    char name[32], other[32];
    int method = METHOD_DENSE;
    cli_name(name, names, (int)i);
    while (strcmp(cli_name(other, METHODS, method), name) != 0) method++;
    return method;
}

int clip_method_has(int method, int trait)
{
    return methods[method].mode == ESA_SESSION_ONLINE &&
           cli_selector_has(methods[method].selector, trait);
}

esa_session_params clip_recommended(const clip_request *r)
{
    return esa_session_params_recommended(methods[r->method].mode, methods[r->method].selector,
                                          r->tokens);
}

clip_request clip_request_default(void)
{
    clip_request r = { .method = METHOD_ENTROPY,
                       .order = ESA_ORDER_DEFAULT,
                       .tail = -1,
                       .exact_rows = -1,
                       .warmup = NAN,
                       .dense_first_layer = -1,
                       .refresh_every = CLIP_RECOMMENDED,
                       .order_every = CLIP_RECOMMENDED,
                       .share_branches = -1,
                       .preset = -1 };
    /* as esa_generate_params_default, which cannot be asked before the engine is open */
    r.p = (esa_generate_params){
        .struct_size = sizeof r.p, .decode = 1, .guidance = NAN, .guidance_2 = NAN
    };
    r.p.session = clip_recommended(&r);
    return r;
}

void clip_use_defaults(clip_request *r, int method, int budget)
{
    if (!method) r->method = budget ? METHOD_ENTROPY : METHOD_ERROR;
    if (clip_method_has(r->method, ESA_TRAIT_SPENDS) && !budget && !clip_wants_work(r))
        r->preset = ESA_PRESET_BALANCED;
}

int clip_choose_method(clip_request *r, int method, int budget, const char *what)
{
    if (clip_wants_work(r) && budget)
        return cli_usage("%s: --budget and --work, --quality or --preset say the same thing; give "
                         "one",
                         what);
    if (!method && r->p.masks)
        r->method = METHOD_CACHED;
    else
        clip_use_defaults(r, method, budget);
    return CLI_OK;
}

int clip_request_agrees(const clip_request *r, int compare, const char *what)
{
    if (r->p.quality > 0 && !r->p.plan)
        return cli_usage("%s: --quality is the PSNR that a plan shall reach and needs --plan FILE "
                         "(made by `esa calibrate --plan`); the quality of MP4 is --mp4-quality",
                         what);
    if (r->method == METHOD_CACHED && !r->p.masks)
        return cli_usage("%s: --method cached needs --masks FILE (made by `esa calibrate`)", what);
    if (r->method != METHOD_CACHED && r->p.masks)
        return cli_usage("%s: --masks needs --method cached", what);
    if (r->score_groups && !clip_method_has(r->method, ESA_TRAIT_WEIGHS_TAIL))
        return cli_usage("%s: " CLI_SCORE_GROUPS " needs --method error", what);
    if (compare && r->method == METHOD_DENSE)
        return cli_usage("%s: --compare dense needs another --method to compare", what);
    return CLI_OK;
}

clip_request clip_dense(const clip_request *request)
{
    clip_request r = *request;
    r.method = METHOD_DENSE;
    r.cache = r.carry = NULL;
    r.eight = 0;
    r.steps16_first = r.steps16_last = r.layers16.count = 0;
    return r;
}

int clip_wants_work(const clip_request *r)
{
    return r->p.session.work > 0 || r->p.quality > 0 || r->p.plan || r->preset >= 0;
}

/* The threshold of the step cache; 0: off, NaN: it cannot be read. */
static double cache_of(const clip_request *r)
{
    char *end;
    if (!r->cache || strcmp(r->cache, "off") == 0) return 0;
    if (strcmp(r->cache, "auto") == 0)
        return esa_preset_cache(r->preset >= 0 ? r->preset : ESA_PRESET_BALANCED);
    const double threshold = strtod(r->cache, &end);
    return *r->cache && !*end && threshold >= 1e-3 && threshold <= 100 ? threshold : (double)NAN;
}

/* 1 if calls of the method skip blocks, and so leave something out that can be carried. */
static int can_carry(const clip_request *r)
{
    const int32_t mode = clip_recommended(r).mode;
    return mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_CACHED || mode == ESA_SESSION_PROBE;
}

/* 1 if the request says when masks or orders are made, which anchors would decide otherwise. */
static int has_schedule(const clip_request *r)
{
    return r->refresh_every != CLIP_RECOMMENDED || r->order_every != CLIP_RECOMMENDED;
}

clip_anchors clip_anchors_of(const clip_request *r)
{
    clip_anchors a = { .carry = ESA_CARRY_OFF };
    if (!can_carry(r)) return a;
    if (r->carry)
        clip_carry_parse(&a, r->carry, ""); /* it was checked */
    else if (!has_schedule(r))
        a.carry = clip_recommended(r).carry;
    return a;
}

int32_t clip_anchor_count(const clip_request *r)
{
    const clip_anchors a = clip_anchors_of(r);
    return a.count ? a.count : esa_carry_anchors(NULL, a.carry, r->p.steps, r->p.session.branches);
}

static int check_carry(const clip_request *r, const char *what)
{
    clip_anchors a = { .carry = ESA_CARRY_OFF };
    if (r->carry) {
        const int status = clip_carry_parse(&a, r->carry, what);
        if (status) return status;
    }
    if (a.carry && !can_carry(r))
        return cli_usage("%s: --carry goes with methods that skip blocks, not with %s", what,
                         r->method == METHOD_DENSE ? "dense" : "a recording");
    a = clip_anchors_of(r);
    if (!a.carry)
        return r->carry_format ? cli_usage("%s: --carry-format needs --carry", what) : CLI_OK;
    if (has_schedule(r))
        return cli_usage("%s: with --carry masks and orders are made at the anchors: leave out "
                         "--refresh and --order-every",
                         what);
    const int32_t steps = r->p.steps ? r->p.steps
                                     : r->sigmas.count + r->timesteps.count; /* 0: not known yet */
    return steps ? clip_carry_fits(&a, steps, what) : CLI_OK;
}

int clip_request_check(const clip_request *r, const char *what)
{
    int32_t q, k;
    char name[32];
    if (r->window.count && r->order != ESA_ORDER_TILE3D)
        return cli_usage("%s: --window belongs to --order tile3d", what);
    const int mode = methods[r->method].mode, online = mode == ESA_SESSION_ONLINE;
    if (online && r->order == ESA_ORDER_ADAPTIVE && !clip_method_has(r->method, ESA_TRAIT_ADAPTIVE))
        return cli_usage("%s: --order adaptive goes with --method error, not %s", what,
                         cli_name(name, METHODS, r->method));
    if (online && r->tail == ESA_TAIL_CENTROID && !clip_method_has(r->method, ESA_TRAIT_CENTROID))
        return cli_usage("%s: --method %s takes --tail none, pooled or levels, not centroid", what,
                         cli_name(name, METHODS, r->method));
    if (r->sigmas.count && r->timesteps.count)
        return cli_usage("%s: --sigmas and --timesteps say the same thing; give one", what);
    const int amounts = (r->p.session.work > 0) + (r->p.quality > 0) + (r->preset >= 0);
    if (amounts > 1)
        return cli_usage("%s: --work, --quality and --preset say the same thing; give one", what);
    if (r->p.plan && !amounts)
        return cli_usage("%s: --plan needs --work X, --quality Y or --preset NAME", what);
    if (r->p.quality > 0 && !r->p.plan)
        return cli_usage("%s: --quality needs --plan FILE (made by `esa calibrate --plan`)", what);
    const int stored = r->method == METHOD_CACHED && !r->p.quality && !r->p.plan;
    if (amounts && !online && mode != ESA_SESSION_PROBE && !stored)
        return cli_usage("%s: --work, --quality and --preset go with methods that choose blocks "
                         "while they run: error, entropy, rf_v2, ada_bsa; --work and --preset also "
                         "go with cached",
                         what);
    if (!r->eight && (r->steps16_first || r->steps16_last || r->layers16.count))
        return cli_usage("%s: --steps16-first, --steps16-last and --layers16 say what stays in 16 "
                         "bits: they need --precision 8",
                         what);
    if (r->score_groups && cli_groups_parse(r->score_groups, &q, &k)) return CLI_USAGE;
    if (check_carry(r, what)) return CLI_USAGE;
    if (isnan(cache_of(r)))
        return cli_usage("%s: --cache is '%s', expected off, auto or a number from 0.001 to 100",
                         what, r->cache);
    return r->block ? cli_block_parse(r->block, &q, &k) : CLI_OK;
}

int clip_order(const clip_request *r)
{
    /* the dense clip of a request with adaptive orders: dense attention needs no order */
    const int any = r->order == ESA_ORDER_DEFAULT ||
                    (r->order == ESA_ORDER_ADAPTIVE && r->method == METHOD_DENSE);
    return any ? clip_recommended(r).select.layout.order : r->order;
}

static int32_t pick(int32_t chosen, int32_t recommended_one)
{
    return chosen < 0 ? recommended_one : chosen;
}

static int32_t pick_schedule(int32_t chosen, int32_t recommended_one)
{
    return chosen == CLIP_RECOMMENDED ? recommended_one : chosen;
}

/* Anchors, and the work of a preset, which depends on them. */
static void set_carry(clip_request *r)
{
    esa_session_params *s = &r->p.session;
    r->anchors = clip_anchors_of(r);
    s->carry = r->anchors.carry;
    s->carry_format = r->carry_format;
    s->anchor_count = r->anchors.count;
    s->anchors = r->anchors.count ? r->anchors.step : NULL;
    if (r->preset >= 0 && r->p.steps > 0)
        s->work = esa_preset_work_for(r->preset, r->p.steps, s->carry, s->branches);
}

/* The recommended settings of the method, and what the user chose instead. */
static void set_session(clip_request *r)
{
    const esa_session_params best = clip_recommended(r);
    esa_session_params *s = &r->p.session;
    r->p.cache = cache_of(r);
    s->mode = best.mode;
    s->attention.tail = best.attention.tail == ESA_TAIL_NONE || r->tail < 0 ? best.attention.tail
                                                                            : r->tail;
    s->attention.exact_rows = pick(r->exact_rows, best.attention.exact_rows);
    s->attention.precision = r->eight ? 8 : 16;
    s->steps16_first = r->steps16_first;
    s->steps16_last = r->steps16_last;
    s->select.selector = best.select.selector;
    s->select.tail = s->mode == ESA_SESSION_RECORD ? best.select.tail : s->attention.tail;
    s->warmup_frac = isnan(r->warmup) ? best.warmup_frac : r->warmup;
    s->dense_first_layer = pick(r->dense_first_layer, best.dense_first_layer);
    s->refresh_every = pick_schedule(r->refresh_every, best.refresh_every);
    s->order_every = pick_schedule(r->order_every, best.order_every);
    s->share_branches = pick(r->share_branches, best.share_branches);
    set_carry(r);
    s->work_or_least = r->preset >= 0;   /* a preset suits any length */
    if (s->mode != ESA_SESSION_ONLINE) { /* a request for another method, such as the dense clip */
        r->p.quality = 0;
        r->p.plan = NULL;
    }
    if (s->mode != ESA_SESSION_ONLINE && s->mode != ESA_SESSION_CACHED) {
        s->work = 0;
        r->preset = -1;
    }
    s->select.layout.order = clip_order(r);
    cli_list_copy(s->select.layout.window, &r->window);
    s->select.block_q = best.select.block_q;
    s->select.block_k = best.select.block_k;
    if (r->block) cli_block_parse(r->block, &s->select.block_q, &s->select.block_k);
    if (r->score_groups) cli_groups_parse(r->score_groups, &s->select.group_q, &s->select.group_k);
}

void clip_noise_json(cli_json *json, const clip_request *r)
{
    const esa_generate_params *p = &r->p;
    char hash[32];
    cli_json_real(json, "guidance_2", p->guidance_2);
    if (p->dynamic_guidance)
        cli_json_int(json, "dynamic_guidance", p->dynamic_guidance);
    else
        cli_json_text(json, "dynamic_guidance", NULL);
    if (p->sigma_count)
        cli_json_reals(json, "sigmas", p->sigmas, p->sigma_count);
    else
        cli_json_text(json, "sigmas", NULL);
    cli_json_text(json, "image", p->image);
    cli_json_text(json, "image_hash", p->image && cli_file_hash(hash, p->image) == 0 ? hash : NULL);
}

int clip_resolve(clip_maker *m, clip_request *r)
{
    esa_status status = ESA_OK;
    r->tokens = 0;
    if (r->timesteps.count) r->sigmas = r->timesteps;
    for (int i = 0; i < r->timesteps.count; i++) r->sigmas.real[i] /= TRAIN_STEPS;
    r->p.sigmas = r->sigmas.count ? r->sigmas.real : NULL;
    r->p.sigma_count = r->sigmas.count;
    /* the recommended blocks need tokens, and presets the numbers of steps and branches */
    for (int pass = 0; pass < 2 && !status; pass++) {
        set_session(r);
        status = m->video.generate_resolve(m->model, &r->p, &r->tokens);
    }
    if (status) return cli_fail_esa(m->ctx, status, m->what);
    const int32_t least = m->lpips ? m->video.lpips_least(m->lpips) : 0;
    if (r->p.height < least || r->p.width < least)
        return cli_fail("%s: LPIPS with %s needs videos of at least %d x %d pixels, these have "
                        "%d x %d",
                        m->what, m->video.lpips_net(m->lpips), least, least, r->p.width,
                        r->p.height);
    return clip_carry_fits(&r->anchors, r->p.steps, m->what);
}

/* ---------------------------------------------------------------- options */

static int add(cli_option *table, int used, const cli_option *rows)
{
    for (; rows->name && used < CLIP_MAX_OPTIONS - 1; rows++) table[used++] = *rows;
    memset(&table[used], 0, sizeof table[used]);
    return used;
}

/* The orders that the library recommends: "token order (hilbert; rf_v2: tile; error: adaptive)", or
 * for `esa calibrate`, which records in one order, "token order (hilbert; --plan: adaptive)" */
static const char *order_help(int records)
{
    static char text[128];
    char usual[32], tiled[32], errors[32];
    const clip_request any = { .method = records ? METHOD_RECORD_ERROR : METHOD_ENTROPY,
                               .order = ESA_ORDER_DEFAULT },
                       rf_v2 = { .method = METHOD_RF_V2, .order = ESA_ORDER_DEFAULT },
                       error = { .method = METHOD_ERROR, .order = ESA_ORDER_DEFAULT };
    cli_name(usual, CLI_ORDERS, clip_order(&any));
    cli_name(tiled, CLI_ORDERS, clip_order(&rf_v2));
    cli_name(errors, CLI_ORDERS, clip_order(&error));
    if (records)
        snprintf(text, sizeof text, "token order (%s; --plan: %s)", usual, errors);
    else
        snprintf(text, sizeof text, "token order (%s; rf_v2: %s; error: %s)", usual, tiled, errors);
    return text;
}

/* "instead of --work: 0.3, 0.2 or 0.14 in 50 steps, ...", as the library says */
static const char *preset_help(void)
{
    static char text[160];
    const cli_list with = cli_preset_works(50, ESA_CARRY_AUTO),
                   without = cli_preset_works(1, ESA_CARRY_OFF);
    snprintf(
        text, sizeof text,
        "instead of --work: %.2g, %.2g or %.2g in 50 steps, more in fewer; without carry %.2f, "
        "%.2f or %.2f (not given)",
        with.real[0], with.real[1], with.real[2], without.real[0], without.real[1],
        without.real[2]);
    return text;
}

/* The default is that of the library. */
static const char *carry_help(void)
{
    static char text[256];
    char name[2][CLIP_CARRY_TEXT];
    static const int methods[] = { METHOD_ENTROPY, METHOD_ERROR };
    for (int i = 0; i < 2; i++) {
        clip_request r = clip_request_default();
        r.method = methods[i];
        const clip_anchors anchors = clip_anchors_of(&r);
        clip_carry_name(name[i], &anchors);
    }
    snprintf(text, sizeof text,
             "keep what sparse calls leave out, measured by dense calls at a few steps, the "
             "anchors, and add it at later steps; N: so many anchors (%.8s; error: %.8s, but off "
             "with --refresh or --order-every)",
             name[0], name[1]);
    return text;
}

const cli_option *clip_options(cli_option table[CLIP_MAX_OPTIONS], const cli_option *own,
                               int groups, clip_request *r)
{
    esa_generate_params *p = &r->p;
    esa_session_params *s = &p->session;
    const cli_option end = { 0 };
    const int records = !(groups & CLIP_OPTIONS_CACHED); /* `esa calibrate` uses no masks */
    const cli_option size[] = {
        { "--frames", CLI_INT32, &p->frames, "N", 1, 100000, 0,
          "number of frames, rounded down to what the model makes (the model's own)" },
        { "--height", CLI_INT32, &p->height, "N", 1, 16384, 0, "in pixels (the model's own)" },
        { "--width", CLI_INT32, &p->width, "N", 1, 16384, 0, "in pixels (the model's own)" },
        { "--steps", CLI_INT32, &p->steps, "N", 1, 10000, 0, "denoising steps (the model's own)" },
        end,
    };
    const cli_option noise[] = {
        { "--guidance", CLI_REAL, &p->guidance, "X", 0, 1000, 0,
          "classifier-free guidance; 1 or less turns it off (the model's own)" },
        { "--guidance-2", CLI_REAL, &p->guidance_2, "X", 0, 1000, 0,
          "guidance of the second transformer of Wan 2.2 (the model's own, or --guidance)" },
        { "--image", CLI_TEXT, &p->image, "FILE", 0, 0, 0,
          "models of image to video: the picture that the video begins with (none)" },
        { "--negative-prompt", CLI_TEXT, &p->negative_prompt, "TEXT", 0, 0, 0,
          "what to avoid (nothing)" },
        { "--scheduler", CLI_CHOICE, &p->scheduler, CLIP_SCHEDULERS, 0, 0, 0,
          "model: as the model's folder says; unipc-0.36: with the sigmas of diffusers up to 0.36; "
          "ddim, dpm: CogVideoX (model)" },
        { "--dynamic-guidance", CLI_INT32, &p->dynamic_guidance, "0|1", 0, 1, 0,
          "CogVideoX: 1: guidance grows during the steps, as diffusers' use_dynamic_cfg (0)" },
        { "--flow-shift", CLI_REAL, &p->flow_shift, "X", 0, 1000, 0,
          "shift of the noise schedule (the model's own)" },
        { "--sigmas", CLI_REALS, &r->sigmas, "X,...", 0, 1, 0,
          "noise levels of the steps before the shift, for distilled models (the scheduler's)" },
        { "--timesteps", CLI_REALS, &r->timesteps, "X,...", 0, 1000, 0,
          "the same as timesteps: 1000,750,500,250 (the scheduler's)" },
        end,
    };
    const cli_option dense[] = {
        { "--warmup", CLI_REAL, &r->warmup, "X", 0, 1, 0,
          "fraction of the steps that run dense at the start (0.2; error: 0)" },
        { "--dense-first-layer", CLI_INT32, &r->dense_first_layer, "0|1", 0, 1, 0,
          "1: layer 0 always runs dense (1; error: 0)" },
        { "--dense-layers", CLI_INTS, &r->dense_layers, "N,...", 0, 65535, 0,
          "more layers that always run dense (none)" },
        end,
    };
    const cli_option blocks[] = {
        { "--order", CLI_CHOICE, &r->order, CLI_ORDERS, 0, 0, 0, order_help(records) },
        { "--window", CLI_INTS, &r->window, "t,h,w", 1, 4096, 3,
          "box of order tile3d, in tokens (2,8,8)" },
        { "--block", CLI_TEXT, &r->block, "QxK", 0, 0, 0,
          "query x key tokens of a block, multiples of 16 up to 256 (64x64; beyond 8192 tokens "
          "128x128, entropy 256x128)" },
        { "--samples", CLI_INT32, &s->select.samples, "N", 1, 256, 0,
          "entropy: queries scored per block (4)" },
        { CLI_SCORE_GROUPS, CLI_TEXT, &r->score_groups, "QxK", 0, 0, 0, CLI_SCORE_GROUPS_HELP },
        end,
    };
    const cli_option sparse[] = {
        { "--tail", CLI_CHOICE, &r->tail, CLI_TAILS, 0, 0, 0,
          "what replaces skipped blocks (pooled; error: levels)" },
        { "--exact-rows", CLI_INT32, &r->exact_rows, "N", 0, ESA_MAX_EXACT_ROWS, 0,
          "queries of each block that are computed exactly and correct the others (0; error "
          "without carry: 2; masks by error: as in the file)" },
        { "--cdf", CLI_REAL, &s->select.cdf_threshold, "X", 0, 1, 0,
          "ada_bsa: cumulative mass to keep; 1 turns the rule off (1)" },
        { "--refresh", CLI_SCHEDULE, &r->refresh_every, "early|N", 0, 1000, 0, CLIP_REFRESH_HELP },
        { "--order-every", CLI_SCHEDULE, &r->order_every, "early|N", 0, 1000, 0,
          CLIP_ORDER_EVERY_HELP },
        { "--share-branches", CLI_INT32, &r->share_branches, "0|1", 0, 1, 0,
          "1: the negative prompt uses the masks of the prompt (0; error: 1)" },
        end,
    };
    const cli_option cached[] = {
        { "--masks", CLI_TEXT, &p->masks, "FILE", 0, 0, 0,
          "cached: the mask file, made by `esa calibrate`" },
        { "--step-map", CLI_CHOICE, &s->step_map, "exact|nearest", 0, 0, 0,
          "cached: nearest also takes masks that were made for another number of steps (exact)" },
        end,
    };
    const cli_option model[] = {
        { "--model", CLI_TEXT, &r->open.model, "FOLDER|NAME", 0, 0, 0,
          "a diffusers folder, or wan-tiny, wan-t2v-1.3b, wan-t2v-14b, wan-i2v-14b, "
          "wan2.2-t2v-a14b, cogvideox-2b, cogvideox-5b, hunyuan-video (wan-tiny)" },
        { "--threads", CLI_INT, &r->open.threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { "--device", CLI_TEXT, &r->open.device, CLI_DEVICE_NAMES, 0, 0, 0, CLI_DEVICE_HELP },
        { "--linear", CLI_CHOICE, &r->open.linear, "bf16|fp8|fp8-fast", 0, 0, 0,
          "GPU: type of the transformer's linear layers; the first and the last block stay in "
          "bf16; fp8-fast sums with fewer bits (bf16)" },
        { "--dtype", CLI_CHOICE, &r->open.dtype, CLIP_DTYPES, 0, 0, 0,
          "CPU: type of linear layers and attention; default is f32, auto is bf16 where the "
          "processor gains from it (default)" },
        { "--keep", CLI_TEXT, &r->open.keep, "NAME,...", 0, 0, 0,
          "fp8: tensors that stay in bf16; * stands for any text (none)" },
        { "--max-vram", CLI_TEXT, &r->open.max_vram, "SIZE", 0, 0, 0,
          "GPU: memory to use at most, such as 16G; weights that do not fit are copied when they "
          "are used (what is free)" },
        end,
    };
    const cli_option work[] = {
        { "--work", CLI_REAL, &s->work, "X", 0.01, 1, 0,
          "instead of --budget: attention work of the whole video as a share of dense, everything "
          "counted; cached: the largest work in the mask file that is not above it (not given)" },
        { "--quality", CLI_REAL, &p->quality, "DB", 1, 100, 0,
          "instead of --work: the PSNR against dense that --plan expects to reach (not given)" },
        { "--preset", CLI_CHOICE, &r->preset, CLI_PRESETS, 0, 0, 0, preset_help() },
        { "--plan", CLI_TEXT, &p->plan, "FILE", 0, 0, 0,
          "work plan, made by `esa calibrate --plan` (the uniform rule)" },
        { "--cache", CLI_TEXT, &r->cache, "off|auto|X", 0, 0, 0,
          "reuse the output of the transformer while it is expected to change by less than this "
          "part of it; auto: 0.02, 0.03 or 0.05 for the presets, else 0.03 (off)" },
        end,
    };
    const cli_option precision[] = {
        { "--precision", CLI_CHOICE, &r->eight, "16|8", 0, 0, 0,
          "bits of the products of self-attention (16)" },
        { "--steps16-first", CLI_INT32, &r->steps16_first, "N", 0, 10000, 0,
          "precision 8: so many steps at the start stay in 16 bits (0)" },
        { "--steps16-last", CLI_INT32, &r->steps16_last, "N", 0, 10000, 0,
          "precision 8: so many steps at the end stay in 16 bits (0)" },
        { "--layers16", CLI_INTS, &r->layers16, "N,...", 0, 65535, 0,
          "precision 8: layers that stay in 16 bits (none)" },
        end,
    };
    const cli_option carry[] = {
        { "--carry", CLI_TEXT, &r->carry, "auto|off|N|STEP,...", 0, 0, 0, carry_help() },
        { "--carry-format", CLI_CHOICE, &r->carry_format, CLIP_CARRY_FORMATS, 0, 0, 0,
          "how the differences are kept: one byte or two a value (e4m3)" },
        end,
    };
    const cli_option *const rows[] = { size,   noise, dense, blocks,    sparse,
                                       cached, model, work,  precision, carry };
    int used = add(table, 0, own);
    for (int i = 0; i < 10; i++)
        if (groups & 1 << i) used = add(table, used, rows[i]);
    return table;
}
