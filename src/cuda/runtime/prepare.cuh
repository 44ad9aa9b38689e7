// prepare.cuh - what happens on the stream before an attention kernel: one small file per step, all
// called by attention.cu.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/views.cuh"

// The parts of the workspace of one call; null where the call has no use for them. Shapes as in
// attention_job.
struct prepared {
    // rows in block order, [B][H][N][row_pitch]; q only with perm_q, k and v only with perm_k
    void *q, *k, *v;
    int64_t row_pitch; // elements: D rounded up to whole 16 bytes
    int32_t *next, *order;
    // [B][Hq][nq] scratch of row_order, where one run does not hold all rows of a head
    uint32_t *runs;
    void *k_mean, *v_mean;
    float *q_mean; // [B][Hq][nq][mean_pitch] centroid
    int64_t mean_pitch, nk_pad;
    uint32_t *stands;
    float *state_o, *state_m, *state_l;
};

// Rows of a head that are ranked against each other in shared memory; more are ranked in runs of
// this many.
enum { ORDER_RUN = 4096 };

// Each enqueues one launch. a: views in block order, except for gather_rows.
// gather.cu
esa_status gather_rows(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream);
// row_order.cu: also zeroes next, which is all it does without a mask. Two launches where a head
// has more than ORDER_RUN rows.
esa_status row_order(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                     cudaStream_t stream);
// tail_state.cu: means of k and v, and of q for the centroid tail, and the bits; for the centroid
// tail the states, which need both.
esa_status tail_means(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                      cudaStream_t stream);
esa_status tail_states(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream);
