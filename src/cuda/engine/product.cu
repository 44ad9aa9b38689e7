// product.cu - matrix products: the entry points, and the choice of an algorithm by measuring.
// SPDX-License-Identifier: Apache-2.0
//
// prepare runs the algorithms that cuBLASLt offers on random numbers. Only those count whose output
// equals that of the first bit for bit, so the choice changes the time and nothing else. Outputs
// are compared by a 64-bit sum over all elements, which needs no memory for a second output.
#include "cuda/engine/product.cuh"

#include <cuda_fp8.h>
#include <float.h>
#include "cuda/runtime/lanes.cuh"

namespace
{

using namespace products;

enum { LONG_MS = 5, FEW = 4, ROUNDS = 2 }; // products above LONG_MS: only FEW algorithms are tried

// ---- random numbers and sums over outputs ----

static __device__ __forceinline__ uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Fills a matrix with numbers from -size to size; F8 rows get the scale size / ESA_F8_MAX.
__global__ void __launch_bounds__(256) fill_kernel(const __grid_constant__ esa_view v, float size)
{
    const int64_t count = v.rows * v.cols, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const float unit = (float)(mixed(i + 1) >> 40) * 0x1p-23f - 1.0f;
        const int64_t r = i / v.cols, c = i % v.cols;
        if (v.dtype == ESA_DTYPE_F8) {
            ((__nv_fp8_storage_t *)v.data)[r * v.ld + c] = __nv_cvt_float_to_fp8(
                unit * ESA_F8_MAX, __NV_SATFINITE, __NV_E4M3);
            if (c == 0) v.scale[r] = size / ESA_F8_MAX;
        } else {
            store(v, r, c, unit * size);
        }
    }
}

// Adds up a number for each element that depends on its place and its bits.
__global__ void __launch_bounds__(256)
    digest_kernel(const __grid_constant__ esa_view v, unsigned long long *sum)
{
    const int64_t count = v.rows * v.cols, step = (int64_t)gridDim.x * blockDim.x;
    unsigned long long own = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const int64_t at = i / v.cols * v.ld + i % v.cols;
        const uint32_t bits = v.dtype == ESA_DTYPE_F32 ? ((const uint32_t *)v.data)[at]
                                                       : ((const uint16_t *)v.data)[at];
        own += mixed(((uint64_t)i << 20) ^ mixed(bits));
    }
    own = lanes_sum<32>(own);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, own); // whole numbers: any order gives the same sum
}

enum { MANY = 4096 }; // thread blocks of the two kernels

// ---- measuring ----

struct trial {
    esa_cuda_device *dev;
    plan *p;
    esa_product_args args;
    void *ws;
    unsigned long long *sum; // on the device
    cudaEvent_t from, to;
    cudaStream_t stream;
};

// Runs algorithm i once; *ms is its time.
esa_status run_once(const trial &t, int i, float *ms, bool *refused)
{
    esa_status status = device_check(t.dev, cudaEventRecord(t.from, t.stream), "timing a product");
    if (!status) status = run_algorithm(t.dev, t.p, t.args, i, t.ws, t.stream, refused);
    if (status || *refused) return status;
    status = device_check(t.dev, cudaEventRecord(t.to, t.stream), "timing a product");
    if (!status) status = device_check(t.dev, cudaEventSynchronize(t.to), "running a product");
    if (!status)
        status = device_check(t.dev, cudaEventElapsedTime(ms, t.from, t.to), "timing a product");
    return status;
}

esa_status digest(const trial &t, unsigned long long *sum)
{
    esa_status status = device_check(t.dev, cudaMemsetAsync(t.sum, 0, sizeof *sum, t.stream),
                                     "comparing products");
    if (status) return status;
    digest_kernel<<<MANY, 256, 0, t.stream>>>(t.args.y, t.sum);
    status = launch_check(t.dev, "comparing products");
    if (!status)
        status = device_check(
            t.dev, cudaMemcpyAsync(sum, t.sum, sizeof *sum, cudaMemcpyDeviceToHost, t.stream),
            "comparing products");
    if (!status)
        status = device_check(t.dev, cudaStreamSynchronize(t.stream), "comparing products");
    return status;
}

// Leaves the fastest algorithm in p->choice.
esa_status measure(const trial &t)
{
    unsigned long long first = 0, sum = 0;
    float best = FLT_MAX, ms = 0.0f;
    int limit = CANDIDATES, choice = -1;
    bool known = false; // first is the sum of the first algorithm that runs
    for (int i = t.p->choice; i < t.p->count && i < limit; ++i) {
        bool refused = false;
        esa_status status = run_once(t, i, &ms, &refused);
        if (!status && !refused) status = digest(t, &sum);
        if (status) return status;
        if (refused) {
            if (limit < CANDIDATES) ++limit;
            continue;
        }
        if (!known) first = sum;
        if (sum != first) continue;
        for (int round = 0; round < ROUNDS; ++round) {
            status = run_once(t, i, &ms, &refused);
            if (status) return status;
            if (ms < best) {
                best = ms;
                choice = i;
            }
        }
        // The first run of an algorithm also loads its code, so it says nothing.
        if (!known && best > LONG_MS) limit = i + FEW;
        known = true;
    }
    // All refused: the next product finds out and takes another way.
    if (choice >= 0) t.p->choice = choice;
    return ESA_OK;
}

