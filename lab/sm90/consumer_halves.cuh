// SPDX-License-Identifier: Apache-2.0
//
// The consumer that takes half a stage (64 keys) per step. S and P need half the registers, so that
// at D = 64 two teams fit on a multiprocessor: four warpgroups instead of two to keep the tensor
// cores and the special-function units busy at once.
#pragma once

#include "parts.cuh"
#include "policy.cuh"

template <class T, int D, class P> struct consumer_halves {
    static constexpr int STAGES = P::template STAGES<D>;
    static constexpr int HALF = 64 * 128 >> 4; // 64 rows further, in descriptor units
    using plan = smem_plan<D, STAGES>;
    const kernel_args &a;
    const smem_view<D, STAGES> &sm;
    const int turn, wg, lane; // first turn barrier of the team; warpgroup of the team
    ring_pos ring;
    float s[32];    // logits, then P, of the half in hand
    uint32_t p[16]; // P of the half in flight, 16-bit A fragments
    float o[D / 2];
    softmax_rows<P::RULE, P::TEAMS == 1> soft;

    __device__ __forceinline__ consumer_halves(const kernel_args &a, const smem_view<D, STAGES> &sm,
                                               int team, int warp, int lane)
        : a(a), sm(sm), turn(BAR_TURN + TEAM_CONSUMERS * team), wg(warp / 4), lane(lane)
    {
    }

    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }
    // S = Q K^T over keys 64 * half .. of the stage, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage, int half)
    {
        const uint64_t k_desc = wgmma_desc(sm.stage(stage), 16, 1024) + half * HALF;
        const uint64_t q_desc = wgmma_desc(sm.q() + wg * 64 * 128, 16, 1024);
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const uint32_t off = (i / 4) * (plan::CHUNK_BYTES >> 4) + (i % 4) * 2;
            if (i == 0)
                wgmma_ss<T, false>(s, q_desc, k_desc);
            else
                wgmma_ss<T, true>(s, q_desc + off, k_desc + off);
        }
        wgmma_commit();
    }
    // O += P V over keys 64 * half .. of the stage, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage, int half)
    {
        const uint64_t v_desc = wgmma_desc(sm.stage(stage), plan::CHUNK_BYTES, 1024) + half * HALF;
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_rs<T>(o, p + 4 * i, v_desc + i * (16 * 128 >> 4));
        wgmma_commit();
    }

    // QK of half HALF_NO of block k, PV of the half before it (in v), softmax of the new half.
    // valid: keys that exist in this half, 64 or more: all.
    template <int HALF_NO>
    __device__ __forceinline__ void step(ring_pos k, ring_pos v, int valid, bool last,
                                         float scale_log2)
    {
        if (HALF_NO == 0) mbar_wait(sm.full(k.stage), k.phase);
        if constexpr (P::PINGPONG) named_sync(turn + wg, 128 * TEAM_CONSUMERS);
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_qk(k.stage, HALF_NO);
        if (HALF_NO == 1) mbar_wait(sm.full(v.stage), v.phase);
        wgmma_fence();
        issue_pv(v.stage, HALF_NO ^ 1);
        if constexpr (P::PINGPONG) named_arrive(turn + (wg ^ 1), 128 * TEAM_CONSUMERS);
        wgmma_wait<1>();
        wgmma_pin(s);
        if (HALF_NO == 1) release(sm.empty(k.stage));
        if (HALF_NO == 1 && last) release(sm.q_empty());
        if (HALF_NO == 1 && valid < 64) mask_tail(s, valid, lane);
        soft.next(s, scale_log2);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        if (HALF_NO == 0) release(sm.empty(v.stage));
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }

    __device__ __forceinline__ void blocks(const tile_info &t, float scale_log2)
    {
        ring_pos k = ring;
        ring.step<STAGES>();
        mbar_wait(sm.full(k.stage), k.phase);
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage, 0);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (t.valid < 64) mask_tail(s, t.valid, lane);
        soft.first(s, scale_log2);
        pack_rows<T>(p, s);
        // Only the first stage can be cut off; a second half without any key keeps the maximum and
        // adds zeros.
        int valid = t.valid - 64;
        for (int j = 1;; ++j) {
            const ring_pos v = ring;
            ring.step<STAGES>();
            step<1>(k, v, valid, j == t.n, scale_log2);
            valid = 64;
            if (j == t.n) {
                wgmma_pin(p), wgmma_pin(o);
                wgmma_fence();
                issue_pv(v.stage, 1);
                wgmma_wait<0>();
                wgmma_pin(p), wgmma_pin(o);
                release(sm.empty(v.stage));
                return;
            }
            k = ring;
            ring.step<STAGES>();
            step<0>(k, v, 64, false, scale_log2);
        }
    }

    __device__ __forceinline__ void run()
    {
        const float scale_log2 = a.scale * 1.44269504f;
        uint32_t q_phase = 0;
        // the first turn is consumer 0's
        if (P::PINGPONG && wg == 0) named_arrive(turn, 128 * TEAM_CONSUMERS);
        for (;;) {
            mbar_wait(sm.q_full(), q_phase);
            q_phase ^= 1;
            const tile_info t = *sm.info;
            if (t.n < 0) return;
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
            if (t.n > 0) {
                blocks(t, scale_log2);
            } else {
                release(sm.q_empty());
                soft.l[0] = soft.l[1] = soft.m[0] = soft.m[1] = 0.0f;
            }
            store_tile<T, D>(a, t, o, soft.l, soft.m);
        }
    }
};
