/* attention_prepare.c - see attention_prepare.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tests.h"
#include "common/attention_prepare.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/on_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void prepare_view(prepared *p, int i, const attention_case *c, int32_t dtype, int64_t H,
                         int64_t N, int64_t D)
{
    static const int64_t pads[] = { 1, 2, 3, 1, 0 };
    const int64_t row = D + c->pad * pads[i], bsnd = c->bsnd == 2 ? i == 0 || i == 2 : c->bsnd;
    const int64_t size = esa_dtype_size(dtype);
    /* GPUs read whole elements only */
    p->memory[i] = guard_alloc(c->B * H * N * row * size, i == 4                    ? 0
                                                          : on_gpu() && c->misalign ? size
                                                                                    : c->misalign);
    p->t[i] = bsnd ? esa_tensor_bsnd(p->memory[i].data, dtype, c->B, H, N, row)
                   : esa_tensor_bnsd(p->memory[i].data, dtype, c->B, H, N, row);
    p->t[i].dim[3] = D;
}

static void shift_and_stretch(const prepared *p, const attention_case *c)
{
    for (int i = 0; i < 3; i++) {
        const esa_tensor *t = &p->t[i];
        for (int64_t b = 0; b < c->B; b++)
            for (int64_t h = 0; h < t->dim[1]; h++)
                for (int64_t n = 0; n < t->dim[2]; n++)
                    for (int64_t d = 0; d < c->D; d++) {
                        const int64_t at = b * t->stride[0] + h * t->stride[1] + n * t->stride[2] +
                                           d;
                        float x = esa_load_f32(t->data, at, c->dtype);
                        if (i < 2 && c->outliers && d % c->outliers == 0) x *= 8.0f;
                        /* Another centre in every channel, of either sign. */
                        if (i > 0) x += (float)(c->offset * (double)((d * 5 + i) % 7 - 3) / 3.0);
                        esa_store_f32(t->data, at, c->dtype, x);
                    }
    }
}

static void make_keys_equal(const prepared *p, const attention_case *c)
{
    for (int i = 1; i <= 2; i++) {
        const esa_tensor *t = &p->t[i];
        const int64_t size = esa_dtype_size(c->dtype);
        for (int64_t b = 0; b < c->B; b++)
            for (int64_t h = 0; h < c->Hkv; h++)
                for (int64_t n = 0; n < c->Nk; n++) {
                    const int64_t from = n / c->block_k * c->block_k;
                    char *base = (char *)t->data + (b * t->stride[0] + h * t->stride[1]) * size;
                    memmove(base + n * t->stride[2] * size, base + from * t->stride[2] * size,
                            (size_t)(c->D * size));
                }
    }
}

/* A random mask, as flags (naive.h) and as an object. */
static void prepare_mask(prepared *p, const attention_case *c, esa_mask_info *info)
{
    const int64_t nq = (c->Nq + info->block_q - 1) / info->block_q,
                  nk = (c->Nk + info->block_k - 1) / info->block_k,
                  mask_B = c->broadcast ? 1 : c->B, cells = mask_B * c->Hq * nq * nk;
    p->keep = calloc((size_t)(c->B * c->Hq * nq), (size_t)nk);
    uint8_t *level = malloc((size_t)cells);
    /* The kept blocks are the same with and without a fine level. */
    esa_rng r = { test_seed() + 77 }, r_fine = { test_seed() + 78 };
    for (int64_t i = 0; i < cells; i++) {
        const int32_t fine = c->fine && (double)esa_rng_unit(&r_fine) < c->refined;
        p->keep[i] = (double)esa_rng_unit(&r) < c->density ? 1 : fine ? 2 : 0;
        level[i] = (uint8_t)(p->keep[i] == 1 ? 0 : p->keep[i] == 2 ? 1 : 2);
    }
    for (int64_t b = mask_B; b < c->B; b++) memcpy(p->keep + b * cells, p->keep, (size_t)cells);
    info->B = mask_B;
    info->fine = c->fine;
    const esa_status status = esa_mask_from_levels(p->ctx, &p->mask, info, level);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p->ctx));
    free(level);
}

