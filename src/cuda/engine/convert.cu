// convert.cu - weights in the type of products, from the types of files or from random numbers.
// SPDX-License-Identifier: Apache-2.0
//
// Runs once for each tensor while a model is loaded, behind copies that are 20 times slower than
// the GPU's memory, so the kernels are plain: F8 has one thread block for each row, which reads it
// twice; the other types have one thread for each element.
#include <cuda_fp8.h>

#include "base/rng.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

enum { THREADS = 256 };

// Sources: x(row, i) is element i of the matrix, which is in this row.
template <class T> struct from_memory {
    const T *at;
    __device__ __forceinline__ float operator()(int64_t, int64_t i) const
    {
        return to_float(at[i]);
    }
};
struct from_f8 {
    const __nv_fp8_e4m3 *at;
    const float *scale;
    int scales;
    __device__ __forceinline__ float operator()(int64_t row, int64_t i) const
    {
        return scales ? (float)at[i] * scale[scales > 1 ? row : 0] : (float)at[i];
    }
};
struct from_random {
    uint64_t seed, first;
    float mean, deviation;
    __device__ __forceinline__ float operator()(int64_t, int64_t i) const
    {
        // not fused, so that every device gives the same bits
        return __fadd_rn(mean, __fmul_rn(deviation, esa_rng_bell(seed, first + (uint64_t)i)));
    }
};

template <class T, class Source>
__global__ void __launch_bounds__(THREADS) element_kernel(esa_view y, Source x)
{
    const int64_t count = y.rows * y.cols, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step)
        round_to((T *)y.data + i, x(i / y.cols, i));
}

template <class Source> __global__ void __launch_bounds__(THREADS) f8_kernel(esa_view y, Source x)
{
    __shared__ float room[THREADS / 32];
    const int64_t row = blockIdx.x, first = row * y.cols;
    float top = 0.0f;
    for (int64_t c = threadIdx.x; c < y.cols; c += THREADS)
        top = fmaxf(top, fabsf(x(row, first + c)));
    top = lanes_max<32>(top);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) top = fmaxf(top, room[w]);
    const float scale = top > ESA_F8_ZERO ? top / ESA_F8_MAX : 1.0f, factor = 1.0f / scale;
    for (int64_t c = threadIdx.x; c < y.cols; c += THREADS)
        ((__nv_fp8_storage_t *)y.data)[first + c] = __nv_cvt_float_to_fp8(
            x(row, first + c) * factor, __NV_SATFINITE, __NV_E4M3);
    if (threadIdx.x == 0) y.scale[row] = scale;
}

// F8 of a file: the bytes stay, the scales are spread over the rows.
__global__ void __launch_bounds__(THREADS) keep_kernel(esa_view y, from_f8 x)
{
    const int64_t row = blockIdx.x, first = row * y.cols;
    for (int64_t c = threadIdx.x; c < y.cols; c += THREADS)
        ((__nv_fp8_storage_t *)y.data)[first + c] = x.at[first + c].__x;
    if (threadIdx.x == 0) y.scale[row] = x.scales ? x.scale[x.scales > 1 ? row : 0] : 1.0f;
}

template <class Source>
void launch(const esa_cuda_device *dev, const esa_view &y, const Source &x, cudaStream_t stream)
{
    const unsigned many = (unsigned)dev->multiprocessors * 16;
    if (y.dtype == ESA_DTYPE_F8)
        f8_kernel<<<(unsigned)y.rows, THREADS, 0, stream>>>(y, x);
    else if (y.dtype == ESA_DTYPE_F32)
        element_kernel<float><<<many, THREADS, 0, stream>>>(y, x);
    else
        element_kernel<__nv_bfloat16><<<many, THREADS, 0, stream>>>(y, x);
}

} // namespace

esa_status convert_run(esa_cuda_device *dev, const esa_convert_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_convert_args &a = *args;
    const cudaStream_t on = (cudaStream_t)stream;
    if (a.y.rows < 1 || a.y.cols < 1) return ESA_OK;
    if (a.y.rows > 0x7fffffff)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "weights of %lld rows, expected at most %d",
                           (long long)a.y.rows, 0x7fffffff);
    const from_f8 f8 = { (const __nv_fp8_e4m3 *)a.x, a.x_scale, a.x_scales };
    if (!a.x)
        launch(dev, a.y, from_random{ a.seed, (uint64_t)a.first, a.mean, a.deviation }, on);
    else if (a.x_dtype == ESA_DTYPE_F8 && a.y.dtype == ESA_DTYPE_F8)
        keep_kernel<<<(unsigned)a.y.rows, THREADS, 0, on>>>(a.y, f8);
    else if (a.x_dtype == ESA_DTYPE_F8)
        launch(dev, a.y, f8, on);
    else if (a.x_dtype == ESA_DTYPE_F32)
        launch(dev, a.y, from_memory<float>{ (const float *)a.x }, on);
    else if (a.x_dtype == ESA_DTYPE_F16)
        launch(dev, a.y, from_memory<__half>{ (const __half *)a.x }, on);
    else
        launch(dev, a.y, from_memory<__nv_bfloat16>{ (const __nv_bfloat16 *)a.x }, on);
    return launch_check(dev, "conversion of weights");
}
