// sm90_attn_gather.cuh - the helper warps, which gather fine means into stages of the ring.
// SPDX-License-Identifier: Apache-2.0
//
// The fine means of a row are spread over global memory in runs of one block's means, and a box of
// a tensor copy is one run of one chunk. Issuing a box keeps a warp busy for about 70 cycles. With
// 8 means per block and D = 128 a stage takes 32 boxes: one warp needs 2400 cycles, two 1200, four
// 700 (H200). The consumers need about 1500 per stage, so a producer that issues the boxes itself
// makes them wait: the tail of levels took 25 % longer than the pooled one, and still 8 to 10 %
// longer when all its lanes issued boxes. So the producer leaves these stages to the warps of its
// warpgroup that have nothing else to do, and goes on with the next stage at once: 4 to 7 %, of
// which the additional stages alone are 3.3. docs/lab/speed.md has what else was tried.
//
// Each helper has a desk in shared memory, and the producer goes from desk to desk. A job may lie
// on a desk while the helper still works on the one before.
#pragma once

#include "cuda/attention/sm90_attn.cuh"

namespace sm90
{

// Puts jobs on the desks; lane 0 of the producer warp.
template <int D, int BITS = 16> struct gather_queue {
    static constexpr int HELPERS = block_shape<D, BITS>::HELPERS;

    // The number of the next helper, once its desk is free.
    static __device__ __forceinline__ uint32_t next_desk(const smem_view<D, BITS> &sm)
    {
        const uint32_t turn = sm.facts->asked, helper = turn % HELPERS;
        sm.facts->asked = turn + 1;
        mbar_wait(sm.desk_free(helper), (turn / HELPERS & 1) ^ 1);
        return helper;
    }

    // The given stage of the ring, which is empty, gets stage `number` of the row's fine means.
    static __device__ __forceinline__ void ask(const smem_view<D, BITS> &sm, bool values,
                                               int number, uint32_t stage)
    {
        const uint32_t helper = next_desk(sm);
        gather_job &job = sm.desks[helper];
        job.values = values;
        job.b = sm.facts->b;
        job.h = sm.facts->h;
        job.mask_row = sm.facts->mask_row;
        job.first = number * STAGE_KEYS;
        job.columns = sm.facts->fine - number * STAGE_KEYS;
        job.stage = (int32_t)stage;
        // With 8 bit the helper copies without a tensor map, and arrives when it has finished.
        if (BITS == 16) mbar_arrive_tx(sm.full(stage), smem_plan<D>::TILE_BYTES);
        mbar_arrive(sm.desk_ready(helper));
    }

    // Sends every helper home.
    static __device__ __forceinline__ void close(const smem_view<D, BITS> &sm)
    {
        for (int i = 0; i < HELPERS; ++i) {
            const uint32_t helper = next_desk(sm);
            sm.desks[helper].stage = -1;
            mbar_arrive(sm.desk_ready(helper));
        }
    }
};

// Fills a stage with the fine means of a job, one box per block and chunk; a whole warp. Past the
// end of the list the stage holds the last block again and again. These columns do not exist for
// the logits; they only keep NaN out of 0 * V.
template <int D>
DEV void gather(const kernel_args &a, const CUtensorMap *from, const smem_view<D> &sm,
                const gather_job &job, int lane)
{
    constexpr int CHUNKS = D / 64;
    const int fine_log2 = a.fine_log2;
    const uint16_t *const list = a.fine_index + (int64_t)job.mask_row * a.cap +
                                 (job.first >> fine_log2);
    const int last = (min(job.columns, STAGE_KEYS) - 1) >> fine_log2;
    const uint32_t dst = sm.stage(job.stage), bar = sm.full(job.stage);
    // The same in all lanes, which the compiler cannot know.
    const int h = __shfl_sync(~0u, job.h, 0), b = __shfl_sync(~0u, job.b, 0);
#pragma unroll 1
    for (int i = lane; i < CHUNKS * STAGE_KEYS >> fine_log2; i += 32) {
        const int c = i % CHUNKS, slot = i / CHUNKS, n = list[min(slot, last)] << fine_log2;
        tma_load(dst + c * smem_plan<D>::CHUNK_BYTES + (slot << fine_log2) * 128, from, bar, n, c,
                 h, b, L2_EVICT_LAST);
    }
}

// Takes job after job from the desk until the producer closes it. do_job(job): the whole warp.
template <class View, class Work>
DEV void help(const View &sm, int helper, int lane, const Work &do_job)
{
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(sm.desk_ready(helper), phase);
        const gather_job job = sm.desks[helper];
        __syncwarp(); // all lanes have read the job
        if (job.stage < 0) return;
        if (lane == 0) mbar_arrive(sm.desk_free(helper));
        do_job(job);
    }
}

} // namespace sm90
