// tail_means.cu - block means for the tail: of k and v rounded to their dtype, and of q in f32 for the centroid tail, in one launch.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes one mean: up to GROUPS groups of threads, one thread per piece of a row, each add every so many rows in f32, then
// one thread per column adds the groups. The order of additions depends on the view's shape alone. k and v are read once, in
// 16-byte pieces with BATCH of them in flight per thread, which is what memory speed asks for. Keys beyond kv_len are not read.
#include "cuda/prepare.cuh"

namespace {

enum { THREADS = 256, GROUPS = 16, BATCH = 8 };     // THREADS: at most

struct mean_part {
    const void *src;
    void *dst;                      // [B][H][padded][mean_pitch]
    const int32_t *length;          // [B] or null: N
    int64_t stride[3];
    int64_t first;                  // thread block where this part begins
    int32_t H, N, rows;             // rows: tokens per block
    int32_t blocks, padded, tiles;  // tiles: thread blocks per head, one per mean and one for all rows of padding
    int32_t f32;                    // dst holds f32 whatever the dtype
};

struct mean_plan {
    mean_part part[3];
    int32_t parts, D, pitch;
};

template <class T> __device__ void put(const mean_part &part, int64_t i, float x) {
    if (part.f32) ((float *)part.dst)[i] = x;
    else round_to((T *)part.dst + i, x);
}

// Piece: what a thread loads at once, packed<T> or single<T>.
template <class T, class Piece> __global__ void __launch_bounds__(THREADS, 4) mean_kernel(mean_plan plan) {
    constexpr int VEC = Piece::N;
    __shared__ float sums[THREADS * VEC];   // [groups][D]
    int which = 0;
    while (which + 1 < plan.parts && blockIdx.x >= plan.part[which + 1].first) ++which;
    const mean_part &part = plan.part[which];
    const int64_t block = blockIdx.x - part.first, bh = block / part.tiles, b = bh / part.H;
    const int j = (int)(block % part.tiles), D = plan.D, pitch = plan.pitch;
    const int64_t dst = (bh * part.padded + j) * pitch;
    if (j == part.blocks) {
        for (int64_t i = threadIdx.x; i < (int64_t)(part.padded - j) * pitch; i += blockDim.x) put<T>(part, dst + i, 0.0f);
        return;
    }
    const int row0 = j * part.rows, n = min(part.rows, key_length(part.length, b, part.N) - row0);  // n <= 0: beyond kv_len
    const T *src = (const T *)part.src + b * part.stride[0] + bh % part.H * part.stride[1] + row0 * part.stride[2];

    const int columns = D / VEC, groups = blockDim.x / columns, group = threadIdx.x / columns, column = threadIdx.x % columns;
    float sum[VEC] = {};
    if (group < groups) {
        for (int r = group; r < n; r += groups * BATCH) {
            Piece loaded[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (r + i * groups < n) loaded[i] = *(const Piece *)(src + (r + i * groups) * part.stride[2] + column * VEC);
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

struct mean_source {
    const void *src;
    void *dst;
    const int32_t *length;
    const int64_t *stride;
    int64_t H, N, rows, blocks, padded;
    int32_t f32;
};

template <class T> void launch(const mean_plan &plan, int64_t blocks, bool wide, cudaStream_t stream) {
    const int columns = plan.D / (wide ? packed<T>::N : 1), wanted = ceil_div(columns * GROUPS, 32) * 32;
    const int threads = wanted < THREADS ? wanted : THREADS;
    if (wide) mean_kernel<T, packed<T>><<<(unsigned)blocks, threads, 0, stream>>>(plan);
    else mean_kernel<T, single<T>><<<(unsigned)blocks, threads, 0, stream>>>(plan);
}

} // namespace

esa_status tail_means(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream) {
    const mean_source source[3] = {
        { a->k, p->k_mean, a->kv_len, a->k_stride, a->Hkv, a->Nk, a->block_k, a->nk, p->nk_pad, 0 },
        { a->v, p->v_mean, a->kv_len, a->v_stride, a->Hkv, a->Nk, a->block_k, a->nk, p->nk_pad, 0 },
        { a->q, p->q_mean, nullptr, a->q_stride, a->Hq, a->Nq, a->block_q, a->nq, a->nq, 1 } };
    mean_plan plan = {};
    plan.D = (int32_t)a->D;
    plan.pitch = (int32_t)p->mean_pitch;
    bool wide = true;
    int64_t blocks = 0;
    for (const mean_source &s : source) {
        if (!s.dst) continue;
        wide = wide && rows_in_16_bytes(s.src, s.stride, a->B, s.H, s.N, a->D, element_bytes(a->dtype));
        const int64_t tiles = s.blocks + (s.padded > s.blocks);
        plan.part[plan.parts++] = { s.src, s.dst, s.length, { s.stride[0], s.stride[1], s.stride[2] }, blocks, (int32_t)s.H, (int32_t)s.N,
                                    (int32_t)s.rows, (int32_t)s.blocks, (int32_t)s.padded, (int32_t)tiles, s.f32 };
        blocks += a->B * s.H * tiles;
    }
    if (a->dtype == ESA_DTYPE_F32) launch<float>(plan, blocks, wide, stream);
    else if (a->dtype == ESA_DTYPE_F16) launch<__half>(plan, blocks, wide, stream);
    else launch<__nv_bfloat16>(plan, blocks, wide, stream);
    return launch_check(dev, "averaging blocks");
}
