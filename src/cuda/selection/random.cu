// random.cu - uniformly random blocks, the same as on the CPU; and masks that keep
// every visible block.
// SPDX-License-Identifier: Apache-2.0
#include "base/rng.h"
#include "cuda/selection/pick.cuh"

namespace
{

// The state of the generator is a counter, so the number of a block needs no draws before it.
struct random_values {
    uint64_t seed;
    int32_t branch;
    __device__ __forceinline__ float operator()(int64_t row, int j) const
    {
        esa_rng r = esa_rng_ahead(esa_rng_of_row(seed, branch, row), (uint64_t)j);
        return esa_rng_unit(&r);
    }
};

__global__ void __launch_bounds__(PICK_WARPS * 32) full_kernel(const __grid_constant__ pick_args x)
{
    const int64_t row = (int64_t)blockIdx.x * PICK_WARPS + threadIdx.x / 32;
    if (row >= x.rows) return;
    const int visible = x.rules.visible[row / (x.Hq * x.nq) * x.nq + row % x.nq];
    for (int j = threadIdx.x % 32; j < visible; j += 32) x.index[row * x.cap + j] = (uint16_t)j;
    if (threadIdx.x % 32) return;
    x.count[row] = visible;
    atomicAdd(x.kept, (unsigned long long)visible);
}

} // namespace

void random_carve(carve &, const esa_cuda_device *, const esa_select_args *) {}
void full_carve(carve &, const esa_cuda_device *, const esa_select_args *) {}

esa_status random_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                      int32_t *quota, const esa_cuda_mask *mask, carve, cudaStream_t stream)
{
    const pick_job job = { nullptr, quota, 0, a->B * a->Hq * a->nq, false };
    pick_with<random_values, false>(pick_args_of(a, rules, job, mask),
                                    random_values{ a->params.seed, a->params.branch }, stream);
    return launch_check(dev, "picking random blocks");
}

esa_status full_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                    int32_t *, const esa_cuda_mask *mask, carve, cudaStream_t stream)
{
    const pick_job job = { nullptr, nullptr, 0, a->B * a->Hq * a->nq, false };
    full_kernel<<<(unsigned)ceil_div<int64_t>(job.rows, PICK_WARPS), PICK_WARPS * 32, 0, stream>>>(
        pick_args_of(a, rules, job, mask));
    return launch_check(dev, "listing all blocks");
}