// Prepares t->args with w, bias and scales of its own, in one block of memory.
esa_status fill_and_measure(trial *t, void *block)
{
    esa_product_args &a = t->args;
    carve c(block);
    a.w.data = c.take<char>(a.w.rows * a.w.ld * esa_view_element(a.w.dtype));
    esa_view bias = esa_view_of(c.take<char>(a.w.rows * 4),
                                a.w.dtype == ESA_DTYPE_F32 ? ESA_DTYPE_F32 : ESA_DTYPE_BF16,
                                ESA_DEVICE_CUDA, 1, a.w.rows);
    if (a.bias) a.bias = bias.data;
    if (a.w.dtype == ESA_DTYPE_F8) a.w.scale = c.take<float>(a.w.rows);
    t->sum = c.take<unsigned long long>(1);
    t->ws = c.take<char>(WORKSPACE);
    fill_kernel<<<MANY, 256, 0, t->stream>>>(a.x, 1.0f);
    fill_kernel<<<MANY, 256, 0, t->stream>>>(a.w, 2.0f / sqrtf((float)a.w.cols));
    fill_kernel<<<MANY, 256, 0, t->stream>>>(bias, 1.0f);
    const esa_status status = launch_check(t->dev, "filling matrices");
    return status ? status : measure(*t);
}

int64_t block_bytes(const esa_product_args &a)
{
    carve c(nullptr);
    c.take<char>(a.w.rows * a.w.ld * esa_view_element(a.w.dtype));
    c.take<char>(a.w.rows * 4);
    c.take<float>(a.w.rows);
    c.take<unsigned long long>(1);
    c.take<char>(WORKSPACE);
    return c.bytes();
}

esa_status prepare(esa_cuda_device *dev, plan *p, const esa_product_args &args, cudaStream_t stream)
{
    void *block = nullptr;
    trial t = { dev, p, args, nullptr, nullptr, nullptr, nullptr, stream };
    t.args.add = 0; // sums of earlier runs would make every output another one
    const cudaError_t result = cudaMalloc(&block, (size_t)block_bytes(args));
    if (result == cudaErrorMemoryAllocation) { // then the first algorithm has to do
        cudaGetLastError();
        return ESA_OK;
    }
    esa_status status = device_check(dev, result, "allocating GPU memory to measure products");
    if (!status) status = device_check(dev, cudaEventCreate(&t.from), "creating a timing event");
    if (!status) status = device_check(dev, cudaEventCreate(&t.to), "creating a timing event");
    if (!status) status = fill_and_measure(&t, block);
    if (t.from) cudaEventDestroy(t.from);
    if (t.to) cudaEventDestroy(t.to);
    if (block) cudaFree(block);
    p->measured = !status;
    return status;
}

// ---- checks ----

esa_status check(esa_cuda_device *dev, const esa_product_args &a)
{
    if (a.add && (a.x.rows == 1 || a.act != ESA_ACT_NONE))
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "a product with one row or an activation cannot be added to its output");
    if (a.w.dtype != ESA_DTYPE_F8) return ESA_OK;
    const int64_t version = dev->products->library.version;
    if (dev->major == 9 && dev->minor == 0 && version >= LT_VERSION_OUTER) return ESA_OK;
    return device_fail(dev, ESA_ERR_UNSUPPORTED,
                       "fp8 matrix products need compute capability 9.0 and cuBLASLt 12.9 or "
                       "newer; GPU %d has %d.%d, cuBLASLt is %d.%d",
                       dev->ordinal, dev->major, dev->minor, (int)(version / 10000),
                       (int)(version / 100 % 100));
}

} // namespace

esa_status products_library(esa_cuda_device *dev, const char **name)
{
    const current_device scope(dev->ordinal);
    const esa_status status = open_library(dev);
    *name = status ? nullptr : dev->products->name;
    return status;
}

int64_t product_workspace(const esa_cuda_device *) { return WORKSPACE; }

esa_status product_prepare(esa_cuda_device *dev, const esa_product_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    esa_status status = open_library(dev);
    if (!status) status = check(dev, *args);
    if (status || args->x.rows <= 1 || args->w.rows < 1) return status;
    plan *p = find_plan(dev, *args);
    if (!p) return ESA_ERR_DEVICE;
    if (p->measured || p->way == PLAIN || p->count - p->choice < 2) return ESA_OK;
    return prepare(dev, p, *args, (cudaStream_t)stream);
}

esa_status product_run(esa_cuda_device *dev, const esa_product_args *args, void *ws, void *stream)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t on = (cudaStream_t)stream;
    esa_status status = open_library(dev);
    if (!status) status = check(dev, *args);
    if (status || args->x.rows < 1 || args->w.rows < 1) return status;
    if (args->x.rows == 1) return run_gemv(dev, *args, on);
    plan *p = find_plan(dev, *args);
    if (!p) return ESA_ERR_DEVICE;
    while (p->way != PLAIN) {
        bool refused = false;
        status = run_algorithm(dev, p, *args, p->choice, ws, on, &refused);
        if (status) return status;
        if (!refused) return p->way == BARE ? run_finish(dev, *args, on) : ESA_OK;
        status = next_algorithm(dev, p, *args);
        if (status) return status;
    }
    return run_plain(dev, *args, on);
}
