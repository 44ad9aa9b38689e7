// SPDX-License-Identifier: Apache-2.0
//
// What every version shares: kernel parameters, shared-memory plan, softmax on a wgmma accumulator,
// the producer, the store.
//
// Work: a tile is 128 query rows of one head. A team of two consumer warpgroups (64 query rows
// each) and a producer warp takes tiles one after the other. K and V tiles (128 keys x D) go
// through one ring of equal stages in the order in which the consumers need them: K0 K1 V0 K2 V1
// ... K(n-1) V(n-2) V(n-1), or K0 V0 K1 V1 ... when they work in half stages.
//
// Lists are walked from the last entry to the first: the only block that can be cut off by the end
// of the sequence is then the first one processed, before the pipelined loop, and the loop needs no
// masking.
#pragma once

#include "softmax.cuh"

constexpr int TILE_Q = 128;       // query rows per tile: two wgmma M of 64
constexpr int TILE_K = 128;       // keys per ring stage; a 64-wide list block is half a stage
constexpr int TEAM_CONSUMERS = 2; // warpgroups

// named barriers BAR_TURN + consumer: that consumer may issue; 0 is __syncthreads
enum { BAR_TURN = 1 };

struct kernel_args {
    const int32_t *count;  // [B,H,nq] or null: dense
    const uint16_t *index; // [B,H,nq,cap]
    const int32_t *order;  // [B*H*nq] rows of each head, heaviest first; null: as they come
    int32_t *next;         // tile counter, 0 at launch
    void *o;               // [B,H,Nq,D] through o_stride
    float *lse;            // [B,H,Nq] or null
    int64_t o_stride[3];   // B, H, N
    int32_t H, Nq, Nk, Bk, cap;
    int32_t nq;    // mask rows per head
    int32_t split; // tiles per mask row: Bq / 128
    int32_t tiles; // B * H * nq * split
    float scale;
};

// What the producer tells the consumers about a tile.
struct tile_info {
    int32_t n;      // stages (128 keys each); 0: empty row, -1: no more tiles
    int32_t valid;  // keys that exist in the first stage processed
    int32_t bh, q0; // batch * H + head, first query row
};

template <int D, int STAGES> struct smem_plan {
    // Q, K and V tiles alike: [D/64][128 rows][64] swizzled
    static constexpr int TILE_BYTES = 128 * D * 2;
    static constexpr int CHUNK_BYTES = 128 * 128; // one [128][64] chunk
    static constexpr int RING = TILE_BYTES;       // after Q
    // full[STAGES], empty[STAGES], q_full, q_empty
    static constexpr int BARS = TILE_BYTES * (1 + STAGES);
    static constexpr int INFO = BARS + 8 * (2 * STAGES + 2);
    static constexpr int TEAM = (INFO + (int)sizeof(tile_info) + 1023) & ~1023;
    // room to align the base to a swizzle atom
    static constexpr int block_bytes(int teams) { return teams * TEAM + 1024; }
};

struct ring_pos {
    uint32_t stage = 0, phase = 0;
    template <int STAGES> __device__ __forceinline__ void step()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

template <int D, int STAGES> struct smem_view {
    using plan = smem_plan<D, STAGES>;
    uint32_t base;
    tile_info *info;
    __device__ __forceinline__ smem_view(unsigned char *raw, int team)
    {
        const uint32_t a = smem_addr(raw);
        base = ((a + 1023) & ~1023u) + team * plan::TEAM;
        info = (tile_info *)(raw + (base - a) + plan::INFO);
    }
    __device__ __forceinline__ uint32_t q() const { return base; }
    __device__ __forceinline__ uint32_t stage(uint32_t s) const
    {
        return base + plan::RING + s * plan::TILE_BYTES;
    }
    __device__ __forceinline__ uint32_t full(uint32_t s) const { return base + plan::BARS + 8 * s; }
    __device__ __forceinline__ uint32_t empty(uint32_t s) const
    {
        return base + plan::BARS + 8 * (STAGES + s);
    }
    __device__ __forceinline__ uint32_t q_full() const
    {
        return base + plan::BARS + 8 * (2 * STAGES);
    }
    __device__ __forceinline__ uint32_t q_empty() const
    {
        return base + plan::BARS + 8 * (2 * STAGES + 1);
    }

    __device__ __forceinline__ void init_barriers() const
    {
        for (int s = 0; s < STAGES; ++s) {
            mbar_init(full(s), 1);
            mbar_init(empty(s), TEAM_CONSUMERS * 4); // one arrival per consumer warp
        }
        mbar_init(q_full(), 1);
        mbar_init(q_empty(), TEAM_CONSUMERS * 4);
        mbar_init_fence();
    }
};

// ---- producer: one whole warp; lane 0 waits and copies, all lanes hold list entries ----

struct list_reader {
    const uint16_t *list; // ascending, of this mask row
    int n;                // entries; nk in the dense case, whose list is null
    int now, ahead;       // this lane's entry of the current and of the next 32

