// SPDX-License-Identifier: Apache-2.0
//
// The consumer that takes a whole stage (128 keys) per step.
#pragma once

#include "parts.cuh"
#include "policy.cuh"

template <class T, int D, class P> struct consumer {
    static constexpr int STAGES = P::template STAGES<D>;
    using plan = smem_plan<D, STAGES>;
    const kernel_args &a;
    const smem_view<D, STAGES> &sm;
    // first turn barrier of the team; warpgroup of the team, warp of the warpgroup
    const int turn, wg, warp, lane;
    ring_pos ring;
    float s[64];    // logits, then P, of the block in hand
    uint32_t p[32]; // P of the block in flight, 16-bit A fragments
    uint32_t q[P::Q_REGS ? D / 4 : 1];
    float o[D / 2];
    softmax_rows<P::RULE, P::TEAMS == 1> soft;

    __device__ __forceinline__ consumer(const kernel_args &a, const smem_view<D, STAGES> &sm,
                                        int team, int warp, int lane)
        : a(a), sm(sm), turn(BAR_TURN + TEAM_CONSUMERS * team), wg(warp / 4), warp(warp % 4),
          lane(lane)
    {
    }

    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }
    __device__ __forceinline__ void load_q()
    {
        const int row = 64 * wg + 16 * warp + lane % 16;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            // 16-byte unit under the 128-byte swizzle
            const uint32_t unit = (2 * (i % 4) + lane / 16) ^ (row % 8);
            ldmatrix_x4(q + 4 * i, sm.q() + (i / 4) * plan::CHUNK_BYTES + row * 128 + unit * 16);
        }
        __syncwarp(); // lane 0 releases for the whole warp
        release(sm.q_empty());
    }
    // S = Q K^T, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage)
    {
        const uint64_t k_desc = wgmma_desc(sm.stage(stage), 16, 1024);
        const uint64_t q_desc = wgmma_desc(sm.q() + wg * 64 * 128, 16, 1024);
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const uint32_t off = (i / 4) * (plan::CHUNK_BYTES >> 4) + (i % 4) * 2;
            if constexpr (P::Q_REGS) {
                if (i == 0)
                    wgmma_rs_kmajor<T, false>(s, q, k_desc);
                else
                    wgmma_rs_kmajor<T, true>(s, q + 4 * i, k_desc + off);
            } else {
                if (i == 0)
                    wgmma_ss<T, false>(s, q_desc, k_desc);
                else
                    wgmma_ss<T, true>(s, q_desc + off, k_desc + off);
            }
        }
        wgmma_commit();
    }
    // O += P V, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage)
    {
        const uint64_t v_desc = wgmma_desc(sm.stage(stage), plan::CHUNK_BYTES, 1024);
#pragma unroll
        for (int i = 0; i < TILE_K / 16; ++i)
            wgmma_rs<T>(o, p + 4 * i, v_desc + i * (16 * 128 >> 4));
        wgmma_commit();
    }

    // K of one block with nothing else in flight; leaves s = logits.
    __device__ __forceinline__ void logits(ring_pos k, bool last)
    {
        mbar_wait(sm.full(k.stage), k.phase);
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage);
        wgmma_wait<0>();
        wgmma_pin(s);
        release(sm.empty(k.stage));
        if (!P::Q_REGS && last) release(sm.q_empty());
    }
    __device__ __forceinline__ void drain_pv()
    {
        mbar_wait(sm.full(ring.stage), ring.phase);
        wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_pv(ring.stage);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(ring.stage));
        ring.step<STAGES>();
    }

    // One step of the pipelined loop: QK of this block and PV of the one before, softmax of this
    // block under PV.
    __device__ __forceinline__ void step_overlapped(bool last, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step<STAGES>();
        const ring_pos v = ring;
        ring.step<STAGES>();
        mbar_wait(sm.full(k.stage), k.phase);
        if constexpr (P::PINGPONG) named_sync(turn + wg, 128 * TEAM_CONSUMERS);
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_qk(k.stage);
        mbar_wait(sm.full(v.stage), v.phase);
        wgmma_fence();
        issue_pv(v.stage);
        if constexpr (P::PINGPONG) named_arrive(turn + (wg ^ 1), 128 * TEAM_CONSUMERS);
        wgmma_wait<1>();
        wgmma_pin(s);
        release(sm.empty(k.stage));
        if (!P::Q_REGS && last) release(sm.q_empty());
        soft.next(s, scale_log2);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(v.stage));
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }
    // The same work with nothing in flight during the softmax.
    __device__ __forceinline__ void step_serial(bool last, float scale_log2)
    {
        // the ring's order is the same: K of this block comes before V of the one before
        const ring_pos k = ring;
        ring.step<STAGES>();
        drain_pv();
        logits(k, last);
        soft.next(s, scale_log2);
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }

    __device__ __forceinline__ void blocks(const tile_info &t, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step<STAGES>();
        logits(k, t.n == 1);
        if (t.valid < TILE_K) mask_tail(s, t.valid, lane);
        soft.first(s, scale_log2);
        pack_rows<T>(p, s);
        for (int j = 1; j < t.n; ++j) {
            if constexpr (P::OVERLAP)
                step_overlapped(j + 1 == t.n, scale_log2);
            else
                step_serial(j + 1 == t.n, scale_log2);
        }
        drain_pv();
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
                if constexpr (P::Q_REGS) load_q();
                blocks(t, scale_log2);
            } else {
                release(sm.q_empty());
                soft.l[0] = soft.l[1] = soft.m[0] = soft.m[1] = 0.0f;
            }
            store_tile<T, D>(a, t, o, soft.l, soft.m);
        }
    }
};
