// latents.cu - modulation, guidance, a step of the scheduler, and the figures of a step.
// SPDX-License-Identifier: Apache-2.0
//
// The latents are f32. Products and sums are written as single operations (__fmul_rn, __fadd_rn),
// because the compiler would otherwise fuse them, and the bits would differ from the CPU's.
#include "base/nn_args.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

enum { THREADS = 256 };

__device__ __forceinline__ int64_t first_element()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}
__device__ __forceinline__ int64_t all_threads() { return (int64_t)gridDim.x * THREADS; }

__global__ void __launch_bounds__(THREADS)
    modulate_kernel(float *e, const float *table, const float *add, int64_t count, int64_t cols)
{
    for (int64_t i = first_element(); i < count; i += all_threads())
        e[i] = table[i] + add[i % cols];
}

__global__ void __launch_bounds__(THREADS)
    guide_kernel(float *v, const float *negative, float scale, int64_t count)
{
    for (int64_t i = first_element(); i < count; i += all_threads()) {
        const float n = negative[i];
        v[i] = __fadd_rn(n, __fmul_rn(scale, __fsub_rn(v[i], n)));
    }
}

// (keep x - pull m0) - pull rest
__device__ __forceinline__ float leap(float keep, float x, float pull, float m0, float rest)
{
    return __fsub_rn(__fsub_rn(__fmul_rn(keep, x), __fmul_rn(pull, m0)), __fmul_rn(pull, rest));
}

__global__ void __launch_bounds__(THREADS) unipc_kernel(const __grid_constant__ esa_step_args a)
{
    for (int64_t i = first_element(); i < a.count; i += all_threads()) {
        float x = a.x[i], m1 = 0.0f;
        const float m = __fsub_rn(x, __fmul_rn(a.sigma, a.v[i]));
        if (a.correct) {
            const float m0 = a.m0[i];
            float old = 0.0f;
            if (a.order[0] > 1) old = __fmul_rn(a.rho1, __fdiv_rn(__fsub_rn(a.m1[i], m0), a.r[0]));
            x = leap(a.keep[0], a.last[i], a.pull[0], m0,
                     __fadd_rn(old, __fmul_rn(a.rho2, __fsub_rn(m, m0))));
            a.m1[i] = m1 = m0;
        }
        a.m0[i] = m;
        a.last[i] = x;
        float ahead = 0.0f;
        if (a.order[1] > 1) ahead = __fmul_rn(0.5f, __fdiv_rn(__fsub_rn(m1, m), a.r[1]));
        a.x[i] = leap(a.keep[1], x, a.pull[1], m, ahead);
    }
}

__global__ void __launch_bounds__(THREADS) mix_kernel(const __grid_constant__ esa_step_args a)
{
    for (int64_t i = first_element(); i < a.count; i += all_threads()) {
        const float x = a.x[i];
        const float m = __fsub_rn(__fmul_rn(a.keep[0], x), __fmul_rn(a.pull[0], a.v[i]));
        float d = m;
        if (a.order[1] > 1) d = __fsub_rn(__fmul_rn(a.rho1, m), __fmul_rn(a.rho2, a.m0[i]));
        float next = __fsub_rn(__fmul_rn(a.keep[1], x), __fmul_rn(a.pull[1], d));
        if (a.noise) next = __fadd_rn(next, __fmul_rn(a.sigma, a.noise[i]));
        a.x[i] = next;
        if (a.m0) a.m0[i] = m;
    }
}

__global__ void __launch_bounds__(THREADS)
    euler_kernel(float *x, const float *v, float dt, int64_t count)
{
    for (int64_t i = first_element(); i < count; i += all_threads())
        x[i] = __fadd_rn(x[i], __fmul_rn(dt, v[i]));
}

// ---- figures ----

enum { SUMS = sizeof(esa_step_figures) / sizeof(double) };
static_assert(SUMS == 6, "the sums of esa_step_figures, in their order");

