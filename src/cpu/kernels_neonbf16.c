/* kernels_neonbf16.c - the sets for Arm CPUs with BFMMLA: the NEON f32 set, and a bf16 set for bf16
 * tensors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One BFMMLA multiplies two rows of four values with two columns of four and adds the products to
 * four f32 sums. Rows are keys (first product) or head-dim columns (second), columns are queries.
 * So everything is packed in fours along the sum: queries along D, values and p along keys. Keys
 * are read where they are, eight bytes of two rows at a time. As Arm defines BFMMLA, it rounds its
 * sums to odd and takes denormals as 0. */
#include "cpu/simd_neon.h"

#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#error "kernels_neonbf16.c needs -march=armv8.2-a+bf16"
#endif

enum { MR = 6, NV = 4, ROWS_A = 2, ROWS_B = 4, FOUR = 4 };
#include "cpu/kernels.inc.h"

INLINE bfloat16x8_t load_eight(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

/* Values d .. d+3 of a row; those at or past D are 0. */
INLINE uint16x4_t load_four(const char *row, int64_t d, int64_t D, int32_t dtype)
{
    uint16_t t[FOUR];
    if (d + FOUR <= D && dtype == ESA_DTYPE_BF16) {
        memcpy(t, row + 2 * d, sizeof t);
        return vld1_u16(t);
    }
    if (d + FOUR <= D)
        return vreinterpret_u16_bf16(
            vcvt_bf16_f32(v_load_as(row + d * esa_dtype_size(dtype), dtype)));
    /* Exact for bf16. */
    for (int64_t i = 0; i < FOUR; i++)
        t[i] = d + i >= D ? 0 : esa_f32_to_bf16(esa_load_f32(row, d + i, dtype));
    return vld1_u16(t);
}

/* dst [ceil(rows/NR)][D'/4][NR][4] */
static void panel_q_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, float factor)
{
    const int64_t size = esa_dtype_size(dtype);
    uint16_t *out = dst;
    (void)factor; /* left to kq: rounding scaled queries to bf16 would lose precision */
    for (int64_t first = 0; first < rows; first += NR)
        for (int64_t d = 0; d < D; d += FOUR)
            for (int64_t i = first; i < first + NR; i++, out += FOUR)
                vst1_u16(out, i < rows ? load_four((const char *)src +
                                                       (gather ? gather[i] : i) * stride * size,
                                                   d, D, dtype)
                                       : vdup_n_u16(0));
}

static void rows_k_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    uint16_t *out = dst;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < D; d += FOUR, out += FOUR)
            vst1_u16(out, load_four((const char *)src + (gather ? gather[i] : i) * stride * size, d,
                                    D, dtype));
}

/* dst [ceil(rows/4)][D''][4]: four keys transposed. */
static void rows_v_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype), dims = (D + 1) / 2 * 2;
    uint16_t *out = dst;
    for (int64_t first = 0; first < rows; first += FOUR, out += dims * FOUR)
        for (int64_t d = 0; d < dims; d += FOUR) {
            uint16x4_t r[FOUR];
            for (int64_t i = 0; i < FOUR; i++) {
                const int64_t n = first + i;
                r[i] = n < rows
                           ? load_four((const char *)src + (gather ? gather[n] : n) * stride * size,
                                       d, D, dtype)
                           : vdup_n_u16(0);
            }
            const uint16x4x2_t a = vtrn_u16(r[0], r[1]), b = vtrn_u16(r[2], r[3]);
            const uint32x2x2_t even = vtrn_u32(vreinterpret_u32_u16(a.val[0]),
                                               vreinterpret_u32_u16(b.val[0])),
                               odd = vtrn_u32(vreinterpret_u32_u16(a.val[1]),
                                              vreinterpret_u32_u16(b.val[1]));
            const uint32x2_t column[FOUR] = { even.val[0], odd.val[0], even.val[1], odd.val[1] };
            for (int64_t i = 0; i < FOUR && d + i < dims; i++)
                vst1_u16(out + (d + i) * FOUR, vreinterpret_u16_u32(column[i]));
        }
}

/* Sums of two rows and NR columns, as BFMMLA keeps them, to two rows of vectors. */
INLINE void two_rows(vf row[2][NV], const vf c[2 * NV])
{
    UNROLL
    for (int j = 0; j < NV; j++) {
        row[0][j] = vcombine_f32(vget_low_f32(c[2 * j]), vget_low_f32(c[2 * j + 1]));
        row[1][j] = vcombine_f32(vget_high_f32(c[2 * j]), vget_high_f32(c[2 * j + 1]));
    }
}

/* c[P pairs of rows] += a b for one step of four. The empty statement keeps gcc from loading all
 * of b first, for which there are no registers. */
INLINE void multiply_fours(vf c[][2 * NV], const bfloat16x8_t a[], const uint16_t *b, const int P)
{
    UNROLL
    for (int j = 0; j < 2 * NV; j++) {
        const bfloat16x8_t x = load_eight(b + 2 * j * FOUR);
        UNROLL
        for (int r = 0; r < P; r++) c[r][j] = vbfmmlaq_f32(c[r][j], a[r], x);
        __asm__ volatile("" ::: "memory");
    }
}

