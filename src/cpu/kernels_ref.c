/* kernels_ref.c - every slot of the kernel table in plain C: the reference for tests,
 * and the fallback.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Contract: cpu/cpu.h and docs/kernels.md. Written to be read: one loop per sum, no blocking. */
#include "base/half.h"
#include "cpu/tables.h"

#include <math.h>

enum { MR = 4, NR = 8 };

static int64_t source_row(const int32_t *gather, int64_t i, int64_t stride)
{
    return (gather ? gather[i] : i) * stride;
}

/* dst [ceil(rows/W)][D][W]: W rows side by side; missing rows are zero. */
static void pack_panels(float *dst, const void *src, int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D, int64_t W, float factor)
{
    for (int64_t base = 0; base < rows; base += W, dst += D * W)
        for (int64_t d = 0; d < D; d++)
            for (int64_t w = 0; w < W; w++)
                dst[d * W + w] = base + w < rows
                                     ? factor *
                                           esa_load_f32(
                                               src, source_row(gather, base + w, stride) + d, dtype)
                                     : 0.0f;
}

static void pack_q(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D, float factor)
{
    pack_panels(dst, src, dtype, stride, gather, rows, D, MR, factor);
}

static void pack_k(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D)
{
    pack_panels(dst, src, dtype, stride, gather, rows, D, NR, 1.0f);
}

static void panel_q(void *dst, const void *src, int32_t dtype, int64_t stride,
                    const int32_t *gather, int64_t rows, int64_t D, float factor)
{
    pack_panels(dst, src, dtype, stride, gather, rows, D, NR, factor);
}

static void copy_rows(void *dst, const void *src, int32_t dtype, int64_t stride,
                      const int32_t *gather, int64_t rows, int64_t D)
{
    float *out = dst;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < D; d++)
            out[i * D + d] = esa_load_f32(src, source_row(gather, i, stride) + d, dtype);
}

static void qk(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys,
               int64_t depth, float factor, int32_t accumulate)
{
    (void)factor; /* pack_q folded it into q */
    const float *a = q, *b = k;
    for (int64_t panel = 0; panel * NR < keys; panel++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < NR; c++) {
                float sum = accumulate ? s[r * ld + panel * NR + c] : 0.0f;
                for (int64_t d = 0; d < depth; d++)
                    sum += a[d * MR + r] * b[(panel * depth + d) * NR + c];
                s[r * ld + panel * NR + c] = sum;
            }
}

static void kq(float *s, const void *q, const void *k, int64_t k_stride, int64_t keys,
               int64_t depth, float factor)
{
    (void)factor; /* panel_q folded it into q */
    const float *a = k, *b = q;
    for (int64_t i = 0; i < keys; i++)
        for (int64_t c = 0; c < NR; c++) {
            float sum = 0.0f;
            for (int64_t d = 0; d < depth; d++) sum += a[i * k_stride + d] * b[d * NR + c];
            s[i * NR + c] = sum;
        }
}

static int32_t softmax(void *p, float *s, int64_t keys, float factor, const float *limit,
                       const float *bias, float *m, float *l, float *alpha)
{
    float *out = p;
    int32_t moved = 0;
    (void)factor; /* panel_q folded it into q */
    for (int64_t c = 0; c < NR; c++) {
        float top = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < keys; i++) {
            float *x = &s[i * NR + c];
            /* Also if the score is NaN. */
            if ((limit && (float)i >= limit[c]) || (bias && bias[i] == -INFINITY))
                *x = -INFINITY;
            else if (bias)
                *x += bias[i];
            if (*x > top) top = *x;
        }
        alpha[c] = 1.0f;
        if (top > m[c] + 8.0f) {          /* also the first time, when m = -inf */
            alpha[c] = exp2f(m[c] - top); /* m = -inf: 0 */
            m[c] = top;
            l[c] *= alpha[c];
            moved = 1;
        }
        /* -inf - -inf would be NaN; exp2(-inf - 0) is 0. */
        const float ref = m[c] == -INFINITY ? 0.0f : m[c];
        for (int64_t i = 0; i < keys; i++) {
            out[i * NR + c] = exp2f(s[i * NR + c] - ref);
            sum += out[i * NR + c];
        }
        l[c] += sum;
    }
    return moved;
}

static void pv(float *o, const void *p, const void *v, int64_t v_stride, int64_t keys, int64_t D,
               const float *alpha, int32_t accumulate)
{
    const float *a = v, *b = p;
    for (int64_t d = 0; d < D; d++)
        for (int64_t c = 0; c < NR; c++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < keys; i++) sum += a[i * v_stride + d] * b[i * NR + c];
            if (accumulate) sum += o[d * NR + c] * (alpha ? alpha[c] : 1.0f);
            o[d * NR + c] = sum;
        }
}

static void store(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                  const float *factor, int64_t rows, int64_t D)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < D; d++)
            esa_store_f32(dst, source_row(scatter, r, stride) + d, dtype,
                          o[d * NR + r] * factor[r]);
}

static void stats(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows,
                  int64_t keys, int64_t group)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t base = 0, g = 0; base < keys; base += group, g++) {
            const int64_t n = esa_min64(group, keys - base);
            const float *row = s + r * ld + base;
            float t = -INFINITY, e = 0.0f;
            for (int64_t c = 0; c < n; c++)
                if (row[c] > t) t = row[c];
            const float ref = t == -INFINITY ? 0.0f : t;
            /* NaN in the group makes the sum NaN. */
            for (int64_t c = 0; c < n; c++) e += exp2f(row[c] - ref);
            top[r * ld_out + g] = t;
            sum[r * ld_out + g] = e;
        }
}

static void mean(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                 int64_t rows, int64_t D)
{
    for (int64_t d = 0; d < D; d++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < rows; i++)
            sum += esa_load_f32(src, source_row(gather, i, stride) + d, dtype);
        dst[d] = sum / (float)rows;
    }
}

static void fold(float *dst, const float *src, int64_t rows, int64_t n, int32_t accumulate)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = accumulate ? dst[i] : 0.0f;
        for (int64_t r = 0; r < rows; r++) sum += src[r * n + i];
        dst[i] = sum;
    }
}

static void residue(float *e, const float *a, const float *o, const float *w, const float *t,
                    const float *v, int64_t v_stride, int64_t means, int64_t D)
{
    for (int64_t c = 0; c < NR; c++) {
        float rest = w[c], sum = e[c];
        for (int64_t i = 0; i < means; i++) rest -= t[i * NR + c];
        for (int64_t d = 0; d < D; d++) {
            float x = a[d * NR + c] - rest * o[d * NR + c];
            for (int64_t i = 0; i < means; i++) x -= t[i * NR + c] * v[i * v_stride + d];
            sum += x * x;
        }
        e[c] = sum;
    }
}

const esa_cpu_kernels esa_kernels_ref = {
    .name = "ref",
    .level = ESA_CPU_REF,
    .mr = MR,
    .nr = NR,
    .packed_bytes = 4,
    .depth_unit = 1,
    .keys_unit = 1,
    .dims_unit = 1,
    .panel_q = panel_q,
    .rows_k = copy_rows,
    .rows_v = copy_rows,
    .kq = kq,
    .softmax = softmax,
    .pv = pv,
    .store = store,
    .pack_q = pack_q,
    .pack_k = pack_k,
    .qk = qk,
    .stats = stats,
    .mean = mean,
    .fold = fold,
    .residue = residue,
    .bf16 = NULL,
};
