// sm90_attn_team.cuh - what both consumers share: the loop over tiles, notes, the first
// state, the store.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention/sm90_attn_again.cuh"
#include "cuda/attention/sm90_attn_carry.cuh"
#include "cuda/attention/sm90_attn_softmax.cuh"

namespace sm90
{

// Writes 16 columns of a row to global memory, 8 bytes per lane. lo, hi: columns 2 t, 2 t + 1 of
// the first 8 and of the next 8, t = lane % 4. Neighbours exchange one of them, so that even lanes
// have four columns of the first 8, and odd lanes four of the others. dst: the first of the four,
// store_column(t) of the 16.
DEV void store_piece(void *dst, uint32_t lo, uint32_t hi, bool odd, bool inside)
{
    const uint32_t got = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
    if (inside) *(uint2 *)dst = odd ? make_uint2(got, hi) : make_uint2(lo, got);
}
DEV int store_column(int t) { return t % 2 ? 2 * t + 6 : 2 * t; }

// Writes O / sum and LSE of the two rows of this thread; m: references in units of unscaled logits.
// A sum of 0 (no visible key) stores 0 and LSE -inf. Rows are computed again from threadIdx,
// because registers would stay in use through the main loop. carry: has loaded what the rows need.
template <class T, int D, bool LSE, int ROWS, bool CARRY>
DEV void store_tile(const typename args_of<CARRY>::type &a, const tile_info &t,
                    const float (&o)[D / 2], const float (&sum)[2], const float (&m)[2],
                    carry_rows<T, D, ROWS, CARRY> &carry)
{
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = t.q0 + 16 * (threadIdx.x / 32 % (ROWS / 16)) + lane / 4;
    int64_t b = 0, h = t.bh;
    if (h >= a.Hq) b = t.bh / a.Hq, h = t.bh % a.Hq;
    T *dst[2];
    float inv[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int64_t token = row + 8 * r;
        if (a.scatter && token < a.Nq)
            token = a.scatter[b * a.scatter_stride[0] + h * a.scatter_stride[1] + token];
        if (LSE && a.lse && row + 8 * r < a.Nq && quad == 0)
            a.lse[b * a.lse_stride[0] + h * a.lse_stride[1] + token * a.lse_stride[2]] =
                sum[r] == 0.0f ? -INFINITY : m[r] * a.scale + logf(sum[r]);
        dst[r] = (T *)a.o + b * a.o_stride[0] + h * a.o_stride[1] + token * a.o_stride[2];
        inv[r] = sum[r] == 0.0f ? 0.0f : reciprocal_approx(sum[r]); // NaN stays NaN
    }
    float with_d[CARRY ? D / 2 : 1];
    if constexpr (CARRY) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) with_d[i] = o[i] * inv[i / 2 % 2];
        if (carry.makes(a)) return carry.make(a, t, with_d);
        carry.add(a, with_d);
    }
    const auto columns = [&](int c, int r) { // two from 8 c on
        if constexpr (CARRY)
            return pack2<T>(with_d[4 * c + 2 * r], with_d[4 * c + 2 * r + 1]);
        else
            return pack2<T>(o[4 * c + 2 * r] * inv[r], o[4 * c + 2 * r + 1] * inv[r]);
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < a.Nq;
        if (a.o_vectors) {
#pragma unroll
            for (int c = 0; c < D / 8; c += 2)
                store_piece(dst[r] + store_column(quad) + 8 * c, columns(c, r), columns(c + 1, r),
                            quad % 2, inside);
        } else if (inside) {
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                uint16_t *const two = (uint16_t *)dst[r] + 8 * c + 2 * quad;
                two[0] = (uint16_t)columns(c, r), two[1] = (uint16_t)(columns(c, r) >> 16);
            }
        }
    }
}

