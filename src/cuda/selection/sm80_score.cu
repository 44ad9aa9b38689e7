// sm80_score.cu - the score pass with mma.sync: 16-bit elements, any head dimension, strides, block
// size and key order.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block of four warps holds 64 MT sampled queries in registers and streams keys through
// shared memory, 64 per step, with cp.async if the keys are aligned. A key block is one or more
// steps; maximum and sum are updated step by step. An order of the keys is applied while loading,
// because rows are fetched one by one anyway.
#include "cuda/selection/entropy.cuh"
#include "cuda/attention/sm80_tile.cuh"

namespace
{

// Which pieces of q and k may be read: 4 bytes, 16 bytes.
struct alignments {
    bool q_words, k_vectors;
};

constexpr int STAGES = 3; // 96 KB at most, which every GPU since Ampere has
constexpr int resident(int DP) { return DP <= 128 ? 2 : 1; } // thread blocks per multiprocessor

// The steps of one part, in order.
struct key_steps {
    int block, sub; // key block; step within it
    __device__ __forceinline__ int key(int block_k) const
    {
        return block * block_k + sub * SM80_KEYS;
    }
    __device__ __forceinline__ void advance(int per_block)
    {
        if (++sub == per_block) sub = 0, block++;
    }
};

// Copies 64 keys from `key` on, of which `keys` exist; the others become 0.
template <class T, int DP>
DEV void load_keys(const score_job &x, const T *head, uint32_t dst, int key, int keys, bool vectors)
{
    using loader = row_loader<T, DP>;
    const int chunk = threadIdx.x % loader::CHUNKS, row = threadIdx.x / loader::CHUNKS;
    if (!x.perm_k) {
        const uint64_t valid = keys >= 64 ? ~0ull : keys <= 0 ? 0 : (1ull << keys) - 1;
        loader::load(dst, head + key * x.k_stride[2], x.k_stride[2], valid, x.D, vectors);
        return;
    }
#pragma unroll 4
    for (int i = 0; i < loader::PASSES; i++) {
        const int r = row + i * loader::PASS;
        const bool exists = r < keys;
        const T *const src = head + (exists ? x.perm_k[key + r] : 0) * x.k_stride[2] + chunk * 8;
        const uint32_t at = dst + loader::place(chunk, r);
        if (vectors) {
            copy_16(at, src, exists && chunk * 8 < x.D);
            continue;
        }
        uint32_t word[4] = { 0, 0, 0, 0 };
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (exists && chunk * 8 + e < x.D)
                word[e / 2] |= (uint32_t)((const uint16_t *)src)[e] << e % 2 * 16;
        store_shared(at, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

template <int DP, int MT> struct score_rows {
    // Rows of a lane: lane / 4 + 8 r. The four lanes of a quad share them.
    static constexpr int ROWS = MT * 2;
    warp_queries<DP, MT, true> queries;
    int limit[ROWS]; // keys the rows see; 0: nothing to write
    int whole;       // keys that every row of the warp sees
    // Of the key block so far: maximum of the unscaled scores, this lane's part of the sum.
    float top[ROWS], sum[ROWS];

    __device__ __forceinline__ void open(const score_job &x, const score_walk &w, int row,
                                         bool words, int lane)
    {
        unsigned shortest = ~0u;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int at = row + 8 * r + lane / 4;
            limit[r] = row_limit(x, at, w.len);
            if (limit[r]) shortest = min(shortest, (unsigned)limit[r]);
            const uint16_t *const src = (const uint16_t *)x.q +
                                        row_offset(x, w.b, w.g, min(at, x.rows - 1));
#pragma unroll
            for (int k = 0; k < DP / 16; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int d = 16 * k + 8 * half + lane % 4 * 2;
                    uint32_t pair = 0;
                    if (words) {
                        if (d < x.D) pair = *(const uint32_t *)(src + d);
                    } else {
                        if (d < x.D) pair = src[d];
                        if (d + 1 < x.D) pair |= (uint32_t)src[d + 1] << 16;
                    }
                    queries.held[k][r / 2][2 * half + r % 2] = pair ^ x.flip;
                }
        }
        whole = (int)min(0x7fffffffu, __reduce_min_sync(~0u, shortest));
    }

    // One step: 64 keys from `key` on. Those at or past `end` belong to the next block.
    __device__ __forceinline__ void take(float (&s)[MT][8][4], float scale, int key, int end,
                                         bool fresh, int lane)
    {
        if (key + SM80_KEYS > min(whole, end)) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int seen = min(limit[r], end) - key - lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (8 * n + e >= seen) s[r / 2][n][r % 2 * 2 + e] = -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int at = r % 2 * 2;
            float high = fmaxf(s[r / 2][0][at], s[r / 2][0][at + 1]);
#pragma unroll
            for (int n = 1; n < 8; n++)
                high = fmaxf(high, fmaxf(s[r / 2][n][at], s[r / 2][n][at + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            if (!fresh) high = fmaxf(high, top[r]);
            // Nothing seen yet: subtract 0, because -inf - -inf would be NaN and exp2(-inf -
            // 0) is 0.
            const float base = (high == -INFINITY ? 0.0f : high) * scale;
            float part = fresh ? 0.0f : sum[r] * exp2_approx(fmaf(top[r], scale, -base));
#pragma unroll
            for (int n = 0; n < 8; n++) {
                part += exp2_approx(fmaf(s[r / 2][n][at], scale, -base));
                part += exp2_approx(fmaf(s[r / 2][n][at + 1], scale, -base));
            }
            top[r] = high;
            sum[r] = part;
        }
    }

    // Writes key block j; line: statistics of the warp's first row.
    __device__ __forceinline__ void write(score_stat *line, const score_job &x, int j, int lane)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            // Read before the compiler learns that r is lane % 4 and indexes by it.
            const bool has = limit[r] > 0;
            const float high = top[r] * x.scale;
            float all = sum[r];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            if (lane % 4 == r && has)
                *(float2 *)(line + (int64_t)(8 * r + lane / 4) * x.pitch + j) = make_float2(high,
                                                                                            all);
        }
    }
};

template <class T, int DP, int MT>
__global__ void __launch_bounds__(SM80_THREADS, resident(DP))
    score_kernel(const __grid_constant__ score_job x, const alignments has)
{
    constexpr int TILE = 16 * SM80_WARPS * MT, STAGE = SM80_KEYS * DP * 2;
    extern __shared__ __align__(128) unsigned char raw[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int per_block = ceil_div(x.block_k, SM80_KEYS);
    const uint32_t base = smem_addr(raw), fragment = fragment_by_column<DP>(lane);
    score_rows<DP, MT> rows;
    score_walk w;
    while (w.next<TILE>(x, x.block_k)) {
        const T *const head = (const T *)x.k + w.b * x.k_stride[0] + w.g * x.k_stride[1];
        const int row = w.tile * TILE + warp * 16 * MT, steps = (w.step1 - w.step0) * per_block;
        score_stat *const line = x.stats + (((int64_t)w.b * x.Hkv + w.g) * x.rows + row) * x.pitch;
        key_steps loading = { w.step0, 0 }, now = loading;
        int loaded = 0, into = 0, from = 0; // steps begun to load; stages
        auto load = [&] {
            if (loaded < steps) {
                const int key = loading.key(x.block_k);
                load_keys<T, DP>(x, head, base + into * STAGE, key, min(SM80_KEYS, w.len - key),
                                 has.k_vectors);
                loading.advance(per_block);
            }
            loaded++;
            if (++into == STAGES) into = 0;
            copy_commit();
        };
        __syncthreads(); // the keys of the last part have been read
        for (int i = 0; i < STAGES - 1; i++) load();
        rows.open(x, w, row, has.q_words, lane);
        for (int i = 0; i < steps; i++) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            load();
            float s[MT][8][4];
            scores<T, DP, MT, true>(s, rows.queries, base + from * STAGE + fragment);
            if (++from == STAGES) from = 0;
            rows.take(s, x.scale, now.key(x.block_k), (now.block + 1) * x.block_k, now.sub == 0,
                      lane);
            if (now.sub + 1 == per_block) rows.write(line, x, now.block, lane);
            now.advance(per_block);
        }
        copy_wait<0>();
    }
}

template <class T, int DP, int MT>
esa_status launch(esa_cuda_device *dev, score_job x, alignments has, cudaStream_t stream)
{
    constexpr int bytes = STAGES * SM80_KEYS * DP * 2, slots = resident(DP);
    score_cut(x, 16 * SM80_WARPS * MT, x.nk, dev->multiprocessors * slots);
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(score_kernel<T, DP, MT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes),
        "preparing the score kernel");
    if (status) return status;
    const int blocks = (int)esa_min64((int64_t)dev->multiprocessors * slots,
                                      (int64_t)x.tiles * x.ranges);
    score_kernel<T, DP, MT><<<blocks, SM80_THREADS, bytes, stream>>>(x, has);
    return launch_check(dev, "launching the score kernel");
}

template <class T>
esa_status launch_width(esa_cuda_device *dev, const score_job &x, alignments has,
                        cudaStream_t stream)
{
    if (x.D <= 64) return launch<T, 64, 2>(dev, x, has, stream);
    return x.D <= 128 ? launch<T, 128, 2>(dev, x, has, stream)
                      : launch<T, 256, 1>(dev, x, has, stream);
}

} // namespace

esa_status sm80_score_launch(esa_cuda_device *dev, score_job x, cudaStream_t stream)
{
    const alignments has = {
        rows_in_pieces({ x.q, x.q_stride, { x.B, (int64_t)x.Hkv * x.ratio, x.Nq } }, x.D, 2, 4),
        rows_in_pieces({ x.k, x.k_stride, { x.B, x.Hkv, x.Nk } }, x.D, 2, 16)
    };
    return x.dtype == ESA_DTYPE_BF16 ? launch_width<__nv_bfloat16>(dev, x, has, stream)
                                     : launch_width<__half>(dev, x, has, stream);
}
