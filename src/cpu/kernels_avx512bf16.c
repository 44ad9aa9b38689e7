/* kernels_avx512bf16.c - the sets for CPUs with VDPBF16PS: the AVX-512 f32 set, and a bf16 set for
 * bf16 tensors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bf16 set packs pairs: a 32-bit word holds two neighbours along the sum (along D for Q K^T,
 * along keys for P V), so one instruction adds both products to an f32 accumulator. q, k and v are
 * exact. p is rounded to bf16, as in any attention of that precision. The scale is applied to the
 * f32 scores, never to the bf16 queries. */
#include "cpu/simd_avx512.h"

#if !defined(__AVX512BF16__)
#error "kernels_avx512bf16.c needs -mavx512bf16"
#endif

enum { MR = 12, NV = 2, ROWS_A = 4, ROWS_B = 8 };
#include "cpu/kernels.inc.h"
#include "cpu/pairs_avx512.h"

static void panel_q_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, float factor)
{
    (void)factor; /* left to kq: rounding scaled queries to bf16 would lose precision */
    BY_DTYPE(dtype, pack_pairs(dst, src, DT, stride, gather, rows, D, (D + 1) / 2, NR))
}

static void rows_k_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D)
{
    copy_words(dst, src, dtype, stride, gather, rows, D, (D + 1) / 2 * 2);
}

/* dst [ceil(rows/2)][D][2]: rows 2i and 2i+1 interleaved. */
static void rows_v_bf16(void *dst, const void *src, int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    uint16_t *out = dst;
    for (int64_t i = 0; i < rows; i += 2)
        for (int64_t d = 0; d < D; d += 32) {
            __m512i pair[2];
            for (int64_t s = 0; s < 2; s++)
                pair[s] = i + s < rows
                              ? pair_words((const char *)src +
                                               (gather ? gather[i + s] : i + s) * stride * size,
                                           d, D, dtype)
                              : _mm512_setzero_si512();
            /* a0 b0 a1 b1 ...: unpack works inside 128-bit lanes; the permutes put the
             * lanes in order. */
            const __m512i lo = _mm512_unpacklo_epi16(pair[0], pair[1]),
                          hi = _mm512_unpackhi_epi16(pair[0], pair[1]);
            const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                          second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            uint16_t *at = out + i * D + 2 * d;
            store_words(at, _mm512_permutex2var_epi64(lo, first, hi), 2 * (D - d));
            if (d + 16 < D)
                store_words(at + 32, _mm512_permutex2var_epi64(lo, second, hi), 2 * (D - d) - 32);
        }
}

INLINE __m512bh broadcast_pair(const void *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return (__m512bh)_mm512_set1_epi32((int)w);
}

/* c += over word steps. a: pairs at a + step*a_step + r*a_row, in 16-bit units.
 * b: [step][NR] words. */
INLINE void tile_pairs(vf c[][NV], const uint16_t *a, int64_t a_step, int64_t a_row,
                       const uint16_t *b, int64_t steps, const int R)
{
    for (int64_t t = 0; t < steps; t++, a += a_step, b += 2 * NR) {
        __m512bh x[NV];
        UNROLL
        for (int j = 0; j < NV; j++) x[j] = (__m512bh)_mm512_loadu_si512(b + j * 32);
        UNROLL
        for (int r = 0; r < R; r++) {
            const __m512bh y = broadcast_pair(a + r * a_row);
            UNROLL
            for (int j = 0; j < NV; j++) c[r][j] = _mm512_dpbf16_ps(c[r][j], y, x[j]);
        }
    }
}

INLINE void kq_pairs(float *s, const uint16_t *q, const uint16_t *k, int64_t k_stride,
                     int64_t depth, vf factor, const int R)
{
    vf c[MR][NV];
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) c[r][j] = v_zero();
    tile_pairs(c, k, 2, k_stride, q, depth / 2, R);
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) v_store(s + r * NR + j * VL, v_mul(c[r][j], factor));
}

static void kq_bf16(float *s, const void *q, const void *keys_at, int64_t k_stride, int64_t keys,
                    int64_t depth, float factor)
{
    const vf f = v_set1(factor);
    const uint16_t *k = keys_at;
    int64_t i = 0;
    for (; i + MR <= keys; i += MR)
        kq_pairs(s + i * NR, q, k + i * k_stride, k_stride, depth, f, MR);
    for (; i + ROWS_B <= keys; i += ROWS_B)
        kq_pairs(s + i * NR, q, k + i * k_stride, k_stride, depth, f, ROWS_B);
    for (; i + ROWS_A <= keys; i += ROWS_A)
        kq_pairs(s + i * NR, q, k + i * k_stride, k_stride, depth, f, ROWS_A);
    for (; i < keys; i++) kq_pairs(s + i * NR, q, k + i * k_stride, k_stride, depth, f, 1);
}

static int32_t softmax_bf16(void *p, float *s, int64_t keys, float factor, const float *limit,
                            const float *bias, float *m, float *l, float *alpha)
{
    const int32_t moved = softmax(s, s, keys, factor, limit, bias, m, l, alpha);
    for (int64_t i = 0; i < keys; i += 2)
        for (int j = 0; j < NV; j++) {
            const vf even = v_load(s + i * NR + j * VL),
                     odd = i + 1 < keys ? v_load(s + (i + 1) * NR + j * VL) : v_zero();
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even)),
                          high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
            _mm512_storeu_si512((uint16_t *)p + i * NR + 2 * j * VL,
                                _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    return moved;
}

INLINE void pv_pairs(float *o, const uint16_t *p, const uint16_t *v, int64_t v_stride, int64_t keys,
                     const float *alpha, int32_t accumulate, const int R)
{
    vf c[MR][NV];
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) c[r][j] = v_zero();
    tile_pairs(c, v, 2 * v_stride, 2, p, (keys + 1) / 2, R);
    add_tile(o, c, alpha, accumulate, R);
}

static void pv_bf16(float *o, const void *p, const void *values, int64_t v_stride, int64_t keys,
                    int64_t D, const float *alpha, int32_t accumulate)
{
    const uint16_t *v = values;
    int64_t d = 0;
    for (; d + MR <= D; d += MR)
        pv_pairs(o + d * NR, p, v + 2 * d, v_stride, keys, alpha, accumulate, MR);
    for (; d + ROWS_B <= D; d += ROWS_B)
        pv_pairs(o + d * NR, p, v + 2 * d, v_stride, keys, alpha, accumulate, ROWS_B);
    for (; d + ROWS_A <= D; d += ROWS_A)
        pv_pairs(o + d * NR, p, v + 2 * d, v_stride, keys, alpha, accumulate, ROWS_A);
    for (; d < D; d++) pv_pairs(o + d * NR, p, v + 2 * d, v_stride, keys, alpha, accumulate, 1);
}

static const esa_cpu_kernels bf16_set = {
    .name = "avx512bf16",
    .level = ESA_CPU_AVX512BF16,
    .mr = MR,
    .nr = NR,
    .packed_bytes = 2,
    .depth_unit = 2,
    .keys_unit = 2,
    .dims_unit = 1,
    .panel_q = panel_q_bf16,
    .rows_k = rows_k_bf16,
    .rows_v = rows_v_bf16,
    .kq = kq_bf16,
    .softmax = softmax_bf16,
    .pv = pv_bf16,
    .store = store,
    .mean = mean,
};

const esa_cpu_kernels esa_kernels_avx512bf16 = {
    .name = "avx512bf16", .level = ESA_CPU_AVX512BF16, KERNEL_SLOTS, .bf16 = &bf16_set
};
