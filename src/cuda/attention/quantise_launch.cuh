// quantise_launch.cuh - the kernels that round, for one format of values, and the launches.
// SPDX-License-Identifier: Apache-2.0
//
// A format is a struct with
//
//   GRAIN        tokens of the smallest fine mean
//   MOST_PARTS   key blocks of a run, at most
//   TAKES_64     whether there are kernels for D 64 beside those for D 128
//   ADDS_ERROR   whether it sums the errors of its codes, unless there is a tail
//   round<T, D, TAIL, AGAIN>(plan, run, sums)
//                rounds the values of a run, and their means if there is a TAIL. AGAIN: with the
//                scales that hold the largest value.
#pragma once

#include "cuda/attention/quantise_rows.cuh"

namespace
{

// Shared memory for sums, if there is a tail.
template <int D, int GRAIN, bool TAIL> struct sums_memory {
    __align__(16) char bytes[TAIL ? sizeof(run_sums<D, GRAIN>) : 16];
    __device__ __forceinline__ run_sums<D, GRAIN> &get() { return *(run_sums<D, GRAIN> *)bytes; }
};

// Counts a thread block as done; true, in all its threads, if it is the last of n.
__device__ __forceinline__ bool is_last(int32_t *done, int n)
{
    __shared__ bool last;
    __threadfence(); // what this thread wrote comes before
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, 1) == n - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// Adds the mean error of the codes of a head to its centre.
template <int D, int SECOND>
__device__ __forceinline__ void add_error(const quantise_plan &p, int64_t bh)
{
    const int d = threadIdx.x, length = key_length(p.kv_len, bh / p.k.H, p.k.N);
    if (d >= D || length == 0) return;
    const int64_t at = bh * D + d;
    const float scale = SECOND ? again_scale(p, at) : p.out.v_scale[at],
                sum = (float)__ldcg(p.out.v_error[SECOND] + at) * ERROR_UNIT;
    p.out.v_centre[at] = fmaf(sum / (float)length, scale, p.out.v_middle[at]);
}

// Thread blocks round q, then k, then v.
template <class Values, class T, int D, bool TAIL>
__global__ void __launch_bounds__(run_shape<D>::THREADS,
                                  TAIL ? run_shape<D>::BLOCKS_TAIL : run_shape<D>::BLOCKS)
    round_kernel(const __grid_constant__ quantise_plan p)
{
    __shared__ sums_memory<D, Values::GRAIN, TAIL> sums;
    const int64_t run = blockIdx.x - p.q_runs;
    if (run < 0)
        round_queries<T, D>(p);
    else if (run < p.kv_runs)
        round_keys<T, D, Values::GRAIN, TAIL>(
            p, run, Values::MOST_PARTS == 1 ? 1 : (int)p.out.blocks, sums.get());
    else
        Values::template round<T, D, TAIL, false>(p, run - p.kv_runs, sums.get());
}

// Rounds the values of heads again in which one did not fit, and adds the mean errors.
template <class Values, class T, int D, bool TAIL>
__global__ void __launch_bounds__(run_shape<D>::THREADS,
                                  TAIL ? run_shape<D>::BLOCKS_TAIL : run_shape<D>::BLOCKS)
    again_kernel(const __grid_constant__ quantise_plan p)
{
    __shared__ sums_memory<D, Values::GRAIN, TAIL> sums;
    for (int64_t run = blockIdx.x; run < p.kv_runs; run += gridDim.x) {
        const int64_t bh = run / p.out.nk;
        if (!p.out.again[bh]) continue;
        __syncthreads(); // all threads have read what the last run left in shared memory
        Values::template round<T, D, TAIL, true>(p, run, sums.get());
        if (Values::ADDS_ERROR && !TAIL && is_last(p.out.done + bh, (int)p.out.nk))
            add_error<D, 1>(p, bh);
    }
    if constexpr (Values::ADDS_ERROR && !TAIL)
        for (int64_t bh = blockIdx.x; bh < p.kv_heads; bh += gridDim.x)
            if (!p.out.again[bh]) add_error<D, 0>(p, bh);
}

// AGAIN is left out if the sample has every row and there are no errors to add.
template <class Values> int steps_of(const quantise_plan &p)
{
    return (Values::ADDS_ERROR && !p.out.k_mean) || p.k.N >= 2 * SAMPLE ? STEPS : AGAIN;
}

template <class Values, class T, int D, bool TAIL>
void launch(const quantise_plan &p, int step, cudaStream_t stream)
{
    constexpr int THREADS = run_shape<D>::THREADS;
    const dim3 parts(QUANTISE_PARTS, (unsigned)p.kv_heads);
    const unsigned all = (unsigned)(p.q_runs + 2 * p.kv_runs),
                   few = (unsigned)(p.kv_runs < AGAIN_BLOCKS ? p.kv_runs : AGAIN_BLOCKS);
    switch (step) {
    case STATS: stats_kernel<T, D><<<parts, THREADS, 0, stream>>>(p); break;
    case CENTRES: centre_kernel<D><<<(unsigned)p.kv_heads, D, 0, stream>>>(p); break;
    case ROUND: round_kernel<Values, T, D, TAIL><<<all, THREADS, 0, stream>>>(p); break;
    case AGAIN: again_kernel<Values, T, D, TAIL><<<few, THREADS, 0, stream>>>(p); break;
    }
}

template <class Values, class T, int D>
void launch_tail(const quantise_plan &p, int step, cudaStream_t stream)
{
    if (p.out.k_mean)
        launch<Values, T, D, true>(p, step, stream);
    else
        launch<Values, T, D, false>(p, step, stream);
}

template <class Values>
void launch_step(const quantise_plan &p, const esa_attn_args *a, int step, cudaStream_t stream)
{
    constexpr int OTHER = Values::TAKES_64 ? 64 : 128;
    if (a->dtype == ESA_DTYPE_BF16)
        a->D == 128 ? launch_tail<Values, __nv_bfloat16, 128>(p, step, stream)
                    : launch_tail<Values, __nv_bfloat16, OTHER>(p, step, stream);
    else
        a->D == 128 ? launch_tail<Values, __half, 128>(p, step, stream)
                    : launch_tail<Values, __half, OTHER>(p, step, stream);
}

template <class Values>
esa_status quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                    cudaStream_t stream)
{
    const quantise_plan p = plan_of(a, q);
    for (int step = 0; step < steps_of<Values>(p); ++step) launch_step<Values>(p, a, step, stream);
    return launch_check(dev, "rounding to 8 bit");
}

} // namespace
