// plain_product.cu - products without tensor cores, for shapes that cuBLASLt does not take, and the
// pass that adds bias and activation where its epilogues do not.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block computes 64 x 64 outputs, a thread 4 x 4 of them; sums run in f32 from the first
// column to the last. Networks of true size never come here.
#include <cuda_fp8.h>

#include "cuda/engine/product.cuh"

namespace
{

using namespace products;

enum { TILE = 64, DEPTH = 16, EACH = 4, THREADS = 256 };
static_assert(TILE / EACH * (TILE / EACH) == THREADS, "every thread has one part of the tile");

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(__nv_fp8_e4m3 x) { return (float)x; }

// Rows first .. first+63 of v, columns k .. k+15; 0 outside.
template <class T>
__device__ __forceinline__ void load(float (&to)[DEPTH][TILE + 1], const esa_view &v, int64_t first,
                                     int64_t k)
{
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; ++i) {
        const int at = i * THREADS + (int)threadIdx.x, c = at % DEPTH, r = at / DEPTH;
        const bool inside = first + r < v.rows && k + c < v.cols;
        to[c][r] = inside ? to_f32(((const T *)v.data)[(first + r) * v.ld + k + c]) : 0.0f;
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS) plain_kernel(const __grid_constant__ esa_product_args a)
{
    __shared__ float x[DEPTH][TILE + 1], w[DEPTH][TILE + 1];
    const int64_t row = (int64_t)blockIdx.x * TILE, col = (int64_t)blockIdx.y * TILE;
    const int r = (int)threadIdx.x / (TILE / EACH), c = (int)threadIdx.x % (TILE / EACH);
    float sum[EACH][EACH] = {};
    for (int64_t k = 0; k < a.x.cols; k += DEPTH) {
        load<T>(x, a.x, row, k);
        load<T>(w, a.w, col, k);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
#pragma unroll
            for (int m = 0; m < EACH; ++m)
#pragma unroll
                for (int n = 0; n < EACH; ++n)
                    sum[m][n] = fmaf(x[i][r + m * (TILE / EACH)], w[i][c + n * (TILE / EACH)],
                                     sum[m][n]);
        __syncthreads();
    }
    for (int m = 0; m < EACH; ++m)
        for (int n = 0; n < EACH; ++n) {
            const int64_t at = row + r + m * (TILE / EACH), out = col + c + n * (TILE / EACH);
            if (at >= a.x.rows || out >= a.w.rows) continue;
            if (a.w.scale) sum[m][n] *= a.x.scale[at] * a.w.scale[out];
            const float y = finished(a, sum[m][n], out);
            store(a.y, at, out, a.add ? y + stored(a.y, at, out) : y);
        }
}

__global__ void __launch_bounds__(256) finish_kernel(const __grid_constant__ esa_product_args a)
{
    const int64_t count = a.y.rows * a.y.cols, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const int64_t r = i / a.y.cols, c = i % a.y.cols;
        store(a.y, r, c, finished(a, stored(a.y, r, c), c));
    }
}

} // namespace

namespace products
{

esa_status run_plain(esa_cuda_device *dev, const esa_product_args &a, cudaStream_t stream)
{
    const int64_t rows = ceil_div(a.x.rows, (int64_t)TILE),
                  cols = ceil_div(a.w.rows, (int64_t)TILE);
    if (rows > 0x7fffffff || cols > 65535)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "a matrix product of %lld rows with %lld outputs of %lld inputs is too "
                           "large for the kernel that takes rows of any length",
                           (long long)a.x.rows, (long long)a.w.rows, (long long)a.w.cols);
    const dim3 grid((unsigned)rows, (unsigned)cols);
    if (a.w.dtype == ESA_DTYPE_F8)
        plain_kernel<__nv_fp8_e4m3><<<grid, THREADS, 0, stream>>>(a);
    else if (a.w.dtype == ESA_DTYPE_F32)
        plain_kernel<float><<<grid, THREADS, 0, stream>>>(a);
    else
        plain_kernel<__nv_bfloat16><<<grid, THREADS, 0, stream>>>(a);
    return launch_check(dev, "plain matrix product");
}

esa_status run_finish(esa_cuda_device *dev, const esa_product_args &a, cudaStream_t stream)
{
    finish_kernel<<<dev->multiprocessors * 8, 256, 0, stream>>>(a);
    return launch_check(dev, "bias and activation");
}

} // namespace products
