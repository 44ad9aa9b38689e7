/* naive.h - attention as the textbook writes it, for tests: in double, and in the precision of the
 * inputs.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_NAIVE_H
#define ESA_TESTS_NAIVE_H

#include "esa/esa.h"

/* One case, all fields plain. Elements (b,h,n,d) through strides in elements, as in esa_tensor. */
typedef struct naive_case {
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int32_t dtype, block_q, block_k, causal, tail;
    double scale;
    const esa_tensor *q, *k, *v;
    const int32_t *kv_len; /* [B] or NULL */
    /* [B][Hq][nq][nk]: 0 not listed, 1 listed, 2 on the fine level (tail LEVELS; other tails: not
     * listed); NULL: dense */
    const uint8_t *keep;
    const int32_t *perm_q, *perm_k; /* position -> token, or NULL */
    /* The order of (b,h) starts at b*stride[0] + h*stride[1]. */
    int64_t perm_q_stride[2], perm_k_stride[2];
    int32_t fine;        /* means of a block on the fine level */
    int32_t exact_rows;  /* queries of a block whose errors correct the others; 0: none */
    const double *added; /* [B][Hq][Nq][D] by token, added before exact rows correct; or NULL */
} naive_case;

/* out [B][Hq][Nq][D] and lse [B][Hq][Nq] (may be NULL) in double from the inputs as stored. */
void naive_attention(double *out, double *lse, const naive_case *c);
/* The same with f32 sums, probabilities and outputs rounded to the dtype: what a plain
 * same-precision attention gives. */
void naive_attention_same(double *out, const naive_case *c);

/* Largest error of a against ref, and the largest magnitude of ref. */
double max_error(const double *a, const double *ref, int64_t n);
double max_magnitude(const double *a, int64_t n);

/* A view's elements in double, [B][H][N][D]. */
void tensor_to_double(double *out, const esa_tensor *t);
/* Fills memory behind a view with uniform values in [-range, range] from a seed. */
void tensor_fill(const esa_tensor *t, uint64_t seed, double range);

/* Memory with guard bytes before and after; guard_check returns 1 if they are untouched. */
typedef struct guarded {
    unsigned char *block;
    void *data;
    int64_t bytes;
} guarded;
guarded guard_alloc(int64_t bytes, int64_t misalign);
int guard_check(const guarded *g);
void guard_free(guarded *g);

/* Seed of random tests: $ESA_SEED or a fixed one; printed by the caller. */
uint64_t test_seed(void);

#endif
