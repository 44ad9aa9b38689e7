// qk.cu - RMS norm of q and k over the whole row, then the rotation of every head, in place and in
// one launch.
// SPDX-License-Identifier: Apache-2.0
//
// For N rows of d BF16 columns it reads and writes q and k once, 8 N d bytes, and reads the tables,
// 4 N D bytes for each of the two. Channels 2i and 2i+1 of a head turn by the angle of column i of
// the tables. blockIdx.y is 0 for q, 1 for k.
#include "cuda/engine/rows.cuh"

namespace
{

using namespace rows;

// Rotates the pairs of one piece that starts at channel c.
template <int W>
__device__ __forceinline__ void rotate(float (&x)[W], int c, const float *cosine, const float *sine,
                                       int D)
{
    float co[W / 2], si[W / 2];
    const int first = c % D;
    if (W == 8 && D % 8 == 0) { // all pairs are in one head, and the tables are aligned
        const float4 a = __ldg((const float4 *)(cosine + first / 2)),
                     b = __ldg((const float4 *)(sine + first / 2));
        const float four_co[4] = { a.x, a.y, a.z, a.w }, four_si[4] = { b.x, b.y, b.z, b.w };
#pragma unroll
        for (int i = 0; i < W / 2; ++i) co[i] = four_co[i % 4], si[i] = four_si[i % 4];
    } else {
#pragma unroll
        for (int i = 0; i < W / 2; ++i) {
            const int at = (first + 2 * i) % D / 2;
            co[i] = __ldg(cosine + at), si[i] = __ldg(sine + at);
        }
    }
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
        const float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * co[i] - odd * si[i];
        x[2 * i + 1] = even * si[i] + odd * co[i];
    }
}

template <class T, int LANES, int PIECES, int W>
__global__ void __launch_bounds__(team_threads<LANES>())
    qk_kernel(const __grid_constant__ esa_qk_args a)
{
    __shared__ float room[32];
    const esa_view &view = blockIdx.y ? a.k : a.q;
    const float *weight = blockIdx.y ? a.k_weight : a.q_weight;
    const int64_t r = team_row<LANES>();
    if (r >= view.rows) return; // a whole team: a thread block with larger teams has one row
    const int cols = (int)view.cols, D = (int)a.D;
    T *const x = (T *)view.data + r * view.ld;
    row<T, LANES, PIECES, W> v;
    v.load(x, cols);
    float squares = 0.0f;
    v.each(cols, [&](float(&e)[W], int) {
#pragma unroll
        for (int i = 0; i < W; ++i) squares += e[i] * e[i];
    });
    const float factor = 1.0f / sqrtf(team_fold<LANES, false>(squares, room) / (float)cols + a.eps);
    const float *cosine = a.cos ? a.cos + r * (D / 2) : nullptr,
                *sine = a.cos ? a.sin + r * (D / 2) : nullptr;
    v.each(cols, [&](float(&e)[W], int c) {
        float w[W];
        read_vector(w, weight + c);
#pragma unroll
        for (int i = 0; i < W; ++i) e[i] = e[i] * factor * w[i];
        if (cosine) rotate(e, c, cosine, sine, D);
    });
    v.store(x, cols);
}

struct qk_launch {
    const esa_qk_args &a;
    cudaStream_t stream;
    template <class T, int LANES, int PIECES, int W> void run(unsigned blocks) const
    {
        const dim3 grid(blocks, a.k.data ? 2 : 1);
        qk_kernel<T, LANES, PIECES, W><<<grid, team_threads<LANES>(), 0, stream>>>(a);
    }
};

} // namespace

esa_status qk_run(esa_cuda_device *dev, const esa_qk_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_qk_args &a = *args;
    if (a.norm != ESA_QK_ALL || a.halves) return qk_heads_run(dev, args, stream);
    const esa_status status = check_rows(dev, a.q, "a norm of q and k");
    if (status || a.q.rows < 1 || a.q.cols < 1) return status;
    const bool in_eights = wide(a.q) && wide(a.k) && wide(a.q_weight) && wide(a.k_weight) &&
                           wide(a.cos) && wide(a.sin);
    const int64_t rows = a.k.data && a.k.rows > a.q.rows ? a.k.rows : a.q.rows;
    const qk_launch launch = { a, (cudaStream_t)stream };
    // Pieces of 2 elements hold whole pairs, because D is even.
    if (a.q.dtype == ESA_DTYPE_BF16)
        choose_team<2, __nv_bfloat16>(a.q.cols, rows, in_eights, launch);
    else
        choose_team<2, float>(a.q.cols, rows, in_eights, launch);
    return launch_check(dev, "norm of q and k");
}
