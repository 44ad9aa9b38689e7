// device.cu - opens a GPU, manages its memory, and turns CUDA errors into messages.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/plugin.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/number.h"

esa_status device_fail(esa_cuda_device *dev, esa_status status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    esa_text_vformat(dev->error, sizeof dev->error, format, list);
    va_end(list);
    return status;
}

static esa_status status_of(cudaError_t result)
{
    return result == cudaErrorMemoryAllocation ? ESA_ERR_MEMORY : ESA_ERR_DEVICE;
}

esa_status device_check(esa_cuda_device *dev, cudaError_t result, const char *what)
{
    if (result == cudaSuccess) return ESA_OK;
    cudaGetLastError();
    return device_fail(dev, status_of(result), "%s: %s (%s)", what, cudaGetErrorString(result),
                       cudaGetErrorName(result));
}

// The oldest driver that runs programs of a CUDA runtime, as its release notes say. Every driver
// runs the runtimes of its own major version, so the minor version does not matter. 0: unknown.
static int least_driver(int runtime)
{
    return runtime / 1000 == 12 ? 525 : runtime / 1000 == 13 ? 580 : 0;
}

// For failures before a device object exists to hold the message.
static esa_status fail_text(char *error, int32_t bytes, cudaError_t result, const char *what)
{
    cudaGetLastError();
    if (result == cudaErrorInsufficientDriver) {
        int driver = 0, runtime = 0;
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver == 0)
            snprintf(error, (size_t)bytes,
                     "this machine has no NVIDIA driver, so there is no GPU to run on");
        else if (least_driver(runtime))
            snprintf(error, (size_t)bytes,
                     "the NVIDIA driver is too old: it supports CUDA %d.%d, and libesa_cuda, built "
                     "with CUDA %d.%d, needs driver %d or newer",
                     driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
                     least_driver(runtime));
        else
            snprintf(
                error, (size_t)bytes,
                "the NVIDIA driver is too old: it supports CUDA %d.%d, and libesa_cuda needs a "
                "driver for CUDA %d.0 or newer",
                driver / 1000, driver % 1000 / 10, runtime / 1000);
    } else if (result == cudaErrorNoDevice) {
        snprintf(error, (size_t)bytes,
                 "this machine has no usable NVIDIA GPU (none installed, or CUDA_VISIBLE_DEVICES "
                 "hides it)");
    } else {
        snprintf(error, (size_t)bytes, "%s: %s (%s)", what, cudaGetErrorString(result),
                 cudaGetErrorName(result));
    }
    return status_of(result);
}

esa_status device_count(int32_t *count, char *error, int32_t error_bytes)
{
    int n = 0;
    const cudaError_t result = cudaGetDeviceCount(&n);
    *count = result == cudaSuccess ? n : 0;
    return result == cudaSuccess ? ESA_OK
                                 : fail_text(error, error_bytes, result, "counting the GPUs");
}

static esa_encode_tiled *find_encode_tiled()
{
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t result = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
#else
    const cudaError_t result = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry,
                                                       cudaEnableDefault, &found);
#endif
    if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    return (esa_encode_tiled *)entry;
}

static const char *level_name(int level)
{
    return level == LEVEL_SM90A ? "sm90a" : level == LEVEL_SM89 ? "sm89" : "sm80";
}

static bool has_level(const esa_cuda_device *dev, int level)
{
    // mma.sync of E4M3. On 10.x and 11.x, as on Hopper, it is made of products in f16, so it does
    // not pay there. Hopper has the level for tests.
    const bool fp8 = (dev->major == 8 && dev->minor >= 9) || dev->major == 9 || dev->major == 12;
    return level == LEVEL_SM90A ? dev->major == 9 && dev->encode_tiled : level == LEVEL_SM80 || fp8;
}

static esa_status choose_level(esa_cuda_device *dev, const char *name, char *error,
                               int32_t error_bytes)
{
    dev->level = has_level(dev, LEVEL_SM90A)  ? LEVEL_SM90A
                 : has_level(dev, LEVEL_SM89) ? LEVEL_SM89
                                              : LEVEL_SM80;
    if (!name || !*name) return ESA_OK;
    for (const int level : { LEVEL_SM80, LEVEL_SM89, LEVEL_SM90A }) {
        if (strcmp(name, level_name(level))) continue;
        dev->level = level;
        if (has_level(dev, level)) return ESA_OK;
        snprintf(error, (size_t)error_bytes,
                 "ESA_CUDA asks for %s kernels, GPU %d has compute capability %d.%d", name,
                 dev->ordinal, dev->major, dev->minor);
        return ESA_ERR_UNSUPPORTED;
    }
    snprintf(error, (size_t)error_bytes, "ESA_CUDA is \"%.40s\", expected sm80, sm89 or sm90a",
             name);
    return ESA_ERR_UNSUPPORTED;
}

