// means.cuh - block means: means of runs of rows of strided views, several views in one launch, and
// the bits that a tail needs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/views.cuh"

struct mean_part {
    const void *src; // view [B][H][N][D]
    // [B][H][padded][pitch]; columns from D on and rows from blocks on become 0.
    void *dst;
    // [B] existing tokens; null: N. A block beyond them has mean 0.
    const int32_t *length;
    const int32_t *perm; // position -> token, or null
    int64_t stride[3];   // batch, head, token; elements
    int64_t first;       // first thread block of this part; set at the launch
    int32_t H, N, rows;  // rows: tokens per block
    int32_t blocks, padded;
    // 0, or the token where blocks start anew (compat rf_v2: text after the image).
    int32_t split;
    int32_t dst_dtype; // dtype of dst: f32, or that of the views
    // The dtype an f32 dst is rounded to; f32: not rounded.
    int32_t round;
    // Fine means: each block also gets `fine` means of rows / fine consecutive rows. fine must
    // divide rows; 0: none. Not together with perm or split.
    int32_t fine = 0;
    void *fine_dst = nullptr; // [B][H][blocks * fine][pitch], as dst
};

// The blocks that a tail stands in for, marked by thread blocks of the same launch. A launch of its
// own would take a few microseconds, after the means and before the attention.
struct stands_part {
    const int32_t *count, *kv_len;
    const uint16_t *index;
    uint32_t *stands; // [rows][nk_pad / 32]
    // Fine level: blocks with means of their own, which get no bit. null: none.
    const int32_t *fine_count;
    const uint16_t *fine_index;
    int32_t *fine_columns;         // [rows], as in attention_job
    int64_t mask_batch, cap, rows; // rows: B * Hq * nq; 0: nothing to mark
    int32_t Hq, nq, nk_pad, block_q, block_k, Nk, shift, causal, fine;
};

struct mean_plan {
    mean_part part[3];
    stands_part stands;
    int32_t parts, D, pitch;
};

// wide: every row of every view can be read in 16-byte pieces (rows_in_pieces).
esa_status means_launch(esa_cuda_device *dev, const mean_plan &plan, int32_t dtype, int64_t B,
                        bool wide, cudaStream_t stream);
