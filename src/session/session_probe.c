/* session_probe.c - mode PROBE: every call runs dense, and its error at several densities is
 * measured.
 * SPDX-License-Identifier: Apache-2.0
 *
 * With carry, every density has masks, orders and differences of its own. They are made at the
 * anchors, where the error counts as 0, and measured at the steps between. */
#include "session/session.h"

#include <math.h>
#include <string.h>
#include "base/half.h"
#include "base/pool.h"

esa_status esa_session_probe_make(esa_session *s, const esa_session_params *p)
{
    const int64_t cells = (int64_t)p->layers * p->steps;
    s->probe.points = p->probe_count;
    memcpy(s->probe.density, p->probe, 8 * (size_t)p->probe_count);
    s->probe.bytes = 8 * cells * (p->probe_count + 1);
    s->probe.sum = esa_mem_zalloc(&s->ctx->mem, s->probe.bytes);
    if (!s->probe.sum)
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the errors of %lld cells",
                        (long long)cells);
    s->params.probe = NULL;
    if (!s->carry.anchor_count) return ESA_OK;
    s->probe.kept_count = (int64_t)p->branches * p->layers * p->probe_count;
    s->probe.kept = esa_mem_zalloc(&s->ctx->mem,
                                   s->probe.kept_count * (int64_t)sizeof *s->probe.kept);
    if (s->probe.kept) return ESA_OK;
    return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the masks of %lld cells",
                    (long long)cells);
}

void esa_session_probe_forget(esa_session *s)
{
    for (int64_t i = 0; s->probe.kept && i < s->probe.kept_count; i++)
        esa_session_kept_forget(&s->probe.kept[i]);
}

static void drop_diff(esa_session *s, esa_session_kept *kept)
{
    if (kept->diff.memory) kept->backend->release(s->ctx, kept->diff.memory, kept->diff.bytes);
    kept->diff = (esa_session_diff){ 0 };
}

void esa_session_probe_free(esa_session *s)
{
    esa_mem_free(&s->ctx->mem, s->probe.sum, s->probe.bytes);
    esa_mem_free(&s->ctx->mem, s->probe.o, s->probe.o_bytes);
    if (s->probe.backend) s->probe.backend->release(s->ctx, s->probe.device, s->probe.device_bytes);
    for (int64_t i = 0; s->probe.kept && i < s->probe.kept_count; i++) {
        drop_diff(s, &s->probe.kept[i]);
        esa_session_kept_free(&s->chunks, &s->probe.kept[i]);
    }
    esa_mem_free(&s->ctx->mem, s->probe.kept, s->probe.kept_count * (int64_t)sizeof *s->probe.kept);
    s->probe.kept = NULL;
    s->probe.sum = NULL;
    s->probe.o = s->probe.device = NULL;
    s->probe.backend = NULL;
}

/* ---------------------------------------------------------------- comparing */

/* Compares o with other, head by head. */
typedef struct compare_job {
    const esa_tensor *o, *other;
    double *sum; /* [B * H] */
} compare_job;

static void compare_head(void *arg, int64_t i, int32_t worker)
{
    const compare_job *j = arg;
    const esa_tensor *a = j->o, *b = j->other;
    const int64_t H = a->dim[1], head = i % H, batch = i / H;
    double sum = 0;
    (void)worker;
    for (int64_t n = 0; n < a->dim[2]; n++) {
        const int64_t at = batch * a->stride[0] + head * a->stride[1] + n * a->stride[2],
                      bt = batch * b->stride[0] + head * b->stride[1] + n * b->stride[2];
        for (int64_t d = 0; d < a->dim[3]; d++) {
            const double e = (double)esa_load_f32(a->data, at + d, a->dtype) -
                             (double)esa_load_f32(b->data, bt + d, b->dtype);
            sum += e * e;
        }
    }
    j->sum[i] = sum;
}

/* Mean squared difference. heads: one number per (batch entry, head), of the caller. */
static double compare(esa_ctx *ctx, const esa_tensor *o, const esa_tensor *other, double *heads)
{
    const int64_t count = o->dim[0] * o->dim[1];
    compare_job job = { o, other, heads };
    double sum = 0;
    esa_pool_run(ctx->pool, compare_head, &job, count);
    for (int64_t i = 0; i < count; i++) sum += heads[i];
    return sum / ((double)count * (double)o->dim[2] * (double)o->dim[3]);
}

/* ---------------------------------------------------------------- memory */

/* The outputs of one call. With host memory dense is the call's own, and read is written. */
typedef struct outputs {
    double *heads;          /* [B * H] */
    esa_tensor written;     /* the second output, where attention writes it */
    esa_tensor dense, read; /* both outputs in host memory */
} outputs;

