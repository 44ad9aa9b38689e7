/* carry.c - views of carried differences, and the calls that take one (esa_carry.h).
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"

#include "base/memory.h"

/* Bytes of the values, rounded up so that the scales are aligned; and of the scales. */
static int64_t value_bytes(int32_t format, int64_t rows, int64_t D)
{
    const int64_t bytes = esa_size_mul(rows, format == ESA_CARRY_E4M3 ? D : 2 * D);
    return bytes < 0 ? bytes : esa_ceil_div(bytes, ESA_WORKSPACE_ALIGN) * ESA_WORKSPACE_ALIGN;
}

int64_t esa_carry_bytes(int32_t format, int64_t B, int64_t H, int64_t N, int64_t D)
{
    if ((format != ESA_CARRY_E4M3 && format != ESA_CARRY_BF16) || B < 1 || H < 1 || N < 1 ||
        D < 1 || D > ESA_MAX_HEAD_DIM)
        return -1;
    const int64_t rows = esa_size_mul(esa_size_mul(B, H), N), values = value_bytes(format, rows, D),
                  bytes = format == ESA_CARRY_E4M3 ? esa_size_add(values, esa_size_mul(rows, 4))
                                                   : values;
    return rows < 0 || values < 0 || bytes < 0 ? -1 : bytes;
}

esa_carry esa_carry_view(void *memory, int32_t format, int64_t B, int64_t H, int64_t N, int64_t D)
{
    esa_carry c = { .struct_size = sizeof c, .format = format, .B = B, .H = H, .N = N, .D = D };
    c.value = memory;
    if (memory && format == ESA_CARRY_E4M3)
        c.scale = (float *)((char *)memory + value_bytes(format, B * H * N, D));
    return c;
}

/* ---------------------------------------------------------------- checks */

static esa_status check_memory(esa_ctx *ctx, const esa_carry *c)
{
    const int32_t scaled = c->format == ESA_CARRY_E4M3;
    if (c->format != ESA_CARRY_E4M3 && c->format != ESA_CARRY_BF16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the carry has format %d, expected ESA_CARRY_E4M3 (%d) or ESA_CARRY_BF16 "
                        "(%d)",
                        (int)c->format, ESA_CARRY_E4M3, ESA_CARRY_BF16);
    if (!c->value || (c->scale != NULL) != scaled)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the carry needs value%s: value is %sNULL and scale is %sNULL",
                        scaled ? " and scale in format E4M3" : " alone in format BF16",
                        c->value ? "not " : "", c->scale ? "not " : "");
    /* kernels read 16 bytes at a time */
    if ((uintptr_t)c->value % 16 || (uintptr_t)c->scale % sizeof(float))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the carry's value must be aligned to 16 bytes and its scale to %d",
                        (int)sizeof(float));
    for (int32_t i = 0; i < 2; i++)
        if (c->reserved[i])
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the carry has non-zero reserved fields: fill it with esa_carry_view");
    return ESA_OK;
}

esa_status esa_check_carry(esa_ctx *ctx, const esa_qkvo *t, const esa_mask *mask)
{
    const esa_carry *c = t->carry;
    const int64_t *o = t->o->dim;
    if (c->struct_size != sizeof *c)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_carry has struct_size %u, this library expects %u",
                        (unsigned)c->struct_size, (unsigned)sizeof *c);
    if (t->use != ESA_CARRY_ADD && t->use != ESA_CARRY_MAKE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "use is %d, expected ESA_CARRY_ADD (%d) or ESA_CARRY_MAKE (%d)",
                        (int)t->use, ESA_CARRY_ADD, ESA_CARRY_MAKE);
    if (!mask)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mask is NULL: dense attention leaves nothing out, so it has no carry");
    ESA_TRY(check_memory(ctx, c));
    if (c->device != t->o->device || c->device_index != t->o->device_index)
        return esa_fail(ctx, ESA_ERR_DEVICE, "the carry is on device %d:%d, but o is on %d:%d",
                        (int)c->device, (int)c->device_index, (int)t->o->device,
                        (int)t->o->device_index);
    const int32_t shared = c->B == 1 && t->use == ESA_CARRY_ADD;
    if ((c->B != o[0] && !shared) || c->H != o[1] || c->N != o[2] || c->D != o[3])
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "the carry has shape [%lld,%lld,%lld,%lld], but o has "
                        "[%lld,%lld,%lld,%lld]",
                        (long long)c->B, (long long)c->H, (long long)c->N, (long long)c->D,
                        (long long)o[0], (long long)o[1], (long long)o[2], (long long)o[3]);
    return ESA_OK;
}

/* ---------------------------------------------------------------- calls */

esa_status esa_attention_carry(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                               const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                               const esa_attention_params *params, const esa_carry *carry,
                               int32_t use)
{
    ESA_TRY(esa_ctx_enter(ctx));
    /* Params of an unknown size are refused below, so lse must not be read from them. */
    const int32_t known = params && params->struct_size == sizeof *params;
    const esa_qkvo t = { q, k, v, o, known ? params->lse : NULL, carry, use };
    const esa_status status = carry ? esa_attention_inside(ctx, &t, mask, params)
                                    : esa_fail(ctx, ESA_ERR_ARGUMENT, "carry is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_plan_attention_carry(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                    const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                                    const esa_tensor *lse, const esa_carry *carry, int32_t use,
                                    void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_qkvo t = { q, k, v, o, lse, carry, use };
    const esa_status status = carry ? esa_plan_attention_inside(plan, mask, &t, ws)
                                    : esa_fail(plan->ctx, ESA_ERR_ARGUMENT, "carry is NULL");
    esa_ctx_leave(plan->ctx);
    return status;
}
