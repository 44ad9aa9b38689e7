// qk_pieces.cu - norms of single heads of q and k and the rotation of neighbouring channels, as
// qk_heads.cu does them, for heads of 64 or 128 channels in BF16 that begin at multiples of 16
// bytes: CogVideoX and HunyuanVideo.
// SPDX-License-Identifier: Apache-2.0
//
// A lane holds a piece of 8 channels of q and the same piece of k, 16 bytes each, so 8 or 16 lanes
// hold a head. The rotation is the same for q and k and is read once. EACH rows follow one another
// in a thread; all loads of a thread are issued before the first is used.
#include "base/nn_args.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

enum { THREADS = 256, EACH = 2 };

// Norm of a head, then times weight plus bias; w and b are NULL where there is none.
template <int LANES>
__device__ __forceinline__ void norm_head(float (&x)[8], const float *w, const float *b, int first,
                                          int norm, float eps)
{
    constexpr float INVERSE = 1.0f / (8 * LANES);
    if (norm == ESA_QK_NONE) return;
    if (norm == ESA_QK_HEAD_LAYER) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i];
        const float mean = lanes_sum<LANES>(sum) * INVERSE;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] -= mean;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float factor = 1.0f / sqrtf(lanes_sum<LANES>(squares) * INVERSE + eps);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 times = __ldg((const float4 *)(w + first + i));
        x[i] *= factor * times.x, x[i + 1] *= factor * times.y;
        x[i + 2] *= factor * times.z, x[i + 3] *= factor * times.w;
        if (norm != ESA_QK_HEAD_LAYER) continue;
        const float4 plus = __ldg((const float4 *)(b + first + i));
        x[i] += plus.x, x[i + 1] += plus.y, x[i + 2] += plus.z, x[i + 3] += plus.w;
    }
}

__device__ __forceinline__ void rotate(float (&x)[8], const float4 &co, const float4 &si)
{
    const float c[4] = { co.x, co.y, co.z, co.w }, s[4] = { si.x, si.y, si.z, si.w };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * c[i] - odd * s[i];
        x[2 * i + 1] = even * s[i] + odd * c[i];
    }
}

__device__ __forceinline__ uint4 rounded(const float (&x)[8])
{
    return make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]), pack2<bf16>(x[4], x[5]),
                      pack2<bf16>(x[6], x[7]));
}

// LANES: of a head. pieces: of a row. Thread i has piece i % pieces of the rows EACH (i / pieces)
// and those that follow.
template <int LANES>
__global__ void __launch_bounds__(THREADS)
    pieces_kernel(const __grid_constant__ esa_qk_args a, int pieces, int64_t threads)
{
    const int64_t mine = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  // Lanes past the last take part in the sums.
        at = mine < threads ? mine : threads - 1, first = at / pieces * EACH;
    const int column = (int)(at % pieces) * 8, channel = column % (8 * LANES);
    const esa_view *const view[2] = { &a.q, &a.k };
    const float *const weight[2] = { a.q_weight, a.k_weight }, *const bias[2] = { a.q_bias,
                                                                                  a.k_bias };
    packed<bf16> raw[EACH][2];
    float4 co[EACH], si[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int64_t r = first + e;
        const bool exists = r < a.q.rows;
#pragma unroll
        for (int side = 0; side < 2; ++side)
            if (exists && view[side]->data)
                raw[e][side].words = __ldcs(
                    (const uint4 *)((const bf16 *)view[side]->data + r * view[side]->ld + column));
            else
                raw[e][side].words = make_uint4(0, 0, 0, 0);
        if (exists && a.cos) {
            co[e] = __ldg((const float4 *)(a.cos + r * (4 * LANES) + channel / 2));
            si[e] = __ldg((const float4 *)(a.sin + r * (4 * LANES) + channel / 2));
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (!view[side]->data) continue;
            float x[8];
            raw[e][side].unpack(x);
            norm_head<LANES>(x, weight[side], bias[side], channel, a.norm, a.eps);
            if (a.cos) rotate(x, co[e], si[e]);
            if (mine < threads && first + e < a.q.rows)
                *(uint4 *)((bf16 *)view[side]->data + (first + e) * view[side]->ld +
                           column) = rounded(x);
        }
}

bool in_pieces(const esa_view &v)
{
    return !v.data || ((uintptr_t)v.data % 16 == 0 && v.ld % 8 == 0);
}
bool in_fours(const float *vector) { return (uintptr_t)vector % 16 == 0; }

} // namespace

bool qk_pieces_takes(const esa_qk_args *a)
{
    return a->norm != ESA_QK_ALL && !a->halves && a->q.dtype == ESA_DTYPE_BF16 &&
           (a->D == 64 || a->D == 128) && in_pieces(a->q) && in_pieces(a->k) &&
           (!a->k.data || (a->k.rows == a->q.rows && a->k.cols == a->q.cols)) &&
           in_fours(a->q_weight) && in_fours(a->k_weight) && in_fours(a->q_bias) &&
           in_fours(a->k_bias) && in_fours(a->cos) && in_fours(a->sin);
}

esa_status qk_pieces_run(esa_cuda_device *dev, const esa_qk_args *a, void *stream)
{
    const current_device scope(dev->ordinal);
    const int pieces = (int)(a->q.cols / 8);
    const int64_t threads = ceil_div(a->q.rows, (int64_t)EACH) * pieces,
                  blocks = ceil_div(threads, (int64_t)THREADS);
    if (blocks < 1) return ESA_OK;
    if (a->D == 64)
        pieces_kernel<8>
            <<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(*a, pieces, threads);
    else
        pieces_kernel<16>
            <<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(*a, pieces, threads);
    return launch_check(dev, "norm of heads");
}
