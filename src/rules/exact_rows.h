/* exact_rows.h - which queries of a block are computed exactly, and what the other queries get from
 * them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block of `rows` queries has R exact rows: row (2i+1) rows / (2R) for i < R. A block of at most
 * R rows is exact altogether. With x_i the error (exact - sparse) of exact row i and m the mean of
 * the R errors, the other rows of the block get
 *
 *     o + share m,   share = max(0, 1 - noise / |m|^2),   noise = sum_i |x_i - m|^2 / ((R-1) R)
 *
 * The noise is the expected squared error of m itself, so a mean that the samples do not agree on
 * is left out. One sample says nothing about its noise: with R = 1 the share is 1.
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_EXACT_ROWS_H
#define ESA_RULES_EXACT_ROWS_H

#include <math.h>
#include "base/inline.h"

/* Number of exact rows in a block of so many rows. */
ESA_INLINE int64_t esa_exact_rows_of(int64_t rows, int32_t R) { return esa_min64(rows, R); }

/* The i-th exact row of a block, i < R. A short block repeats its last row. */
ESA_INLINE int64_t esa_exact_row_at(int64_t rows, int32_t R, int64_t i)
{
    return rows <= R ? esa_min64(i, rows - 1) : (2 * i + 1) * rows / (2 * R);
}

/* The inverse: which exact row r is; -1: none. */
ESA_INLINE int32_t esa_exact_row_number(int64_t rows, int32_t R, int64_t r)
{
    if (rows <= R) return (int32_t)r;
    const int64_t before = 2 * R * r - rows, i = before > 0 ? esa_ceil_div(before, 2 * rows) : 0;
    return i < R && esa_exact_row_at(rows, R, i) == r ? (int32_t)i : -1;
}

/* 1 if a row of the mask keeps all key blocks that exist, so that nothing needs correction. list:
 * count ascending blocks; it may hold some that do not exist. */
ESA_INLINE int32_t esa_exact_already(int64_t blocks, int32_t count, const uint16_t *list)
{
    return blocks == 0 || (count >= blocks && list[blocks - 1] == blocks - 1);
}

/* The share of the mean error that the other rows get. spread: sum_i |x_i - m|^2; size: |m|^2. 0 if
 * one of them is not finite, so NaN in one query does not reach the other rows of its block. */
ESA_INLINE float esa_exact_share(float spread, float size, int32_t R)
{
    if (!(size > 0.0f && size < INFINITY)) return 0.0f;
    if (R == 1) return 1.0f;
    const float share = 1.0f - spread / ((float)((R - 1) * R) * size);
    return share > 0.0f ? share : 0.0f;
}

#endif