// The sum of each value over the thread block, in thread 0.
__device__ __forceinline__ void block_sums(double (&sum)[SUMS])
{
    __shared__ double room[SUMS][THREADS / 32];
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        sum[s] = lanes_sum<32>(sum[s]);
        if (threadIdx.x % 32 == 0) room[s][threadIdx.x / 32] = sum[s];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        sum[s] = room[s][0];
        for (int w = 1; w < THREADS / 32; ++w) sum[s] += room[s][w];
    }
}

// |a - b|, or |a| if there is no b; 0 if there is no a.
__device__ __forceinline__ double distance(const float *a, const float *b, int64_t i)
{
    return a ? fabs((double)a[i] - (b ? (double)b[i] : 0.0)) : 0.0;
}

// One part for each of the ESA_STEP_PARTS thread blocks. Their number is fixed, so the order of the
// sums does not depend on the GPU.
__global__ void __launch_bounds__(THREADS) parts_kernel(const __grid_constant__ esa_figures_args a)
{
    double sum[SUMS] = {};
    for (int64_t i = first_element(); i < a.count; i += all_threads()) {
        if (a.x && !isfinite(a.x[i])) sum[0] += 1.0;
        if (a.x_before) sum[1] += distance(a.x, a.x_before, i);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            sum[2 + b] += distance(a.v[b], nullptr, i);
            if (a.v_before[b]) sum[4 + b] += distance(a.v[b], a.v_before[b], i);
        }
    }
    block_sums(sum);
    if (threadIdx.x == 0) {
        double *out = (double *)(a.out + 1 + blockIdx.x);
        for (int s = 0; s < SUMS; ++s) out[s] = sum[s];
    }
}

__global__ void __launch_bounds__(THREADS) total_kernel(esa_step_figures *figures)
{
    static_assert((int)THREADS == (int)ESA_STEP_PARTS, "one part for each thread");
    double sum[SUMS];
    const double *part = (const double *)(figures + 1 + threadIdx.x);
#pragma unroll
    for (int s = 0; s < SUMS; ++s) sum[s] = part[s];
    block_sums(sum);
    if (threadIdx.x == 0)
        for (int s = 0; s < SUMS; ++s) ((double *)figures)[s] = sum[s];
}

// Enough thread blocks to fill the GPU twice; the loops of the kernels do the rest.
unsigned blocks_for(const esa_cuda_device *dev, int64_t count)
{
    const int64_t wanted = ceil_div(count, (int64_t)THREADS), most = 16 * dev->multiprocessors;
    return (unsigned)(wanted < most ? wanted : most);
}

} // namespace

esa_status modulate_run(esa_cuda_device *dev, float *e, const float *table, const float *add,
                        int64_t rows, int64_t cols, void *stream)
{
    const current_device scope(dev->ordinal);
    const int64_t count = rows * cols;
    if (count < 1) return ESA_OK;
    modulate_kernel<<<blocks_for(dev, count), THREADS, 0, (cudaStream_t)stream>>>(e, table, add,
                                                                                  count, cols);
    return launch_check(dev, "modulation");
}

esa_status guide_run(esa_cuda_device *dev, float *v, const float *negative, float scale,
                     int64_t count, void *stream)
{
    const current_device scope(dev->ordinal);
    if (count < 1) return ESA_OK;
    guide_kernel<<<blocks_for(dev, count), THREADS, 0, (cudaStream_t)stream>>>(v, negative, scale,
                                                                               count);
    return launch_check(dev, "guidance");
}

esa_status step_run(esa_cuda_device *dev, const esa_step_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    if (args->count < 1) return ESA_OK;
    const unsigned blocks = blocks_for(dev, args->count);
    if (args->kind == ESA_STEP_EULER)
        euler_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(args->x, args->v, args->dt,
                                                                   args->count);
    else if (args->kind == ESA_STEP_MIX)
        mix_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*args);
    else
        unipc_kernel<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(*args);
    return launch_check(dev, "a step of the scheduler");
}

esa_status figures_run(esa_cuda_device *dev, const esa_figures_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    parts_kernel<<<ESA_STEP_PARTS, THREADS, 0, (cudaStream_t)stream>>>(*args);
    total_kernel<<<1, THREADS, 0, (cudaStream_t)stream>>>(args->out);
    return launch_check(dev, "the figures of a step");
}
