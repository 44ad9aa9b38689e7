// conv_mma.cu - convolutions on the tensor cores that every GPU since Ampere has.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block computes a tile of TH x 16 pixels and N output channels with eight warps. For each
// frame and group of KC input channels, the pixels of the tile and those around it come to shared
// memory once. All taps read them there, because ldmatrix takes an address for each pixel: a tap is
// a shift of addresses, and nothing is copied twice. The weights come tap by tap through a ring of
// stages. So a product of 256 pixels, 96 channels in and 96 out costs 62 KB of pixels for nine taps
// and 18 KB of weights for each, about 190 operations for a byte.
//
// 16 pixels of a row of the picture are the 16 rows of a fragment. Copies of everything that one
// step of the loop asks for are one group; step s waits for the groups up to s, and asks for what
// step s + STAGES - 1 needs.
#include "cuda/engine/conv.cuh"
#include "cuda/runtime/sm80_ptx.cuh"

namespace
{

constexpr int TW = 16, WARPS = 8, THREADS = 32 * WARPS;

// SIDE: taps in each direction.
template <int SIDE_, int TH_, int N_, int KC_> struct shape {
    static constexpr int SIDE = SIDE_, TH = TH_, N = N_, KC = KC_, TAPS = SIDE * SIDE;
    // Stages of weights, and buffers of pixels. A buffer is filled STAGES - 1 steps before its
    // first use, when the steps of the group that had it are over.
    static constexpr int STAGES = TAPS == 1 ? 3 : 4, BUFFERS = TAPS == 1 ? STAGES : 2;
    static_assert((BUFFERS - 1) * TAPS >= STAGES - 1, "a buffer is free when it is filled");
    static constexpr int HALO_W = TW + SIDE - 1, HALO = HALO_W * (TH + SIDE - 1);
    static constexpr int PIECES = KC / 8;
    static constexpr int BUFFER = (HALO * KC * 2 + 127) / 128 * 128, STAGE = N * KC * 2;
    static constexpr int BYTES = BUFFERS * BUFFER + STAGES * STAGE;
    // Warps beside one another in pixels and in channels; rows and eights of channels of a warp.
    static constexpr int WN = N % 32 == 0 ? 2 : 1, WM = WARPS / WN, MT = TH / WM, NT = N / WN / 8;
    static_assert(TH % WM == 0 && NT % 2 == 0 && KC % 16 == 0, "whole fragments");
    // Two thread blocks of a multiprocessor hide each other's waits where registers allow it.
    static constexpr int BLOCKS = MT <= 2 && BYTES <= 100 << 10 ? 2 : 1;
};

// Where this thread block is.
struct tile {
    int n, x, y, phase; // tile of output channels, first pixel, phase
    __device__ __forceinline__ tile(const conv::job &job, int th)
    {
        int at = blockIdx.x;
        n = at % job.n_tiles, at /= job.n_tiles;
        x = at % job.tiles_x * TW, at /= job.tiles_x;
        y = at % job.tiles_y * th, phase = at / job.tiles_y;
    }
};

template <class S> struct loader {
    const conv::job &job;
    const tile &t;
    uint32_t base; // buffers of pixels, then stages of weights

    __device__ __forceinline__ uint32_t buffer(int group) const
    {
        return base + group % S::BUFFERS * S::BUFFER;
    }
    __device__ __forceinline__ uint32_t stage(int step) const
    {
        return base + S::BUFFERS * S::BUFFER + step % S::STAGES * S::STAGE;
    }

    // Pixels of frame and channels number `group`. Pixels past the border of the plane and channels
    // past the last become 0.
    __device__ __forceinline__ void pixels(int group) const
    {
        const int channel = group % job.groups * S::KC, border = S::SIDE > 1;
        const int top = t.y - border + (S::SIDE == 2 ? t.phase >> 1 : 0),
                  left = t.x - border + (S::SIDE == 2 ? t.phase & 1 : 0);
        const bf16 *from = job.x[group / job.groups] + top * job.x_row + (int64_t)left * job.cin +
                           channel;
        const int rows = job.height + border - top, cols = job.width + border - left,
                  channels = job.cin - channel;
        const uint32_t to = buffer(group);
#pragma unroll 4
        for (int i = threadIdx.x; i < S::HALO * S::PIECES; i += THREADS) {
            const int piece = i % S::PIECES, p = i / S::PIECES, px = p % S::HALO_W,
                      py = p / S::HALO_W;
            const bf16 *at = from + py * job.x_row + (int64_t)px * job.cin + piece * 8;
            const int count = py < rows && px < cols ? channels - piece * 8 : 0;
            if (job.vectors)
                copy_16(to + conv::place<S::KC>(piece, p), at, count > 0);
            else
                elements(to + conv::place<S::KC>(piece, p), at, count);
        }
    }
    static __device__ __noinline__ void elements(uint32_t to, const bf16 *at, int count)
    {
        uint32_t x[4] = { 0, 0, 0, 0 };
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (e < count) x[e / 2] |= (uint32_t)((const uint16_t *)at)[e] << e % 2 * 16;
        store_shared(to, make_uint4(x[0], x[1], x[2], x[3]));
    }

    __device__ __forceinline__ void weights(int step) const
    {
        const int group = step / S::TAPS, frame = job.frame[group / job.groups];
        const int64_t product = ((int64_t)(t.phase * job.kt + frame) * job.groups +
                                 group % job.groups) *
                                    S::TAPS +
                                step % S::TAPS;
        const bf16 *from = job.packed + (product * job.n_tiles + t.n) * (S::N * S::KC);
        const uint32_t to = stage(step);
#pragma unroll
        for (int i = threadIdx.x; i < S::N * S::PIECES; i += THREADS)
            copy_16(to + i * 16, from + i * 8, true);
    }

    // What a step needs first.
    __device__ __forceinline__ void issue(int step, int steps) const
    {
        if (step < steps) {
            if (step % S::TAPS == 0) pixels(step / S::TAPS);
            weights(step);
        }
        copy_commit();
    }
};

// The sums of a warp: MT rows of 16 pixels times NT eights of channels.
template <class S> struct sums {
    float d[S::MT][S::NT][4];

    // Offset of the k-th 16 channels in a row whose piece `half` is at place `half ^ turn`.
    static __device__ __forceinline__ int along(int half_turned, int k)
    {
        return S::KC == 96 ? (half_turned ^ k % 2 * 2) * 16 + k / 2 * 64
                           : half_turned * 16 + k * 32;
    }

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
                load_matrices(a[k % 2][m], a_row[m] + along(a_turn[m], k));
#pragma unroll
            for (int i = 0; i < S::NT / 2; ++i)
                load_matrices(b[k % 2][i], b_row + i * 16 * S::KC * 2 + along(b_turn, k));
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

    // Channels c and c + 1 of one pixel, whose offset is `at` in y and `rest` in the residual.
    template <class T>
    static __device__ __forceinline__ void put(const conv::job &job, int64_t at, int64_t rest,
                                               int c, float lo, float hi)
    {
        T *y = (T *)job.y + at + c;
        const T *r = (const T *)job.residual + rest + c;
        if (c < job.cout) {
            if (job.residual) lo += to_float(r[0]);
            round_to(&y[0], lo);
        }
        if (c + 1 < job.cout) {
            if (job.residual) hi += to_float(r[1]);
            round_to(&y[1], hi);
        }
    }
    static __device__ __forceinline__ void put_pair(const conv::job &job, int64_t at, int64_t rest,
                                                    int c, float lo, float hi)
    {
        if (c >= job.cout) return;
        if (job.residual) {
            const uint32_t r = *(const uint32_t *)((const bf16 *)job.residual + rest + c);
            lo += __uint_as_float(r << 16), hi += __uint_as_float(r & 0xffff0000u);
        }
        *(uint32_t *)((bf16 *)job.y + at + c) = pack2<bf16>(lo, hi);
    }

    __device__ __forceinline__ void store(const conv::job &job, const tile &t, int warp,
                                          int lane) const
    {
        const int first = t.n * S::N + warp % S::WN * (S::NT * 8) + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < S::MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int64_t line = t.y + warp / S::WN * S::MT + m, pixel = t.x + lane / 4 + 8 * half;
                if (line >= job.height || pixel >= job.width) continue;
                if (S::SIDE == 2)
                    line = 2 * line + (t.phase >> 1), pixel = 2 * pixel + (t.phase & 1);
                const int64_t at = line * job.y_row + pixel * job.cout,
                              rest = line * job.residual_row + pixel * job.cout;
#pragma unroll
                for (int i = 0; i < S::NT; ++i) {
                    const int c = first + 8 * i;
                    const float lo = d[m][i][2 * half] + (c < job.cout ? __ldg(job.bias + c) : 0),
                                hi = d[m][i][2 * half + 1] +
                                     (c + 1 < job.cout ? __ldg(job.bias + c + 1) : 0);
                    if (job.pairs)
                        put_pair(job, at, rest, c, lo, hi);
                    else if (job.y_f32)
                        put<float>(job, at, rest, c, lo, hi);
                    else
                        put<bf16>(job, at, rest, c, lo, hi);
                }
            }
    }
};

