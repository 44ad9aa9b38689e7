// plugin.cuh - the device half of the table, between device.cu, transfer.cu and entry.cu.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/device.cuh"

esa_status device_count(int32_t *count, char *error, int32_t error_bytes);
esa_status device_open(esa_cuda_device **out, int32_t ordinal, const char *level, char *error,
                       int32_t error_bytes);
void device_close(esa_cuda_device *dev);
const char *device_error(const esa_cuda_device *dev);
esa_status device_info(esa_cuda_device *dev, esa_cuda_info *info);
esa_status device_alloc(esa_cuda_device *dev, void **ptr, int64_t bytes);
void device_release(int32_t ordinal, void *ptr);
esa_status device_upload(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                         void *stream);
esa_status device_copy(esa_cuda_device *dev, void *dst, const void *src, int64_t bytes,
                       void *stream);
esa_status device_download(int32_t ordinal, void *dst, const void *src, int64_t bytes,
                           void *stream);
esa_status device_sync(esa_cuda_device *dev, void *stream);
void transfer_close(esa_cuda_device *dev);
esa_status transfer_pin(esa_cuda_device *dev, void **ptr, int64_t bytes);
void transfer_unpin(esa_cuda_device *dev, void *ptr);
esa_status transfer_fetch(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                          int64_t bytes);
esa_status transfer_store(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                          int64_t bytes, void *stream);
esa_status transfer_arrive(esa_cuda_device *dev, int32_t lane, void *stream);
esa_status transfer_used(esa_cuda_device *dev, int32_t lane, void *stream);
esa_status transfer_landed(esa_cuda_device *dev, int32_t lane);
esa_status mark_create(esa_cuda_device *dev, void **mark);
void mark_release(int32_t ordinal, void *mark);
esa_status mark_record(esa_cuda_device *dev, void *mark, void *stream);
esa_status mark_elapsed(esa_cuda_device *dev, double *seconds, void *from, void *to);
