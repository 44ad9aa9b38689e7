// sm90_attn_again.cuh - the logits of one warp, computed a second time.
// SPDX-License-Identifier: Apache-2.0
//
// A warp that did not look at maxima and got a P above 2^60 needs its logits again (softmax_rows).
// The products of a warpgroup need all of its warps, and the others may not need theirs. So the
// warp multiplies alone, with mma.sync: Q and K are still in shared memory, and the accumulators
// lie as those of wgmma do. This is slow and rare: a logit must exceed all logits of its row in the
// stages before by 59 or more in units of log2, or its row has seen no key before (causal calls).
#pragma once

#include "cuda/runtime/sm80_ptx.cuh"
#include "cuda/runtime/sm90_ptx.cuh"

namespace sm90
{

// s = Q K^T for the 16 rows of q from `row` on and the first 2 N keys of k. Both are swizzled tiles
// in shared memory; q_chunk and k_chunk: bytes from 64 columns to the next 64.
template <class T, int D, int N>
DEV void logits_again(float (&s)[N], uint32_t q, uint32_t q_chunk, int row, uint32_t k,
                      uint32_t k_chunk, int lane)
{
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = 0.0f;
    const int q_row = row + lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll 1
    for (int i = 0; i < D / 16; ++i) { // 16 columns; a 16-byte unit is 8 of them
        const uint32_t unit = 2 * (i % 4);
        uint32_t a[4];
        load_matrices(a, q + i / 4 * q_chunk + q_row * 128 +
                             ((unit + lane / 16) ^ (uint32_t)(q_row % 8)) * 16);
#pragma unroll
        for (int c = 0; c < N / 8; ++c) { // 16 keys
            uint32_t b[4];
            load_matrices(b, k + i / 4 * k_chunk + (16 * c + key) * 128 +
                                 ((unit + lane / 8 % 2) ^ (uint32_t)(key % 8)) * 16);
            multiply_add<T>(reinterpret_cast<float(&)[4]>(s[8 * c]), a, b[0], b[1]);
            multiply_add<T>(reinterpret_cast<float(&)[4]>(s[8 * c + 4]), a, b[2], b[3]);
        }
    }
    __syncwarp(); // one lane returns the stage for the whole warp
}

} // namespace sm90
