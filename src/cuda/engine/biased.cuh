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
};

// biased_few.cu: at most 64 keys, heads of 64 or 128 channels, biases of keys alone.
bool biased_few_takes(const biased_job &job);
esa_status biased_few_run(esa_cuda_device *dev, const biased_job &job, int64_t heads,
                          cudaStream_t stream);
