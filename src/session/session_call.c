/* session_call.c - one attention call: what the policy says, and doing it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything that can fail comes before the kernel, so that on failure o is unchanged. Plans and
 * kernels are run through their public calls, which take the ctx guard themselves; what stands
 * between them is held by nobody else, as a session has one user. */
#include "session/session_call.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct call {
    esa_session *s;
    int32_t layer, kind;
    const esa_tensor *q, *k, *v, *o, *lse;
} call;

/* Figures of a sparse call until it has succeeded. */
typedef struct figures {
    double asked, density, mass, select_seconds;
    int64_t existing; /* on the CPU: blocks that density counts against */
    /* on the GPU: [2] blocks that exist, blocks kept; there density comes from these */
    const int64_t *facts;
    int32_t made, loaded;
} figures;

static esa_status guarded_fail(esa_session *s, esa_status status, const char *what)
{
    char text[512];
    snprintf(text, sizeof text, "%s",
             what); /* what may be the ctx's own text, which enter clears */
    const esa_status entered = esa_ctx_enter(s->ctx);
    if (entered != ESA_OK) return entered;
    esa_fail(s->ctx, status, "%s", text);
    esa_ctx_leave(s->ctx);
    return status;
}

static int32_t on_gpu(const call *c) { return c->q->device == ESA_DEVICE_CUDA; }

static int32_t decide(const call *c)
{
    const esa_session *s = c->s;
    if (c->kind == ESA_CALL_CROSS || s->params.mode == ESA_SESSION_DENSE ||
        c->q->dim[2] < s->params.min_tokens || s->dense_layer[c->layer])
        return ESA_ACTION_DENSE;
    if (s->params.mode == ESA_SESSION_RECORD) return ESA_ACTION_RECORD;
    if (s->step < s->warmup) return ESA_ACTION_DENSE;
    return s->params.mode == ESA_SESSION_ONLINE ? ESA_ACTION_ONLINE : ESA_ACTION_CACHED;
}

/* Room for figures per head, made at the first sparse call: only then is their number known. */
static esa_status reserve_heads(esa_session *s, int64_t heads)
{
    if (s->head) return ESA_OK; /* calls with another number of heads are not booked by head */
    s->head = esa_mem_zalloc(
        &s->ctx->mem,
        esa_size_mul(esa_size_mul((int64_t)sizeof *s->head * s->params.layers, s->params.steps),
                     heads));
    s->heads = s->head ? heads : 0;
    return s->head
               ? ESA_OK
               : guarded_fail(s, ESA_ERR_MEMORY, "out of memory for the densities of single heads");
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
            /* blocks that exist are shared by all heads alike */
            head[h] += (double)(kept * m->H) / (double)existing;
        }
    esa_session_at(s, layer)->by_head++;
}

/* Runs the kernel and books the call. */
static esa_status attend(const call *c, const esa_session_plan *e, const esa_mask *mask,
                         int32_t action, const figures *f)
{
    esa_session *s = c->s;
    esa_status status = mask && !on_gpu(c) ? reserve_heads(s, mask->H) : ESA_OK;
    const double start = esa_session_now();
    if (status == ESA_OK)
        status = esa_plan_attention(e->plan, mask, c->q, c->k, c->v, c->o, c->lse, NULL);
    if (status != ESA_OK) return status;
    esa_session_cell *cell = esa_session_at(s, c->layer);
    if (!on_gpu(c))
        cell->attention_seconds += esa_session_now() - start;
    else if ((status = esa_session_gpu_end(&s->gpu, cell, mask ? f->facts : NULL)) != ESA_OK)
        return status;
    cell->calls++;
    cell->kernel = esa_plan_kernel(e->plan, mask, c->q, c->k, c->v, c->o);
    cell->when = (int64_t)s->tick;
    if (!mask) {
        cell->dense++;
        cell->fallback += action == ESA_ACTION_FALLBACK;
    } else {
        cell->sparse++;
        cell->made += f->made;
        cell->loaded += f->loaded;
        cell->asked += f->asked;
        if (!on_gpu(c)) {
            cell->density += f->density;
            book_heads(s, c->layer, mask, f->existing);
        }
        if (!isnan(f->mass)) {
            cell->mass += f->mass;
            cell->with_mass++;
        }
    }
    if (f) cell->select_seconds += f->select_seconds;
    return ESA_OK;
}