/* Bytes from the first element of a view to the last. */
static int64_t span_of(const esa_tensor *t)
{
    int64_t last = 0;
    for (int32_t i = 0; i < 4; i++) last += (t->dim[i] - 1) * t->stride[i];
    return esa_size_mul(last + 1, esa_dtype_size(t->dtype));
}

/* Host memory that the session keeps. */
static esa_status host_room(esa_session *s, int64_t bytes)
{
    if (s->probe.o_bytes == bytes) return ESA_OK;
    esa_mem_free(&s->ctx->mem, s->probe.o, s->probe.o_bytes);
    s->probe.o = esa_mem_alloc(&s->ctx->mem, bytes);
    s->probe.o_bytes = s->probe.o ? bytes : 0;
    return s->probe.o ? ESA_OK
                      : esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for a second output");
}

static esa_status device_room(esa_session *s, const esa_backend *be, int64_t bytes)
{
    if (s->probe.backend == be && s->probe.device_bytes == bytes) return ESA_OK;
    if (s->probe.backend) s->probe.backend->release(s->ctx, s->probe.device, s->probe.device_bytes);
    s->probe.backend = NULL;
    ESA_TRY(be->alloc(s->ctx, &s->probe.device, bytes));
    s->probe.backend = be;
    s->probe.device_bytes = bytes;
    return ESA_OK;
}

static esa_status make_outputs(esa_session *s, outputs *out, const esa_backend *be,
                               const esa_tensor *o)
{
    const int64_t count = o->dim[0] * o->dim[1],
                  bytes = esa_size_mul(esa_size_mul(count, o->dim[2]),
                                       esa_dtype_size(o->dtype) * o->dim[3]),
                  copy = be->host_memory ? 0 : span_of(o);
    ESA_TRY(host_room(s, esa_size_add(esa_size_add(8 * count, bytes), copy)));
    out->heads = s->probe.o;
    out->read = esa_tensor_bnsd(out->heads + count, o->dtype, o->dim[0], o->dim[1], o->dim[2],
                                o->dim[3]);
    out->written = out->read;
    out->dense = *o;
    if (be->host_memory) return ESA_OK;
    ESA_TRY(device_room(s, be, bytes));
    out->written.data = s->probe.device;
    out->written.device = o->device;
    out->written.device_index = o->device_index;
    out->dense.data = (char *)out->read.data + bytes;
    return be->download(s->ctx, out->dense.data, o->data, copy);
}

/* ---------------------------------------------------------------- the call */

static int32_t is_adaptive(const esa_plan *p)
{
    return p->select.layout.order == ESA_ORDER_ADAPTIVE && !p->select.layout.order_applied;
}

/* Selects at density k into e->mask, which has its order. */
static esa_status choose(const esa_session_call *c, const esa_session_plan *e, int32_t k)
{
    return esa_plan_choose(e->plan, e->mask, c->t->q, c->t->k, c->t->v, c->s->probe.density[k],
                           e->importance, NULL);
}

/* Carry: what density k keeps for this call, in a branch that made it at this step, or else in that
 * of the call itself. */
static esa_session_kept *kept_of(const esa_session_call *c, const esa_session_plan *e, int32_t k)
{
    const esa_session *s = c->s;
    esa_session_kept *kept = NULL;
    for (int32_t b = s->params.share_branches ? 0 : s->branch; b <= s->branch; b++) {
        kept = &s->probe.kept[((int64_t)b * s->params.layers + c->layer) * s->probe.points + k];
        if (kept->own_step == s->step && esa_session_kept_fits(kept, e->plan)) break;
    }
    return kept;
}

/* Makes mask, order and difference of a density. The order is made once for all densities. */
static esa_status anchor(const esa_session_call *c, const esa_session_plan *e, int32_t k,
                         esa_session_kept *kept)
{
    esa_session *s = c->s;
    const esa_plan *p = e->plan;
    const int64_t bytes = esa_session_diff_bytes(&s->params, &p->shapes);
    if (is_adaptive(p) && k == 0) ESA_TRY(esa_plan_reorder(p, e->mask, c->t->q, c->t->k, NULL));
    ESA_TRY(choose(c, e, k));
    ESA_TRY(esa_session_kept_store(&s->chunks, kept, p, e->mask));
    if (kept->diff.bytes != bytes) {
        drop_diff(s, kept);
        ESA_TRY(p->backend->alloc(s->ctx, &kept->diff.memory, bytes));
        kept->diff.bytes = bytes;
    }
    kept->diff.shapes = p->shapes;
    const esa_carry carry = esa_session_diff_view(s, &kept->diff);
    esa_qkvo t = *c->t;
    t.carry = &carry;
    t.use = ESA_CARRY_MAKE;
    ESA_TRY(esa_plan_attend(p, e->mask, &t, NULL, 16, NULL));
    kept->diff.made = 1;
    kept->made_step = s->step;
    return ESA_OK;
}

