/* pairs_avx512.h - copies rows to bf16 for the sets that multiply pairs. Included after
 * kernels.inc.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A 32-bit word holds two neighbours along D. depth is D rounded up as the set wants it; values at
 * or past D are zero. */
#ifndef ESA_CPU_PAIRS_H
#define ESA_CPU_PAIRS_H

/* 16 words (32 values) of a row from value d on, as bf16 pairs. Values at or past D are zero. */
INLINE __m512i pair_words(const char *row, int64_t d, int64_t D, int32_t dtype)
{
    if (d + 32 <= D) {
        if (dtype == ESA_DTYPE_BF16) return _mm512_loadu_si512(row + 2 * d);
        const int64_t size = esa_dtype_size(dtype);
        return (__m512i)_mm512_cvtne2ps_pbh(v_load_as(row + (d + 16) * size, dtype),
                                            v_load_as(row + d * size, dtype));
    }
    uint16_t t[32];
    /* Exact for bf16. */
    for (int64_t i = 0; i < 32; i++)
        t[i] = d + i >= D ? 0 : esa_f32_to_bf16(esa_load_f32(row, d + i, dtype));
    return _mm512_loadu_si512(t);
}

/* dst [ceil(rows/W)][words][W] words, at least (D + 1) / 2 of them. */
INLINE void pack_pairs(uint32_t *dst, const void *src, const int32_t dtype, int64_t stride,
                       const int32_t *gather, int64_t rows, int64_t D, int64_t words, const int W)
{
    const int64_t size = esa_dtype_size(dtype);
    for (int64_t first = 0; first < rows; first += W, dst += words * W)
        for (int64_t w0 = 0; w0 < words; w0 += 16)
            for (int base = 0; base < W; base += 16) {
                vf r[16];
                for (int i = 0; i < 16; i++) {
                    const int64_t n = first + base + i;
                    r[i] = base + i < W && n < rows
                               ? _mm512_castsi512_ps(pair_words(
                                     (const char *)src + (gather ? gather[n] : n) * stride * size,
                                     2 * w0, D, dtype))
                               : v_zero();
                }
                v_transpose(r);
                for (int i = 0; i < 16 && w0 + i < words; i++)
                    v_store_first((float *)dst + (w0 + i) * W + base, r[i],
                                  W - base < 16 ? W - base : 16);
            }
}

/* Stores the first n of 32 values. */
INLINE void store_words(uint16_t *dst, __m512i x, int64_t n)
{
    _mm512_mask_storeu_epi16(dst, n >= 32 ? 0xffffffffu : (1u << n) - 1u, x);
}

/* dst [rows][depth] */
INLINE void copy_words(void *dst, const void *src, int32_t dtype, int64_t stride,
                       const int32_t *gather, int64_t rows, int64_t D, int64_t depth)
{
    const int64_t size = esa_dtype_size(dtype);
    uint16_t *out = dst;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < depth; d += 32)
            store_words(out + i * depth + d,
                        pair_words((const char *)src + (gather ? gather[i] : i) * stride * size, d,
                                   D, dtype),
                        depth - d);
}

#endif
