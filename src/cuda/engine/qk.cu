// qk.cu - RMS norm of q and k over the whole row, then the rotation of every head, in place. One
// launch takes both if they have the same size.
// SPDX-License-Identifier: Apache-2.0
//
// For N rows of d BF16 columns it reads and writes q and k once, 8 N d bytes, and reads the tables,
// 4 N D bytes for the two. Channels 2i and 2i+1 of a head turn by the angle of column i of the
// tables. A team holds row r of q and row r of k, so that twice as many bytes are in flight and
// both read the angles once.
#include "cuda/engine/rows.cuh"

namespace
{

using namespace rows;

// The angles of one piece that starts at channel c.
template <int W> struct turn {
    float co[W / 2], si[W / 2];

    __device__ __forceinline__ turn(int c, const float *cosine, const float *sine, int D)
    {
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
    }
    __device__ __forceinline__ void apply(float (&x)[W]) const
    {
#pragma unroll
        for (int i = 0; i < W / 2; ++i) {
            const float even = x[2 * i], odd = x[2 * i + 1];
            x[2 * i] = even * co[i] - odd * si[i];
            x[2 * i + 1] = even * si[i] + odd * co[i];
        }
    }
};

// The sums of both sides over the team. room: [2][32], as for team_fold; used once by a kernel.
template <int LANES, int SIDES>
__device__ __forceinline__ void fold_sides(float (&x)[SIDES], float (*room)[32])
{
#pragma unroll
    for (int side = 0; side < SIDES; ++side) x[side] = lanes_sum<32>(x[side]);
    if constexpr (LANES > 32) {
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int side = 0; side < SIDES; ++side) room[side][warp] = x[side];
        __syncthreads();
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            x[side] = room[side][0];
#pragma unroll
            for (int w = 1; w < LANES / 32; ++w) x[side] += room[side][w];
        }
    }
}

template <int SIDES> struct qk_job {
    esa_view view[SIDES];
    const float *weight[SIDES];
    const float *cos, *sin;
    int D;
    float eps;
};

template <class T, int LANES, int PIECES, int W, int SIDES>
__global__ void __launch_bounds__(team_threads<LANES>())
    qk_kernel(const __grid_constant__ qk_job<SIDES> job)
{
    __shared__ float room[2][32];
    const int64_t r = team_row<LANES>();
    if (r >= job.view[0].rows) return; // a whole team: a thread block with larger teams has one row
    const int cols = (int)job.view[0].cols, D = job.D;
    using part = row<T, LANES, PIECES, W>;
    T *at[SIDES];
    piece<T, W> raw[SIDES][PIECES]; // as loaded: f32 would take twice the registers
    float factor[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
        at[side] = (T *)job.view[side].data + r * job.view[side].ld;
        part::fetch(raw[side], at[side], cols);
    }
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
        factor[side] = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (part::column(p) >= cols) continue;
            float x[W];
            unpack(x, raw[side][p]);
#pragma unroll
            for (int i = 0; i < W; ++i) factor[side] += x[i] * x[i];
        }
    }
    fold_sides<LANES>(factor, room);
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
        factor[side] = 1.0f / sqrtf(factor[side] / (float)cols + job.eps);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int c = part::column(p);
        if (c >= cols) continue;
        float x[SIDES][W];
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            float w[W];
            unpack(x[side], raw[side][p]);
            read_vector(w, job.weight[side] + c);
#pragma unroll
            for (int i = 0; i < W; ++i) x[side][i] = x[side][i] * factor[side] * w[i];
        }
        if (job.cos) {
            const turn<W> angles(c, job.cos + r * (D / 2), job.sin + r * (D / 2), D);
#pragma unroll
            for (int side = 0; side < SIDES; ++side) angles.apply(x[side]);
        }
#pragma unroll
        for (int side = 0; side < SIDES; ++side) store_piece(at[side] + c, x[side]);
    }
}

template <int SIDES> struct qk_launch {
    static constexpr int WIDE_LANES = 128, WIDE_PIECES = 5;
    const qk_job<SIDES> &job;
    cudaStream_t stream;
    template <class T, int LANES, int PIECES, int W> void run(unsigned blocks) const
    {
        qk_kernel<T, LANES, PIECES, W, SIDES><<<blocks, team_threads<LANES>(), 0, stream>>>(job);
    }
};

template <int SIDES> void start(const qk_job<SIDES> &job, bool in_eights, cudaStream_t stream)
{
    const esa_view &x = job.view[0];
    const qk_launch<SIDES> launch = { job, stream };
    if (x.rows < 1) return;
    // Pieces of 2 elements hold whole pairs, because D is even.
    if (x.dtype == ESA_DTYPE_BF16)
        choose_team<2, __nv_bfloat16>(x.cols, x.rows, in_eights, launch);
    else
        choose_team<2, float>(x.cols, x.rows, in_eights, launch);
}

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
    const cudaStream_t on = (cudaStream_t)stream;
    if (a.k.data && a.k.rows == a.q.rows && a.k.cols == a.q.cols) {
        const qk_job<2> both = { { a.q, a.k }, { a.q_weight, a.k_weight }, a.cos, a.sin, (int)a.D,
                                 a.eps };
        start(both, in_eights, on);
    } else {
        const qk_job<1> q = { { a.q }, { a.q_weight }, a.cos, a.sin, (int)a.D, a.eps },
                        k = { { a.k }, { a.k_weight }, a.cos, a.sin, (int)a.D, a.eps };
        start(q, in_eights, on);
        if (a.k.data) start(k, in_eights, on);
    }
    return launch_check(dev, "norm of q and k");
}
