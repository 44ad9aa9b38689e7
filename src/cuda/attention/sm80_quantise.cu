// sm80_quantise.cu - queries, keys and values as the 8-bit kernel of sm_80 reads them: values in
// f16, row by row. D 64 and 128.
// SPDX-License-Identifier: Apache-2.0
//
// Values are stored in units of their channel's scale, within -448 .. 448. So values of bf16 beyond
// the largest f16 do not overflow, and those of a small channel do not underflow.
#include "cuda/attention/quantise_rows.cuh"
#include "cuda/runtime/ptx.cuh"

namespace
{

constexpr int GRAIN = 4; // tokens of the smallest fine mean: blocks of 64, 16 means

template <class T, int D>
__device__ __forceinline__ void round_values(const quantise_plan &p, run_sums<D, GRAIN> &sums)
{
    constexpr int COLUMNS = run_shape<D>::COLUMNS, ROWS = run_shape<D>::ROWS;
    const int64_t run = blockIdx.x - p.q_runs - p.kv_runs, bh = run / p.out.nk, b = bh / p.v.H,
                  j = run % p.out.nk;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS,
              parts = (int)p.out.blocks, length = key_length(p.kv_len, b, p.v.N),
              n = length - (int)j * RUN_8BIT, first = (int)j * RUN_8BIT + ROWS * group;
    packed<T> row[ROWS];
    load_run(row, head_rows<T>(p.v, b, bh % p.v.H), first, length, column);
    __shared__ float centre[D], inverse[D];
    if (threadIdx.x < D) {
        centre[threadIdx.x] = p.out.v_centre[bh * D + threadIdx.x];
        inverse[threadIdx.x] = esa_eight_inverse(p.out.v_scale[bh * D + threadIdx.x]);
    }
    __syncthreads();
    float sum[8] = {};
    __half *const to = (__half *)p.out.v + (run * RUN_8BIT + ROWS * group) * D + column * 8;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float x[8];
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] = first + i < length ? x[c] - centre[column * 8 + c] : 0.0f;
            x[c] += x[c] - x[c]; // infinities become NaN
            sum[c] += x[c];
            x[c] *= inverse[column * 8 + c];
        }
        *(uint4 *)(to + i * D) = make_uint4(pack2<f16>(x[0], x[1]), pack2<f16>(x[2], x[3]),
                                            pack2<f16>(x[4], x[5]), pack2<f16>(x[6], x[7]));
        if (p.tail && i % GRAIN == GRAIN - 1) sums.put(sum, ROWS * group + i, column);
    }
    if (!p.tail) return;
    __syncthreads();
    sums.put_means(parts, p.fine, n, [&](float mean, int d, int part, int e) {
        __half *const at = e ? (__half *)p.out.v_fine + ((run * parts + part) * p.fine + e - 1) * D
                             : (__half *)p.out.v_mean + (bh * p.out.nk_pad + j * parts + part) * D;
        at[d] = __float2half_rn(mean * inverse[d]);
    });
}

template <class T, int D>
__global__ void __launch_bounds__(THREADS, 3) round_kernel(const __grid_constant__ quantise_plan p)
{
    __shared__ run_sums<D, GRAIN> sums;
    if (blockIdx.x < p.q_runs)
        round_queries<T, D>(p);
    else if (blockIdx.x < p.q_runs + p.kv_runs)
        round_keys<T>(p, (int)p.out.blocks, sums);
    else
        round_values<T>(p, sums);
}

template <class T, int D> void launch(const quantise_plan &p, int64_t heads, cudaStream_t stream)
{
    launch_stats<T, D>(p, heads, stream);
    round_kernel<T, D><<<(unsigned)(p.q_runs + 2 * p.kv_runs), THREADS, 0, stream>>>(p);
}

template <class T>
void launch_for(const quantise_plan &p, const esa_attn_args *a, cudaStream_t stream)
{
    if (a->D == 128)
        launch<T, 128>(p, a->B * a->Hkv, stream);
    else
        launch<T, 64>(p, a->B * a->Hkv, stream);
}

} // namespace

esa_status quantise_f16(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                        cudaStream_t stream)
{
    const quantise_plan p = plan_of(a, q);
    if (a->dtype == ESA_DTYPE_BF16)
        launch_for<__nv_bfloat16>(p, a, stream);
    else
        launch_for<__half>(p, a, stream);
    return launch_check(dev, "rounding to 8 bit");
}
