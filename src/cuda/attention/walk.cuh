// walk.cuh - the steps of one query tile: which keys, then which means, a kernel visits. Shared by
// the sm80 and the simt kernel.
// SPDX-License-Identifier: Apache-2.0
//
// A step is STEP keys of one listed block, STEP fine means, or STEP block means (pooled tail). One
// int names it: the first key, ~(WALK_FINE + t) for the fine columns t STEP .. t STEP + STEP - 1 of
// the row, ~t for the same means, or WALK_END. Lists are walked last to first. Blocks cut by
// causality or kv_len then come first, and everything after them is whole. Blocks that no row of
// the tile sees are never visited.
#pragma once

#include "cuda/attention/attention.cuh"
#include "cuda/runtime/views.cuh"

constexpr int WALK_END = INT32_MIN, WALK_FINE = 1 << 28;

__device__ __forceinline__ bool is_fine(int step) { return step <= ~WALK_FINE; }

struct tile_place { // which rows of which head
    int b, h, i;    // batch entry, query head, query block
    // First row and number of existing rows; 0 or less past the end of a short last block.
    int row, rows;
    int len; // keys that exist: kv_len within 0 .. Nk
    // Causal: keys the first row sees (may be negative); row r sees r more. Otherwise len
    // for every row.
    int seen;
};

// Tile number t of a head-major grid, heaviest rows first if the job knows them. Dense:
// blocks are tiles.
template <int ROWS>
__device__ __forceinline__ tile_place place_of(const attention_job &job, unsigned t)
{
    const esa_attn_args &a = job.a;
    const int per_block = a.count ? (a.block_q + ROWS - 1) / ROWS : 1;
    const int nq = a.count ? (int)a.nq : (int)((a.Nq + ROWS - 1) / ROWS);
    const int block_q = a.count ? a.block_q : ROWS;
    tile_place p;
    const unsigned in_head = (unsigned)(nq * per_block), head = t / in_head,
                   place = t - head * in_head;
    p.b = (int)(head / (unsigned)a.Hq);
    p.h = (int)(head - p.b * (unsigned)a.Hq);
    const int rank = (int)(place / (unsigned)per_block), part = (int)(place - rank * per_block);
    if (a.count && job.order)
        p.i = job.order[(int64_t)head * nq + rank];
    else
        p.i = a.causal ? nq - 1 - rank : rank;
    p.row = p.i * block_q + part * ROWS;
    p.rows = min(min(ROWS, block_q - part * ROWS), (int)a.Nq - p.row);
    p.len = a.kv_len ? max(0, min(a.kv_len[p.b], (int)a.Nk)) : (int)a.Nk;
    p.seen = a.causal ? p.row + (int)(a.Nk - a.Nq) + 1 : p.len;
    return p;
}

// Number of tiles of a job, at most what one launch can hold.
template <int ROWS>
static inline esa_status count_tiles(unsigned *tiles, esa_cuda_device *dev, const esa_attn_args *a)
{
    const int64_t n = a->B * a->Hq *
                      (a->count ? a->nq * ceil_div<int64_t>(a->block_q, ROWS)
                                : ceil_div<int64_t>(a->Nq, ROWS));
    if (n > INT32_MAX)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "%lld query tiles are more than one launch can hold", (long long)n);
    *tiles = (unsigned)n;
    return ESA_OK;
}

__device__ __forceinline__ int kv_head(const esa_attn_args &a, const tile_place &p)
{
    return p.h / (int)(a.Hq / a.Hkv);
}

// Row of the arrays [B][Hq][nq] of a job.
__device__ __forceinline__ int64_t row_of(const esa_attn_args &a, const tile_place &p)
{
    return ((int64_t)p.b * a.Hq + p.h) * a.nq + p.i;
}

// The token that a row of q belongs to.
__device__ __forceinline__ int64_t token_of(const attention_job &job, const tile_place &p, int row)
{
    if (!job.scatter) return row;
    return job.scatter[p.b * job.scatter_stride[0] + p.h * job.scatter_stride[1] + row];
}

// Fine columns of the tile: how many from column `first` on, the list of their blocks, and the row
// of k_fine and v_fine, within the head, that column c reads.
__device__ __forceinline__ int fine_columns(const attention_job &job, const tile_place &p,
                                            int first)
{
    return job.fine_columns[row_of(job.a, p)] - first;
}
__device__ __forceinline__ const uint16_t *fine_list(const esa_attn_args &a, const tile_place &p)
{
    return a.fine_index + ((p.b * a.mask_batch + p.h) * a.nq + p.i) * a.cap;
}
__device__ __forceinline__ int fine_row(const uint16_t *list, int fine, int c)
{
    return list[c / fine] * fine + c % fine;
}

