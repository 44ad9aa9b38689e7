/* kernels_ref.c - every slot of the kernel table in plain C: the definition of right, and the fallback.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Contract: cpu/cpu.h and docs/kernels.md. Written for reading: one loop per sum, no blocking. */
#include "base/half.h"
#include "cpu/tables.h"

#include <math.h>

enum { MR = 4, NR = 8, DR = 8 };

static int64_t source_row(const int32_t *gather, int64_t i, int64_t stride)
{
    return (gather ? gather[i] : i) * stride;
}

/* dst [ceil(rows/W)][D][W]: W rows side by side, missing rows zero. */
static void pack_panels(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                        int64_t D, int64_t W, float factor)
{
    for (int64_t base = 0; base < rows; base += W, dst += D * W)
        for (int64_t d = 0; d < D; d++)
            for (int64_t w = 0; w < W; w++)
                dst[d * W + w] = base + w < rows
                    ? factor * esa_load_f32(src, source_row(gather, base + w, stride) + d, dtype) : 0.0f;
}

static void pack_q(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D,
                   float factor)
{
    pack_panels(dst, src, dtype, stride, gather, rows, D, MR, factor);
}

static void pack_k(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    pack_panels(dst, src, dtype, stride, gather, rows, D, NR, 1.0f);
}

static void pack_v(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                   int64_t v_rows, int64_t D)
{
    float *out = dst;
    for (int64_t base = 0; base < D; base += DR, out += v_rows * DR)
        for (int64_t i = 0; i < v_rows; i++)
            for (int64_t c = 0; c < DR; c++)
                out[i * DR + c] = i < rows && base + c < D
                    ? esa_load_f32(src, source_row(gather, i, stride) + base + c, dtype) : 0.0f;
}

static void qk(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys, int64_t depth, float factor,
               int32_t accumulate)
{
    (void)factor;                               /* folded into q by pack_q */
    const float *a = q, *b = k;
    for (int64_t panel = 0; panel * NR < keys; panel++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < NR; c++) {
                float sum = accumulate ? s[r * ld + panel * NR + c] : 0.0f;
                for (int64_t d = 0; d < depth; d++) sum += a[d * MR + r] * b[(panel * depth + d) * NR + c];
                s[r * ld + panel * NR + c] = sum;
            }
}

static int32_t softmax(void *p, float *s, int64_t ld, int64_t rows, int64_t keys, const int32_t *limit, const float *bias,
                       float *m, float *l, float *alpha)
{
    float *out = p;
    int32_t moved = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *row = s + r * ld, top = -INFINITY, sum = 0.0f;
        const int64_t visible = limit ? limit[r] : keys;
        for (int64_t c = 0; c < keys; c++) {
            if (c >= visible || (bias && bias[c] == -INFINITY)) row[c] = -INFINITY;     /* also where the score is NaN */
            else if (bias) row[c] += bias[c];
            if (row[c] > top) top = row[c];
        }
        alpha[r] = 1.0f;
        if (top > m[r] + 8.0f) {                /* also the first time, when m = -inf */
            alpha[r] = exp2f(m[r] - top);       /* m = -inf: 0 */
            m[r] = top;
            l[r] *= alpha[r];
            moved |= alpha[r] != 1.0f;
        }
        const float ref = m[r] == -INFINITY ? 0.0f : m[r];      /* -inf - -inf would be NaN; exp2(-inf - 0) is 0 */
        for (int64_t c = 0; c < keys; c++) {
            out[r * ld + c] = exp2f(row[c] - ref);
            sum += out[r * ld + c];
        }
        if (keys & 1) out[r * ld + keys] = 0.0f;
        l[r] += sum;
    }
    return moved;
}

static void pv(float *o, int64_t ld_o, const void *p, int64_t ld_p, const void *v, int64_t v_rows, int64_t rows, int64_t keys,
               int64_t D, const float *alpha)
{
    const float *a = p, *b = v;
    for (int64_t base = 0; base < D; base += DR, b += v_rows * DR)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < DR; c++) {
                float sum = o[r * ld_o + base + c] * (alpha ? alpha[r] : 1.0f);
                for (int64_t i = 0; i < keys; i++) sum += a[r * ld_p + i] * b[i * DR + c];
                o[r * ld_o + base + c] = sum;
            }
}

static void store(void *dst, int32_t dtype, const float *src, float factor, int64_t D)
{
    for (int64_t d = 0; d < D; d++) esa_store_f32(dst, d, dtype, src[d] * factor);
}

static void stats(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows, int64_t keys, int64_t group)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t base = 0, g = 0; base < keys; base += group, g++) {
            const int64_t n = esa_min64(group, keys - base);
            const float *row = s + r * ld + base;
            float t = -INFINITY, e = 0.0f;
            for (int64_t c = 0; c < n; c++) if (row[c] > t) t = row[c];
            const float ref = t == -INFINITY ? 0.0f : t;
            for (int64_t c = 0; c < n; c++) e += exp2f(row[c] - ref);          /* a NaN in the group makes the sum NaN */
            top[r * ld_out + g] = t;
            sum[r * ld_out + g] = e;
        }
}

static void mean(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    for (int64_t d = 0; d < D; d++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < rows; i++) sum += esa_load_f32(src, source_row(gather, i, stride) + d, dtype);
        dst[d] = sum / (float)rows;
    }
}

const esa_cpu_kernels esa_kernels_ref = {
    .name = "ref", .level = ESA_CPU_REF, .mr = MR, .nr = NR, .dr = DR, .lanes = 1, .packed_bytes = 4,
    .pack_q = pack_q, .pack_k = pack_k, .pack_v = pack_v, .qk = qk, .softmax = softmax, .pv = pv,
    .store = store, .stats = stats, .mean = mean, .bf16 = NULL,
};
