// quantise.cuh - queries, keys and values in 8 bits, as the 8-bit attention kernel reads them.
// SPDX-License-Identifier: Apache-2.0
//
// docs/precision.md has the arithmetic. Keys and values are stored minus a centre of their head.
// The centre of k does not change the softmax; the kernel adds the centre of v to its result.
#pragma once

#include "cuda/runtime/device.cuh"
#include "rules/eight_bit.h"

constexpr int RUN_8BIT = ESA_EIGHT_ROWS; // positions that share a scale, and keys per stage

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
// positions. Positions past the end, and keys from kv_len on, are 0.
struct quantised {
    int8_t *q, *k;   // [B][H][n * 128][D]
    uint8_t *v;      // E4M3 [B][Hkv][nk][D][128 slots]
    float *q_scale;  // [B][Hq][nq]; NaN if a row of the run has an element that is not finite
    float *k_scale;  // [B][Hkv][nk]
    float *v_scale;  // [B][Hkv][D]
    float *v_centre; // [B][Hkv][D]
    float *k_centre; // [B][Hkv][D]
    float *q_centre; // [B][Hq][Nq] product of the query and k_centre; null without an LSE
    float *partial;  // [B][Hkv][QUANTISE_PARTS][4][D] scratch
    // With a tail: means of blocks, with the same scales as their keys and values. Means of blocks
    // that do not exist are 0.
    int8_t *k_mean;  // [B][Hkv][nk_pad][D]
    uint8_t *v_mean; // [B][Hkv][nk_pad / 128][D][128 slots]
    int8_t *k_fine;  // [B][Hkv][nk * fine][D]
    uint8_t *v_fine; // [B][Hkv][nk][D][fine], in the order of the keys
    int64_t nq, nk, nk_pad;
};

enum { QUANTISE_PARTS = 64 };

// Fills q. a has the views as the caller gave them, and perm_q and perm_k. Enqueues three launches.
esa_status quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                    cudaStream_t stream);
