// sm90_attn_halves.cuh - the consumer of half a stage (64 keys) per step: D = 64, tiles of 128
// rows.
// SPDX-License-Identifier: Apache-2.0
//
// S and P need half the registers, so two teams fit on a multiprocessor. Four warpgroups instead of
// two keep the tensor cores and the special-function units busy at once.
#pragma once

#include "cuda/attention/sm90_attn_team.cuh"

namespace sm90
{

template <class T, bool FULL, bool ONES, bool CARRY>
struct consumer_halves : team_member<T, 64, FULL, TILE_Q, ONES, CARRY> {
    static constexpr int D = 64;
    static constexpr int HALF = 64 * 128 >> 4; // 64 rows further, in descriptor units
    using base = team_member<T, D, FULL, TILE_Q, ONES, CARRY>;
    using base::o;
    using base::release;
    using base::ring;
    using base::sm;
    using base::soft;
    using plan = smem_plan<D>;
    using ring_pos = typename plan::ring;
    float s[32];    // logits, then P, of the current half
    uint32_t p[16]; // P of the half in flight, 16-bit A fragments

    using base::base;

    __device__ __forceinline__ void begin() const {} // no turns

    // S = Q K^T over keys 64 * half .. of the stage, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage, int half)
    {
        wgmma_ss_kmajor<T, false>(s, this->q_desc(0), this->k_desc(stage, half * HALF));
#pragma unroll
        for (int i = 1; i < D / 16; ++i)
            wgmma_ss_kmajor<T, true>(s, this->q_desc(2 * i),
                                     this->k_desc(stage, half * HALF + 2 * i));
        wgmma_commit();
    }
    // O += P V over keys 64 * half .. of the stage, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage, int half)
    {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_rs<T>(o, p + 4 * i, this->v_desc(stage, half * HALF + i * (16 * 128 >> 4)));
        wgmma_commit();
    }

    // Half 0 of the first stage of a tile, with nothing else in flight.
    __device__ __forceinline__ uint32_t first(ring_pos k, const tile_info &t, float scale_log2)
    {
        mbar_wait(sm.full(k.stage), k.phase);
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage, 0);
        base::carry.prefetch(base::a, t);
        wgmma_wait<0>();
        wgmma_pin(s);
        float bias = 0.0f;
        const uint32_t flags = sm.notes[k.stage].flags;
        if (flags) bias = this->template heed<base::NOTES_FIRST>(s, flags, k.stage, 0, ring);
        this->begin_keys(s, p, scale_log2, bias);
        return flags;
    }
    // QK of half HALF_NO of stage k, PV of the half before it (in v), softmax of the new half. A
    // half without any key keeps the references and adds zeros. flags: from the note of k, if
    // NOTED. Half 0 reads them; half 1 gets them.
    template <int HALF_NO, bool NOTED>
    __device__ __forceinline__ void next(ring_pos k, ring_pos v, uint32_t &flags, float scale_log2)
    {
        if (HALF_NO == 0) mbar_wait(sm.full(k.stage), k.phase);
        if (NOTED && HALF_NO == 0) flags = sm.notes[k.stage].flags;
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_qk(k.stage, HALF_NO);
        if (HALF_NO == 1) mbar_wait(sm.full(v.stage), v.phase);
        issue_pv(v.stage, HALF_NO ^ 1);
        wgmma_wait<1>();
        wgmma_pin(s);
        const auto wait = [&] {
            wgmma_wait<0>();
            wgmma_pin(p), wgmma_pin(o);
            if (HALF_NO == 0) release(sm.empty(v.stage));
        };
        if constexpr (NOTED) {
            float bias = 0.0f;
            if (flags)
                bias = this->template heed<base::NOTES_FIRST>(s, flags, k.stage, HALF_NO, ring);
            if (FULL && HALF_NO == 0 && (flags & NOTE_SLIVER))
                soft.next_sliver(s, scale_log2, bias);
            else
                soft.template next<FULL>(s, scale_log2, bias);
            wait();
            pack_rows<T>(p, s);
            soft.rescale_rows(o);
        } else if constexpr (ONES) {
            this->look_after(s, p, sm.stage(k.stage) + HALF_NO * (HALF << 4), scale_log2, wait);
        } else {
            this->template look_first<false>(s, p, scale_log2, 0.0f, wait);
        }
        if (HALF_NO == 1) release(sm.empty(k.stage));
    }

    __device__ __forceinline__ void keys(const tile_info &t, float scale_log2)
    {
        ring_pos k = ring;
        ring.step();
        uint32_t flags = first(k, t, scale_log2);
        for (int j = 1;; ++j) { // half 1 of stage j - 1, then half 0 of stage j
            // Stage j - 1 has no note, and from stage first_bare() on the list has none: there are
            // none to read until the list ends.
            if (!__any_sync(~0u, flags) && j >= this->first_bare()) {
                for (;; ++j) {
                    const ring_pos v = ring; // values follow their keys
                    ring.step();
                    next<1, false>(k, v, flags, scale_log2);
                    if (j >= t.listed) break;
                    k = ring;
                    ring.step();
                    next<0, false>(k, v, flags, scale_log2);
                }
            } else {
                const ring_pos v = ring;
                ring.step();
                if (j == t.n && (flags & NOTE_SHORT)) {
                    release(sm.empty(k.stage));
                    drain(0, t);
                    return;
                }
                next<1, true>(k, v, flags, scale_log2);
            }
            if (j == t.n) {
                drain(1, t);
                return;
            }
            ring_pos v = ring;
            v.back();
            k = ring;
            ring.step();
            flags = 0;
            next<0, FULL>(k, v, flags, scale_log2);
        }
    }
    // P V of the last half of a tile.
    __device__ __forceinline__ void drain(int half, const tile_info &t)
    {
        release(sm.q_empty());
        ring_pos v = ring;
        v.back();
        mbar_wait(sm.full(v.stage), v.phase);
        wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_pv(v.stage, half);
        base::carry.load(base::a, t);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(v.stage));
    }
};

} // namespace sm90
