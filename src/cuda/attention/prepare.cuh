// prepare.cuh - the steps before an attention kernel, one small file each. attention.cu calls them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention/quantise.cuh"
#include "cuda/runtime/views.cuh"

// Parts of the workspace of one call; null if the call does not need them. Shapes
// as in attention_job.
struct prepared {
    // Rows in block order, [B][H][N][row_pitch]. q only with perm_q; k and v only with perm_k.
    void *q, *k, *v;
    int64_t row_pitch; // in elements: D rounded up to 16 bytes
    int32_t *next, *order;
    // [B][Hq][nq] scratch of row_order, if a head has more rows than one run holds.
    uint32_t *runs;
    void *k_mean, *v_mean;
    float *q_mean; // [B][Hq][nq][mean_pitch] centroid
    int64_t mean_pitch, nk_pad;
    uint32_t *stands;
    void *k_fine, *v_fine;
    int32_t *fine_columns;
    float *state_o, *state_m, *state_l;
    // 8 bit: instead of the rows and means above. eight_bit: the kernel; null: 16 bit.
    const struct eight_bit_kernel *eight_bit;
    quantised q8;
};

// Rows of a head that are ranked against each other in shared memory. More rows are ranked in runs
// of this length.
enum { ORDER_RUN = 4096 };

// Each call enqueues one launch. a: views in block order, except for gather_rows.
//
// gather.cu
esa_status gather_rows(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream);
// row_order.cu: ranks the rows and zeroes next. Without a mask it only zeroes next. A head with
// more than ORDER_RUN rows takes two launches.
esa_status row_order(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                     cudaStream_t stream);
// tail_state.cu: means of k and v, fine ones too if a->fine_count is set, and the bits; for the
// centroid tail also means of q and the states, which need both.
esa_status tail_means(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                      cudaStream_t stream);
esa_status tail_states(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream);
