// entropy.cuh - the score pass of the entropy selector: the input and output of its kernels.
// SPDX-License-Identifier: Apache-2.0
//
// A few queries of every query block are scored against all keys. Only two numbers per sample and
// key block leave the kernel: the largest score, and the sum of exp2 of the scores relative to it
// (scores in log2 units). entropy_rows.cu turns them into importance.
//
// Query heads that share a key head are scored together: row r of a key head is sample r % samples
// of its query head r / samples. A window is a run of query blocks, so that the statistics of any
// shape fit into a fixed amount of memory. Usually there is one window.
#pragma once

#include "cuda/selection/select.cuh"

struct score_stat {
    float top; // log2 of the largest exp(score); -inf: no key visible
    float sum; // sum of exp2(score - top)
};

struct score_job {
    const void *q, *k;
    int64_t q_stride[3], k_stride[3]; // batch, head, token; elements
    const int32_t *perm_q, *perm_k;   // position -> token, or null
    const int32_t *kv_len;            // [B], within 0 .. Nk
    // [B][Hkv][rows][pitch]; block j of row r is written if the row sees one of its keys.
    score_stat *stats;
    int32_t dtype, causal;
    int32_t B, Hkv, ratio; // ratio: query heads per key head
    int32_t Nq, Nk, D;
    int32_t block_q, block_k, nk;
    // nk rounded up to 4, so that runs of four key blocks are whole sectors.
    int32_t pitch;
    int32_t per_block; // samples of a full query block
    int32_t block0;    // first query block of the window
    int32_t samples;   // samples of the window per query head
    int32_t rows;      // ratio * samples
    float scale;       // |scale| * log2(e)
    // Sign bits to flip in every two elements of q if scale < 0.
    uint32_t flip;
    // How the work is cut: a tile of rows against a range of the B * Hkv * steps key steps. Ranges
    // are the slow axis, so that thread blocks running at the same time read the same keys.
    int32_t tiles, ranges, steps;
};

// One kernel each. takes: true if the kernel can do it. The first that takes the job
// runs it. sm90_score.cu
bool sm90_score_takes(const esa_cuda_device *dev, const esa_select_args *a);
esa_status sm90_score_launch(esa_cuda_device *dev, score_job job, cudaStream_t stream);
// sm80_score.cu: 16-bit, everything else
esa_status sm80_score_launch(esa_cuda_device *dev, score_job job, cudaStream_t stream);
// entropy_f32.cu
esa_status f32_score_launch(esa_cuda_device *dev, score_job job, cudaStream_t stream);

// Fills tiles, ranges and steps. `slots` thread blocks run at once, and the slowest of them gets as
// little work as possible.
static inline void score_cut(score_job &job, int tile_rows, int steps, int slots)
{
    job.tiles = ceil_div(job.rows, tile_rows);
    job.steps = steps;
    const int64_t all = (int64_t)job.B * job.Hkv * steps;
    int64_t least = INT64_MAX;
    for (int64_t ranges = 1; ranges <= all && (ranges - 1) * job.tiles < 4 * (int64_t)slots;
         ranges++) {
        // 2: filling the pipeline.
        const int64_t waves = ceil_div<int64_t>(ranges * job.tiles, slots),
                      cost = waves * (ceil_div(all, ranges) + 2);
        if (cost >= least) continue;
        least = cost;
        job.ranges = (int32_t)ranges;
    }
}

#ifdef __CUDACC__
// Position in the ordered sequence of sample s of a query head in the window.
static __device__ __forceinline__ int sample_position(const score_job &x, int s)
{
    const int first = (x.block0 + s / x.per_block) * x.block_q, n = min(x.block_q, x.Nq - first),
              count = min(n, x.per_block);
    return first + (2 * (s % x.per_block) + 1) * n / (2 * count);
}

// Number of keys that the query at a position sees, of `len` existing ones.
static __device__ __forceinline__ int keys_seen(const score_job &x, int position, int len)
{
    return x.causal ? max(0, min(len, position + x.Nk - x.Nq + 1)) : len;
}

static __device__ __forceinline__ int row_limit(const score_job &x, int row, int len)
{
    return row < x.rows ? keys_seen(x, sample_position(x, row % x.samples), len) : 0;
}

// Offset in q, in elements, of the query of a row.
static __device__ __forceinline__ int64_t row_offset(const score_job &x, int b, int g, int row)
{
    const int position = sample_position(x, row % x.samples),
              token = x.perm_q ? x.perm_q[position] : position;
    return b * x.q_stride[0] + (g * x.ratio + row / x.samples) * x.q_stride[1] +
           token * x.q_stride[2];
}

// The most keys that any of the rows first .. first+n-1 sees. Samples ascend within a query head.
static __device__ __forceinline__ int tile_limit(const score_job &x, int first, int n, int len)
{
    const int last = min(first + n, x.rows) - 1;
    return keys_seen(x,
                     sample_position(x, first / x.samples == last / x.samples ? last % x.samples
                                                                              : x.samples - 1),
                     len);
}

// The parts of the work of a thread block: one tile against consecutive steps of one key head.
struct score_walk {
    int64_t at, end; // position in B * Hkv * steps
    int item, tile;
    int b, g, len;    // batch entry, key head, existing keys
    int step0, step1; // steps of this part, without those that no row of the tile sees

    __device__ __forceinline__ score_walk() : at(0), end(0), item(blockIdx.x) {}
    // Moves to the next part with work in it; false: no more. step_keys: keys per step.
    template <int TILE_ROWS> __device__ __forceinline__ bool next(const score_job &x, int step_keys)
    {
        const int64_t all = (int64_t)x.B * x.Hkv * x.steps;
        for (;;) {
            if (at >= end) {
                if (item >= x.tiles * x.ranges) return false;
                const int range = item / x.tiles;
                tile = item - range * x.tiles;
                at = all * range / x.ranges, end = all * (range + 1) / x.ranges;
                item += gridDim.x;
                continue;
            }
            const int head = (int)(at / x.steps);
            step0 = (int)(at - (int64_t)head * x.steps);
            step1 = (int)min((int64_t)x.steps, step0 + end - at);
            at += step1 - step0;
            b = head / x.Hkv, g = head % x.Hkv;
            len = x.kv_len[b];
            step1 = min(step1,
                        ceil_div(tile_limit(x, tile * TILE_ROWS, TILE_ROWS, len), step_keys));
            if (step0 < step1) return true;
        }
    }
};
#endif
