// conv_mma.cu - convolutions on the tensor cores that every GPU since Ampere has.
// SPDX-License-Identifier: Apache-2.0
//
// conv_tile.cuh describes the tile of a thread block. Each step of the loop asks for its copies as
// one group: step s waits for the groups up to s, then asks for what step s + STAGES - 1 needs. A
// product of 256 pixels, 96 channels in and 96 out reads 62 KB of pixels for nine taps and 18 KB of
// weights for each tap: about 190 operations for a byte.
#include "cuda/engine/conv_tile.cuh"

namespace
{

using conv::THREADS;
using conv::tile;
using conv::TW;
using conv::WARPS;

// SIDE: taps in each direction.
template <int SIDE_, int TH_, int N_, int KC_> struct shape {
    static constexpr int SIDE = SIDE_, TH = TH_, N = N_, KC = KC_, TAPS = SIDE * SIDE;
    // Stages of weights, and buffers of pixels. A buffer is filled STAGES - 1 steps before its
    // first use, when the steps of the group that had it are over.
    static constexpr int STAGES = TAPS == 1 ? 3 : 4, BUFFERS = TAPS == 1 ? STAGES : 2;
    static_assert((BUFFERS - 1) * TAPS >= STAGES - 1, "a buffer is free when it is filled");
    static constexpr int HALO_W = TW + SIDE - 1, HALO = HALO_W * (TH + SIDE - 1);
    static constexpr int PIECES = KC / 8;
    static constexpr bool VECTORS = false;
    static constexpr int BUFFER = (HALO * KC * 2 + 127) / 128 * 128, STAGE = N * KC * 2;
    static constexpr int BYTES = BUFFERS * BUFFER + STAGES * STAGE;
    // Warps beside one another in pixels and in channels; rows and eights of channels of a warp.
    static constexpr int WN = N % 32 == 0 ? 2 : 1, WM = WARPS / WN, MT = TH / WM, NT = N / WN / 8;
    static_assert(TH % WM == 0 && NT % 2 == 0 && KC % 16 == 0, "whole fragments");
    // Two thread blocks of a multiprocessor hide each other's waits where registers allow it.
    static constexpr int BLOCKS = MT <= 2 && BYTES <= 100 << 10 ? 2 : 1;
};

// Asks for what a step needs first.
template <class S> DEV void issue(const conv::loader<S> &load, int step, int steps)
{
    if (step < steps) {
        if (step % S::TAPS == 0) load.template pixels<1>(step / S::TAPS, 0);
        load.weights(step);
    }
    copy_commit();
}

// The sums of a warp: MT rows of 16 pixels times NT eights of channels.
template <class S> struct sums {
    float d[S::MT][S::NT][4];

    __device__ __forceinline__ void add(uint32_t pixels, uint32_t weights, int tap, int warp,
                                        int lane)
    {
        const int row = warp / S::WN * S::MT + tap / S::SIDE, column = lane % 16 + tap % S::SIDE;
        uint32_t a_row[S::MT];
        int a_turn[S::MT];
#pragma unroll
        for (int m = 0; m < S::MT; ++m) {
            const int p = (row + m) * S::HALO_W + column;
            a_row[m] = pixels + p * S::KC * 2;
            a_turn[m] = lane / 16 ^ conv::twist<S::KC>(p);
        }
        const int n = warp % S::WN * (S::NT * 8) + lane / 16 * 8 + lane % 8,
                  b_turn = lane / 8 % 2 ^ conv::twist<S::KC>(n);
        const uint32_t b_row = weights + n * S::KC * 2;
        // Fragments are read one step ahead of the products that use them.
        uint32_t a[2][S::MT][4], b[2][S::NT / 2][4];
        const auto read = [&](int k) {
#pragma unroll
            for (int m = 0; m < S::MT; ++m)
                load_matrices(a[k % 2][m], a_row[m] + conv::along<S::KC>(a_turn[m], k));
#pragma unroll
            for (int i = 0; i < S::NT / 2; ++i)
                load_matrices(b[k % 2][i],
                              b_row + i * 16 * S::KC * 2 + conv::along<S::KC>(b_turn, k));
        };
        read(0);
#pragma unroll
        for (int k = 0; k < S::KC / 16; ++k) {
            if (k + 1 < S::KC / 16) read(k + 1);
#pragma unroll
            for (int m = 0; m < S::MT; ++m)
#pragma unroll
                for (int i = 0; i < S::NT; ++i)
                    multiply_add<bf16>(d[m][i], a[k % 2][m], b[k % 2][i / 2][i % 2 * 2],
                                       b[k % 2][i / 2][i % 2 * 2 + 1]);
        }
    }

    __device__ __forceinline__ void store(const conv::job &job, const tile &t, int warp,
                                          int lane) const
    {
#pragma unroll
        for (int m = 0; m < S::MT; ++m)
            conv::store_row<S::SIDE>(job, t, d[m], warp / S::WN * S::MT + m,
                                     t.n * S::N + warp % S::WN * (S::NT * 8), lane);
    }
};

template <class S>
__global__ void __launch_bounds__(THREADS, S::BLOCKS)
    conv_kernel(const __grid_constant__ conv::job job)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const tile t(job, S::TH);
    const conv::loader<S> load = { job, t, smem_addr(raw) };
    const int steps = job.frames * job.groups * S::TAPS;
    for (int i = 0; i < S::STAGES - 1; ++i) issue(load, i, steps);
    sums<S> all;
#pragma unroll
    for (int m = 0; m < S::MT; ++m)
#pragma unroll
        for (int n = 0; n < S::NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) all.d[m][n][e] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        copy_wait<S::STAGES - 2>();
        __syncthreads(); // the copies of all threads, and the end of the step before
        issue(load, step + S::STAGES - 1, steps);
        all.add(load.buffer(step / S::TAPS), load.stage(step), step % S::TAPS, warp, lane);
    }
    copy_wait<0>();
    all.store(job, t, warp, lane);
}

