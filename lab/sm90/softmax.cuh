// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on a wgmma accumulator of 64 rows, and the store of the result.
//
// A thread of a warpgroup holds rows g = 16 * warp + lane / 4 and g + 8, columns 8c + 2 * (lane %
// 4) + {0, 1}:
//   s[4c + 0], s[4c + 1]   row g          s[4c + 2], s[4c + 3]   row g + 8
// so the four lanes of a quad share two rows, and s packed to 16 bits is the A fragment of the
// second product as it is.
#pragma once

#include "common.cuh"

// When the running maximum grows, O and the sums so far must be multiplied by alpha.
enum max_rule {
    MAX_EAGER, // multiply after every block
    // skip the multiplication when no row of the warp grew: same bits, fewer instructions
    MAX_EXACT,
    // let the maximum grow by 2^8 before following it: P may exceed 1, which fp32 sums and 16-bit P
    // can hold
    MAX_LAZY,
};

// BRANCH: take the update of the maxima as a branch. The assembler moves the wait for PV up as far
// as it can, and a branch is what it cannot pass: with one, the maximum and its shuffles are done
// under PV. It needs registers that the 112 of two teams lack.
template <max_rule RULE, bool BRANCH> struct softmax_rows {
    float m[2];     // reference maximum, unscaled logits; equal within a quad
    float l[2];     // this thread's part of the row sums
    float alpha[2]; // what O must be multiplied by after the block in flight
    bool rescale;   // warp-uniform; false: alpha is 1

    static __device__ __forceinline__ void quad_max(float (&x)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 1));
            x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 2));
        }
    }

    template <int N>
    static __device__ __forceinline__ void row_max(float (&out)[2], const float (&s)[N])
    {
        float x[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
        for (int i = 4; i < N; ++i) x[i % 4] = fmaxf(x[i % 4], s[i]);
        out[0] = fmaxf(x[0], x[1]), out[1] = fmaxf(x[2], x[3]);
        quad_max(out);
    }

    template <int N> __device__ __forceinline__ void exponentials(float (&s)[N], float scale_log2)
    {
        const float c[2] = { m[0] * scale_log2, m[1] * scale_log2 };
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float x = fmaf(s[i], scale_log2, -c[i / 2 % 2]);
            s[i] = exp2_approx(x);
            l[i / 2 % 2] += s[i];
        }
    }

    // The first block of a row: s becomes P.
    template <int N> __device__ __forceinline__ void first(float (&s)[N], float scale_log2)
    {
        row_max(m, s);
        l[0] = l[1] = 0.0f;
        exponentials(s, scale_log2);
    }

    __device__ __forceinline__ void follow(const float (&x)[2], float scale_log2)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            alpha[r] = exp2_approx((m[r] - x[r]) * scale_log2);
            m[r] = x[r];
            l[r] *= alpha[r];
        }
    }

    // A later block: s becomes P; sets rescale and alpha.
    template <int N> __device__ __forceinline__ void next(float (&s)[N], float scale_log2)
    {
        float x[2];
        row_max(x, s);
        x[0] = fmaxf(x[0], m[0]), x[1] = fmaxf(x[1], m[1]);
        rescale = true;
        if constexpr (RULE == MAX_EXACT) rescale = __any_sync(~0u, x[0] > m[0] || x[1] > m[1]);
        if constexpr (RULE == MAX_LAZY) {
            rescale = __any_sync(~0u, fmaxf(x[0] - m[0], x[1] - m[1]) * scale_log2 > 8.0f);
            if (!BRANCH && !rescale) x[0] = m[0], x[1] = m[1];
        }
        if (!BRANCH || rescale) follow(x, scale_log2);
        exponentials(s, scale_log2);
    }

    template <int N> __device__ __forceinline__ void rescale_rows(float (&o)[N]) const
    {
        if (!rescale) return;
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] *= alpha[i / 2 % 2];
    }
};

// Keys from valid on do not exist.
template <int N> DEV void mask_tail(float (&s)[N], int valid, int lane)
{
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (8 * (i / 4) + 2 * (lane % 4) + i % 2 >= valid) s[i] = -INFINITY;
}

template <class T, int N> DEV void pack_rows(uint32_t (&p)[N], const float (&s)[2 * N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// O / l to global memory, 16 bytes per lane: a 4 x 4 transpose inside each quad turns four pieces
// of 4 bytes into one of 16. row: query row of this thread's first row; o: [Nq, D] of this head. A
// sum of 0 (empty row) stores 0 and LSE -inf.
template <class T, int D>
DEV void store_rows(T *o, int64_t stride, float *lse, int row, int Nq, int lane,
                    const float (&acc)[D / 2], const float (&l)[2], const float (&m)[2],
                    float scale)
{
    const int t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = l[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inv = sum == 0.0f ? 0.0f : 1.0f / sum; // NaN stays NaN
        const int q = row + 8 * r;
        const bool inside = q < Nq;
        if (lse && inside && t == 0) lse[q] = sum == 0.0f ? -INFINITY : m[r] * scale + logf(sum);
        T *const dst = o + q * stride;
#pragma unroll
        for (int c = 0; c < D / 8; c += 4) {
            uint32_t u[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                u[i] = pack2<T>(acc[4 * (c + i) + 2 * r] * inv, acc[4 * (c + i) + 2 * r + 1] * inv);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t got = __shfl_xor_sync(~0u, t & 1 ? u[i] : u[i + 1], 1);
                if (t & 1)
                    u[i] = got;
                else
                    u[i + 1] = got;
            }
            const uint32_t a = __shfl_xor_sync(~0u, t & 2 ? u[0] : u[2], 2);
            const uint32_t b = __shfl_xor_sync(~0u, t & 2 ? u[1] : u[3], 2);
            const uint4 out = t & 2 ? make_uint4(a, b, u[2], u[3]) : make_uint4(u[0], u[1], a, b);
            if (inside) *(uint4 *)(dst + 8 * (c + t)) = out;
        }
    }
}
