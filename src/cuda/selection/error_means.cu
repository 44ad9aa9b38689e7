// error_means.cu - the means of the error selector: mean queries, mean keys and values, fine means
// and block means, in one launch; and the weight of a short last group.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes the means of one block of tokens of one view. The block is cut into up to
// RANGES runs of whole groups. A group of threads, one per piece of a row, reads a run token by
// token, writes the mean of every group as it ends, and leaves the sum of the run in shared memory,
// from which fine means and the block mean follow. So views are read once, in 16-byte pieces with
// BATCH of them in flight per thread. Sums are f32; their order depends only on the shape.
#include "base/half.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"
#include "cuda/selection/error.cuh"

namespace
{

enum { THREADS = 256, RANGES = 16, BATCH = 8, MEND_WARPS = 8 };

struct view_part {
    const void *src;
    int64_t stride[3];
    const int32_t *perm; // position -> token, or null
    int64_t perm_stride[2];
    const int32_t *length; // [B] existing tokens; null: N
    void *dst, *tail;      // tail: fine means and block mean; null: none
    int64_t first;         // first thread block of the part
    int32_t H, N, blocks, block, group, ranges;
    float sign;
};

struct means_plan {
    view_part part[3];
    const int32_t *kv_len;
    int32_t *groups;
    int32_t B, D, pitch, group_k, fine, tail_rows;
};

// The tokens of one block of a part.
template <class T> struct block_source {
    const T *src;
    int64_t step;
    const int32_t *perm;
    int first, n; // position of the first token; tokens that exist

    __device__ __forceinline__ block_source(const view_part &p, int64_t b, int h, int i)
        : src((const T *)p.src + b * p.stride[0] + h * p.stride[1]), step(p.stride[2]),
          perm(p.perm ? p.perm + b * p.perm_stride[0] + h * p.perm_stride[1] : nullptr),
          first(i * p.block), n(min(p.block, key_length(p.length, b, p.N) - first))
    {
    }
    // Adds tokens from .. to-1 of the block, element `column` on, to sum.
    template <class Piece>
    __device__ __forceinline__ void add(float (&sum)[Piece::N], int from, int to, int column) const
    {
        for (int t = from; t < to; t += BATCH) {
            Piece loaded[BATCH];
            int64_t row[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                row[i] = first + t + i;
                if (perm && t + i < to) row[i] = perm[row[i]];
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (t + i < to) loaded[i] = *(const Piece *)(src + row[i] * step + column);
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (t + i < to) {
                    float x[Piece::N];
                    loaded[i].unpack(x);
#pragma unroll
                    for (int c = 0; c < Piece::N; ++c) sum[c] += x[c];
                }
        }
    }
};

template <class T, int N>
__device__ __forceinline__ void put(T *dst, const float (&sum)[N], float factor)
{
    __align__(16) T x[N];
#pragma unroll
    for (int c = 0; c < N; ++c) round_to(&x[c], factor == 0.0f ? 0.0f : sum[c] * factor);
    if constexpr (N * sizeof(T) == 16)
        *(uint4 *)dst = *(const uint4 *)x;
    else
        *dst = x[0];
}

// 1/n, or 0 for a mean of nothing.
__device__ __forceinline__ float share(int n) { return n > 0 ? 1.0f / (float)n : 0.0f; }

// Whole groups of 4 tokens and runs of 8, as with the usual sizes, load a run at once: BATCH.
template <class T, class Piece>
__global__ void __launch_bounds__(THREADS, 3) means_kernel(const __grid_constant__ means_plan plan)
{
    constexpr int VEC = Piece::N;
    extern __shared__ float sums[]; // [ranges][pitch]
    int which = 0;
    while (which < 2 && blockIdx.x >= plan.part[which + 1].first) ++which;
    const view_part &p = plan.part[which];
    const int64_t at = blockIdx.x - p.first, bh = at / p.blocks, b = bh / p.H;
    const int i = (int)(at % p.blocks), D = plan.D, pitch = plan.pitch;
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e < plan.B; e += blockDim.x)
            plan.groups[e] = ceil_div(plan.kv_len[e], plan.group_k);
    const block_source<T> source(p, b, (int)(bh % p.H), i);
    const int columns = pitch / VEC, teams = (int)blockDim.x / columns,
              team = threadIdx.x / columns, column = threadIdx.x % columns * VEC;
    const bool inside = column < D;
    const int length = p.block / p.ranges; // tokens of a run
    T *const dst = (T *)p.dst + at * (p.block / p.group) * pitch + column;
    for (int r = team; r < p.ranges && team < teams; r += teams) {
        float run[VEC] = {};
        if (length == BATCH && inside && source.n >= (r + 1) * length && p.group * 2 == BATCH) {
            // All loads of the run are in flight before the first sum.
            Piece loaded[BATCH];
            int64_t row[BATCH];
#pragma unroll
            for (int t = 0; t < BATCH; ++t) {
                row[t] = source.first + r * BATCH + t;
                if (source.perm) row[t] = source.perm[row[t]];
            }
#pragma unroll
            for (int t = 0; t < BATCH; ++t)
                loaded[t] = *(const Piece *)(source.src + row[t] * source.step + column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum[VEC] = {};
#pragma unroll
                for (int t = 0; t < BATCH / 2; ++t) {
                    float x[VEC];
                    loaded[half * (BATCH / 2) + t].unpack(x);
#pragma unroll
                    for (int c = 0; c < VEC; ++c) sum[c] += x[c];
                }
#pragma unroll
                for (int c = 0; c < VEC; ++c) run[c] += sum[c];
                put(dst + (int64_t)(2 * r + half) * pitch, sum, p.sign * share(BATCH / 2));
            }
        } else {
            for (int first = r * length; first < (r + 1) * length; first += p.group) {
                float sum[VEC] = {};
                const int end = min(first + p.group, source.n);
                if (inside) source.template add<Piece>(sum, first, end, column);
#pragma unroll
                for (int c = 0; c < VEC; ++c) run[c] += sum[c];
                put(dst + (int64_t)(first / p.group) * pitch, sum, p.sign * share(end - first));
            }
        }
#pragma unroll
        for (int c = 0; c < VEC; ++c) sums[r * pitch + column + c] = run[c];
    }
    if (!p.tail) return;
    __syncthreads();
    T *const tail = (T *)p.tail + at * plan.tail_rows * pitch + column;
    for (int r = team; r < plan.tail_rows && team < teams; r += teams) {
        const bool fine = r < plan.fine;
        const int parts = fine ? plan.fine : 1, size = p.block / parts, first = fine ? r * size : 0,
                  end = min(first + size, source.n);
        float sum[VEC] = {};
        if (r > plan.fine) {
            // A row of zeros.
        } else if (p.ranges % parts == 0) {
            for (int u = fine ? r * (p.ranges / parts) : 0, n = p.ranges / parts; n > 0; --n, ++u)
#pragma unroll
                for (int c = 0; c < VEC; ++c) sum[c] += sums[u * pitch + column + c];
        } else if (inside) {
            source.template add<Piece>(sum, first, end, column);
        }
        put(tail + (int64_t)r * pitch, sum, r > plan.fine ? 0.0f : share(end - first));
    }
}

// The largest number of runs of whole groups, a power of two. A fine mean that is not a number of
// whole runs is made from its tokens.
int32_t ranges_of(int32_t block, int32_t group)
{
    int32_t n = RANGES;
    while (block % n || block / n % group) n /= 2;
    return n;
}

template <class T, class Piece>
void launch(means_plan plan, const error_job &x, cudaStream_t stream)
{
    int64_t blocks = 0;
    int32_t ranges = 1;
    for (int i = 0; i < 3; i++) {
        view_part &p = plan.part[i];
        p.first = blocks;
        blocks += (int64_t)x.B * p.H * p.blocks;
        ranges = p.ranges > ranges ? p.ranges : ranges;
    }
    means_kernel<T, Piece>
        <<<(unsigned)blocks, THREADS, (size_t)(ranges * x.pitch) * sizeof(float), stream>>>(plan);
}

template <class T>
void launch_for(const means_plan &plan, const error_job &x, bool wide, cudaStream_t stream)
{
    if (wide)
        launch<T, packed<T>>(plan, x, stream);
    else
        launch<T, single<T>>(plan, x, stream);
}

// One warp per mean query. e: share of the last group in the sum, counted as a whole group.
template <class T>
__global__ void __launch_bounds__(MEND_WARPS * 32) mend_kernel(const __grid_constant__ error_job x)
{
    const int64_t row = (int64_t)blockIdx.x * MEND_WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= (int64_t)x.B * x.Hq * x.rows) return;
    const int64_t bh = row / x.rows, b = bh / x.Hq, g = bh % x.Hq / (x.Hq / x.Hkv);
    const int len = x.kv_len[b], rest = len % x.group_k;
    if (rest == 0 || error_queries(x, (int)(row % x.rows)) == 0) return;
    const int64_t last = ((b * x.Hkv + g) * x.nk * x.per_k + len / x.group_k) * x.pitch;
    const T *const q = (const T *)x.q + row * x.pitch, *const k = (const T *)x.k + last,
                   *const v = (const T *)x.v + last;
    T *const o = (T *)x.o + row * x.pitch;
    float dot = 0.0f;
    for (int d = lane; d < x.D; d += 32) dot += to_float(q[d]) * to_float(k[d]);
    dot = lanes_sum<32>(dot);
    const float missing = 1.0f - (float)rest / (float)x.group_k,
                lost = missing * exp2f(dot * x.scale - x.lse[row] * 1.44269504f),
                factor = 1.0f / (1.0f - lost);
    for (int d = lane; d < x.D; d += 32)
        round_to(o + d, (to_float(o[d]) - lost * to_float(v[d])) * factor);
    __syncwarp();
    if (lane == 0) x.lse[row] += log1pf(-lost);
}

} // namespace

