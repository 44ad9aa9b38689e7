// error.cuh - the error selector on the GPU: what its kernels share.
// SPDX-License-Identifier: Apache-2.0
//
// Four steps on one stream (rules/levels.h and src/select/error.c say what is computed):
//
//   means    error_means.cu   mean queries; mean keys and values; fine means and block means
//   outputs  attention        o and lse of every mean query: dense attention of mean queries over
//                             mean keys. A short last group counts as a whole one there, which
//                             error_means.cu corrects.
//   scores   error_scores.cu  the squared errors, with tensor cores; error_plain.cu: any shape
//   choice   error_choice.cu  levels of the blocks, lists, facts
//
// Weights are relative to the sum Z of the row, because the reference of the exponentials is lse.
// They never exceed 1, and Z needs no division.
#pragma once

#include "rules/levels.h"
#include "cuda/selection/select.cuh"

struct error_job {
    // Means, in the dtype of the views, rows of `pitch` elements; columns from D on are 0.
    void *q;               // [B][Hq][rows]; negated if scale < 0
    void *k, *v;           // [B][Hkv][nk][per_k]
    void *kt, *vt;         // [B][Hkv][nk][tail_rows]: fine means, the block mean, zeros
    void *o;               // [B][Hq][rows]; columns from D on and absent rows are undefined
    float *lse;            // [B][Hq][rows] natural logarithm of sum exp(logit) over the mean keys
    int32_t *groups;       // [B] mean keys that exist
    const int32_t *kv_len; // [B], within 0 .. Nk
    float *out;            // [levels][B][Hq][nq][nk]; blocks that do not exist are not written
    int64_t level_stride;
    int32_t dtype, pitch, D;
    int32_t B, Hq, Hkv, nq, nk;
    int32_t Nq, block_q, block_k;
    int32_t group_q, group_k; // tokens of a mean
    int32_t per_q, per_k;     // means of a block
    int32_t rows;             // nq * per_q: mean queries of a head
    int32_t fine;             // fine means of a block; 0: no fine level
    int32_t tail_rows;        // fine + 1, rounded up to 8
    int32_t tail;             // 0: the tail is NONE, so the block mean has no weight
    float scale;              // |scale| * log2(e)
    // How the work is cut (error_scores.cu): a tile of rows against a range of the B * Hkv * nk
    // key blocks. Ranges are the slow axis, so that thread blocks running at the same time read the
    // same means.
    int32_t tiles, ranges;
};

// Fills q, k, v, kt, vt and groups. a: the views.
esa_status error_means_launch(esa_cuda_device *dev, const esa_select_args *a, const error_job &job,
                              cudaStream_t stream);
// Gives a short last group its true weight in o and lse.
esa_status error_mend_launch(esa_cuda_device *dev, const error_job &job, cudaStream_t stream);

// True if the kernel with tensor cores can do it.
bool error_scores_takes(const esa_cuda_device *dev, const error_job &job);
esa_status error_scores_launch(esa_cuda_device *dev, error_job job, cudaStream_t stream);
// Everything else. error_plain.cu
esa_status error_plain_launch(esa_cuda_device *dev, const error_job &job, cudaStream_t stream);

// Scratch of the choice.
struct error_state {
    int64_t left; // columns that are not spent yet
    int64_t paid; // blocks that are exact in any case
    uint32_t key; // gains above it are taken
    int32_t all;  // 1: every step fits
};
struct error_choice {
    error_state *state;       // [B]
    unsigned long long *bins; // [3][B][ERROR_BINS]
    int32_t *best;            // [B][Hq][nq] the block with the largest error of a row; -1: none
    int64_t *ties; // [B][Hq][nq] weight of the steps at the cut; then of those in rows before
};
enum { ERROR_BINS = 2048 };
error_choice error_choice_carve(carve &c, const esa_select_args *a);
esa_status error_choice_launch(esa_cuda_device *dev, const esa_select_args *a,
                               const select_rules &rules, const float *errors,
                               const error_choice &x, const esa_cuda_mask *mask,
                               cudaStream_t stream);

#ifdef __CUDACC__
// log2 of the weight of a column of a tile, in units of a whole group; -inf: it does not exist.
// column: a mean key below per_k, then fine means, then the block mean. tokens: existing keys from
// the start of the block on, which may be more than it holds.
static __device__ __forceinline__ float error_bias(const error_job &x, int column, int tokens)
{
    int first = column * x.group_k, size = x.group_k;
    if (column >= x.per_k) {
        const int part = column - x.per_k;
        size = part < x.fine ? x.block_k / x.fine : x.block_k;
        first = part < x.fine ? part * size : 0;
        if (part > x.fine || !x.tail) return -INFINITY;
    }
    const int n = min(size, tokens - first);
    return n > 0 ? log2f((float)n / (float)x.group_k) : -INFINITY;
}

// Queries of a mean query; 0: it does not exist.
static __device__ __forceinline__ int error_queries(const error_job &x, int row)
{
    const int block = row / x.per_q, first = block * x.block_q + row % x.per_q * x.group_q;
    return max(0, min(x.group_q, x.Nq - first));
}
#endif
