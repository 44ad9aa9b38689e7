// conv_tile.cuh - what the kernels for convolutions share: where a thread block is, how pixels and
// weights come to shared memory, and how sums become pixels.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block computes a tile of TH x 16 pixels and N output channels with eight warps. For each
// frame and group of KC input channels, the pixels of the tile and those around it come to shared
// memory once. All taps read them there, because ldmatrix takes an address for each pixel: a tap is
// a shift of addresses, and nothing is copied twice. The weights come tap by tap through a ring of
// stages. 16 pixels of a row of the picture are the 16 rows of a fragment.
//
// S, the shape of a kernel, has the constants SIDE (taps in each direction), TH, N, KC, TAPS,
// HALO_W and HALO (width and pixels of the tile with what lies around it), PIECES (of 16 bytes in a
// pixel), STAGES and BUFFERS, STAGE and BUFFER (their bytes), VECTORS (pixels are always read in
// pieces).
#pragma once

#include "cuda/engine/conv.cuh"
#include "cuda/runtime/sm80_ptx.cuh"

namespace conv
{

constexpr int TW = 16, WARPS = 8, THREADS = 32 * WARPS;

// Where this thread block is.
struct tile {
    int n, x, y, phase; // tile of output channels, first pixel, phase
    __device__ __forceinline__ tile(const job &j, int th)
    {
        int at = blockIdx.x;
        n = at % j.n_tiles, at /= j.n_tiles;
        x = at % j.tiles_x * TW, at /= j.tiles_x;
        y = at % j.tiles_y * th, phase = at / j.tiles_y;
    }
};

template <class S> struct loader {
    const job &j;
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

    // Part `part` of PARTS of the pixels of frame and channels number `group`. Pixels past the
    // border of the plane and channels past the last become 0.
    template <int PARTS> __device__ __forceinline__ void pixels(int group, int part) const
    {
        const int channel = group % j.groups * S::KC, border = S::SIDE > 1;
        const int top = t.y - border + (S::SIDE == 2 ? t.phase >> 1 : 0),
                  left = t.x - border + (S::SIDE == 2 ? t.phase & 1 : 0);
        const bf16 *from = j.x[group / j.groups] + top * j.x_row + (int64_t)left * j.cin + channel;
        const int rows = j.height + border - top, cols = j.width + border - left,
                  channels = j.cin - channel;
        const uint32_t to = buffer(group);
        constexpr int ALL = S::HALO * S::PIECES,
                      SIZE = (ALL + PARTS * THREADS - 1) / (PARTS * THREADS) * THREADS;
        const int end = min(ALL, (part + 1) * SIZE);
#pragma unroll 4
        for (int i = part * SIZE + threadIdx.x; i < end; i += THREADS) {
            const int piece = i % S::PIECES, p = i / S::PIECES, px = p % S::HALO_W,
                      py = p / S::HALO_W;
            const bf16 *at = from + py * j.x_row + (int64_t)px * j.cin + piece * 8;
            const int count = py < rows && px < cols ? channels - piece * 8 : 0;
            if (S::VECTORS || j.vectors)
                copy_16(to + place<S::KC>(piece, p), at, count > 0);
            else
                elements(to + place<S::KC>(piece, p), at, count);
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
        const int group = step / S::TAPS, frame = j.frame[group / j.groups];
        const int64_t product = ((int64_t)(t.phase * j.kt + frame) * j.groups + group % j.groups) *
                                    S::TAPS +
                                step % S::TAPS;
        const bf16 *from = j.packed + (product * j.n_tiles + t.n) * (S::N * S::KC);
        const uint32_t to = stage(step);
#pragma unroll
        for (int i = threadIdx.x; i < S::N * S::PIECES; i += THREADS)
            copy_16(to + i * 16, from + i * 8, true);
    }
};

// Channels c and c + 1 of one pixel, whose offset is `at` in y and `rest` in the residual.
template <class T>
static __device__ __forceinline__ void put(const job &j, int64_t at, int64_t rest, int c, float lo,
                                           float hi)
{
    T *y = (T *)j.y + at + c;
    const T *r = (const T *)j.residual + rest + c;
    if (c < j.cout) {
        if (j.residual) lo += to_float(r[0]);
        round_to(&y[0], lo);
    }
    if (c + 1 < j.cout) {
        if (j.residual) hi += to_float(r[1]);
        round_to(&y[1], hi);
    }
}
static __device__ __forceinline__ void put_pair(const job &j, int64_t at, int64_t rest, int c,
                                                float lo, float hi)
{
    if (c >= j.cout) return;
    if (j.residual) {
        const uint32_t r = *(const uint32_t *)((const bf16 *)j.residual + rest + c);
        lo += __uint_as_float(r << 16), hi += __uint_as_float(r & 0xffff0000u);
    }
    *(uint32_t *)((bf16 *)j.y + at + c) = pack2<bf16>(lo, hi);
}

// Writes 16 pixels of row `row` of the tile and NT eights of channels, of which n is the first. d
// is a fragment of sums: pixels lane / 4 and lane / 4 + 8, channels 2 (lane % 4) and the next.
template <int SIDE, int NT>
static __device__ __forceinline__ void store_row(const job &j, const tile &t,
                                                 const float (&d)[NT][4], int row, int n, int lane)
{
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int64_t line = t.y + row, pixel = t.x + lane / 4 + 8 * half;
        if (line >= j.height || pixel >= j.width) continue;
        if (SIDE == 2) line = 2 * line + (t.phase >> 1), pixel = 2 * pixel + (t.phase & 1);
        const int64_t at = line * j.y_row + pixel * j.cout,
                      rest = line * j.residual_row + pixel * j.cout;
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            const int c = n + 8 * i + lane % 4 * 2;
            const float lo = d[i][2 * half] + (c < j.cout ? __ldg(j.bias + c) : 0),
                        hi = d[i][2 * half + 1] + (c + 1 < j.cout ? __ldg(j.bias + c + 1) : 0);
            if (j.pairs)
                put_pair(j, at, rest, c, lo, hi);
            else if (j.y_f32)
                put<float>(j, at, rest, c, lo, hi);
            else
                put<bf16>(j, at, rest, c, lo, hi);
        }
    }
}

