// sm90_8bit.cuh - the consumer of the 8-bit Hopper kernel: INT8 logits, E4M3 probabilities.
// SPDX-License-Identifier: Apache-2.0
//
// docs/precision.md has the arithmetic, and lab/sm90_8bit/notes.md tells how the kernel was made.
// It differs from the 16-bit kernel in these points:
//
//   - A stage of keys has one scale, and so has a row of q. Logits are integers times both.
//   - Values come transposed and in the order of slots (quantise.cuh), so P needs no shuffles.
//   - Hopper keeps about 14 bits when it adds 8-bit products. So P V adds up in a second
//     accumulator t, for SUM_STAGES stages; then o takes t in f32, and t starts again from 0. When
//     a maximum grows, t is scaled at once, and o when it takes t the next time.
//   - A thread compares the logits of its own columns with the maximum so far. The warp exchanges
//     maxima only if a thread saw a larger one.
//   - The stage of values ends with rows of ones. So the product also gives the sums of the rounded
//     P, which is faster than 64 additions per thread (v2 and v3 in the notes).
//   - Q stays in shared memory, because t needs the registers.
//   - Integers become floats when they are added to the bits of 1.5 * 2^23. This is exact, because
//     |S| <= 127 * 127 * D < 2^22.
//
// D is 128. At D = 64 the exponentials take most of the time, so 8 bits do not pay there (the notes
// have numbers).
#pragma once

#include "cuda/attention/sm90_8bit_gather.cuh"
#include "cuda/attention/sm90_8bit_ptx.cuh"
#include "cuda/attention/sm90_attn_produce.cuh"
#include "cuda/attention/sm90_attn_team.cuh"

namespace sm90
{

constexpr int SUM_STAGES = 8;

template <class T, int D, bool FULL, bool CARRY> struct consumer8 {
    static constexpr int NO = D / 2 + 4; // elements of o: D columns and eight of sums
    using plan = smem_plan<D, 8>;
    using ring_pos = typename plan::ring;

    using kernel_args_t = typename args_of<CARRY>::type;
    const kernel_args_t &a;
    const smem_view<D, 8> &sm;
    const int wg, warp, lane;
    ring_pos ring;
    float o[NO], t[NO]; // the sum so far; that of the last stages
    int s[64];          // logits of the current stage
    float x[64];        // then P
    uint32_t p[16];     // P of the stage in flight, as A fragments
    float m[2];         // maxima so far, in units of log2
    bool grew;          // whether a maximum of the warp grew in the current stage; warp-uniform
    float alpha[2];     // if so: the factors for what came before
    float beta[2];      // factors for o when it takes t: all alphas since the last time
    int left;           // stages until it does
    carry_rows<T, D, TILE_Q, CARRY> carry;

    __device__ __forceinline__ consumer8(const kernel_args_t &a, const smem_view<D, 8> &sm,
                                         int warp, int lane)
        : a(a), sm(sm), wg(warp / 4), warp(warp % 4), lane(lane)
    {
    }
    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }

    // S = Q K^T, asynchronous.
    __device__ __forceinline__ void issue_qk(uint32_t stage)
    {
        const uint64_t q = wgmma_desc(sm.q() + wg * 64 * D, 16, 1024),
                       k = wgmma_desc(sm.stage(stage), 16, 1024);
        wgmma_s8<false>(s, q, k);
#pragma unroll
        for (int i = 1; i < D / 32; ++i) wgmma_s8<true>(s, q + 2 * i, k + 2 * i);
        wgmma_commit();
    }
    // t += P V, asynchronous.
    __device__ __forceinline__ void issue_pv(uint32_t stage)
    {
        const uint64_t v = wgmma_desc(sm.stage(stage), 16, 1024);
#pragma unroll
        for (int i = 0; i < STAGE_KEYS / 32; ++i) wgmma_e4m3(t, p + 4 * i, v + 2 * i);
        wgmma_commit();
    }

