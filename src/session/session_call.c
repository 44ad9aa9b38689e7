/* session_call.c - runs one attention call as the policy of the session says.
 * SPDX-License-Identifier: Apache-2.0
 *
 * esa_session_attention takes the guard and checks the views once. All other functions get checked
 * views. What can fail comes before the kernel, so on failure o is unchanged. Only a GPU can still
 * report an error afterwards. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "session/session.h"

/* What one call does. */
enum { ACTION_DENSE, ACTION_RECORD, ACTION_PROBE, ACTION_ONLINE, ACTION_CACHED };

static int32_t decide(const esa_session_call *c)
{
    const esa_session *s = c->s;
    if (c->kind == ESA_CALL_CROSS || s->params.mode == ESA_SESSION_DENSE ||
        c->t->q->dim[2] < s->params.min_tokens || s->dense_layer[c->layer])
        return ACTION_DENSE;
    if (s->params.mode == ESA_SESSION_RECORD) return ACTION_RECORD;
    if (s->params.mode == ESA_SESSION_PROBE) return ACTION_PROBE;
    if (s->step < s->warmup) return ACTION_DENSE;
    return s->params.mode == ESA_SESSION_ONLINE ? ACTION_ONLINE : ACTION_CACHED;
}

int32_t esa_session_precision(const esa_session *s, int32_t layer, int32_t kind)
{
    const esa_session_params *p = &s->params;
    const int32_t measures = p->mode == ESA_SESSION_RECORD || p->mode == ESA_SESSION_PROBE;
    if (p->attention.precision != 8 || measures || kind == ESA_CALL_CROSS || s->layer16[layer] ||
        s->step < p->steps16_first || s->step >= p->steps - p->steps16_last)
        return 16;
    return 8;
}

/* ---------------------------------------------------------------- running and booking */

/* Allocates the densities per head at the first sparse call, which tells the number of heads. */
static esa_status reserve_heads(esa_session *s, int64_t heads)
{
    if (s->head) return ESA_OK; /* book_heads skips calls with another number of heads */
    const int64_t cells = esa_size_mul(s->params.layers, s->params.steps);
    s->head = esa_mem_zalloc(&s->ctx->mem,
                             esa_size_mul(esa_size_mul(cells, heads), (int64_t)sizeof *s->head));
    s->heads = s->head ? heads : 0;
    if (s->head) return ESA_OK;
    return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the densities of %lld heads",
                    (long long)heads);
}

static void book_heads(esa_session *s, int32_t layer, const esa_mask *m, int64_t existing)
{
    if (m->H != s->heads || existing < 1) return;
    double *head = s->head + ((int64_t)layer * s->params.steps + s->step) * s->heads;
    const int32_t *count = m->count;
    for (int64_t b = 0; b < m->B; b++)
        for (int64_t h = 0; h < m->H; h++) {
            int64_t kept = 0;
            for (int64_t i = 0; i < m->nq; i++) kept += *count++;
            /* every head has the same number of existing blocks */
            head[h] += (double)(kept * m->H) / (double)existing;
        }
    esa_session_at(s, layer)->by_head++;
}

/* Runs the kernel of a sparse call. An anchor runs dense first, which is its output, and then
 * sparse for the difference. */
static esa_status run_kernels(const esa_session_call *c, const esa_session_plan *e,
                              const esa_session_sparse *f, esa_attn_kernel *kernel)
{
    esa_session *s = c->s;
    const int32_t precision = esa_session_precision(s, c->layer, c->kind);
    if (!f->diff) return esa_plan_attend(e->plan, e->mask, c->t, NULL, precision, kernel);
    esa_carry carry;
    esa_qkvo t = *c->t;
    ESA_TRY(esa_session_diff_begin(s, f->diff, f->anchor, &carry));
    t.carry = &carry;
    t.use = f->anchor ? ESA_CARRY_MAKE : ESA_CARRY_ADD;
    if (f->anchor) {
        esa_session_plan *dense; /* the plan of this call was used last, so it stays */
        void *ws;                /* room for both calls before o is written */
        ESA_TRY(esa_session_get_plan(s, &dense, t.q, t.k, c->kind, 0));
        ESA_TRY(dense->plan->backend->scratch(
            s->ctx, &ws, esa_max64(dense->plan->workspace, e->plan->workspace)));
        ESA_TRY(esa_plan_attend(dense->plan, NULL, c->t, NULL, precision, NULL));
    }
    ESA_TRY(esa_plan_attend(e->plan, e->mask, &t, NULL, precision, kernel));
    if (f->anchor) ESA_TRY(esa_session_check_diff(c, e, &carry));
    return esa_session_diff_end(s, f->diff, f->anchor, esa_session_next_diff(s, c->layer, f->diff));
}

