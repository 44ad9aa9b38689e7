// halves.cuh - the main loop with 64 keys per turn: Q K^T of one half runs during the softmax of
// the other. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "parts.cuh"

struct half_consumer {
    const args &a;
    const memory_view &mem;
    const int wg, lane;
    ring_pos kr, vr;
    float o[NO], t[NO], x[32];
    int s[2][32];
    uint32_t p[8];
    float m[2], alpha[2], flying[2], landed[2];

    __device__ __forceinline__ half_consumer(const args &a, const memory_view &mem, int warp,
                                             int lane)
        : a(a), mem(mem), wg(warp / 4), lane(lane)
    {
    }
    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }
    template <int HALF> __device__ __forceinline__ void issue_qk()
    {
        const uint64_t q = wgmma_desc(mem.base + Q_AT + wg * 64 * 128, 16, 1024),
                       k = wgmma_desc(mem.k(kr.stage) + HALF * 64 * 128, 16, 1024);
        product_s8<false>(s[HALF], q, k);
#pragma unroll
        for (int i = 1; i < 4; ++i) product_s8<true>(s[HALF], q + 2 * i, k + 2 * i);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_pv(int half)
    {
        const uint64_t v = wgmma_desc(mem.v(vr.stage), 16, 1024) + 4 * half;
        product_f8<false>(t, p, v), product_f8<true>(t, p + 4, v + 2);
        wgmma_commit();
    }
    template <int HALF> __device__ __forceinline__ void softmax(float f)
    {
        int(&z)[32] = s[HALF];
        int y[4] = { z[0], z[1], z[2], z[3] };
#pragma unroll
        for (int i = 4; i < 32; ++i) y[i % 4] = max(y[i % 4], z[i]);
        float top[2] = { (float)max(y[0], y[1]) * f, (float)max(y[2], y[3]) * f };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
            top[r] = fmaxf(top[r], m[r]);
            alpha[r] = exp2_approx(m[r] - top[r]);
            m[r] = top[r];
        }
        const float c[2] = { LOG2_448 - m[0] - MAGIC * f, LOG2_448 - m[1] - MAGIC * f };
#pragma unroll
        for (int i = 0; i < 32; ++i)
            x[i] = exp2_approx(fmaf(__int_as_float(z[i] + MAGIC_BITS), f, c[i / 2 % 2]));
    }
    __device__ __forceinline__ void pack()
    {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (i % 2);
            p[i] = pack_e4m3(x[c], x[c + 1], x[c + 4], x[c + 5]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) landed[r] = flying[r], flying[r] = alpha[r];
    }
    __device__ __forceinline__ void merge()
    {
#pragma unroll
        for (int i = 0; i < NO; ++i) o[i] = fmaf(o[i], landed[i / 2 % 2], t[i]);
    }
    // The logits of the first half are there; the second half of the last stage's P V is due.
    template <bool FIRST> __device__ __forceinline__ void lower(float f)
    {
        pin(s[1]), wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        issue_qk<1>();
        if (!FIRST) {
            merge();
            wgmma_fence();
            issue_pv(1);
        }
        softmax<0>(f);
        wgmma_wait<0>();
        pin(s[1]), wgmma_pin(p), wgmma_pin(t);
        release(mem.k_empty(kr.stage));
        kr.step();
        if (!FIRST) {
            release(mem.v_empty(vr.stage));
            vr.step();
        }
        pack();
    }
    template <bool LAST> __device__ __forceinline__ void upper(float f)
    {
        if (!LAST) mbar_wait(mem.k_full(kr.stage), kr.phase);
        pin(s[0]), wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        if (!LAST) issue_qk<0>();
        merge();
        mbar_wait(mem.v_full(vr.stage), vr.phase);
        wgmma_fence();
        issue_pv(0);
        softmax<1>(f);
        wgmma_wait<0>();
        pin(s[0]), wgmma_pin(p), wgmma_pin(t);
        pack();
    }
    __device__ __forceinline__ void tile(int number)
    {
        const float fq = a.q_scale[number] * a.scale_log2;
        const float *const k_scale = a.k_scale + number / a.nq * a.blocks;
        const int end = a.nk - 1;
        mbar_wait(mem.k_full(kr.stage), kr.phase);
        pin(s[0]);
        wgmma_fence();
        issue_qk<0>();
        wgmma_wait<0>();
        pin(s[0]);
        lower<true>(fq * k_scale[0]);
        if (end > 0) {
            upper<false>(fq * k_scale[0]);
            for (int j = 1; j < end; ++j)
                lower<false>(fq * k_scale[j]), upper<false>(fq * k_scale[j]);
            lower<false>(fq * k_scale[end]);
        }
        upper<true>(fq * k_scale[end]);
        release(mem.q_empty());
        merge();
        wgmma_pin(p), wgmma_pin(t);
        wgmma_fence();
        issue_pv(1);
        wgmma_wait<0>();
        wgmma_pin(p), wgmma_pin(t);
        release(mem.v_empty(vr.stage));
        vr.step();
        landed[0] = flying[0], landed[1] = flying[1];
        merge();
    }
    __device__ __forceinline__ void run()
    {
        int q_phase = 0;
        for (;;) {
            mbar_wait(mem.q_full(), q_phase), q_phase ^= 1;
            const int number = *mem.tile();
            if (number < 0) return;
            m[0] = m[1] = -1e30f, flying[0] = flying[1] = 1.0f;
#pragma unroll
            for (int i = 0; i < NO; ++i) o[i] = t[i] = 0.0f;
            tile(number);
            const float sum[2] = { o[NO - 4], o[NO - 2] };
            store(a, number, wg, o, sum, m);
        }
    }
};