esa_status error_means_launch(esa_cuda_device *dev, const esa_select_args *a, const error_job &x,
                              cudaStream_t stream)
{
    means_plan plan = {};
    const struct {
        const void *data;
        const int64_t *stride;
        void *mean, *tail;
    } views[3] = { { a->q, a->q_stride, x.q, nullptr },
                   { a->k, a->k_stride, x.k, x.kt },
                   { a->v, a->v_stride, x.v, x.vt } };
    bool wide = a->D * element_bytes(a->dtype) % 16 == 0;
    for (int i = 0; i < 3; i++) {
        view_part &p = plan.part[i];
        p.src = views[i].data, p.dst = views[i].mean, p.tail = views[i].tail;
        for (int s = 0; s < 3; s++) p.stride[s] = views[i].stride[s];
        p.perm = i ? a->perm_k : a->perm_q;
        for (int s = 0; s < 2; s++)
            p.perm_stride[s] = i ? a->perm_k_stride[s] : a->perm_q_stride[s];
        p.length = i ? x.kv_len : nullptr;
        p.H = (int32_t)(i ? a->Hkv : a->Hq), p.N = (int32_t)(i ? a->Nk : a->Nq);
        p.blocks = i ? x.nk : x.nq;
        p.block = i ? x.block_k : x.block_q, p.group = i ? x.group_k : x.group_q;
        p.ranges = ranges_of(p.block, p.group);
        p.sign = i == 0 && a->params.scale < 0.0 ? -1.0f : 1.0f;
        wide = wide && rows_in_pieces({ p.src, p.stride, { a->B, p.H, p.N } }, a->D,
                                      element_bytes(a->dtype), 16);
    }
    plan.kv_len = x.kv_len, plan.groups = x.groups;
    plan.B = x.B, plan.D = x.D, plan.pitch = x.pitch, plan.group_k = x.group_k;
    plan.fine = x.fine, plan.tail_rows = x.tail_rows;
    if (a->dtype == ESA_DTYPE_F32)
        launch_for<float>(plan, x, wide, stream);
    else if (a->dtype == ESA_DTYPE_F16)
        launch_for<__half>(plan, x, wide, stream);
    else
        launch_for<__nv_bfloat16>(plan, x, wide, stream);
    return launch_check(dev, "averaging tokens");
}

esa_status error_mend_launch(esa_cuda_device *dev, const error_job &x, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div<int64_t>((int64_t)x.B * x.Hq * x.rows, MEND_WARPS);
    if (x.group_k == 1) return ESA_OK;
    if (x.dtype == ESA_DTYPE_F32)
        mend_kernel<float><<<grid, MEND_WARPS * 32, 0, stream>>>(x);
    else if (x.dtype == ESA_DTYPE_F16)
        mend_kernel<__half><<<grid, MEND_WARPS * 32, 0, stream>>>(x);
    else
        mend_kernel<__nv_bfloat16><<<grid, MEND_WARPS * 32, 0, stream>>>(x);
    return launch_check(dev, "correcting the last group");
}