template <class S>
__global__ void __launch_bounds__(THREADS, S::BLOCKS)
    conv_kernel(const __grid_constant__ conv::job job)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const tile t(job, S::TH);
    const loader<S> load = { job, t, smem_addr(raw) };
    const int steps = job.frames * job.groups * S::TAPS;
    for (int i = 0; i < S::STAGES - 1; ++i) load.issue(i, steps);
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
        load.issue(step + S::STAGES - 1, steps);
        all.add(load.buffer(step / S::TAPS), load.stage(step), step % S::TAPS, warp, lane);
    }
    copy_wait<0>();
    all.store(job, t, warp, lane);
}

template <int SIDE, int TH, int N, int KC>
esa_status launch(esa_cuda_device *dev, const conv::plan &p, conv::job &job, cudaStream_t stream)
{
    using S = shape<SIDE, TH, N, KC>;
    job.tiles_x = ceil_div(job.width, TW), job.tiles_y = ceil_div(job.height, TH);
    const int64_t blocks = (int64_t)job.tiles_x * job.tiles_y * job.n_tiles * p.phases;
    if (blocks > 0x7fffffff)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "a plane of %d x %d pixels is too large",
                           job.height, job.width);
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(conv_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES),
        "preparing a convolution");
    if (status) return status;
    conv_kernel<S><<<(unsigned)blocks, THREADS, S::BYTES, stream>>>(job);
    return launch_check(dev, "a convolution");
}

// 1 if tiles of 16 rows fill the GPU better than tiles of 8 rows, of which two take as long and a
// bit more.
bool tall_tiles(const esa_cuda_device *dev, const conv::plan &p, const conv::job &job)
{
    const auto rounds = [&](int rows) {
        const int64_t tiles = (int64_t)ceil_div(job.width, TW) * ceil_div(job.height, rows) *
                              job.n_tiles * p.phases;
        return ceil_div(tiles, (int64_t)dev->multiprocessors);
    };
    return 20 * rounds(16) <= 11 * rounds(8);
}

template <int SIDE>
esa_status launch_side(esa_cuda_device *dev, const conv::plan &p, conv::job &job,
                       cudaStream_t stream)
{
    if (p.KC == 16) return launch<SIDE, 8, 96, 16>(dev, p, job, stream);
    if (p.KC == 48) return launch<SIDE, 8, 96, 48>(dev, p, job, stream);
    if constexpr (SIDE == 3)
        if (p.N == 16) return launch<SIDE, 16, 16, 96>(dev, p, job, stream);
    if (tall_tiles(dev, p, job)) return launch<SIDE, 16, 96, 96>(dev, p, job, stream);
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
