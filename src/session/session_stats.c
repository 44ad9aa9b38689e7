/* session_stats.c - the statistics of a session: sums over layers and steps.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

_Static_assert(offsetof(esa_session_stats, density_asked) == 56 &&
                   offsetof(esa_session_stats, kernel) == 104,
               "esa_session_stats offsets");

static esa_status fail_place(const esa_session *s, int32_t layer, int32_t step)
{
    return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                    "layer is %d and step is %d, but the session has %d layers and %d steps (-1 "
                    "means all)",
                    layer, step, s->params.layers, s->params.steps);
}

static int32_t is_place(const esa_session *s, int32_t layer, int32_t step)
{
    return layer >= -1 && layer < s->params.layers && step >= -1 && step < s->params.steps;
}

static esa_status check_heads(const esa_session *s, const double *density, int64_t heads,
                              int32_t layer, int32_t step)
{
    if (!density || heads < 1)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "density is NULL, or heads is %lld; expected an array of 1 or more heads",
                        (long long)heads);
    if (!is_place(s, layer, step)) return fail_place(s, layer, step);
    if (s->head && heads != s->heads)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "heads is %lld, but the model has %lld heads",
                        (long long)heads, (long long)s->heads);
    return ESA_OK;
}

static void sum_heads(const esa_session *s, double *density, int64_t heads, int32_t layer,
                      int32_t step)
{
    const int32_t L = s->params.layers, T = s->params.steps;
    int64_t calls = 0;
    for (int64_t h = 0; h < heads; h++) density[h] = 0;
    for (int32_t l = layer < 0 ? 0 : layer; s->head && l < (layer < 0 ? L : layer + 1); l++)
        for (int32_t t = step < 0 ? 0 : step; t < (step < 0 ? T : step + 1); t++) {
            const int64_t at = (int64_t)l * T + t;
            calls += s->cell[at].by_head;
            for (int64_t h = 0; h < heads; h++) density[h] += s->head[at * heads + h];
        }
    for (int64_t h = 0; h < heads; h++)
        density[h] = calls ? density[h] / (double)calls : (double)NAN;
}

esa_status esa_session_get_heads(const esa_session *s, double *density, int64_t heads,
                                 int32_t layer, int32_t step)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    esa_status status = check_heads(s, density, heads, layer, step);
    if (!status) sum_heads(s, density, heads, layer, step);
    esa_ctx_leave(s->ctx);
    return status;
}

static void add(esa_session_cell *sum, const esa_session_cell *c)
{
    sum->calls += c->calls;
    sum->dense += c->dense;
    sum->sparse += c->sparse;
    sum->fallback += c->fallback;
    sum->eight += c->eight;
    sum->made += c->made;
    sum->loaded += c->loaded;
    sum->anchors += c->anchors;
    sum->carried += c->carried;
    sum->age += c->age;
    sum->with_mass += c->with_mass;
    sum->asked += c->asked;
    sum->density += c->density;
    sum->mass += c->mass;
    sum->select_seconds += c->select_seconds;
    sum->attention_seconds += c->attention_seconds;
    sum->dense_work += c->dense_work;
    sum->work += c->work;
    if (c->kernel && c->when >= sum->when) {
        sum->when = c->when;
        sum->kernel = c->kernel;
    }
}

static void write_stats(esa_session_stats *stats, const esa_session_cell *sum, const esa_session *s)
{
    const double work_asked = s->params.work;
    memset(stats, 0, sizeof *stats);
    stats->struct_size = (uint32_t)sizeof *stats;
    stats->calls = sum->calls;
    stats->dense_calls = sum->dense;
    stats->sparse_calls = sum->sparse;
    stats->fallback_calls = sum->fallback;
    stats->eight_calls = sum->eight;
    stats->masks_made = sum->made;
    stats->masks_loaded = sum->loaded;
    stats->density_asked = sum->sparse ? sum->asked / (double)sum->sparse : (double)NAN;
    stats->density = sum->sparse ? sum->density / (double)sum->sparse : (double)NAN;
    stats->mass = sum->with_mass ? sum->mass / (double)sum->with_mass : (double)NAN;
    stats->select_seconds = sum->select_seconds;
    stats->attention_seconds = sum->attention_seconds;
    stats->device_bytes = s->chunks.bytes;
    stats->anchor_calls = sum->anchors;
    stats->carried_calls = sum->carried;
    stats->carry_age = sum->carried ? (double)sum->age / (double)sum->carried : (double)NAN;
    stats->carry_bytes = s->carry.bytes;
    stats->carry_host_bytes = s->carry.host_bytes;
    stats->work = sum->dense_work > 0 ? sum->work / sum->dense_work : (double)NAN;
    stats->work_asked = work_asked > 0 ? work_asked : (double)NAN;
    if (sum->kernel) snprintf(stats->kernel, sizeof stats->kernel, "%s", sum->kernel);
}

esa_status esa_session_sum(const esa_session *s, esa_session_stats *stats, int32_t layer,
                           int32_t step)
{
    const int32_t L = s->params.layers, T = s->params.steps;
    if (!stats) return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "stats is NULL");
    if (stats->struct_size != sizeof *stats)
        return esa_fail(s->ctx, ESA_ERR_VERSION,
                        "esa_session_stats has struct_size %u, this library expects %u",
                        (unsigned)stats->struct_size, (unsigned)sizeof *stats);
    if (!is_place(s, layer, step)) return fail_place(s, layer, step);
    /* Booking finished calls changes only figures, so the session counts as const. */
    ESA_TRY(esa_session_figures_settle((esa_session_figures *)&s->figures));
    esa_session_cell sum = { .when = -1 };
    for (int32_t l = layer < 0 ? 0 : layer; l < (layer < 0 ? L : layer + 1); l++)
        for (int32_t t = step < 0 ? 0 : step; t < (step < 0 ? T : step + 1); t++)
            add(&sum, &s->cell[(int64_t)l * T + t]);
    write_stats(stats, &sum, s);
    return ESA_OK;
}

esa_status esa_session_get_stats(const esa_session *s, esa_session_stats *stats, int32_t layer,
                                 int32_t step)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_sum(s, stats, layer, step);
    esa_ctx_leave(s->ctx);
    return status;
}
