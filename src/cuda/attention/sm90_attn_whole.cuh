// sm90_attn_whole.cuh - the consumer of a whole stage (128 keys) per step: D = 128, and wide
// tiles at D = 64.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention/sm90_attn_team.cuh"

namespace sm90
{

template <class T, int D, bool FULL, int ROWS, bool ONES, bool CARRY>
struct consumer_whole : team_member<T, D, FULL, ROWS, ONES, CARRY> {
    using base = team_member<T, D, FULL, ROWS, ONES, CARRY>;
    using base::o;
    using base::release;
    using base::ring;
    using base::sm;
    using base::soft;
    using plan = typename base::plan;
    using ring_pos = typename plan::ring;
    float s[64];    // logits, then P, of the current stage
    uint32_t p[32]; // P of the stage in flight, 16-bit A fragments

    using base::base;

    // S = Q K^T, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage)
    {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const uint32_t chunk = i / 4, unit = i % 4 * 2;
            const uint64_t q = this->q_desc(chunk * (ROWS * 128 >> 4) + unit),
                           k = this->k_desc(stage, chunk * (plan::CHUNK_BYTES >> 4) + unit);
            if (i == 0)
                wgmma_ss_kmajor<T, false>(s, q, k);
            else
                wgmma_ss_kmajor<T, true>(s, q, k);
        }
        wgmma_commit();
    }
    // O += P V, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage)
    {
#pragma unroll
        for (int i = 0; i < STAGE_KEYS / 16; ++i)
            wgmma_rs<T>(o, p + 4 * i, this->v_desc(stage, i * (16 * 128 >> 4)));
        wgmma_commit();
    }

    // Where the values of the stage just taken will be: after the keys of the next stage, if there
    // is one.
    __device__ __forceinline__ ring_pos values_of(bool last) const
    {
        ring_pos v = ring;
        if (!last) v.step();
        return v;
    }

    // The first stage, with nothing else in flight.
    __device__ __forceinline__ void first(const tile_info &t, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage);
        base::carry.prefetch(base::a, t);
        wgmma_wait<0>();
        wgmma_pin(s);
        float bias = 0.0f;
        const uint32_t flags = sm.notes[k.stage].flags;
        if (flags)
            bias = this->template heed<base::NOTES_FIRST>(s, flags, k.stage, 0,
                                                          values_of(t.n == 1));
        release(sm.empty(k.stage));
        this->begin_keys(s, p, scale_log2, bias);
    }
    // In stages without a look the warpgroups take turns to issue their products. Then one computes
    // P while the tensor cores work for another. Without turns they may fall into step, and whether
    // they do changes with small changes of the code (docs/lab/speed.md). All take equally many
    // turns, because all have the same stages.
    static constexpr int CONSUMERS = plan::shape::CONSUMERS;
    __device__ __forceinline__ void await_turn() const { named_sync(TURN_BARRIER + base::wg, 256); }
    __device__ __forceinline__ void pass_turn() const
    {
        named_arrive(TURN_BARRIER + (base::wg + 1) % CONSUMERS, 256);
    }
    __device__ __forceinline__ void begin() const
    {
        if (base::wg == CONSUMERS - 1) pass_turn(); // warpgroup 0 has the first turn
    }

    // A later stage: QK of this stage and PV of the previous one; the softmax of this stage
    // overlaps PV. NOTES: those that can occur. LOOK: at maxima first.
    template <uint32_t NOTES, bool LOOK>
    __device__ __forceinline__ void next(bool last, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step();
        const ring_pos v = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        uint32_t flags = 0;
        if constexpr (NOTES != 0) flags = sm.notes[k.stage].flags;
        if (!LOOK) await_turn();
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_qk(k.stage);
        mbar_wait(sm.full(v.stage), v.phase);
        wgmma_fence();
        issue_pv(v.stage);
        if (!LOOK) pass_turn();
        wgmma_wait<1>();
        wgmma_pin(s);
        const auto wait = [&] {
            wgmma_wait<0>();
            wgmma_pin(p), wgmma_pin(o);
            release(sm.empty(v.stage));
        };
        if constexpr (LOOK) {
            float bias = 0.0f;
            if (NOTES && flags)
                bias = this->template heed<NOTES>(s, flags, k.stage, 0, values_of(last));
            release(sm.empty(k.stage));
            this->template look_first<(NOTES & NOTE_MEANS) != 0>(s, p, scale_log2, bias, wait);
        } else {
            this->look_after(s, p, sm.stage(k.stage), scale_log2, wait);
            release(sm.empty(k.stage));
        }
    }
    __device__ __forceinline__ void drain(const tile_info &t)
    {
        mbar_wait(sm.full(ring.stage), ring.phase);
        wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_pv(ring.stage);
        base::carry.load(base::a, t);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(ring.stage));
        ring.step();
    }

    __device__ __forceinline__ void keys(const tile_info &t, float scale_log2)
    {
        first(t, scale_log2);
        int j = 1;
        const int listed = FULL ? t.listed : t.n;
        if constexpr (FULL)
            for (const int bare = min(this->first_bare(), listed); j < bare; ++j)
                next<NOTE_DIAGONAL, true>(j + 1 == t.n, scale_log2);
        for (const int end = min(base::soft_rows::LOOK_STAGES, listed); j < end; ++j)
            next<0, true>(j + 1 == t.n, scale_log2);
        for (; j < listed; ++j) next<0, false>(j + 1 == t.n, scale_log2);
        if constexpr (FULL)
            for (; j < t.n; ++j) next<NOTES_MEANS, true>(j + 1 == t.n, scale_log2);
        release(sm.q_empty());
        drain(t);
    }
};

} // namespace sm90
