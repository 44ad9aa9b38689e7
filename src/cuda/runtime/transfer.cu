// transfer.cu - weights on their way to the GPU, carried differences on their way to the host and
// back: pinned host memory, and copies on streams of their own beside the work.
// SPDX-License-Identifier: Apache-2.0
//
// Each lane has two events: `arrived`, recorded after a copy into or out of it, and `used`,
// recorded after the last work that reads or writes it. A copy waits for used, the work waits for
// arrived; the host waits for neither. Carried differences have a stream of their own, so that no
// weights wait behind a store, which waits for the attention that makes the difference.
//
// A lane is a place in an order, not a piece of memory: several stores of weights (the transformer,
// the text encoder) or sessions use lanes of the same numbers with buffers of their own. That is
// safe, because all copies of a lane run on one stream and all work on that of the ctx: the latest
// event of a lane stands behind those of the others too. It can only make a copy wait longer than
// it must.
#include <stdlib.h>

#include "cuda/runtime/plugin.cuh"

struct transfer_lane {
    cudaEvent_t arrived, used;
    bool copied, touched; // the event has been recorded
};

struct transfer_state {
    cudaStream_t stream[2]; // of weights, of carried differences
    transfer_lane lane[ESA_CUDA_LANES];
};

static void destroy(transfer_state *s)
{
    for (transfer_lane &lane : s->lane) {
        if (lane.arrived) cudaEventDestroy(lane.arrived);
        if (lane.used) cudaEventDestroy(lane.used);
    }
    for (cudaStream_t stream : s->stream)
        if (stream) cudaStreamDestroy(stream);
    cudaGetLastError();
    free(s);
}

// The streams of copies do not wait for the default stream, which the ctx may use.
static esa_status create(esa_cuda_device *dev)
{
    transfer_state *s = (transfer_state *)calloc(1, sizeof *s);
    if (!s) return device_fail(dev, ESA_ERR_MEMORY, "out of memory for copies to the GPU");
    cudaError_t result = cudaSuccess;
    for (cudaStream_t &stream : s->stream)
        if (result == cudaSuccess)
            result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (transfer_lane &lane : s->lane) {
        if (result == cudaSuccess)
            result = cudaEventCreateWithFlags(&lane.arrived, cudaEventDisableTiming);
        if (result == cudaSuccess)
            result = cudaEventCreateWithFlags(&lane.used, cudaEventDisableTiming);
    }
    if (result == cudaSuccess) {
        dev->transfer = s;
        return ESA_OK;
    }
    destroy(s);
    return device_check(dev, result, "creating a stream for copies");
}

static esa_status find_lane(esa_cuda_device *dev, int32_t number, transfer_lane **lane)
{
    *lane = nullptr;
    if (number < 0 || number >= ESA_CUDA_LANES)
        return device_fail(dev, ESA_ERR_INTERNAL, "lane %d, expected 0 to %d", (int)number,
                           ESA_CUDA_LANES - 1);
    const esa_status status = dev->transfer ? ESA_OK : create(dev);
    if (!status) *lane = &dev->transfer->lane[number];
    return status;
}

void transfer_close(esa_cuda_device *dev)
{
    if (!dev->transfer) return;
    const current_device scope(dev->ordinal);
    for (cudaStream_t stream : dev->transfer->stream)
        cudaStreamSynchronize(stream); // sources and targets are freed next
    destroy(dev->transfer);
    dev->transfer = nullptr;
}

esa_status transfer_pin(esa_cuda_device *dev, void **ptr, int64_t bytes)
{
    const current_device scope(dev->ordinal);
    *ptr = nullptr;
    const cudaError_t result = bytes < 0 ? cudaErrorMemoryAllocation
                                         : cudaHostAlloc(ptr, bytes ? (size_t)bytes : 1,
                                                         cudaHostAllocPortable);
    if (result == cudaSuccess) return ESA_OK;
    *ptr = nullptr;
    if (result != cudaErrorMemoryAllocation && result != cudaErrorInvalidValue)
        return device_check(dev, result, "pinning host memory");
    cudaGetLastError();
    return device_fail(dev, ESA_ERR_MEMORY,
                       "the system does not give %.1f MiB of host memory that the GPU can use "
                       "directly",
                       (double)bytes / 1048576.0);
}

void transfer_unpin(esa_cuda_device *dev, void *ptr)
{
    if (!ptr) return;
    const current_device scope(dev->ordinal);
    if (cudaFreeHost(ptr) != cudaSuccess) cudaGetLastError();
}

// Copies on the stream of the lane, after the last work that touched the lane.
static esa_status copy(esa_cuda_device *dev, int32_t number, transfer_lane *lane, void *dst,
                       const void *src, int64_t bytes, cudaMemcpyKind kind, const char *what)
{
    const cudaStream_t stream = dev->transfer->stream[number >= ESA_CUDA_CARRY_LANE];
    esa_status status = ESA_OK;
    if (lane->touched) status = device_check(dev, cudaStreamWaitEvent(stream, lane->used, 0), what);
    if (!status)
        status = device_check(dev, cudaMemcpyAsync(dst, src, (size_t)bytes, kind, stream), what);
    if (!status) status = device_check(dev, cudaEventRecord(lane->arrived, stream), what);
    if (!status) lane->copied = true;
    return status;
}

esa_status transfer_fetch(esa_cuda_device *dev, int32_t number, void *dst, const void *src,
                          int64_t bytes)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    const esa_status status = find_lane(dev, number, &lane);
    return status ? status
                  : copy(dev, number, lane, dst, src, bytes, cudaMemcpyHostToDevice,
                         "copying to the GPU");
}

esa_status transfer_store(esa_cuda_device *dev, int32_t number, void *dst, const void *src,
                          int64_t bytes, void *stream)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    if (number < ESA_CUDA_CARRY_LANE)
        return device_fail(dev, ESA_ERR_INTERNAL, "lane %d, expected %d to %d for a store",
                           (int)number, ESA_CUDA_CARRY_LANE, ESA_CUDA_LANES - 1);
    esa_status status = find_lane(dev, number, &lane);
    if (!status) status = transfer_used(dev, number, stream);
    return status ? status
                  : copy(dev, number, lane, dst, src, bytes, cudaMemcpyDeviceToHost,
                         "copying to the host");
}

esa_status transfer_arrive(esa_cuda_device *dev, int32_t number, void *stream)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    const esa_status status = find_lane(dev, number, &lane);
    if (status || !lane->copied) return status;
    return device_check(dev, cudaStreamWaitEvent((cudaStream_t)stream, lane->arrived, 0),
                        "waiting for a copy");
}

esa_status transfer_used(esa_cuda_device *dev, int32_t number, void *stream)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    esa_status status = find_lane(dev, number, &lane);
    if (status) return status;
    status = device_check(dev, cudaEventRecord(lane->used, (cudaStream_t)stream),
                          "freeing a buffer of copies");
    if (!status) lane->touched = true;
    return status;
}

esa_status transfer_landed(esa_cuda_device *dev, int32_t number)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    const esa_status status = find_lane(dev, number, &lane);
    if (status || !lane->copied) return status;
    return device_check(dev, cudaEventSynchronize(lane->arrived), "waiting for a copy");
}
