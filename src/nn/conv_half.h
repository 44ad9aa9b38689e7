/* conv_half.h - convolutions in bf16 on the kernels of attention, for conv.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_NN_CONV_HALF_H
#define ESA_NN_CONV_HALF_H

#include "nn/conv_leaf.h"
#include "nn/nn.h"

/* Tap k of kernel row `row` for output channel co, of a phase; w is the weight in f32. */
typedef float (*esa_conv_tap_fn)(const esa_conv *c, const float *w, int32_t phase, int64_t row,
                                 int64_t k, int64_t co);

/* 1 if bf16 is faster for this convolution, whose sizes are set. */
int32_t esa_conv_half_pays(const esa_nn *nn, const esa_conv *c);
/* Bytes of the packed weights of all phases: per phase and panel of channels, the kernel rows as
 * [run'][nr]. */
int64_t esa_conv_half_bytes(const esa_nn *nn, const esa_conv *c);
/* Fills c->packed. room: nr * run floats. */
void esa_conv_half_pack(esa_nn *nn, esa_conv *c, const float *w, esa_conv_tap_fn tap, float *room);
/* As esa_nn_conv. */
esa_status esa_conv_half_run(esa_nn *nn, const esa_conv *c, float *y, int64_t y_row,
                             const float *const *x, int64_t x_row, int64_t height, int64_t width,
                             const float *residual, int64_t residual_row);

#endif
