/* store_plan.c - types and places of the tensors in their groups, and which groups stay on the
 * device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Groups that stay and groups that are copied alternate as evenly as possible, so that the copies
 * have the whole forward to run in. */
#include <stdio.h>
#include <string.h>

#include "base/number.h"
#include "model/weights/store_internal.h"

static int64_t aligned(int64_t bytes)
{
    return esa_ceil_div(bytes, ESA_STORE_ALIGN) * ESA_STORE_ALIGN;
}

/* ---------------------------------------------------------------- types */

/* 1 if the pattern of n characters, where * stands for any text, matches the whole name. */
static int32_t matches(const char *pattern, size_t n, const char *name)
{
    const char *end = pattern + n, *star = NULL, *retry = NULL;
    while (*name) {
        if (pattern < end && *pattern == '*') {
            star = ++pattern;
            retry = name;
        } else if (pattern < end && *pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star;
            name = ++retry;
        } else {
            return 0;
        }
    }
    while (pattern < end && *pattern == '*') pattern++;
    return pattern == end;
}

/* 1 if one of the patterns, separated by commas, matches. */
static int32_t listed(const char *patterns, const char *name)
{
    while (patterns && *patterns) {
        const size_t n = strcspn(patterns, ",");
        if (matches(patterns, n, name)) return 1;
        patterns += n + (patterns[n] == ',');
    }
    return 0;
}

static int32_t device_dtype(const esa_wanted *e, const esa_store_settings *settings)
{
    if (e->flags & ESA_WANT_F32) return ESA_DTYPE_F32;
    const int32_t f8 = (e->flags & ESA_WANT_F8) && settings->linear == ESA_DTYPE_F8 &&
                       e->rank > 1 && !listed(settings->keep, e->name);
    return f8 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16;
}

/* Tensors that are joined have one type: F8 only if all of them may. */
static void join_types(esa_stored *t, int64_t count)
{
    for (int64_t i = 0, end; i < count; i = end) {
        int32_t all = t[i].dtype == ESA_DTYPE_F8;
        for (end = i + 1; end < count && (t[end].e->flags & ESA_WANT_JOIN); end++)
            all &= t[end].dtype == ESA_DTYPE_F8;
        for (int64_t k = i; k < end && !all; k++)
            if (t[k].dtype == ESA_DTYPE_F8) t[k].dtype = ESA_DTYPE_BF16;
    }
}

/* ---------------------------------------------------------------- places */

/* Weights first, then the scales. */
static void place(esa_store_group *g, esa_stored *t)
{
    int64_t at = 0;
    for (int64_t i = 0; i < g->count; i++) {
        if (!(t[i].e->flags & ESA_WANT_JOIN)) at = aligned(at);
        t[i].offset = at;
        t[i].size = t[i].rows * t[i].cols * esa_view_element(t[i].dtype);
        at += t[i].size;
    }
    for (int64_t i = 0; i < g->count; i++) {
        t[i].scale = -1;
        if (t[i].dtype != ESA_DTYPE_F8) continue;
        if (!(t[i].e->flags & ESA_WANT_JOIN)) at = aligned(at);
        t[i].scale = at;
        at += 4 * t[i].rows;
    }
    g->bytes = aligned(at);
}

static int32_t is_stored(const esa_wanted *e)
{
    return e->view && e->present && !(e->flags & ESA_WANT_HOST);
}

static esa_status make_room(esa_store *s)
{
    const esa_allocator *mem = &s->nn->ctx->mem;
    for (int64_t i = 0; i < s->w->count; i++) {
        s->tensors += is_stored(&s->w->want[i]);
        if (s->w->want[i].group >= s->groups) s->groups = s->w->want[i].group + 1;
    }
    s->group = esa_mem_zalloc(mem, s->groups * (int64_t)sizeof *s->group);
    s->queue = esa_mem_zalloc(mem, s->groups * (int64_t)sizeof *s->queue);
    s->tensor = esa_mem_zalloc(mem, s->tensors * (int64_t)sizeof *s->tensor);
    return s->group && s->queue && s->tensor
               ? ESA_OK
               : esa_fail(s->nn->ctx, ESA_ERR_MEMORY, "out of memory for the weights of the %s",
                          s->w->part);
}

