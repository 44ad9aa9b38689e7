// pick.cu - picks rows by values in device memory.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/pick.cuh"

namespace
{

struct stored_values {
    const float *value; // [rows][nk]
    int64_t nk;
    __device__ __forceinline__ float operator()(int64_t row, int j) const
    {
        return value[row * nk + j];
    }
};

} // namespace

pick_args pick_args_of(const esa_select_args *a, const select_rules &rules, const pick_job &job,
                       const esa_cuda_mask *mask)
{
    return { rules,
             job.quota,
             mask->count,
             mask->index,
             (unsigned long long *)mask->facts + 1,
             job.row0,
             job.rows,
             a->nq,
             a->Hq,
             a->nk,
             mask->cap,
             job.quota_per_head,
             job.cdf };
}

esa_status pick_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                       const pick_job &job, const esa_cuda_mask *mask, cudaStream_t stream)
{
    const pick_args x = pick_args_of(a, rules, job, mask);
    const stored_values values = { job.value, a->nk };
    if (job.cdf < 1.0)
        pick_with<stored_values, true>(x, values, stream);
    else
        pick_with<stored_values, false>(x, values, stream);
    return launch_check(dev, "picking blocks");
}
