// device.cuh - the device object, errors and workspace carving, used by every file of the plugin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda/cuda.h"

typedef CUresult esa_encode_tiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                  const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// In the order of the GPUs; a level has what the lower ones have.
enum { LEVEL_SM80 = 80, LEVEL_SM89 = 89, LEVEL_SM90A = 90 };

struct product_state;  // engine/product.cuh
struct transfer_state; // transfer.cu

struct esa_cuda_device {
    int ordinal, major, minor;
    int multiprocessors;
    int shared_bytes;               // most dynamic shared memory per thread block
    int level;                      // LEVEL_*: the attention kernels in use
    esa_encode_tiled *encode_tiled; // tensor maps; null below sm_90
    product_state *products;        // null until the first product
    transfer_state *transfer;       // null until the first lane is used
    // A second stream, which waits for `forked`; the caller's waits for `joined`.
    cudaStream_t side;
    cudaEvent_t forked, joined;
    char error[512];
};

// Writes the message into dev and returns status.
esa_status device_fail(esa_cuda_device *dev, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Returns ESA_OK for cudaSuccess. Otherwise writes the message "what: CUDA's text" and returns
// ESA_ERR_MEMORY for a failed allocation, else ESA_ERR_DEVICE. Clears a non-sticky error, so the
// caller's next call does not see it.
esa_status device_check(esa_cuda_device *dev, cudaError_t result, const char *what);
// Checks what a launch itself reports.
static inline esa_status launch_check(esa_cuda_device *dev, const char *kernel)
{
    return device_check(dev, cudaGetLastError(), kernel);
}

// Makes a device current for a scope and restores the caller's device. Drops an error that the
// caller's own calls left behind first, because launch_check would blame it on the launch.
struct current_device {
    int before = -1;
    // Result of making it current. After device_open this cannot fail.
    cudaError_t result = cudaSuccess;
    explicit current_device(int ordinal)
    {
        cudaGetLastError();
        if (cudaGetDevice(&before) != cudaSuccess) before = -1;
        if (before == ordinal)
            before = -1;
        else
            result = cudaSetDevice(ordinal);
    }
    ~current_device()
    {
        if (before >= 0 && cudaSetDevice(before) != cudaSuccess) cudaGetLastError();
    }
    current_device(const current_device &) = delete;
};

// Carves a workspace. With base null it only counts, so the same code measures and places. Parts
// are aligned to 256 bytes (tensor maps, vector loads). The workspace itself may be aligned to
// less, so counting adds that slack once.
struct carve {
    char *base;
    int64_t used = 0;
    explicit carve(void *ws) : base((char *)ws)
    {
        if (base) used = (256 - (uintptr_t)base % 256) % 256;
    }
    template <class T> T *take(int64_t n)
    {
        T *part = base ? (T *)(base + used) : nullptr;
        used += (n * (int64_t)sizeof(T) + 255) / 256 * 256;
        return part;
    }
    int64_t bytes() const { return used + 256; }
};

template <class T> static constexpr __host__ __device__ T ceil_div(T a, T b)
{
    return (a + b - 1) / b;
}

// The functions behind esa_cuda_table. The lines in between name their files.
//
// attention/attention.cu
int64_t attention_workspace(const esa_cuda_device *dev, const esa_attn_args *args);
esa_status attention_run(esa_cuda_device *dev, const esa_attn_args *args, void *ws, void *stream);
esa_attn_kernel attention_kernel(const esa_cuda_device *dev, const esa_attn_args *args);
esa_status attention_both(esa_cuda_device *dev, const esa_attn_args *first, void *first_ws,
                          const esa_attn_args *second, void *second_ws, void *stream);
// attention/exact_rows.cu
esa_status exact_take(esa_cuda_device *dev, const esa_attn_args *args, void *rows, void *stream);
esa_status exact_mend(esa_cuda_device *dev, const esa_attn_args *args, const void *o,
                      const float *lse, void *stream);
// selection/select.cu
int64_t select_workspace(const esa_cuda_device *dev, const esa_select_args *args);
esa_status select_run(esa_cuda_device *dev, const esa_select_args *args, const esa_cuda_mask *mask,
                      void *ws, void *stream);
esa_status importance_run(esa_cuda_device *dev, const esa_select_args *args, float *out,
                          double *entropy, void *ws, void *stream);
esa_status from_importance_run(esa_cuda_device *dev, const esa_select_args *args,
                               const esa_cuda_mask *mask, const float *importance, void *ws,
                               void *stream);
esa_status errors_run(esa_cuda_device *dev, const esa_select_args *args, float *out, void *ws,
                      void *stream);
// selection/order.cu
int64_t order_workspace(const esa_cuda_device *dev, const esa_select_args *args);
esa_status order_run(esa_cuda_device *dev, const esa_select_args *args, int32_t *perm_q,
                     int32_t *perm_k, void *ws, void *stream);
// selection/mask_bits.cu
esa_status bits_to_lists(esa_cuda_device *dev, const esa_cuda_mask *mask, const uint8_t *bits,
                         const uint8_t *fine, void *stream);
esa_status lists_to_bits(esa_cuda_device *dev, const esa_cuda_mask *mask, uint8_t *bits,
                         uint8_t *fine, void *stream);
// engine/norm.cu, engine/qk.cu, engine/act.cu
esa_status norm_run(esa_cuda_device *dev, const esa_norm_args *args, void *stream);
esa_status qk_run(esa_cuda_device *dev, const esa_qk_args *args, void *stream);
esa_status act_run(esa_cuda_device *dev, const esa_act_args *args, void *stream);
// engine/product.cu
esa_status products_library(esa_cuda_device *dev, const char **name);
esa_status product_prepare(esa_cuda_device *dev, const esa_product_args *args, void *stream);
int64_t product_workspace(const esa_cuda_device *dev);
esa_status product_run(esa_cuda_device *dev, const esa_product_args *args, void *ws, void *stream);
// engine/lt_plan.cu
void products_close(esa_cuda_device *dev);
// engine/convert.cu
esa_status convert_run(esa_cuda_device *dev, const esa_convert_args *args, void *stream);
// engine/patches.cu
esa_status patches_run(esa_cuda_device *dev, const esa_patch_args *args, void *stream);
// engine/latents.cu
esa_status modulate_run(esa_cuda_device *dev, float *e, const float *table, const float *add,
                        int64_t rows, int64_t cols, void *stream);
esa_status guide_run(esa_cuda_device *dev, float *v, const float *negative, float scale,
                     int64_t count, void *stream);
esa_status step_run(esa_cuda_device *dev, const esa_step_args *args, void *stream);
esa_status figures_run(esa_cuda_device *dev, const esa_figures_args *args, void *stream);
// engine/biased.cu
esa_status biased_run(esa_cuda_device *dev, const esa_biased_args *args, void *stream);
// engine/planes.cu
int64_t conv_bytes(const esa_cuda_device *dev, const esa_plane_conv_args *args);
esa_status conv_pack(esa_cuda_device *dev, void *packed, const esa_plane_conv_args *args,
                     const float *weight, void *stream);
esa_status conv_run(esa_cuda_device *dev, const esa_plane_conv_args *args, void *stream);
esa_status pixel_norm_run(esa_cuda_device *dev, const esa_plane_norm_args *args, void *stream);
esa_status from_latents_run(esa_cuda_device *dev, const esa_plane_latent_args *args, void *stream);
esa_status to_bytes_run(esa_cuda_device *dev, const esa_plane_bytes_args *args, void *stream);
esa_status zero_run(esa_cuda_device *dev, void *ptr, int64_t bytes, void *stream);
// engine/group_norm.cu
esa_status group_norm_run(esa_cuda_device *dev, const esa_plane_group_args *args, void *stream);
esa_status border_run(esa_cuda_device *dev, const esa_plane_border_args *args, void *stream);
// engine/qk_heads.cu
esa_status qk_heads_run(esa_cuda_device *dev, const esa_qk_args *args, void *stream);
// engine/qk_pieces.cu
bool qk_pieces_takes(const esa_qk_args *args);
esa_status qk_pieces_run(esa_cuda_device *dev, const esa_qk_args *args, void *stream);
