// whole.cuh - the main loop with 128 keys per turn, in versions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "parts.cuh"

// INT8: logits by INT8, else by E4M3. ONES: sums of P by the tensor cores, else by additions.
// TWO: every stage has its own accumulator. TURNS: the warpgroups take turns; 1: the other one may
// go on once both products are issued, 2: once Q K^T is there. Q_REGS: Q in registers. HOLD: a
// branch keeps the wait for P V behind the softmax. POLY: of 16 exponentials, so many by
// polynomial.
template <int INT8_, int ONES_, int TWO_, int TURNS_, int Q_REGS_, int HOLD_, int POLY_>
struct version {
    static constexpr bool INT8 = INT8_, ONES = ONES_, TWO = TWO_, Q_REGS = Q_REGS_, HOLD = HOLD_;
    static constexpr int TURNS = TURNS_, POLY = POLY_;
};

template <class V> struct consumer {
    static constexpr int N = V::ONES ? NO : 64;
    const args &a;
    const memory_view &mem;
    const int wg, lane;
    ring_pos kr, vr;
    float o[N], t[N], x[64];
    int s[64];
    uint32_t p[16], q[16];
    float m[2], l[2], alpha[2], before[2];

    __device__ __forceinline__ consumer(const args &a, const memory_view &mem, int warp, int lane)
        : a(a), mem(mem), wg(warp / 4), lane(lane)
    {
    }
    __device__ __forceinline__ void release(uint32_t bar) const
    {
        if (lane == 0) mbar_arrive(bar);
    }
    __device__ __forceinline__ void pin_logits()
    {
        if constexpr (V::INT8)
            pin(s);
        else
            wgmma_pin(x);
    }
    __device__ __forceinline__ void pin_sums()
    {
        if constexpr (V::TWO)
            wgmma_pin(t);
        else
            wgmma_pin(o);
        wgmma_pin(p);
    }
    __device__ __forceinline__ void load_q()
    {
        const int row = 64 * wg + 16 * (threadIdx.x / 32 % 4) + lane % 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t unit = (2 * i + lane / 16) ^ (row % 8);
            load_matrices(reinterpret_cast<uint32_t(&)[4]>(q[4 * i]),
                          mem.base + Q_AT + row * 128 + unit * 16);
        }
        __syncwarp();
        release(mem.q_empty());
    }
    template <bool ACC> __device__ __forceinline__ void logits(int i, uint64_t k)
    {
        const uint64_t shared = wgmma_desc(mem.base + Q_AT + wg * 64 * 128, 16, 1024) + 2 * i;
        if constexpr (V::INT8 && V::Q_REGS)
            product_s8<ACC>(s, q + 4 * i, k + 2 * i);
        else if constexpr (V::INT8)
            product_s8<ACC>(s, shared, k + 2 * i);
        else if constexpr (V::Q_REGS)
            product_f8<ACC>(x, q + 4 * i, k + 2 * i);
        else
            product_f8<ACC>(x, shared, k + 2 * i);
    }
    __device__ __forceinline__ void issue_qk()
    {
        const uint64_t k = wgmma_desc(mem.k(kr.stage), 16, 1024);
        logits<false>(0, k), logits<true>(1, k), logits<true>(2, k), logits<true>(3, k);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_pv()
    {
        const uint64_t v = wgmma_desc(mem.v(vr.stage), 16, 1024);
        float(&to)[N] = V::TWO ? t : o;
        product_f8<!V::TWO>(to, p, v);
#pragma unroll
        for (int i = 1; i < 4; ++i) product_f8<true>(to, p + 4 * i, v + 2 * i);
        wgmma_commit();
    }

    __device__ __forceinline__ void softmax(float f)
    {
        float top[2];
        if constexpr (V::INT8) {
            int y[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
            for (int i = 4; i < 64; ++i) y[i % 4] = max(y[i % 4], s[i]);
            top[0] = (float)max(y[0], y[1]) * f, top[1] = (float)max(y[2], y[3]) * f;
        } else {
            float y[4] = { x[0], x[1], x[2], x[3] };
#pragma unroll
            for (int i = 4; i < 64; ++i) y[i % 4] = fmaxf(y[i % 4], x[i]);
            top[0] = fmaxf(y[0], y[1]) * f, top[1] = fmaxf(y[2], y[3]) * f;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
            top[r] = fmaxf(top[r], m[r]);
            alpha[r] = exp2_approx(m[r] - top[r]);
            m[r] = top[r];
            if (!V::ONES) l[r] *= alpha[r];
        }
        const float shift = V::INT8 ? MAGIC * f : 0.0f;
        const float c[2] = { LOG2_448 - m[0] - shift, LOG2_448 - m[1] - shift };
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const float logit = V::INT8 ? __int_as_float(s[i] + MAGIC_BITS) : x[i];
            const float z = fmaf(logit, f, c[i / 2 % 2]);
            if (V::POLY && i / 4 % (16 / (V::POLY ? V::POLY : 1)) == 1)
                x[i] = exp2_poly(z);
            else
                x[i] = exp2_approx(z);
            if (!V::ONES) l[i / 2 % 2] += x[i];
        }
    }
    __device__ __forceinline__ void merge()
    {
        if constexpr (V::TWO) {
#pragma unroll
            for (int i = 0; i < N; ++i) o[i] = fmaf(o[i], before[i / 2 % 2], t[i]);
        }
    }
    __device__ __forceinline__ void pack()
    {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int c = 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (i % 2);
            p[i] = pack_e4m3(x[c], x[c + 1], x[c + 4], x[c + 5]);
        }
        if constexpr (V::TWO) {
            before[0] = alpha[0], before[1] = alpha[1];
        } else if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < N; ++i) o[i] *= alpha[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void pass_turn() const
    {
        asm volatile("bar.arrive %0, %1;" ::"r"(2 - wg), "r"(256) : "memory");
    }

    __device__ __forceinline__ void first(float f)
    {
        mbar_wait(mem.k_full(kr.stage), kr.phase);
        pin_logits();
        wgmma_fence();
        issue_qk();
        wgmma_wait<0>();
        pin_logits();
        release(mem.k_empty(kr.stage));
        kr.step();
        softmax(f);
        alpha[0] = alpha[1] = 1.0f;
        pack();
    }
    __device__ __forceinline__ void next(float f)
    {
        if (V::TURNS) named_sync(1 + wg, 256);
        mbar_wait(mem.k_full(kr.stage), kr.phase);
        pin_logits(), pin_sums();
        wgmma_fence();
        issue_qk();
        mbar_wait(mem.v_full(vr.stage), vr.phase);
        wgmma_fence();
        issue_pv();
        if (V::TURNS == 1) pass_turn();
        wgmma_wait<1>();
        pin_logits();
        if (V::TURNS == 2) pass_turn();
        release(mem.k_empty(kr.stage));
        kr.step();
        softmax(f);
        if (V::HOLD)
            hold(__float_as_int(x[60]) | __float_as_int(x[61]) | __float_as_int(x[62]) |
                 __float_as_int(x[63]));
        wgmma_wait<0>();
        pin_sums();
        release(mem.v_empty(vr.stage));
        vr.step();
        merge();
        pack();
    }
    __device__ __forceinline__ void last()
    {
        mbar_wait(mem.v_full(vr.stage), vr.phase);
        pin_sums();
        wgmma_fence();
        issue_pv();
        wgmma_wait<0>();
        pin_sums();
        release(mem.v_empty(vr.stage));
        vr.step();
        merge();
    }
    __device__ __forceinline__ void run()
    {
        int q_phase = 0;
        if (V::TURNS && wg == 1) pass_turn(); // warpgroup 0 begins
        for (;;) {
            mbar_wait(mem.q_full(), q_phase), q_phase ^= 1;
            const int tile = *mem.tile();
            if (tile < 0) return;
            const float fq = a.q_scale[tile] * a.scale_log2;
            const float *const k_scale = a.k_scale + tile / a.nq * a.blocks;
            m[0] = m[1] = -1e30f, l[0] = l[1] = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) o[i] = 0.0f;
            if (V::Q_REGS) load_q();
            first(fq * k_scale[0]);
            for (int j = 1; j < a.nk; ++j) next(fq * k_scale[j]);
            if (!V::Q_REGS) release(mem.q_empty());
            last();
            float sum[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sum[r] = V::ONES ? o[N - 4 + 2 * r] : l[r];
                if (V::ONES) continue;
                sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
                sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            }
            store(a, tile, wg, o, sum, m);
        }
    }
};