/* s of `rows` keys: 2 P, or 1 with P 1. */
INLINE void kq_fours(float *s, const uint16_t *q, const uint16_t *k, int64_t k_stride,
                     int64_t depth, vf factor, const int P, const int rows)
{
    const int64_t second = rows > 1 ? k_stride : 0; /* a single row is taken twice */
    vf c[MR / 2][2 * NV], row[2][NV];
    UNROLL
    for (int r = 0; r < P; r++) UNROLL
    for (int j = 0; j < 2 * NV; j++) c[r][j] = v_zero();
    for (int64_t d = 0; d < depth; d += FOUR) {
        bfloat16x8_t a[MR / 2];
        UNROLL
        for (int r = 0; r < P; r++)
            a[r] = vreinterpretq_bf16_u16(vcombine_u16(
                vld1_u16(k + 2 * r * k_stride + d), vld1_u16(k + 2 * r * k_stride + second + d)));
        multiply_fours(c, a, q + d * NR, P);
    }
    UNROLL
    for (int r = 0; r < P; r++) {
        two_rows(row, c[r]);
        UNROLL
        for (int j = 0; j < NV; j++) {
            v_store(s + 2 * r * NR + j * VL, v_mul(row[0][j], factor));
            if (rows > 1) v_store(s + (2 * r + 1) * NR + j * VL, v_mul(row[1][j], factor));
        }
    }
}

static void kq_bf16(float *s, const void *q, const void *keys_at, int64_t k_stride, int64_t keys,
                    int64_t depth, float factor)
{
    const vf f = v_set1(factor);
    const uint16_t *k = keys_at;
    int64_t i = 0;
    for (; i + MR <= keys; i += MR)
        kq_fours(s + i * NR, q, k + i * k_stride, k_stride, depth, f, MR / 2, MR);
    for (; i + 2 <= keys; i += 2)
        kq_fours(s + i * NR, q, k + i * k_stride, k_stride, depth, f, 1, 2);
    if (i < keys) kq_fours(s + i * NR, q, k + i * k_stride, k_stride, depth, f, 1, 1);
}

static int32_t softmax_bf16(void *p, float *s, int64_t keys, float factor, const float *limit,
                            const float *bias, float *m, float *l, float *alpha)
{
    const int32_t moved = softmax(s, s, keys, factor, limit, bias, m, l, alpha);
    uint16_t *out = p;
    for (int64_t i = 0; i < keys; i += FOUR)
        for (int j = 0; j < NV; j++, out += VL * FOUR) {
            vf r[VL];
            UNROLL
            for (int n = 0; n < VL; n++)
                r[n] = i + n < keys ? v_load(s + (i + n) * NR + j * VL) : v_zero();
            v_transpose(r);
            UNROLL
            for (int n = 0; n < VL; n += 2)
                vst1q_u16(out + n * FOUR, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(
                                              vcvtq_low_bf16_f32(r[n]), r[n + 1])));
        }
    return moved;
}

/* o of `rows` head-dim columns: 2 P, or 1 with P 1. */
INLINE void pv_fours(float *o, const uint16_t *p, const uint16_t *v, int64_t dims, int64_t keys,
                     const float *alpha, int32_t accumulate, const int P, const int rows)
{
    vf c[MR / 2][2 * NV], row[2][NV];
    UNROLL
    for (int r = 0; r < P; r++) UNROLL
    for (int j = 0; j < 2 * NV; j++) c[r][j] = v_zero();
    for (int64_t i = 0; i < keys; i += FOUR, v += dims * FOUR, p += NR * FOUR) {
        bfloat16x8_t a[MR / 2];
        UNROLL
        for (int r = 0; r < P; r++) a[r] = load_eight(v + 2 * r * FOUR);
        multiply_fours(c, a, p, P);
    }
    UNROLL
    for (int r = 0; r < P; r++) {
        two_rows(row, c[r]);
        add_tile(o + 2 * r * NR, row, alpha, accumulate, rows > 1 ? 2 : 1);
    }
}

static void pv_bf16(float *o, const void *p, const void *values, int64_t v_stride, int64_t keys,
                    int64_t D, const float *alpha, int32_t accumulate)
{
    const uint16_t *v = values;
    const int64_t dims = (D + 1) / 2 * 2;
    int64_t d = 0;
    (void)v_stride; /* values are a copy of known shape */
    for (; d + MR <= D; d += MR)
        pv_fours(o + d * NR, p, v + d * FOUR, dims, keys, alpha, accumulate, MR / 2, MR);
    for (; d + 2 <= D; d += 2)
        pv_fours(o + d * NR, p, v + d * FOUR, dims, keys, alpha, accumulate, 1, 2);
    if (d < D) pv_fours(o + d * NR, p, v + d * FOUR, dims, keys, alpha, accumulate, 1, 1);
}

static const esa_cpu_kernels bf16_set = {
    .name = "neonbf16",
    .level = ESA_CPU_NEONBF16,
    .mr = MR,
    .nr = NR,
    .packed_bytes = 2,
    .depth_unit = FOUR,
    .keys_unit = FOUR,
    .dims_unit = 2,
    .panel_q = panel_q_bf16,
    .rows_k = rows_k_bf16,
    .rows_v = rows_v_bf16,
    .kq = kq_bf16,
    .softmax = softmax_bf16,
    .pv = pv_bf16,
    .store = store,
    .mean = mean,
};

const esa_cpu_kernels esa_kernels_neonbf16 = {
    .name = "neonbf16", .level = ESA_CPU_NEONBF16, KERNEL_SLOTS, .bf16 = &bf16_set
};