    // Computes the new maxima from those of this thread's columns.
    __device__ __forceinline__ void follow(float (&top)[2])
    {
        grew = __any_sync(~0u, top[0] > m[0] || top[1] > m[1]);
        if (!grew) return;
        quad_max(top);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], m[r]); // NaN is left out
            alpha[r] = exp2_approx(m[r] - top[r]);
            m[r] = top[r];
        }
    }
    // Computes P of a stage whose keys have one scale. fq: the scales of the two rows of q, times
    // the scale of the logits and log2(e).
    __device__ __forceinline__ void softmax(const float (&fq)[2], float scale)
    {
        const float f[2] = { fq[0] * scale, fq[1] * scale };
        int y[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
        for (int i = 4; i < 64; ++i) y[i % 4] = max(y[i % 4], s[i]);
        float top[2] = { (float)max(y[0], y[1]) * f[0], (float)max(y[2], y[3]) * f[1] };
        follow(top);
        const float c[2] = { EIGHT_TOP_LOG2 - m[0] - EIGHT_WHOLE * f[0],
                             EIGHT_TOP_LOG2 - m[1] - EIGHT_WHOLE * f[1] };
#pragma unroll
        for (int i = 0; i < 64; ++i)
            x[i] = exp2_approx(
                fmaf(__int_as_float(s[i] + EIGHT_WHOLE_BITS), f[i / 2 % 2], c[i / 2 % 2]));
    }
    // The same for a stage in which every column has its own scale and bias.
    __device__ __forceinline__ void softmax_columns(const float2 *column, const float (&fq)[2])
    {
        float top[2] = { -INFINITY, -INFINITY };
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const float2 c = column[8 * (i / 4) + 2 * (lane % 4) + i % 2];
            x[i] = fmaf(__int_as_float(s[i] + EIGHT_WHOLE_BITS) - EIGHT_WHOLE, fq[i / 2 % 2] * c.x,
                        c.y);
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], x[i]);
        }
        follow(top);
#pragma unroll
        for (int i = 0; i < 64; ++i) x[i] = exp2_approx(x[i] + (EIGHT_TOP_LOG2 - m[i / 2 % 2]));
        __syncwarp(); // lane 0 returns the note for the whole warp
    }
    __device__ __forceinline__ void pack()
    {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            // Rows g and g + 8 of 16 slots, then of the next 16.
            const int c = 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (i % 2);
            p[i] = pack_e4m3(x[c], x[c + 1], x[c + 4], x[c + 5]);
        }
    }
    __device__ __forceinline__ void take_sums()
    {
#pragma unroll
        for (int i = 0; i < NO; ++i) o[i] = fmaf(o[i], beta[i / 2 % 2], t[i]), t[i] = 0.0f;
    }
    // Before P, whose maxima may be new, is multiplied.
    __device__ __forceinline__ void merge()
    {
        if (--left == 0) {
            take_sums();
            left = SUM_STAGES;
            beta[0] = beta[1] = 1.0f;
        }
        if (!grew) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) beta[r] *= alpha[r];
