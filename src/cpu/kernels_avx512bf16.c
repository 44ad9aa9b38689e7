/* kernels_avx512bf16.c - the AVX-512 sets where VDPBF16PS exists: the f32 set once more, and a bf16 set for bf16 tensors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bf16 set packs pairs: a 32-bit word holds two neighbours along the sum (along D for Q K^T, along keys for P V), so that one
 * instruction adds both products of a pair to an f32 accumulator. q, k, v go in exactly; p is rounded to bf16, as every
 * same-precision attention does; the scale is applied to the f32 scores, never to the bf16 queries. */
#include "cpu/simd_avx512.h"

#if !defined(__AVX512BF16__)
#error "kernels_avx512bf16.c needs -mavx512bf16"
#endif

enum { MR = 12, NV = 2, ROWS_A = 4, ROWS_B = 8 };
#include "cpu/kernels.inc.h"

/* 16 words (32 values) of a row starting at value d, as bf16 pairs; values at or past D are zero. */
INLINE __m512i pair_words(const char *row, int64_t d, int64_t D, int32_t dtype)
{
    if (d + 32 <= D) {
        if (dtype == ESA_DTYPE_BF16) return _mm512_loadu_si512(row + 2 * d);
        const int64_t size = esa_dtype_size(dtype);
        return (__m512i)_mm512_cvtne2ps_pbh(v_load_as(row + (d + 16) * size, dtype), v_load_as(row + d * size, dtype));
    }
    uint16_t t[32];
    for (int64_t i = 0; i < 32; i++) t[i] = d + i >= D ? 0 : esa_f32_to_bf16(esa_load_f32(row, d + i, dtype));     /* exact for bf16 */
    return _mm512_loadu_si512(t);
}

/* dst [D'/2][W] words. */
INLINE void pack_pairs(uint32_t *dst, const void *src, const int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                       int64_t D, const int W)
{
    const int64_t size = esa_dtype_size(dtype), words = (D + 1) / 2;
    for (int64_t first = 0; first < rows; first += W, dst += words * W)
        for (int64_t w0 = 0; w0 < words; w0 += 16)
            for (int base = 0; base < W; base += 16) {
                vf r[16];
                for (int i = 0; i < 16; i++) {
                    const int64_t n = first + base + i;
                    r[i] = base + i < W && n < rows
                        ? _mm512_castsi512_ps(pair_words((const char *)src + (gather ? gather[n] : n) * stride * size, 2 * w0, D, dtype))
                        : v_zero();
                }
                v_transpose(r);
                for (int i = 0; i < 16 && w0 + i < words; i++)
                    v_store_first((float *)dst + (w0 + i) * W + base, r[i], W - base < 16 ? W - base : 16);
            }
}

static void pack_q_bf16(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D,
                        float factor)
{
    (void)factor;                               /* left to qk: rounding scaled queries to bf16 would cost precision */
    BY_DTYPE(dtype, pack_pairs(dst, src, DT, stride, gather, rows, D, MR))
}

static void pack_k_bf16(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, pack_pairs(dst, src, DT, stride, gather, rows, D, NR))
}

/* dst [ceil(D/DR)][v_rows/2][DR] words: rows 2i and 2i+1 interleaved. */
static void pack_v_bf16(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                        int64_t v_rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    uint16_t *out = dst;
    for (int64_t i = 0; i < v_rows; i += 2)
        for (int64_t d = 0; d < D; d += DR) {
            __m512i pair[2];
            for (int64_t s = 0; s < 2; s++)
                pair[s] = i + s < rows ? pair_words((const char *)src + (gather ? gather[i + s] : i + s) * stride * size, d, D, dtype)
                                       : _mm512_setzero_si512();
            /* a0 b0 a1 b1 ...: unpack works inside 128-bit lanes, the permutes put the lanes in order. */
            const __m512i lo = _mm512_unpacklo_epi16(pair[0], pair[1]), hi = _mm512_unpackhi_epi16(pair[0], pair[1]);
            const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            uint16_t *at = out + (d / DR * v_rows + i) * DR;
            _mm512_storeu_si512(at, _mm512_permutex2var_epi64(lo, first, hi));
            _mm512_storeu_si512(at + 32, _mm512_permutex2var_epi64(lo, second, hi));
        }
}

