// sm80_8bit.cu - which jobs the 8-bit kernel of sm_80 takes, and its eight instantiations.
// SPDX-License-Identifier: Apache-2.0
//
// Thread blocks that fit on a multiprocessor with 227, 163 and 99 KB of shared memory:
//
// | D   | rows | shared memory | 227 / 163 / 99 KB |
// | 64  | 128  | 32 KB         | 3 / 3 / 3         |
// | 64  |  64  | 28 KB         | 3 / 3 / 3         |
// | 128 | 128  | 64 KB         | 2 / 2 / 1         |
// | 128 |  64  | 56 KB         | 3 / 2 / 1         |
#include "cuda/attention/sm80_8bit_kernel.cuh"

bool sm80_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    // Hopper does not use it: its own kernels of 16 bits are faster.
    if (a->precision != 8 || dev->level != LEVEL_SM80 || !sm80_takes(dev, a)) return false;
    if ((a->D != 64 && a->D != 128) || a->causal || a->tail == ESA_TAIL_CENTROID) return false;
    // The workspace of a plan is counted for 16 fine means: if those are taken, fewer are, too.
    if (a->tail == ESA_TAIL_LEVELS && a->fine && (a->block_k % a->fine || a->block_k / a->fine % 4))
        return false;
    if (a->B < 1 || a->Nq < 1 || a->Nk < 1) return false;
    // Thread blocks of one launch.
    return a->B * a->Hkv <= 65535 && a->B * (a->Hq * ceil_div(a->Nq, (int64_t)RUN_8BIT) +
                                             2 * a->Hkv * ceil_div(a->Nk, (int64_t)RUN_8BIT)) <=
                                         INT32_MAX;
}

template <class T, int DP, int MT, bool HELD, int BLOCKS>
static esa_status launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const esa_attn_args *a = &job->a;
    constexpr int shared = sm80_8bit_shared_bytes<DP, MT>();
    static_assert(shared >= 64 * MT * DP * 2, "the result is staged in shared memory");
    const auto kernel = sm80_8bit_attention<T, DP, MT, HELD, BLOCKS>;
    unsigned tiles = 0;
    esa_status status = count_tiles<64 * MT>(&tiles, dev, a);
    if (status || tiles == 0) return status;
    status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "preparing the 8-bit sm80 kernel");
    if (status) return status;
    sm80_8bit_params params;
    params.job = *job;
    params.scale_log2 = (float)(a->scale * 1.4426950408889634);
    params.block_log2 = job->q8.blocks == 2 ? 6 : 7;
    params.o_vectors = rows_in_pieces({ a->o, a->o_stride, { a->B, a->Hq, a->Nq } }, a->D, 2, 16);
    kernel<<<tiles, SM80_THREADS, shared, stream>>>(params);
    return launch_check(dev, "launching the 8-bit sm80 kernel");
}

template <class T>
static esa_status launch_for(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const bool narrow = job->a.count && job->a.block_q == 64;
    if (job->a.D == 128)
        return narrow ? launch<T, 128, 1, true, 3>(dev, job, stream)
                      : launch<T, 128, 2, false, 2>(dev, job, stream);
    return narrow ? launch<T, 64, 1, true, 3>(dev, job, stream)
                  : launch<T, 64, 2, false, 3>(dev, job, stream);
}

esa_status sm80_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    return job->a.dtype == ESA_DTYPE_BF16 ? launch_for<__nv_bfloat16>(dev, job, stream)
                                          : launch_for<__half>(dev, job, stream);
}
