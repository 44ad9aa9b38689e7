/* session_check.c - checks the first difference that a session makes on a device whose kernels
 * cannot be tested where the library is built.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Right after it was made, the sparse call that adds it must give the dense output again, but for
 * the rounding of the difference. A few rows of a few heads are compared. That costs one sparse
 * call of one layer, once for each session. */
#include <math.h>
#include "base/half.h"
#include "base/view.h"
#include "session/session.h"

enum { CHECK_HEADS = 3, CHECK_ROWS = 7 };

typedef struct check_row {
    uint16_t o[2]
              [2 * ESA_MAX_HEAD_DIM]; /* dense output, and sparse output with d; f16, bf16, f32 */
    uint16_t d[ESA_MAX_HEAD_DIM];     /* E4M3 codes or bf16 */
    float scale;                      /* of E4M3 codes */
} check_row;

/* How far the two outputs may be apart: d is off by at most 1/16 of its largest element in E4M3 and
 * 1/256 in bf16 (half of the last bit of an element, and half of the least step). Both outputs are
 * rounded to their dtype, by 2^-9 in bf16 and less in the others; sums may be in another order. */
static float bound_of(const check_row *r, int64_t D, int32_t dtype, int32_t format)
{
    float d = 0, o = 0;
    for (int64_t i = 0; i < D; i++) {
        d = fmaxf(d, format == ESA_CARRY_E4M3
                         ? fabsf(esa_f8_to_f32(((const uint8_t *)r->d)[i])) * r->scale
                         : fabsf(esa_bf16_to_f32(r->d[i])));
        o = fmaxf(o, fabsf(esa_load_f32(r->o[0], i, dtype)));
    }
    return d * (format == ESA_CARRY_E4M3 ? 1.0f / 16 : 1.0f / 256) + 0x1p-7f * o + 1e-6f;
}

/* Reads row n of head h, batch entry b. */
static esa_status fetch(esa_session *s, check_row *r, const esa_tensor *dense,
                        const esa_tensor *added, const esa_carry *d, const int64_t at[3])
{
    const esa_backend *be = s->carry.backend;
    const int64_t D = dense->dim[3], size = esa_dtype_size(dense->dtype),
                  row = (at[0] * d->H + at[1]) * d->N + at[2];
    const esa_tensor *const o[2] = { dense, added };
    for (int32_t i = 0; i < 2; i++) {
        const int64_t first = at[0] * o[i]->stride[0] + at[1] * o[i]->stride[1] +
                              at[2] * o[i]->stride[2];
        ESA_TRY(be->download(s->ctx, r->o[i], (const char *)o[i]->data + first * size, D * size));
    }
    const int64_t bytes = D * (d->format == ESA_CARRY_E4M3 ? 1 : 2);
    ESA_TRY(be->download(s->ctx, r->d, (const char *)d->value + row * bytes, bytes));
    return d->scale ? be->download(s->ctx, &r->scale, d->scale + row, sizeof r->scale) : ESA_OK;
}

static esa_status compare(esa_session *s, const esa_tensor *dense, const esa_tensor *added,
                          const esa_carry *d)
{
    const int64_t D = dense->dim[3];
    for (int64_t i = 0; i < CHECK_HEADS * CHECK_ROWS; i++) {
        /* the first, the last and some between */
        const int64_t head = i / CHECK_ROWS * (d->B * d->H - 1) / (CHECK_HEADS - 1),
                      n = i % CHECK_ROWS * (d->N - 1) / (CHECK_ROWS - 1);
        const int64_t at[3] = { head / d->H, head % d->H, n };
        check_row r = { .scale = 0 };
        ESA_TRY(fetch(s, &r, dense, added, d, at));
        const float bound = bound_of(&r, D, dense->dtype, d->format);
        for (int64_t j = 0; j < D; j++) {
            const float a = esa_load_f32(r.o[0], j, dense->dtype),
                        b = esa_load_f32(r.o[1], j, dense->dtype);
            /* the inputs may hold NaN and infinity; a difference keeps neither */
            if (!isfinite(a) || fabsf(a - b) <= bound) continue;
            return esa_fail(s->ctx, ESA_ERR_INTERNAL,
                            "carry gives wrong results on this %s: token %lld of head %lld is %g, "
                            "dense it is %g, and they may be %g apart; turn carry off and report "
                            "the device",
                            s->carry.backend->name, (long long)n, (long long)head, (double)b,
                            (double)a, (double)bound);
        }
    }
    return ESA_OK;
}

esa_status esa_session_check_diff(const esa_session_call *c, const esa_session_plan *e,
                                  const esa_carry *d)
{
    esa_session *s = c->s;
    const esa_backend *be = s->carry.backend;
    const esa_tensor *o = c->t->o;
    const int64_t bytes = esa_size_mul(o->dim[0] * o->dim[1] * o->dim[2],
                                       o->dim[3] * esa_dtype_size(o->dtype));
    void *memory;
    /* exact rows would change the sum */
    if (be->host_memory || s->carry.checked || e->plan->attention.exact_rows) return ESA_OK;
    s->carry.checked = 1;
    if (be->alloc(s->ctx, &memory, bytes)) {
        s->ctx->error[0] = 0; /* without room for a second output, there is no check */
        return ESA_OK;
    }
    esa_tensor added = esa_tensor_bnsd(memory, o->dtype, o->dim[0], o->dim[1], o->dim[2],
                                       o->dim[3]);
    added.device = o->device;
    added.device_index = o->device_index;
    esa_qkvo t = *c->t;
    t.o = &added;
    t.lse = NULL;
    t.carry = d;
    t.use = ESA_CARRY_ADD;
    esa_status status = esa_plan_attend(e->plan, e->mask, &t, NULL,
                                        esa_session_precision(s, c->layer, c->kind), NULL);
    if (!status) status = compare(s, o, &added, d);
    be->release(s->ctx, memory, bytes);
    return status;
}