    __device__ __forceinline__ int fetch(int i) const { return i < n ? list[n - 1 - i] : 0; }
    __device__ __forceinline__ void open(const uint16_t *l, int entries, int lane)
    {
        list = l, n = entries;
        if (list) now = fetch(lane), ahead = fetch(32 + lane);
    }
    // i-th entry from the end; called with i = 0, 1, 2, ... by the whole warp. The load is 32
    // entries ahead of its use.
    __device__ __forceinline__ int get(int i, int lane)
    {
        if (!list) return n - 1 - i;
        if (i && (i & 31) == 0) now = ahead, ahead = fetch(i + 32 + lane);
        return __shfl_sync(~0u, now, i & 31);
    }
};

// item: this team's first tile; the first `started` tiles are given out by position, the others by
// the counter.
template <int D, int STAGES, bool HALVES>
DEV void produce(const kernel_args &a, const CUtensorMap *qm, const CUtensorMap *km,
                 const CUtensorMap *vm, const smem_view<D, STAGES> &sm, int item, int started,
                 int lane)
{
    using plan = smem_plan<D, STAGES>;
    ring_pos ring;
    uint32_t q_phase = 1;
    const int per = TILE_K / a.Bk; // list blocks per stage

    auto load = [&](const CUtensorMap *map, const int(&kb)[2], int h, int b) {
        if (lane == 0) {
            mbar_wait(sm.empty(ring.stage), ring.phase ^ 1);
            const uint32_t bar = sm.full(ring.stage), dst = sm.stage(ring.stage);
            mbar_arrive_tx(bar, plan::TILE_BYTES);
            if (per == 1) {
                tma_load(dst, map, bar, kb[0] * TILE_K, 0, h, b, L2_EVICT_LAST);
            } else { // the box is 64 rows of one chunk
                for (int c = 0; c < D / 64; ++c)
                    for (int half = 0; half < 2; ++half)
                        tma_load(dst + c * plan::CHUNK_BYTES + half * (plan::CHUNK_BYTES / 2), map,
                                 bar, kb[half] * 64, c, h, b, L2_EVICT_LAST);
            }
        }
        ring.step<STAGES>();
    };

    while (item < a.tiles) {
        const int row = item / a.split;
        const int bh = row / a.nq;
        const int r = a.order ? a.order[row] : row - bh * a.nq;
        const int h = bh % a.H, b = bh / a.H;
        const int q0 = (r * a.split + item % a.split) * TILE_Q;
        const int listed = a.count ? a.count[(int64_t)bh * a.nq + r] : (a.Nk + a.Bk - 1) / a.Bk;
        const int blocks = q0 < a.Nq ? listed : 0; // a cut mask row may have tiles past the end
        const int n = (blocks + per - 1) / per;

        list_reader list;
        list.open(a.count ? a.index + ((int64_t)bh * a.nq + r) * a.cap : nullptr, blocks, lane);
        int used = 0;
        // The blocks of the next stage, lower one first. An odd list of half stages starts with a
        // stage that holds its last block twice; the second copy is masked by tile_info.valid and
        // only keeps NaN out of 0 * V.
        auto next_stage = [&](int(&kb)[2]) {
            const int hi = list.get(used++, lane);
            if (per == 1) {
                kb[0] = kb[1] = hi;
                return;
            }
            const bool lone = used == 1 && (blocks & 1);
            kb[1] = hi;
            kb[0] = lone ? hi : list.get(used++, lane);
        };

        int k_now[2] = { 0, 0 }, k_next[2] = { 0, 0 }, valid = TILE_K;
        if (n > 0) {
            next_stage(k_now);
            const int last = min(a.Bk, a.Nk - k_now[1] * a.Bk); // keys of the highest listed block
            valid = (per == 2 && !(blocks & 1)) ? a.Bk + last : last;
            load(km, k_now, h, b);
        }
        if (lane == 0) {
            mbar_wait(sm.q_empty(), q_phase);
            *sm.info = tile_info{ n, valid, bh, q0 };
            if (n > 0) {
                mbar_arrive_tx(sm.q_full(), plan::TILE_BYTES);
                tma_load(sm.q(), qm, sm.q_full(), q0, 0, h, b, L2_EVICT_FIRST);
            } else {
                mbar_arrive(sm.q_full());
            }
        }
        q_phase ^= 1;
        for (int j = 1; j < n; ++j) {
            next_stage(k_next);
            if constexpr (HALVES) load(vm, k_now, h, b);
            load(km, k_next, h, b);
            if constexpr (!HALVES) load(vm, k_now, h, b);
            k_now[0] = k_next[0], k_now[1] = k_next[1];
        }
        if (n > 0) load(vm, k_now, h, b);

        if (lane == 0) item = started + atomicAdd(a.next, 1);
        item = __shfl_sync(~0u, item, 0);
    }
    if (lane == 0) {
        mbar_wait(sm.q_empty(), q_phase);
        sm.info->n = -1;
        mbar_arrive(sm.q_full());
    }
}

// ---- consumers: what both kinds end with ----

// Rows come from threadIdx once more rather than from registers that would live through the main
// loop.
template <class T, int D>
DEV void store_tile(const kernel_args &a, const tile_info &t, const float (&o)[D / 2],
                    const float (&l)[2], const float (&m)[2])
{
    const int lane = threadIdx.x % 32;
    const int row = 16 * (threadIdx.x / 32 % (4 * TEAM_CONSUMERS)) + lane / 4;
    const int64_t head = (int64_t)(t.bh / a.H) * a.o_stride[0] +
                         (int64_t)(t.bh % a.H) * a.o_stride[1];
    float *const lse = a.lse ? a.lse + (int64_t)t.bh * a.Nq : nullptr;
    store_rows<T, D>((T *)a.o + head, a.o_stride[2], lse, t.q0 + row, a.Nq, lane, o, l, m, a.scale);
}
