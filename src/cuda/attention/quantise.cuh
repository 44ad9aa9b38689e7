// quantise.cuh - queries, keys and values in 8 bits, as the 8-bit attention kernels read them.
// SPDX-License-Identifier: Apache-2.0
//
// docs/precision.md has the arithmetic. Keys and values are stored minus a centre of their head.
// The centre of k does not change the softmax; the kernels add the centre of v to their results.
// The kernel of sm_90a takes values in E4M3; the one of sm_80 takes them in f16.
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
// positions. A run has `blocks` key blocks, 1 or 2. Positions past the end, and keys from kv_len
// on, are 0.
struct quantised {
    int8_t *q, *k;   // [B][H][n * 128][D]
    void *v;         // E4M3 [B][Hkv][nk][D][128 slots], or f16 [B][Hkv][nk * 128][D]
    float *q_scale;  // [B][Hq][nq * 128]; NaN if the row has an element that is not finite
    float *k_scale;  // [B][Hkv][nk * blocks]
    float *v_scale;  // [B][Hkv][D]
    float *v_centre; // [B][Hkv][D]
    float *k_centre; // [B][Hkv][D]
    float *q_centre; // [B][Hq][Nq] product of the query and k_centre; null without an LSE
    float *partial;  // [B][Hkv][QUANTISE_PARTS][4][D] scratch
    // With a tail: means of blocks, with the same scales as their keys and values. E4M3: means of
    // blocks that do not exist are 0; f16: they are not written.
    int8_t *k_mean; // [B][Hkv][nk_pad][D]
    void *v_mean;   // E4M3 [B][Hkv][nk_pad / 128][D][128 slots], or f16 [B][Hkv][nk_pad][D]
    int8_t *k_fine; // [B][Hkv][nk * blocks * fine][D]
    void *v_fine;   // E4M3 [B][Hkv][nk][D][fine] in the order of the keys, or f16 as k_fine
    int64_t nq, nk, nk_pad, blocks;
};

enum { QUANTISE_PARTS = 64 };

// Fill q. a has the views as the caller gave them, and perm_q and perm_k. Enqueue three launches.
// sm90_quantise.cu: values in E4M3, D 128, blocks of 128 keys
esa_status quantise_e4m3(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream);
// sm80_quantise.cu: values in f16, D 64 or 128, blocks of 64 or 128 keys, fine means of 4 keys or
// more
esa_status quantise_f16(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                        cudaStream_t stream);
