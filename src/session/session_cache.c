/* session_cache.c - which steps may use the output of an earlier one, for callers that keep the
 * outputs themselves (esa_session.h). The rule is rules/step_cache.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include "session/session.h"

#include <math.h>
#include <stddef.h>

_Static_assert(offsetof(esa_step_change, x_change) == 16 &&
                   offsetof(esa_step_change, v_change) == 40,
               "esa_step_change offsets");

static esa_status begin(esa_session *s, double threshold)
{
    const int32_t mode = s->params.mode;
    if (!(threshold > 0) || !isfinite(threshold))
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "the threshold of the step cache is %g, expected a finite number above 0",
                        threshold);
    if (mode == ESA_SESSION_RECORD || mode == ESA_SESSION_PROBE)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "a session that records or probes needs every step: it has no step cache");
    if (!s->begun)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "esa_session_cache_begin was called before esa_session_begin");
    s->cache = esa_session_new_cache(s, threshold);
    return ESA_OK;
}

static esa_status check_change(const esa_session *s, const esa_step_change *c, const int32_t *skip)
{
    if (!c || !skip) return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "%s is NULL", c ? "skip" : "change");
    if (c->struct_size != sizeof *c)
        return esa_fail(s->ctx, ESA_ERR_VERSION, "struct_size of change is %u, expected %zu",
                        c->struct_size, sizeof *c);
    if (s->cache.steps == 0)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "esa_session_cache_next was called before esa_session_cache_begin");
    if (c->step < 0 || c->step >= s->params.steps)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "step is %d, but the session has %d steps",
                        c->step, s->params.steps);
    if (c->computed != 0 && c->computed != 1)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "computed is %d, expected 0 or 1", c->computed);
    return ESA_OK;
}

esa_status esa_session_cache_begin(esa_session *s, double threshold)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = begin(s, threshold);
    esa_ctx_leave(s->ctx);
    return status;
}

static esa_status next(esa_session *s, const esa_step_change *c, int32_t *skip)
{
    ESA_TRY(check_change(s, c, skip));
    const esa_step_figures figures = { .x_change = c->x_change,
                                       .v_size = { c->v_size[0], c->v_size[1] },
                                       .v_change = { c->v_change[0], c->v_change[1] } };
    *skip = esa_step_cache_next(&s->cache, c->step, c->computed, &figures);
    return ESA_OK;
}

esa_status esa_session_cache_next(esa_session *s, const esa_step_change *change, int32_t *skip)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = next(s, change, skip);
    esa_ctx_leave(s->ctx);
    return status;
}
