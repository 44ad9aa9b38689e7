// quantise.cuh - queries, keys and values in 8 bits, as the 8-bit attention kernels read them.
// SPDX-License-Identifier: Apache-2.0
//
// docs/precision.md has the arithmetic. Keys and values are stored minus a centre of their head.
// The centre of k does not change the softmax; the kernels add the centre of v to their outputs.
// The kernels of sm_90a and sm_89 take values in E4M3; the one of sm_80 takes them in f16.
#pragma once

#include "cuda/runtime/device.cuh"
#include "rules/eight_bit.h"

constexpr int RUN_8BIT = ESA_EIGHT_ROWS; // rows of a thread block that rounds, and keys per stage

// Integers of up to 22 bits become floats when they are added to the bits of this number, 1.5 2^23,
// and a float that is added to it is rounded to the nearest integer, in the lowest bits.
constexpr float EIGHT_WHOLE = 12582912.0f;
constexpr int EIGHT_WHOLE_BITS = 0x4B400000;
constexpr float EIGHT_TOP_LOG2 = 8.8073549f; // log2(448), the largest P

// Tensor cores take P as the A operand of an 8-bit product. There a thread holds other columns than
// in the accumulator of the logits. The values are stored in an order that makes the two agree, so
// that P need not move between threads. Within 16 keys:
//
//   slot  0 1  2 3  4 5   6 7    8 9  10 11  12 13  14 15
//   key   0 1  8 9  2 3  10 11   4 5  12 13   6 7   14 15
__host__ __device__ constexpr int slot_of_key(int key)
{
    return (key & ~15) | (key & 6) << 1 | (key & 8) >> 2 | (key & 1);
}

// Parts of the workspace, which quantise fills. nq and nk are numbers of runs of RUN_8BIT
// positions. A run has `blocks` key blocks, 1 or 2. Rows past the end are copies of the last row;
// keys and values of runs from kv_len on are any finite numbers.
struct quantised {
    int8_t *q, *k;   // [B][H][n * 128][D]
    void *v;         // E4M3 [B][Hkv][nk][D][128 slots], or f16 [B][Hkv][nk * 128][D]
    float *q_scale;  // [B][Hq][nq * 128]; NaN if the row has an element that is not finite
    float *k_scale;  // [B][Hkv][nk * blocks]
    float *v_scale;  // [B][Hkv][D]
    float *v_centre; // [B][Hkv][D] v_middle plus the mean error; the kernels add it to outputs
    float *k_centre; // [B][Hkv][D]
    float *q_centre; // [B][Hq][Nq] product of the query and k_centre; null without an LSE
    // Scratch. v_middle: what was subtracted from v. v_sampled: scales of v that come from the
    // sample. v_over: bits of the largest |v - v_middle| that was too large for them; 0 if none
    // was. again: 1 if a channel of the head has such a value. done: runs of the head that were
    // rounded again. v_error: sums of the errors of the codes of the first and of the second
    // rounding, as whole numbers of ERROR_UNIT times the scale.
    float *partial;        // [B][Hkv][QUANTISE_PARTS][4][D]
    float *v_middle;       // [B][Hkv][D]
    float *v_sampled;      // [B][Hkv][D]
    uint32_t *v_over;      // [B][Hkv][D]
    int32_t *again;        // [B][Hkv]
    int32_t *done;         // [B][Hkv]
    long long *v_error[2]; // [B][Hkv][D]
    // With a tail: means of blocks, with the same scales as their keys and values. E4M3: means of
    // blocks that do not exist are 0; f16: they are not written.
    int8_t *k_mean; // [B][Hkv][nk_pad][D]
    void *v_mean;   // E4M3 [B][Hkv][nk_pad / 128][D][128 slots], or f16 [B][Hkv][nk_pad][D]
    int8_t *k_fine; // [B][Hkv][nk * blocks * fine][D]
    // E4M3 [B][Hkv][nk * blocks][D][fine] in the order of the keys, or f16 as k_fine
    void *v_fine;
    int64_t nq, nk, nk_pad, blocks;
};

enum { QUANTISE_PARTS = 32 };

// Takes room for the parts. value: bytes of a value.
static inline quantised carve_quantised(carve *ws, const esa_attn_args *a, int64_t value)
{
    quantised q = {};
    const int64_t D = a->D, heads = a->B * a->Hkv;
    q.nq = ceil_div(a->Nq, (int64_t)RUN_8BIT), q.nk = ceil_div(a->Nk, (int64_t)RUN_8BIT);
    q.nk_pad = ceil_div(a->nk, (int64_t)RUN_8BIT) * RUN_8BIT;
    q.blocks = RUN_8BIT / a->block_k;
    q.q = ws->take<int8_t>(a->B * a->Hq * q.nq * RUN_8BIT * D);
    q.k = ws->take<int8_t>(heads * q.nk * RUN_8BIT * D);
    q.v = ws->take<char>(heads * q.nk * RUN_8BIT * D * value);
    q.q_scale = ws->take<float>(a->B * a->Hq * q.nq * RUN_8BIT);
    q.k_scale = ws->take<float>(heads * q.nk * q.blocks);
    q.v_scale = ws->take<float>(heads * D);
    q.v_centre = ws->take<float>(heads * D);
    q.k_centre = ws->take<float>(heads * D);
    q.q_centre = ws->take<float>(a->B * a->Hq * a->Nq);
    q.partial = ws->take<float>(heads * QUANTISE_PARTS * 4 * D);
    q.v_middle = ws->take<float>(heads * D);
    q.v_sampled = ws->take<float>(heads * D);
    q.v_over = ws->take<uint32_t>(heads * D);
    q.again = ws->take<int32_t>(heads);
    q.done = ws->take<int32_t>(heads);
    for (long long *&part : q.v_error) part = ws->take<long long>(heads * D);
    if (a->tail == ESA_TAIL_NONE) return q;
    q.k_mean = ws->take<int8_t>(heads * q.nk_pad * D);
    q.v_mean = ws->take<char>(heads * q.nk_pad * D * value);
    if (a->tail != ESA_TAIL_LEVELS) return q;
    q.k_fine = ws->take<int8_t>(heads * q.nk * q.blocks * a->fine * D);
    q.v_fine = ws->take<char>(heads * q.nk * q.blocks * a->fine * D * value);
    return q;
}

// Fill q. a has the views as the caller gave them, and perm_q and perm_k. Enqueue three or four
// launches.
// sm90_quantise.cu: values in E4M3, D 128, blocks of 128 keys
esa_status sm90_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream);
// sm89_quantise.cu: values in E4M3; sm80_quantise.cu: values in f16. Both: D 64 or 128, blocks of
// 64 or 128 keys, fine means of 4 keys or more
esa_status sm89_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream);
esa_status sm80_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream);