/* Runs the kernel and books the call. f NULL: dense. */
static esa_status run_and_book(const esa_session_call *c, const esa_session_plan *e,
                               const esa_session_sparse *f)
{
    esa_session *s = c->s;
    const esa_mask *mask = f ? e->mask : NULL;
    const int32_t by_head = mask && e->plan->backend->host_memory;
    esa_attn_kernel kernel;
    if (by_head) ESA_TRY(reserve_heads(s, mask->H));
    if (f)
        ESA_TRY(run_kernels(c, e, f, &kernel));
    else
        ESA_TRY(esa_plan_attend(e->plan, NULL, c->t, NULL,
                                esa_session_precision(s, c->layer, c->kind), &kernel));
    esa_session_cell *cell = esa_session_at(s, c->layer);
    const esa_session_price price = esa_session_price_of(c, e, f);
    ESA_TRY(esa_session_figures_end(&s->figures, cell, f ? f->facts : NULL, &price));
    cell->calls++;
    cell->eight += kernel.bits == 8;
    cell->kernel = kernel.name;
    cell->when = (int64_t)s->tick;
    if (!f) {
        cell->dense++;
        return ESA_OK;
    }
    cell->sparse++;
    cell->made += f->made;
    cell->loaded += f->loaded;
    cell->asked += f->asked;
    cell->anchors += f->anchor;
    cell->carried += f->diff && !f->anchor;
    cell->age += f->diff ? f->age : 0;
    if (by_head) book_heads(s, c->layer, mask, f->facts[0]);
    if (!isnan(f->mass)) {
        cell->mass += f->mass;
        cell->with_mass++;
    }
    return ESA_OK;
}

static esa_status run_dense(const esa_session_call *c)
{
    esa_session *s = c->s;
    esa_session_plan *e;
    ESA_TRY(esa_session_get_plan(s, &e, c->t->q, c->t->k, c->kind, 0));
    ESA_TRY(esa_session_figures_begin(&s->figures, e->plan->backend));
    return run_and_book(c, e, NULL);
}

/* For a call that should run sparse but cannot; the message in ctx holds the reason. A strict
 * session fails. Other sessions run the call dense and count a fallback. */
static esa_status run_fallback(const esa_session_call *c, esa_status why)
{
    esa_session *s = c->s;
    char text[512];
    snprintf(text, sizeof text, "layer %d, step %d would have run dense: %.400s", c->layer, s->step,
             s->ctx->error);
    if (s->params.strict)
        return esa_fail(s->ctx, why == ESA_ERR_MISMATCH ? why : ESA_ERR_POLICY, "%s", text);
    s->ctx->error[0] = 0;
    esa_log(s->ctx, ESA_LOG_WARNING, "%s", text);
    ESA_TRY(run_dense(c));
    esa_session_at(s, c->layer)->fallback++;
    return ESA_OK;
}

/* 1 if the status means that these views cannot run sparse, 0 for other failures. */
static int32_t cannot_be_sparse(esa_status status)
{
    return status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_SHAPE;
}

/* Gets the sparse plan of the call. Fails with ESA_ERR_UNSUPPORTED if the key lengths cut into
 * tokens that the order moves; dense attention takes any lengths. */
