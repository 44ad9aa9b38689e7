// norm.cu - gate and residual, then layer norm or RMS norm with modulation, in one pass.
// SPDX-License-Identifier: Apache-2.0
//
// For N rows of d BF16 columns the full operation reads x and add and writes x and y, 8 N d bytes.
// The vectors over columns stay in the first-level cache. Mean and variance are computed in two
// passes over the registers, as on the CPU.
#include "cuda/engine/rows.cuh"

namespace
{

using namespace rows;

// x += gate * add for one row, rounded to T, stored and kept.
template <class T, int LANES, int PIECES, int W>
__device__ __forceinline__ void add_row(row<T, LANES, PIECES, W> &v, const esa_norm_args &a,
                                        int64_t r)
{
    const int cols = (int)a.x.cols;
    T *const x = (T *)a.x.data + r * a.x.ld;
    piece<T, W> raw_x[PIECES], raw_add[PIECES];
    v.fetch(raw_x, x, cols);
    v.fetch(raw_add, (const T *)a.add.data + r * a.add.ld, cols);
    v.set(raw_x, cols);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int c = v.column(p);
        if (c >= cols) continue;
        float add[W], gate[W];
        unpack(add, raw_add[p]);
        if (a.gate) {
            read_vector(gate, a.gate + c);
#pragma unroll
            for (int i = 0; i < W; ++i) add[i] *= gate[i];
        }
#pragma unroll
        for (int i = 0; i < W; ++i) {
            T stored;
            round_to(&stored, v.x[p][i] + add[i]);
            v.x[p][i] = to_float(stored);
        }
    }
    v.store(x, cols);
}

// v = (v - mean) * factor, with mean 0 for RMS.
template <class T, int LANES, int PIECES, int W>
__device__ __forceinline__ void normalise(row<T, LANES, PIECES, W> &v, int cols, bool layer,
                                          float eps, float *room)
{
    float sum = 0.0f, mean = 0.0f, squares = 0.0f;
    if (layer) {
        v.each(cols, [&](float(&x)[W], int) {
#pragma unroll
            for (int i = 0; i < W; ++i) sum += x[i];
        });
        mean = team_fold<LANES, false>(sum, room) / (float)cols;
    }
    v.each(cols, [&](float(&x)[W], int) {
#pragma unroll
        for (int i = 0; i < W; ++i) {
            x[i] -= mean;
            squares += x[i] * x[i];
        }
    });
    const float factor = 1.0f / sqrtf(team_fold<LANES, false>(squares, room) / (float)cols + eps);
    v.each(cols, [&](float(&x)[W], int) {
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] *= factor;
    });
}

// x = x * (one + factor) + term; vectors may be null.
template <int W>
__device__ __forceinline__ void modulate(float (&x)[W], const float *factor, float one,
                                         const float *term, int c)
{
    float f[W], t[W];
    if (factor) {
        read_vector(f, factor + c);
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] *= one + f[i];
    }
    if (term) {
        read_vector(t, term + c);
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] += t[i];
    }
}

template <class T, int LANES, int PIECES, int W>
__global__ void __launch_bounds__(team_threads<LANES>())
    norm_kernel(const __grid_constant__ esa_norm_args a)
{
    __shared__ float room[32];
    const int64_t r = team_row<LANES>();
    if (r >= a.x.rows) return; // a whole team: a thread block with larger teams has one row
    const int cols = (int)a.x.cols;
    row<T, LANES, PIECES, W> v;
    if (a.add.data)
        add_row(v, a, r);
    else
        v.load((const T *)a.x.data + r * a.x.ld, cols);
    if (a.norm == ESA_NORM_NONE) return;
    normalise(v, cols, a.norm == ESA_NORM_LAYER, a.eps, room);
    v.each(cols, [&](float(&x)[W], int c) {
        modulate(x, a.weight, 0.0f, a.bias, c);
        modulate(x, a.scale, 1.0f, a.shift, c);
    });
    store_row(a.y, r, v, room);
}

struct norm_launch {
    static constexpr int WIDE_LANES = 224, WIDE_PIECES = 3;
    const esa_norm_args &a;
    cudaStream_t stream;
    template <class T, int LANES, int PIECES, int W> void run(unsigned blocks) const
    {
        norm_kernel<T, LANES, PIECES, W><<<blocks, team_threads<LANES>(), 0, stream>>>(a);
    }
};

} // namespace

esa_status norm_run(esa_cuda_device *dev, const esa_norm_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_norm_args &a = *args;
    const esa_status status = check_rows(dev, a.x, "a norm");
    if (status || a.x.rows < 1 || a.x.cols < 1) return status;
    const bool in_eights = wide(a.x) && wide(a.y) && wide(a.add) && wide(a.gate) &&
                           wide(a.weight) && wide(a.bias) && wide(a.scale) && wide(a.shift);
    const norm_launch launch = { a, (cudaStream_t)stream };
    if (a.x.dtype == ESA_DTYPE_BF16)
        choose_team<1, __nv_bfloat16>(a.x.cols, a.x.rows, in_eights, launch);
    else
        choose_team<1, float>(a.x.cols, a.x.rows, in_eights, launch);
    return launch_check(dev, "norm");
}
