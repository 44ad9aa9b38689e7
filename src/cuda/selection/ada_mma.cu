// ada_mma.cu - the product of ada_bsa on tensor cores (mma.sync), 16-bit rows.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes 128 rows x 256 columns with eight warps of 64 x 64. That is the largest tile
// whose sums fit into registers; every operand byte comes from L2, which limits the product. The
// depth of 8 D goes in steps of 64: 64 elements of one of the eight tokens of every group. cp.async
// brings them into a ring of 2 to 4 stages, with 128-byte rows swizzled so that ldmatrix has no
// bank conflicts. Tokens that do not exist are zeros. Thread blocks run along groups of eight row
// tiles, so that those running together share rows and columns in L2.
#include "cuda/selection/ada.cuh"
#include "cuda/runtime/sm80_ptx.cuh"

namespace
{

enum {
    ROWS = 128,
    COLUMNS = 256,
    DEPTH = 64,
    THREADS = 256,
    STAGE_BYTES = (ROWS + COLUMNS) * DEPTH * 2,
    GROUP_TILES = 8,
    MOST_STAGES = 4
};

// Copies the pieces of a thread for one step: piece c of rows r, r + 32, ... of one side. first:
// position of the token of row r; the next ones are 256 further each. Positions at or past n do not
// exist. GATHER: positions are not tokens.
template <bool GATHER, int COUNT, class T>
__device__ __forceinline__ void bring(uint32_t dst, const T *src, int64_t stride,
                                      const int32_t *perm, int first, int n, bool inside)
{
    const T *row = src + first * stride;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool valid = inside && first + 256 * i < n;
        if constexpr (GATHER)
            row = src + (!valid ? 0 : perm ? perm[first + 256 * i] : first + 256 * i) * stride;
        copy_16(dst + i * 32 * DEPTH * 2, row, valid);
        if constexpr (!GATHER) row += 256 * stride;
    }
}

// The operands of a thread block.
template <class T, bool GATHER> struct tile_source {
    const T *q, *k; // rows of the head
    int64_t q_stride, k_stride;
    const int32_t *perm_q, *perm_k;
    int Nq, len, D;
    int row, column; // first pieces of this thread
    uint32_t shared;

    __device__ __forceinline__ void bring_step(int u, int d0, int stage) const
    {
        const int d = d0 + threadIdx.x % 8 * 8, r = threadIdx.x / 8;
        const uint32_t dst = shared + stage * STAGE_BYTES + r * DEPTH * 2 +
                             (threadIdx.x % 8 ^ r % 8) * 16;
        bring<GATHER, ROWS / 32>(dst, q + d, q_stride, perm_q, 8 * row + 7 - u, Nq, d < D);
        bring<GATHER, COLUMNS / 32>(dst + ROWS * DEPTH * 2, k + d, k_stride, perm_k, 8 * column + u,
                                    len, d < D);
    }
};