static esa_status run_dense(const call *c, int32_t action)
{
    esa_session_plan *e = NULL;
    const esa_status status = esa_session_get_plan(c->s, &e, c->q, c->k, c->kind, 0);
    return status == ESA_OK ? attend(c, e, NULL, action, NULL) : status;
}

/* A call that policy wants sparse cannot be: an error in a strict session, else dense and counted.
 * ctx holds the reason. */
static esa_status run_fallback(const call *c, esa_status why)
{
    esa_session *s = c->s;
    char text[512];
    snprintf(text, sizeof text, "layer %d, step %d would have run dense: %.400s", c->layer, s->step,
             esa_ctx_error(s->ctx));
    if (s->params.strict)
        return guarded_fail(s, why == ESA_ERR_MISMATCH ? why : ESA_ERR_POLICY, text);
    esa_log(s->ctx, ESA_LOG_WARNING, "%s", text);
    return run_dense(c, ESA_ACTION_FALLBACK);
}

/* ---------------------------------------------------------------- importance of the call's q and
 * k */

/* Into e->importance, and with a mask also the selection from it. */
static esa_status measure(const call *c, const esa_session_plan *e, esa_mask *mask)
{
    esa_ctx *ctx = c->s->ctx;
    const esa_plan *p = e->plan;
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    void *ws = NULL;
    status = esa_check_kv_len(ctx, p->select.kv_len, p->shapes.device, p->shapes.B, p->shapes.Nk,
                              &p->select.layout, p->select.mode);
    if (status == ESA_OK && !on_gpu(c)) status = esa_ctx_scratch(ctx, &ws, p->workspace);
    if (status == ESA_OK) {
        esa_select_args args;
        esa_bind_select(&args, ctx, &p->shapes, &p->select, c->q, c->k);
        args.perm_q = p->perm_q;
        args.perm_k = p->perm_k;
        if (on_gpu(c))
            status = esa_cuda_importance(ctx, &args, e->importance, NULL);
        else
            esa_select_importance(&args, e->importance, NULL, ws);
        if (mask) esa_select_from_importance(&args, mask, e->importance, ws);
    }
    esa_ctx_leave(ctx);
    return status;
}

/* Share of the importance that the mask keeps. */
static double kept_mass(const esa_session_plan *e)
{
    const esa_mask *m = e->mask;
    const int64_t rows = m->B * m->H * m->nq;
    double kept = 0, all = 0;
    for (int64_t r = 0; r < rows; r++) {
        const float *p = e->importance + r * m->nk;
        const uint16_t *index = m->index + r * m->cap;
        double k = 0, a = 0;
        for (int64_t j = 0; j < m->nk; j++) a += p[j];
        for (int32_t i = 0; i < m->count[r]; i++) k += p[index[i]];
        kept += k;
        all += a;
    }
    return all > 0 ? kept / all : 1;
}

/* ---------------------------------------------------------------- online */

static esa_status make_mask(const call *c, const esa_session_plan *e, figures *f)
{
    const double start = esa_session_now();
    const esa_status status = e->importance ? measure(c, e, e->mask)
                                            : esa_plan_select(e->plan, e->mask, c->q, c->k, NULL);
    if (status != ESA_OK) return status;
    f->made = 1;
    f->mass = (double)NAN;
    f->facts = e->mask->facts;
    if (on_gpu(c)) return esa_session_gpu_between(&c->s->gpu);
    f->select_seconds = esa_session_now() - start;
    f->existing = e->mask->existing;
    f->density = f->existing > 0 ? (double)esa_mask_kept(e->mask) / (double)f->existing : 1;
    if (e->importance) f->mass = kept_mass(e);
    return ESA_OK;
}

