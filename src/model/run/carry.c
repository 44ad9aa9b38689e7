/* carry.c - the differences that a session carries between steps: anchors of two transformers, and
 * memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * On a device differences come last: weights stay where they are, and differences take what they
 * leave. Those that do not fit are copied from host memory beside the work, as blocks of weights
 * are; a byte costs the same copy for either. */
#include "model/run/run.h"

#include <string.h>
#include "backend/engine.h"
#include "base/number.h"
#include "session/session.h"

/* ---------------------------------------------------------------- anchors */

int32_t esa_run_is_second(const esa_model *m, const esa_run *r, int32_t i)
{
    return esa_sched_timestep(r->sched, i) < m->facts.boundary * m->sched.train_steps;
}

/* What the first transformer left out has nothing to do with the second. The session would notice
 * where each has branches of its own, but a work is shared out before. */
esa_status esa_run_anchors(esa_model *m, esa_run *r, esa_session_params *s)
{
    const int32_t steps = r->p.steps;
    const int32_t *given = s->anchors;
    int32_t count = s->anchor_count, first = 0;
    if (!(m->facts.boundary > 0) || s->carry == ESA_CARRY_OFF) return ESA_OK;
    if (count < 0 || count > steps || (count && !given)) return ESA_OK; /* the session says so */
    while (first < steps && !esa_run_is_second(m, r, first)) first++;
    if (!count && !(count = esa_carry_anchors(NULL, s->carry, steps, r->branches))) return ESA_OK;
    r->anchors = esa_mem_alloc(&m->ctx->mem, 4 * (int64_t)steps);
    if (!r->anchors) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the anchors");
    if (s->anchor_count)
        memcpy(r->anchors, given, 4 * (size_t)count);
    else
        esa_carry_anchors(r->anchors, s->carry, steps, r->branches);
    s->anchors = r->anchors;
    s->anchor_count = esa_carry_switch(r->anchors, count, steps, first);
    return ESA_OK;
}

/* ---------------------------------------------------------------- memory */

/* Differences in host memory: refused now, or some layers will run without. */
static esa_status check_host(esa_model *m, esa_run *r, int64_t need, int64_t left)
{
    if (need <= left) return ESA_OK;
    if (r->p.session.strict)
        return esa_fail(m->ctx, ESA_ERR_MEMORY,
                        "out of memory: the differences that %d anchors carry take %.2f GB of host "
                        "memory, %.2f GB are left: make the video smaller, or turn carry off",
                        m->session->carry.anchor_count, 1e-9 * (double)need,
                        1e-9 * (double)esa_max64(0, left));
    esa_log(m->ctx, ESA_LOG_WARNING,
            "some layers run without carry: it takes %.2f GB of host memory, %.2f GB are left",
            1e-9 * (double)need, 1e-9 * (double)esa_max64(0, left));
    return ESA_OK;
}

/* The host's memory alone: what the session may take. */
static esa_status on_host(esa_model *m, esa_run *r)
{
    int64_t left = r->host_left;
    if (left == INT64_MAX) return ESA_OK;
    left -= esa_dit_bytes(esa_pair_active(m->dit)) + r->scratch + r->mask_bytes;
    ESA_TRY(check_host(m, r, r->carry_bytes, left));
    if (r->carry_bytes > left && r->p.session.carry_room < 0)
        esa_session_limit_carry(m->session, esa_max64(0, left));
    return ESA_OK;
}

esa_status esa_run_carry(esa_model *m, esa_run *r)
{
    const int64_t asked = r->p.session.carry_room;
    int64_t left, scratch = r->scratch;
    r->carry_device = r->carry_host = 0;
    if (!r->carry_bytes) return ESA_OK;
    if (m->nn.be->host_memory) return on_host(m, r);
    r->carry_device = r->carry_bytes;
    if (r->p.session.carry_alloc) return ESA_OK; /* the caller's memory, and the caller's plan */
    ESA_TRY(esa_nn_reserve(&m->nn, -1, &left));
    scratch = esa_max64(scratch, left);
    ESA_TRY(esa_store_left(esa_dit_store(esa_pair_active(m->dit)), &left, r->carry_bytes,
                           r->mask_bytes, scratch));
    left = esa_max64(r->carry_least, left); /* begin left so much free */
    if (asked >= 0) left = esa_min64(left, asked);
    esa_session_limit_carry(m->session, left);
    if (left >= r->carry_bytes) return ESA_OK;
    /* whole differences, of which a few are lanes for the others */
    const int64_t one = esa_max64(1, r->carry_least / ESA_CARRY_LANES);
    r->carry_device = esa_max64(r->carry_least, left / one * one);
    r->carry_host = r->carry_bytes - (r->carry_device - r->carry_least);
    return check_host(m, r, r->carry_host, r->host_left);
}

void esa_run_say_carry(const esa_model *m, const esa_run *r)
{
    const double gib = 1073741824.0;
    const int32_t count = m->session->carry.anchor_count;
    char line[256], parts[128] = "";
    if (!r->carry_bytes) return;
    if (r->carry_host)
        esa_text_format(parts, sizeof parts, ": %.2f stays on the %s, %.2f is copied when used",
                        (double)(r->carry_bytes - r->carry_host) / gib, m->nn.be->name,
                        (double)r->carry_host / gib);
    else
        esa_text_format(parts, sizeof parts, " on the %s", m->nn.be->name);
    esa_text_format(line, sizeof line, "carry     %.2f GiB%s, %d anchor%s",
                    (double)r->carry_bytes / gib, parts, (int)count, count == 1 ? "" : "s");
    r->p.say(r->p.say_user, line);
}
