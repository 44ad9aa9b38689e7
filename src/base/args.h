/* args.h - the arguments of attention and selection as kernels get them, checked and bound.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Kernels know no ctx, plan or mask. Pointers are in the memory of the device, unless a comment
 * says host. */
#ifndef ESA_BASE_ARGS_H
#define ESA_BASE_ARGS_H

#include "esa/esa_carry.h"

struct esa_cpu_kernels;
struct esa_pool;

/* A carried difference (esa_carry.h). Row n of (b,h) is number b * batch + h * Nq + n. */
typedef struct esa_carry_args {
    void *value;   /* [rows][D], E4M3 or bf16; NULL: the call has no carry */
    float *scale;  /* [rows]; NULL: the values are bf16 */
    int64_t batch; /* rows between batch entries: Hq * Nq, or 0 if all share theirs */
    int32_t use;   /* ESA_CARRY_ADD or ESA_CARRY_MAKE */
    int32_t reserved0;
} esa_carry_args;

typedef struct esa_attn_args {
    const struct esa_cpu_kernels *kern; /* CPU: the kernel set for this dtype; CUDA: NULL */
    struct esa_pool *pool;              /* CPU: the threads; CUDA: NULL */
    int32_t dtype, tail, causal;
    int32_t precision;        /* 8 or 16: bits of the products; without an 8-bit kernel: 16 */
    int32_t block_q, block_k; /* dense: any values */
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t nq, nk; /* ceil(N/block) */
    double scale;
    const void *q, *k, *v; /* element (b,h,n,0) is at b*stride[0] + h*stride[1] + n*stride[2] */
    void *o;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    float *lse; /* may be NULL; element (b,h,n) is found with lse_stride, as above */
    int64_t lse_stride[3];
    const int32_t *kv_len; /* [B] or NULL; values are clamped to 0 .. Nk */
    /* position -> token, or NULL. The order of (b,h) starts at b*stride[0] + h*stride[1]; both are
     * 0 if all heads share one order. h is a query head for q and a kv head for k. */
    const int32_t *perm_q, *perm_k;
    int64_t perm_q_stride[2], perm_k_stride[2];
    const int32_t *count;  /* [mask_B][Hq][nq]; NULL: dense */
    const uint16_t *index; /* [mask_B][Hq][nq][cap] */
    /* Tail LEVELS: blocks that `fine` means replace, lists as above. Listed nowhere else. A block
     * that some query of the row does not fully see counts as absent. fine_count NULL: none. */
    int32_t fine;
    const int32_t *fine_count;
    const uint16_t *fine_index;
    int64_t mask_batch; /* heads between batch entries of the mask: Hq, or 0 to broadcast */
    int64_t cap;        /* room for key blocks in a row of index */
    /* Exact rows per query block; 0: none. Only src/attn, exact_take and exact_mend read it. The
     * attention kernels do not. */
    int32_t exact_rows;
    /* With MAKE a kernel reads o and does not write it, and lse is NULL. */
    esa_carry_args carry;
} esa_attn_args;

/* The attention kernel that runs a call. */
typedef struct esa_attn_kernel {
    const char *name; /* static storage */
    int32_t bits;     /* of its products: 8 or 16, and 16 also for f32 */
} esa_attn_kernel;

typedef struct esa_select_args {
    const struct esa_cpu_kernels *kern; /* CPU: an f32 kernel set; CUDA: NULL */
    struct esa_pool *pool;              /* CPU: the threads; CUDA: NULL */
    /* Block sizes, scale and layout are resolved. kv_len is on the device. */
    esa_select_params params;
    int32_t dtype;
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t nq, nk;        /* blocks of the mask this selector makes (esa_select_blocks) */
    const void *q, *k, *v; /* first element of b = 0, h = 0; v: only the error selector */
    int64_t q_stride[3], k_stride[3], v_stride[3]; /* batch, head, token; in elements */
    /* As in esa_attn_args. Strides differ from 0 only for the error selector. */
    const int32_t *perm_q, *perm_k;
    int64_t perm_q_stride[2], perm_k_stride[2];
    /* CPU: how many bytes of heads to process at once; 0: each selector decides. It does not change
     * the mask. */
    int64_t window;
} esa_select_args;

#endif
