// sm90_attn_produce.cuh - the producer warp: turns lists and tails into stages and copies them.
// SPDX-License-Identifier: Apache-2.0
//
// It is a whole warp: lane 0 waits, writes notes and copies; all lanes hold list entries.
#pragma once

#include "cuda/attention/sm90_attn_gather.cuh"

namespace sm90
{

// Number of entries of an ascending list below bound: a search in 32 places at once, called by the
// whole warp.
DEV int entries_below(const uint16_t *list, int n, int bound, int lane)
{
    int low = 0, high = n;
    while (low < high) {
        const int step = (high - low + 31) / 32, from = low + step * lane;
        const bool below = from < high && list[min(from + step, high) - 1] < bound;
        const int parts = __popc(__ballot_sync(~0u, below));
        low = min(low + step * parts, high);
        high = min(low + step - 1, high);
    }
    return low;
}

// Word w of the bits of the first n of 128 columns.
DEV uint32_t first_columns(int n, int w)
{
    return n >= 32 * w + 32 ? ~0u : n <= 32 * w ? 0u : (1u << (n - 32 * w)) - 1;
}

template <int D, bool FULL, int BITS = 16, int ROWS = TILE_Q> struct producer {
    using plan = smem_plan<D, BITS, ROWS>;
    static constexpr bool VALUES_FOLLOW = plan::shape::TEAMS == 2; // the ring's order
    const kernel_args &a;
    const tensor_maps &map;
    const smem_view<D, BITS, ROWS> &sm;
    const int lane;
    typename plan::ring ring;

    // The current tile, together with sm.facts.
    int blocks;             // listed blocks to visit
    int entry, entry_ahead; // this lane's entry of the current and of the next 32
    float entry_scale;      // 8 bit: the scale of this lane's entry

    enum { MEANS = -1, FINE = -2 }; // signs
    struct stage_source {
        // List block of each half; or the number of a stage of means or of fine means, and a sign.
        int block[2];
        float scale; // 8 bit: of a list block
        __device__ __forceinline__ bool means() const { return FULL && block[1] < 0; }
        __device__ __forceinline__ bool fine() const { return FULL && block[1] == FINE; }
    };

    __device__ __forceinline__ producer(const kernel_args &a, const tensor_maps &map,
                                        const smem_view<D, BITS, ROWS> &sm, int lane)
        : a(a), map(map), sm(sm), lane(lane)
    {
    }

    // The 8-bit kernel has whole stages only.
    __device__ __forceinline__ bool halves() const { return BITS == 16 && a.Bk != STAGE_KEYS; }
    // Number of stages from the list.
    __device__ __forceinline__ int listed() const { return halves() ? (blocks + 1) / 2 : blocks; }
    __device__ __forceinline__ int keys() const
    {
        return a.kv_len ? max(0, min(a.kv_len[sm.facts->b], a.Nk)) : a.Nk;
    }
    __device__ __forceinline__ const uint16_t *list() const
    {
        return a.index + (int64_t)sm.facts->mask_row * a.cap;
    }
    __device__ __forceinline__ const uint16_t *fine_list() const
    {
        return a.fine_index + (int64_t)sm.facts->mask_row * a.cap;
    }
    __device__ __forceinline__ int fine_stages() const
    {
        return (sm.facts->fine + STAGE_KEYS - 1) / STAGE_KEYS;
    }
    // Tokens of the last fine mean, if they are fewer than the others'. The list ascends, so only
    // this one can be cut.
    __device__ __forceinline__ int last_fine() const
    {
        const int last = sm.facts->fine - 1, fine_log2 = a.fine_log2,
                  row = (fine_list()[last >> fine_log2] << fine_log2) +
                        (last & ((1 << fine_log2) - 1));
        return keys() - (row << (a.Bk_log2 - fine_log2));
    }
    __device__ __forceinline__ const uint4 *stands() const
    {
        return (const uint4 *)a.stands + (int64_t)sm.facts->row * a.mean_stages;
    }

    __device__ __forceinline__ int fetch(int i) const
    {
        return i < blocks ? list()[blocks - 1 - i] : 0;
    }
    // The i-th entry from the end. The whole warp calls it with i = 0, 1, 2, ... The load is 32
    // entries ahead of its use.
    __device__ __forceinline__ int get(int i)
    {
        if (BITS == 8 && !a.count && (i & 31) == 0) entry_scale = scale_of(blocks - 1 - i - lane);
        if (!a.count) return blocks - 1 - i;
        if ((i & 31) == 0) {
            entry = i ? entry_ahead : fetch(lane), entry_ahead = fetch(i + 32 + lane);
            if (BITS == 8) entry_scale = scale_of(entry);
        }
        return __shfl_sync(~0u, entry, i & 31);
    }
    __device__ __forceinline__ float scale_of(int block) const
    {
        return block < 0 ? 0.0f : key_scales(a, sm.facts->b, sm.facts->h)[block];
    }

    // Bits of the stages of means from .. from + 31 that hold a mean that stands in.
    __device__ __forceinline__ uint32_t some_means(int from) const
    {
        uint4 w = make_uint4(0, 0, 0, 0);
        if (from + lane < a.mean_stages) w = stands()[from + lane];
        return __ballot_sync(~0u, (w.x | w.y | w.z | w.w) != 0);
    }
    __device__ __forceinline__ int count_means() const
    {
        int total = 0;
        for (int from = 0; from < a.mean_stages; from += 32) total += __popc(some_means(from));
        return total;
    }
    __device__ __forceinline__ int next_means() const
    {
        int base = sm.facts->mean_base;
        uint32_t left = sm.facts->mean_left;
        while (!left) base += 32, left = some_means(base);
        __syncwarp();
        if (lane == 0) sm.facts->mean_base = base, sm.facts->mean_left = left & (left - 1);
        __syncwarp();
        return base + __ffs((int)left) - 1;
    }

    // Called with j = 0, 1, 2, ... An odd list of half stages starts with a stage that holds its
    // last block twice. The second copy does not exist for the logits; it only keeps NaN out of
    // 0 * V. Stages of fine means take longest to fill, so they are spread evenly among the means.
    __device__ __forceinline__ stage_source take(int j)
    {
        stage_source s;
        if (FULL && j >= listed()) {
            const int tail = sm.facts->tail, at = (j - listed()) * fine_stages();
            s.block[1] = at % tail < fine_stages() ? FINE : MEANS;
            s.block[0] = s.fine() ? at / tail : next_means();
        } else if (!halves()) {
            s.block[0] = s.block[1] = get(j);
            if (BITS == 8) s.scale = __shfl_sync(~0u, entry_scale, j & 31);
        } else {
            const int odd = blocks & 1, at = max(0, 2 * j - odd);
            s.block[1] = get(at);
            s.block[0] = odd && j == 0 ? s.block[1] : get(at + 1);
        }
        return s;
    }

    // Notes a stage of means, each for 1 << tokens_log2 tokens. length: those of the last mean,
    // which is in column `last`.
    __device__ __forceinline__ uint32_t note_means(stage_note &note, uint4 bits, int tokens_log2,
                                                   int last, int length) const
    {
        *(uint4 *)note.bits = bits;
        note.bias = (float)tokens_log2;
        note.last = length < 1 << tokens_log2 && last < STAGE_KEYS ? last : -1;
        note.last_less = (tokens_log2 - __log2f((float)length)) * a.from_log2;
        const uint32_t flags = NOTE_MEANS | NOTE_COLUMNS;
        if (bits.z | bits.w) return flags;
        return flags | NOTE_SHORT | (bits.x >> SLIVER | bits.y ? 0 : NOTE_SLIVER);
    }

    // Notes what is special about key stage s; lane 0 only. Only the first stage can be cut by
    // kv_len or the end of the sequence.
    template <bool FIRST>
    __device__ __forceinline__ void write_note(stage_note &note, const stage_source &s) const
    {
        uint32_t flags = 0;
        if (s.fine()) {
            // Columns from this stage on.
            const int columns = sm.facts->fine - s.block[0] * STAGE_KEYS;
            flags = note_means(note,
                               make_uint4(first_columns(columns, 0), first_columns(columns, 1),
                                          first_columns(columns, 2), first_columns(columns, 3)),
                               a.Bk_log2 - a.fine_log2, columns - 1, last_fine());
            if (columns >= STAGE_KEYS) flags &= ~NOTE_COLUMNS;
        } else if (s.means()) {
            const int keys = this->keys(), last = (keys - 1) >> a.Bk_log2;
            // A mean that exists and does not stand in belongs to a listed block or to the fine
            // level. The row meets its values anyway, unless causality hides them.
            flags = note_means(note, stands()[s.block[0]], a.Bk_log2,
                               last / STAGE_KEYS == s.block[0] ? last % STAGE_KEYS : STAGE_KEYS,
                               keys - (last << a.Bk_log2)) |
                    (a.causal ? NOTE_VALUES : 0);
        } else {
            if (FIRST) {
                const int keys = this->keys(), there = min(a.Bk, keys - s.block[1] * a.Bk) +
                                                       (halves() && !(blocks & 1) ? a.Bk : 0);
                if (there < STAGE_KEYS) {
                    // Past Nk the copy wrote zeros.
                    flags = NOTE_COLUMNS | (keys < a.Nk ? NOTE_VALUES : 0) |
                            (there <= 64 ? NOTE_SHORT : 0);
                    for (int w = 0; w < 4; ++w) note.bits[w] = first_columns(there, w);
                }
            }
            if (FULL && a.causal) {
                const int hidden = sm.facts->hidden;
                if ((s.block[1] + 1) * a.Bk - 1 > hidden) flags |= NOTE_DIAGONAL;
                note.key[0] = s.block[0] * a.Bk - hidden;
                note.key[1] = (halves() ? s.block[1] * a.Bk : s.block[0] * a.Bk + 64) - hidden;
            }
        }
        if (FULL || FIRST) note.flags = flags;
    }

    // The same for 8 bit, by the whole warp.
    template <bool FIRST>
    __device__ __forceinline__ void write_note8(stage_note8 &note, const stage_source &s) const
    {
        const int keys = this->keys(), there = min(STAGE_KEYS, keys - s.block[0] * STAGE_KEYS);
        const bool means = s.means(), columns = means || (FIRST && there < STAGE_KEYS);
        if (columns) {
            __syncwarp(); // the stage is empty
            uint32_t bits = first_columns(there, lane / 8);
            if (means) bits = ((const uint32_t *)(stands() + s.block[0]))[lane / 8];
#pragma unroll 1
            for (int c = 4 * lane; c < 4 * lane + 4; ++c) {
                const int j = s.block[0] * STAGE_KEYS + c; // the block that a mean stands in for
                float2 column = make_float2(0.0f, -INFINITY);
                if (bits >> (c & 31) & 1) {
                    column.x = means ? scale_of(j) : s.scale;
                    column.y = means ? __log2f((float)min(STAGE_KEYS, keys - j * STAGE_KEYS)) : 0;
                }
                note.column[c] = column;
            }
            __syncwarp();
        }
        if (lane == 0) {
            if (!columns) note.scale = s.scale;
            if (FULL || FIRST) note.flags = columns ? NOTE_COLUMNS : 0;
        }
    }

    // Fills the next stage of the ring, or has a helper fill it; lane 0 only.
    __device__ __forceinline__ void fill(const CUtensorMap *from, const CUtensorMap *from_means,
                                         bool values, const stage_source &s) const
    {
        if constexpr (FULL) {
            if (s.fine()) {
                gather_queue<D, BITS>::ask(sm, values, s.block[0], ring.stage);
                return;
            }
        }
        const uint32_t bar = sm.full(ring.stage), dst = sm.stage(ring.stage);
        const int h = sm.facts->h, b = sm.facts->b;
        mbar_arrive_tx(bar, plan::TILE_BYTES);
        if (s.means()) {
            tma_load(dst, from_means, bar, s.block[0] * STAGE_KEYS, 0, h, b, L2_EVICT_LAST);
        } else if (!halves()) {
            tma_load(dst, from, bar, s.block[0] * STAGE_KEYS, 0, h, b, L2_EVICT_LAST);
        } else { // the box is 64 rows of one chunk
            for (int c = 0; c < D / 64; ++c)
                for (int half = 0; half < 2; ++half)
                    tma_load(dst + c * plan::CHUNK_BYTES + half * (plan::CHUNK_BYTES / 2), from,
                             bar, s.block[half] * 64, c, h, b, L2_EVICT_LAST);
        }
    }
    template <bool FIRST> __device__ __forceinline__ void load_keys(const stage_source &s)
    {
        if constexpr (BITS == 8) {
            if (lane == 0) mbar_wait(sm.empty(ring.stage), ring.phase ^ 1);
            // A helper that gathers keys also writes their note.
            if (!s.fine()) write_note8<FIRST>(sm.notes[ring.stage], s);
            if (lane == 0) fill(map.k, map.k_mean, false, s);
        } else if (lane == 0) {
            mbar_wait(sm.empty(ring.stage), ring.phase ^ 1);
            write_note<FIRST>(sm.notes[ring.stage], s);
            fill(map.k, map.k_mean, false, s);
        }
        ring.step();
    }
    __device__ __forceinline__ void load_values(const stage_source &s)
    {
        if (lane == 0) {
            mbar_wait(sm.empty(ring.stage), ring.phase ^ 1);
            fill(map.v, map.v_mean, true, s);
        }
        ring.step();
    }

    __device__ __forceinline__ void open_tile(const tile_info &t)
    {
        if (lane == 0) {
            mbar_wait(sm.q_empty(), sm.facts->q_phase);
            sm.facts->q_phase ^= 1;
            *sm.info = t;
            if (t.n > 0) {
                mbar_arrive_tx(sm.q_full(), plan::Q_BYTES);
                tma_load(sm.q(), map.q, sm.q_full(), t.q0, 0, t.bh % a.Hq, sm.facts->b,
                         L2_EVICT_FIRST);
            } else {
                mbar_arrive(sm.q_full());
            }
        }
    }

    __device__ __forceinline__ void tile(int item)
    {
        const int turn = item / a.split, bh = turn / a.nq, rank = turn - bh * a.nq;
        const int r = a.order ? a.order[turn] : FULL && a.causal ? a.nq - 1 - rank : rank;
        const int q0 = (r * a.split + item % a.split) * ROWS;
        if (lane == 0) {
            const int b = bh / a.Hq, q_head = bh - b * a.Hq;
            sm.facts->row = bh * a.nq + r;
            sm.facts->mask_row = (b * a.mask_batch + q_head) * a.nq + r;
            sm.facts->h = q_head / a.group;
            sm.facts->b = b;
            sm.facts->hidden = q0 + a.shift;
            sm.facts->mean_base = -32, sm.facts->mean_left = 0;
            sm.facts->fine = FULL && a.fine_columns && q0 < a.Nq ? a.fine_columns[bh * a.nq + r]
                                                                 : 0;
        }
        __syncwarp();
        // Keys that some row of the tile sees. A cut query block may have tiles past the end.
        int seen = keys();
        if (FULL && a.causal) seen = max(0, min(seen, min(q0 + ROWS, a.Nq) + a.shift));
        if (q0 >= a.Nq) seen = 0;
        const int bound = (seen + a.Bk - 1) >> a.Bk_log2;
        blocks = bound;
        if (a.count) {
            blocks = a.count[sm.facts->mask_row];
            if (bound < a.nk) blocks = entries_below(list(), blocks, bound, lane);
        }
        int n = listed();
        if (FULL && a.stands && q0 < a.Nq) {
            const int tail = fine_stages() + count_means();
            if (lane == 0) sm.facts->tail = tail;
            __syncwarp();
            n += tail;
        }
        if (n == 0) {
            open_tile({ 0, 0, bh, q0 });
            return;
        }
        stage_source now = take(0);
        load_keys<true>(now);
        open_tile({ n, listed(), bh, q0 });
        for (int j = 1; j < n; ++j) {
            if (VALUES_FOLLOW) load_values(now);
            const stage_source next = take(j);
            load_keys<false>(next);
            if (!VALUES_FOLLOW) load_values(now);
            now = next;
        }
        load_values(now);
    }

    // The number of the next tile, or a.tiles or more: the team stops. Lane 0 only. A team is
    // nearly twice as fast if the other one rests. So the first team of a multiprocessor that takes
    // one of the last gridDim.x tiles becomes the owner, and the other team stops after its current
    // tile. The owner goes on until the counter is past the end, so no tile is lost. owner:
    // last_team of the facts of team 0.
    __device__ __forceinline__ int next_tile(int32_t *owner, int team) const
    {
        constexpr int TEAMS = plan::shape::TEAMS;
        if (TEAMS == 2 && *(volatile int32_t *)owner == 2 - team) return a.tiles;
        const int item = gridDim.x * TEAMS + atomicAdd(a.next, 1);
        if (TEAMS == 2 && item >= a.tiles - (int)gridDim.x) atomicCAS(owner, 0, 1 + team);
        return item;
    }

    // The first tiles follow from the position, the others come from the counter. owner: as above.
    __device__ __forceinline__ void run(int32_t *owner, int team)
    {
        int item = blockIdx.x + gridDim.x * team;
        if (lane == 0) {
            sm.facts->q_phase = 1; // on a fresh barrier parity 1 passes at once
            if (FULL) sm.facts->asked = 0;
        }
        while (item < a.tiles) {
            tile(item);
            if (lane == 0) item = next_tile(owner, team);
            item = __shfl_sync(~0u, item, 0); // the warp has finished with the facts
        }
        if (lane == 0) {
            mbar_wait(sm.q_empty(), sm.facts->q_phase);
            sm.info->n = -1;
            mbar_arrive(sm.q_full());
            if constexpr (FULL) {
                if (a.fine_columns) gather_queue<D, BITS>::close(sm);
            }
        }
    }
};

} // namespace sm90
