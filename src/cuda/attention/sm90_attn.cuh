// sm90_attn.cuh - the Hopper attention kernel: its parameters, how a multiprocessor is divided, and
// its shared memory.
// SPDX-License-Identifier: Apache-2.0
//
// A tile is 128 query rows of one head. Large dense calls at D = 64 that are not causal have wide
// tiles of 192 rows. A team of two or three consumer warpgroups (64 query rows each) and a producer
// warp takes one tile after the other. K and V come through a ring of equal stages of 128 keys x D.
// A list block of 64 keys is half a stage, and a pooled tail adds stages of 128 block means. A tail
// of levels also adds stages of 128 fine means, which helper warps gather. The order of the ring is
// the order in which the consumers need it:
//
//   D = 128, 8 bit, wide tiles   K0 K1 V0 K2 V1 ... K(n-1) V(n-2) V(n-1)
//   D = 64                       K0 V0 K1 V1 ...
//
// Lists are walked from the last entry to the first. Blocks cut by kv_len or causality then come
// first, and the rest is whole. If a stage is not simply 128 visible keys, the producer leaves a
// note beside it.
//
// Each kernel has two variants. The plain one knows kv_len but neither causality nor tails, so only
// the first stage of a tile can have a note. FULL also reads notes at the second stage (causal) and
// after the list (means). The main loop reads none in either. Calls in bf16 at D = 64 without LSE
// have variants of their own (ONES in softmax_rows).
//
// Files: sm90_attn_produce.cuh (lists, tails, copies), sm90_attn_gather.cuh (helper warps),
// sm90_attn_softmax.cuh (logits to probabilities), sm90_attn_team.cuh (shared by both consumers),
// sm90_attn_again.cuh (logits of one warp, for a rare case), sm90_attn_whole.cuh and
// sm90_attn_halves.cuh (main loops), sm90_attn_kernel.cuh (the kernel and its launch),
// sm90_attn_bf16.cu and sm90_attn_f16.cu (instantiations), sm90.cu (accepted jobs, tensor maps).
//
// The 8-bit kernel shares the producer and the store. Its queries, keys and values come from
// sm90_quantise.cu. sm90_8bit.cuh has what is different.
#pragma once

