/* leaf.h - the row loops of src/nn: plain C in leaf.inc.h, compiled once per instruction set and
 * chosen by the ctx's kernel level.
 * SPDX-License-Identifier: Apache-2.0
 *
 * No allocation, no errors, no threads: operations split rows and call these. Sums run in LANES
 * chains that are folded by a fixed tree, so every instruction set adds in the same order. All may
 * work in place (y == x). */
#ifndef ESA_NN_LEAF_H
#define ESA_NN_LEAF_H

#include <stdint.h>

#define ESA_NN_LANES 16 /* chains of a sum */

/* Rows of y = residual (NULL: 0) + gate (NULL: 1) * act(x + bias (NULL: 0)). x is overwritten; y
 * may be residual. */
typedef struct esa_finish_args {
    void *y;       /* [rows][ldy] */
    int32_t dtype; /* of y: ESA_DTYPE_F32 or BF16 */
    int32_t act;   /* ESA_ACT_* */
    int64_t ldy;
    float *x; /* [rows][ldx] */
    int64_t ldx, rows, n;
    const float *bias, *gate; /* [n] */
    const float *residual;    /* [rows][residual_ld] */
    int64_t residual_ld;
} esa_finish_args;

typedef struct esa_nn_leaf {
    const char *name;
    /* One row, see nn.h. weight, bias, scale and shift may be NULL. */
    void (*layer_norm)(float *y, const float *x, int64_t n, float eps, const float *weight,
                       const float *bias, const float *scale, const float *shift);
    void (*rms_norm)(float *y, const float *x, int64_t n, float eps, const float *weight);
    void (*silu)(float *y, const float *x, int64_t n);
    void (*gelu_tanh)(float *y, const float *x, int64_t n);
    void (*quick_gelu)(float *y, const float *x, int64_t n);
    void (*gelu)(float *y, const float *x, int64_t n); /* with the error function */
    void (*geglu)(float *y, const float *gate, const float *x, int64_t n);
    void (*finish)(const esa_finish_args *args);
    void (*add)(float *y, const float *x, int64_t n); /* y += x */
    /* Rotates x[heads][D] by cos, sin [D/2]. */
    void (*rope)(float *x, int64_t heads, int64_t D, const float *cos, const float *sin);
    /* The same for channels i and i + D/2. */
    void (*rope_halves)(float *x, int64_t heads, int64_t D, const float *cos, const float *sin);
    /* s[n] = softmax(s * scale + a + b) with a and b [n] or NULL; zeros if all are -inf. */
    void (*softmax)(float *s, int64_t n, float scale, const float *a, const float *b);
    void (*from_bf16)(float *y, const uint16_t *x, int64_t n);
    void (*from_f16)(float *y, const uint16_t *x, int64_t n);
    void (*to_bf16)(uint16_t *y, const float *x, int64_t n);
} esa_nn_leaf;

extern const esa_nn_leaf esa_nn_leaf_plain, esa_nn_leaf_avx2, esa_nn_leaf_avx512;

/* The functions for a kernel level of the ctx (ESA_CPU_*). */
const esa_nn_leaf *esa_nn_leaf_get(int32_t level);

#endif
