// sm90_attn_kernel.cuh - the Hopper attention kernel and its launch.
// SPDX-License-Identifier: Apache-2.0
//
// Thread blocks are persistent, one per multiprocessor. Consumers are the first warps and
// producers the last, so addresses and descriptors of the consumers stay in uniform registers (3
// to 5 % faster).
#pragma once

#include "cuda/attention/sm90_attn_halves.cuh"
#include "cuda/attention/sm90_attn_produce.cuh"
#include "cuda/attention/sm90_attn_whole.cuh"

namespace sm90
{

template <class T, int D, bool FULL, int ROWS, bool ONES, bool CARRY> struct consumer_of {
    using type = consumer_whole<T, D, FULL, ROWS, ONES, CARRY>;
};
template <class T, bool FULL, bool ONES, bool CARRY>
struct consumer_of<T, 64, FULL, TILE_Q, ONES, CARRY> {
    using type = consumer_halves<T, FULL, ONES, CARRY>;
};

// ONES: as in softmax_rows
template <class T, int D, bool FULL, int ROWS, bool ONES, bool CARRY>
__global__ void __launch_bounds__(block_shape<D, 16, ROWS>::THREADS, 1)
    attn_kernel(const __grid_constant__ typename args_of<CARRY>::type a,
                const __grid_constant__ CUtensorMap qm, const __grid_constant__ CUtensorMap km,
                const __grid_constant__ CUtensorMap vm, const __grid_constant__ CUtensorMap k_mean,
                const __grid_constant__ CUtensorMap v_mean,
                const __grid_constant__ CUtensorMap k_fine,
                const __grid_constant__ CUtensorMap v_fine)
{
    using S = block_shape<D, 16, ROWS>;
    using plan = smem_plan<D, 16, ROWS>;
    extern __shared__ __align__(1024) unsigned char raw[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool produces = warp >= 4 * S::CONSUMERS;
    // Producer warps from TEAMS on are helpers.
    const int team = produces ? warp - 4 * S::CONSUMERS : warp / (4 * S::TEAM_CONSUMERS);
    const smem_view<D, 16, ROWS> sm(raw, team);

    if (produces && team < S::TEAMS && lane == 0) {
        sm.template init_barriers<FULL>();
        sm.facts->last_team = 0;
    }
    if (threadIdx.x == 0) tma_prefetch_map(&qm), tma_prefetch_map(&km), tma_prefetch_map(&vm);
    if (ONES) {
        constexpr uint32_t one = 0x3F803F80; // twice in bf16
        for (int i = threadIdx.x; i < plan::ONES_COLUMNS / 16; i += S::THREADS)
            store_shared(sm.ones + 16 * i, make_uint4(one, one, one, one));
        proxy_fence();
    }
    __syncthreads();

    if (produces) {
        regs_lower<S::PRODUCER_REGS>();
        const tensor_maps maps = { &qm, &km, &vm, &k_mean, &v_mean, &k_fine, &v_fine };
        if (team < S::TEAMS) {
            int32_t *const owner = (int32_t *)&smem_view<D, 16, ROWS>(raw, 0).facts->last_team;
            producer<D, FULL, 16, ROWS>(a, maps, sm, lane).run(owner, team);
        } else if constexpr (FULL) {
            if (!a.fine_columns) return;
            const smem_view<D> helped(raw, team % S::TEAMS);
            help(helped, team / S::TEAMS - 1, lane, [&](const gather_job &job) {
                gather<D>(a, job.values ? &v_fine : &k_fine, helped, job, lane);
            });
        }
    } else {
        regs_raise<S::CONSUMER_REGS>();
        typename consumer_of<T, D, FULL, ROWS, ONES, CARRY>::type c(
            a, sm, team, warp % (4 * S::TEAM_CONSUMERS), lane);
        c.begin();
        consume<T, D, ONES>(c);
    }
}

template <class T, int D, bool FULL, bool ONES, int ROWS = TILE_Q, bool CARRY = false>
static cudaError_t launch(const attn_launch &l)
{
    constexpr int bytes = smem_plan<D, 16, ROWS>::BLOCK;
    const auto kernel = attn_kernel<T, D, FULL, ROWS, ONES, CARRY>;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               bytes);
    if (e != cudaSuccess) return e;
    kernel<<<l.blocks, block_shape<D, 16, ROWS>::THREADS, bytes, l.stream>>>(
        l.args, l.q, l.k, l.v, l.k_mean, l.v_mean, l.k_fine, l.v_fine);
    return cudaGetLastError();
}

template <class T, int D, bool ONES> static cudaError_t launch_carry(const attn_launch &l)
{
    return l.full ? launch<T, D, true, ONES, TILE_Q, true>(l)
                  : launch<T, D, false, ONES, TILE_Q, true>(l);
}

// A call with a carry has a mask, so its tiles are not wide.
template <class T> cudaError_t attn_run_carry(const attn_launch &l)
{
    if (l.D == 128) return launch_carry<T, 128, false>(l);
    if constexpr (is_bf16<T>)
        if (!l.args.lse) return launch_carry<T, 64, true>(l);
    return launch_carry<T, 64, false>(l);
}

template <class T> cudaError_t attn_run(const attn_launch &l)
{
    if (l.D == 128)
        return l.full ? launch<T, 128, true, false>(l) : launch<T, 128, false, false>(l);
    if constexpr (is_bf16<T>) {
        if (!l.args.lse) {
            if (l.wide) return launch<T, 64, false, true, WIDE_TILE>(l);
            return l.full ? launch<T, 64, true, true>(l) : launch<T, 64, false, true>(l);
        }
    }
    if (l.wide) return launch<T, 64, false, false, WIDE_TILE>(l);
    return l.full ? launch<T, 64, true, false>(l) : launch<T, 64, false, false>(l);
}

} // namespace sm90
