// transfer.cu - weights on their way to the GPU: pinned host memory, and copies on a stream of
// their own beside the work.
// SPDX-License-Identifier: Apache-2.0
//
// Each lane has two events: `arrived`, recorded after a copy into it, and `used`, recorded after
// the last work that reads it. A copy waits for used, the work waits for arrived; the host waits
// for neither.
//
// A lane is a place in an order, not a piece of memory: several stores of weights (the transformer,
// the text encoder) use lanes of the same numbers with buffers of their own. That is safe, because
// all copies run on one stream and all readers on that of the ctx: the latest event of a lane
// stands behind those of the other store too. It can only make a copy wait longer than it must.
#include <stdlib.h>

#include "cuda/runtime/plugin.cuh"

struct transfer_lane {
    cudaEvent_t arrived, used;
    bool fetched, read; // the event has been recorded
};

struct transfer_state {
    cudaStream_t stream;
    transfer_lane lane[ESA_CUDA_LANES];
};

static void destroy(transfer_state *s)
{
    for (transfer_lane &lane : s->lane) {
        if (lane.arrived) cudaEventDestroy(lane.arrived);
        if (lane.used) cudaEventDestroy(lane.used);
    }
    if (s->stream) cudaStreamDestroy(s->stream);
    cudaGetLastError();
    free(s);
}

// The copy stream does not wait for the default stream, which the ctx may use.
static esa_status create(esa_cuda_device *dev)
{
    transfer_state *s = (transfer_state *)calloc(1, sizeof *s);
    if (!s) return device_fail(dev, ESA_ERR_MEMORY, "out of memory for copies to the GPU");
    cudaError_t result = cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking);
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
    cudaStreamSynchronize(dev->transfer->stream); // sources and targets are freed next
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
                       "the system does not give %.1f MiB of host memory that the GPU can read "
                       "directly",
                       (double)bytes / 1048576.0);
}

void transfer_unpin(esa_cuda_device *dev, void *ptr)
{
    if (!ptr) return;
    const current_device scope(dev->ordinal);
    if (cudaFreeHost(ptr) != cudaSuccess) cudaGetLastError();
}

esa_status transfer_fetch(esa_cuda_device *dev, int32_t number, void *dst, const void *src,
                          int64_t bytes)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    esa_status status = find_lane(dev, number, &lane);
    if (status) return status;
    const cudaStream_t stream = dev->transfer->stream;
    if (lane->read)
        status = device_check(dev, cudaStreamWaitEvent(stream, lane->used, 0),
                              "waiting for a buffer of weights");
    if (!status)
        status = device_check(
            dev, cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyHostToDevice, stream),
            "copying weights to the GPU");
    if (!status)
        status = device_check(dev, cudaEventRecord(lane->arrived, stream),
                              "copying weights to the GPU");
    if (!status) lane->fetched = true;
    return status;
}

esa_status transfer_arrive(esa_cuda_device *dev, int32_t number, void *stream)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    const esa_status status = find_lane(dev, number, &lane);
    if (status || !lane->fetched) return status;
    return device_check(dev, cudaStreamWaitEvent((cudaStream_t)stream, lane->arrived, 0),
                        "waiting for weights");
}

esa_status transfer_used(esa_cuda_device *dev, int32_t number, void *stream)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    esa_status status = find_lane(dev, number, &lane);
    if (status) return status;
    status = device_check(dev, cudaEventRecord(lane->used, (cudaStream_t)stream),
                          "freeing a buffer of weights");
    if (!status) lane->read = true;
    return status;
}

esa_status transfer_landed(esa_cuda_device *dev, int32_t number)
{
    const current_device scope(dev->ordinal);
    transfer_lane *lane;
    const esa_status status = find_lane(dev, number, &lane);
    if (status || !lane->fetched) return status;
    return device_check(dev, cudaEventSynchronize(lane->arrived), "copying weights to the GPU");
}