#pragma unroll
        for (int i = 0; i < NO; ++i) t[i] *= alpha[i / 2 % 2];
    }

    // The first stage, with nothing else in flight.
    __device__ __forceinline__ void first(const float (&fq)[2], const tile_info &tile)
    {
        const ring_pos k = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        const stage_note8 &note = sm.notes[k.stage];
        wgmma_pin(s);
        wgmma_fence();
        issue_qk(k.stage);
        carry.prefetch(a, tile);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (note.flags)
            softmax_columns(note.column, fq);
        else
            softmax(fq, note.scale);
        release(sm.empty(k.stage));
        pack();
        grew = false; // there is nothing yet to follow
    }
    // A later stage: Q K^T of this stage and P V of the previous one, which runs during the softmax
    // of this stage.
    template <bool COLUMNS> __device__ __forceinline__ void next(const float (&fq)[2])
    {
        const ring_pos k = ring;
        ring.step();
        const ring_pos v = ring;
        ring.step();
        mbar_wait(sm.full(k.stage), k.phase);
        const float scale = COLUMNS ? 0.0f : sm.notes[k.stage].scale;
        wgmma_pin(s), wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        issue_qk(k.stage);
        merge(); // while the tensor cores work
        mbar_wait(sm.full(v.stage), v.phase);
        wgmma_pin(t);
        wgmma_fence();
        issue_pv(v.stage);
        wgmma_wait<1>();
        wgmma_pin(s);
        if constexpr (COLUMNS) {
            softmax_columns(sm.notes[k.stage].column, fq);
            release(sm.empty(k.stage));
        } else {
            release(sm.empty(k.stage));
            softmax(fq, scale);
        }
        stay_before_wait();
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(t);
        release(sm.empty(v.stage));
        pack();
    }
    // ptxas moves the wait for P V up to the wait for Q K^T, before the softmax, unless there is a
    // branch between them. This branch is never taken, because P is never negative.
    __device__ __forceinline__ void stay_before_wait()
    {
        const int sign = __float_as_int(x[60]) | __float_as_int(x[61]) | __float_as_int(x[62]) |
                         __float_as_int(x[63]);
        asm volatile("{.reg .pred mine, any;\n"
                     "STAY:\n"
                     "setp.eq.s32 mine, %0, 0x80000001;\n"
                     "vote.sync.any.pred any, mine, -1;\n"
                     "@any bra.uni STAY;}" ::"r"(sign)
                     : "memory");
    }
    __device__ __forceinline__ void drain(const tile_info &tile)
    {
        merge();
        mbar_wait(sm.full(ring.stage), ring.phase);
        wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        issue_pv(ring.stage);
        carry.load(a, tile);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(t);
        release(sm.empty(ring.stage));
        ring.step();
        take_sums();
    }

    __device__ __forceinline__ void keys(const tile_info &tile)
    {
        const int64_t rows = (a.Nq + TILE_Q - 1) / TILE_Q * TILE_Q;
        const float *const scale = a.q_scale + tile.bh * rows + tile.q0 + 64 * wg + 16 * warp +
                                   lane / 4;
        const float fq[2] = { scale[0] * a.scale * 1.44269504f, scale[8] * a.scale * 1.44269504f };
        first(fq, tile);
        int j = 1;
        for (const int end = FULL ? max(1, tile.listed) : tile.n; j < end; ++j) next<false>(fq);
        if constexpr (FULL)
            for (; j < tile.n; ++j) next<true>(fq);
        release(sm.q_empty());
        drain(tile);
    }

    // Multiplies o by the scales of the values and adds their centre times the sums; store_tile
    // divides by the sums.
    __device__ __forceinline__ void store(const tile_info &tile)
    {
        const int64_t b = tile.bh / a.Hq, h = tile.bh % a.Hq,
                      head = b * (a.Hq / a.group) + h / a.group;
        const float2 *const scale = (const float2 *)(a.v_scale + head * D) + lane % 4,
                            *const centre = (const float2 *)(a.v_centre + head * D) + lane % 4;
        float out[D / 2], sums[2], top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile.q0 + 64 * wg + 16 * warp + lane / 4 + 8 * r;
            sums[r] = o[NO - 4 + 2 * r];
            top[r] = (m[r] - EIGHT_TOP_LOG2) * a.from_log2;
            if (a.q_centre && row < a.Nq) top[r] += a.q_centre[(int64_t)tile.bh * a.Nq + row];
        }
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const float2 s = scale[4 * c], z = centre[4 * c];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = o[NO - 4 + 2 * r];
                out[4 * c + 2 * r] = fmaf(o[4 * c + 2 * r], s.x, sum * z.x);
                out[4 * c + 2 * r + 1] = fmaf(o[4 * c + 2 * r + 1], s.y, sum * z.y);
            }
        }
        store_tile<T, D, true>(a, tile, out, sums, top, carry);
    }

    __device__ __forceinline__ void run()
    {
        uint32_t q_phase = 0;
        for (;;) {
            mbar_wait(sm.q_full(), q_phase);
            q_phase ^= 1;
            const tile_info tile = *sm.info;
            if (tile.n < 0) return;
            m[0] = m[1] = -1e30f;
            beta[0] = beta[1] = 1.0f;
            left = SUM_STAGES + 1;
#pragma unroll
            for (int i = 0; i < NO; ++i) o[i] = t[i] = 0.0f;
            if (tile.n > 0) {
                keys(tile);
            } else {
                __syncwarp(); // all lanes have read the tile
                release(sm.q_empty());
                carry.load(a, tile);
            }
            store(tile);
        }
    }
};

