// biased.cuh - what the kernels of attention with biases share (biased.cu, biased_few.cu).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/nn_args.h"
#include "cuda/runtime/sm80_ptx.cuh"
#include "cuda/runtime/views.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

struct biased_job {
    const bf16 *q, *k, *v;
    bf16 *o;
    int64_t ldq, ldk, ldv, ldo;
    int Nq, Nk, D, chunks;
    int share;    // heads of q for each head of k and v
    bool vectors; // all rows and heads can be read and written in pieces of 16 bytes
    float scale;  // in log2 units
    const float *key, *distance;
    int64_t distance_ld, center;
    // The norm of the queries, in biased_few.cu alone: a factor for each row and a weight for each
    // column; null: none.
    const float *factor, *weight;
};

// biased_few.cu: at most 64 keys, heads of 64 or 128 channels, biases of keys alone.
bool biased_few_takes(const biased_job &job);
esa_status biased_few_run(esa_cuda_device *dev, const biased_job &job, int64_t heads,
                          cudaStream_t stream);

// biased_norm.cu: factor[rows] of a BF16 q.
esa_status biased_factors(esa_cuda_device *dev, const esa_view &q, float eps, float *factor,
                          cudaStream_t stream);
