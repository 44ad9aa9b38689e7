/* session_plans.c - the plans of a session, one per shape. A new plan replaces the least recently
 * used one.
 * SPDX-License-Identifier: Apache-2.0 */
#include "rules/levels.h"
#include "session/session.h"

#include <string.h>

static void drop(esa_session *s, esa_session_plan *e)
{
    esa_mask_free(e->mask);
    esa_mem_free(&s->ctx->mem, e->importance, e->importance_bytes);
    esa_plan_free(e->plan);
    memset(e, 0, sizeof *e);
}

void esa_session_drop_plans(esa_session *s)
{
    for (int i = 0; i < ESA_SESSION_PLANS; i++) drop(s, &s->plan[i]);
}

int32_t esa_session_same_shapes(const esa_shapes *a, const esa_shapes *b)
{
    return a->dtype == b->dtype && a->device == b->device && a->device_index == b->device_index &&
           a->B == b->B && a->Hq == b->Hq && a->Hkv == b->Hkv && a->Nq == b->Nq && a->Nk == b->Nk &&
           a->D == b->D;
}

/* The select params for a sparse plan. */
static esa_select_params plan_select(const esa_session *s)
{
    if (s->params.mode != ESA_SESSION_CACHED) return s->params.select;
    /* Only blocks, order and grid matter: masks come from the file. RANDOM needs the least
     * scratch. */
    const esa_mask_file_info *f = &s->params.masks->info;
    esa_select_params p = esa_select_params_default(ESA_SELECT_RANDOM);
    p.mode = f->mode;
    p.causal = f->causal;
    p.block_q = f->block_q;
    p.block_k = f->block_k;
    p.layout = f->layout;
    p.layout.order_applied = s->params.select.layout.order_applied;
    return p;
}

/* Makes the mask and the importance buffer of a sparse plan. */
static esa_status furnish(esa_session *s, esa_session_plan *e)
{
    const esa_plan *p = e->plan;
    const int32_t cached = s->params.mode == ESA_SESSION_CACHED;
    const int32_t record = s->params.mode == ESA_SESSION_RECORD;
    const int32_t entropy = !cached && esa_selector_of(s->params.select.selector)->records ==
                                           ESA_RECORDS_IMPORTANCE;
    const int32_t levels = record ? esa_run_levels(&s->recorder.info) : 1;
    const int32_t fine = cached ? s->params.masks->info.fine : -1;
    if (!record) ESA_TRY(esa_plan_mask(p, &e->mask, cached ? 1 : p->shapes.B, fine));
    if (cached) { /* every mask of a file has the same number of existing blocks */
        const esa_mask_file_info *f = &s->params.masks->info;
        const int64_t facts[ESA_FACTS] = { esa_mask_file_existing(f) / f->H * p->shapes.Hq };
        ESA_TRY(p->backend->upload(s->ctx, e->mask->facts, facts, sizeof facts));
    }
    /* without host_memory the importance of an ONLINE mask stays on the device */
    if (record || (entropy && p->backend->host_memory)) {
        const int64_t rows = esa_size_mul(levels * p->shapes.B * p->shapes.Hq, p->nq);
        e->importance_bytes = esa_size_mul(esa_size_mul(rows, p->nk), 4);
        e->importance = esa_mem_alloc(&s->ctx->mem, e->importance_bytes);
        if (!e->importance)
            return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the masks of a session");
    }
    return ESA_OK;
}

/* The plan of calls with these shapes; sparse 0: without a selector. */
static esa_status make_plan(const esa_session *s, esa_plan **plan, const esa_shapes *shapes,
                            int32_t kind, int32_t sparse, const int32_t *kv_len)
{
    esa_attention_params attention = s->params.attention;
    esa_select_params select = plan_select(s);
    if (s->params.mode == ESA_SESSION_RECORD) esa_record_sizes(&select, shapes->Nk);
    attention.kv_len = select.kv_len = kv_len;
    if (kind == ESA_CALL_CROSS) attention.causal = 0;
    if (sparse) return esa_plan_make(s->ctx, plan, shapes, &select, &attention);
    attention.tail = ESA_TAIL_NONE;
    attention.exact_rows = 0;
    return esa_plan_make_dense(s->ctx, plan, shapes, &attention);
}

static esa_status make_entry(esa_session *s, esa_session_plan *e, const esa_shapes *shapes)
{
    ESA_TRY(make_plan(s, &e->plan, shapes, e->kind, e->sparse, e->kv_len));
    if (!e->sparse) return ESA_OK;
    if (!e->plan->runnable)
        return esa_fail(s->ctx, ESA_ERR_UNSUPPORTED,
                        "with text, compat masks of this selector have blocks that no kernel runs");
    return furnish(s, e);
}

/* Number of differences that are kept at a time. */
static int64_t count_diffs(const esa_session *s)
{
    const esa_session_params *p = &s->params;
    const int32_t sharing = p->mode == ESA_SESSION_CACHED ? p->masks->info.branches == 1
                                                          : p->share_branches;
    const int32_t running = p->step_branches ? p->step_branches : p->branches;
    int64_t layers = 0;
    for (int32_t l = 0; l < p->layers; l++) layers += !s->dense_layer[l];
    return s->carry.anchor_count ? layers * (sharing ? 1 : running) : 0;
}

esa_status esa_session_room(const esa_session *s, const esa_shapes *shapes,
                            esa_session_bytes *bytes)
{
    const int64_t diffs = count_diffs(s);
    *bytes = (esa_session_bytes){ 0 };
    for (int32_t sparse = 0; sparse <= (s->params.mode != ESA_SESSION_DENSE); sparse++) {
        esa_plan *plan = NULL;
        ESA_TRY(make_plan(s, &plan, shapes, ESA_CALL_SELF, sparse, NULL));
        bytes->scratch = esa_max64(bytes->scratch, plan->workspace);
        if (sparse) bytes->kept = esa_session_kept_bytes(&s->params, plan);
        const int64_t least = plan->backend->host_memory ? diffs
                                                         : esa_min64(diffs, ESA_CARRY_LANES);
        esa_plan_free(plan);
        if (!diffs) continue;
        bytes->carry = esa_size_mul(diffs, esa_session_diff_bytes(&s->params, shapes));
        bytes->carry_least = least * esa_session_diff_bytes(&s->params, shapes);
    }
    return ESA_OK;
}

void esa_session_limit_carry(esa_session *s, int64_t room) { s->params.carry_room = room; }

esa_status esa_session_get_plan(esa_session *s, esa_session_plan **entry, const esa_tensor *q,
                                const esa_tensor *k, int32_t kind, int32_t sparse)
{
    const esa_shapes shapes = esa_shapes_of(q, k);
    const int32_t *kv_len = kind == ESA_CALL_SELF ? s->kv_len : NULL;
    esa_session_plan *oldest = &s->plan[0];
    for (int i = 0; i < ESA_SESSION_PLANS; i++) {
        esa_session_plan *e = &s->plan[i];
        if (e->plan && e->kind == kind && e->sparse == sparse && e->kv_len == kv_len &&
            esa_session_same_shapes(&e->plan->shapes, &shapes)) {
            e->used = ++s->tick;
            *entry = e;
            return ESA_OK;
        }
        if (e->used < oldest->used) oldest = e; /* a free place has used 0 */
    }
    drop(s, oldest);
    oldest->kind = kind;
    oldest->sparse = sparse;
    oldest->kv_len = kv_len;
    oldest->used = ++s->tick;
    const esa_status status = make_entry(s, oldest, &shapes);
    if (status) {
        drop(s, oldest);
        return status;
    }
    *entry = oldest;
    return ESA_OK;
}
