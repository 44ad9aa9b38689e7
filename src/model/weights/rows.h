/* rows.h - the tensors of a part as data: a row states one tensor, or the few of one layer.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     static const esa_row rows[] = {
 *         { ESA_ROW_QKV, offsetof(block, q), "attn.to_*", "d,d", ESA_WANT_JOIN, 0 },
 *         { ESA_ROW_LINEAR, offsetof(block, up), "ffn.up", "4d,d", ESA_WANT_F8, 0 },
 *     };
 *     const esa_sizes sizes = { .letter = { ['d'] = 64 } };
 *     for each block i: esa_rows_want(w, ESA_ROWS(rows), &blocks[i], &sizes, "blocks.%d.", i);
 */
#ifndef ESA_MODEL_ROWS_H
#define ESA_MODEL_ROWS_H

#include <stddef.h>
#include "model/weights/weights.h"

enum {
    ESA_ROW_TENSOR,  /* an esa_weight, and its whole name */
    ESA_ROW_NORM,    /* two, in F32: NAME.weight and NAME.bias */
    ESA_ROW_MATRIX,  /* an esa_linear: NAME.weight; its bias stays absent */
    ESA_ROW_LINEAR,  /* an esa_linear: NAME.weight and NAME.bias */
    ESA_ROW_QKV,     /* three esa_linear, * in NAME stands for q, k and v: NAME.weight of each */
    ESA_ROW_QKV_BIAS /* NAME.bias of each */
};

typedef struct esa_row {
    int32_t kind; /* ESA_ROW_* */
    size_t at;    /* offset in the struct */
    const char *name;
    /* Sides with commas between them. A side is a product of digits and of letters of the sizes:
     * "6d,d". The bias of a layer has the first side. */
    const char *shape;
    int32_t flags; /* ESA_WANT_*; products have ESA_WANT_PRODUCT, and biases no F8, without it */
    int32_t need;  /* the row holds if sizes.have has all these bits */
} esa_row;
#define ESA_ROWS(rows) (rows), (int32_t)(sizeof(rows) / sizeof(rows)[0])

typedef struct esa_sizes {
    int64_t letter[128];
    int32_t have;    /* bits that the part chooses, for what only some configurations have */
    int32_t without; /* flags that these rows lose */
} esa_sizes;

/* Wants the tensors of the rows, with views in *base; base NULL: they are only checked. The format
 * makes what stands in front of all names. */
void esa_rows_want(esa_weights *w, const esa_row *rows, int32_t count, void *base,
                   const esa_sizes *sizes, const char *prefix_format, ...)
    __attribute__((format(printf, 6, 7)));

/* The sides of a shape; returns the rank, at most 5. */
int32_t esa_row_shape(int64_t dim[5], const char *shape, const esa_sizes *sizes);

#endif
