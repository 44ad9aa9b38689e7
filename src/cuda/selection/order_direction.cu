// order_direction.cu - the principal direction of a large node: power iterations on a sample.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block per node holds the samples in shared memory, X [samples][pitch] in bf16 with rows
// 16 bytes apart from the banks of their neighbours. A turn is z = X^T y, w = C z, y = X w. In the
// first two a thread owns two columns and every G-th row, and the G partial sums are added in
// order. In the third a thread owns a row. C comes from L2.
#include "cuda/selection/order.cuh"

namespace
{

enum { THREADS = 256, WARPS = THREADS / 32 };

struct shared_parts {
    bf16 *x;                 // [samples][pitch + 8]
    float *sums;             // [groups][pitch], at most 2 * THREADS
    float *y;                // [samples]; first their tokens
    float *z, *w;            // [pitch]
    float *top;              // [WARPS]
    unsigned long long *far; // [WARPS]
};

// Also counts the bytes, with base null.
__host__ __device__ inline int place(shared_parts *p, char *base, int samples, int pitch)
{
    int used = 0;
    auto take = [&](int bytes) {
        char *const part = base + used;
        used += (bytes + 15) / 16 * 16;
        return part;
    };
    p->x = (bf16 *)take(samples * (pitch + 8) * 2);
    p->sums = (float *)take(2 * THREADS * 4);
    p->y = (float *)take(samples * 4);
    p->z = (float *)take(pitch * 4);
    p->w = (float *)take(pitch * 4);
    p->top = (float *)take(WARPS * 4);
    p->far = (unsigned long long *)take(WARPS * 8);
    return used;
}

// sums[group][column] = sum over every G-th row of m [rows][stride] times f[row].
template <int UNROLL>
DEV void columns(float *sums, const bf16 *m, int stride, const float *f, int rows, int pitch)
{
    const int words = pitch / 2, groups = THREADS / words, group = threadIdx.x / words,
              word = threadIdx.x % words;
    if (group >= groups) return;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll UNROLL
    for (int i = group; i < rows; i += groups) {
        const uint32_t pair = *(const uint32_t *)(m + i * stride + 2 * word);
        lo = fmaf(__uint_as_float(pair << 16), f[i], lo);
        hi = fmaf(__uint_as_float(pair & 0xffff0000u), f[i], hi);
    }
    *(float2 *)(sums + group * pitch + 2 * word) = make_float2(lo, hi);
}

DEV float add_groups(const float *sums, int d, int pitch)
{
    float s = 0.0f;
    for (int g = 0; g < THREADS / (pitch / 2); ++g) s += sums[g * pitch + d];
    return s;
}

template <class T>
__global__ void __launch_bounds__(THREADS) direction_kernel(const __grid_constant__ order_job x)
{
    extern __shared__ __align__(16) char memory[];
    const int own = blockIdx.x >> x.level, slot = blockIdx.x & ((1 << x.level) - 1);
    const order_head<T> head(x, own);
    const uint4 node = head.s.nodes[(1 << x.level) + slot];
    if (node.y <= head.s.small) return;
    shared_parts p;
    place(&p, memory, x.samples, x.pitch);
    const int n = min((int)node.y, x.samples), pitch = x.pitch, warp = threadIdx.x / 32;
    const int32_t *const perm = head.s.perm + head.at + node.x;
    int32_t *const token = (int32_t *)p.y;
    if (threadIdx.x < n) token[threadIdx.x] = perm[esa_order_sample(threadIdx.x, n, node.y)];
    __syncthreads();
    load_centred(p.x, head, token, n, n, x.D, pitch);
    const bf16 *const metric = x.metric + (int64_t)own * pitch * pitch;
    float y = esa_order_weight(threadIdx.x), w = 0.0f;
    if (threadIdx.x < n) p.y[threadIdx.x] = y;
    __syncthreads();
    for (int turn = 0; turn <= ESA_ORDER_ROUNDS; ++turn) {
        columns<8>(p.sums, p.x, pitch + 8, p.y, n, pitch);
        __syncthreads();
        if (threadIdx.x < pitch) p.z[threadIdx.x] = add_groups(p.sums, threadIdx.x, pitch);
        __syncthreads();
        columns<16>(p.sums, metric, pitch, p.z, pitch, pitch);
        __syncthreads();
        w = threadIdx.x < pitch ? add_groups(p.sums, threadIdx.x, pitch) : 0.0f;
        const float top = lanes_max<32>(fabsf(w));
        if (threadIdx.x < pitch) p.w[threadIdx.x] = w;
        if (threadIdx.x % 32 == 0) p.top[warp] = top;
        __syncthreads();
        float scale = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) scale = fmaxf(scale, p.top[i]);
        scale = scale > 0.0f ? 1.0f / scale : 1.0f; // no variance: w stays 0
        w *= scale;
        y = 0.0f;
        if (threadIdx.x < n) {
            const bf16 *const row = p.x + threadIdx.x * (pitch + 8);
#pragma unroll 4
            for (int d = 0; d < pitch; d += 8) {
                float v[8];
                packed<bf16>{ *(const uint4 *)(row + d) }.unpack(v);
                const float4 a = *(const float4 *)(p.w + d), b = *(const float4 *)(p.w + d + 4);
                y = fmaf(v[0], a.x, y), y = fmaf(v[1], a.y, y), y = fmaf(v[2], a.z, y);
                y = fmaf(v[3], a.w, y), y = fmaf(v[4], b.x, y), y = fmaf(v[5], b.y, y);
                y = fmaf(v[6], b.z, y), y = fmaf(v[7], b.w, y);
            }
            y *= scale;
            p.y[threadIdx.x] = y;
        }
        __syncthreads();
    }
    // The sample of largest magnitude, the first of equals, decides the sign.
    unsigned long long far = threadIdx.x < n ? (unsigned long long)__float_as_uint(fabsf(y)) << 32 |
                                                   (0xffffffffu - threadIdx.x)
                                             : 0;
    far = lanes_max<32>(far);
    if (threadIdx.x % 32 == 0) p.far[warp] = far;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) far = max(far, p.far[i]);
    const float sign = p.y[0xffffffffu - (uint32_t)far] < 0.0f ? -1.0f : 1.0f;
    if (threadIdx.x < pitch) {
        float *const out = x.direction + (int64_t)blockIdx.x * pitch;
        out[threadIdx.x] = sign * w;
    }
}

template <class T>
esa_status launch(esa_cuda_device *dev, const order_job &job, cudaStream_t stream)
{
    const int bytes = order_direction_bytes(job.samples, job.pitch);
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(direction_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes),
        "shared memory of the directions of an order");
    if (status) return status;
    direction_kernel<T><<<(unsigned)job.heads << job.level, THREADS, (size_t)bytes, stream>>>(job);
    return launch_check(dev, "the directions of an order");
}

} // namespace

int order_direction_bytes(int samples, int pitch)
{
    shared_parts p;
    return place(&p, nullptr, samples, pitch);
}

esa_status order_direction(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                           cudaStream_t stream)
{
    if (dtype == ESA_DTYPE_F32) return launch<float>(dev, job, stream);
    return dtype == ESA_DTYPE_F16 ? launch<f16>(dev, job, stream) : launch<bf16>(dev, job, stream);
}
