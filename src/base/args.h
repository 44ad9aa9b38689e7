/* args.h - arguments of attention and selection as a backend gets them: checked and bound.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A backend knows no ctx, plan or mask. Pointers are on the device of the backend unless a comment
 * says host. */
#ifndef ESA_BASE_ARGS_H
#define ESA_BASE_ARGS_H

#include "esa/esa.h"

struct esa_cpu_kernels;
struct esa_pool;

typedef struct esa_attn_args {
    const struct esa_cpu_kernels *kern; /* CPU: the kernel set for this dtype; CUDA: NULL */
    struct esa_pool *pool;              /* CPU; CUDA: NULL */
    int32_t dtype, tail, causal;
    int32_t block_q, block_k; /* dense: any */
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t nq, nk; /* ceil(N/block) */
    double scale;
    const void *q, *k, *v; /* element (b,h,n,0) is at b*stride[0] + h*stride[1] + n*stride[2] */
    void *o;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    float *lse; /* NULL, or element (b,h,n) at these strides: */
    int64_t lse_stride[3];
    const int32_t *kv_len;          /* [B] or NULL; values are clamped to 0 .. Nk */
    const int32_t *perm_q, *perm_k; /* position -> token, or NULL */
    const int32_t *count;           /* [mask_B][Hq][nq]; NULL: dense */
    const uint16_t *index;          /* [mask_B][Hq][nq][cap] */
    int64_t mask_batch; /* heads between batch entries of the mask: Hq, or 0 to broadcast */
    int64_t cap;
} esa_attn_args;

typedef struct esa_select_args {
    const struct esa_cpu_kernels *kern; /* CPU: an f32 kernel set; CUDA: NULL */
    struct esa_pool *pool;              /* CPU; CUDA: NULL */
    /* Resolved: block sizes, scale, layout, budget in 0 .. 1. kv_len is on the device. */
    esa_select_params params;
    int32_t dtype;
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t nq, nk;    /* blocks of the mask this selector makes (esa_select_blocks) */
    const void *q, *k; /* first element of b = 0, h = 0 */
    int64_t q_stride[3], k_stride[3]; /* batch, head, token; in elements */
    const int32_t *perm_q, *perm_k;   /* [Nq], [Nk]; NULL: identity */
    /* CPU: bytes of heads to process at once; 0: each selector decides. It never changes a mask. */
    int64_t window;
} esa_select_args;

#endif
