// quantise.cuh - plain kernels that put q, k and v into 8 bits; the library has a fast one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp8.h>

#include "parts.cuh"

// Grids (H, parts) of D threads; mean and top are 0 before.
__global__ void column_mean(const __nv_bfloat16 *x, float *mean, int N)
{
    const int h = blockIdx.x, d = threadIdx.x, part = (N + gridDim.y - 1) / gridDim.y;
    const int from = part * blockIdx.y, to = min(N, from + part);
    float s = 0;
    for (int n = from; n < to; ++n) s += __bfloat162float(x[((int64_t)h * N + n) * D + d]);
    atomicAdd(&mean[h * D + d], s / N);
}
__global__ void column_top(const __nv_bfloat16 *x, const float *mean, float *top, int N)
{
    const int h = blockIdx.x, d = threadIdx.x, part = (N + gridDim.y - 1) / gridDim.y;
    const int from = part * blockIdx.y, to = min(N, from + part);
    float s = 0;
    for (int n = from; n < to; ++n)
        s = fmaxf(s, fabsf(__bfloat162float(x[((int64_t)h * N + n) * D + d]) - mean[h * D + d]));
    atomicMax((int *)&top[h * D + d], __float_as_int(s));
}

// Grid (blocks, H) of 256 threads. mean: of the keys, or null.
template <bool INT8>
__global__ void round_rows(const __nv_bfloat16 *x, const float *mean, uint8_t *y, float *scale,
                           int N, int padded)
{
    __shared__ float tops[8];
    const int h = blockIdx.y, b = blockIdx.x;
    const auto value = [&](int i) {
        const int n = b * KEYS + i / D, d = i % D;
        if (n >= N) return 0.0f;
        return __bfloat162float(x[((int64_t)h * N + n) * D + d]) - (mean ? mean[h * D + d] : 0.0f);
    };
    float top = 0;
    for (int i = threadIdx.x; i < KEYS * D; i += 256) top = fmaxf(top, fabsf(value(i)));
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < 8; ++i) top = fmaxf(top, tops[i]);
    const float s = top > 0 ? top / (INT8 ? 127.0f : 448.0f) : 1.0f;
    if (threadIdx.x == 0) scale[h * gridDim.x + b] = s;
    for (int i = threadIdx.x; i < KEYS * D; i += 256) {
        const float v = value(i) / s;
        y[((int64_t)h * padded + b * KEYS) * D + i] = INT8 ? (uint8_t)(int8_t)__float2int_rn(v)
                                                           : __nv_cvt_float_to_fp8(
                                                                 v, __NV_SATFINITE, __NV_E4M3);
    }
}

// y: [H][D][padded], keys in the order in which P lies in registers.
__global__ void round_values(const __nv_bfloat16 *v, const float *mean, const float *top,
                             uint8_t *y, float *scale, int N, int padded)
{
    const int h = blockIdx.y, b = blockIdx.x;
    for (int i = threadIdx.x; i < KEYS * D; i += 256) {
        const int d = i / KEYS, slot = i % KEYS, u = slot % 16;
        const int key = b * KEYS + slot / 16 * 16 + u % 4 / 2 * 8 + u / 4 * 2 + u % 2;
        const float s = top[h * D + d] > 0 ? top[h * D + d] / 448.0f : 1.0f;
        if (b == 0 && slot == 0) scale[h * D + d] = s;
        float x = 0;
        if (key < N)
            x = (__bfloat162float(v[((int64_t)h * N + key) * D + d]) - mean[h * D + d]) / s;
        y[((int64_t)h * D + d) * padded + b * KEYS + slot] = __nv_cvt_float_to_fp8(
            x, __NV_SATFINITE, __NV_E4M3);
    }
}
