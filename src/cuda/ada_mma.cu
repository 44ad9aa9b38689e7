// ada_mma.cu - the product of ada_bsa on tensor cores (mma.sync), 16-bit rows.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes 128 rows x 256 columns: eight warps of 64 x 64, the largest tile whose sums fit the registers, because every
// operand byte comes from L2 and the product is bound by that. The depth of 8 D goes by in steps of 64: 64 elements of one of the
// eight tokens of every group, brought by cp.async into a ring of 2 to 4 stages, 128-byte rows swizzled so that ldmatrix meets no bank
// twice. Tokens that do not exist are zeros. Thread blocks run along groups of eight row tiles, so that those running together share
// rows and columns in L2.
#include "cuda/ada.cuh"
#include "cuda/sm80_ptx.cuh"

namespace {

enum { ROWS = 128, COLUMNS = 256, DEPTH = 64, THREADS = 256, STAGE_BYTES = (ROWS + COLUMNS) * DEPTH * 2, GROUP_TILES = 8, MOST_STAGES = 4 };

// Everything a thread needs to bring its pieces of a step: piece c of rows r, r + 32, ...
template <class T> struct bringer {
    const ada_job &x;
    const T *q, *k;
    int row0, column0, len;     // first row and column of the tile
    int pieces;                 // steps per token
    uint32_t shared;

    __device__ __forceinline__ void bring(int step, uint32_t stage) const {
        const int u = step / pieces, d = step % pieces * DEPTH + threadIdx.x % 8 * 8, r0 = threadIdx.x / 8;
        const uint32_t at = shared + stage * STAGE_BYTES + (threadIdx.x % 8 ^ r0 % 8) * 16;
        const bool inside = d < x.a.D;
#pragma unroll
        for (int n = 0; n < ROWS / 32; ++n) {
            const int r = r0 + 32 * n, position = 8 * (row0 + r) + 7 - u;
            const bool valid = inside && position < x.a.Nq;
            const int64_t token = !valid ? 0 : x.a.perm_q ? x.a.perm_q[position] : position;
            copy_16(at + r * DEPTH * 2, valid ? q + token * x.a.q_stride[2] + d : q, valid);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 32; ++n) {
            const int r = r0 + 32 * n, position = 8 * (column0 + r) + u;
            const bool valid = inside && position < len;
            const int64_t token = !valid ? 0 : x.a.perm_k ? x.a.perm_k[position] : position;
            copy_16(at + (ROWS + r) * DEPTH * 2, valid ? k + token * x.a.k_stride[2] + d : k, valid);
        }
    }
};

// One step: acc (64 x 64 of the warp) += rows x columns over 64 of depth.
template <class T> __device__ __forceinline__ void multiply(float (&acc)[4][8][4], uint32_t rows, uint32_t columns) {
    const int lane = threadIdx.x % 32;
    // ldmatrix: lanes 0-15 point at rows 0-15 of the first 8 of depth, lanes 16-31 at the same rows of the second 8; for columns the
    // halves of 16 are eight columns by two depths.
    const int a_row = lane % 16, a_half = lane / 16, b_row = lane % 8 + lane / 16 * 8, b_half = lane / 8 % 2;
#pragma unroll
    for (int s = 0; s < DEPTH / 16; ++s) {
        uint32_t a[4][4], b[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) load_matrices(a[m], rows + (16 * m + a_row) * DEPTH * 2 + ((2 * s + a_half) ^ a_row % 8) * 16);
#pragma unroll
        for (int n = 0; n < 4; ++n) load_matrices(b[n], columns + (16 * n + b_row) * DEPTH * 2 + ((2 * s + b_half) ^ b_row % 8) * 16);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) multiply_add<T>(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

// lse of the warp's 64 x 64 sums; RK columns per key block. edge: some pairs of the tile are missing or not seen.
template <int RK> __device__ __forceinline__ void reduce(const ada_job &x, const ada_head &head, float (&acc)[4][8][4], int row, int column, bool edge, float *out) {
    constexpr int PARTS = RK / 8, BLOCKS = 8 / PARTS;       // fragments per key block, key blocks of the warp
    const int quad = threadIdx.x % 4, line = threadIdx.x % 32 / 4, J0 = column / RK;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + 16 * m + 8 * half + line;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                float top = -INFINITY, sum = 0.0f;
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float &v = acc[m][block * PARTS + part][2 * half + c];
                        v = edge ? ada_logit(x, head, v, i, column + 8 * (block * PARTS + part) + 2 * quad + c) : v * x.factor;
                        top = fmaxf(top, v);
                    }
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                if (top == -INFINITY) top = 0.0f;           // nothing seen: the sum is 0 and its logarithm -inf; a NaN stays one
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int c = 0; c < 2; ++c) sum += exp2_fast(acc[m][block * PARTS + part][2 * half + c] - top);
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                const float lse = top + __log2f(sum);
                if (quad == block % 4 && i < x.row0 + x.rows && J0 + block < x.a.nk) out[(i - x.row0) * x.a.nk + J0 + block] = lse;
            }
        }
}

