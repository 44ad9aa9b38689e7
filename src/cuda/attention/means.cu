// means.cu - block means of up to three views in one launch.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes one mean. Up to GROUPS groups of threads, one thread per piece of a row, add
// a run of rows each in f32; then one thread per column adds the groups. The order of additions
// depends only on the shape of the views. Views are read once, in 16-byte pieces with BATCH of them
// in flight per thread, which memory speed needs. Tokens beyond the length are not read.
//
// The fine means of a block come from the same sums: with 128 x 128 blocks in bf16, a run is 8 rows
// and a fine mean some runs. If runs do not fit (f32 with 16 means, say), the rows are read again
// while they are in the cache. The mean has the same bits with and without fine means.
#include "base/half.h"
#include "cuda/attention/means.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

enum { THREADS = 256, GROUPS = 16, BATCH = 4 }; // THREADS: at most
// Warps of a thread block that marks; their shared memory fits at 65,536 blocks.
enum { STANDS_WARPS = 4 };

// Takes the blocks of the fine level out of the bits of a row and counts the columns of their
// means. whole: blocks that every query of the row fully sees.
__device__ void mark_fine(const stands_part &p, int64_t row, int64_t mask_row, int length,
                          int whole, uint32_t *bits)
{
    const int lane = threadIdx.x % 32, count = p.fine_count[mask_row];
    const uint16_t *list = p.fine_index + mask_row * p.cap;
    int seen = 0, part = p.fine; // blocks that exist; means of the last of them
    for (int c = lane; c < count; c += 32) {
        const int j = list[c];
        atomicAnd(&bits[j / 32], ~(1u << j % 32));
        seen += j < whole;
    }
    seen = lanes_sum<32>(seen);
    if (lane) return;
    if (seen > 0)
        part = min(p.fine, ceil_div(length - list[seen - 1] * p.block_k, p.block_k / p.fine));
    p.fine_columns[row] = seen > 0 ? (seen - 1) * p.fine + part : 0;
}

// Marks the bits of one row, by one warp. Follows tail_bias of src/cpu/attn_cpu.c: all blocks that
// exist and that every query of the row fully sees, except the listed ones and those of the fine
// level. bits: nk_pad / 32 words of shared memory.
__device__ void mark_stands(const stands_part &p, int64_t row, uint32_t *bits)
{
    const int lane = threadIdx.x % 32, words = p.nk_pad / 32;
    const int64_t bh = row / p.nq, b = bh / p.Hq,
                  mask_row = (b * p.mask_batch + bh % p.Hq) * p.nq + row % p.nq;
    const int length = key_length(p.kv_len, b, p.Nk);
    // Keys the first query of the row sees.
    const int64_t visible = p.causal ? row % p.nq * p.block_q + p.shift + 1 : (int64_t)p.Nk;
    const int whole = length <= visible ? ceil_div(length, p.block_k)
                                        : (int)(max(visible, (int64_t)0) / p.block_k);
    for (int w = lane; w < words; w += 32) {
        const int n = whole - w * 32;
        bits[w] = n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0u;
    }
    __syncwarp();
    const uint16_t *list = p.index + mask_row * p.cap;
    for (int c = lane; c < p.count[mask_row]; c += 32)
        atomicAnd(&bits[list[c] / 32], ~(1u << list[c] % 32));
    if (p.fine_count) mark_fine(p, row, mask_row, length, whole, bits);
    __syncwarp();
    for (int w = lane; w < words; w += 32) p.stands[row * words + w] = bits[w];
}

template <class T> __device__ void put(const mean_part &part, void *dst, int64_t i, float x)
{
    if (part.dst_dtype == ESA_DTYPE_F32)
        ((float *)dst)[i] = esa_round_to(x, part.round);
    else
        round_to((T *)dst + i, x);
}

// What a launch has besides plain views: some part has a permutation, or some part has fine means.
enum { PLAIN, ORDERED, FINE };