static esa_status sparse_plan(const esa_session_call *c, esa_session_plan **e)
{
    ESA_TRY(esa_session_get_plan(c->s, e, c->t->q, c->t->k, c->kind, 1));
    const esa_plan *p = (*e)->plan;
    return esa_check_kv_len(c->s->ctx, p->select.kv_len, p->shapes.device, p->shapes.B,
                            p->shapes.Nk, &p->select.layout, p->select.mode);
}

/* ---------------------------------------------------------------- online */

static esa_status run_online(const esa_session_call *c)
{
    esa_session *s = c->s;
    esa_session_plan *e;
    esa_session_sparse f = { 0 };
    esa_status status = sparse_plan(c, &e);
    if (cannot_be_sparse(status) || status == ESA_ERR_MISMATCH)
        return run_fallback(c, ESA_ERR_POLICY);
    if (status) return status;
    ESA_TRY(esa_session_solve(s, e->plan));
    if (esa_session_runs_dense(s, c->layer)) return run_dense(c);
    ESA_TRY(esa_session_figures_begin(&s->figures, e->plan->backend));
    status = esa_session_online_mask(c, e, &f);
    /* this device does not have the selector */
    if (status == ESA_ERR_UNSUPPORTED) return run_fallback(c, ESA_ERR_POLICY);
    if (status) return status;
    ESA_TRY(esa_session_figures_selected(&s->figures));
    return run_and_book(c, e, &f);
}

/* ---------------------------------------------------------------- cached */

/* The step group of the file that serves the session's step. The file may not store it. */
static int32_t cached_group(const esa_session *s)
{
    const esa_mask_file *file = s->params.masks;
    const int32_t T = file->info.steps;
    if (T == s->params.steps) return file->step_group[s->step];
    const int32_t group = file->step_group[(int64_t)s->step * T / s->params.steps];
    if (file->group_slot[group] >= 0) return group;
    /* floor() may give the file's last warm-up step although the warm-up of this step count is
     * over. Then use the first stored group. */
    return s->step >= esa_warmup_steps(file->info.warmup_frac, s->params.steps)
               ? file->stored_group[0]
               : group;
}

static esa_status fail_mismatch(const esa_session_call *c)
{
    esa_session *s = c->s;
    const esa_mask_file *file = s->params.masks;
    const esa_mask_file_info *f = &file->info;
    const esa_tensor *q = c->t->q, *k = c->t->k;
    return esa_fail(s->ctx, ESA_ERR_MISMATCH, "%.120s was made for %.180s, but the call has %.180s",
                    file->tensors->label,
                    esa_run_describe(f->Nq, f->Nk, f->layout.grid_q, f->H, f->layers, -1).text,
                    esa_run_describe(q->dim[2], k->dim[2], s->params.select.layout.grid_q,
                                     q->dim[1], s->params.layers, -1)
                        .text);
}

static esa_status fail_not_stored(const esa_session_call *c)
{
    const esa_mask_file *file = c->s->params.masks;
    const esa_mask_file_info *f = &file->info;
    return esa_fail(
        c->s->ctx, ESA_ERR_POLICY,
        "its masks are not stored in %.200s (first layer dense %d, warm-up %g, %d of %d "
        "layers and %d of %d groups stored)",
        file->tensors->label, f->dense_first_layer, f->warmup_frac, f->stored_layers, f->layers,
        f->stored_groups, f->groups);
}

/* Mean kept mass of these heads, as stored in the file; NaN if the file does not store it. */
static double cached_mass(const esa_session *s, int64_t cell, int64_t first, int64_t heads)
{
    /* masks by error hold another figure in its place */
    if (!s->masks->mass || s->masks->density) return (double)NAN;
    double sum = 0;
    for (int64_t h = first; h < first + heads; h++) {
        float m;
        memcpy(&m, s->masks->mass + 4 * (cell * s->params.masks->info.H + h), 4);
        sum += (double)m / (double)heads;
    }
    return sum;
}

