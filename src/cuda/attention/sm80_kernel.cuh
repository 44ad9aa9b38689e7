// sm80_kernel.cuh - block-sparse flash attention for Ampere and later:
// mma.sync, ldmatrix, cp.async.
// SPDX-License-Identifier: Apache-2.0
//
// One thread block of four warps computes 64 MT query rows of one head. A warp owns 16 MT of them,
// so K and V fragments are used MT times. Steps of 64 keys stream through a ring of STAGES buffers
// of 64 rows, K and V in turn:
//
//     S = Q K^T,  P = exp2(S - m),  O = O alpha + P V
//
// The grid is head-major, so that the keys of a head stay in L2. It is not persistent: thread
// blocks on one multiprocessor hide each other's first loads and last stores. Rare work (cut
// blocks, causality, means, unaligned views) is behind uniform branches.
#pragma once

#include "cuda/attention/sm80_tile.cuh"

struct sm80_params {
    attention_job job;
    float scale_log2, unscale; // scale log2(e), and its inverse
    // Views whose rows can be moved 16 bytes at a time.
    bool q_vectors, k_vectors, v_vectors, o_vectors;
};

template <int DP, int MT, int STAGES> constexpr int sm80_shared_bytes()
{
    return (64 * MT + STAGES * SM80_KEYS) * DP * 2;
}

// K or V of one step: 64 keys of a view, 64 fine means, or 64 means.
template <class T, int DP>
DEV void load_step(uint32_t dst, int step, const T *head, int64_t stride, const void *mean,
                   const void *fine_mean, const attention_job &job, const tile_place &p,
                   bool vectors)
{
    using loader = row_loader<T, DP>;
    const int D = (int)job.a.D;
    if (__builtin_expect(vectors && step >= 0 && step + SM80_KEYS <= p.len, 1))
        return loader::copy_all(dst, head + step * stride, stride, D);
    const int64_t kv = p.b * job.a.Hkv + kv_head(job.a, p);
    if (is_fine(step)) {
        const int first = key_walk<SM80_KEYS>::first_fine(step);
        return loader::copy_fine(dst, (const T *)fine_mean + kv * job.a.nk * job.a.fine * DP,
                                 fine_list(job.a, p), job.a.fine, first,
                                 fine_columns(job, p, first));
    }
    const uint64_t valid = key_walk<SM80_KEYS>::columns(job, p, step);
    if (step >= 0) return loader::load(dst, head + step * stride, stride, valid, D, vectors);
    const int64_t row = kv * job.nk_pad + (int64_t)~step * SM80_KEYS;
    loader::copy_some(dst, (const T *)mean + row * DP, DP, valid, DP);
}