// Adds rows from, from + groups, ... below n to sum. src: the block's first row (ORDERED: the
// head's first), at the column of this thread.
template <bool PERMUTED, class T, class Piece>
__device__ __forceinline__ void add_rows(float (&sum)[Piece::N], const T *src, const int32_t *perm,
                                         int64_t step, int from, int n, int groups)
{
    for (int r = from; r < n; r += groups * BATCH) {
        Piece loaded[BATCH];
        int64_t row[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            row[i] = r + i * groups;
            if (PERMUTED && perm && row[i] < n) row[i] = perm[row[i]];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (r + i * groups < n) loaded[i] = *(const Piece *)(src + row[i] * step);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (r + i * groups < n) {
                float x[Piece::N];
                loaded[i].unpack(x);
#pragma unroll
                for (int c = 0; c < Piece::N; ++c) sum[c] += x[c];
            }
    }
}

// Four adjacent columns of a mean.
template <class T> struct alignas(4 * sizeof(T)) four {
    T x[4];
};
template <class T>
__device__ __forceinline__ void put_four(const mean_part &part, void *dst, int64_t i,
                                         const float (&x)[4])
{
    if (part.dst_dtype == ESA_DTYPE_F32) {
        four<float> y;
#pragma unroll
        for (int c = 0; c < 4; ++c) y.x[c] = esa_round_to(x[c], part.round);
        *(four<float> *)((float *)dst + i) = y;
    } else {
        four<T> y;
#pragma unroll
        for (int c = 0; c < 4; ++c) round_to(&y.x[c], x[c]);
        *(four<T> *)((T *)dst + i) = y;
    }
}

// The fine means of one block of n rows from the sums of runs of `span` rows, which make up whole
// means. D and pitch are multiples of 4. dst: the first element of the block's first mean.
template <class T>
__device__ __forceinline__ void add_fine(const mean_part &part, int64_t dst, int n, int span, int D,
                                         int pitch, const float *sums)
{
    const int rows = part.rows / part.fine, each = rows / span;
    for (int e = threadIdx.x * 4; e < part.fine * pitch; e += blockDim.x * 4) {
        const int p = e / pitch, d = e - p * pitch, have = min(rows, n - p * rows);
        float total[4] = {};
        if (d < D && have > 0) {
            for (int g = 0; g < each; ++g) {
                const float4 s = *(const float4 *)&sums[(p * each + g) * D + d];
                total[0] += s.x, total[1] += s.y, total[2] += s.z, total[3] += s.w;
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) total[c] /= (float)have;
        }
        put_four<T>(part, part.fine_dst, dst + e, total);
    }
}

// The same from the rows, for other runs. Several groups of threads share a mean; if there are more
// means than groups, some wait for the next turn. dst: the first element of the block's first mean.
template <class T, class Piece>
__device__ __forceinline__ void read_fine(const mean_part &part, const T *src, int64_t dst, int n,
                                          int D, int pitch, float *sums)
{
    const int columns = D / Piece::N, groups = (int)blockDim.x / columns,
              group = threadIdx.x / columns, column = threadIdx.x % columns,
              rows = part.rows / part.fine, at_once = min(part.fine, groups),
              each = groups / at_once;
    for (int first = 0; first < part.fine; first += at_once) {
        __syncthreads(); // the sums of the last turn have been read
        const int mine = first + group / each, begin = mine * rows;
        if (group < at_once * each && mine < part.fine) {
            float sum[Piece::N] = {};
            add_rows<false, T, Piece>(sum, src, nullptr, part.stride[2], begin + group % each,
                                      min(begin + rows, n), each);
#pragma unroll
            for (int c = 0; c < Piece::N; ++c) sums[group * D + column * Piece::N + c] = sum[c];
        }
        __syncthreads();
        const int turn = min(at_once, part.fine - first);
        for (int e = threadIdx.x; e < turn * pitch; e += blockDim.x) {
            const int p = e / pitch, d = e - p * pitch, have = min(rows, n - (first + p) * rows);
            float total = 0.0f;
            if (d < D)
                for (int g = 0; g < each; ++g) total += sums[(p * each + g) * D + d];
            put<T>(part, part.fine_dst, dst + (int64_t)first * pitch + e,
                   have > 0 ? total / (float)have : 0.0f);
        }
    }
}

// Piece: what a thread loads at once, packed<T> or single<T>. Views without a permutation are not
// tested for one in the loop: with the test, k and v at 480p took 0.078 ms instead of 0.050.
template <class T, class Piece, int KIND>
__global__ void __launch_bounds__(THREADS, 4) means_kernel(const __grid_constant__ mean_plan plan)
{
    constexpr int VEC = Piece::N;
    __shared__ __align__(16) float sums[THREADS * VEC]; // [groups][D]
    extern __shared__ uint32_t marks[];                 // [STANDS_WARPS][nk_pad / 32]
    if (blockIdx.x < plan.part[0].first) {
        const int warp = threadIdx.x / 32, warps = min((int)blockDim.x / 32, (int)STANDS_WARPS);
        const int64_t row = (int64_t)blockIdx.x * warps + warp;
        if (warp < warps && row < plan.stands.rows)
            mark_stands(plan.stands, row, marks + warp * (plan.stands.nk_pad / 32));
        return;
    }
    int which = 0;
    while (which + 1 < plan.parts && blockIdx.x >= plan.part[which + 1].first) ++which;
    const mean_part &part = plan.part[which];
    const int tiles = part.blocks + (part.padded > part.blocks);
    const int64_t block = blockIdx.x - part.first, bh = block / tiles, b = bh / part.H;
    const int j = (int)(block % tiles), D = plan.D, pitch = plan.pitch;
    const int64_t dst = (bh * part.padded + j) * pitch;
    if (j == part.blocks) {
        for (int64_t i = threadIdx.x; i < (int64_t)(part.padded - j) * pitch; i += blockDim.x)
            put<T>(part, part.dst, dst + i, 0.0f);
        return;
    }
    int row0 = j * part.rows, end = key_length(part.length, b, part.N);
    if (part.split) {
        const int before = ceil_div(part.split, part.rows);
        if (j < before)
            end = min(end, part.split);
        else
            row0 = part.split + (j - before) * part.rows;
    }
    // n <= 0: nothing of the block exists.
    const int n = min(part.rows, end - row0);
    const int64_t step = part.stride[2];
    const int32_t *const perm = KIND == ORDERED && part.perm ? part.perm + row0 : nullptr;
    const T *src = (const T *)part.src + b * part.stride[0] + bh % part.H * part.stride[1] +
                   (perm ? 0 : row0 * step);

    const int columns = D / VEC, groups = (int)blockDim.x / columns, group = threadIdx.x / columns,
              column = threadIdx.x % columns;
    const int span = ceil_div(part.rows, groups);
    float sum[VEC] = {};
    if (group < groups) {
        add_rows<KIND == ORDERED, T, Piece>(sum, src + column * VEC, perm, step, group * span,
                                            min(n, (group + 1) * span), 1);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sums[group * D + column * VEC + c] = sum[c];
    }
    __syncthreads();
    for (int d = threadIdx.x; d < pitch; d += blockDim.x) {
        float total = 0.0f;
        if (d < D)
            for (int g = 0; g < groups; ++g) total += sums[g * D + d];
        put<T>(part, part.dst, dst + d, n > 0 ? total / (float)n : 0.0f);
    }
    if (KIND != FINE || !part.fine) return;
    const int64_t fine_dst = (bh * part.blocks + j) * part.fine * pitch;
    if (part.rows / part.fine % span == 0 && D % 4 == 0 && pitch % 4 == 0)
        add_fine<T>(part, fine_dst, n, span, D, pitch, sums);
    else
        read_fine<T, Piece>(part, src + column * VEC, fine_dst, n, D, pitch, sums);
}

template <class T, class Piece> void launch_pieces(mean_plan plan, int64_t B, cudaStream_t stream)
{
    const int columns = plan.D / Piece::N, wanted = ceil_div(columns * GROUPS, 32) * 32,
              threads = wanted < THREADS ? wanted : THREADS;
    const int warps = threads / 32 < STANDS_WARPS ? threads / 32 : STANDS_WARPS;
    const size_t marks = (size_t)(warps * plan.stands.nk_pad / 8);
    // These come first, so that they finish while the means run.
    int64_t blocks = ceil_div(plan.stands.rows, (int64_t)warps);
    plan.part[0].first = blocks; // also if there is no part
    bool ordered = false, fine = false;
    for (int i = 0; i < plan.parts; i++) {
        mean_part &part = plan.part[i];
        part.first = blocks;
        blocks += B * part.H * (part.blocks + (part.padded > part.blocks));
        ordered = ordered || part.perm;
        fine = fine || part.fine;
    }
    if (ordered)
        means_kernel<T, Piece, ORDERED><<<(unsigned)blocks, threads, marks, stream>>>(plan);
    else if (fine)
        means_kernel<T, Piece, FINE><<<(unsigned)blocks, threads, marks, stream>>>(plan);
    else
        means_kernel<T, Piece, PLAIN><<<(unsigned)blocks, threads, marks, stream>>>(plan);
}

template <class T> void launch(const mean_plan &plan, int64_t B, bool wide, cudaStream_t stream)
{
    if (wide)
        launch_pieces<T, packed<T>>(plan, B, stream);
    else
        launch_pieces<T, single<T>>(plan, B, stream);
}

} // namespace

esa_status means_launch(esa_cuda_device *dev, const mean_plan &plan, int32_t dtype, int64_t B,
                        bool wide, cudaStream_t stream)
{
    if (dtype == ESA_DTYPE_F32)
        launch<float>(plan, B, wide, stream);
    else if (dtype == ESA_DTYPE_F16)
        launch<__half>(plan, B, wide, stream);
    else
        launch<__nv_bfloat16>(plan, B, wide, stream);
    return launch_check(dev, "averaging blocks");
}
