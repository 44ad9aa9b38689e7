/* view.h - a matrix of a network in the memory of a device, as operations and kernels get it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A view does not own its memory. Rows are tokens (or pixels), columns are channels, and elements
 * of a row are contiguous. The type says how the elements are stored; every operation computes in
 * f32. */
#ifndef ESA_BASE_VIEW_H
#define ESA_BASE_VIEW_H

#include <stddef.h>
#include "base/inline.h"
#include "esa/esa.h"

/* E4M3, 8 bits, with one f32 scale for each row: the value is scale[row] * element. A type of the
 * engine alone; the public ESA_DTYPE_* do not have it. */
enum { ESA_DTYPE_F8 = 16 };
#define ESA_F8_MAX  448.0f /* the largest finite value of E4M3 */
#define ESA_F8_ZERO 1e-30f /* a row whose largest magnitude is not above this gets the scale 1 */

typedef struct esa_view {
    void *data;     /* NULL: absent */
    int32_t dtype;  /* ESA_DTYPE_F32, BF16 or F8 */
    int32_t device; /* ESA_DEVICE_* */
    int64_t rows, cols;
    int64_t ld;   /* elements from row to row, at least cols */
    float *scale; /* F8: [rows], on the same device; else NULL */
} esa_view;

/* Bytes of an element; 0 for an unknown type. */
ESA_INLINE int64_t esa_view_element(int32_t dtype)
{
    return dtype == ESA_DTYPE_F32                              ? 4
           : dtype == ESA_DTYPE_F16 || dtype == ESA_DTYPE_BF16 ? 2
           : dtype == ESA_DTYPE_F8                             ? 1
                                                               : 0;
}

/* The view of contiguous rows. */
ESA_INLINE esa_view esa_view_of(void *data, int32_t dtype, int32_t device, int64_t rows,
                                int64_t cols)
{
    esa_view v = { data, dtype, device, rows, cols, cols, NULL };
    return v;
}

/* Rows first .. first+count-1 of a view. */
ESA_INLINE esa_view esa_view_rows(esa_view v, int64_t first, int64_t count)
{
    v.data = (char *)v.data + first * v.ld * esa_view_element(v.dtype);
    v.rows = count;
    if (v.scale) v.scale += first;
    return v;
}

/* Columns first .. first+count-1. The scales of F8 hold for the whole row, so they stay. */
ESA_INLINE esa_view esa_view_cols(esa_view v, int64_t first, int64_t count)
{
    v.data = (char *)v.data + first * esa_view_element(v.dtype);
    v.cols = count;
    return v;
}

#endif
