// gemv.cu - the product of one row (the embedding of the timestep): reads the weights once.
// SPDX-License-Identifier: Apache-2.0
//
// A warp computes 4 outputs, so one read of x serves 4 rows of weights. A lane adds up every 32nd
// piece of a row, then the lanes are added along a fixed tree.
#include <cuda_fp8.h>

#include "cuda/engine/product.cuh"
#include "cuda/engine/rows.cuh"

static __device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return (float)x; }

namespace
{

using namespace products;

enum { WARPS = 8, EACH = 4 };

// W: elements of a piece, 8 (16-byte loads) or 1.
template <class X, class T, int W>
__global__ void __launch_bounds__(WARPS * 32)
    gemv_kernel(const __grid_constant__ esa_product_args a)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * EACH;
    if (first >= a.w.rows) return;
    float sum[EACH] = {};
    for (int64_t k = (int64_t)lane * W; k < a.x.cols; k += 32 * W) {
        float x[W], w[W];
        rows::unpack(x, rows::load_piece((const X *)a.x.data + k, (rows::piece<X, W> *)nullptr));
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int64_t r = first + j < a.w.rows ? first + j : first; // any row that exists
            rows::unpack(w, rows::load_piece((const T *)a.w.data + r * a.w.ld + k,
                                             (rows::piece<T, W> *)nullptr));
#pragma unroll
            for (int i = 0; i < W; ++i) sum[j] = fmaf(x[i], w[i], sum[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        float total = lanes_sum<32>(sum[j]);
        const int64_t c = first + j;
        if (lane != 0 || c >= a.w.rows) continue;
        if (a.w.scale) total *= a.x.scale[0] * a.w.scale[c];
        store(a.y, 0, c, finished(a, total, c));
    }
}

template <class X, class T>
void launch(const esa_product_args &a, bool in_eights, cudaStream_t stream)
{
    const unsigned blocks = (unsigned)ceil_div(a.w.rows, (int64_t)WARPS * EACH);
    if (in_eights)
        gemv_kernel<X, T, 8><<<blocks, WARPS * 32, 0, stream>>>(a);
    else
        gemv_kernel<X, T, 1><<<blocks, WARPS * 32, 0, stream>>>(a);
}

} // namespace

namespace products
{

esa_status run_gemv(esa_cuda_device *dev, const esa_product_args &a, cudaStream_t stream)
{
    const bool in_eights = rows::wide(a.x) && rows::wide(a.w);
    if (a.w.dtype == ESA_DTYPE_F8)
        launch<__nv_fp8_e4m3, __nv_fp8_e4m3>(a, in_eights, stream);
    else if (a.w.dtype == ESA_DTYPE_F32)
        launch<float, float>(a, in_eights, stream);
    else if (a.x.dtype == ESA_DTYPE_F32)
        launch<float, __nv_bfloat16>(a, in_eights, stream);
    else
        launch<__nv_bfloat16, __nv_bfloat16>(a, in_eights, stream);
    return launch_check(dev, "product of one row");
}

} // namespace products
