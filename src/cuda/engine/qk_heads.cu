// qk_heads.cu - norms of single heads of q and k (RMS or layer), and the rotation of every head, in
// place and in one launch: any head up to ESA_QK_MAX_D. Llama only rotates. qk_pieces.cu takes the
// heads of CogVideoX and HunyuanVideo.
// SPDX-License-Identifier: Apache-2.0
//
// A warp holds one head of one row: lane l has the pairs l, l + 32, ... A pair is the channels 2i
// and 2i+1, or i and i + D/2. Every byte is read and written once; 8 warps of a thread block hold
// neighbouring heads. blockIdx.y is 0 for q, 1 for k.
#include "base/nn_args.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

enum { WARPS = 8, PAIRS = ESA_QK_MAX_D / 64 };

// Two neighbouring elements.
__device__ __forceinline__ void load_pair(float (&x)[2], const float *at)
{
    const float2 v = *(const float2 *)at;
    x[0] = v.x, x[1] = v.y;
}
__device__ __forceinline__ void load_pair(float (&x)[2], const __nv_bfloat16 *at)
{
    const float2 v = __bfloat1622float2(*(const __nv_bfloat162 *)at);
    x[0] = v.x, x[1] = v.y;
}
__device__ __forceinline__ void store_pair(float *at, const float (&x)[2])
{
    *(float2 *)at = make_float2(x[0], x[1]);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16 *at, const float (&x)[2])
{
    *(__nv_bfloat162 *)at = __floats2bfloat162_rn(x[0], x[1]);
}

// VECTOR: pairs are neighbours and begin at multiples of their size.
template <class T, bool VECTOR>
__global__ void __launch_bounds__(32 * WARPS)
    heads_kernel(const __grid_constant__ esa_qk_args a, int norm)
{
    const esa_view &view = blockIdx.y ? a.k : a.q;
    const float *weight = blockIdx.y ? a.k_weight : a.q_weight,
                *bias = blockIdx.y ? a.k_bias : a.q_bias;
    const int D = (int)a.D, half = D / 2, lane = threadIdx.x % 32;
    const int64_t heads = view.cols / D, at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
                  r = at / heads;
    if (r >= view.rows) return; // a whole warp
    T *const head = (T *)view.data + r * view.ld + at % heads * D;
    float x[PAIRS][2], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const int i = p * 32 + lane;
        x[p][0] = x[p][1] = 0.0f;
        if (i >= half) continue;
        if constexpr (VECTOR)
            load_pair(x[p], head + 2 * i);
        else
            for (int e = 0; e < 2; ++e)
                x[p][e] = to_float(head[a.halves ? i + e * half : 2 * i + e]);
        sum += x[p][0] + x[p][1];
    }
    const float mean = norm == ESA_QK_HEAD_LAYER ? lanes_sum<32>(sum) / (float)D : 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
        if (p * 32 + lane < half)
#pragma unroll
            for (int e = 0; e < 2; ++e) x[p][e] -= mean, squares += x[p][e] * x[p][e];
    const float factor = 1.0f / sqrtf(lanes_sum<32>(squares) / (float)D + a.eps);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const int i = p * 32 + lane;
        if (i >= half) continue;
        const int channel[2] = { a.halves ? i : 2 * i, a.halves ? i + half : 2 * i + 1 };
        if (norm != ESA_QK_NONE)
#pragma unroll
            for (int e = 0; e < 2; ++e) x[p][e] = x[p][e] * factor * __ldg(weight + channel[e]);
        if (norm == ESA_QK_HEAD_LAYER)
#pragma unroll
            for (int e = 0; e < 2; ++e) x[p][e] += __ldg(bias + channel[e]);
        if (a.cos) {
            const float co = __ldg(a.cos + r * half + i), si = __ldg(a.sin + r * half + i),
                        one = x[p][0], two = x[p][1];
            x[p][0] = one * co - two * si;
            x[p][1] = one * si + two * co;
        }
        if constexpr (VECTOR)
            store_pair(head + 2 * i, x[p]);
        else
#pragma unroll
            for (int e = 0; e < 2; ++e) round_to(head + channel[e], x[p][e]);
    }
}

bool in_pairs(const esa_view &v)
{
    return !v.data || ((uintptr_t)v.data % (2 * esa_view_element(v.dtype)) == 0 && v.ld % 2 == 0);
}

template <class T> void launch(const esa_qk_args &a, dim3 grid, cudaStream_t stream)
{
    if (!a.halves && in_pairs(a.q) && in_pairs(a.k))
        heads_kernel<T, true><<<grid, 32 * WARPS, 0, stream>>>(a, a.norm);
    else
        heads_kernel<T, false><<<grid, 32 * WARPS, 0, stream>>>(a, a.norm);
}

} // namespace

esa_status qk_heads_run(esa_cuda_device *dev, const esa_qk_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_qk_args &a = *args;
    const int64_t q = a.q.rows * (a.q.cols / a.D), k = a.k.data ? a.k.rows * (a.k.cols / a.D) : 0,
                  blocks = ceil_div(q > k ? q : k, (int64_t)WARPS);
    if (blocks < 1) return ESA_OK;
    if (a.norm == ESA_QK_ALL || a.D > ESA_QK_MAX_D || blocks > 0x7fffffff)
        return device_fail(
            dev, ESA_ERR_UNSUPPORTED,
            "a norm of %lld heads of dimension %lld, the GPU takes up to %d channels "
            "and one norm for each head",
            (long long)(q > k ? q : k), (long long)a.D, ESA_QK_MAX_D);
    if (qk_pieces_takes(args)) return qk_pieces_run(dev, args, stream);
    const dim3 grid((unsigned)blocks, a.k.data ? 2 : 1);
    if (a.q.dtype == ESA_DTYPE_BF16)
        launch<__nv_bfloat16>(a, grid, (cudaStream_t)stream);
    else
        launch<float>(a, grid, (cudaStream_t)stream);
    return launch_check(dev, "norm of heads");
}
