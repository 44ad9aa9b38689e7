// sm90_attn_whole.cuh - the consumer of a whole stage (128 keys) per step: D = 128, and wide
// tiles at D = 64.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention/sm90_attn_team.cuh"

namespace sm90
{

template <class T, int D, bool FULL, int ROWS> struct consumer_whole : team_member<D, FULL, ROWS> {
    // Q in registers takes a third less shared-memory traffic than reading it for every product.
    static constexpr bool Q_REGS = D == 128;
    using base = team_member<D, FULL, ROWS>;
    using base::lane;
    using base::o;
    using base::release;
    using base::ring;
    using base::sm;
    using base::soft;
    using plan = typename base::plan;
    using ring_pos = typename plan::ring;
    float s[64];    // logits, then P, of the current stage
    uint32_t p[32]; // P of the stage in flight, 16-bit A fragments
    uint32_t q[Q_REGS ? D / 4 : 1];

    using base::base;

    __device__ __forceinline__ void load_q()
    {
        const int row = 64 * base::wg + 16 * base::warp + lane % 16;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            // 16-byte unit with the 128-byte swizzle.
            const uint32_t unit = (2 * (i % 4) + lane / 16) ^ (row % 8);
            load_matrices(reinterpret_cast<uint32_t(&)[4]>(q[4 * i]),
                          sm.q() + (i / 4) * plan::CHUNK_BYTES + row * 128 + unit * 16);
        }
        __syncwarp(); // lane 0 releases for the whole warp
        release(sm.q_empty());
    }
    // S = Q K^T, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage)
    {
        const uint64_t k_desc = wgmma_desc(sm.stage(stage), 16, 1024);
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const uint32_t off = (i / 4) * (plan::CHUNK_BYTES >> 4) + (i % 4) * 2;
            if constexpr (!Q_REGS) {
                const uint64_t q_desc = wgmma_desc(sm.q() + base::wg * 64 * 128, 16, 1024);
                if (i == 0)
                    wgmma_ss_kmajor<T, false>(s, q_desc, k_desc);
                else
                    wgmma_ss_kmajor<T, true>(s, q_desc + off, k_desc + off);
            } else if (i == 0) {
                wgmma_rs_kmajor<T, false>(s, q, k_desc);
            } else {
                wgmma_rs_kmajor<T, true>(s, q + 4 * i, k_desc + off);
            }
        }
        wgmma_commit();
    }
    // O += P V, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage)
    {
        const uint64_t v_desc = wgmma_desc(sm.stage(stage), plan::CHUNK_BYTES, 1024);
#pragma unroll
        for (int i = 0; i < STAGE_KEYS / 16; ++i)
            wgmma_rs<T>(o, p + 4 * i, v_desc + i * (16 * 128 >> 4));
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
    __device__ __forceinline__ void first(bool last, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage);
        wgmma_wait<0>();
        wgmma_pin(s);
        float bias = 0.0f;
        const uint32_t flags = sm.notes[k.stage].flags;
        if (flags)
            bias = this->template heed<base::NOTES_FIRST>(s, flags, k.stage, 0, values_of(last));
        release(sm.empty(k.stage));
        soft.template next<FULL>(s, scale_log2, bias);
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }
    // A later stage: QK of this stage and PV of the previous one; the softmax of this stage
    // overlaps PV. NOTES: those that can occur.
    template <uint32_t NOTES> __device__ __forceinline__ void next(bool last, float scale_log2)
    {
        const ring_pos k = ring;
        ring.step();
        const ring_pos v = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        uint32_t flags = 0;
        if constexpr (NOTES != 0) flags = sm.notes[k.stage].flags;
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_qk(k.stage);
        mbar_wait(sm.full(v.stage), v.phase);
        wgmma_fence();
        issue_pv(v.stage);
        wgmma_wait<1>();
        wgmma_pin(s);
        float bias = 0.0f;
        if (NOTES && flags)
            bias = this->template heed<NOTES>(s, flags, k.stage, 0, values_of(last));
        release(sm.empty(k.stage));
        soft.template next<(NOTES & NOTE_MEANS) != 0>(s, scale_log2, bias);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(v.stage));
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }
    __device__ __forceinline__ void drain()
    {
        mbar_wait(sm.full(ring.stage), ring.phase);
        wgmma_pin(p), wgmma_pin(o);
        wgmma_fence();
        issue_pv(ring.stage);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(o);
        release(sm.empty(ring.stage));
        ring.step();
    }

    __device__ __forceinline__ void keys(const tile_info &t, float scale_log2)
    {
        if (Q_REGS) load_q();
        first(t.n == 1, scale_log2);
        int j = 1;
        if constexpr (FULL)
            for (const int bare = min(this->first_bare(), t.listed); j < bare; ++j)
                next<NOTE_DIAGONAL>(j + 1 == t.n, scale_log2);
        for (const int end = FULL ? t.listed : t.n; j < end; ++j) next<0>(j + 1 == t.n, scale_log2);
        if constexpr (FULL)
            for (; j < t.n; ++j) next<NOTES_MEANS>(j + 1 == t.n, scale_log2);
        if (!Q_REGS) release(sm.q_empty());
        drain();
    }
};

} // namespace sm90
