/* tiles_plain.h - what kernels_tiles.inc.h asks of the vector registers, in plain loops. Included
 * after kernels.inc.h.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_TILES_PLAIN_H
#define ESA_TESTS_TILES_PLAIN_H

/* Element (row, d) in bf16; 0 outside. */
INLINE uint16_t plain_element(const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                              int64_t rows, int64_t D, int64_t row, int64_t d)
{
    if (row >= rows || d >= D) return 0;
    return esa_f32_to_bf16(esa_load_f32(src, (gather ? gather[row] : row) * stride + d, dtype));
}

INLINE void tiles_pack_q(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, int64_t depth)
{
    uint16_t *out = dst;
    for (int64_t first = 0; first < rows; first += NR)
        for (int64_t d = 0; d < depth; d += 2)
            for (int64_t c = 0; c < 2 * NR; c++)
                *out++ = plain_element(src, dtype, stride, gather, rows, D, first + c / 2,
                                       d + c % 2);
}

INLINE void tiles_copy_k(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, int64_t depth)
{
    uint16_t *out = dst;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < depth; d++)
            *out++ = plain_element(src, dtype, stride, gather, rows, D, i, d);
}

INLINE void tiles_transpose_v(void *dst, const void *src, int32_t dtype, int64_t stride,
                              const int32_t *gather, int64_t rows, int64_t D, int64_t dims)
{
    uint16_t *out = dst;
    for (int64_t first = 0; first < rows; first += 32)
        for (int64_t d = 0; d < dims; d++)
            for (int64_t c = 0; c < 32; c++)
                *out++ = plain_element(src, dtype, stride, gather, rows, D,
                                       first + c / 2 + c % 2 * 16, d);
}

INLINE vf tiles_exp2(vf x) { return v_exp2(x); }

INLINE void tiles_store_pairs(void *dst, vf low, vf high)
{
    float a[VL], b[VL];
    uint16_t *out = dst;
    v_store(a, low);
    v_store(b, high);
    for (int i = 0; i < VL; i++) {
        out[2 * i] = esa_f32_to_bf16(a[i]);
        out[2 * i + 1] = esa_f32_to_bf16(b[i]);
    }
}

#endif
