// SPDX-License-Identifier: Apache-2.0
//
// The kernel, parameterised by a policy.
#pragma once

#include <cuda_runtime.h>

#include "ladder.h"
#include "consumer.cuh"
#include "consumer_halves.cuh"

// A team is two consumer warpgroups and a producer warp with a tile and a ring of their own. The
// producers of a block's teams share one warpgroup, whose registers go to the consumers. setmaxnreg
// moves registers inside what the launch allocated; asking for more than that hangs.
template <class P> struct block_shape {
    static constexpr int CONSUMERS = P::TEAMS * TEAM_CONSUMERS;
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int LAUNCH_REGS = 65536 / THREADS / 8 * 8;
    static constexpr int PRODUCER_REGS = P::TEAMS == 1 ? 40 : 32;
    static constexpr int CONSUMER_REGS = P::TEAMS == 1 ? 232 : 112;
    static_assert(PRODUCER_REGS + CONSUMERS * CONSUMER_REGS <= LAUNCH_REGS * (CONSUMERS + 1),
                  "more registers than the launch allocates");
};

template <class T, int D, class P>
__global__ void __launch_bounds__(block_shape<P>::THREADS, 1)
    attn_kernel(const __grid_constant__ kernel_args a, const __grid_constant__ CUtensorMap qm,
                const __grid_constant__ CUtensorMap km, const __grid_constant__ CUtensorMap vm)
{
    constexpr int STAGES = P::template STAGES<D>;
    using shape = block_shape<P>;
    extern __shared__ unsigned char raw[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool producer = warp >= 4 * shape::CONSUMERS;
    const int team = producer ? warp - 4 * shape::CONSUMERS : warp / (4 * TEAM_CONSUMERS);
    const smem_view<D, STAGES> sm(raw, team);

    if (producer && team < P::TEAMS && lane == 0) sm.init_barriers();
    if (threadIdx.x == 0) tma_prefetch_map(&qm), tma_prefetch_map(&km), tma_prefetch_map(&vm);
    __syncthreads();

    if (producer) {
        regs_lower<shape::PRODUCER_REGS>();
        if (team < P::TEAMS)
            produce<D, STAGES, P::HALVES>(a, &qm, &km, &vm, sm, blockIdx.x + gridDim.x * team,
                                          gridDim.x * P::TEAMS, lane);
    } else {
        regs_raise<shape::CONSUMER_REGS>();
        if constexpr (P::HALVES)
            consumer_halves<T, D, P>(a, sm, team, warp % (4 * TEAM_CONSUMERS), lane).run();
        else
            consumer<T, D, P>(a, sm, team, warp % (4 * TEAM_CONSUMERS), lane).run();
    }
}
