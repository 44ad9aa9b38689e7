/* on_gpu_calls.c - the functions that the linker puts between tests and library; see on_gpu.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include "common/on_gpu_mirror.h"
#include "esa/esa_session.h"

#include <stddef.h>

#define REAL(name) __real_##name
esa_status REAL(esa_attention)(esa_ctx *, const esa_tensor *, const esa_tensor *,
                               const esa_tensor *, const esa_tensor *, const esa_mask *,
                               const esa_attention_params *);
esa_status REAL(esa_select)(esa_ctx *, esa_mask **, const esa_tensor *, const esa_tensor *,
                            const esa_select_params *);
esa_status REAL(esa_select_qkv)(esa_ctx *, esa_mask **, const esa_tensor *, const esa_tensor *,
                                const esa_tensor *, const esa_select_params *);
esa_status REAL(esa_errors)(esa_ctx *, float *, const esa_tensor *, const esa_tensor *,
                            const esa_tensor *, const esa_select_params *);
esa_status REAL(esa_importance)(esa_ctx *, float *, double *, const esa_tensor *,
                                const esa_tensor *, const esa_select_params *);
esa_status REAL(esa_mask_mass)(esa_ctx *, double *, const esa_mask *, const esa_tensor *,
                               const esa_tensor *, const esa_attention_params *, int32_t);
esa_status REAL(esa_plan_create)(esa_ctx *, esa_plan **, const esa_shapes *,
                                 const esa_select_params *, const esa_attention_params *);
void REAL(esa_plan_free)(esa_plan *);
esa_status REAL(esa_plan_select)(const esa_plan *, esa_mask *, const esa_tensor *,
                                 const esa_tensor *, void *);
esa_status REAL(esa_plan_select_qkv)(const esa_plan *, esa_mask *, const esa_tensor *,
                                     const esa_tensor *, const esa_tensor *, void *);
esa_status REAL(esa_plan_order)(const esa_plan *, esa_mask *, const esa_tensor *,
                                const esa_tensor *, void *);
esa_status REAL(esa_plan_attention)(const esa_plan *, const esa_mask *, const esa_tensor *,
                                    const esa_tensor *, const esa_tensor *, const esa_tensor *,
                                    const esa_tensor *, void *);
esa_status REAL(esa_attention_carry)(esa_ctx *, const esa_tensor *, const esa_tensor *,
                                     const esa_tensor *, const esa_tensor *, const esa_mask *,
                                     const esa_attention_params *, const esa_carry *, int32_t);
esa_status REAL(esa_plan_attention_carry)(const esa_plan *, const esa_mask *, const esa_tensor *,
                                          const esa_tensor *, const esa_tensor *,
                                          const esa_tensor *, const esa_tensor *, const esa_carry *,
                                          int32_t, void *);
esa_status REAL(esa_session_begin)(esa_session *);
esa_status REAL(esa_session_set_kv_len)(esa_session *, const int32_t *);
esa_status REAL(esa_session_attention)(esa_session *, int32_t, int32_t, const esa_tensor *,
                                       const esa_tensor *, const esa_tensor *, const esa_tensor *,
                                       const esa_tensor *);
void REAL(esa_session_free)(esa_session *);

/* Prototypes for the names the linker makes up. */
#define WRAP(name) __wrap_##name
__typeof__(REAL(esa_attention)) WRAP(esa_attention);
__typeof__(REAL(esa_select)) WRAP(esa_select);
__typeof__(REAL(esa_select_qkv)) WRAP(esa_select_qkv);
__typeof__(REAL(esa_errors)) WRAP(esa_errors);
__typeof__(REAL(esa_importance)) WRAP(esa_importance);
__typeof__(REAL(esa_mask_mass)) WRAP(esa_mask_mass);
__typeof__(REAL(esa_plan_create)) WRAP(esa_plan_create);
__typeof__(REAL(esa_plan_free)) WRAP(esa_plan_free);
__typeof__(REAL(esa_plan_select)) WRAP(esa_plan_select);
__typeof__(REAL(esa_plan_select_qkv)) WRAP(esa_plan_select_qkv);
__typeof__(REAL(esa_plan_order)) WRAP(esa_plan_order);
__typeof__(REAL(esa_plan_attention)) WRAP(esa_plan_attention);
__typeof__(REAL(esa_attention_carry)) WRAP(esa_attention_carry);
__typeof__(REAL(esa_plan_attention_carry)) WRAP(esa_plan_attention_carry);
__typeof__(REAL(esa_session_begin)) WRAP(esa_session_begin);
__typeof__(REAL(esa_session_set_kv_len)) WRAP(esa_session_set_kv_len);
__typeof__(REAL(esa_session_attention)) WRAP(esa_session_attention);
__typeof__(REAL(esa_session_free)) WRAP(esa_session_free);

