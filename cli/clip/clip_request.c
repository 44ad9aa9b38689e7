/* clip_request.c - the settings of a clip: defaults, option rows, and what will run.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------- settings */

static esa_session_params recommended(const clip_request *r)
{
    static const struct {
        int mode, selector;
    } methods[] = {
        /* METHOD_* */
        { ESA_SESSION_DENSE, ESA_SELECT_ENTROPY },  { ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY },
        { ESA_SESSION_ONLINE, ESA_SELECT_RF_V2 },   { ESA_SESSION_ONLINE, ESA_SELECT_ADA_BSA },
        { ESA_SESSION_CACHED, ESA_SELECT_ENTROPY }, { ESA_SESSION_RECORD, ESA_SELECT_ENTROPY },
    };
    return esa_session_params_recommended(methods[r->method].mode, methods[r->method].selector,
                                          r->tokens);
}

clip_request clip_request_default(void)
{
    clip_request r = { .method = METHOD_ENTROPY, .order = ESA_ORDER_DEFAULT };
    /* as esa_generate_params_default, which cannot be asked before the engine is open */
    r.p = (esa_generate_params){ .struct_size = sizeof r.p, .decode = 1, .guidance = NAN };
    r.p.session = recommended(&r);
    r.tail = r.p.session.attention.tail;
    return r;
}

int clip_request_check(const clip_request *r, const char *what)
{
    int32_t q, k;
    if (r->window.count && r->order != ESA_ORDER_TILE3D)
        return cli_usage("%s: --window belongs to --order tile3d", what);
    return r->block ? cli_block_parse(r->block, &q, &k) : CLI_OK;
}

int clip_order(const clip_request *r)
{
    return r->order != ESA_ORDER_DEFAULT ? r->order : recommended(r).select.layout.order;
}

/* The recommended settings of the method, and what the user chose instead. */
static void set_session(clip_request *r)
{
    const esa_session_params best = recommended(r);
    esa_session_params *s = &r->p.session;
    s->mode = best.mode;
    s->attention.tail = best.attention.tail == ESA_TAIL_NONE ? ESA_TAIL_NONE : r->tail;
    s->select.selector = best.select.selector;
    s->select.layout.order = clip_order(r);
    cli_list_copy(s->select.layout.window, &r->window);
    s->select.block_q = best.select.block_q;
    s->select.block_k = best.select.block_k;
    if (r->block) cli_block_parse(r->block, &s->select.block_q, &s->select.block_k);
}

int clip_resolve(clip_maker *m, clip_request *r)
{
    esa_status status = ESA_OK;
    r->tokens = 0;
    for (int pass = 0; pass < 2 && status == ESA_OK;
         pass++) { /* the recommended blocks need tokens */
        set_session(r);
        status = m->video.generate_resolve(m->model, &r->p, &r->tokens);
    }
    return cli_status(m->ctx, status, m->what);
}

/* ---------------------------------------------------------------- options */

static int add(cli_option *table, int used, const cli_option *rows)
{
    for (; rows->name && used < CLIP_MAX_OPTIONS - 1; rows++) table[used++] = *rows;
    memset(&table[used], 0, sizeof table[used]);
    return used;
}

/* "token order (hilbert; rf_v2: tile)", as the library recommends */
static const char *order_help(void)
{
    static char text[96];
    char usual[32], tiled[32];
    const clip_request any = { .method = METHOD_ENTROPY, .order = ESA_ORDER_DEFAULT },
                       rf_v2 = { .method = METHOD_RF_V2, .order = ESA_ORDER_DEFAULT };
    snprintf(text, sizeof text, "token order (%s; rf_v2: %s)",
             cli_name(usual, CLI_ORDERS, clip_order(&any)),
             cli_name(tiled, CLI_ORDERS, clip_order(&rf_v2)));
    return text;
}

const cli_option *clip_options(cli_option table[CLIP_MAX_OPTIONS], const cli_option *own,
                               int groups, clip_request *r)
{
    esa_generate_params *p = &r->p;
    esa_session_params *s = &p->session;
    const cli_option end = { 0 };
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
        { "--negative-prompt", CLI_TEXT, &p->negative_prompt, "TEXT", 0, 0, 0,
          "what to avoid (nothing)" },
        { "--scheduler", CLI_CHOICE, &p->scheduler, CLIP_SCHEDULERS, 0, 0, 0,
          "model: as the model's folder says; unipc-0.36: with the sigmas of diffusers up to 0.36 "
          "(model)" },
        { "--flow-shift", CLI_REAL, &p->flow_shift, "X", 0, 1000, 0,
          "shift of the noise schedule (the model's own)" },
        end,
    };
    const cli_option dense[] = {
        { "--warmup", CLI_REAL, &s->warmup_frac, "X", 0, 1, 0,
          "fraction of the steps that run dense at the start (0.2)" },
        { "--dense-first-layer", CLI_INT32, &s->dense_first_layer, "0|1", 0, 1, 0,
          "1: layer 0 always runs dense (1)" },
        { "--dense-layers", CLI_INTS, &r->dense_layers, "N,...", 0, 65535, 0,
          "more layers that always run dense (none)" },
        end,
    };
    const cli_option blocks[] = {
        { "--order", CLI_CHOICE, &r->order, CLI_ORDERS, 0, 0, 0, order_help() },
        { "--window", CLI_INTS, &r->window, "t,h,w", 1, 4096, 3,
          "box of order tile3d, in tokens (2,8,8)" },
        { "--block", CLI_TEXT, &r->block, "QxK", 0, 0, 0,
          "query x key tokens of a block, multiples of 16 up to 256 (64x64; beyond 16384 tokens "
          "256x128, rf_v2 and ada_bsa 128x128)" },
        { "--samples", CLI_INT32, &s->select.samples, "N", 1, 256, 0,
          "entropy: queries scored per block (4)" },
        end,
    };
    const cli_option sparse[] = {
        { "--tail", CLI_CHOICE, &r->tail, CLI_TAILS, 0, 0, 0,
          "what replaces skipped blocks (pooled)" },
        { "--cdf", CLI_REAL, &s->select.cdf_threshold, "X", 0, 1, 0,
          "ada_bsa: cumulative mass to keep; 1 turns the rule off (1)" },
        { "--refresh", CLI_INT32, &s->refresh_every, "N", 1, 1000, 0,
          "make new masks every N sparse steps and reuse them in between (1)" },
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
          "a diffusers folder, or wan-tiny, wan-t2v-1.3b, wan-t2v-14b (wan-tiny)" },
        { "--threads", CLI_INT, &r->open.threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        end,
    };
    const cli_option *const rows[] = { size, noise, dense, blocks, sparse, cached, model };
    int used = add(table, 0, own);
    for (int i = 0; i < 7; i++)
        if (groups & 1 << i) used = add(table, used, rows[i]);
    return table;
}
