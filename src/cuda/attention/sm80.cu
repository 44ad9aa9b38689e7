// sm80.cu - which jobs the sm80 kernel takes, and its instantiations: ten, and ten with a carry.
// SPDX-License-Identifier: Apache-2.0
//
// | D      | rows | ring | shared memory | blocks per multiprocessor with 227 / 163 / 99 KB  |
// | <= 64  | 128  | 4    | 48 KB         | 3 / 3 / 2                                         |
// | <= 64  |  64  | 4    | 40 KB         | 3 / 3 / 2                                         |
// | <= 128 | 128  | 3    | 80 KB         | 2 / 2 / 1                                         |
// | <= 128 |  64  | 3    | 64 KB         | 3 / 2 / 1                                         |
// | <= 256 |  64  | 2    | 96 KB         | 2 / 1 / 1                                         |
#include "cuda/attention/sm80_kernel.cuh"

// Positions are 32-bit in the kernel, and half of INT32_MAX means all keys.
constexpr int64_t MOST_TOKENS = (1 << 30) - 1024;

bool sm80_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    if (a->dtype != ESA_DTYPE_BF16 && a->dtype != ESA_DTYPE_F16) return false;
    if (a->D < 1 || a->D > 256 || a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS) return false;
    // Maxima are of unscaled scores; a negative scale would turn them into minima.
    if (!(a->scale >= 1e-30)) return false;
    if (a->count && (a->block_q != 64 && a->block_q != 128 && a->block_q != 256)) return false;
    if (a->count && (a->block_k != 64 && a->block_k != 128)) return false;
    return dev->shared_bytes >= sm80_shared_bytes<256, 1, 2>();
}

template <class T, int DP, int MT, int STAGES, bool HELD, int BLOCKS>
static esa_status launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const esa_attn_args *a = &job->a;
    constexpr int shared = sm80_shared_bytes<DP, MT, STAGES>();
    static_assert(shared >= SM80_WARPS * CARRY_ROWS * DP * 4, "rows in f32 are staged over it");
    const auto kernel = a->carry.value ? sm80_attention<T, DP, MT, STAGES, HELD, BLOCKS, true>
                                       : sm80_attention<T, DP, MT, STAGES, HELD, BLOCKS, false>;
    unsigned tiles = 0;
    esa_status status = count_tiles<64 * MT>(&tiles, dev, a);
    if (status || tiles == 0) return status;
    status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "preparing the sm80 kernel");
    if (status) return status;
    sm80_params params;
    params.job = *job;
    params.scale_log2 = (float)(a->scale * 1.4426950408889634);
    params.unscale = 1.0f / params.scale_log2;
    const auto in_vectors = [&](const void *data, const int64_t *stride, int64_t H, int64_t N) {
        return rows_in_pieces({ data, stride, { a->B, H, N } }, a->D, 2, 16);
    };
    params.q_vectors = in_vectors(a->q, a->q_stride, a->Hq, a->Nq);
    params.k_vectors = in_vectors(a->k, a->k_stride, a->Hkv, a->Nk);
    params.v_vectors = in_vectors(a->v, a->v_stride, a->Hkv, a->Nk);
    params.o_vectors = in_vectors(a->o, a->o_stride, a->Hq, a->Nq);
    kernel<<<tiles, SM80_THREADS, shared, stream>>>(params);
    return launch_check(dev, "launching the sm80 kernel");
}

template <class T>
static esa_status launch_for(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const bool narrow = job->a.count && job->a.block_q == 64;
    if (job->a.D > 128) return launch<T, 256, 1, 2, false, 1>(dev, job, stream);
    if (job->a.D > 64)
        return narrow ? launch<T, 128, 1, 3, false, 3>(dev, job, stream)
                      : launch<T, 128, 2, 3, false, 2>(dev, job, stream);
    return narrow ? launch<T, 64, 1, 4, true, 3>(dev, job, stream)
                  : launch<T, 64, 2, 4, false, 3>(dev, job, stream);
}

esa_status sm80_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    return job->a.dtype == ESA_DTYPE_BF16 ? launch_for<__nv_bfloat16>(dev, job, stream)
                                          : launch_for<__half>(dev, job, stream);
}