esa_status WRAP(esa_attention)(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                               const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                               const esa_attention_params *params)
{
    const esa_tensor *lse = params && params->struct_size == sizeof *params ? params->lse : NULL;
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_attention)(ctx, q, k, v, o, mask, params);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_attention_params p = params ? *params : esa_attention_params_default();
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 5)) {
        if (p.struct_size == sizeof p) {
            p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
            p.lse = gpu_view(&m, 4);
        }
        status = REAL(esa_attention)(ctx, gpu_view(&m, 0), gpu_view(&m, 1), gpu_view(&m, 2),
                                     gpu_view(&m, 3), mask, &p);
        status = mirror_check(&m, status, 3, "esa_attention");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_attention_carry)(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                     const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                                     const esa_attention_params *params, const esa_carry *carry,
                                     int32_t use)
{
    const esa_tensor *lse = params && params->struct_size == sizeof *params ? params->lse : NULL;
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) ||
        (lse && !usable(lse)) || !usable_carry(carry))
        return REAL(esa_attention_carry)(ctx, q, k, v, o, mask, params, carry, use);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_attention_params p = params ? *params : esa_attention_params_default();
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open_carry(&m, host, 5, carry, use)) {
        if (p.struct_size == sizeof p) {
            p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
            p.lse = gpu_view(&m, 4);
        }
        status = REAL(esa_attention_carry)(ctx, gpu_view(&m, 0), gpu_view(&m, 1), gpu_view(&m, 2),
                                           gpu_view(&m, 3), mask, &p, &m.carry, use);
        /* a call that makes d writes neither o nor the LSE */
        status = mirror_check(&m, status, m.makes ? 5 : 3, "esa_attention_carry");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_select)(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q, const esa_tensor *k,
                            const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k)) return REAL(esa_select)(ctx, mask, q, k, params);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 2)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = mirror_check(&m, REAL(esa_select)(ctx, mask, gpu_view(&m, 0), gpu_view(&m, 1), &p),
                              2, "esa_select");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_select_qkv)(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q,
                                const esa_tensor *k, const esa_tensor *v,
                                const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k) || (v && !usable(v)))
        return REAL(esa_select_qkv)(ctx, mask, q, k, v, params);
    mirror m;
    const esa_tensor *const host[] = { q, k, v };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 3)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = REAL(esa_select_qkv)(ctx, mask, gpu_view(&m, 0), gpu_view(&m, 1), gpu_view(&m, 2),
                                      &p);
        status = mirror_check(&m, status, 3, "esa_select_qkv");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_errors)(esa_ctx *ctx, float *out, const esa_tensor *q, const esa_tensor *k,
                            const esa_tensor *v, const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v))
        return REAL(esa_errors)(ctx, out, q, k, v, params);
    mirror m;
    const esa_tensor *const host[] = { q, k, v };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ERROR);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 3)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = REAL(esa_errors)(ctx, out, gpu_view(&m, 0), gpu_view(&m, 1), gpu_view(&m, 2), &p);
        status = mirror_check(&m, status, 3, "esa_errors");
    }
    mirror_close(&m);
    return status;
}

esa_status WRAP(esa_importance)(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                                const esa_tensor *k, const esa_select_params *params)
{
    if (!on_gpu() || !usable(q) || !usable(k))
        return REAL(esa_importance)(ctx, out, entropy, q, k, params);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_select_params p = params ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_status status = ESA_ERR_INTERNAL;
    if (mirror_open(&m, host, 2)) {
        if (p.struct_size == sizeof p) p.kv_len = put_lengths(&m, p.kv_len, q->dim[0]);
        status = mirror_check(
            &m, REAL(esa_importance)(ctx, out, entropy, gpu_view(&m, 0), gpu_view(&m, 1), &p), 2,
            "esa_importance");
    }
    mirror_close(&m);
    return status;
}

/* The mass is measured on the CPU: only the mask comes back. */
esa_status WRAP(esa_mask_mass)(esa_ctx *ctx, double *mass, const esa_mask *mask,
                               const esa_tensor *q, const esa_tensor *k,
                               const esa_attention_params *params, int32_t row_step)
{
    esa_mask *copy = NULL;
    esa_status status = ESA_OK;
    if (on_gpu() && mask) status = esa_mask_to_device(ctx, &copy, mask, ESA_DEVICE_CPU);
    if (!status)
        status = REAL(esa_mask_mass)(ctx, mass, copy ? copy : mask, q, k, params, row_step);
    esa_mask_free(copy);
    return status;
}

esa_status WRAP(esa_plan_create)(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                                 const esa_select_params *select,
                                 const esa_attention_params *attention)
{
    if (!on_gpu() || !shapes || shapes->struct_size != sizeof *shapes ||
        shapes->device != ESA_DEVICE_CPU)
        return REAL(esa_plan_create)(ctx, plan, shapes, select, attention);
    esa_shapes s = *shapes;
    esa_select_params sp = select ? *select : esa_select_params_default(ESA_SELECT_ENTROPY);
    esa_attention_params ap = attention ? *attention : esa_attention_params_default();
    const int32_t *host = select && sp.struct_size == sizeof sp && sp.kv_len ? sp.kv_len
                          : ap.struct_size == sizeof ap                      ? ap.kv_len
                                                                             : NULL;
    int32_t *gpu = host ? gpu_new(s.B * 4) : NULL;
    if (gpu && sp.struct_size == sizeof sp && sp.kv_len) sp.kv_len = gpu;
    if (gpu && ap.kv_len) ap.kv_len = gpu;
    s.device = ESA_DEVICE_CUDA;
    const esa_status status = REAL(esa_plan_create)(ctx, plan, &s, select ? &sp : NULL,
                                                    attention ? &ap : NULL);
    if (status || !gpu)
        gpu_free(gpu);
    else
        owner_keep(*plan, host, s.B, gpu);
    return status;
}