static esa_status read_properties(esa_cuda_device *dev, char *error, int32_t error_bytes)
{
    const struct {
        cudaDeviceAttr attribute;
        int *value;
    } wanted[] = { { cudaDevAttrComputeCapabilityMajor, &dev->major },
                   { cudaDevAttrComputeCapabilityMinor, &dev->minor },
                   { cudaDevAttrMultiProcessorCount, &dev->multiprocessors },
                   { cudaDevAttrMaxSharedMemoryPerBlockOptin, &dev->shared_bytes } };
    for (const auto &w : wanted) {
        const cudaError_t result = cudaDeviceGetAttribute(w.value, w.attribute, dev->ordinal);
        if (result != cudaSuccess)
            return fail_text(error, error_bytes, result, "asking the GPU for its properties");
    }
    if (dev->major < 8) {
        snprintf(error, (size_t)error_bytes,
                 "GPU %d has compute capability %d.%d, esa needs 8.0 (Ampere) or newer",
                 dev->ordinal, dev->major, dev->minor);
        return ESA_ERR_DEVICE;
    }
    return ESA_OK;
}

// The side stream does not wait for the default stream, which the caller may use.
static esa_status open_side(esa_cuda_device *dev, char *error, int32_t error_bytes)
{
    cudaError_t result = cudaStreamCreateWithFlags(&dev->side, cudaStreamNonBlocking);
    if (result == cudaSuccess)
        result = cudaEventCreateWithFlags(&dev->forked, cudaEventDisableTiming);
    if (result == cudaSuccess)
        result = cudaEventCreateWithFlags(&dev->joined, cudaEventDisableTiming);
    if (result == cudaSuccess) return ESA_OK;
    return fail_text(error, error_bytes, result, "creating a stream on the GPU");
}

static void close_side(esa_cuda_device *dev)
{
    const current_device scope(dev->ordinal);
    if (dev->side) cudaStreamDestroy(dev->side);
    if (dev->forked) cudaEventDestroy(dev->forked);
    if (dev->joined) cudaEventDestroy(dev->joined);
    cudaGetLastError();
}

esa_status device_open(esa_cuda_device **out, int32_t ordinal, const char *level, char *error,
                       int32_t error_bytes)
{
    *out = nullptr;
    int32_t count;
    esa_status status = device_count(&count, error, error_bytes);
    if (status) return status;
    if (ordinal < 0 || ordinal >= count) {
        snprintf(error, (size_t)error_bytes,
                 "there is no GPU %d: this machine has %d, numbered from 0", (int)ordinal,
                 (int)count);
        return ESA_ERR_DEVICE;
    }
    esa_cuda_device *dev = (esa_cuda_device *)calloc(1, sizeof *dev);
    if (!dev) {
        snprintf(error, (size_t)error_bytes, "out of memory for a device object");
        return ESA_ERR_MEMORY;
    }
    dev->ordinal = ordinal;
    const current_device scope(ordinal);
    // Without this check the calls below would succeed on the caller's device instead.
    if (scope.result != cudaSuccess)
        status = fail_text(error, error_bytes, scope.result, "opening the GPU");
    if (!status) status = read_properties(dev, error, error_bytes);
    if (!status && dev->major >= 9) dev->encode_tiled = find_encode_tiled();
    if (!status) status = choose_level(dev, level, error, error_bytes);
    if (!status) {
        // Creates the CUDA context now, so that a broken driver is found here.
        const cudaError_t result = cudaFree(nullptr);
        if (result != cudaSuccess)
            status = fail_text(error, error_bytes, result, "opening the GPU");
    }
    if (!status) status = open_side(dev, error, error_bytes);
    if (status) {
        close_side(dev);
        free(dev);
        return status;
    }
    *out = dev;
    return ESA_OK;
}

void device_close(esa_cuda_device *dev)
{
    transfer_close(dev);
    products_close(dev);
    close_side(dev);
    free(dev);
}

const char *device_error(const esa_cuda_device *dev) { return dev->error; }

