/* conv_leaf.h - the inner loop of convolutions, one body (conv_leaf.inc.h) per instruction set.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes are channels-last, so the kw taps of one kernel row times all channels are one contiguous
 * run of x, and the run of the next pixel starts cin floats later. A convolution is then a sum over
 * kernel rows of small products that read x in place. Only the weights are packed, once. */
#ifndef ESA_NN_CONV_LEAF_H
#define ESA_NN_CONV_LEAF_H

#include <stdint.h>

#define ESA_CONV_VECTORS 3 /* most vectors of output channels in a block */

typedef struct esa_conv_leaf {
    const char *name;
    int32_t lanes;  /* floats in a vector */
    int32_t pixels; /* pixels in a full tile */
    /* acc[p][vectors * lanes] (= or, with add, +=) sum over k of x[p * x_pixel + k] * w[k][vectors
     * * lanes], p < pixels (any number up to the full tile), vectors <= ESA_CONV_VECTORS. acc and w
     * are aligned to 64 bytes; x need not be. */
    void (*tile)(float *acc, const float *x, int64_t x_pixel, int64_t k, const float *w,
                 int32_t vectors, int32_t pixels, int32_t add);
} esa_conv_leaf;

extern const esa_conv_leaf esa_conv_leaf_plain, esa_conv_leaf_avx2, esa_conv_leaf_avx512,
    esa_conv_leaf_neon;

/* The functions for a kernel level of the ctx (ESA_CPU_*). */
const esa_conv_leaf *esa_conv_leaf_get(int32_t level);

#endif
