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

int32_t esa_session_step_branches(const esa_session_params *p)
{
    return p->step_branches ? p->step_branches : p->branches < 2 ? p->branches : 2;
}

double esa_preset_work_for(int32_t preset, int32_t steps, int32_t carry, int32_t branches)
{
    if (preset < ESA_PRESET_FAITHFUL || preset > ESA_PRESET_FAST || steps < 1) return (double)NAN;
    if (!esa_carry_anchors(NULL, carry, steps, branches)) return preset_work[preset];
    int32_t i = 0;
    while (steps > carried_work[i].steps) i++;
    return carried_work[i].work[preset];
}

double esa_preset_work(int32_t preset) { return esa_preset_work_for(preset, 1, ESA_CARRY_OFF, 1); }

double esa_preset_cache(int32_t preset)
{
    static const double threshold[] = { 0.02, 0.03, 0.05 }; /* measured: docs/quality.md */
    return preset >= ESA_PRESET_FAITHFUL && preset <= ESA_PRESET_FAST ? threshold[preset]
                                                                      : (double)NAN;
}

const char *esa_selector_name(int32_t selector) { return esa_selector_of(selector)->name; }

int32_t esa_selector_traits(int32_t selector)
{
    return esa_selector_of(selector)->traits & ESA_ROW_PUBLIC;
}

int32_t esa_protects_first_frame(int32_t selector, int32_t given)
{
    return esa_protects_by_default(selector, given);
}

/* A recording needs one order for all prompts. */
static int32_t order_of(int32_t mode, int32_t order)
{
    if (mode == ESA_SESSION_CACHED) return ESA_ORDER_DEFAULT;
    return mode == ESA_SESSION_RECORD && order == ESA_ORDER_ADAPTIVE ? ESA_ORDER_HILBERT : order;
}

/* A selector that spends a work needs no rule for dense steps and layers: a plan, or the uniform
 * rule, spends it. */
static void recommend_spending(esa_session_params *p)
{
    p->warmup_frac = 0;
    p->dense_first_layer = 0;
    p->refresh_every = p->order_every = ESA_REFRESH_EARLY;
    p->share_branches = 1;
    p->attention.exact_rows = -1;
}

esa_session_params esa_session_params_recommended(int32_t mode, int32_t selector, int64_t tokens)
{
    esa_session_params p = esa_session_params_default();
    const int probes = mode == ESA_SESSION_PROBE;
    const int records = mode == ESA_SESSION_RECORD;
    if (mode != ESA_SESSION_ONLINE && !probes &&
        !(records && esa_selector_of(selector)->records != ESA_RECORDS_NOTHING))
        selector = ESA_SELECT_ENTROPY;
    const esa_selector *row = esa_selector_of(selector);
    p.mode = mode;
    p.select = esa_select_params_default(selector);
    p.select.layout.order = order_of(mode, row->order);
    if (tokens > 0 && tokens <= ESA_SHORT_TOKENS)
        p.select.block_q = p.select.block_k = ESA_SHORT_BLOCK;
    const int skips = mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_CACHED || probes;
    p.select.tail = row->tail;
    p.attention.tail = mode == ESA_SESSION_CACHED ? ESA_TAIL_LEVELS
                       : skips                    ? row->tail
                                                  : ESA_TAIL_NONE;
    if (!records) p.carry = row->carry;
    if (esa_selector_has(selector, ESA_TRAIT_SPENDS)) recommend_spending(&p);
    return p;
}

int32_t esa_session_exact_rows(const esa_session_params *p)
{
    if (p->attention.exact_rows != -1) return p->attention.exact_rows;
    const int32_t selects = p->mode == ESA_SESSION_ONLINE || p->mode == ESA_SESSION_PROBE;
    const int32_t carries = p->anchor_count || esa_carry_anchors(NULL, p->carry, p->steps,
                                                                 esa_session_step_branches(p));
    return selects && !carries ? esa_selector_of(p->select.selector)->exact_rows : 0;
}
