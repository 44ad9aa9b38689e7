/* attn_cpu_eight_codes.c - scales, centres and codes of 8-bit attention.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/attn_cpu_eight.h"

#include <math.h>

/* Element d of row i. */
static float element(const esa_attn_args *a, rows_ref rows, int64_t stride, int64_t i, int64_t d)
{
    return esa_load_f32(rows.data, (rows.gather ? rows.gather[i] : i) * stride + d, a->dtype);
}

float esa_eight_query(float *code, const esa_attn_args *a, int64_t b, int64_t h, int64_t position)
{
    const rows_ref q = rows_at(a->q, a->q_stride, order_at(a->perm_q, a->perm_q_stride, b, h), b, h,
                               position, a->dtype);
    float largest = 0.0f;
    for (int64_t d = 0; d < a->D; d++) {
        code[d] = element(a, q, a->q_stride[2], 0, d);
        largest = esa_eight_larger(largest, code[d]);
    }
    const float scale = esa_eight_scale(largest, ESA_EIGHT_CODE),
                inverse = esa_eight_inverse(scale);
    for (int64_t d = 0; d < a->D; d++) code[d] = esa_eight_code(code[d], inverse);
    return scale;
}

/* Mean of the finite elements of each channel; 0 where there are none. */
static void centre_of(float *centre, const esa_attn_args *a, rows_ref rows, int64_t stride,
                      int64_t n)
{
    for (int64_t d = 0; d < a->D; d++) {
        double sum = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++) {
            const float x = element(a, rows, stride, i, d);
            if (!(fabsf(x) < INFINITY)) continue;
            sum += (double)x;
            count++;
        }
        centre[d] = count ? (float)(sum / (double)count) : 0.0f;
    }
}

void esa_eight_centres(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const eight_run *run = arg;
    const esa_attn_args *a = run->a;
    const int64_t slot = item / 2, head = run->first + slot, b = head / a->Hkv, h = head % a->Hkv,
                  n = kv_len_of(a, b);
    if (item % 2 == 0) {
        const rows_ref k = rows_at(a->k, a->k_stride, NULL, b, h, 0, a->dtype);
        centre_of(run->k_centre + slot * a->D, a, k, a->k_stride[2], n);
        return;
    }
    const rows_ref v = rows_at(a->v, a->v_stride, NULL, b, h, 0, a->dtype);
    float *centre = run->v_centre + slot * a->D;
    centre_of(centre, a, v, a->v_stride[2], n);
    for (int64_t d = 0; d < a->D; d++) {
        float largest = 0.0f;
        for (int64_t i = 0; i < n; i++) {
            const float x = fabsf(element(a, v, a->v_stride[2], i, d) - centre[d]);
            if (x < INFINITY && x > largest) largest = x;
        }
        const float scale = esa_eight_scale(largest, ESA_EIGHT_TOP);
        run->v_scale[slot * a->D + d] = scale;
        run->v_inverse[slot * a->D + d] = esa_eight_inverse(scale);
    }
}

/* Codes of the mean of n rows of k and v from `at` on. */
static void mean_codes(float *k_code, float *v_code, const eight_run *run, int64_t slot, rows_ref k,
                       rows_ref v, int64_t n, float inverse)
{
    const esa_attn_args *a = run->a;
    const float *k_centre = run->k_centre + slot * a->D, *v_centre = run->v_centre + slot * a->D,
                *v_inverse = run->v_inverse + slot * a->D;
    float mean[ESA_MAX_HEAD_DIM];
    a->kern->mean(mean, k.data, a->dtype, a->k_stride[2], k.gather, n, a->D);
    for (int64_t d = 0; d < a->D; d++) k_code[d] = esa_eight_code(mean[d] - k_centre[d], inverse);
    a->kern->mean(mean, v.data, a->dtype, a->v_stride[2], v.gather, n, a->D);
    for (int64_t d = 0; d < a->D; d++)
        v_code[d] = esa_eight_value(mean[d] - v_centre[d], v_inverse[d], a->kern->eight_f16);
}

void esa_eight_block(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const eight_run *run = arg;
    const esa_attn_args *a = run->a;
    const int64_t slot = item / a->nk, j = item % a->nk, head = run->first + slot,
                  b = head / a->Hkv, h = head % a->Hkv, D = a->D;
    const int64_t n = esa_min64(a->block_k, kv_len_of(a, b) - j * a->block_k);
    if (n <= 0) return;
    const int32_t *perm = order_at(a->perm_k, a->perm_k_stride, b, h);
    const rows_ref k = rows_at(a->k, a->k_stride, perm, b, h, j * a->block_k, a->dtype);
    const rows_ref v = rows_at(a->v, a->v_stride, perm, b, h, j * a->block_k, a->dtype);
    const float *k_centre = run->k_centre + slot * D, *v_centre = run->v_centre + slot * D,
                *v_inverse = run->v_inverse + slot * D;
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++)
            largest = esa_eight_larger(largest, element(a, k, a->k_stride[2], i, d) - k_centre[d]);
    const float scale = esa_eight_scale(largest, ESA_EIGHT_CODE),
                inverse = esa_eight_inverse(scale);
    run->k_scale[item] = scale;
    float *k_code = run->k + item * a->block_k * D, *v_code = run->v + item * a->block_k * D;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) {
            k_code[i * D + d] = esa_eight_code(element(a, k, a->k_stride[2], i, d) - k_centre[d],
                                               inverse);
            v_code[i * D + d] = esa_eight_value(element(a, v, a->v_stride[2], i, d) - v_centre[d],
                                                v_inverse[d], a->kern->eight_f16);
        }
    if (!a->tail) return;
    mean_codes(run->k_mean + item * D, run->v_mean + item * D, run, slot, k, v, n, inverse);
    if (!a->fine_count) return;
    const int64_t size = a->block_k / a->fine;
    for (int64_t p = 0; p * size < n; p++) {
        const int64_t at = (item * a->fine + p) * D;
        mean_codes(run->k_fine + at, run->v_fine + at, run, slot,
                   rows_after(k, p * size, a->k_stride[2], a->dtype),
                   rows_after(v, p * size, a->v_stride[2], a->dtype), esa_min64(size, n - p * size),
                   inverse);
    }
}

void esa_eight_added(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const eight_run *run = arg;
    const esa_attn_args *a = run->a;
    const int64_t head = run->first + item, b = head / a->Hkv, h = head % a->Hkv, D = a->D,
                  /* errors of f16 do not matter, and means of a tail do not have the mean error */
        n = a->kern->eight_f16 || (a->count && a->tail) ? 0 : kv_len_of(a, b);
    const rows_ref v = rows_at(a->v, a->v_stride, order_at(a->perm_k, a->perm_k_stride, b, h), b, h,
                               0, a->dtype);
    const float *code = run->v + item * a->nk * a->block_k * D;
    for (int64_t d = 0; d < D; d++) {
        const float centre = run->v_centre[item * D + d];
        const double scale = (double)run->v_scale[item * D + d];
        double sum = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++) {
            const double x = (double)(element(a, v, a->v_stride[2], i, d) - centre);
            if (!(fabs(x) < (double)INFINITY)) continue;
            sum += x - scale * (double)code[i * D + d];
            count++;
        }
        run->v_added[item * D + d] = centre + (count ? (float)(sum / (double)count) : 0.0f);
    }
}
