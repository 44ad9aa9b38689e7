// sm90_conv.cu - convolutions on Hopper's tensor cores: wgmma with pixels from registers and
// weights from shared memory.
// SPDX-License-Identifier: Apache-2.0
//
// conv_tile.cuh describes the tile of a thread block. Two warpgroups have half of its rows each,
// and each product covers 64 pixels (four rows of 16, one for each warp) and all 96 output
// channels. Fragments of pixels come by ldmatrix, so a tap is a shift of addresses here too; a
// descriptor of shared memory cannot shift rows by one.
//
// The products of a step run while the next step waits for its copies and reads its fragments:
// there are two sets of fragments, and a step only waits for the products of the step before it. So
// what step s asks for may replace what step s - 2 used. The pixels of the next group of channels
// come in parts, one with each tap, so that copies are even.
#include "cuda/engine/conv_tile.cuh"
#include "cuda/runtime/sm90_ptx.cuh"

namespace
{

using conv::THREADS;
using conv::tile;
using conv::TW;

constexpr int AHEAD = 2; // steps between asking and using

template <int SIDE_, int TH_> struct shape {
    static constexpr int SIDE = SIDE_, TH = TH_, N = 96, KC = 96, TAPS = SIDE * SIDE;
    static constexpr int STAGES = AHEAD + 2, BUFFERS = TAPS == 1 ? AHEAD + 1 : 2;
    // Parts of the pixels of a group. The last comes AHEAD steps before its use.
    static constexpr int PARTS = TAPS == 1 ? 1 : TAPS - AHEAD + 1;
    static constexpr int HALO_W = TW + SIDE - 1, HALO = HALO_W * (TH + SIDE - 1);
    static constexpr int PIECES = KC / 8;
    // A call for single elements would have to wait for all products.
    static constexpr bool VECTORS = true;
    static constexpr int BUFFER = (HALO * KC * 2 + 127) / 128 * 128, STAGE = N * KC * 2;
    static constexpr int BYTES = BUFFERS * BUFFER + STAGES * STAGE;
    static constexpr int MT = TH / 8, STEPS = KC / 16; // products of 64 rows, of 16 channels
    static_assert(BYTES <= 227 << 10, "what a thread block can have");
};

template <class S> struct team {
    const conv::loader<S> &load;
    const int steps, warp, lane;
    float d[S::MT][S::N / 8][4];
    uint32_t a[2][S::MT * S::STEPS * 4]; // fragments of this step and of the one before

    __device__ __forceinline__ float (&sums(int m))[S::N / 2]
    {
        return reinterpret_cast<float(&)[S::N / 2]>(d[m]);
    }
    // The row of the tile that this warp has in product m.
    __device__ __forceinline__ int row(int m) const
    {
        return (warp / 4 * S::MT + m) * 4 + warp % 4;
    }

    // Asks for what step + AHEAD needs, and for a part of the next pixels.
    __device__ __forceinline__ void ask(int step) const
    {
        const int later = step + AHEAD;
        if (later < steps) load.weights(later);
        if (S::TAPS == 1) {
            if (later < steps) load.template pixels<1>(later, 0);
        } else if (step % S::TAPS < S::PARTS && (step / S::TAPS + 1) * S::TAPS < steps) {
            load.template pixels<S::PARTS>(step / S::TAPS + 1, step % S::TAPS);
        }
        copy_commit();
    }

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int m = 0; m < S::MT; ++m)
#pragma unroll
            for (int i = 0; i < S::N / 2; ++i) sums(m)[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < S::MT * S::STEPS * 4; ++i) a[0][i] = a[1][i] = 0;
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (s < steps) load.weights(s);
            if (s < steps && (S::TAPS == 1 || s == 0)) load.template pixels<1>(s, 0);
            copy_commit();
        }
    }

    // Fragments of the pixels that the tap of this step reads.
    template <int SET> __device__ __forceinline__ void read(int step)
    {
        const uint32_t pixels = load.buffer(step / S::TAPS);
        const int tap = step % S::TAPS, dy = tap / S::SIDE, dx = tap % S::SIDE;
#pragma unroll
        for (int m = 0; m < S::MT; ++m) {
            const int p = (row(m) + dy) * S::HALO_W + lane % 16 + dx;
            const int half = lane / 16 ^ conv::twist<S::KC>(p);
            const uint32_t at = pixels + p * S::KC * 2;
#pragma unroll
            for (int k = 0; k < S::STEPS; ++k) {
                uint32_t r[4];
                load_matrices(r, at + conv::along<S::KC>(half, k));
#pragma unroll
                for (int i = 0; i < 4; ++i) a[SET][(m * S::STEPS + k) * 4 + i] = r[i];
            }
        }
    }

    template <int SET> __device__ __forceinline__ void run(int step)
    {
        copy_wait<AHEAD - 1>();
        proxy_fence();   // the tensor cores will see the copies of this thread
        __syncthreads(); // and those of the others; all products of step - 2 are done
        ask(step);
        read<SET>(step);
        const uint64_t weights = wgmma_plain_desc(load.stage(step), S::N * 16, 128);
#pragma unroll
        for (int m = 0; m < S::MT; ++m) wgmma_pin(sums(m));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; ++k)
