/* stand_in_biased.c - attention with biases on the stand-in GPU, query by query in plain C.
 * SPDX-License-Identifier: Apache-2.0 */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include "base/half.h"

static float get(const esa_view *v, int64_t row, int64_t col)
{
    return esa_bf16_to_f32(((const uint16_t *)v->data)[row * v->ld + col]);
}

/* Weights of the keys of one query, not normalised; returns their sum. */
static float weights(const esa_biased_args *a, int64_t h, int64_t q, float *weight)
{
    const int64_t share = a->kv_heads ? a->heads / a->kv_heads : 1, from = h / share * a->D;
    float top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < a->k.rows; k++) {
        float s = 0;
        for (int64_t d = 0; d < a->D; d++)
            s += get(&a->q, q, h * a->D + d) * get(&a->k, k, from + d);
        s *= a->scale;
        if (a->key) s += a->key[k];
        if (a->distance) s += a->distance[h * a->distance_ld + k - q + a->center];
        weight[k] = s;
        top = fmaxf(top, s);
    }
    for (int64_t k = 0; k < a->k.rows; k++) {
        weight[k] = top == -INFINITY ? 0 : expf(weight[k] - top);
        sum += weight[k];
    }
    return sum;
}

/* The norm of the queries, rounded to BF16, in place. */
static void norm(const esa_biased_args *a)
{
    const int64_t cols = a->heads * a->D;
    for (int64_t q = 0; q < a->q.rows; q++) {
        double squares = 0;
        for (int64_t d = 0; d < cols; d++)
            squares += (double)get(&a->q, q, d) * (double)get(&a->q, q, d);
        const float factor = (float)(1 / sqrt(squares / (double)cols + (double)a->eps));
        for (int64_t d = 0; d < cols; d++)
            ((uint16_t *)a->q.data)[q * a->q.ld + d] = esa_f32_to_bf16(get(&a->q, q, d) * factor *
                                                                       a->q_weight[d]);
        a->room[q] = NAN; /* lost */
    }
}

static void attend(const esa_biased_args *a, float *room)
{
    if (a->q_weight) norm(a);
    const int64_t share = a->kv_heads ? a->heads / a->kv_heads : 1;
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t q = 0; q < a->q.rows; q++) {
            const float sum = weights(a, h, q, room);
            for (int64_t d = 0; d < a->D; d++) {
                float x = 0;
                for (int64_t k = 0; k < a->k.rows; k++)
                    x += room[k] * get(&a->v, k, h / share * a->D + d);
                ((uint16_t *)a->o.data)[q * a->o.ld + h * a->D + d] = esa_f32_to_bf16(
                    sum == 0 ? 0 : x / sum);
            }
        }
}

static esa_status attention(esa_cuda_device *dev, const esa_biased_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    float *room = malloc((size_t)(args->k.rows > 0 ? args->k.rows : 1) * 4);
    if (!room) return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for a row of scores");
    stand_in_enter();
    attend(args, room);
    stand_in_leave();
    free(room);
    return ESA_OK;
}

const esa_cuda_biased stand_in_biased = { attention };
