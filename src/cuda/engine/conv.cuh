// conv.cuh - convolutions over channels-last planes as the files of the plugin share them.
// SPDX-License-Identifier: Apache-2.0
//
// A convolution is a sum of products: for each frame of the kernel, each group of KC input channels
// and each tap, the pixels of a tile (shifted by the tap) times [N][KC] weights. The weights of one
// such product lie together in memory, in the order of the loop, and already in the order of shared
// memory:
//
//   [phase][frame][group of channels][tap][tile of N output channels][N][KC]
//
// For wgmma the last two axes are [KC/8][N][8].
//
// A phase is one of the four pixels that a doubled plane has for each of its source; a convolution
// without doubling has one.
#pragma once

#include "base/nn_args.h"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace conv
{

// Where the 16-byte piece `piece` of row `row` is in a tile of rows of KC channels. Any eight rows
// that follow one another have a given piece in different banks.
template <int KC> static constexpr __host__ __device__ int twist(int row)
{
    return KC == 96 ? row >> 1 & 3 : KC == 64 ? row & 7 : row >> 2 & 1;
}
template <int KC> static constexpr __host__ __device__ int place(int piece, int row)
{
    return row * KC * 2 + (piece ^ twist<KC>(row)) * 16;
}

// Where the k-th 16 channels of a row begin, from the start of the row. half: which 8 of the 16,
// turned as twist says.
template <int KC> static constexpr __host__ __device__ int along(int half, int k)
{
    return KC == 96   ? (half ^ k % 2 * 2) * 16 + k / 2 * 64
           : KC == 64 ? (half ^ k * 2) * 16
                      : half * 16 + k * 32;
}

// How the weights are packed and multiplied; it depends on the sizes of the kernel and on the GPU.
struct plan {
    bool wgmma;          // by sm90_conv.cu
    int KC, N;           // channels of a group, output channels of a tile
    int side;            // taps in each direction: 1, 2 (doubled) or 3
    int groups, n_tiles; // of channels
    int phases, taps;
    int64_t bytes; // of the packed weights
};

struct job {
    const bf16 *packed;
    const float *bias;
    const bf16 *x[3]; // the frames that exist
    int frame[3];     // their numbers in the kernel
    int frames;
    int64_t x_row;
    void *y;
    const void *residual; // of the type of y, or null
    int64_t y_row, residual_row;
    bool y_f32;
    bool vectors; // pixels of x can be read in pieces of 16 bytes
    bool pairs;   // channels of y and residual can be read and written two at a time
    bool up2;
    int height, width, cin, cout, groups, n_tiles, kt;
    int tiles_x, tiles_y;
};

} // namespace conv

// Launch the kernel for a plan. sm90_conv.cu: plans with wgmma, which are for GPUs at that level.
esa_status conv_mma_launch(esa_cuda_device *dev, const conv::plan &p, conv::job job,
                           cudaStream_t stream);
esa_status conv_sm90_launch(esa_cuda_device *dev, const conv::plan &p, conv::job job,
                            cudaStream_t stream);