__device__ __forceinline__ uint64_t first_bits(int n)
{
    return n >= 64 ? ~0ull : n > 0 ? (1ull << n) - 1 : 0;
}

template <int STEP> struct key_walk {
    static constexpr int WORDS = STEP / 32;
    const uint16_t *list; // null: dense
    int left;             // steps of keys still to come
    int fine, means;      // steps of fine means and of means still to come

    __device__ __forceinline__ key_walk(const attention_job &job, const tile_place &p)
    {
        const esa_attn_args &a = job.a;
        // Keys that some row of the tile sees.
        const int limit = max(0, a.causal ? min(p.len, p.seen + p.rows - 1) : p.len);
        list = nullptr;
        fine = means = 0;
        left = (limit + STEP - 1) / STEP;
        if (!a.count) return;
        const int64_t row = (p.b * a.mask_batch + p.h) * a.nq + p.i;
        list = a.index + row * a.cap;
        int entries = a.count[row];
        // Entries that begin below the limit. They are a prefix, because the list ascends.
        if (a.causal || a.kv_len) {
            int low = 0;
            while (low < entries) {
                const int middle = (low + entries) / 2;
                if (list[middle] * a.block_k < limit)
                    low = middle + 1;
                else
                    entries = middle;
            }
        }
        left = entries * per_block(a);
        if (entries > 0) { // only the visible part of the last block
            const int keys = limit - list[entries - 1] * a.block_k;
            if (keys < a.block_k) left -= per_block(a) - (keys + STEP - 1) / STEP;
        }
        if (a.tail == ESA_TAIL_POOLED && job.stands)
            means = ((p.len + a.block_k - 1) / a.block_k + STEP - 1) / STEP;
        if (a.fine_count) fine = (fine_columns(job, p, 0) + STEP - 1) / STEP;
    }

    static __device__ __forceinline__ int per_block(const esa_attn_args &a)
    {
        return (a.block_k + STEP - 1) / STEP;
    }

    // The first fine column of a step.
    static __device__ __forceinline__ int first_fine(int step)
    {
        return (~step - WALK_FINE) * STEP;
    }

    // Which of the STEP means from t STEP on stand in. Read again at each use: that is rare, and it
    // costs no registers in between.
    static __device__ __forceinline__ uint64_t stands(const attention_job &job, const tile_place &p,
                                                      int t)
    {
        const uint32_t *const word = job.stands + row_of(job.a, p) * (job.nk_pad / 32) + t * WORDS;
        return word[0] | (WORDS == 2 ? (uint64_t)word[WORDS - 1] << 32 : 0);
    }

    __device__ __forceinline__ int next(const attention_job &job, const tile_place &p)
    {
        if (left > 0) {
            --left;
            if (!list) return left * STEP;
            // Blocks are 1 or 2 steps of 64: a shift. Steps of 32 may divide.
            const int per = per_block(job.a), entry = STEP == 64 ? left >> (per - 1) : left / per;
            return list[entry] * job.a.block_k + (left - entry * per) * STEP;
        }
        if (fine > 0) return ~(WALK_FINE + --fine);
        while (means > 0) {
            --means;
            if (stands(job, p, means)) return ~means;
        }
        return WALK_END;
    }

    // Bit c: column c of the step exists (a key within kv_len and its block; a fine mean; a mean
    // that stands in).
    static __device__ __forceinline__ uint64_t columns(const attention_job &job,
                                                       const tile_place &p, int step)
    {
        const esa_attn_args &a = job.a;
        if (__builtin_expect(step < 0, 0))
            return is_fine(step) ? first_bits(fine_columns(job, p, first_fine(step)))
                                 : stands(job, p, ~step);
        int end = p.len;
        if (STEP < 64 && a.count) end = min(end, (step / a.block_k + 1) * a.block_k);
        return first_bits(end - step);
    }
};

// log2 of the number of keys that mean j represents.
__device__ __forceinline__ float mean_bias(const esa_attn_args &a, const tile_place &p, int j)
{
    return log2f((float)min(a.block_k, p.len - j * a.block_k));
}

// The same for fine column c of the tile.
__device__ __forceinline__ float fine_bias(const esa_attn_args &a, const tile_place &p, int c)
{
    const int tokens = a.block_k / a.fine, first = fine_row(fine_list(a, p), a.fine, c) * tokens;
    return log2f((float)min(tokens, p.len - first));
}
