// rare.cuh - the main loop of v8 and v9, which touches o rarely.
// SPDX-License-Identifier: Apache-2.0
//
// A thread compares the largest logit of its own columns with the maximum so far. Only if a thread
// of the warp saw a larger one, the warp shuffles maxima and computes factors. t takes the products
// of several stages; o takes t after FLUSH stages. If a maximum grew, o takes t at once (v8), or t
// is scaled (v9, SCALE).
#pragma once

#include "parts.cuh"

template <int FLUSH, bool SCALE> struct rare_consumer {
    static constexpr int STEPS = D / 32;
    const args &a;
    const memory_view &mem;
    const int wg, lane;
    ring_pos kr, vr;
    float o[NO], t[NO];
    int s[64];
    uint32_t p[16];
    float m[2], alpha[2], beta[2]; // beta: factor of o when it takes t
    bool grew;
    int left; // stages until t goes into o

    __device__ __forceinline__ rare_consumer(const args &a, const memory_view &mem, int warp,
                                             int lane)
        : a(a), mem(mem), wg(warp / 4), lane(lane)
    {
    }
    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }
    __device__ __forceinline__ void issue_qk()
    {
        const uint64_t k = rows_desc(mem.k(kr.stage)), q = rows_desc(mem.base + Q_AT + wg * 64 * D);
        product_s8<false>(s, q, k);
#pragma unroll
        for (int i = 1; i < STEPS; ++i) product_s8<true>(s, q + 2 * i, k + 2 * i);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_pv()
    {
        const uint64_t v = wgmma_desc(mem.v(vr.stage), 16, 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) product_f8<true>(t, p + 4 * i, v + 2 * i);
        wgmma_commit();
    }
    __device__ __forceinline__ void flush()
    {
#pragma unroll
        for (int i = 0; i < NO; ++i) o[i] = fmaf(o[i], beta[i / 2 % 2], t[i]), t[i] = 0.0f;
    }
    // Moves t to o if it is full. If P comes with a new maximum, moves (v8) or scales (v9) t.
    __device__ __forceinline__ void merge()
    {
        if ((!SCALE && grew) || --left == 0) {
            flush();
            left = FLUSH;
            beta[0] = beta[1] = 1.0f;
        }
        if (!grew) return;
        beta[0] *= alpha[0], beta[1] *= alpha[1];
        if constexpr (SCALE) {
#pragma unroll
            for (int i = 0; i < NO; ++i) t[i] *= alpha[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void softmax(float f)
    {
        int y[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
        for (int i = 4; i < 64; ++i) y[i % 4] = max(y[i % 4], s[i]);
        float top[2] = { (float)max(y[0], y[1]) * f, (float)max(y[2], y[3]) * f };
        grew = __any_sync(~0u, top[0] > m[0] || top[1] > m[1]);
        if (grew) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
                top[r] = fmaxf(top[r], m[r]);
                alpha[r] = exp2_approx(m[r] - top[r]);
                m[r] = top[r];
            }
        }
        const float c[2] = { LOG2_448 - m[0] - MAGIC * f, LOG2_448 - m[1] - MAGIC * f };
#pragma unroll
        for (int i = 0; i < 64; ++i)
            s[i] = __float_as_int(
                exp2_approx(fmaf(__int_as_float(s[i] + MAGIC_BITS), f, c[i / 2 % 2])));
    }
    __device__ __forceinline__ void pack()
    {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int at = 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (i % 2);
            p[i] = pack_e4m3(__int_as_float(s[at]), __int_as_float(s[at + 1]),
                             __int_as_float(s[at + 4]), __int_as_float(s[at + 5]));
        }
    }
    __device__ __forceinline__ void next(float f)
    {
        mbar_wait(mem.k_full(kr.stage), kr.phase);
        pin(s), wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        issue_qk();
        merge();
        mbar_wait(mem.v_full(vr.stage), vr.phase);
        wgmma_pin(t);
        wgmma_fence();
        issue_pv();
        wgmma_wait<1>();
        pin(s);
        release(mem.k_empty(kr.stage));
        kr.step();
        softmax(f);
        hold(s[60] | s[61] | s[62] | s[63]);
        wgmma_wait<0>();
        wgmma_pin(t), wgmma_pin(p);
        release(mem.v_empty(vr.stage));
        vr.step();
        pack();
    }
    __device__ __forceinline__ void run()
    {
        int q_phase = 0;
        for (;;) {
            mbar_wait(mem.q_full(), q_phase), q_phase ^= 1;
            const int tile = *mem.tile();
            if (tile < 0) return;
            const float fq =
                a.q_scale[tile / a.nq * a.blocks + (tile % a.nq * TILE + 64 * wg) / 128] *
                a.scale_log2;
            const float *const k_scale = a.k_scale + tile / a.nq * a.blocks;
            m[0] = m[1] = -1e30f, beta[0] = beta[1] = 1.0f;
            left = FLUSH + 1;
#pragma unroll
            for (int i = 0; i < NO; ++i) o[i] = t[i] = 0.0f;
            mbar_wait(mem.k_full(kr.stage), kr.phase);
            pin(s);
            wgmma_fence();
            issue_qk();
            wgmma_wait<0>();
            pin(s);
            release(mem.k_empty(kr.stage));
            kr.step();
            softmax(fq * k_scale[0]);
            pack();
            grew = false; // there is nothing yet to follow
            for (int j = 1; j < a.nk; ++j) next(fq * k_scale[j]);
            release(mem.q_empty());
            merge();
            mbar_wait(mem.v_full(vr.stage), vr.phase);
            wgmma_pin(t), wgmma_pin(p);
            wgmma_fence();
            issue_pv();
            wgmma_wait<0>();
            wgmma_pin(t), wgmma_pin(p);
            release(mem.v_empty(vr.stage));
            vr.step();
            flush();
            const float sum[2] = { o[NO - 4], o[NO - 2] };
            store(a, tile, wg, o, sum, m);
        }
    }
};
