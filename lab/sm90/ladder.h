/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel ladder for Hopper (sm_90a): block-sparse attention forward, one C entry per version.
 *
 *   O[i] = sum_j softmax_j(scale * Q[i].K[j]) V[j],   j over the keys of the blocks listed for i's
 * block
 *
 * Letters: B batch, H heads, N tokens, D head dim (64 or 128), Bq x Bk block, nq = ceil(Nq/Bq), nk
 * = ceil(Nk/Bk). A lab: nothing here is linked into the
 * library. */
#ifndef ESA_LAB_SM90_LADDER_H
#define ESA_LAB_SM90_LADDER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LADDER_BF16 = 0, LADDER_F16 = 1 };

/* Every pointer is device memory owned by the caller. Strides are in elements, order B, H, N; the D
 * stride is 1; pointers and strides are multiples of 16 bytes (what a tensor map can express). */
typedef struct ladder_args {
    const void *q;         /* [B,H,Nq,D] through q_stride                                   */
    const void *k;         /* [B,H,Nk,D] through k_stride                                   */
    const void *v;         /* [B,H,Nk,D] through v_stride                                   */
    void *o;               /* [B,H,Nq,D] through o_stride                                   */
    float *lse;            /* [B,H,Nq] contiguous, natural log, or NULL                     */
    const int32_t *count;  /* [B,H,nq] listed key blocks per row; NULL = dense              */
    const uint16_t *index; /* [B,H,nq,cap] ascending                                        */
    int32_t *work;         /* [1 + B*H*nq] scratch: tile counter, rows heaviest first       */
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    int32_t B, H, Nq, Nk, D;
    int32_t Bq, Bk, cap; /* Bq a multiple of 128, Bk 64 or 128                            */
    int32_t dtype;       /* LADDER_BF16 or LADDER_F16, of q, k, v and o                   */
    float scale;
} ladder_args;

/* 0, a positive cudaError_t, or -1 for a shape the version does not take. Asynchronous on stream;
 * allocates nothing. */
typedef int ladder_fn(const ladder_args *a, void *stream);

#ifdef __cplusplus
}
#endif
#endif
