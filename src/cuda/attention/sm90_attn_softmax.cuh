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

// The largest of this thread's columns, for both rows.
template <int N> DEV void own_max(float (&out)[2], const float (&s)[N])
{
    float x[4] = { s[0], s[1], s[2], s[3] };
#pragma unroll
    for (int i = 4; i < N; ++i) x[i % 4] = fmaxf(x[i % 4], s[i]);
    out[0] = fmaxf(x[0], x[1]), out[1] = fmaxf(x[2], x[3]);
}
DEV void quad_max(float (&x)[2])
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 1));
        x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], 2));
    }
}

DEV float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// P = exp2(x - ref), where x is a logit in units of log2 and ref the reference of its row. All P
// are below 2. References stay until some P of the warp would reach 2. Then every row whose largest
// P exceeds 2^-HEAD raises its reference so that this P becomes 2^-HEAD, and O is rescaled.
//
// There are two ways to find out. look compares the maxima with the references before P is
// computed. That takes one instruction per logit. Without it, reached_two looks at one bit of every
// P afterwards, which takes a quarter of an instruction, and catch_up repairs the stage if a P is
// too large. That takes longer than look, so it pays where references rise rarely: after the first
// LOOK_STAGES of a tile. With two teams and ONES it is after the first half stage; without ONES
// they always look.
//
// A P keeps its relative error at any reference, because it has an exponent. But P of a dominant
// key is exactly a power of two only if its row raised the reference for it, so late references
// cost some accuracy. lab/sm90/lag.py computes how much.
//
// ONES: P V also multiplies eight columns of ones, so the last elements of O are the sums of the
// rounded P. That saves an addition per logit, and most of the rounding of a dominant P cancels. So
// HEAD may be large, and references hardly ever rise. This is for bf16, because the smallest f16 is
// 2^-24, and for calls without LSE, because such sums are not exact enough for it. Without ONES a
// thread adds its P in f32.
//
// TIGHT (two teams, half a stage at a time): without ONES there are no registers for a branch in
// look. Then references follow every maximum.
template <bool ONES, bool TIGHT> struct softmax_rows {
    static constexpr bool BRANCH = ONES || !TIGHT;
    static constexpr int HEAD = ONES ? 40 : BRANCH ? 2 : 0;
    static constexpr int HOLD = 12; // logits from one wait to the next, see weigh
    static constexpr int LOOK_STAGES = ONES ? 1 : BRANCH ? 64 : INT32_MAX;
    // References, the same in a quad. Never below kernel_args.floor, in units of log2.
    float ref[2];
    float l[2];     // without ONES: this thread's part of the row sums
    float sum[2];   // the same of the current stage
    float alpha[2]; // factor for O after the block in flight
    bool rescale;   // warp-uniform; false: alpha is 1

    __device__ __forceinline__ void init(float ref0, float l0)
    {
        ref[0] = ref[1] = ref0, l[0] = l[1] = l0;
    }

    // Raises references where the logits in s ask for it; sets rescale and alpha. BIAS: there may
    // be a value to add to every logit, in units of log2.
    template <bool BIAS, int N>
    __device__ __forceinline__ void look(const float (&s)[N], float scale_log2, float bias)
    {
        float x[2];
        own_max(x, s);
        x[0] = fmaf(x[0], scale_log2, BIAS ? bias : 0.0f);
        x[1] = fmaf(x[1], scale_log2, BIAS ? bias : 0.0f);
        rescale = true;
        // The assembler moves the wait for PV up as far as it can, but not past a branch. With one,
        // the maximum overlaps PV.
        if (BRANCH) rescale = __any_sync(~0u, x[0] - ref[0] >= 1.0f || x[1] - ref[1] >= 1.0f);
        if (!rescale) return;
        quad_max(x);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = fmaxf(x[r] + HEAD, ref[r]);
            alpha[r] = exp2_approx(ref[r] - raised);
            ref[r] = raised;
            if (!ONES) l[r] *= alpha[r];
        }
    }
    // The first references of a tile, from the logits in s. There is no O to rescale yet.
    template <int N> __device__ __forceinline__ void begin(const float (&s)[N], float scale_log2)
    {
        float x[2];
        own_max(x, s);
        quad_max(x);
#pragma unroll
        for (int r = 0; r < 2; ++r) ref[r] = fmaxf(x[r] * scale_log2 + HEAD, ref[r]);
    }
    // Turns s into P, with the references as they are. -inf gives 0 (the reference is finite). NaN
    // and +inf give NaN in their own row: maxima skip NaN, and inf - inf is NaN.
    //
    // ONES: left alone, the assembler computes the arguments of all exponentials before it begins
    // with the fourth one. The special-function unit, which limits the kernel, has little to do in
    // the meantime. So every HOLD logits 0 times an earlier P is added to c. That changes nothing,
    // but the next arguments must wait for that P. Two teams begin at logit 8, others at HOLD;
    // other places were slower (docs/lab/speed.md). An infinite P makes the later P of its row
    // NaN. That does no harm: after a look no P is infinite, and without one catch_up computes the
    // stage again.
    template <bool BIAS, int N>
    __device__ __forceinline__ void weigh(float (&s)[N], float scale_log2, float bias)
    {
        float c[2] = { BIAS ? bias - ref[0] : -ref[0], BIAS ? bias - ref[1] : -ref[1] };
        const float zero = scale_log2 - scale_log2;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (ONES && i && i % HOLD == (TIGHT ? 8 : 0)) {
                const int from = max(0, i - HOLD);
                c[0] = fmaf(zero, s[from], c[0]), c[1] = fmaf(zero, s[from + 2], c[1]);
            }
            s[i] = exp2_approx(fmaf(s[i], scale_log2, c[i / 2 % 2]));
            if (!ONES) sum[i / 2 % 2] += s[i];
        }
    }
    __device__ __forceinline__ void add_sums()
    {
        if (!ONES) l[0] += sum[0], l[1] += sum[1];
    }

    // look and weigh.
    template <bool BIAS, int N>
    __device__ __forceinline__ void next(float (&s)[N], float scale_log2, float bias)
    {
        look<BIAS>(s, scale_log2, bias);
        weigh<BIAS>(s, scale_log2, bias);
        add_sums();
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

    // Whether some P of the warp is 2 or more, or NaN: then the highest bit of the exponent is set,
    // in bf16 and in f16. p: P packed.
    template <int N> static __device__ __forceinline__ bool reached_two(const uint32_t (&p)[N])
    {
        uint32_t any[2] = { p[0], p[1] };
#pragma unroll
        for (int i = 2; i < N; i += 2) any[i / 2 % 2] |= p[i] | p[i + 1];
        return __any_sync(~0u, (any[0] | any[1]) & 0x40004000u);
    }
    // Raises references after weigh, whose P are in s. O has all stages before this one. again(s):
    // computes the logits again for a huge P: one of infinity does not tell by how much to raise.
    template <class Again, int N, int NO>
    __device__ __forceinline__ void catch_up(float (&s)[N], float (&o)[NO], float scale_log2,
                                             const Again &again)
    {
        float x[2];
        own_max(x, s);
        quad_max(x);
        if (__any_sync(~0u, x[0] > 0x1p60f || x[1] > 0x1p60f)) { // alpha could be 0
            again(s);
            look<false>(s, scale_log2, 0.0f);
            weigh<false>(s, scale_log2, 0.0f);
            rescale_rows(o);
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = ref[r] + fmaxf(__log2f(x[r]) + HEAD, 0.0f);
            alpha[r] = exp2_approx(ref[r] - raised);
            ref[r] = raised;
            if (!ONES) l[r] *= alpha[r], sum[r] *= alpha[r];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] *= alpha[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < NO; ++i) o[i] *= alpha[i / 2 % 2];
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
