// sm90_8bit.cu - the launch of the 8-bit Hopper kernels: D 128.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_8bit.cuh"

namespace sm90
{

template <class T, int D, bool FULL> static cudaError_t launch8(const attn_launch &l)
{
    constexpr int bytes = smem_plan<D, 8>::BLOCK;
    const cudaError_t e = cudaFuncSetAttribute(attn8_kernel<T, D, FULL>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    attn8_kernel<T, D, FULL><<<l.blocks, block_shape<D, 8>::THREADS, bytes, l.stream>>>(
        l.args, l.q, l.k, l.v, l.k_mean, l.v_mean);
    return cudaGetLastError();
}

template <class T> cudaError_t attn8_run(const attn_launch &l)
{
    return l.full ? launch8<T, 128, true>(l) : launch8<T, 128, false>(l);
}

template cudaError_t attn8_run<bf16>(const attn_launch &l);
template cudaError_t attn8_run<f16>(const attn_launch &l);

} // namespace sm90
