// sm90_attn_softmax.cuh - online softmax on a wgmma accumulator of 64 rows.
// SPDX-License-Identifier: Apache-2.0
//
// A thread of a warpgroup holds rows g = 16 * warp + lane / 4 and g + 8, columns 8c + 2 * (lane %
// 4) + {0, 1}:
//
//   s[4c + 0], s[4c + 1]   row g          s[4c + 2], s[4c + 3]   row g + 8
//
// So the four lanes of a quad share two rows, and s packed to 16 bits is already the A fragment of
// the second product.
#pragma once

#include <math.h>

#include "cuda/attention/sm90_attn.cuh"

namespace sm90
{

// BRANCH: as long as no P of the warp exceeds 2^LAG, the references stay as they are: O is not
// rescaled, and the lanes of a quad do not exchange maxima. The relative error of a P stays the
// same, because P has an exponent. But P of a dominant key is no longer exactly 1, so LAG is small:
// with 2 the error (root mean square) grows by 1 to 8 %, with 8 by up to 27 % (lab/sm90/lag.py).
// The assembler moves the wait for PV up as far as it can, but not past a branch; with one, the
// maximum overlaps PV. The branch needs registers that the 112 of two teams lack.
template <bool BRANCH> struct softmax_rows {
    static constexpr float LAG = 2.0f;
    // Reference of the unscaled logits: their maximum so far, or with BRANCH up to LAG (log2) less.
    // The same in a quad, never below kernel_args.floor.
    float m[2];
    float l[2];     // this thread's part of the row sums
    float alpha[2]; // factor for O after the block in flight
    bool rescale;   // warp-uniform; false: alpha is 1

    __device__ __forceinline__ void init(float m0, float l0) { m[0] = m[1] = m0, l[0] = l[1] = l0; }

    static __device__ __forceinline__ void quad_max(float (&x)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 1));
            x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 2));
        }
    }

    // The largest of this thread's columns.
    template <int N>
    static __device__ __forceinline__ void own_max(float (&out)[2], const float (&s)[N])
    {
        float x[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
        for (int i = 4; i < N; ++i) x[i % 4] = fmaxf(x[i % 4], s[i]);
        out[0] = fmaxf(x[0], x[1]), out[1] = fmaxf(x[2], x[3]);
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

    // Turns s into P; sets rescale and alpha. -inf gives 0 (the maximum is finite). NaN and +inf
    // give NaN in their own row: maxima skip NaN, and inf - inf is NaN. BIAS: there may be a value
    // to add to every logit.
    template <bool BIAS, int N>
    __device__ __forceinline__ void next(float (&s)[N], float scale_log2, float bias)
    {
        float x[2];
        own_max(x, s);
        if constexpr (BIAS) x[0] += bias, x[1] += bias;
        rescale = true;
        if constexpr (BRANCH)
            rescale = __any_sync(~0u, (x[0] - m[0]) * scale_log2 > LAG ||
                                          (x[1] - m[1]) * scale_log2 > LAG);
        if (!BRANCH || rescale) {
            quad_max(x);
            x[0] = fmaxf(x[0], m[0]), x[1] = fmaxf(x[1], m[1]);
            follow(x, scale_log2);
        }
        const float c[2] = { (BIAS ? m[0] - bias : m[0]) * scale_log2,
                             (BIAS ? m[1] - bias : m[1]) * scale_log2 };
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = exp2_approx(fmaf(s[i], scale_log2, -c[i / 2 % 2]));
            l[i / 2 % 2] += s[i];
        }
    }

    // The same if only the first SLIVER columns exist. Often only an eighth of a stage of
    // means is left.
    template <int N>
    __device__ __forceinline__ void next_sliver(float (&s)[N], float scale_log2, float bias)
    {
        constexpr int FEW = SLIVER / 2;
        float few[FEW];
#pragma unroll
        for (int i = 0; i < FEW; ++i) few[i] = s[i];
        next<true>(few, scale_log2, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = i < FEW ? few[i] : 0.0f;
    }

    template <int N> __device__ __forceinline__ void rescale_rows(float (&o)[N]) const
    {
        if (!rescale) return;
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] *= alpha[i / 2 % 2];
    }
};

template <class T, int N> DEV void pack_rows(uint32_t (&p)[N], const float (&s)[2 * N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// ---- what a note asks of the logits; s holds N / 32 halves of a stage, beginning with half ----

template <int N> DEV void hide_columns(float (&s)[N], const stage_note &note, int half, int lane)
{
#pragma unroll
    for (int w = 0; w < N / 16; ++w) {
        const uint32_t bits = note.bits[2 * half + w] >> 2 * (lane % 4);
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (!(bits & 1u << (8 * c + e)))
                    s[16 * w + 4 * c + e] = s[16 * w + 4 * c + 2 + e] = -INFINITY;
    }
}

// row: first row of this thread within the tile.
template <int N>
DEV void hide_future(float (&s)[N], const stage_note &note, int half, int row, int lane)
{
#pragma unroll
    for (int x = 0; x < N / 32; ++x) {
        // The last column that the first row sees.
        const int seen = row - note.key[half + x] - 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (8 * (i / 4) + i % 2 > seen + 8 * (i / 2 % 2)) s[32 * x + i] = -INFINITY;
    }
}

// The one block that is shorter than the others: its logit gets less than their bias.
template <int N> DEV void shorten_last(float (&s)[N], const stage_note &note, int half, int lane)
{
    const int column = note.last - 64 * half - 2 * (lane % 4);
    const float less = note.last_less;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (8 * (i / 4) + i % 2 == column) s[i] -= less;
}

} // namespace sm90