INLINE __m512bh broadcast_pair(const void *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return (__m512bh)_mm512_set1_epi32((int)w);
}

/* c += over word steps; a: pairs at a + step*a_step + r*a_row (in 16-bit units), b: [step][NR] words. */
INLINE void tile_pairs(vf c[][NV], const uint16_t *a, int64_t a_step, int64_t a_row, const uint16_t *b, int64_t steps, const int R)
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

INLINE void qk_pairs(float *s, int64_t ld, const uint16_t *q, const uint16_t *k, int64_t keys, int64_t depth, vf factor, int32_t accumulate,
                     const int R)
{
    for (int64_t base = 0; base < keys; base += NR, k += depth * NR) {
        vf c[MR][NV];
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) c[r][j] = v_zero();
        tile_pairs(c, q, 2 * MR, 2, k, depth / 2, R);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) {
                float *at = s + r * ld + base + j * VL;
                v_store(at, accumulate ? v_fma(c[r][j], factor, v_load(at)) : v_mul(c[r][j], factor));
            }
    }
}

static void qk_bf16(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys, int64_t depth, float factor,
                    int32_t accumulate)
{
    const vf f = v_set1(factor);
    if (rows > ROWS_B) qk_pairs(s, ld, q, k, keys, depth, f, accumulate, MR);
    else if (rows > ROWS_A) qk_pairs(s, ld, q, k, keys, depth, f, accumulate, ROWS_B);
    else qk_pairs(s, ld, q, k, keys, depth, f, accumulate, ROWS_A);
}

static int32_t softmax_bf16(void *p, float *s, int64_t ld, int64_t rows, int64_t keys, const int32_t *limit, const float *bias,
                            float *m, float *l, float *alpha)
{
    const int32_t moved = softmax(s, s, ld, rows, keys, limit, bias, m, l, alpha);
    /* Columns behind keys are zero up to a whole vector: the pair that a last odd key forms is complete. */
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < keys; c += VL)
            _mm256_storeu_si256((__m256i *)((uint16_t *)p + r * ld + c), (__m256i)_mm512_cvtneps_pbh(v_load(s + r * ld + c)));
    return moved;
}

INLINE void pv_pairs(float *o, int64_t ld_o, const uint16_t *p, int64_t ld_p, const uint16_t *v, int64_t v_rows, int64_t keys, int64_t D,
                     const float *alpha, const int R)
{
    for (int64_t base = 0; base < D; base += DR, v += v_rows * DR) {
        vf c[MR][NV];
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) {
                c[r][j] = v_load(o + r * ld_o + base + j * VL);
                if (alpha) c[r][j] = v_mul(c[r][j], v_set1(alpha[r]));
            }
        tile_pairs(c, p, 2, ld_p, v, (keys + 1) / 2, R);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) v_store(o + r * ld_o + base + j * VL, c[r][j]);
    }
}

static void pv_bf16(float *o, int64_t ld_o, const void *p, int64_t ld_p, const void *v, int64_t v_rows, int64_t rows, int64_t keys,
                    int64_t D, const float *alpha)
{
    if (rows > ROWS_B) pv_pairs(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, MR);
    else if (rows > ROWS_A) pv_pairs(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, ROWS_B);
    else pv_pairs(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, ROWS_A);
}

static const esa_cpu_kernels bf16_set = {
    .name = "avx512bf16", .level = ESA_CPU_AVX512BF16, .mr = MR, .nr = NR, .dr = DR, .lanes = VL, .packed_bytes = 2,
    .pack_q = pack_q_bf16, .pack_k = pack_k_bf16, .pack_v = pack_v_bf16, .qk = qk_bf16, .softmax = softmax_bf16, .pv = pv_bf16,
    .store = store, .stats = stats, .mean = mean, .bf16 = NULL,
};

const esa_cpu_kernels esa_kernels_avx512bf16 = { .name = "avx512bf16", .level = ESA_CPU_AVX512BF16, KERNEL_SLOTS, .bf16 = &bf16_set };