#include "cuda/attention/attention.cuh"
#include "cuda/runtime/sm90_ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace sm90
{

constexpr int TILE_Q = 128;     // query rows per tile: two wgmma M of 64
constexpr int WIDE_TILE = 192;  // the same of wide tiles
constexpr int STAGE_KEYS = 128; // keys or means per ring stage
constexpr int SLIVER = 16;      // columns that justify a softmax of their own
constexpr int TURN_BARRIER = 8; // named barriers of warpgroups that take turns: 8, 9, 10

struct kernel_args {
    const int32_t *count;  // [mask_B][Hq][nq] or null: dense
    const uint16_t *index; // [mask_B][Hq][nq][cap], ascending
    const int32_t *order;  // [B][Hq][nq] rows of each head, heaviest first; null: in order
    const int32_t *kv_len; // [B] or null
    // Position -> token of o and lse, or null. The order of (b,h) starts at b * scatter_stride[0] +
    // h * scatter_stride[1].
    const int32_t *scatter;
    int64_t scatter_stride[2];
    int32_t *next; // tile counter, 0 at launch
    void *o;
    float *lse;                         // or null
    int64_t o_stride[3], lse_stride[3]; // B, H, N
    int32_t Hq, group;                  // group: query heads per kv head
    int32_t Nq, Nk, nq, nk;             // nq, nk: blocks; dense: tiles and stages
    int32_t Bk, Bk_log2;
    int32_t cap, mask_batch;
    int32_t split;     // tiles per query block: Bq / 128; dense: 1
    int32_t tiles;     // B * Hq * nq * split
    int32_t o_vectors; // rows of o are aligned to 16 bytes and may be stored in pieces
    float scale;
    // Start value of row references, as an unscaled logit. It stays finite when scaled, so -inf
    // scores never meet -inf references.
    float floor;
    // FULL
    int32_t causal, shift;                    // query i sees key j if j <= i + shift
    const uint32_t *stands;                   // [B][Hq][nq][32-bit words]; null: no pooled tail
    int32_t mean_stages;                      // nk_pad / 128
    int32_t fine_log2;                        // fine means per block
    const int32_t *fine_columns;              // [B][Hq][nq]; null: no fine level
    const uint16_t *fine_index;               // [mask_B][Hq][nq][cap], ascending
    const float *state_o, *state_m, *state_l; // [B][Hq][nq] x [D], [], []; null: no centroid tail
    float from_log2; // 1 / (scale log2(e)): logits in log2 units to unscaled ones
    // 8 bit, as in attention_job
    const float *q_scale, *k_scale, *v_scale, *v_centre, *q_centre;
    const uint8_t *k_fine, *v_fine;
};

// 8 bit: the scales of the keys of kv head h of batch entry b.
static __device__ __forceinline__ const float *key_scales(const kernel_args &a, int b, int h)
{
    return a.k_scale + ((int64_t)b * (a.Hq / a.group) + h) * a.nk;
}

// The parameter of kernels with a carry. Those without keep kernel_args, and so their code.
struct carried_args : kernel_args {
    esa_carry_args carry;
};

struct attn_launch { // filled by sm90.cu
    carried_args args;
    CUtensorMap q, k, v, k_mean, v_mean, k_fine, v_fine;
    int32_t D, blocks;
    bool full, wide; // wide: tiles of WIDE_TILE rows
    cudaStream_t stream;
};
struct tensor_maps { // those of attn_launch, as the kernel's parameters
    const CUtensorMap *q, *k, *v, *k_mean, *v_mean, *k_fine, *v_fine;
};
// T: bf16, f16. The calls of _carry are those with a carry.
template <class T> cudaError_t attn_run(const attn_launch &l);
template <class T> cudaError_t attn8_run(const attn_launch &l);
template <class T> cudaError_t attn_run_carry(const attn_launch &l);
template <class T> cudaError_t attn8_run_carry(const attn_launch &l);

// How a multiprocessor is divided. The producers of all teams share one warpgroup, whose registers
// go to the consumers. Its other warps are the helpers. setmaxnreg moves registers within what the
// launch allocated; asking for more hangs.
//
// D = 128: O, S and P in registers leave room for one tile at a time. D = 64: with 64 keys per
// step, S and P take half the registers, and two tiles at a time give four consumers that hide each
// other's waits. There is one wide tile at a time, and its three consumers share K and V.
//
// BITS: of the elements in shared memory. With 8, P takes half the registers, and there is a second
// accumulator.
// ROWS: of a tile.
template <int D, int BITS = 16, int ROWS = TILE_Q> struct block_shape {
    static constexpr bool WIDE = ROWS == WIDE_TILE;
    static constexpr int TEAMS = D == 128 || BITS == 8 || WIDE ? 1 : 2;
    static constexpr int TEAM_CONSUMERS = ROWS / 64; // warpgroups
    static constexpr int CONSUMERS = TEAMS * TEAM_CONSUMERS;
    static constexpr int HELPERS = 4 / TEAMS - 1; // per team
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int LAUNCH_REGS = 65536 / THREADS / 8 * 8;
    static constexpr int CONSUMER_REGS = BITS == 8 ? 240 : D == 128 ? 232 : WIDE ? 160 : 112;
    static constexpr int PRODUCER_REGS = LAUNCH_REGS * (CONSUMERS + 1) - CONSUMERS * CONSUMER_REGS;
    static_assert(PRODUCER_REGS >= 24 && PRODUCER_REGS % 8 == 0, "what setmaxnreg takes");
};

// What the producer tells the consumers about a tile.
struct tile_info {
    int32_t n;      // stages; 0: no visible key, -1: no more tiles
    int32_t listed; // the first `listed` stages come from the list, the others hold means
    int32_t bh, q0; // batch * Hq + head, first query row
};

// What the producer stores for itself about a tile. Its few registers hold only what changes from
// stage to stage.
struct tile_facts {
    int32_t row; // row of the tail arrays: batch, query head, query block
    int32_t mask_row;
    int32_t h, b;     // kv head, batch entry
    int32_t hidden;   // causal: the last key that the first row sees
    uint32_t q_phase; // parity of q_empty
    // The current 32 stages of means, and which of them are still to come.
    int32_t mean_base;
    uint32_t mean_left;
    int32_t fine;   // columns of fine means
    int32_t tail;   // stages of fine means and of means
    uint32_t asked; // stages that helpers were asked for, in all tiles
    // Both teams use that of team 0: 1 + the team that takes the last tiles; 0: not decided yet.
    int32_t last_team;
};

// A stage that a helper fills with fine means.
struct gather_job {
    int32_t values;   // 0: keys
    int32_t b, h;     // batch entry, kv head
    int32_t mask_row; // of the fine list
    int32_t first;    // column of the row's fine means that comes first
    int32_t columns;  // from there to the end of the row; more than a stage may hold
    int32_t stage;    // of the ring; -1: no more jobs
    int32_t unused;
};

// What is special about a stage of keys. 0: nothing.
enum : uint32_t {
    NOTE_COLUMNS = 1, // columns whose bit is 0 do not exist
    // their values may be NaN: clear them, because 0 * NaN is NaN
    NOTE_VALUES = 2,
    NOTE_DIAGONAL = 4, // causality hides some keys from some rows
    NOTE_MEANS = 8,    // means: the logit gets the logarithm of the number of tokens
    NOTE_SHORT = 16,   // no column of the upper half exists
    NOTE_SLIVER = 32,  // only the first SLIVER columns exist
};
// The notes that can occur at each place.
constexpr uint32_t NOTES_CUT = NOTE_COLUMNS | NOTE_VALUES, NOTES_MEANS = NOTES_CUT | NOTE_MEANS,
                   NOTES_ALL = NOTES_MEANS | NOTE_DIAGONAL;
// A tile of 128 rows meets the diagonal within 128 keys, which are in the two highest
// stages it sees.
constexpr int DIAGONAL_STAGES = 2;
struct stage_note {
    uint32_t bits[4]; // one per column of the stage
    uint32_t flags;
    // Diagonal: first key of each half, minus the last key that the first row of the tile sees.
    int32_t key[2];
    // Means: what their logits get, in units of log2; the column of a last mean of fewer tokens
    // than the others, or -1; and how much less that one gets, unscaled.
    float bias;
    int32_t last;
    float last_less;
    int32_t unused[2];
};

// The same for 8 bit.
struct stage_note8 {
    float scale;    // of the keys
    uint32_t flags; // NOTE_COLUMNS: every column has its own scale and bias, as below
    uint32_t unused[2];
    // Scale, and what the logit in log2 units gets: -inf if the column does not exist.
    float2 column[STAGE_KEYS];
};
template <int BITS> struct note_of {
    using type = stage_note;
};
template <> struct note_of<8> {
    using type = stage_note8;
};

template <int STAGES> struct ring_at {
    uint32_t stage = 0, phase = 0;
    __device__ __forceinline__ void step()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void back()
    {
        if (stage-- == 0) stage = STAGES - 1, phase ^= 1;
    }
};

template <int D, int BITS = 16, int ROWS = TILE_Q> struct smem_plan {
    using shape = block_shape<D, BITS, ROWS>;
    // 16 bit: with Q the stages fill 224 KB at D = 128, twice 112 KB at D = 64, and 216 KB with
    // wide tiles.
    static constexpr int STAGES = BITS == 8 ? 11 : shape::WIDE ? 12 : 6;
    using note = typename note_of<BITS>::type;
    using ring = ring_at<STAGES>;
    // Q, K and V tiles are alike: swizzled chunks of 128 bytes of each row. K and V have 128 rows.
    static constexpr int TILE_BYTES = 128 * D * BITS / 8, Q_BYTES = ROWS * D * BITS / 8;
    static constexpr int CHUNK_BYTES = 128 * 128;
    // 8 bit: each stage ends with 8 rows of ones, so that P V also gives the sums of P.
    static constexpr int ONES_BYTES = BITS == 8 ? 8 * 128 : 0;
    static constexpr int STAGE_BYTES = TILE_BYTES + ONES_BYTES;
    static constexpr int RING = Q_BYTES;
    // What the copies of a team write: Q and the ring. It comes first, because swizzled tiles begin
    // at multiples of 1024 bytes.
    static constexpr int TILES = RING + STAGES * STAGE_BYTES;
    // 16 bit, D = 64: ones for all teams, which P V multiplies as if they were eight more columns
    // of V (softmax_rows). 16 keys of 128 bytes.
    static constexpr int ONES_COLUMNS = D == 64 && BITS == 16 ? 16 * 128 : 0;
    // The rest of a team, in a place of its own.
    static constexpr int NOTES = 0;
    // full[STAGES], empty[STAGES], q_full, q_empty
    static constexpr int BARS = NOTES + STAGES * (int)sizeof(note);
    static constexpr int INFO = BARS + 8 * (2 * STAGES + 2);
    static constexpr int FACTS = INFO + (int)sizeof(tile_info);
    static constexpr int DESKS = (FACTS + (int)sizeof(tile_facts) + 15) & ~15;
    static constexpr int HELPERS = shape::HELPERS;
    // ready[HELPERS], free[HELPERS]
    static constexpr int DESK_BARS = DESKS + HELPERS * (int)sizeof(gather_job);
    static constexpr int REST = (DESK_BARS + 8 * (2 * HELPERS) + 15) & ~15;
    static constexpr int BLOCK = shape::TEAMS * (TILES + REST) + ONES_COLUMNS;
    static_assert(BLOCK <= 227 * 1024, "more shared memory than a block may have");
};

template <int D, int BITS = 16, int ROWS = TILE_Q> struct smem_view {
    using plan = smem_plan<D, BITS, ROWS>;
    static constexpr int STAGES = plan::STAGES;
    uint32_t tiles, rest, ones;
    typename plan::note *notes; // [STAGES]; those of value stages are unused
    tile_info *info;
    volatile tile_facts *facts; // volatile: read at each use, not kept in registers
    gather_job *desks;          // [HELPERS]
    // raw: aligned to 1024 bytes.
    __device__ __forceinline__ smem_view(unsigned char *raw, int team)
    {
        constexpr int TEAMS = plan::shape::TEAMS;
        const int offset = TEAMS * plan::TILES + plan::ONES_COLUMNS + team * plan::REST;
        tiles = smem_addr(raw) + team * plan::TILES;
        ones = smem_addr(raw) + TEAMS * plan::TILES;
        rest = smem_addr(raw) + offset;
        notes = (typename plan::note *)(raw + offset + plan::NOTES);
        info = (tile_info *)(raw + offset + plan::INFO);
        facts = (tile_facts *)(raw + offset + plan::FACTS);
        desks = (gather_job *)(raw + offset + plan::DESKS);
    }
    __device__ __forceinline__ uint32_t q() const { return tiles; }
    __device__ __forceinline__ uint32_t stage(uint32_t s) const
    {
        return tiles + plan::RING + s * plan::STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t full(uint32_t s) const { return rest + plan::BARS + 8 * s; }
    __device__ __forceinline__ uint32_t empty(uint32_t s) const
    {
        return rest + plan::BARS + 8 * (STAGES + s);
    }
    __device__ __forceinline__ uint32_t q_full() const
    {
        return rest + plan::BARS + 8 * (2 * STAGES);
    }
    __device__ __forceinline__ uint32_t q_empty() const
    {
        return rest + plan::BARS + 8 * (2 * STAGES + 1);
    }
    // A job lies on the helper's desk; the helper has read it.
    __device__ __forceinline__ uint32_t desk_ready(uint32_t helper) const
    {
        return rest + plan::DESK_BARS + 8 * helper;
    }
    __device__ __forceinline__ uint32_t desk_free(uint32_t helper) const
    {
        return rest + plan::DESK_BARS + 8 * (plan::HELPERS + helper);
    }

    template <bool FULL> __device__ __forceinline__ void init_barriers() const
    {
        for (int s = 0; s < STAGES; ++s) {
            mbar_init(full(s), 1);
            mbar_init(empty(s), plan::shape::TEAM_CONSUMERS * 4); // one arrival per consumer warp
        }
        mbar_init(q_full(), 1);
        mbar_init(q_empty(), plan::shape::TEAM_CONSUMERS * 4);
        for (int i = 0; FULL && i < plan::HELPERS; ++i) {
            mbar_init(desk_ready(i), 1);
            mbar_init(desk_free(i), 1);
        }
        mbar_init_fence();
    }
};

} // namespace sm90