// One step: acc (64 x 64 of the warp) += rows x columns over a depth of 64.
template <class T>
__device__ __forceinline__ void multiply(float (&acc)[4][32], uint32_t rows, uint32_t columns)
{
    const int lane = threadIdx.x % 32;
    // ldmatrix: lanes 0-15 point to rows 0-15 of the first 8 of depth, lanes 16-31 to the same rows
    // of the second 8. For columns, the halves of 16 are eight columns by two depths.
    const int a_row = lane % 16, a_half = lane / 16, b_row = lane % 8 + lane / 16 * 8,
              b_half = lane / 8 % 2;
#pragma unroll
    for (int s = 0; s < DEPTH / 16; ++s) {
        uint32_t a[4][4], b[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m)
            load_matrices(a[m], rows + (16 * m + a_row) * DEPTH * 2 +
                                    ((2 * s + a_half) ^ a_row % 8) * 16);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            load_matrices(b[n], columns + (16 * n + b_row) * DEPTH * 2 +
                                    ((2 * s + b_half) ^ b_row % 8) * 16);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
                multiply_add<T>(reinterpret_cast<float(&)[4]>(acc[m][4 * n]), a[m],
                                b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

template <class T, bool GATHER>
__global__ void __launch_bounds__(THREADS, 1)
    ada_kernel(const __grid_constant__ ada_job x, int stages, int row_tiles, int column_tiles)
{
    extern __shared__ __align__(1024) char memory[];
    const int group = blockIdx.x / (GROUP_TILES * column_tiles),
              within = blockIdx.x % (GROUP_TILES * column_tiles);
    const int tall = min((int)GROUP_TILES, row_tiles - group * GROUP_TILES);
    const int row0 = (int)x.row0 + (group * GROUP_TILES + within % tall) * ROWS,
              column0 = within / tall * COLUMNS;
    const ada_head head(x, x.head0 + blockIdx.y);
    const int last = min(row0 + ROWS, (int)(x.row0 + x.rows)) - 1; // limits grow with the row
    if (column0 >= esa_ada_limit(&x.a, head.columns, last)) return;

    const int steps = 8 * ceil_div((int)x.a.D, (int)DEPTH);
    const uint32_t shared = smem_addr(memory);
    const tile_source<T, GATHER> source = { (const T *)x.a.q + head.q_at,
                                            (const T *)x.a.k + head.k_at,
                                            x.a.q_stride[2],
                                            x.a.k_stride[2],
                                            x.a.perm_q,
                                            x.a.perm_k,
                                            (int)x.a.Nq,
                                            head.len,
                                            (int)x.a.D,
                                            row0 + (int)threadIdx.x / 8,
                                            column0 + (int)threadIdx.x / 8,
                                            shared };
    int u = 0, d0 = 0; // position of the next step to copy
    auto bring_next = [&](int stage) {
        if (u < 8) source.bring_step(u, d0, stage);
        copy_commit();
        d0 += DEPTH;
        if (d0 >= x.a.D) d0 = 0, u++;
    };
    for (int s = 0; s < stages - 1; ++s) bring_next(s);
    const int warp = threadIdx.x / 32, warp_row = warp % 2 * 64, warp_column = warp / 2 * 64;
    float acc[4][32] = {};
    int stage = 0, ahead = stages - 1;
    for (int step = 0; step < steps; ++step) {
        // All but the newest stages - 2 groups have arrived, including those of this step.
        if (stages == 4)
            copy_wait<2>();
        else if (stages == 3)
            copy_wait<1>();
        else
            copy_wait<0>();
        __syncthreads();
        bring_next(ahead);
        multiply<T>(acc, shared + stage * STAGE_BYTES + warp_row * DEPTH * 2,
                    shared + stage * STAGE_BYTES + (ROWS + warp_column) * DEPTH * 2);
        if (++stage == stages) stage = 0;
        if (++ahead == stages) ahead = 0;
    }
    float *out = x.lse + blockIdx.y * x.rows * x.a.nk;
#pragma unroll
    for (int m = 0; m < 4; ++m)
        ada_finish<0>(x, head, acc[m], row0 + warp_row + 16 * m, column0 + warp_column, out,
                      [](float v) { return exp2_approx(v); });
}

template <class T> auto kernel_of(const esa_select_args &a)
{
    return a.perm_q || a.perm_k ? ada_kernel<T, true> : ada_kernel<T, false>;
}

} // namespace

bool ada_mma_takes(const esa_select_args *a)
{
    const int64_t Rk = a->params.block_k / ESA_ADA_GROUP;
    return a->dtype != ESA_DTYPE_F32 && a->params.mode != ESA_MODE_COMPAT_ROUND &&
           (Rk == 8 || Rk == 16 || Rk == 32) &&
           rows_in_pieces({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, a->D, 2, 16) &&
           rows_in_pieces({ a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }, a->D, 2, 16);
}

esa_status ada_mma_launch(esa_cuda_device *dev, const ada_job &job, cudaStream_t stream)
{
    const int stages = (int)esa_min64(MOST_STAGES, dev->shared_bytes / STAGE_BYTES),
              bytes = stages * STAGE_BYTES;
    const int row_tiles = (int)ceil_div<int64_t>(job.rows, ROWS),
              column_tiles = (int)ceil_div<int64_t>(ceil_div<int64_t>(job.a.Nk, 8), COLUMNS);
    const auto kernel = job.a.dtype == ESA_DTYPE_F16 ? kernel_of<__half>(job.a)
                                                     : kernel_of<__nv_bfloat16>(job.a);
    const esa_status status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "preparing ada_bsa");
    if (status) return status;
    kernel<<<dim3((unsigned)(row_tiles * column_tiles), (unsigned)job.heads), THREADS, bytes,
             stream>>>(job, stages, row_tiles, column_tiles);
    return launch_check(dev, "scoring groups of tokens");
}
