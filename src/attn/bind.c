/* bind.c - turns views, params and mask into the argument structs of a backend. Also makes default
 * params and views.
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"

#include <string.h>

esa_tensor esa_tensor_bnsd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N, int64_t D)
{
    return (esa_tensor){ sizeof(esa_tensor),        dtype, ESA_DEVICE_CPU, 0, data, { B, H, N, D },
                         { H * N * D, N * D, D, 1 } };
}

esa_tensor esa_tensor_bsnd(void *data, int32_t dtype, int64_t B, int64_t H, int64_t N, int64_t D)
{
    return (esa_tensor){ sizeof(esa_tensor),        dtype, ESA_DEVICE_CPU, 0, data, { B, H, N, D },
                         { N * H * D, D, H * D, 1 } };
}

esa_select_params esa_select_params_default(int32_t selector)
{
    esa_select_params p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    p.selector = selector;
    p.samples = 4;
    p.budget = 0.5;
    p.cdf_threshold = 1.0;
    p.keep_sink = p.keep_recent = 1;
    p.tail = ESA_TAIL_POOLED;
    p.layout = esa_layout_default();
    return p;
}

esa_attention_params esa_attention_params_default(void)
{
    esa_attention_params p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    return p;
}

esa_shapes esa_shapes_default(void)
{
    esa_shapes s;
    memset(&s, 0, sizeof s);
    s.struct_size = sizeof s;
    return s;
}

esa_shapes esa_shapes_of(const esa_tensor *q, const esa_tensor *k)
{
    esa_shapes s = esa_shapes_default();
    s.dtype = q->dtype;
    s.device = q->device;
    s.device_index = q->device_index;
    s.B = q->dim[0];
    s.Hq = q->dim[1];
    s.Nq = q->dim[2];
    s.D = q->dim[3];
    s.Hkv = k->dim[1];
    s.Nk = k->dim[2];
    return s;
}

static void copy_strides(int64_t *dst, const esa_tensor *t)
{
    for (int32_t i = 0; i < 3; i++) dst[i] = t->stride[i];
}

static void bind_carry(esa_attn_args *a, const esa_qkvo *t)
{
    const esa_carry *c = t->carry;
    a->carry = (esa_carry_args){ .value = c->value,
                                 .scale = c->format == ESA_CARRY_E4M3 ? c->scale : NULL,
                                 .batch = c->B == 1 ? 0 : a->Hq * a->Nq,
                                 .use = t->use };
    if (t->use != ESA_CARRY_MAKE) return;
    a->exact_rows = 0;
    a->lse = NULL;
}

void esa_bind_attention(esa_attn_args *a, const esa_shapes *s, const esa_attention_params *p,
                        const esa_mask *mask, const esa_qkvo *t)
{
    memset(a, 0, sizeof *a);
    a->dtype = s->dtype;
    a->B = s->B;
    a->Hq = s->Hq;
    a->Hkv = s->Hkv;
    a->Nq = s->Nq;
    a->Nk = s->Nk;
    a->D = s->D;
    a->tail = mask ? p->tail : ESA_TAIL_NONE; /* dense: nothing is skipped */
    a->causal = p->causal;
    a->precision = p->precision;
    a->scale = p->scale;
    a->kv_len = p->kv_len;
    a->block_q = mask ? mask->block_q : 128;
    a->block_k = mask ? mask->block_k : 128;
    a->nq = esa_ceil_div(s->Nq, a->block_q);
    a->nk = esa_ceil_div(s->Nk, a->block_k);
    if (mask) {
        a->count = mask->count;
        a->index = mask->index;
        a->cap = mask->cap;
        a->mask_batch = mask->B == 1 ? 0 : mask->H;
        a->exact_rows = p->exact_rows;
        if (a->tail == ESA_TAIL_LEVELS && mask->fine) {
            a->fine = mask->fine;
            a->fine_count = mask->fine_count;
            a->fine_index = mask->fine_index;
        } else if (a->tail == ESA_TAIL_LEVELS) {
            a->tail = ESA_TAIL_POOLED; /* the same without a fine level */
        }
    }
    if (!t) return;
    a->q = t->q->data;
    a->k = t->k->data;
    a->v = t->v->data;
    a->o = t->o->data;
    copy_strides(a->q_stride, t->q);
    copy_strides(a->k_stride, t->k);
    copy_strides(a->v_stride, t->v);
    copy_strides(a->o_stride, t->o);
    if (t->lse) {
        a->lse = t->lse->data;
        copy_strides(a->lse_stride, t->lse);
    }
    if (t->carry) bind_carry(a, t);
}

void esa_bind_select(esa_select_args *a, const esa_shapes *s, const esa_select_params *p,
                     const esa_tensor *q, const esa_tensor *k, const esa_tensor *v)
{
    int32_t runnable;
    memset(a, 0, sizeof *a);
    a->params = *p;
    a->dtype = s->dtype;
    a->B = s->B;
    a->Hq = s->Hq;
    a->Hkv = s->Hkv;
    a->Nq = s->Nq;
    a->Nk = s->Nk;
    a->D = s->D;
    esa_select_blocks(p, s->Nq, s->Nk, &a->nq, &a->nk, &runnable);
    if (!q) return;
    a->q = q->data;
    a->k = k->data;
    copy_strides(a->q_stride, q);
    copy_strides(a->k_stride, k);
    if (!v) return;
    a->v = v->data;
    copy_strides(a->v_stride, v);
}

/* Distances between the orders of batch entries and heads; 0 if all heads share one order. */
static void order_strides(int64_t q[2], int64_t k[2], const esa_mask *m)
{
    const int64_t own = m->Hkv > 0, batch = own && m->B > 1;
    q[0] = batch * m->H * m->Nq;
    q[1] = own * m->Nq;
    k[0] = batch * m->Hkv * m->Nk;
    k[1] = own * m->Nk;
}

void esa_bind_attention_order(esa_attn_args *a, const esa_mask *m)
{
    a->perm_q = m->perm_q;
    a->perm_k = m->perm_k;
    order_strides(a->perm_q_stride, a->perm_k_stride, m);
}

void esa_bind_select_order(esa_select_args *a, const esa_mask *m)
{
    a->perm_q = m->perm_q;
    a->perm_k = m->perm_k;
    order_strides(a->perm_q_stride, a->perm_k_stride, m);
}
