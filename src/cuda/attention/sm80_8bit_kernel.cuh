// sm80_8bit_kernel.cuh - block-sparse flash attention in 8 bits for Ampere and later: Q K^T in
// int8, P V in the format of the including file, both by mma.sync; and its launches.
// SPDX-License-Identifier: Apache-2.0
//
// A format of P and V (sm80_8bit.cu: f16, sm89_8bit.cu: E4M3) is a template<int DP> struct with
//
//   value         type of a value; those of a head follow each other
//   BYTES         shared memory for the values of a step
//   NARROW        thread blocks per multiprocessor, if a thread block has 64 rows
//   load(to, step, head, job, place)
//                 copies the values of a step from those of the head, or of its means
//   lane(lane)    where a lane reads its first fragment of a step
//   add(rows, s, from, factor, shift)
//                 rows.o += P V and rows.l += sums of P, for P = exp2(s factor + shift)
//
// The tiles, warps and steps are those of sm80_kernel.cuh. What differs:
//   - Tiles of q and k hold codes, one byte each. K and V of a step are loaded together, one step
//     ahead, so that a step has one barrier.
//   - The sums of codes are in the lowest bits of floats EIGHT_WHOLE + S. The logit in log2 units
//     is (s - EIGHT_WHOLE) f with f = s_q s_k scale log2(e). It is never computed on its own: the
//     exponent is one fma(s, f, c) with c = log2(448) - m - EIGHT_WHOLE f.
//   - A step that is cut, or holds means, is rare and turns its scores into logits first.
//   - Maxima are in log2 units, because every step has its own f.
//
// Positions past the end are 0 in the arrays of codes, so steps of keys are loaded whole.
#pragma once

#include "cuda/attention/sm80_tile.cuh"

static_assert(SM80_KEYS == ESA_EIGHT_STEP, "the reference on the CPU has the same stages");

struct sm80_8bit_params {
    attention_job job;
    float scale_log2;   // scale log2(e)
    int32_t block_log2; // log2 of the keys of a block: 6 or 7
    bool o_vectors;     // rows of o can be moved 16 bytes at a time
};

// K, or V in f16, of one step, in rows of COLUMNS 16-bit elements: 64 keys of a head, 64 fine
// means, or 64 means. Where the means of the head lie is computed here, because that is rare and
// costs no registers in between.
template <class T, int COLUMNS>
DEV void load_codes(uint32_t dst, int step, const T *head, const void *means, const void *fine,
                    const attention_job &job, const tile_place &p)
{
    using loader = row_loader<T, COLUMNS>;
    if (__builtin_expect(step >= 0, 1))
        return loader::copy_all(dst, head + (int64_t)step * COLUMNS, COLUMNS, COLUMNS);
    const int64_t kv = p.b * job.a.Hkv + kv_head(job.a, p);
    if (is_fine(step)) {
        const int first = key_walk<SM80_KEYS>::first_fine(step);
        const int64_t row = kv * job.q8.nk * job.q8.blocks * job.a.fine;
        return loader::copy_fine(dst, (const T *)fine + row * COLUMNS, fine_list(job.a, p),
                                 job.a.fine, first, fine_columns(job, p, first));
    }
    // Means that do not stand in are not read: a NaN among them must not meet a weight of 0.
    const int64_t row = kv * job.q8.nk_pad + (int64_t)~step * SM80_KEYS;
    loader::copy_some(dst, (const T *)means + row * COLUMNS, COLUMNS,
                      key_walk<SM80_KEYS>::columns(job, p, step), COLUMNS);
}

// Turns s = EIGHT_WHOLE + S into logits in log2 units, for a step that is cut or holds means:
// columns have their own scales and biases, and those that do not exist are -inf. scale: those of
// the key blocks of the head. fq: scales of the rows of q, times scale log2(e).
template <int MT>
DEV void to_logits(float (&s)[MT][8][4], const attention_job &job, const tile_place &p, int step,
                   const float *scale, const float (&fq)[MT * 2], int block_log2, int lane)
{
    const esa_attn_args &a = job.a;
    const uint64_t valid = key_walk<SM80_KEYS>::columns(job, p, step) >> lane % 4 * 2;
    const bool fine = is_fine(step);
    const uint16_t *const list = fine ? fine_list(a, p) : nullptr;
    int first = 0, last = -1;
    float whole = 0.0f, short_one = 0.0f; // biases
    if (fine) {
        first = key_walk<SM80_KEYS>::first_fine(step), last = fine_columns(job, p, 0) - 1;
        whole = fine_bias(a, p, 0), short_one = fine_bias(a, p, last);
    } else if (step < 0) {
        first = ~step * SM80_KEYS, last = (p.len - 1) / a.block_k;
        whole = mean_bias(a, p, 0), short_one = mean_bias(a, p, last);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool exists = valid >> (n * 8 + e) & 1;
            const int column = first + n * 8 + lane % 4 * 2 + e;
            float f = 0.0f;
            if (exists)
                f = scale[step >= 0 ? step >> block_log2 : fine ? list[column / a.fine] : column];
            const float bias = column == last ? short_one : whole;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &x = s[m][n][2 * r + e];
                    x = exists ? fmaf(x - EIGHT_WHOLE, fq[2 * m + r] * f, bias) : -INFINITY;
                }
        }
}

