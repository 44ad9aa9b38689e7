// entropy_steps.cuh - the steps of the entropy selector after the score pass, and
// their shared scratch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/selection/select.cuh"

struct score_job;

struct entropy_work {
    double *row_entropy;     // [B][Hq][nq]
    double *entropy, *spare; // [B][Hq]
    int32_t *kept;           // [B][Hq] blocks of each head, k_h
};

// entropy_rows.cu: fills the rows of the window in out f32[B][Hq][nq][nk].
esa_status importance_launch(esa_cuda_device *dev, const score_job &x, float *out, int64_t nq,
                             cudaStream_t stream);
// entropy_budget.cu: entropy f64[B][Hq] or null, quota [B][Hq][nq] or null.
esa_status budget_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                         const float *importance, const entropy_work &w, double *entropy,
                         int32_t *quota, cudaStream_t stream);
