/* tiles_avx512.h - what kernels_tiles.inc.h asks of the vector registers, in AVX-512. Included
 * after kernels.inc.h.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_TILES_VECTORS_H
#define ESA_CPU_TILES_VECTORS_H

#include "cpu/pairs_avx512.h"

INLINE void tiles_pack_q(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, int64_t depth){
    BY_DTYPE(dtype, pack_pairs(dst, src, DT, stride, gather, rows, D, depth / 2, NR))
}

INLINE void tiles_copy_k(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, int64_t depth){
    BY_DTYPE(dtype, copy_words(dst, src, DT, stride, gather, rows, D, depth))
}

/* 16 rows of 32 columns from d on, transposed: word w of r holds columns d + 2w and d + 2w + 1 of
 * all rows. Rows past the last are zero. */
INLINE
    void transposed_words(vf r[16], const void *src, const int32_t dtype, int64_t stride,
                          const int32_t *gather, int64_t first, int64_t rows, int64_t d, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    for (int64_t i = 0; i < 16; i++) {
        const int64_t n = first + i;
        r[i] = n < rows
                   ? _mm512_castsi512_ps(pair_words(
                         (const char *)src + (gather ? gather[n] : n) * stride * size, d, D, dtype))
                   : v_zero();
    }
    v_transpose(r);
}

/* dst [ceil(rows/32)][dims][32]; see kernels_tiles.inc.h. */
INLINE void transpose_v(uint16_t *dst, const void *src, const int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D, int64_t dims)
{
    const __mmask32 upper = 0xaaaaaaaau;
    for (int64_t first = 0; first < rows; first += 32, dst += dims * 32)
        for (int64_t d = 0; d < dims; d += 32) {
            vf a[16], b[16];
            transposed_words(a, src, dtype, stride, gather, first, rows, d, D);
            transposed_words(b, src, dtype, stride, gather, first + 16, rows, d, D);
            for (int64_t w = 0; w < 16 && d + 2 * w < dims; w++) {
                const __m512i x = _mm512_castps_si512(a[w]), y = _mm512_castps_si512(b[w]);
                uint16_t *at = dst + (d + 2 * w) * 32;
                _mm512_storeu_si512(at,
                                    _mm512_mask_blend_epi16(upper, x, _mm512_slli_epi32(y, 16)));
                _mm512_storeu_si512(at + 32,
                                    _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(x, 16), y));
            }
        }
}

INLINE void tiles_transpose_v(void *dst, const void *src, int32_t dtype, int64_t stride,
                              const int32_t *gather, int64_t rows, int64_t D, int64_t dims){
    BY_DTYPE(dtype, transpose_v(dst, src, DT, stride, gather, rows, D, dims))
}

/* 2^x for x <= 127: a polynomial of degree 4 of the part after the point, in [0, 1), and an
 * exponent shift by the floor. -inf gives 0; NaN stays NaN. */
INLINE vf tiles_exp2(vf x)
{
    const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p = v_fma(v_set1(EXP2_W4), f, v_set1(EXP2_W3));
    p = v_fma(p, f, v_set1(EXP2_W2));
    p = v_fma(p, f, v_set1(EXP2_W1));
    p = v_fma(p, f, v_set1(1.0f));
    return _mm512_scalef_ps(p, x);
}

/* Rounds low and high to bf16 and stores them as pairs. They are 0, positive or NaN, so a tie may
 * go up, and NaN whose last bits are set (no operation makes it) may be lost. */
INLINE void tiles_store_pairs(void *dst, vf low, vf high)
{
    const __m512i half = _mm512_set1_epi32(0x8000),
                  a = _mm512_add_epi32(_mm512_castps_si512(low), half),
                  b = _mm512_add_epi32(_mm512_castps_si512(high), half);
    _mm512_storeu_si512(dst, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b));
}

#endif
