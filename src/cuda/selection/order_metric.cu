// order_metric.cu - the metric of a head: second moments of sampled tokens of the other side.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/order.cuh"

namespace
{

enum { TILE = 64, STEP = 64, THREADS = 256, FINISH_THREADS = 256 };

struct tiles {
    float a[STEP][TILE + 4], b[STEP][TILE + 4];
    int64_t row[STEP]; // first element of each sample
};

// One 64 x 64 tile of the upper half; thread blocks of (head, tile). A thread sums 4 x 4 products
// over the samples, in order.
template <class T>
__global__ void __launch_bounds__(THREADS)
    moment_kernel(const __grid_constant__ order_job x, int across)
{
    __shared__ tiles shared;
    const int per_head = across * (across + 1) / 2, own = blockIdx.x / per_head;
    int tile = blockIdx.x % per_head, ti = 0;
    while (tile >= across - ti) tile -= across - ti++;
    const int tj = ti + tile;
    const int side = own >= x.side[1].at;
    const order_head<T> head(x, own);
    const order_side &other = x.side[1 - side];
    const int ratio = x.Hq / x.Hkv, h0 = side ? head.h * ratio : head.h / ratio;
    const int64_t N = side ? other.N : key_length(x.kv_len, head.b, other.N),
                  all = N * (side ? ratio : 1);
    const int count = (int)min((int64_t)ESA_ORDER_MOMENTS, all);
    const int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
    float acc[4][4] = {};
    for (int first = 0; first < count; first += STEP) {
        __syncthreads(); // the last step has been read
        if (threadIdx.x < STEP && first + (int)threadIdx.x < count) {
            const uint32_t at = esa_order_sample(first + threadIdx.x, count, (uint64_t)all);
            shared.row[threadIdx.x] = head.b * other.stride[0] +
                                      (h0 + at / (uint32_t)N) * other.stride[1] +
                                      at % (uint32_t)N * other.stride[2];
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < STEP * TILE; i += THREADS) {
            const int s = i / TILE, d = i % TILE;
            const bool there = first + s < count;
            const T *const row = (const T *)other.data + (there ? shared.row[s] : 0);
            const int da = ti * TILE + d, db = tj * TILE + d;
            shared.a[s][d] = there && da < x.D ? to_float(row[da]) : 0.0f;
            shared.b[s][d] = there && db < x.D ? to_float(row[db]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int s = 0; s < STEP; ++s) {
            const float4 a = *(const float4 *)&shared.a[s][ty],
                         b = *(const float4 *)&shared.b[s][tx];
            const float p[4] = { a.x, a.y, a.z, a.w }, q[4] = { b.x, b.y, b.z, b.w };
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(p[i], q[j], acc[i][j]);
        }
    }
    float *const out = x.moment + (int64_t)own * x.pitch * x.pitch;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = ti * TILE + ty + i, c = tj * TILE + tx + j;
            if (r >= x.pitch || c >= x.pitch) continue;
            out[r * x.pitch + c] = acc[i][j];
            if (ti != tj) out[c * x.pitch + r] = acc[i][j];
        }
}

// Divides by the mean of the diagonal and adds the ridge; the unit matrix if there is no usable
// mean. A thread block per head.
__global__ void __launch_bounds__(FINISH_THREADS) metric_kernel(const __grid_constant__ order_job x)
{
    __shared__ float part[FINISH_THREADS / 32];
    const float *const in = x.moment + (int64_t)blockIdx.x * x.pitch * x.pitch;
    bf16 *const out = x.metric + (int64_t)blockIdx.x * x.pitch * x.pitch;
    float sum = 0.0f;
    for (int d = threadIdx.x; d < x.D; d += FINISH_THREADS) sum += in[d * x.pitch + d];
    sum = lanes_sum<32>(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = lanes_sum<32>(threadIdx.x % 32 < FINISH_THREADS / 32 ? part[threadIdx.x % 32] : 0.0f);
    const float mean = sum / (float)x.D;
    const bool usable = mean > 0.0f && isfinite(mean) && isfinite(1.0f / mean);
    for (int i = threadIdx.x; i < x.pitch * x.pitch; i += FINISH_THREADS) {
        const bool diagonal = i / x.pitch == i % x.pitch && i / x.pitch < x.D;
        const float c = usable ? in[i] / mean + (diagonal ? ESA_ORDER_RIDGE : 0.0f)
                               : (diagonal ? 1.0f : 0.0f);
        out[i] = __float2bfloat16_rn(c);
    }
}

} // namespace

esa_status order_metric(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                        cudaStream_t stream)
{
    const int across = ceil_div(job.pitch, (int)TILE);
    const unsigned grid = (unsigned)(job.heads * (across * (across + 1) / 2));
    if (dtype == ESA_DTYPE_F32)
        moment_kernel<float><<<grid, THREADS, 0, stream>>>(job, across);
    else if (dtype == ESA_DTYPE_F16)
        moment_kernel<f16><<<grid, THREADS, 0, stream>>>(job, across);
    else
        moment_kernel<bf16><<<grid, THREADS, 0, stream>>>(job, across);
    metric_kernel<<<(unsigned)job.heads, FINISH_THREADS, 0, stream>>>(job);
    return launch_check(dev, "the metric of an order");
}