esa_status esa_store_layout(esa_store *s, const esa_store_settings *settings)
{
    ESA_TRY(make_room(s));
    int64_t n = 0;
    for (int32_t g = 0; g < s->groups; g++) {
        s->group[g].first = n;
        for (int64_t i = 0; i < s->w->count; i++) {
            esa_wanted *e = &s->w->want[i];
            if (!is_stored(e) || e->group != g) continue;
            esa_stored *t = &s->tensor[n++];
            t->e = e;
            t->dtype = device_dtype(e, settings);
            t->rows = esa_weights_rows(e);
            t->cols = t->rows ? esa_wanted_count(e) / t->rows : 0;
        }
        s->group[g].count = n - s->group[g].first;
        esa_stored *first = s->tensor + s->group[g].first;
        join_types(first, s->group[g].count);
        place(&s->group[g], first);
    }
    for (int64_t i = 0; i < s->tensors; i++) s->f8 += s->tensor[i].dtype == ESA_DTYPE_F8;
    return ESA_OK;
}

/* ---------------------------------------------------------------- what stays */

/* Lets `copied` of the groups be copied, spread evenly; gives the bytes that this takes. */
static int64_t spread(esa_store *s, int32_t copied, int32_t lanes)
{
    const int32_t blocks = s->groups - 1;
    int64_t bytes = s->group[0].bytes, largest = 0;
    s->group[0].stays = 1;
    for (int32_t i = 0; i < blocks; i++) {
        esa_store_group *g = &s->group[1 + i];
        const int64_t before = (int64_t)i * copied / blocks,
                      after = (i + INT64_C(1)) * copied / blocks;
        g->stays = before == after;
        if (g->stays)
            bytes += g->bytes;
        else
            largest = esa_max64(largest, g->bytes);
    }
    s->lanes = copied < lanes ? copied : lanes;
    s->lane_bytes = s->lanes ? largest : 0;
    return bytes + s->lanes * largest;
}

int64_t esa_store_all(const esa_store *s)
{
    int64_t bytes = 0;
    for (int32_t g = 0; g < s->groups; g++) bytes += s->group[g].bytes;
    return bytes;
}

/* All groups but the first go through one lane. */
int64_t esa_store_least(const esa_store *s)
{
    int64_t largest = 0;
    for (int32_t g = 1; g < s->groups; g++) largest = esa_max64(largest, s->group[g].bytes);
    return s->group[0].bytes + largest;
}

esa_status esa_store_choose(esa_store *s, int64_t limit)
{
    const int64_t least = esa_store_least(s);
    for (int32_t copied = 0; copied < s->groups; copied++)
        if (spread(s, copied, ESA_STORE_LANES) <= limit) return ESA_OK;
    spread(s, s->groups - 1, 1); /* copies and work take turns */
    if (least <= limit) return ESA_OK;
    return esa_fail(s->nn->ctx, ESA_ERR_MEMORY,
                    "the weights of the %s need at least %.2f GiB of device memory, %.2f GiB are "
                    "allowed",
                    s->w->part, (double)least / 1073741824.0,
                    (double)esa_max64(limit, 0) / 1073741824.0);
}

int64_t esa_store_held(const esa_store *s)
{
    int64_t bytes = 0;
    for (int32_t g = 0; g < s->groups; g++) bytes += s->group[g].device ? s->group[g].bytes : 0;
    for (int32_t l = 0; l < ESA_STORE_LANES; l++) bytes += s->lane[l] ? s->lane_bytes : 0;
    return bytes;
}

void esa_store_describe(const esa_store *s, void (*say)(void *user, const char *line), void *user)
{
    const double gib = 1073741824.0;
    char line[256], f8[48] = "";
    esa_store_plan p;
    esa_store_get_plan(s, &p);
    if (!p.groups) return;
    if (p.f8) snprintf(f8, sizeof f8, ", %d tensors in fp8", (int)p.f8);
    const double bytes = (double)(p.resident_bytes + p.streamed_bytes) / gib;
    if (!p.streamed_bytes) {
        esa_text_format(line, sizeof line, "weights   %s %.2f GiB%s: all on the %s", s->w->part,
                        bytes, f8, s->nn->be->name);
        say(user, line);
        return;
    }
    esa_text_format(
        line, sizeof line,
        "weights   %s %.2f GiB%s: %lld of %lld blocks stay on the %s, %lld are copied through "
        "%lld buffer%s of %.2f GiB",
        s->w->part, bytes, f8, (long long)p.resident, (long long)p.groups, s->nn->be->name,
        (long long)(p.groups - p.resident), (long long)p.lanes, p.lanes == 1 ? "" : "s",
        (double)(p.lane_bytes / p.lanes) / gib);
    say(user, line);
    esa_text_format(line, sizeof line, "copies    %.2f GiB a forward at %.1f GB/s: %.3f s %s%s",
                    (double)p.streamed_bytes / gib, 1e-9 * p.rate,
                    p.rate > 0 ? (double)p.streamed_bytes / p.rate : 0.0,
                    p.lanes == 1 ? "in turn with the work" : "beside the work",
                    p.pinned ? "" : "; host memory is not pinned, so they need the processor too");
    say(user, line);
}
