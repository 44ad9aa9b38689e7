/* attn_cpu_carry.c - output rows with a carried difference: adds it, or makes it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Rows come here in f32, finished but not rounded. rules/carry.h has the format. */
#include "cpu/attn_cpu_run.h"

#include <math.h>
#include "rules/carry.h"

/* Where a row of d and a row of o are. */
typedef struct carry_row {
    void *value, *o;
    float *scale; /* E4M3 */
} carry_row;

static carry_row row_of(const esa_attn_args *a, int64_t b, int64_t h, int64_t token)
{
    const esa_carry_args *c = &a->carry;
    const int64_t row = b * c->batch + h * a->Nq + token;
    carry_row r = { (char *)c->value + row * a->D * (c->scale ? 1 : 2), NULL,
                    c->scale ? c->scale + row : NULL };
    r.o = (void *)at(a->o, b * a->o_stride[0] + h * a->o_stride[1] + token * a->o_stride[2],
                     a->dtype);
    return r;
}

/* Inlined with a constant dtype, so that the conversions vectorise. */
ESA_INLINE void add_as(const carry_row *r, float *x, int64_t D, int32_t dtype)
{
    if (r->scale) {
        const uint8_t *code = r->value;
        const float scale = *r->scale;
        for (int64_t d = 0; d < D; d++) x[d] += esa_f8_to_f32(code[d]) * scale;
    } else {
        const uint16_t *value = r->value;
        for (int64_t d = 0; d < D; d++) x[d] += esa_bf16_to_f32(value[d]);
    }
    for (int64_t d = 0; d < D; d++) esa_store_f32(r->o, d, dtype, x[d]);
}

static void make(const carry_row *r, float *x, int64_t D, int32_t dtype)
{
    float largest = 0.0f;
    for (int64_t d = 0; d < D; d++) {
        x[d] = esa_carry_difference(esa_load_f32(r->o, d, dtype), esa_round_to(x[d], dtype));
        largest = fmaxf(largest, fabsf(x[d]));
    }
    if (!r->scale) {
        uint16_t *value = r->value;
        for (int64_t d = 0; d < D; d++) value[d] = esa_f32_to_bf16(x[d]);
        return;
    }
    uint8_t *code = r->value;
    *r->scale = esa_carry_scale(largest);
    const float inverse = esa_carry_inverse(*r->scale);
    for (int64_t d = 0; d < D; d++) code[d] = esa_f32_to_f8(x[d] * inverse);
}

void esa_attn_carry_row(const esa_attn_args *a, int64_t b, int64_t h, int64_t token, float *x)
{
    const carry_row r = row_of(a, b, h, token);
    const int32_t makes = a->carry.use == ESA_CARRY_MAKE;
    if (makes)
        make(&r, x, a->D, a->dtype);
    else if (a->dtype == ESA_DTYPE_F32)
        add_as(&r, x, a->D, ESA_DTYPE_F32);
    else if (a->dtype == ESA_DTYPE_F16)
        add_as(&r, x, a->D, ESA_DTYPE_F16);
    else
        add_as(&r, x, a->D, ESA_DTYPE_BF16);
}
