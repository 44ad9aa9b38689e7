/* weight.c - converts weights of any type to f32.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/nn.h"

#include <string.h>
#include "nn/blocks.h"
#include "nn/leaf.h"
#include "nn/product.h"

int64_t esa_weight_count(const esa_weight *w)
{
    int64_t n = 1;
    for (int32_t i = 0; i < w->rank; i++) n *= w->dim[i];
    return n;
}

void esa_weight_to_f32(float *dst, const esa_weight *w, int64_t first, int64_t count)
{
    if (w->panel) {
        const int64_t depth = esa_weight_count(w) / w->dim[0];
        for (int64_t i = 0; i < count; i++)
            dst[i] = esa_panels_at(w, (first + i) / depth, (first + i) % depth);
        return;
    }
    if (w->dtype == ESA_DTYPE_F32) {
        memcpy(dst, (const char *)w->data + 4 * first, (size_t)(4 * count));
        return;
    }
    if (w->dtype == ESA_DTYPE_F8) {
        const int64_t cols = esa_weight_count(w) / (w->rank > 1 ? esa_max64(1, w->dim[0]) : 1);
        for (int64_t i = 0; i < count; i++) {
            const float x = esa_f8_to_f32(((const uint8_t *)w->data)[first + i]);
            dst[i] = w->scale ? x * w->scale[(first + i) / cols] : x;
        }
        return;
    }
    if (esa_blocks_elements(w->dtype)) {
        esa_blocks_to_f32(dst, w->data, w->dtype, first, count);
        return;
    }
    const esa_nn_leaf *leaf = &esa_nn_leaf_plain;
    const char *src = (const char *)w->data + 2 * first;
    uint16_t part[512]; /* a mapped file need not be aligned */
    for (int64_t i = 0; i < count; i += 512) {
        const int64_t n = esa_min64(512, count - i);
        memcpy(part, src + 2 * i, (size_t)(2 * n));
        if (w->dtype == ESA_DTYPE_BF16)
            leaf->from_bf16(dst + i, part, n);
        else
            leaf->from_f16(dst + i, part, n);
    }
}