// ---- launching ----

// Sets the tiles of a job and gives the thread blocks; more than a grid has are refused.
static inline esa_status cut_tiles(esa_cuda_device *dev, const plan &p, job &j, int th,
                                   unsigned *blocks)
{
    j.tiles_x = ceil_div(j.width, TW), j.tiles_y = ceil_div(j.height, th);
    const int64_t all = (int64_t)j.tiles_x * j.tiles_y * j.n_tiles * p.phases;
    *blocks = (unsigned)all;
    if (all <= 0x7fffffff) return ESA_OK;
    return device_fail(dev, ESA_ERR_UNSUPPORTED, "a plane of %d x %d pixels is too large", j.height,
                       j.width);
}

// Runs a kernel over the tiles of a job, each th pixels high, with so many bytes of shared memory.
template <class Kernel>
static esa_status launch_tiles(esa_cuda_device *dev, const plan &p, job &j, Kernel *kernel, int th,
                               int threads, int bytes, cudaStream_t stream)
{
    unsigned blocks;
    esa_status status = cut_tiles(dev, p, j, th, &blocks);
    if (!status)
        status = device_check(
            dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "preparing a convolution");
    if (status) return status;
    kernel<<<blocks, threads, bytes, stream>>>(j);
    return launch_check(dev, "a convolution");
}

// True if tiles of 16 rows are faster than tiles of 8 rows. A small tile costs more than half of a
// large one, because it reads as many weights, but the last round of thread blocks may be fuller.
static inline bool tall_tiles(const esa_cuda_device *dev, const plan &p, const job &j)
{
    const auto rounds = [&](int rows) {
        const int64_t tiles = (int64_t)ceil_div(j.width, TW) * ceil_div(j.height, rows) *
                              j.n_tiles * p.phases;
        return ceil_div(tiles, (int64_t)dev->multiprocessors);
    };
    return 100 * rounds(16) <= 62 * rounds(8);
}

} // namespace conv