// Gives the rows their values back: scales and centres of the channels. Maxima get what the centre
// of the keys took from the logits. Then the rows are as those of 16 bits, with maxima in log2
// units.
template <int DP, int MT>
DEV void to_values(warp_rows<DP, MT> &rows, const attention_job &job, const tile_place &p,
                   int first, float scale_log2, int lane)
{
    const int64_t kv = p.b * job.a.Hkv + kv_head(job.a, p);
    const float2 *const scale = (const float2 *)(job.q8.v_scale + kv * DP) + lane % 4,
                        *const centre = (const float2 *)(job.q8.v_centre + kv * DP) + lane % 4;
    float sum[MT * 2];
#pragma unroll
    for (int r = 0; r < MT * 2; ++r) {
        sum[r] = rows.l[r];
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        rows.l[r] = lane % 4 == 0 ? sum[r] : 0.0f;
        rows.m[r] -= EIGHT_TOP_LOG2;
        const int row = first + r * 8 + lane / 4;
        if (job.q8.q_centre && row < p.rows)
            rows.m[r] += scale_log2 *
                         job.q8.q_centre[((int64_t)p.b * job.a.Hq + p.h) * job.a.Nq + p.row + row];
    }
#pragma unroll
    for (int n = 0; n < DP / 8; ++n) {
        const float2 s = scale[4 * n], z = centre[4 * n];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                rows.o[m][n][e] = fmaf(rows.o[m][n][e], e % 2 ? s.y : s.x,
                                       sum[m * 2 + e / 2] * (e % 2 ? z.y : z.x));
    }
}

// CARRY: adds or makes a carried difference.
template <template <int> class Values, class T, int DP, int MT, bool HELD, int BLOCKS, bool CARRY>
__global__ __launch_bounds__(SM80_THREADS, BLOCKS) void sm80_8bit_attention(
    const __grid_constant__ sm80_8bit_params params)
{
    using values = Values<DP>;
    constexpr int CODES = DP / 2; // 16-bit elements of a row of codes
    constexpr int K_BYTES = SM80_KEYS * DP, STAGE_BYTES = K_BYTES + values::BYTES;
    extern __shared__ __align__(1024) char shared[];
    const attention_job &job = params.job;
    const esa_attn_args &a = job.a;
    const quantised &x = job.q8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t q_tile = smem_addr(shared), ring = q_tile + 64 * MT * DP;
    const tile_place p = place_of<64 * MT>(job, blockIdx.x);
    if (p.rows <= 0) return;
    const int64_t head = (int64_t)p.b * a.Hq + p.h, kv = p.b * a.Hkv + kv_head(a, p);
    const uint16_t *const k_head = (const uint16_t *)x.k + kv * x.nk * RUN_8BIT * CODES;
    const auto *const v_head = (const typename values::value *)x.v + kv * x.nk * RUN_8BIT * DP;
    const float *const k_scale = x.k_scale + kv * x.nk * x.blocks;
    // The scales of this thread's rows, times scale log2(e).
    float fq[MT * 2];
#pragma unroll
    for (int r = 0; r < MT * 2; ++r)
        fq[r] = x.q_scale[head * x.nq * RUN_8BIT + p.row + warp * 16 * MT + r * 8 + lane / 4] *
                params.scale_log2;

    const uint16_t *const q = (const uint16_t *)x.q + (head * x.nq * RUN_8BIT + p.row) * CODES;
#pragma unroll
    for (int m = 0; m < MT; ++m)
        row_loader<uint16_t, CODES>::copy_all(q_tile + m * 64 * DP, q + m * 64 * CODES, CODES,
                                              CODES);

    if constexpr (CARRY) prefetch_carry<T>(job, p, 64 * MT, SM80_THREADS);

    key_walk<SM80_KEYS> walk(job, p);
    const auto load = [&](int slot, int step) {
        if (step == WALK_END) return;
        const uint32_t stage = ring + slot * STAGE_BYTES;
        load_codes<uint16_t, CODES>(stage, step, k_head, x.k_mean, x.k_fine, job, p);
        values::load(stage + K_BYTES, step, v_head, job, p);
    };
    int step = walk.next(job, p), slot = 0;
    load(0, step);
    copy_commit();
    // Asked one step early, because lists are in global memory.
    int next = walk.next(job, p);

    warp_rows<DP, MT> rows;
    rows.clear();
    const int whole = p.len - SM80_KEYS; // steps of keys up to here are not cut
    warp_queries<CODES, MT, HELD> queries;
    queries.addr = q_tile + warp * 16 * MT * DP + fragment_by_row<CODES>(lane);
    if (HELD && step != WALK_END) {
        copy_wait<0>();
        __syncthreads();
        queries.hold();
    }
    const uint32_t k_lane = ring + fragment_by_column<CODES>(lane),
                   v_lane = ring + K_BYTES + values::lane(lane);

    while (step != WALK_END) {
        const int after = walk.next(job, p);
        copy_wait<0>();
        __syncthreads(); // the step has arrived, and the previous one has been read
        load(slot ^ 1, next);
        copy_commit();

        const bool plain = step >= 0 && step <= whole;
        // What turns s into logits: (s - origin) factor.
        float origin = EIGHT_WHOLE, factor[MT * 2];
        const float keys = plain ? k_scale[step >> params.block_log2] : 0.0f;
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) factor[r] = fq[r] * keys;
        float s[MT][8][4];
        scores<int8_t, CODES, MT, HELD>(s, queries, k_lane + slot * STAGE_BYTES);
        if (__builtin_expect(!plain, 0)) {
            to_logits<MT>(s, job, p, step, k_scale, fq, params.block_log2, lane);
            origin = 0.0f;
#pragma unroll
            for (int r = 0; r < MT * 2; ++r) factor[r] = 1.0f;
        }
        float top[MT * 2], shift[MT * 2];
        rows.find_tops(top, s);
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) top[r] = (top[r] - origin) * factor[r];
        rows.raise(top, 1.0f);