/* Lengths are compared by what they say: the caller may write new ones into the same array, or the
 * same ones into another. */
static int32_t rests_for(const esa_session_rest *rest, const esa_plan *p)
{
    const int32_t *kv_len = p->select.kv_len;
    if (!rest->made || !esa_session_same_shapes(&rest->shapes, &p->shapes)) return 0;
    if (p->shapes.device == ESA_DEVICE_CUDA) return rest->kv_gpu == kv_len;
    if (!rest->kv_len != !kv_len) return 0;
    return !kv_len || memcmp(rest->kv_len, kv_len, 4 * (size_t)p->shapes.B) == 0;
}

/* Memory for the mask of a plan and its lengths; on a GPU also for its facts, because the plan's
 * own mask may be another one by then. */
static esa_status make_rest(esa_session *s, esa_session_rest *rest, const esa_mask *m,
                            const esa_plan *p)
{
    const int32_t gpu = m->device == ESA_DEVICE_CUDA;
    const int64_t bits_bytes = m->B * m->H * m->nq * esa_ceil_div(m->nk, 8),
                  facts_at = esa_ceil_div(bits_bytes, 16) * 16;
    const int64_t bytes = gpu ? facts_at + 16 : bits_bytes,
                  kv_bytes = p->select.kv_len && !gpu ? 4 * p->shapes.B : 0;
    rest->made = 0;
    if (rest->bytes != bytes || rest->device != m->device) {
        uint8_t *bits = NULL;
        if (gpu) {
            const esa_status status = esa_session_gpu_alloc(&s->gpu, &bits, bytes);
            if (status != ESA_OK) return status;
        } else if (!(bits = esa_mem_alloc(&s->ctx->mem, bytes))) {
            return guarded_fail(s, ESA_ERR_MEMORY,
                                "out of memory for a mask that is kept between steps");
        }
        esa_session_drop_rest(s, rest);
        rest->bits = bits;
        rest->facts = gpu ? (int64_t *)(void *)(bits + facts_at) : NULL;
        rest->bytes = bytes;
        rest->device = m->device;
    }
    rest->kv_gpu = gpu ? p->select.kv_len : NULL;
    if (rest->kv_bytes != kv_bytes) {
        int32_t *kv_len = kv_bytes ? esa_mem_alloc(&s->ctx->mem, kv_bytes) : NULL;
        if (kv_bytes && !kv_len)
            return guarded_fail(s, ESA_ERR_MEMORY,
                                "out of memory for a mask that is kept between steps");
        esa_mem_free(&s->ctx->mem, rest->kv_len, rest->kv_bytes);
        rest->kv_len = kv_len;
        rest->kv_bytes = kv_bytes;
    }
    return ESA_OK;
}

/* With refresh_every > 1 a mask rests as bits between the steps that make it. */
static esa_status refresh_mask(const call *c, const esa_session_plan *e, figures *f)
{
    esa_session *s = c->s;
    esa_session_rest *rest = &s->rest[(int64_t)s->branch * s->params.layers + c->layer];
    if (rest->last_step != s->step) {
        rest->last_step = s->step;
        rest->sparse_steps++;
    }
    if ((rest->sparse_steps - 1) % s->params.refresh_every != 0 && rests_for(rest, e->plan)) {
        const double start = esa_session_now();
        f->density = rest->density;
        f->existing = rest->existing;
        f->mass = rest->mass;
        f->facts = rest->facts;
        if (on_gpu(c)) {
            const esa_status status = esa_session_gpu_expand(&s->gpu, e->mask, rest->bits);
            return status == ESA_OK ? esa_session_gpu_between(&s->gpu) : status;
        }
        esa_mask_set_bits(e->mask, rest->bits);
        f->select_seconds = esa_session_now() - start;
        return ESA_OK;
    }
    esa_status status = make_mask(c, e, f);
    if (status == ESA_OK) status = make_rest(s, rest, e->mask, e->plan);
    if (status != ESA_OK) return status;
    if (on_gpu(c))
        status = esa_session_gpu_rest(&s->gpu, e->mask, rest->bits, rest->facts);
    else
        esa_mask_to_bits(e->mask, rest->bits);
    if (status != ESA_OK) return status;
    if (rest->kv_len) memcpy(rest->kv_len, e->plan->select.kv_len, (size_t)rest->kv_bytes);
    rest->shapes = e->plan->shapes;
    rest->made = 1;
    rest->density = f->density;
    rest->existing = f->existing;
    rest->mass = f->mass;
    return ESA_OK;
}

