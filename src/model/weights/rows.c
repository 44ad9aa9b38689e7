/* rows.c - see rows.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/weights/rows.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int32_t esa_row_shape(int64_t dim[5], const char *shape, const esa_sizes *sizes)
{
    int32_t rank = 0;
    for (const char *c = shape; *c && rank < 5; rank++) {
        dim[rank] = 1;
        for (; *c && *c != ','; c++)
            dim[rank] *= *c >= '0' && *c <= '9' ? *c - '0' : sizes->letter[*c & 127];
        if (*c) c++;
    }
    return rank;
}

/* A tensor of a row. which: 'q', 'k', 'v', or 0 if the name has no *. */
static void want(esa_weights *w, const esa_row *row, esa_weight *view, int32_t flags, int32_t rank,
                 const int64_t *dim, const char *prefix, int which, const char *end)
{
    const char letter[2] = { (char)which, 0 };
    const int star = which ? (int)strcspn(row->name, "*") : (int)strlen(row->name);
    esa_weights_want(w, view, flags, rank, dim, "%s%.*s%s%s%s", prefix, star, row->name, letter,
                     row->name + star + (which != 0), end);
}

static void want_row(esa_weights *w, const esa_row *row, char *base, const esa_sizes *sizes,
                     const char *prefix)
{
    const int32_t flags = row->flags & ~sizes->without, product = flags | ESA_WANT_PRODUCT,
                  vector = flags & ~ESA_WANT_F8, apart = ~ESA_WANT_JOIN;
    int64_t dim[5];
    const int32_t rank = esa_row_shape(dim, row->shape, sizes);
    esa_weight *one = base ? (void *)(base + row->at) : NULL;
    esa_linear *l = base ? (void *)(base + row->at) : NULL;
    switch (row->kind) {
    case ESA_ROW_TENSOR: want(w, row, one, flags, rank, dim, prefix, 0, ""); break;
    case ESA_ROW_NORM:
        want(w, row, one, ESA_WANT_F32 | flags, rank, dim, prefix, 0, ".weight");
        want(w, row, one ? one + 1 : NULL, ESA_WANT_F32 | flags, rank, dim, prefix, 0, ".bias");
        break;
    case ESA_ROW_MATRIX:
    case ESA_ROW_LINEAR:
        want(w, row, l ? &l->weight : NULL, product, rank, dim, prefix, 0, ".weight");
        if (row->kind == ESA_ROW_MATRIX) break;
        want(w, row, l ? &l->bias : NULL, vector, 1, dim, prefix, 0, ".bias");
        break;
    case ESA_ROW_QKV:
        for (int32_t i = 0; i < 3; i++)
            want(w, row, l ? &l[i].weight : NULL, i ? product : product & apart, rank, dim, prefix,
                 "qkv"[i], ".weight");
        break;
    default:
        for (int32_t i = 0; i < 3; i++)
            want(w, row, l ? &l[i].bias : NULL, i ? vector : vector & apart, 1, dim, prefix,
                 "qkv"[i], ".bias");
    }
}

void esa_rows_want(esa_weights *w, const esa_row *rows, int32_t count, void *base,
                   const esa_sizes *sizes, const char *prefix_format, ...)
{
    char prefix[160];
    va_list args;
    va_start(args, prefix_format);
    vsnprintf(prefix, sizeof prefix, prefix_format, args);
    va_end(args);
    for (int32_t i = 0; i < count; i++)
        if ((rows[i].need & ~sizes->have) == 0) want_row(w, &rows[i], base, sizes, prefix);
}
