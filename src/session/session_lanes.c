/* session_lanes.c - differences that live in page-locked host memory, and the lanes through which
 * they pass.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A call that adds a difference finds it in a lane, where the call before it had it copied. A call
 * that makes one writes it into a lane, from where it is copied to the host while the next layers
 * run. */
#include "session/session.h"

static esa_session_lane *lane_of(esa_session *s, const esa_session_diff *diff)
{
    for (int32_t i = 0; i < ESA_CARRY_LANES; i++)
        if (s->carry.lane[i].diff == diff) return &s->carry.lane[i];
    return NULL;
}

static int32_t number_of(const esa_session *s, const esa_session_lane *lane)
{
    return ESA_CARRY_LANE + (int32_t)(lane - s->carry.lane);
}

/* The lane of a difference, or else the one that was used longest ago. */
static esa_session_lane *lane_for(esa_session *s, esa_session_diff *diff)
{
    esa_session_lane *lane = lane_of(s, diff);
    if (!lane) {
        lane = s->carry.lane;
        for (int32_t i = 1; i < ESA_CARRY_LANES; i++)
            if (s->carry.lane[i].used < lane->used) lane = &s->carry.lane[i];
    }
    lane->used = ++s->carry.tick;
    lane->diff = diff;
    return lane;
}

/* Has a difference copied into a lane, if it is in none. */
static esa_status bring(esa_session *s, esa_session_diff *diff, esa_session_lane **lane)
{
    const int32_t there = lane_of(s, diff) != NULL;
    *lane = lane_for(s, diff);
    if (there) return ESA_OK;
    const esa_status status = s->carry.backend->transfer->fetch(
        s->ctx, number_of(s, *lane), (*lane)->memory, diff->host, diff->bytes);
    if (status) (*lane)->diff = NULL; /* the next call must not take it for this difference */
    return status;
}

/* ---------------------------------------------------------------- memory */

void esa_session_lanes_leave(esa_session *s, const esa_session_diff *diff)
{
    /* Any lane may still copy from or to this memory, although it holds another one by now. */
    for (int32_t i = 0; i < ESA_CARRY_LANES; i++) {
        esa_session_lane *lane = &s->carry.lane[i];
        if (lane->memory) (void)s->carry.backend->transfer->landed(s->ctx, ESA_CARRY_LANE + i);
        if (lane->diff == diff) lane->diff = NULL;
    }
}

void esa_session_lanes_free(esa_session *s)
{
    for (int32_t i = 0; i < ESA_CARRY_LANES; i++) {
        esa_session_lane *lane = &s->carry.lane[i];
        if (lane->memory) (void)s->carry.backend->transfer->landed(s->ctx, ESA_CARRY_LANE + i);
        esa_session_carry_give(s, lane->memory, lane->bytes);
        *lane = (esa_session_lane){ 0 };
    }
}

/* Host memory for a difference; it leaves its memory on the device to the caller. */
static esa_status to_host(esa_session *s, esa_session_diff *diff, int64_t bytes)
{
    void *host;
    ESA_TRY(s->carry.backend->transfer->pin(s->ctx, &host, bytes));
    diff->host = host;
    diff->memory = NULL;
    s->carry.host_bytes += bytes;
    return ESA_OK;
}

/* Takes the memory of a difference of this branch that holds nothing yet. */
static esa_status take_over(esa_session *s, esa_session_lane *lane, int64_t bytes)
{
    for (int32_t l = s->params.layers; l-- > 0;) {
        esa_session_diff *diff = &s->kept[(int64_t)s->branch * s->params.layers + l].diff;
        if (!diff->memory || diff->made || diff->bytes != bytes) continue;
        void *memory = diff->memory;
        ESA_TRY(to_host(s, diff, bytes));
        lane->memory = memory;
        return ESA_OK;
    }
    return esa_session_carry_take(s, &lane->memory, bytes);
}

esa_status esa_session_stream(esa_session *s, esa_session_diff *diff, int64_t bytes)
{
    if (s->carry.lane[0].bytes < bytes) esa_session_lanes_free(s);
    for (int32_t i = 0; i < ESA_CARRY_LANES; i++) {
        esa_session_lane *lane = &s->carry.lane[i];
        if (lane->memory) continue;
        ESA_TRY(take_over(s, lane, bytes));
        lane->bytes = bytes;
    }
    return to_host(s, diff, bytes);
}

/* ---------------------------------------------------------------- around a call */

esa_status esa_session_diff_begin(esa_session *s, esa_session_diff *diff, int32_t make,
                                  esa_carry *view)
{
    const esa_engine_transfer *transfer = s->carry.backend->transfer;
    if (make) diff->made = 0;
    *view = esa_session_diff_view(s, diff);
    if (diff->host) {
        esa_session_lane *lane = make ? lane_for(s, diff) : NULL;
        if (!make) ESA_TRY(bring(s, diff, &lane));
        esa_session_diff there = *diff;
        there.memory = lane->memory;
        *view = esa_session_diff_view(s, &there);
        ESA_TRY(transfer->arrive(s->ctx, number_of(s, lane)));
    }
    return ESA_OK;
}

esa_status esa_session_diff_end(esa_session *s, esa_session_diff *diff, int32_t make,
                                esa_session_diff *next)
{
    const esa_engine_transfer *transfer = s->carry.backend->transfer;
    if (diff->host) {
        const esa_session_lane *lane = lane_of(s, diff);
        const int32_t number = number_of(s, lane);
        ESA_TRY(transfer->used(s->ctx, number));
        if (make) ESA_TRY(transfer->store(s->ctx, number, diff->host, lane->memory, diff->bytes));
    }
    diff->made = 1; /* not before its copy to the host is on its way */
    if (make || !next || !next->host) return ESA_OK;
    esa_session_lane *lane;
    return bring(s, next, &lane);
}