template <class T> __global__ void __launch_bounds__(THREADS, 1) ada_kernel(const __grid_constant__ ada_job x, int stages, int row_tiles, int column_tiles) {
    extern __shared__ __align__(1024) char memory[];
    const int group = blockIdx.x / (GROUP_TILES * column_tiles), within = blockIdx.x % (GROUP_TILES * column_tiles);
    const int tall = min((int)GROUP_TILES, row_tiles - group * GROUP_TILES);
    const int row0 = (int)x.row0 + (group * GROUP_TILES + within % tall) * ROWS, column0 = within / tall * COLUMNS;
    const ada_head head(x, x.head0 + blockIdx.y);
    const int last = min(row0 + ROWS, (int)(x.row0 + x.rows)) - 1;      // limits grow with the row
    if (column0 >= esa_ada_limit(&x.a, head.columns, last)) return;

    const int pieces = ceil_div((int)x.a.D, (int)DEPTH), steps = 8 * pieces;
    const uint32_t shared = shared_address(memory);
    const bringer<T> b = { x, (const T *)x.a.q + head.q_at, (const T *)x.a.k + head.k_at, row0, column0, head.len, pieces, shared };
    for (int s = 0; s < stages - 1; ++s) {
        if (s < steps) b.bring(s, s);
        copy_commit();
    }
    const int warp = threadIdx.x / 32, warp_row = warp % 2 * 64, warp_column = warp / 2 * 64;
    float acc[4][8][4] = {};
    int stage = 0, ahead = stages - 1;
    for (int step = 0; step < steps; ++step) {
        // All but the newest stages - 2 groups have landed: this step's among them.
        if (stages == 4) copy_wait<2>();
        else if (stages == 3) copy_wait<1>();
        else copy_wait<0>();
        __syncthreads();
        if (step + stages - 1 < steps) b.bring(step + stages - 1, ahead);
        copy_commit();
        multiply<T>(acc, shared + stage * STAGE_BYTES + warp_row * DEPTH * 2, shared + stage * STAGE_BYTES + (ROWS + warp_column) * DEPTH * 2);
        if (++stage == stages) stage = 0;
        if (++ahead == stages) ahead = 0;
    }
    const int row = row0 + warp_row, column = column0 + warp_column, Rk = x.a.params.block_k / 8;
    // Every pair of the tile exists and is seen: no row or column of it reaches an end or the diagonal.
    const int offset = (int)(x.a.Nk - x.a.Nq);
    bool edge = column + 64 > head.columns;
    if (x.fixed) edge |= 8 * (row + 64) > x.a.Nq || 8 * (column + 64) > head.len || (x.a.params.causal && 8 * (row - column - 63) + 7 + offset < 14);
    else edge |= x.a.params.causal && column + 64 > esa_ada_limit(&x.a, head.columns, row);
    float *out = x.lse + blockIdx.y * x.rows * x.a.nk;
    if (Rk == 8) reduce<8>(x, head, acc, row, column, edge, out);
    else if (Rk == 16) reduce<16>(x, head, acc, row, column, edge, out);
    else reduce<32>(x, head, acc, row, column, edge, out);
}

} // namespace

bool ada_mma_takes(const esa_select_args *a) {
    const int64_t Rk = a->params.block_k / ESA_ADA_GROUP;
    return a->dtype != ESA_DTYPE_F32 && a->params.mode != ESA_MODE_COMPAT_ROUND && (Rk == 8 || Rk == 16 || Rk == 32) &&
           rows_in_16_bytes(a->q, a->q_stride, a->B, a->Hq, a->Nq, a->D, 2) && rows_in_16_bytes(a->k, a->k_stride, a->B, a->Hkv, a->Nk, a->D, 2);
}

esa_status ada_mma_launch(esa_cuda_device *dev, const ada_job &job, cudaStream_t stream) {
    const int stages = (int)esa_min64(MOST_STAGES, dev->shared_bytes / STAGE_BYTES), bytes = stages * STAGE_BYTES;
    const int row_tiles = (int)ceil_div<int64_t>(job.rows, ROWS), column_tiles = (int)ceil_div<int64_t>(ceil_div<int64_t>(job.a.Nk, 8), COLUMNS);
    const auto kernel = job.a.dtype == ESA_DTYPE_F16 ? ada_kernel<__half> : ada_kernel<__nv_bfloat16>;
    const esa_status status = device_check(dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "preparing ada_bsa");
    if (status) return status;
    kernel<<<dim3((unsigned)(row_tiles * column_tiles), (unsigned)job.heads), THREADS, bytes, stream>>>(job, stages, row_tiles, column_tiles);
    return launch_check(dev, "scoring groups of tokens");
}