/* Random orders for all heads of a side. Text stays where it is. */
static int32_t *random_orders(const attention_case *c, int64_t heads, int64_t N, uint64_t seed)
{
    const int64_t first = c->text_front, n = N - c->text_front - c->text_back;
    int32_t *perm = malloc(sizeof(int32_t) * (size_t)(heads * N));
    esa_rng r = { seed };
    for (int64_t h = 0; h < heads; h++) {
        int32_t *order = perm + h * N;
        for (int64_t i = 0; i < N; i++) order[i] = (int32_t)i;
        for (int64_t i = n - 1; i > 0; i--) {
            const int64_t j = (int64_t)((double)esa_rng_unit(&r) * (double)(i + 1));
            const int32_t other = order[first + j];
            order[first + j] = order[first + i];
            order[first + i] = other;
        }
    }
    return perm;
}

static void prepare_orders(prepared *p, const attention_case *c)
{
    const int64_t mask_B = c->broadcast ? 1 : c->B;
    p->perm_q = random_orders(c, mask_B * c->Hq, c->Nq, test_seed() + 5);
    p->perm_k = random_orders(c, mask_B * c->Hkv, c->Nk, test_seed() + 6);
    const esa_status status = esa_mask_set_orders(p->ctx, p->mask, p->perm_q, p->perm_k, c->Hkv);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p->ctx));
}

/* Element d of a row of the carry. */
double case_carried(const esa_carry *x, int64_t row, int64_t d)
{
    const int64_t at = row * x->D + d;
    return x->format == ESA_CARRY_E4M3
               ? (double)esa_f8_to_f32(((const uint8_t *)x->value)[at]) * (double)x->scale[row]
               : (double)esa_bf16_to_f32(((const uint16_t *)x->value)[at]);
}

/* Random values of any size in every row; some rows are 0. */
static void fill_carry(const esa_carry *x)
{
    esa_rng r = { test_seed() + 91 };
    for (int64_t row = 0; row < x->B * x->H * x->N; row++) {
        const int32_t zero = row % 7 == 3;
        if (x->scale) x->scale[row] = zero ? 0.0f : (0.5f + esa_rng_unit(&r)) * 0.25f / 448.0f;
        for (int64_t d = row * x->D; d < (row + 1) * x->D; d++) {
            const uint8_t code = (uint8_t)(256.0f * esa_rng_unit(&r));
            if (x->scale)
                ((uint8_t *)x->value)[d] = (code & 0x7f) == 0x7f ? 0x80 : code; /* no NaN */
            else
                ((uint16_t *)x->value)[d] = esa_f32_to_bf16(zero ? 0.0f
                                                                 : 0.5f * esa_rng_unit(&r) - 0.25f);
        }
    }
}

/* What is carried: a random d, or a random dense output. */
static void prepare_carry(prepared *p, const attention_case *c)
{
    const int64_t B = c->carry_shared == 1 ? 1 : c->B, rows = B * c->Hq * c->Nq,
                  all = c->B * c->Hq * c->Nq;
    const int32_t codes = c->carry_format == ESA_CARRY_E4M3;
    p->memory[5] = guard_alloc(rows * c->D * (codes ? 1 : 2), 0);
    p->memory[6] = guard_alloc(codes ? rows * 4 : 0, 0);
    p->carry = (esa_carry){ .struct_size = sizeof p->carry,
                            .format = c->carry_format,
                            .B = B,
                            .H = c->Hq,
                            .N = c->Nq,
                            .D = c->D,
                            .value = p->memory[5].data,
                            .scale = codes ? p->memory[6].data : NULL };
    if (c->carry == CASE_MAKE) {
        tensor_fill(&p->t[3], test_seed() * 3 + 9, 1.0);
        return;
    }
    fill_carry(&p->carry);
    if (c->carry_shared == 2) memset(p->memory[5].data, 0, (size_t)p->memory[5].bytes);
    p->added = malloc((size_t)(all * c->D) * sizeof(double));
    for (int64_t i = 0; i < all * c->D; i++)
        p->added[i] = case_carried(&p->carry, i / c->D % rows, i % c->D);
}