// ONES: as in softmax_rows
template <class T, int D, bool FULL, int ROWS, bool ONES, bool CARRY> struct team_member {
    static constexpr int TILE_ROWS = ROWS;
    static constexpr int NO = D / 2 + (ONES ? 4 : 0); // elements of O, with the columns of sums
    using soft_rows = softmax_rows<ONES, block_shape<D, 16, ROWS>::TEAMS == 2>;
    using plan = smem_plan<D, 16, ROWS>;
    using ring_pos = typename plan::ring;
    using kernel_args_t = typename args_of<CARRY>::type;
    const kernel_args_t &a;
    const smem_view<D, 16, ROWS> &sm;
    const int team, wg, warp, lane; // wg: warpgroup of the team; warp: of the warpgroup
    ring_pos ring;
    float o[NO];
    soft_rows soft;
    carry_rows<T, D, ROWS, CARRY> carry;
    // Low words of the descriptors of q and of the first stage, as keys and as values.
    const uint32_t q_desc0, k_desc0, v_desc0;

    __device__ __forceinline__ team_member(const kernel_args_t &a, const smem_view<D, 16, ROWS> &sm,
                                           int team, int warp, int lane)
        : a(a), sm(sm), team(team), wg(warp / 4), warp(warp % 4), lane(lane),
          q_desc0((uint32_t)wgmma_desc(sm.q() + warp / 4 * 64 * 128, 16, 1024)),
          k_desc0((uint32_t)wgmma_desc(sm.stage(0), 16, 1024)),
          v_desc0((uint32_t)wgmma_desc(sm.stage(0),
                                       ONES ? sm.ones - sm.stage(0) : plan::CHUNK_BYTES, 1024))
    {
    }

    // Descriptors of the tile of q, and of the keys and values of a stage. offset: in units of 16
    // bytes. The high word is the same for all of them.
    static __device__ __forceinline__ uint64_t desc_of(uint32_t low)
    {
        constexpr uint64_t HIGH = (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32;
        return HIGH | low;
    }
    __device__ __forceinline__ uint64_t q_desc(uint32_t offset) const
    {
        return desc_of(q_desc0 + offset);
    }
    __device__ __forceinline__ uint64_t k_desc(uint32_t stage, uint32_t offset) const
    {
        return desc_of(k_desc0 + stage * (plan::STAGE_BYTES >> 4) + offset);
    }
    // ONES: the distance to the next 64 columns (the upper half of the word) leads from any stage
    // and offset to the ones.
    __device__ __forceinline__ uint64_t v_desc(uint32_t stage, uint32_t offset) const
    {
        constexpr uint32_t STEP = ONES ? 1u - (1u << 16) : 1u;
        return desc_of(v_desc0 + (stage * (plan::STAGE_BYTES >> 4) + offset) * STEP);
    }

    // Computes P of a stage, or half of one, from its logits: looks at their maxima first. wait():
    // P V of the stage before is finished then, and p may be written.
    template <bool BIAS, int N, class Wait>
    __device__ __forceinline__ void look_first(float (&s)[N], uint32_t (&p)[N / 2],
                                               float scale_log2, float bias, const Wait &wait)
    {
        soft.template next<BIAS>(s, scale_log2, bias);
        wait();
        pack_rows<T>(p, s);
        soft.rescale_rows(o);
    }
    // The same without a look at the maxima. All columns exist, and their keys begin at k.
    template <int N, class Wait>
    __device__ __forceinline__ void look_after(float (&s)[N], uint32_t (&p)[N / 2], uint32_t k,
                                               float scale_log2, const Wait &wait)
    {
        soft.template weigh<false>(s, scale_log2, 0.0f);
        wait();
        pack_rows<T>(p, s);
        if (soft.reached_two(p)) {
            soft.catch_up(s, o, scale_log2, [&](float(&logits)[N]) {
                logits_again<T, D>(logits, sm.q(), ROWS * 128, 64 * wg + 16 * warp, k,
                                   plan::CHUNK_BYTES, lane);
            });
            pack_rows<T>(p, s);
        }
        soft.add_sums();
    }

    // Computes P of the first keys of a tile. Only a FULL kernel may have something in O before.
    template <int N>
    __device__ __forceinline__ void begin_keys(float (&s)[N], uint32_t (&p)[N / 2],
                                               float scale_log2, float bias)
    {
        if constexpr (FULL) {
            look_first<true>(s, p, scale_log2, bias, [] {});
        } else {
            soft.begin(s, scale_log2);
            soft.template weigh<false>(s, scale_log2, 0.0f);
            soft.add_sums();
            pack_rows<T>(p, s);
        }
    }

    static constexpr uint32_t NOTES_FIRST = FULL ? NOTES_ALL : NOTES_CUT;
    // First stage without a note; the rest of the list has none.
    __device__ __forceinline__ int first_bare() const
    {
        return FULL && a.causal ? DIAGONAL_STAGES : 1;
    }

    __device__ __forceinline__ void release(uint32_t bar) const { mbar_arrive_warp(bar); }

    // The state before any key: empty, or that of the row's centroid tail (0, -inf, 0 if nothing
    // stands in).
    __device__ __forceinline__ void first_state(const tile_info &t)
    {
        const float floor = a.floor / a.from_log2;
        soft.init(floor, 0.0f);
#pragma unroll
        for (int i = 0; i < NO; ++i) o[i] = 0.0f;
        if (!FULL || !a.state_o || t.q0 >= a.Nq) return;
        const int64_t row = (int64_t)t.bh * a.nq + t.q0 / (ROWS * a.split);
        const float l = a.state_l[row];
        soft.init(fmaxf(a.state_m[row], floor), lane % 4 == 0 ? l : 0.0f);
        if constexpr (ONES)
            for (int i = D / 2; i < NO; ++i) o[i] = l;
        const float2 *const from = (const float2 *)(a.state_o + row * D) + lane % 4;
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const float2 x = from[4 * c];
            o[4 * c] = o[4 * c + 2] = x.x, o[4 * c + 1] = o[4 * c + 3] = x.y;
        }
    }

    // Clears the values of columns that do not exist. Each warpgroup does it for itself, so neither
    // waits for the other.
    __device__ __forceinline__ void clear_values(const uint32_t *bits, ring_pos v) const
    {
        mbar_wait(sm.full(v.stage), v.phase);
        const int row = 32 * warp + lane;
        if (!(bits[warp] >> lane & 1)) {
            const uint32_t at = sm.stage(v.stage) + row * 128;
            for (int c = 0; c < D / 64; ++c)
                // The first unit of a row differs from its neighbours': no bank conflicts.
                for (int unit = 0; unit < 8; ++unit)
                    store_shared(at + c * plan::CHUNK_BYTES + (unit + row) % 8 * 16,
                                 make_uint4(0, 0, 0, 0));
        }
        proxy_fence();
        named_sync(1 + plan::shape::TEAM_CONSUMERS * team + wg, 128);
    }

    // Applies the note of key stage k (of the NOTES that can occur) to s, which holds N / 32 halves
    // of it from `half` on. v: where its values are or will be. Returns the bias of its logits, in
    // units of log2.
    template <uint32_t NOTES, int N>
    __device__ __forceinline__ float heed(float (&s)[N], uint32_t flags, uint32_t k, int half,
                                          ring_pos v) const
    {
        const stage_note &note = sm.notes[k];
        float bias = 0.0f;
        if (NOTES & flags & NOTE_MEANS) {
            bias = note.bias;
            if (note.last >= 0) shorten_last(s, note, half, lane);
        }
        if (NOTES & flags & NOTE_COLUMNS) hide_columns(s, note, half, lane);
        if (NOTES & flags & NOTE_DIAGONAL)
            hide_future(s, note, half, 64 * wg + 16 * warp + lane / 4, lane);
        if (half == 0 && (NOTES & flags & NOTE_VALUES)) clear_values(note.bits, v);
        __syncwarp(); // one lane returns the note for the whole warp
        return bias;
    }
};

// Processes tile after tile. C is a team_member with keys(tile, scale_log2).
template <class T, int D, bool ONES, class C> DEV void consume(C &c)
{
    const float scale_log2 = c.a.scale * 1.44269504f;
    uint32_t q_phase = 0;
    for (;;) {
        mbar_wait(c.sm.q_full(), q_phase);
        q_phase ^= 1;
        const tile_info t = *c.sm.info;
        if (t.n < 0) return;
        c.first_state(t);
        if (t.n > 0) {
            c.keys(t, scale_log2);
        } else {
            __syncwarp(); // all lanes have read the tile
            c.release(c.sm.q_empty());
            c.carry.load(c.a, t);
        }
        float m[2], sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m[r] = c.soft.ref[r] * c.a.from_log2;
            sum[r] = ONES ? c.o[C::NO - 4 + 2 * r] : quad_sum(c.soft.l[r]);
        }
        store_tile<T, D, !ONES>(c.a, t, reinterpret_cast<const float(&)[D / 2]>(c.o), sum, m,
                                c.carry);
    }
}

} // namespace sm90