/* Fills e->mask with a stored cell. */
static esa_status load_mask(const esa_session_call *c, const esa_session_plan *e, int64_t cell,
                            esa_session_sparse *f)
{
    esa_session *s = c->s;
    const esa_mask_file *file = s->params.masks;
    const esa_mask_file_info *info = &file->info;
    const int64_t heads = c->t->q->dim[1], first = s->params.first_head;
    const int64_t skipped = first * info->nq * esa_ceil_div(info->nk, 8);
    const uint8_t *bits, *fine;
    ESA_TRY(
        esa_session_chunks_cell(&s->chunks, e->plan->backend, &bits, &fine, file, s->masks, cell));
    ESA_TRY(e->plan->backend->mask_set_bits(s->ctx, e->mask, bits + skipped,
                                            fine ? fine + skipped : NULL));
    ESA_TRY(esa_session_figures_selected(&s->figures));
    e->mask->selector = info->selector;
    e->mask->asked = f->asked;
    f->facts = e->mask->facts;
    f->mass = cached_mass(s, cell, first, heads);
    return ESA_OK;
}

static esa_status run_cached(const esa_session_call *c)
{
    esa_session *s = c->s;
    const esa_mask_file *file = s->params.masks;
    const esa_mask_file_info *info = &file->info;
    const int64_t heads = c->t->q->dim[1], first = s->params.first_head;
    const int32_t other_heads = s->params.total_heads ? first + heads > info->H : heads != info->H;
    if (other_heads || c->t->q->dim[2] != info->Nq || c->t->k->dim[2] != info->Nk)
        return run_fallback(c, fail_mismatch(c));
    int64_t cell = esa_mask_file_cell(file, c->layer, cached_group(s), s->branch);
    if (cell < 0) return run_fallback(c, fail_not_stored(c));
    if (s->masks->density && esa_mask_file_cell_density(s->masks, cell) >= 1) return run_dense(c);
    esa_session_plan *e;
    esa_session_sparse f = { .loaded = 1 };
    esa_status status = sparse_plan(c, &e);
    if (!status) status = esa_mask_file_check_bits(file, s->masks, cell);
    if (cannot_be_sparse(status)) return run_fallback(c, ESA_ERR_POLICY);
    if (status) return status;
    if (s->carry.anchor_count) ESA_TRY(esa_session_held_cell(c, e, &cell, &f));
    f.asked = esa_mask_file_cell_density(s->masks, cell);
    ESA_TRY(esa_session_figures_begin(&s->figures, e->plan->backend));
    ESA_TRY(load_mask(c, e, cell, &f));
    return run_and_book(c, e, &f);
}

/* ---------------------------------------------------------------- record */

/* The first call fixes the geometry of the recording. Later calls must have the same. */
static esa_status check_geometry(const esa_session_call *c, const esa_plan *p)
{
    esa_session *s = c->s;
    esa_mask_file_info *f = &s->recorder.info;
    const esa_shapes *h = &p->shapes;
    if (!f->H) {
        esa_recorder_sizes(f, h->Nk);
        f->H = h->Hq;
        f->Nq = h->Nq;
        f->Nk = h->Nk;
        f->nq = p->nq;
        f->nk = p->nk;
        f->layout = p->select.layout;
        s->recorder.blocks = esa_run_levels(f) * f->H * f->nq * f->nk;
    }
    if (f->H != h->Hq || f->Nq != h->Nq || f->Nk != h->Nk)
        return esa_fail(
            s->ctx, ESA_ERR_MISMATCH, "the recording was made for %.220s, but the call has %.220s",
            esa_run_describe(f->Nq, f->Nk, f->layout.grid_q, f->H, f->layers, -1).text,
            esa_run_describe(h->Nq, h->Nk, p->select.layout.grid_q, h->Hq, s->params.layers, -1)
                .text);
    if (!esa_run_layout_same(&f->layout, &p->select.layout))
        return esa_fail(s->ctx, ESA_ERR_MISMATCH,
                        "the recording was made for %.220s, but the call has %.220s",
                        esa_run_describe_layout(&f->layout).text,
                        esa_run_describe_layout(&p->select.layout).text);
    return ESA_OK;
}