#pragma unroll
        for (int r = 0; r < MT * 2; ++r)
            shift[r] = fmaf(-origin, factor[r], EIGHT_TOP_LOG2 - rows.finite(rows.m[r]));
        values::add(rows, s, v_lane + slot * STAGE_BYTES, factor, shift);
        step = next;
        next = after;
        slot ^= 1;
    }
    // All warps have read the last step, and the queries of a tile without steps have arrived: the
    // rows are staged there.
    copy_wait<0>();
    __syncthreads();
    const int first = warp * 16 * MT;
    to_values<DP, MT>(rows, job, p, first, params.scale_log2, lane);
    if constexpr (CARRY)
        rows.template store_carried<T>(job, p, q_tile + warp * CARRY_ROWS * DP * 4, first,
                                       params.o_vectors, 1.0f, lane);
    else
        rows.template store<T>(job, p, q_tile + first * DP * 2, first, params.o_vectors, 1.0f,
                               lane);
}

// ---------------------------------------------------------------- the launches

template <template <int> class Values, class T, int DP, int MT, bool HELD, int BLOCKS>
static esa_status launch_8bit(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const esa_attn_args *a = &job->a;
    // Queries; then two stages of keys and values.
    constexpr int shared = 64 * MT * DP + 2 * (SM80_KEYS * DP + Values<DP>::BYTES);
    static_assert(shared >= 64 * MT * DP * 2, "the result is staged over all of it");
    static_assert(shared >= SM80_WARPS * CARRY_ROWS * DP * 4, "rows in f32 are staged over it");
    const auto kernel = a->carry.value
                            ? sm80_8bit_attention<Values, T, DP, MT, HELD, BLOCKS, true>
                            : sm80_8bit_attention<Values, T, DP, MT, HELD, BLOCKS, false>;
    unsigned tiles = 0;
    esa_status status = count_tiles<64 * MT>(&tiles, dev, a);
    if (status || tiles == 0) return status;
    status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "preparing the 8-bit kernel");
    if (status) return status;
    sm80_8bit_params params;
    params.job = *job;
    params.scale_log2 = (float)(a->scale * 1.4426950408889634);
    params.block_log2 = job->q8.blocks == 2 ? 6 : 7;
    params.o_vectors = rows_in_pieces({ a->o, a->o_stride, { a->B, a->Hq, a->Nq } }, a->D, 2, 16);
    kernel<<<tiles, SM80_THREADS, shared, stream>>>(params);
    return launch_check(dev, "launching the 8-bit kernel");
}

template <template <int> class Values, class T>
static esa_status launch_8bit_for(esa_cuda_device *dev, const attention_job *job,
                                  cudaStream_t stream)
{
    const bool narrow = job->a.count && job->a.block_q == 64;
    if (job->a.D == 128)
        return narrow ? launch_8bit<Values, T, 128, 1, true, Values<128>::NARROW>(dev, job, stream)
                      : launch_8bit<Values, T, 128, 2, false, 2>(dev, job, stream);
    return narrow ? launch_8bit<Values, T, 64, 1, true, Values<64>::NARROW>(dev, job, stream)
                  : launch_8bit<Values, T, 64, 2, false, 3>(dev, job, stream);
}

template <template <int> class Values>
static esa_status launch_8bit_kernel(esa_cuda_device *dev, const attention_job *job,
                                     cudaStream_t stream)
{
    return job->a.dtype == ESA_DTYPE_BF16 ? launch_8bit_for<Values, bf16>(dev, job, stream)
                                          : launch_8bit_for<Values, f16>(dev, job, stream);
}