/* Carry: computes density k into t->o, or makes its difference. *dense 1: it is an anchor, and its
 * output is the dense one. */
static esa_status carry_one(const esa_session_call *c, const esa_session_plan *e, int32_t k,
                            esa_qkvo t, int32_t *dense)
{
    esa_session *s = c->s;
    esa_session_kept *kept = kept_of(c, e, k);
    const int32_t due = esa_session_anchor_due(s, s->step, kept->made_step);
    kept->own_step = s->step;
    *dense = due || !kept->diff.made || !esa_session_kept_fits(kept, e->plan);
    if (*dense) return anchor(c, e, k, kept);
    const esa_carry carry = esa_session_diff_view(s, &kept->diff);
    t.carry = &carry;
    t.use = ESA_CARRY_ADD;
    ESA_TRY(esa_session_kept_mask(&s->chunks, kept, e->mask));
    return esa_plan_attend(e->plan, e->mask, &t, NULL, 16, NULL);
}

esa_status esa_session_probe_call(const esa_session_call *c, const esa_session_plan *e)
{
    esa_session *s = c->s;
    const esa_plan *p = e->plan;
    const esa_backend *be = p->backend;
    outputs out;
    double error[ESA_WORK_MAX_POINTS];
    ESA_TRY(make_outputs(s, &out, be, c->t->o));
    const esa_qkvo t = { c->t->q, c->t->k, c->t->v, &out.written, NULL, NULL, 0 };
    const int32_t carries = s->carry.anchor_count > 0;
    if (is_adaptive(p) && !carries) ESA_TRY(esa_plan_reorder(p, e->mask, t.q, t.k, NULL));
    for (int32_t k = 0; k < s->probe.points; k++) {
        int32_t dense = 0;
        error[k] = 0;
        if (carries) {
            ESA_TRY(carry_one(c, e, k, t, &dense));
        } else {
            ESA_TRY(choose(c, e, k));
            ESA_TRY(esa_plan_attend(p, e->mask, &t, NULL, 16, NULL));
        }
        if (dense) continue;
        if (!be->host_memory)
            ESA_TRY(be->download(s->ctx, out.read.data, out.written.data, s->probe.device_bytes));
        error[k] = compare(s->ctx, &out.dense, &out.read, out.heads);
    }
    double *sum = s->probe.sum +
                  ((int64_t)c->layer * s->params.steps + s->step) * (s->probe.points + 1);
    for (int32_t k = 0; k < s->probe.points; k++) sum[k] += error[k];
    sum[s->probe.points]++;
    return ESA_OK;
}

static esa_status get(const esa_session *s, double *error, int32_t count, int32_t layer,
                      int32_t step)
{
    if (s->params.mode != ESA_SESSION_PROBE)
        return esa_fail(s->ctx, ESA_ERR_STATE, "this session does not measure errors: mode is %d",
                        s->params.mode);
    if (!error || count != s->probe.points || layer < 0 || layer >= s->params.layers || step < 0 ||
        step >= s->params.steps)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "error is NULL, or count is %d, layer %d, step %d; the session measures %d "
                        "densities in %d layers and %d steps",
                        count, layer, step, s->probe.points, s->params.layers, s->params.steps);
    const double *sum = s->probe.sum +
                        ((int64_t)layer * s->params.steps + step) * (s->probe.points + 1);
    const double calls = sum[s->probe.points];
    for (int32_t k = 0; k < count; k++) error[k] = calls > 0 ? sum[k] / calls : (double)NAN;
    return ESA_OK;
}

esa_status esa_session_get_probe(const esa_session *s, double *error, int32_t count, int32_t layer,
                                 int32_t step)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = get(s, error, count, layer, step);
    esa_ctx_leave(s->ctx);
    return status;
}

static esa_status get_sigma(const esa_session *s, double *sigma, int32_t steps)
{
    if (!sigma || steps != s->params.steps)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "sigma is NULL, or steps is %d; the session has %d steps", steps,
                        s->params.steps);
    if (!s->sigma)
        return esa_fail(s->ctx, ESA_ERR_STATE, "the session does not know its noise levels");
    memcpy(sigma, s->sigma, 8 * (size_t)steps);
    return ESA_OK;
}

esa_status esa_session_get_sigma(const esa_session *s, double *sigma, int32_t steps)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = get_sigma(s, sigma, steps);
    esa_ctx_leave(s->ctx);
    return status;
}
