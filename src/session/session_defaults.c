/* session_defaults.c - the product's default rules: order, blocks, tail, reuse and presets of a
 * model run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/quality.md holds the measurements behind them. */
#include <math.h>
#include "rules/anchors.h"
#include "rules/exact_rows.h"
#include "rules/rows.h"
#include "session/session.h"

/* The work of each preset, in the order of ESA_PRESET_*: without carry, and with carry in runs of
 * up to so many steps. */
static const double preset_work[] = { 0.57, 0.44, 0.30 };
static const struct {
    int32_t steps;
    double work[3];
} carried_work[] = { { 11, { 0.57, 0.44, 0.30 } },
                     { 29, { 0.50, 0.38, 0.28 } },
                     { INT32_MAX, { 0.44, 0.30, 0.22 } } };

double esa_preset_work_for(int32_t preset, int32_t steps, int32_t carry)
{
    if (preset < ESA_PRESET_FAITHFUL || preset > ESA_PRESET_FAST || steps < 1) return (double)NAN;
    if (!esa_carry_anchors(NULL, carry, steps)) return preset_work[preset];
    int32_t i = 0;
    while (steps > carried_work[i].steps) i++;
    return carried_work[i].work[preset];
}

double esa_preset_work(int32_t preset) { return esa_preset_work_for(preset, 1, ESA_CARRY_OFF); }

double esa_preset_cache(int32_t preset)
{
    static const double threshold[] = { 0.02, 0.03, 0.05 }; /* docs/engine.md has the measurement */
    return preset >= ESA_PRESET_FAITHFUL && preset <= ESA_PRESET_FAST ? threshold[preset]
                                                                      : (double)NAN;
}

int32_t esa_protects_first_frame(int32_t selector, int32_t given)
{
    return esa_protects_by_default(selector, given);
}

static int32_t order_of(int32_t mode, int32_t selector)
{
    if (mode == ESA_SESSION_CACHED) return ESA_ORDER_DEFAULT;
    if (selector == ESA_SELECT_ERROR)
        return mode == ESA_SESSION_RECORD ? ESA_ORDER_HILBERT : ESA_ORDER_ADAPTIVE;
    return selector == ESA_SELECT_RF_V2 ? ESA_ORDER_TILE : ESA_ORDER_HILBERT;
}

/* The error selector needs no rule for dense steps and layers: a plan, or the uniform rule, spends
 * the work. */
static void recommend_error(esa_session_params *p)
{
    p->warmup_frac = 0;
    p->dense_first_layer = 0;
    p->refresh_every = p->order_every = ESA_REFRESH_EARLY;
    p->share_branches = 1;
    if (p->mode != ESA_SESSION_RECORD) p->carry = ESA_CARRY_AUTO;
    p->attention.exact_rows = -1;
    p->select.tail = p->attention.tail = ESA_TAIL_LEVELS;
}

esa_session_params esa_session_params_recommended(int32_t mode, int32_t selector, int64_t tokens)
{
    esa_session_params p = esa_session_params_default();
    const int probes = mode == ESA_SESSION_PROBE;
    const int records = mode == ESA_SESSION_RECORD;
    if (mode != ESA_SESSION_ONLINE && !probes && !(records && selector == ESA_SELECT_ERROR))
        selector = ESA_SELECT_ENTROPY;
    p.mode = mode;
    p.select = esa_select_params_default(selector);
    p.select.layout.order = order_of(mode, selector);
    if (tokens > 0 && tokens <= ESA_SHORT_TOKENS)
        p.select.block_q = p.select.block_k = ESA_SHORT_BLOCK;
    const int skips = mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_CACHED || probes;
    p.attention.tail = skips ? ESA_TAIL_POOLED : ESA_TAIL_NONE;
    if (selector == ESA_SELECT_ERROR) recommend_error(&p);
    if (mode == ESA_SESSION_CACHED) p.attention.tail = ESA_TAIL_LEVELS;
    if (records) p.attention.tail = ESA_TAIL_NONE;
    return p;
}

int32_t esa_session_exact_rows(const esa_session_params *p)
{
    if (p->attention.exact_rows != -1) return p->attention.exact_rows;
    const int32_t selects = p->mode == ESA_SESSION_ONLINE || p->mode == ESA_SESSION_PROBE;
    const int32_t carries = p->anchor_count || esa_carry_anchors(NULL, p->carry, p->steps);
    return selects && p->select.selector == ESA_SELECT_ERROR && !carries
               ? ESA_EXACT_ROWS_RECOMMENDED
               : 0;
}