/* Key lengths that cut into tokens the order moves cannot run sparse (ESA_ERR_UNSUPPORTED); dense
 * attention takes any. */
static esa_status check_lengths(const call *c, const esa_session_plan *e)
{
    esa_ctx *ctx = c->s->ctx;
    const esa_plan *p = e->plan;
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    status = esa_check_kv_len(ctx, p->select.kv_len, p->shapes.device, p->shapes.B, p->shapes.Nk,
                              &p->select.layout, p->select.mode);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status run_online(const call *c)
{
    esa_session *s = c->s;
    esa_session_plan *e = NULL;
    esa_status status = esa_session_get_plan(s, &e, c->q, c->k, c->kind, 1);
    if (status == ESA_OK) status = check_lengths(c, e);
    if (status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_SHAPE || status == ESA_ERR_MISMATCH)
        return run_fallback(c, ESA_ERR_POLICY);
    figures f = { .asked = s->params.select.budget };
    if (status == ESA_OK)
        status = s->params.refresh_every > 1 ? refresh_mask(c, e, &f) : make_mask(c, e, &f);
    /* a selector that the GPU does not have */
    if (status == ESA_ERR_UNSUPPORTED) return run_fallback(c, ESA_ERR_POLICY);
    return status == ESA_OK ? attend(c, e, e->mask, ESA_ACTION_ONLINE, &f) : status;
}

/* ---------------------------------------------------------------- cached */

/* Group of the file for the session's step, or -1: not stored. */
static int32_t cached_group(const esa_session *s)
{
    const esa_mask_file *file = s->params.masks;
    const int32_t T = file->info.steps;
    if (T == s->params.steps) return file->step_group[s->step];
    const int32_t group = file->step_group[(int64_t)s->step * T / s->params.steps];
    if (file->group_slot[group] >= 0) return group;
    /* floor() may fall just short of the file's first sparse step although the same warm-up rule,
     * applied to this step count, is over: then the first stored group is meant. */
    return s->step >= esa_warmup_steps(file->info.warmup_frac, s->params.steps)
               ? file->stored_group[0]
               : group;
}

static esa_status fail_mismatch(const call *c)
{
    esa_session *s = c->s;
    const esa_mask_file *file = s->params.masks;
    const esa_mask_file_info *f = &file->info;
    char text[512];
    snprintf(text, sizeof text, "%.120s was made for %.180s, the call has %.180s",
             file->tensors->label,
             esa_run_describe(f->Nq, f->Nk, f->layout.grid_q, f->H, f->layers, -1).text,
             esa_run_describe(c->q->dim[2], c->k->dim[2], s->params.select.layout.grid_q,
                              c->q->dim[1], s->params.layers, -1)
                 .text);
    return guarded_fail(s, ESA_ERR_MISMATCH, text);
}

static esa_status check_bits(esa_session *s, int64_t cell)
{
    esa_status status = esa_ctx_enter(s->ctx);
    if (status != ESA_OK) return status;
    status = esa_mask_file_check_bits(s->params.masks, s->masks, cell);
    esa_ctx_leave(s->ctx);
    return status;
}

static esa_status run_cached(const call *c)
{
    esa_session *s = c->s;
    const esa_mask_file *file = s->params.masks;
    const esa_mask_file_info *info = &file->info;
    /* the call's part of the file's heads */
    const int64_t heads = c->q->dim[1], first = s->params.first_head;
    if ((s->params.total_heads ? first + heads > info->H : heads != info->H) ||
        c->q->dim[2] != info->Nq || c->k->dim[2] != info->Nk) {
        const esa_status status = fail_mismatch(c);
        return status == ESA_ERR_MISMATCH ? run_fallback(c, status) : status;
    }
    const int32_t group = cached_group(s);
    const int64_t cell = esa_mask_file_cell(file, c->layer, group, s->branch);
    if (cell < 0) {
        char text[400];
        snprintf(text, sizeof text,
                 "its masks are not stored in %.200s (first layer dense %d, warm-up %g, %d of %d "
                 "layers and %d of %d groups stored)",
                 file->tensors->label, info->dense_first_layer, info->warmup_frac,
                 info->stored_layers, info->layers, info->stored_groups, info->groups);
        const esa_status status = guarded_fail(s, ESA_ERR_POLICY, text);
        return status == ESA_ERR_POLICY ? run_fallback(c, status) : status;
    }
    esa_session_plan *e = NULL;
    esa_status status = esa_session_get_plan(s, &e, c->q, c->k, c->kind, 1);
    if (status == ESA_OK) status = check_lengths(c, e);
    if (status == ESA_OK) status = check_bits(s, cell);
    if (status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_SHAPE)
        return run_fallback(c, ESA_ERR_POLICY);
    if (status != ESA_OK) return status;
    figures f = {
        .asked = s->permille / 1000.0, .mass = (double)NAN, .facts = e->mask->facts, .loaded = 1
    };
    const int64_t skipped = first * info->nq * esa_ceil_div(info->nk, 8);
    const double start = esa_session_now();
    e->mask->selector = info->selector;
    e->mask->asked = f.asked;
    if (on_gpu(c)) {
        const uint8_t *bits;
        status = esa_session_gpu_cell(&s->gpu, &bits, s->masks->bits, cell, file->cells,
                                      info->stored_groups, file->cell_bytes);
        if (status == ESA_OK) status = esa_session_gpu_expand(&s->gpu, e->mask, bits + skipped);
        if (status == ESA_OK) status = esa_session_gpu_between(&s->gpu);
        if (status != ESA_OK) return status;
    } else {
        esa_mask_set_bits(e->mask, s->masks->bits + cell * file->cell_bytes + skipped);
        f.existing = esa_mask_file_existing(info) / info->H * heads;
        f.density = (double)esa_mask_kept(e->mask) / (double)f.existing;
    }
    if (s->masks->mass) {
        f.mass = 0;
        for (int64_t h = first; h < first + heads; h++) {
            float m;
            memcpy(&m, s->masks->mass + 4 * (cell * info->H + h), 4);
            f.mass += (double)m / (double)heads;
        }
    }
    if (!on_gpu(c)) f.select_seconds = esa_session_now() - start;
    return attend(c, e, e->mask, ESA_ACTION_CACHED, &f);
}

/* ---------------------------------------------------------------- record */

/* The first call fixes the geometry; every later one must have it. */
static esa_status check_geometry(const call *c, const esa_session_plan *e)
{
    esa_session *s = c->s;
    esa_mask_file_info *f = &s->recorder.info;
    const esa_plan *p = e->plan;
    if (!f->H) {
        f->H = p->shapes.Hq;
        f->Nq = p->shapes.Nq;
        f->Nk = p->shapes.Nk;
        f->nq = p->nq;
        f->nk = p->nk;
        f->layout = p->select.layout;
        s->recorder.blocks = f->H * f->nq * f->nk;
    }
    if (f->H == p->shapes.Hq && f->Nq == p->shapes.Nq && f->Nk == p->shapes.Nk &&
        esa_run_layout_same(&f->layout, &p->select.layout))
        return ESA_OK;
    char text[512];
    if (f->H == p->shapes.Hq && f->Nq == p->shapes.Nq && f->Nk == p->shapes.Nk) {
        snprintf(text, sizeof text, "the recording was made for %.220s, this call has %.220s",
                 esa_run_describe_layout(&f->layout).text,
                 esa_run_describe_layout(&p->select.layout).text);
        return guarded_fail(s, ESA_ERR_MISMATCH, text);
    }
    snprintf(text, sizeof text, "the recording was made for %.220s, this call has %.220s",
             esa_run_describe(f->Nq, f->Nk, f->layout.grid_q, f->H, f->layers, -1).text,
             esa_run_describe(p->shapes.Nq, p->shapes.Nk, p->select.layout.grid_q, p->shapes.Hq,
                              s->params.layers, -1)
                 .text);
    return guarded_fail(s, ESA_ERR_MISMATCH, text);
}

static esa_status run_record(const call *c)
{
    esa_session *s = c->s;
    esa_recorder *rec = &s->recorder;
    esa_session_plan *e = NULL;
    esa_status status = esa_session_get_plan(s, &e, c->q, c->k, c->kind, 1);
    const int32_t first = !rec->info.H;
    if (status == ESA_OK) status = check_geometry(c, e);
    if (status != ESA_OK) return status;
    const int64_t B = e->plan->shapes.B, branch = rec->info.branches > 1 ? s->branch : 0;
    const int64_t cell = (branch * rec->info.layers + c->layer) * rec->info.groups +
                         esa_step_group(s->step, rec->info.groups, rec->info.steps);
    status = esa_ctx_enter(s->ctx);
    if (status == ESA_OK) {
        status = esa_recorder_reserve(rec, cell, (int32_t)esa_min64(B, ESA_RECORD_MOST + 1));
        esa_ctx_leave(s->ctx);
    }
    figures f = { 0 };
    const double start = esa_session_now();
    if (status == ESA_OK) status = measure(c, e, NULL);
    f.select_seconds = esa_session_now() - start;
    if (status == ESA_OK && on_gpu(c)) status = esa_session_gpu_between(&s->gpu);
    if (status == ESA_OK) status = attend(c, e, NULL, ESA_ACTION_RECORD, &f);
    for (int64_t b = 0; status == ESA_OK && b < B; b++)
        esa_recorder_add(rec, cell, e->importance + b * rec->blocks);
    /* a call that failed has said nothing about the model */
    if (status != ESA_OK && first) esa_recorder_forget(rec);
    return status;
}

/* ---------------------------------------------------------------- the public call */

static esa_status check_call(const call *c)
{
    const esa_session *s = c->s;
    if (s->step < 0)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "attention was called before esa_session_begin and esa_session_step said "
                        "where the model stands");
    if (c->layer < 0 || c->layer >= s->params.layers)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT, "layer is %d, the session has layers 0 to %d",
                        c->layer, s->params.layers - 1);
    if (c->kind != ESA_CALL_SELF && c->kind != ESA_CALL_CROSS)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "kind is %d, expected ESA_CALL_SELF or ESA_CALL_CROSS", c->kind);
    const esa_qkvo t = { c->q, c->k, c->v, c->o, c->lse };
    return esa_check_qkvo(s->ctx, &t);
}

esa_status esa_session_attention(esa_session *s, int32_t layer, int32_t kind, const esa_tensor *q,
                                 const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                                 const esa_tensor *lse)
{
    if (!s) return ESA_ERR_ARGUMENT;
    const call c = { s, layer, kind, q, k, v, o, lse };
    const esa_status status = esa_ctx_enter(s->ctx);
    if (status != ESA_OK) return status;
    esa_status checked = check_call(&c);
    if (checked == ESA_OK && on_gpu(&c)) checked = esa_session_gpu_begin(&s->gpu);
    esa_ctx_leave(s->ctx);
    if (checked != ESA_OK) return checked;
    switch (decide(&c)) {
    case ESA_ACTION_RECORD: return run_record(&c);
    case ESA_ACTION_ONLINE: return run_online(&c);
    case ESA_ACTION_CACHED: return run_cached(&c);
    default: return run_dense(&c, ESA_ACTION_DENSE);
    }
}