void case_prepare(prepared *p, const attention_case *c, int32_t level, int32_t threads)
{
    memset(p, 0, sizeof *p);
    prepare_view(p, 0, c, c->dtype, c->Hq, c->Nq, c->D);
    prepare_view(p, 1, c, c->dtype, c->Hkv, c->Nk, c->D);
    prepare_view(p, 2, c, c->dtype, c->Hkv, c->Nk, c->D);
    prepare_view(p, 3, c, c->dtype, c->Hq, c->Nq, c->D);
    prepare_view(p, 4, c, ESA_DTYPE_F32, c->Hq, c->Nq, 1);
    for (int i = 0; i < 3; i++)
        tensor_fill(&p->t[i], test_seed() * 3 + (uint64_t)i, c->range > 0 ? c->range : 1.5);
    if (c->offset != 0.0 || c->outliers) shift_and_stretch(p, c);
    if (c->equal_keys) make_keys_equal(p, c);
    if (c->carry) prepare_carry(p, c);
    p->ctx = level_ctx(level, threads);

    esa_mask_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    info.block_q = c->block_q ? c->block_q : 128;
    info.block_k = c->block_k ? c->block_k : 128;
    info.B = c->B;
    info.H = c->Hq;
    info.Nq = c->Nq;
    info.Nk = c->Nk;
    info.layout = esa_layout_default();
    info.layout.order = c->order;
    for (int i = 0; i < 3; i++) {
        info.layout.grid_q[i] = info.layout.grid_k[i] = c->grid[i];
        info.layout.window[i] = 4;
    }
    info.layout.text_front_q = info.layout.text_front_k = c->text_front;
    info.layout.text_back_q = info.layout.text_back_k = c->text_back;
    if (c->density >= 0.0) {
        prepare_mask(p, c, &info);
        if (c->order == ESA_ORDER_ADAPTIVE)
            prepare_orders(p, c);
        else if (c->order > ESA_ORDER_RASTER) {
            p->perm_q = malloc(sizeof(int32_t) * (size_t)c->Nq);
            p->perm_k = malloc(sizeof(int32_t) * (size_t)c->Nk);
            assert_int_equal(esa_order(p->ctx, p->perm_q, c->Nq, &info.layout, 0, ESA_MODE_FIXED),
                             ESA_OK);
            assert_int_equal(esa_order(p->ctx, p->perm_k, c->Nk, &info.layout, 1, ESA_MODE_FIXED),
                             ESA_OK);
        }
    }
    p->naive = (naive_case){ c->B,         c->Hq,     c->Hkv,        c->Nq,
                             c->Nk,        c->D,      c->dtype,      info.block_q,
                             info.block_k, c->causal, c->tail,       1.0 / sqrt((double)c->D),
                             &p->t[0],     &p->t[1],  &p->t[2],      c->kv_len,
                             p->keep,      p->perm_q, p->perm_k,     { 0, 0 },
                             { 0, 0 },     c->fine,   c->exact_rows, p->added };
    if (c->order == ESA_ORDER_ADAPTIVE) {
        p->naive.perm_q_stride[0] = c->broadcast ? 0 : c->Hq * c->Nq;
        p->naive.perm_k_stride[0] = c->broadcast ? 0 : c->Hkv * c->Nk;
        p->naive.perm_q_stride[1] = c->Nq;
        p->naive.perm_k_stride[1] = c->Nk;
    }
}

void case_release(prepared *p)
{
    for (int i = 0; i < PARTS; i++) guard_free(&p->memory[i]);
    free(p->added);
    free(p->keep);
    free(p->perm_q);
    free(p->perm_k);
    esa_mask_free(p->mask);
    esa_ctx_free(p->ctx);
}

/* lse: NULL, or the view that receives it. */
esa_status case_run(prepared *p, const attention_case *c, const esa_tensor *lse)
{
    esa_attention_params ap = esa_attention_params_default();
    ap.causal = c->causal;
    ap.tail = c->tail;
    ap.kv_len = c->kv_len;
    ap.exact_rows = c->exact_rows;
    ap.precision = c->precision;
    ap.lse = lse;
    if (c->carry)
        return esa_attention_carry(p->ctx, &p->t[0], &p->t[1], &p->t[2], &p->t[3], p->mask, &ap,
                                   &p->carry,
                                   c->carry == CASE_ADD ? ESA_CARRY_ADD : ESA_CARRY_MAKE);
    return esa_attention(p->ctx, &p->t[0], &p->t[1], &p->t[2], &p->t[3], p->mask, &ap);
}
