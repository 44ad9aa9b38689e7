// means.cu - block means of up to three views in one launch.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes one mean: up to GROUPS groups of threads, one thread per piece of a row, each add every so many rows in f32, then
// one thread per column adds the groups. The order of additions depends on the views' shape alone. Views are read once, in 16-byte
// pieces with BATCH of them in flight per thread, which is what memory speed asks for. Tokens beyond the length are not read.
#include "base/half.h"
#include "cuda/means.cuh"

namespace {

enum { THREADS = 256, GROUPS = 16, BATCH = 8 };     // THREADS: at most

template <class T> __device__ void put(const mean_part &part, int64_t i, float x) {
    if (part.dst_dtype == ESA_DTYPE_F32) ((float *)part.dst)[i] = esa_round_to(x, part.round);
    else round_to((T *)part.dst + i, x);
}

// Piece: what a thread loads at once, packed<T> or single<T>. ORDERED: some part has a permutation. Views
// without one do not ask for it in the loop: the version that did took 0.078 ms for k and v at 480p where the one before took 0.050.
template <class T, class Piece, bool ORDERED> __global__ void __launch_bounds__(THREADS, 4) means_kernel(const __grid_constant__ mean_plan plan) {
    constexpr int VEC = Piece::N;
    __shared__ float sums[THREADS * VEC];   // [groups][D]
    int which = 0;
    while (which + 1 < plan.parts && blockIdx.x >= plan.part[which + 1].first) ++which;
    const mean_part &part = plan.part[which];
    const int tiles = part.blocks + (part.padded > part.blocks);
    const int64_t block = blockIdx.x - part.first, bh = block / tiles, b = bh / part.H;
    const int j = (int)(block % tiles), D = plan.D, pitch = plan.pitch;
    const int64_t dst = (bh * part.padded + j) * pitch;
    if (j == part.blocks) {
        for (int64_t i = threadIdx.x; i < (int64_t)(part.padded - j) * pitch; i += blockDim.x) put<T>(part, dst + i, 0.0f);
        return;
    }
    int row0 = j * part.rows, end = key_length(part.length, b, part.N);
    if (part.split) {
        const int before = ceil_div(part.split, part.rows);
        if (j < before) end = min(end, part.split);
        else row0 = part.split + (j - before) * part.rows;
    }
    const int n = min(part.rows, end - row0);                   // n <= 0: nothing of the block exists
    const int64_t step = part.stride[2];
    const int32_t *const perm = ORDERED ? part.perm : nullptr;
    const T *src = (const T *)part.src + b * part.stride[0] + bh % part.H * part.stride[1] + (perm ? 0 : row0 * step);

    const int columns = D / VEC, groups = (int)blockDim.x / columns, group = threadIdx.x / columns, column = threadIdx.x % columns;
    float sum[VEC] = {};
    if (group < groups) {
        for (int r = group; r < n; r += groups * BATCH) {
            Piece loaded[BATCH];
            int64_t row[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                row[i] = r + i * groups;
                if (ORDERED && perm && row[i] < n) row[i] = perm[row0 + row[i]];
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (r + i * groups < n) loaded[i] = *(const Piece *)(src + row[i] * step + column * VEC);
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (r + i * groups < n) {
                    float x[VEC];
                    loaded[i].unpack(x);
#pragma unroll
                    for (int c = 0; c < VEC; ++c) sum[c] += x[c];
                }
        }
#pragma unroll
        for (int c = 0; c < VEC; ++c) sums[group * D + column * VEC + c] = sum[c];
    }
    __syncthreads();
    for (int d = threadIdx.x; d < pitch; d += blockDim.x) {
        float total = 0.0f;
        if (d < D)
            for (int g = 0; g < groups; ++g) total += sums[g * D + d];
        put<T>(part, dst + d, n > 0 ? total / (float)n : 0.0f);
    }
}

template <class T, class Piece> void launch_pieces(const mean_plan &plan, int64_t blocks, cudaStream_t stream) {
    const int columns = plan.D / Piece::N, wanted = ceil_div(columns * GROUPS, 32) * 32, threads = wanted < THREADS ? wanted : THREADS;
    bool ordered = false;
    for (int i = 0; i < plan.parts; i++) ordered = ordered || plan.part[i].perm;
    if (ordered) means_kernel<T, Piece, true><<<(unsigned)blocks, threads, 0, stream>>>(plan);
    else means_kernel<T, Piece, false><<<(unsigned)blocks, threads, 0, stream>>>(plan);
}

template <class T> void launch(const mean_plan &plan, int64_t blocks, bool wide, cudaStream_t stream) {
    if (wide) launch_pieces<T, packed<T>>(plan, blocks, stream);
    else launch_pieces<T, single<T>>(plan, blocks, stream);
}

} // namespace

esa_status means_launch(esa_cuda_device *dev, mean_plan plan, int32_t dtype, int64_t B, bool wide, cudaStream_t stream) {
    int64_t blocks = 0;
    for (int i = 0; i < plan.parts; i++) {
        mean_part &part = plan.part[i];
        part.first = blocks;
        blocks += B * part.H * (part.blocks + (part.padded > part.blocks));
    }
    if (dtype == ESA_DTYPE_F32) launch<float>(plan, blocks, wide, stream);
    else if (dtype == ESA_DTYPE_F16) launch<__half>(plan, blocks, wide, stream);
    else launch<__nv_bfloat16>(plan, blocks, wide, stream);
    return launch_check(dev, "averaging blocks");
}
