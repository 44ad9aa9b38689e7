/* product.h - weights packed for matrix products.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A product y = x W^T runs on the kernels of attention (cpu/cpu.h): columns of y lie along the
 * vectors as queries do, rows of x are broadcast from where they lie as keys are. W [cols][depth]
 * is packed in panels of nr columns, panel_q's form: [ceil(cols/nr)][depth'][nr], in f32 or, for
 * the bf16 set, in bf16 with pairs along depth interleaved. Columns past the last are zeros. */
#ifndef ESA_NN_PRODUCT_H
#define ESA_NN_PRODUCT_H

#include "nn/nn.h"

enum {
    /* Kernels that compute tiles may write sums up to a multiple of so many rows: every buffer of
     * sums has room for them. */
    ESA_PANEL_ROWS = 32,
    /* Most terms of one call of a kernel: the slice of a panel stays in the second-level cache.
     * Kernels that compute tiles are made for one head dim and take fewer terms. */
    ESA_PANEL_DEPTH = 1024,
    ESA_PANEL_DEPTH_TILES = 256
};
_Static_assert(ESA_PANEL_DEPTH_TILES <= ESA_MAX_HEAD_DIM, "kernels of tiles take one head dim");

/* A sum of depth terms is cut into equal slices: the terms of one. Each begins at a multiple of 32,
 * the widest step of a kernel along depth. */
ESA_INLINE int64_t esa_panel_slice(const esa_cpu_kernels *kern, int64_t depth)
{
    const int32_t vectors = kern->packed_bytes == 4 || kern->level == ESA_CPU_AVX512BF16;
    const int64_t most = vectors ? ESA_PANEL_DEPTH : ESA_PANEL_DEPTH_TILES,
                  slices = esa_ceil_div(esa_max64(1, depth), most);
    return esa_ceil_div(esa_ceil_div(esa_max64(1, depth), slices), 32) * 32;
}

/* Makes w, whose shape is set, the view of its packed matrix in F32 or BF16. */
void esa_panels_view(const esa_ctx *ctx, esa_weight *w, int32_t dtype, const void *packed);
/* Bytes of a packed matrix. */
int64_t esa_panels_bytes(const esa_ctx *ctx, int32_t dtype, int64_t cols, int64_t depth);
/* Packs columns first .. first+cols-1 of w, which is [dim[0]][the other dims] in F32, F16 or BF16,
 * with the threads of ctx. first is a multiple of the columns of a panel. */
void esa_panels_fill(esa_ctx *ctx, int32_t dtype, void *dst, const esa_weight *w, int64_t first,
                     int64_t cols);
/* The same for a matrix b [depth][cols] in f32, to f32, in the calling thread. */
void esa_panels_fill_rows(const esa_ctx *ctx, float *dst, const float *b, int64_t depth,
                          int64_t cols);
/* c[rows][cols] += factor * a[rows][depth] b with packed f32 b, in the calling thread. sums: room
 * for esa_panels_sums floats. */
void esa_panels_add(const esa_ctx *ctx, float *c, const float *a, const float *b, int64_t rows,
                    int64_t cols, int64_t depth, float factor, float *sums);
int64_t esa_panels_sums(const esa_ctx *ctx, int64_t rows);
/* Element (column, k) of a packed weight. */
float esa_panels_at(const esa_weight *w, int64_t column, int64_t k);

#endif