esa_status device_info(esa_cuda_device *dev, esa_cuda_info *info)
{
    const current_device scope(dev->ordinal);
    memset(info, 0, sizeof *info);
    cudaDeviceProp properties;
    size_t free_bytes = 0, total = 0;
    esa_status status = device_check(dev, cudaGetDeviceProperties(&properties, dev->ordinal),
                                     "asking the GPU for its properties");
    if (!status)
        status = device_check(dev, cudaMemGetInfo(&free_bytes, &total),
                              "asking the GPU for its memory");
    if (status) return status;
    info->ordinal = dev->ordinal;
    info->major = dev->major;
    info->minor = dev->minor;
    info->multiprocessors = dev->multiprocessors;
    cudaDriverGetVersion(&info->driver);
    cudaRuntimeGetVersion(&info->runtime);
    info->memory = (int64_t)total;
    info->free_memory = (int64_t)free_bytes;
    snprintf(info->name, sizeof info->name, "%.63s", properties.name);
    snprintf(info->kernels, sizeof info->kernels, "%s", level_name(dev->level));
    return ESA_OK;
}

esa_status device_alloc(esa_cuda_device *dev, void **ptr, int64_t bytes)
{
    const current_device scope(dev->ordinal);
    *ptr = nullptr;
    if (bytes < 0)
        return device_fail(dev, ESA_ERR_MEMORY,
                           "an allocation larger than the address space was asked for");
    const cudaError_t result = cudaMalloc(ptr, bytes ? (size_t)bytes : 1);
    if (result != cudaErrorMemoryAllocation)
        return device_check(dev, result, "allocating GPU memory");
    cudaGetLastError();
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    *ptr = nullptr;
    return device_fail(dev, ESA_ERR_MEMORY, "GPU %d has %.1f MiB free, %.1f MiB are needed",
                       dev->ordinal, (double)free_bytes / 1048576.0, (double)bytes / 1048576.0);
}

void device_release(int32_t ordinal, void *ptr)
{
    if (!ptr) return;
    const current_device scope(ordinal);
    if (cudaFree(ptr) != cudaSuccess) cudaGetLastError();
}

// Pageable memory is staged before cudaMemcpyAsync returns. Pinned and managed memory is read by
// the copy itself, so the call waits for it. src may change after the call.
esa_status device_upload(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                         void *stream)
{
    const current_device scope(dev->ordinal);
    cudaPointerAttributes where = {};
    esa_status status = device_check(dev, cudaPointerGetAttributes(&where, src),
                                     "looking at memory to copy from");
    if (!status)
        status = device_check(
            dev,
            cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream),
            "copying to the GPU");
    if (status || where.type == cudaMemoryTypeUnregistered) return status;
    return device_check(dev, cudaStreamSynchronize((cudaStream_t)stream), "copying to the GPU");
}

esa_status device_copy(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                       void *stream)
{
    const current_device scope(dev->ordinal);
    return device_check(
        dev,
        cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream),
        "copying on the GPU");
}

esa_status device_download(int32_t ordinal, void *dst, const void *src, int64_t bytes, void *stream)
{
    const current_device scope(ordinal);
    // Without a stream, any stream may be the one that fills src, so wait for all of them.
    cudaError_t result = stream ? cudaSuccess : cudaDeviceSynchronize();
    if (result == cudaSuccess)
        result = cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDeviceToHost,
                                 (cudaStream_t)stream);
    if (result == cudaSuccess) result = cudaStreamSynchronize((cudaStream_t)stream);
    if (result == cudaSuccess) return ESA_OK;
    cudaGetLastError();
    return status_of(result);
}

esa_status device_sync(esa_cuda_device *dev, void *stream)
{
    const current_device scope(dev->ordinal);
    return device_check(dev, cudaStreamSynchronize((cudaStream_t)stream), "waiting for the GPU");
}

esa_status mark_create(esa_cuda_device *dev, void **mark)
{
    const current_device scope(dev->ordinal);
    cudaEvent_t event = nullptr;
    const esa_status status = device_check(dev, cudaEventCreate(&event), "creating a timing event");
    *mark = event;
    return status;
}

void mark_release(int32_t ordinal, void *mark)
{
    if (!mark) return;
    const current_device scope(ordinal);
    if (cudaEventDestroy((cudaEvent_t)mark) != cudaSuccess) cudaGetLastError();
}

esa_status mark_record(esa_cuda_device *dev, void *mark, void *stream)
{
    const current_device scope(dev->ordinal);
    return device_check(dev, cudaEventRecord((cudaEvent_t)mark, (cudaStream_t)stream),
                        "recording a timing event");
}

esa_status mark_elapsed(esa_cuda_device *dev, double *seconds, void *from, void *to)
{
    const current_device scope(dev->ordinal);
    float milliseconds = 0.0f;
    esa_status status = device_check(dev, cudaEventSynchronize((cudaEvent_t)to),
                                     "waiting for the GPU");
    if (!status)
        status = device_check(
            dev, cudaEventElapsedTime(&milliseconds, (cudaEvent_t)from, (cudaEvent_t)to),
            "reading a timing event");
    *seconds = 1e-3 * (double)milliseconds;
    return status;
}