void WRAP(esa_plan_free)(esa_plan *plan)
{
    owner_drop(plan);
    REAL(esa_plan_free)(plan);
}

esa_status WRAP(esa_plan_select)(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                 const esa_tensor *k, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k)) return REAL(esa_plan_select)(plan, mask, q, k, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 2))
        status = mirror_check(
            &m, REAL(esa_plan_select)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1), w.ws), 2,
            "esa_plan_select");
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_plan_select_qkv)(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                     const esa_tensor *k, const esa_tensor *v, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k) || (v && !usable(v)))
        return REAL(esa_plan_select_qkv)(plan, mask, q, k, v, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k, v };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 3)) {
        status = REAL(esa_plan_select_qkv)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1),
                                           gpu_view(&m, 2), w.ws);
        status = mirror_check(&m, status, 3, "esa_plan_select_qkv");
    }
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_plan_order)(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                const esa_tensor *k, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k)) return REAL(esa_plan_order)(plan, mask, q, k, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 2))
        status = mirror_check(
            &m, REAL(esa_plan_order)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1), w.ws), 2,
            "esa_plan_order");
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_plan_attention)(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                    const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                                    const esa_tensor *lse, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_plan_attention)(plan, mask, q, k, v, o, lse, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open(&m, host, 5)) {
        status = REAL(esa_plan_attention)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1),
                                          gpu_view(&m, 2), gpu_view(&m, 3), gpu_view(&m, 4), w.ws);
        status = mirror_check(&m, status, 3, "esa_plan_attention");
    }
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_plan_attention_carry)(const esa_plan *plan, const esa_mask *mask,
                                          const esa_tensor *q, const esa_tensor *k,
                                          const esa_tensor *v, const esa_tensor *o,
                                          const esa_tensor *lse, const esa_carry *carry,
                                          int32_t use, void *ws)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) ||
        (lse && !usable(lse)) || !usable_carry(carry))
        return REAL(esa_plan_attention_carry)(plan, mask, q, k, v, o, lse, carry, use, ws);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(plan, q->dim[0]);
    const workspace w = workspace_open(plan, ws);
    if (mirror_open_carry(&m, host, 5, carry, use)) {
        status = REAL(esa_plan_attention_carry)(plan, mask, gpu_view(&m, 0), gpu_view(&m, 1),
                                                gpu_view(&m, 2), gpu_view(&m, 3), gpu_view(&m, 4),
                                                &m.carry, use, w.ws);
        status = mirror_check(&m, status, m.makes ? 5 : 3, "esa_plan_attention_carry");
    }
    mirror_close(&m);
    return workspace_close(&w, status);
}

esa_status WRAP(esa_session_begin)(esa_session *session)
{
    owner_drop(session);
    return REAL(esa_session_begin)(session);
}

esa_status WRAP(esa_session_set_kv_len)(esa_session *session, const int32_t *kv_len)
{
    if (!on_gpu() || !session) return REAL(esa_session_set_kv_len)(session, kv_len);
    owner_drop(session);
    /* the batch is known when attention is called */
    int32_t *gpu = kv_len ? gpu_new(MOST_BATCH * 4) : NULL;
    if (gpu) owner_keep(session, kv_len, 0, gpu);
    return REAL(esa_session_set_kv_len)(session, gpu);
}

esa_status WRAP(esa_session_attention)(esa_session *session, int32_t layer, int32_t kind,
                                       const esa_tensor *q, const esa_tensor *k,
                                       const esa_tensor *v, const esa_tensor *o,
                                       const esa_tensor *lse)
{
    if (!on_gpu() || !usable(q) || !usable(k) || !usable(v) || !usable(o) || (lse && !usable(lse)))
        return REAL(esa_session_attention)(session, layer, kind, q, k, v, o, lse);
    mirror m;
    const esa_tensor *const host[] = { q, k, v, o, lse };
    esa_status status = ESA_ERR_INTERNAL;
    owner_renew(session, q->dim[0]);
    if (mirror_open(&m, host, 5)) {
        status = REAL(esa_session_attention)(session, layer, kind, gpu_view(&m, 0), gpu_view(&m, 1),
                                             gpu_view(&m, 2), gpu_view(&m, 3), gpu_view(&m, 4));
        status = mirror_check(&m, status, 3, "esa_session_attention");
    }
    mirror_close(&m);
    return status;
}

void WRAP(esa_session_free)(esa_session *session)
{
    owner_drop(session);
    REAL(esa_session_free)(session);
}
