/* attn_cpu.h - attention on the CPU: bound arguments in, output rows out.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_ATTN_CPU_H
#define ESA_CPU_ATTN_CPU_H

#include "cpu/cpu.h"

/* Everything checked and bound by src/attn; below this line nobody sees ctx, plan or mask. */
typedef struct esa_attn_args {
    const esa_cpu_kernels *kern;        /* the set for this dtype */
    esa_pool *pool;
    int32_t dtype, tail, causal;
    int32_t block_q, block_k;           /* dense: any */
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int64_t nq, nk;                     /* ceil(N/block) */
    double  scale;
    const void *q, *k, *v;              /* element (b,h,n,0) at b*stride[0] + h*stride[1] + n*stride[2] */
    void *o;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    float *lse;                         /* NULL, or element (b,h,n) at the strides below */
    int64_t lse_stride[3];
    const int32_t *kv_len;              /* [B] or NULL */
    const int32_t *perm_q, *perm_k;     /* position -> token, or NULL */
    const int32_t *count;               /* [mask_B][Hq][nq]; NULL: dense */
    const uint16_t *index;              /* [mask_B][Hq][nq][cap] */
    int64_t mask_batch;                 /* heads between batch entries of the mask: Hq, or 0 to broadcast */
    int64_t cap;
} esa_attn_args;

/* Scratch for esa_attn_cpu; only sizes, kern, pool, blocks and tail are read. */
int64_t esa_attn_cpu_workspace(const esa_attn_args *args);
/* Computes; cannot fail. ws: esa_attn_cpu_workspace bytes, ESA_WORKSPACE_ALIGN aligned. */
void esa_attn_cpu(const esa_attn_args *args, void *ws);

#endif