#pragma unroll
            for (int m = 0; m < S::MT; ++m)
                wgmma_rs_kmajor(sums(m), &a[SET][(m * S::STEPS + k) * 4],
                                weights + (k * S::N * 32 >> 4));
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_pin(a[1 - SET]); // now they may change
    }

    __device__ __forceinline__ void finish(const conv::job &job, const tile &t)
    {
        wgmma_wait<0>();
        wgmma_pin(a[0]);
        wgmma_pin(a[1]);
        copy_wait<0>();
#pragma unroll
        for (int m = 0; m < S::MT; ++m) {
            wgmma_pin(sums(m));
            conv::store_row<S::SIDE>(job, t, d[m], row(m), t.n * S::N, lane);
        }
    }
};

template <class S>
__global__ void __launch_bounds__(THREADS, 1) conv_kernel(const __grid_constant__ conv::job job)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    const tile t(job, S::TH);
    const conv::loader<S> load = { job, t, smem_addr(raw) };
    team<S> all = { load, job.frames * job.groups * S::TAPS,
                    __shfl_sync(~0u, (int)threadIdx.x / 32, 0), (int)threadIdx.x % 32 };
    all.begin();
    int step = 0;
    for (; step + 1 < all.steps; step += 2) {
        all.template run<0>(step);
        all.template run<1>(step + 1);
    }
    if (step < all.steps) all.template run<0>(step);
    all.finish(job, t);
}

template <int SIDE, int TH>
esa_status launch(esa_cuda_device *dev, const conv::plan &p, conv::job &job, cudaStream_t stream)
{
    using S = shape<SIDE, TH>;
    return conv::launch_tiles(dev, p, job, conv_kernel<S>, TH, THREADS, S::BYTES, stream);
}

template <int SIDE>
esa_status launch_side(esa_cuda_device *dev, const conv::plan &p, conv::job &job,
                       cudaStream_t stream)
{
    return conv::tall_tiles(dev, p, job) ? launch<SIDE, 16>(dev, p, job, stream)
                                         : launch<SIDE, 8>(dev, p, job, stream);
}

} // namespace

esa_status conv_sm90_launch(esa_cuda_device *dev, const conv::plan &p, conv::job job,
                            cudaStream_t stream)
{
    if (!job.vectors)
        return device_fail(
            dev, ESA_ERR_UNSUPPORTED,
            "a convolution from %d channels over planes whose pixels do not begin at "
            "multiples of 16 bytes",
            job.cin);
    if (p.side == 1) return launch_side<1>(dev, p, job, stream);
    if (p.side == 2) return launch_side<2>(dev, p, job, stream);
    return launch_side<3>(dev, p, job, stream);
}
