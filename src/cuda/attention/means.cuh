// means.cuh - block means: sums of runs of rows of strided views, several views in one launch, with
// the bits that a tail needs beside them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/views.cuh"

struct mean_part {
    const void *src; // view [B][H][N][D]
    // [B][H][padded][pitch]; columns D .. pitch-1 and rows blocks .. padded-1 become 0
    void *dst;
    // [B] tokens that exist, or null: N. A block beyond them has mean 0
    const int32_t *length;
    const int32_t *perm; // position -> token, or null
    int64_t stride[3];   // batch, head, token; elements
    int64_t first;       // thread block where this part begins; set at the launch
    int32_t H, N, rows;  // rows: tokens per block
    int32_t blocks, padded;
    // 0, or tokens after which the blocks are cut anew (compat rf_v2: text apart from the image)
    int32_t split;
    int32_t dst_dtype; // what dst holds: f32, or the views' dtype
    // a dtype whose precision an f32 dst is rounded to, or f32: not rounded
    int32_t round;
};

// The blocks that stand in under a tail, marked by thread blocks of the same launch: alone they are
// a launch of a few microseconds that waits for the means and keeps the attention waiting.
struct stands_part {
    const int32_t *count, *kv_len;
    const uint16_t *index;
    uint32_t *stands;              // [rows][nk_pad / 32]
    int64_t mask_batch, cap, rows; // rows: B * Hq * nq, or 0: nothing to mark
    int32_t Hq, nq, nk_pad, block_q, block_k, Nk, shift, causal;
};

struct mean_plan {
    mean_part part[3];
    stands_part stands;
    int32_t parts, D, pitch;
};

// wide: every row of every view can be read in 16-byte pieces (rows_in_pieces).
esa_status means_launch(esa_cuda_device *dev, const mean_plan &plan, int32_t dtype, int64_t B,
                        bool wide, cudaStream_t stream);