// CARRY: adds or makes a carried difference.
template <class T, int DP, int MT, int STAGES, bool HELD, int BLOCKS, bool CARRY>
__global__ __launch_bounds__(SM80_THREADS,
                             BLOCKS) void sm80_attention(const __grid_constant__ sm80_params params)
{
    static_assert(STAGES >= 2 && STAGES <= 4, "the order of waits below is for rings of 2 to 4");
    constexpr int STAGE_BYTES = SM80_KEYS * DP * 2;
    extern __shared__ __align__(1024) char shared[];
    const attention_job &job = params.job;
    const esa_attn_args &a = job.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale_log2 = params.scale_log2;
    const uint32_t q_tile = smem_addr(shared), ring = q_tile + 64 * MT * DP * 2;
    const tile_place p = place_of<64 * MT>(job, blockIdx.x);
    if (p.rows <= 0) return;
    const T *const k_head = (const T *)a.k + p.b * a.k_stride[0] + kv_head(a, p) * a.k_stride[1];
    const T *const v_head = (const T *)a.v + p.b * a.v_stride[0] + kv_head(a, p) * a.v_stride[1];

    const T *const q = (const T *)a.q + p.b * a.q_stride[0] + p.h * a.q_stride[1] +
                       p.row * a.q_stride[2];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const int exist = p.rows - 64 * m;
        const uint32_t dst = q_tile + m * 64 * DP * 2;
        const T *const src = q + m * 64 * a.q_stride[2];
        if (params.q_vectors && exist >= 64)
            row_loader<T, DP>::copy_all(dst, src, a.q_stride[2], (int)a.D);
        else
            row_loader<T, DP>::load(dst, src, a.q_stride[2], first_bits(exist), (int)a.D,
                                    params.q_vectors);
    }

    if constexpr (CARRY) prefetch_carry<T>(job, p, 64 * MT, SM80_THREADS);

    key_walk<SM80_KEYS> walk(job, p);
    const auto load_k = [&](int slot, int step) {
        if (step != WALK_END)
            load_step<T, DP>(ring + slot * STAGE_BYTES, step, k_head, a.k_stride[2], job.k_mean,
                             job.k_fine, job, p, params.k_vectors);
    };
    const auto load_v = [&](int slot, int step) {
        if (step != WALK_END)
            load_step<T, DP>(ring + slot * STAGE_BYTES, step, v_head, a.v_stride[2], job.v_mean,
                             job.v_fine, job, p, params.v_vectors);
    };
    const auto later = [](int slot, int by) {
        return slot + by >= STAGES ? slot + by - STAGES : slot + by;
    };

    // The current step. Its K is in slot, its V in the next.
    int step = walk.next(job, p), slot = 0;
    load_k(0, step);
    if (STAGES == 3) copy_commit();
    if (STAGES >= 3) load_v(1, step);
    copy_commit();
    // Asked one step early, because lists are in global memory.
    int next = walk.next(job, p);

    warp_rows<DP, MT> rows;
    rows.clear();
    if (a.tail == ESA_TAIL_CENTROID && job.state_o) {
        const int64_t i = row_of(a, p);
        rows.begin_with(job.state_o + i * DP, job.state_m[i], job.state_l[i], params.unscale, lane);
    }
    // Keys the first row of the warp sees.
    const int warp_seen = a.causal ? p.seen + warp * 16 * MT : INT32_MAX / 2;
    // Steps up to here need no mask.
    const int whole = min(p.len, warp_seen) - SM80_KEYS;
    warp_queries<DP, MT, HELD> queries;
    queries.addr = q_tile + warp * 16 * MT * DP * 2 + fragment_by_row<DP>(lane);
    if (HELD && step != WALK_END) {
        copy_wait<STAGES == 3 ? 1 : 0>();
        __syncthreads();
        queries.hold();
    }
    const uint32_t k_lane = ring + fragment_by_column<DP>(lane),
                   v_lane = ring + fragment_by_row<DP>(lane);

    while (step != WALK_END) {
        const int after = walk.next(job, p);
        // Ring of 2: V of this step replaces V of the previous step. Ring of 3: K of the next step
        // does. Ring of 4: both of the next step replace the previous step.
        copy_wait<STAGES == 3 ? 1 : 0>();
        __syncthreads();
        if (STAGES == 2)
            load_v(1, step);
        else
            load_k(later(slot, 2), next);
        if (STAGES == 4) load_v(later(later(slot, 2), 1), next);
        copy_commit();

        float s[MT][8][4];
        scores<T, DP, MT, HELD>(s, queries, k_lane + slot * STAGE_BYTES);
        if (__builtin_expect(step < 0, 0)) {
            const bool fine = is_fine(step);
            const int first = fine ? walk.first_fine(step) : ~step * SM80_KEYS,
                      last = fine ? fine_columns(job, p, 0) - 1 : (p.len - 1) / a.block_k;
            add_mean_bias<MT>(s, (fine ? fine_bias(a, p, 0) : mean_bias(a, p, 0)) * params.unscale,
                              (fine ? fine_bias(a, p, last) : mean_bias(a, p, last)) *
                                  params.unscale,
                              last - first, lane);
            hide_columns<MT>(s, walk.columns(job, p, step), INT32_MAX / 2, lane);
        } else if (__builtin_expect(step > whole, 0)) {
            hide_columns<MT>(s, walk.columns(job, p, step), warp_seen - step, lane);
        }
        rows.follow(s, scale_log2);

        if (STAGES < 4) {
            copy_wait<STAGES == 3 ? 1 : 0>();
            __syncthreads();
            if (STAGES == 2)
                load_k(0, next);
            else
                load_v(slot, next);
            copy_commit();
        }
        rows.template attend<T>(s, v_lane + later(slot, 1) * STAGE_BYTES, scale_log2);
        step = next;
        next = after;
        slot = STAGES == 2 ? 0 : later(slot, 2);
    }
    // A tile without steps: its queries may still be arriving where the rows are staged.
    copy_wait<0>();
    __syncthreads();
    if constexpr (CARRY)
        rows.template store_carried<T>(job, p, q_tile + warp * CARRY_ROWS * DP * 4, warp * 16 * MT,
                                       params.o_vectors, scale_log2, lane);
    else
        rows.template store<T>(job, p, q_tile + warp * 16 * MT * DP * 2, warp * 16 * MT,
                               params.o_vectors, scale_log2, lane);
}