static esa_status record(const esa_session_call *c, const esa_session_plan *e)
{
    esa_session *s = c->s;
    esa_recorder *rec = &s->recorder;
    ESA_TRY(check_geometry(c, e->plan));
    const int64_t B = e->plan->shapes.B, branch = rec->info.branches > 1 ? s->branch : 0;
    const int64_t cell = (branch * rec->info.layers + c->layer) * rec->info.groups +
                         esa_step_group(s->step, rec->info.groups, rec->info.steps);
    ESA_TRY(esa_recorder_reserve(rec, cell, (int32_t)esa_min64(B, ESA_RECORD_MOST + 1)));
    const esa_plan *p = e->plan;
    ESA_TRY(esa_check_kv_len(s->ctx, p->select.kv_len, p->shapes.device, B, p->shapes.Nk,
                             &p->select.layout, p->select.mode));
    ESA_TRY(esa_session_figures_begin(&s->figures, p->backend));
    if (esa_run_errors(&rec->info))
        ESA_TRY(esa_plan_errors(p, e->importance, NULL, c->t->q, c->t->k, c->t->v));
    else
        ESA_TRY(esa_plan_importance(p, e->importance, c->t->q, c->t->k));
    ESA_TRY(esa_session_figures_selected(&s->figures));
    ESA_TRY(run_and_book(c, e, NULL));
    const int64_t level = rec->blocks / esa_run_levels(&rec->info);
    for (int64_t b = 0; b < B; b++)
        esa_recorder_add(rec, cell, e->importance + b * level, B * level);
    return ESA_OK;
}

static esa_status run_record(const esa_session_call *c)
{
    esa_session *s = c->s;
    esa_session_plan *e;
    ESA_TRY(esa_session_get_plan(s, &e, c->t->q, c->t->k, c->kind, 1));
    const int32_t first = !s->recorder.info.H;
    const esa_status status = record(c, e);
    if (status && first) esa_recorder_forget(&s->recorder); /* a failed call fixes no geometry */
    return status;
}

/* ---------------------------------------------------------------- probe */

static esa_status run_probe(const esa_session_call *c)
{
    esa_session_plan *e;
    ESA_TRY(run_dense(c));
    ESA_TRY(sparse_plan(c, &e));
    return esa_session_probe_call(c, e);
}

/* ---------------------------------------------------------------- the call */

static esa_status check_call(const esa_session_call *c)
{
    const esa_session *s = c->s;
    if (s->step < 0)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "attention was called before esa_session_begin and esa_session_step");
    if (c->layer < 0 || c->layer >= s->params.layers)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "layer is %d, but the session has layers 0 to %d",
                        c->layer, s->params.layers - 1);
    if (c->kind != ESA_CALL_SELF && c->kind != ESA_CALL_CROSS)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "kind is %d, expected ESA_CALL_SELF or ESA_CALL_CROSS", c->kind);
    return esa_check_qkvo(s->ctx, c->t);
}

esa_status esa_session_attend(esa_session *s, int32_t layer, int32_t kind, const esa_qkvo *t)
{
    const esa_session_call c = { s, layer, kind, t };
    ESA_TRY(check_call(&c));
    switch (decide(&c)) {
    case ACTION_RECORD: return run_record(&c);
    case ACTION_PROBE: return run_probe(&c);
    case ACTION_ONLINE: return run_online(&c);
    case ACTION_CACHED: return run_cached(&c);
    default: return run_dense(&c);
    }
}

esa_status esa_session_attention(esa_session *s, int32_t layer, int32_t kind, const esa_tensor *q,
                                 const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                                 const esa_tensor *lse)
{
    if (!s) return ESA_ERR_ARGUMENT;
    const esa_qkvo t = { q, k, v, o, lse, NULL, 0 };
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_attend(s, layer, kind, &t);
    esa_ctx_leave(s->ctx);
    return status;
}
