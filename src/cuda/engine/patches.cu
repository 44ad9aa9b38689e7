// patches.cu - latents to rows of patches in the order of the session, and back.
// SPDX-License-Identifier: Apache-2.0
//
// One thread moves one element. The latents of a video are a few megabytes and are read once a
// forward, so nothing here is worth more.
#include "base/nn_args.h"
#include "cuda/runtime/views.cuh"

namespace
{

enum { THREADS = 256 };

template <class T>
__global__ void __launch_bounds__(THREADS)
    patches_kernel(const __grid_constant__ esa_patch_args a, int64_t total)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= total) return;
    const int width = (int)a.rows.cols, col = (int)(at % width);
    const int64_t row = at / width;
    const int *size = a.size, *patch = a.patch, volume = patch[0] * patch[1] * patch[2];
    const int grid_h = size[1] / patch[1], grid_w = size[2] / patch[2];
    const int n = a.perm ? a.perm[row] : (int)row;
    // m: place inside the patch
    const bool first = a.gather || a.channel_first;
    const int c = first ? col / volume : col % a.channels,
              m = first ? col % volume : col / a.channels;
    const int t = n / (grid_h * grid_w) * patch[0] + m / (patch[1] * patch[2]),
              y = n / grid_w % grid_h * patch[1] + m / patch[2] % patch[1],
              x = n % grid_w * patch[2] + m % patch[2];
    float *const latent = a.latent + (((int64_t)c * size[0] + t) * size[1] + y) * size[2] + x;
    T *const element = (T *)a.rows.data + row * a.rows.ld + col;
    if (a.gather)
        round_to(element, *latent);
    else
        *latent = to_float(*element);
}

} // namespace

esa_status patches_run(esa_cuda_device *dev, const esa_patch_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const int64_t total = args->rows.rows * args->rows.cols,
                  blocks = ceil_div(total, (int64_t)THREADS);
    if (total < 1) return ESA_OK;
    if (blocks > 0x7fffffff || args->rows.rows > 0x7fffffff)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "%lld patches are too many for the GPU",
                           (long long)args->rows.rows);
    if (args->rows.dtype == ESA_DTYPE_BF16)
        patches_kernel<__nv_bfloat16>
            <<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(*args, total);
    else
        patches_kernel<float><<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(*args, total);
    return launch_check(dev, "patches");
}
