/* stand_in_rows.c - the operations on rows of the stand-in GPU, element by element in plain C.
 * SPDX-License-Identifier: Apache-2.0 */
#include "stand_in_rows.h"

#include <math.h>
#include <stdlib.h>
#include "base/half.h"

/* ---------------------------------------------------------------- elements of any type */

static float get(const esa_view *v, int64_t row, int64_t col)
{
    const int64_t at = row * v->ld + col;
    return v->dtype == ESA_DTYPE_F32 ? ((const float *)v->data)[at]
                                     : esa_bf16_to_f32(((const uint16_t *)v->data)[at]);
}

static void put(const esa_view *v, int64_t row, int64_t col, float x)
{
    const int64_t at = row * v->ld + col;
    if (v->dtype == ESA_DTYPE_F32)
        ((float *)v->data)[at] = x;
    else if (v->dtype == ESA_DTYPE_BF16)
        ((uint16_t *)v->data)[at] = esa_f32_to_bf16(x);
    else
        ((uint8_t *)v->data)[at] = esa_f32_to_f8(x / v->scale[row]);
}

static void put_row(const esa_view *v, int64_t row, const float *x)
{
    if (v->dtype == ESA_DTYPE_F8) {
        float top = 0;
        for (int64_t i = 0; i < v->cols; i++) top = fmaxf(top, fabsf(x[i]));
        v->scale[row] = top > ESA_F8_ZERO ? top / ESA_F8_MAX : 1.0f;
    }
    for (int64_t i = 0; i < v->cols; i++) put(v, row, i, x[i]);
}

/* ---------------------------------------------------------------- the operations */

/* x[n] becomes (x - mean) / sqrt(variance + eps), with mean 0 for RMS. */
static void normalise(float *x, int64_t n, int32_t layer, float eps)
{
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n && layer; i++) mean += x[i];
    mean /= (double)n;
    for (int64_t i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    const double factor = 1 / sqrt(squares / (double)n + eps);
    for (int64_t i = 0; i < n; i++) x[i] = (float)((x[i] - mean) * factor);
}

void stand_in_norm(const esa_norm_args *a, float *room)
{
    const int64_t n = a->x.cols;
    for (int64_t r = 0; r < a->x.rows; r++) {
        for (int64_t i = 0; i < n; i++) {
            room[i] = get(&a->x, r, i);
            if (!a->add.data) continue;
            put(&a->x, r, i, room[i] + get(&a->add, r, i) * (a->gate ? a->gate[i] : 1.0f));
            room[i] = get(&a->x, r, i);
        }
        if (a->norm == ESA_NORM_NONE) continue;
        normalise(room, n, a->norm == ESA_NORM_LAYER, a->eps);
        for (int64_t i = 0; i < n; i++) {
            const float w = a->weight ? a->weight[i] : 1.0f, b = a->bias ? a->bias[i] : 0.0f;
            const float f = a->scale ? 1.0f + a->scale[i] : 1.0f, s = a->shift ? a->shift[i] : 0.0f;
            room[i] = (room[i] * w + b) * f + s;
        }
        put_row(&a->y, r, room);
    }
}

void stand_in_qk(const esa_qk_args *a, float *room)
{
    const esa_view *const view[2] = { &a->q, &a->k };
    const float *const weight[2] = { a->q_weight, a->k_weight }, *const bias[2] = { a->q_bias,
                                                                                    a->k_bias };
    const int32_t all = a->norm == ESA_QK_ALL;
    for (int32_t side = 0; side < 2; side++)
        for (int64_t r = 0; view[side]->data && r < view[side]->rows; r++) {
            const int64_t n = view[side]->cols, half = a->D / 2;
            for (int64_t i = 0; i < n; i++) room[i] = get(view[side], r, i);
            for (int64_t h = 0; h < n && a->norm != ESA_QK_NONE; h += all ? n : a->D)
                normalise(room + h, all ? n : a->D, a->norm == ESA_QK_HEAD_LAYER, a->eps);
            for (int64_t i = 0; i < n && a->norm != ESA_QK_NONE; i++) {
                room[i] *= weight[side][all ? i : i % a->D];
                if (a->norm == ESA_QK_HEAD_LAYER) room[i] += bias[side][i % a->D];
            }
            for (int64_t i = 0; i < n / 2 && a->cos; i++) {
                const int64_t at = r * half + i % half, first = i / half * a->D,
                              one = first + (a->halves ? i % half : i % half * 2),
                              two = a->halves ? one + half : one + 1;
                const float even = room[one], odd = room[two];
                room[one] = even * a->cos[at] - odd * a->sin[at];
                room[two] = even * a->sin[at] + odd * a->cos[at];
            }
            put_row(view[side], r, room);
        }
}

static float activate(float x, int32_t act)
{
    if (act == ESA_ACT_SILU) return x / (1 + expf(-x));
    if (act == ESA_ACT_GELU_TANH)
        return 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if (act == ESA_ACT_QUICK_GELU) return x / (1 + expf(-1.702f * x));
    if (act == ESA_ACT_GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    return x;
}

void stand_in_act(const esa_act_args *a, float *room)
{
    for (int64_t r = 0; r < a->x.rows; r++) {
        for (int64_t i = 0; i < a->x.cols; i++)
            room[i] = a->gate.data ? activate(get(&a->gate, r, i), a->act) * get(&a->x, r, i)
                                   : activate(get(&a->x, r, i), a->act);
        put_row(&a->y, r, room);
    }
}