template <int SIDE, int TH, int N, int KC>
esa_status launch(esa_cuda_device *dev, const conv::plan &p, conv::job &job, cudaStream_t stream)
{
    using S = shape<SIDE, TH, N, KC>;
    return conv::launch_tiles(dev, p, job, conv_kernel<S>, TH, THREADS, S::BYTES, stream);
}

template <int SIDE>
esa_status launch_side(esa_cuda_device *dev, const conv::plan &p, conv::job &job,
                       cudaStream_t stream)
{
    if (p.KC == 16) return launch<SIDE, 8, 96, 16>(dev, p, job, stream);
    if (p.KC == 48) return launch<SIDE, 8, 96, 48>(dev, p, job, stream);
    if constexpr (SIDE == 3)
        if (p.N == 16)
            return p.KC == 64 ? launch<SIDE, 16, 16, 64>(dev, p, job, stream)
                              : launch<SIDE, 16, 16, 96>(dev, p, job, stream);
    if (p.KC == 64)
        return conv::tall_tiles(dev, p, job) ? launch<SIDE, 16, 128, 64>(dev, p, job, stream)
                                             : launch<SIDE, 8, 128, 64>(dev, p, job, stream);
    if (conv::tall_tiles(dev, p, job)) return launch<SIDE, 16, 96, 96>(dev, p, job, stream);
    return launch<SIDE, 8, 96, 96>(dev, p, job, stream);
}

} // namespace

esa_status conv_mma_launch(esa_cuda_device *dev, const conv::plan &p, conv::job job,
                           cudaStream_t stream)
{
    if (p.side == 1) return launch_side<1>(dev, p, job, stream);
    if (p.side == 2) return launch_side<2>(dev, p, job, stream);
    return launch_side<3>(dev, p, job, stream);
}
