// biased_norm.cu - the factor 1 / sqrt(mean(q^2) + eps) of each row of q, for attention that norms
// its queries (biased_few.cu).
// SPDX-License-Identifier: Apache-2.0
#include "cuda/engine/biased.cuh"
#include "cuda/engine/rows.cuh"

namespace
{

using namespace rows;

template <class T, int LANES, int PIECES, int W>
__global__ void __launch_bounds__(team_threads<LANES>())
    factor_kernel(const __grid_constant__ esa_view q, float eps, float *factor)
{
    __shared__ float room[32];
    const int64_t r = team_row<LANES>();
    if (r >= q.rows) return; // a whole team: a thread block with larger teams has one row
    const int cols = (int)q.cols;
    using part = row<T, LANES, PIECES, W>;
    piece<T, W> raw[PIECES];
    part::fetch(raw, (const T *)q.data + r * q.ld, cols);
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        if (part::column(p) >= cols) continue;
        float x[W];
        unpack(x, raw[p]);
#pragma unroll
        for (int i = 0; i < W; ++i) squares += x[i] * x[i];
    }
    squares = team_fold<LANES, false>(squares, room);
    if (threadIdx.x % LANES == 0) factor[r] = 1.0f / sqrtf(squares / (float)cols + eps);
}

struct factor_launch {
    static constexpr int WIDE_LANES = 128, WIDE_PIECES = 5;
    const esa_view &q;
    float eps, *factor;
    cudaStream_t stream;
    template <class T, int LANES, int PIECES, int W> void run(unsigned blocks) const
    {
        factor_kernel<T, LANES, PIECES, W>
            <<<blocks, team_threads<LANES>(), 0, stream>>>(q, eps, factor);
    }
};

} // namespace

esa_status biased_factors(esa_cuda_device *dev, const esa_view &q, float eps, float *factor,
                          cudaStream_t stream)
{
    const esa_status status = check_rows(dev, q, "a norm of queries");
    if (status) return status;
    const factor_launch launch = { q, eps, factor, stream };
    choose_team<1, __nv_bfloat16>(q.cols, q.rows, wide(q), launch);
    return launch_check(dev, "norm of queries");
}
