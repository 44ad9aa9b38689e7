/* tests.h - cmocka, with the headers that it needs, and a mask's description.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_TESTS_H
#define ESA_TESTS_TESTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "esa/esa.h"

/* What esa_mask_from_* takes for one batch entry in raster order. */
static inline esa_mask_info mask_info_of(int32_t block_q, int32_t block_k, int64_t H, int64_t Nq,
                                         int64_t Nk)
{
    return (esa_mask_info){ .struct_size = sizeof(esa_mask_info),
                            .block_q = block_q,
                            .block_k = block_k,
                            .B = 1,
                            .H = H,
                            .Nq = Nq,
                            .Nk = Nk,
                            .layout = esa_layout_default() };
}

/* Shapes of self-attention. */
static inline esa_shapes shapes_of(int32_t dtype, int64_t B, int64_t H, int64_t N, int64_t D)
{
    esa_shapes s = esa_shapes_default();
    s.dtype = dtype;
    s.B = B;
    s.Hq = s.Hkv = H;
    s.Nq = s.Nk = N;
    s.D = D;
    return s;
}

#endif
