// rounding.cuh - runs the rounding kernels of one format of values alone, and times their launches.
// SPDX-License-Identifier: Apache-2.0
//
// The including file includes the file of the plugin whose kernels it runs.
#pragma once

#include <algorithm>
#include <vector>

#include <stdlib.h>

#include "cuda/rounding.h"

namespace
{

// Keeps the first error.
struct cuda_calls {
    const char *error = nullptr;
    void operator()(cudaError_t result)
    {
        if (result != cudaSuccess && !error) error = cudaGetErrorString(result);
    }
};

// Device memory of a test.
struct device_memory {
    cuda_calls &check;
    std::vector<void *> parts;
    explicit device_memory(cuda_calls &check) : check(check) {}
    ~device_memory()
    {
        for (void *part : parts) cudaFree(part);
    }
    void *take(int64_t bytes)
    {
        void *part = nullptr;
        check(cudaMalloc(&part, (size_t)bytes));
        parts.push_back(part);
        return part;
    }
    template <class T> const T *copy(const T *host, int64_t bytes)
    {
        if (!host) return nullptr;
        void *const part = take(bytes);
        if (!check.error) check(cudaMemcpy(part, host, (size_t)bytes, cudaMemcpyHostToDevice));
        return (const T *)part;
    }
};

// Bytes from the first element of a view to its last one.
int64_t view_bytes(const int64_t *stride, int64_t B, int64_t H, int64_t N, int64_t D)
{
    return ((B - 1) * stride[0] + (H - 1) * stride[1] + (N - 1) * stride[2] + D) * 2;
}
int64_t perm_bytes(const int64_t *stride, int64_t B, int64_t H, int64_t N)
{
    return ((B - 1) * stride[0] + (H - 1) * stride[1] + N) * 4;
}

int level_of_gpu()
{
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) != cudaSuccess)
        return 0;
    return major * 10 + minor;
}

quantised without_unused(quantised q, const esa_attn_args *a)
{
    if (!a->lse) q.q_centre = nullptr;
    return q;
}

// value: bytes of a value.
template <class Values>
const char *round_once(rounded *out, const esa_attn_args *args, int64_t value)
{
    cuda_calls check;
    device_memory memory(check);
    esa_attn_args a = *args;
    const auto put = [&](const void *host, const int64_t *stride, int64_t H, int64_t N) {
        return (const void *)memory.copy((const char *)host, view_bytes(stride, a.B, H, N, a.D));
    };
    a.q = put(a.q, a.q_stride, a.Hq, a.Nq);
    a.k = put(a.k, a.k_stride, a.Hkv, a.Nk);
    a.v = put(a.v, a.v_stride, a.Hkv, a.Nk);
    a.perm_q = memory.copy(a.perm_q, perm_bytes(a.perm_q_stride, a.B, a.Hq, a.Nq));
    a.perm_k = memory.copy(a.perm_k, perm_bytes(a.perm_k_stride, a.B, a.Hkv, a.Nk));
    a.kv_len = memory.copy(a.kv_len, a.B * 4);
    carve count(nullptr);
    carve_quantised(&count, &a, value);
    const size_t bytes = (size_t)count.bytes();
    void *const ws = memory.take((int64_t)bytes);
    if (check.error) return check.error;
    check(cudaMemset(ws, 0x5a, bytes));
    carve on_device(ws);
    const quantised q = without_unused(carve_quantised(&on_device, &a, value), &a);
    const quantise_plan plan = plan_of(&a, &q);
    const int steps = steps_of<Values>(plan);
    for (int step = 0; step < steps; ++step) {
        launch_step<Values>(plan, &a, step, nullptr);
        check(cudaGetLastError());
    }
    check(cudaDeviceSynchronize());
    out->memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!out->memory) return "no memory";
    check(cudaMemcpy(out->memory, ws, bytes, cudaMemcpyDeviceToHost));
    carve on_host(out->memory);
    const quantised h = carve_quantised(&on_host, &a, value);
    out->nq = h.nq, out->nk = h.nk, out->nk_pad = h.nk_pad;
    out->q = h.q, out->k = h.k, out->k_mean = h.k_mean, out->k_fine = h.k_fine;
    out->v = h.v, out->v_mean = h.v_mean, out->v_fine = h.v_fine;
    out->q_scale = h.q_scale, out->k_scale = h.k_scale, out->v_scale = h.v_scale;
    out->v_centre = h.v_centre, out->v_middle = h.v_middle, out->k_centre = h.k_centre,
    out->q_centre = h.q_centre;
    return check.error;
}

// Numbers between 1 and 2, of both signs.
__global__ void fill_kernel(uint16_t *x, int64_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t hash = (uint32_t)i * 2654435761u;
        x[i] = (uint16_t)(0x3f80u | (hash >> 31) << 15 | (hash >> 8 & 0x7f));
    }
}

template <class Values> const char *round_times(float *ms, const esa_attn_args *args, int64_t value)
{
    enum { ROUNDS = 9 };
    cuda_calls check;
    device_memory memory(check);
    esa_attn_args a = *args;
    const auto put = [&](int64_t *stride, int64_t H, int64_t N) {
        const int64_t n = a.B * H * N * a.D;
        stride[0] = H * N * a.D, stride[1] = N * a.D, stride[2] = a.D;
        void *const x = memory.take(n * 2);
        if (!check.error) fill_kernel<<<512, 256>>>((uint16_t *)x, n);
        return x;
    };
    a.q = put(a.q_stride, a.Hq, a.Nq);
    a.k = put(a.k_stride, a.Hkv, a.Nk);
    a.v = put(a.v_stride, a.Hkv, a.Nk);
    carve count(nullptr);
    carve_quantised(&count, &a, value);
    carve ws(memory.take(count.bytes()));
    if (check.error) return check.error;
    const quantised q = without_unused(carve_quantised(&ws, &a, value), &a);
    const quantise_plan plan = plan_of(&a, &q);
    const int steps = steps_of<Values>(plan);
    cudaEvent_t at[STEPS + 1];
    for (cudaEvent_t &event : at) check(cudaEventCreate(&event));
    // Events between the launches keep them apart, so the whole is timed on its own.
    std::vector<float> found[STEPS + 1];
    for (int round = 0; round < 2 * ROUNDS; ++round) {
        const bool apart = round % 2;
        check(cudaEventRecord(at[0]));
        for (int step = 0; step < steps; ++step) {
            launch_step<Values>(plan, &a, step, nullptr);
            if (apart) check(cudaEventRecord(at[step + 1]));
        }
        if (!apart) check(cudaEventRecord(at[steps]));
        check(cudaDeviceSynchronize());
        if (check.error) break;
        float t = 0.0f;
        for (int step = 0; apart && step < steps; ++step) {
            check(cudaEventElapsedTime(&t, at[step], at[step + 1]));
            found[step].push_back(t);
        }
        if (apart) continue;
        check(cudaEventElapsedTime(&t, at[0], at[steps]));
        found[STEPS].push_back(t);
    }
    for (int i = 0; i <= STEPS; ++i) {
        std::sort(found[i].begin(), found[i].end());
        ms[i] = found[i].empty() ? 0.0f : found[i][found[i].size() / 2];
    }
    for (cudaEvent_t event : at) cudaEventDestroy(event);
    static_assert((int)STEPS == (int)ROUNDING_STEPS, "times of each launch");
    return check.error;
}

} // namespace