template <class T, int D, bool FULL, bool CARRY>
__global__ void __launch_bounds__(block_shape<D, 8>::THREADS, 1)
    attn8_kernel(const __grid_constant__ typename args_of<CARRY>::type a,
                 const __grid_constant__ CUtensorMap qm, const __grid_constant__ CUtensorMap km,
                 const __grid_constant__ CUtensorMap vm, const __grid_constant__ CUtensorMap k_mean,
                 const __grid_constant__ CUtensorMap v_mean)
{
    using S = block_shape<D, 8>;
    using plan = smem_plan<D, 8>;
    extern __shared__ __align__(1024) unsigned char raw[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const smem_view<D, 8> sm(raw, 0);
    constexpr int PRODUCER = 4 * S::CONSUMERS;

    if (warp == PRODUCER && lane == 0) sm.template init_barriers<FULL>();
    if (threadIdx.x == 0) tma_prefetch_map(&qm), tma_prefetch_map(&km), tma_prefetch_map(&vm);
    for (int i = threadIdx.x; i < plan::STAGES * plan::ONES_BYTES / 16; i += S::THREADS)
        store_shared(sm.stage(i / (plan::ONES_BYTES / 16)) + plan::TILE_BYTES +
                         i % (plan::ONES_BYTES / 16) * 16,
                     make_uint4(0x38383838, 0x38383838, 0x38383838, 0x38383838));
    proxy_fence();
    __syncthreads();

    if (warp >= PRODUCER) {
        regs_lower<S::PRODUCER_REGS>();
        const tensor_maps maps = { &qm, &km, &vm, &k_mean, &v_mean, nullptr, nullptr };
        if (warp == PRODUCER)
            producer<D, FULL, 8>(a, maps, sm, lane).run(nullptr, 0);
        else if (FULL && a.fine_columns)
            help(sm, warp - PRODUCER - 1, lane,
                 [&](const gather_job &job) { gather8<D>(a, sm, job, lane); });
    } else {
        regs_raise<S::CONSUMER_REGS>();
        consumer8<T, D, FULL, CARRY>(a, sm, warp, lane).run();
    }
}

template <class T, int D, bool FULL, bool CARRY> static cudaError_t launch8(const attn_launch &l)
{
    constexpr int bytes = smem_plan<D, 8>::BLOCK;
    const auto kernel = attn8_kernel<T, D, FULL, CARRY>;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               bytes);
    if (e != cudaSuccess) return e;
    kernel<<<l.blocks, block_shape<D, 8>::THREADS, bytes, l.stream>>>(l.args, l.q, l.k, l.v,
                                                                      l.k_mean, l.v_mean);
    return cudaGetLastError();
}

template <class T> cudaError_t attn8_run(const attn_launch &l)
{
    return l.full ? launch8<T, 128, true, false>(l) : launch8<T, 128, false, false>(l);
}
template <class T> cudaError_t attn8_run_carry(const attn_launch &l)
{
    return l.full ? launch8<T, 128, true, true>(l) : launch8<T, 128, false, true>(l);
}

} // namespace sm90
