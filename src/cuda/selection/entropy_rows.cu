// entropy_rows.cu - importance from the score pass: turns the statistics of the samples of a query
// block into shares of its key blocks.
// SPDX-License-Identifier: Apache-2.0
//
// mass_j = sum_j exp2(top_j - maximum of the row), share_j = mass_j / all masses, importance = mean
// of the shares over the samples that see any key. Totals and means are in double, as on the CPU.
// Sums over key blocks run along the lanes of one warp, always in the same order.
#include "cuda/selection/entropy.cuh"
#include "cuda/selection/entropy_steps.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

constexpr int THREADS = 128, WARPS = THREADS / 32, MOST_SAMPLES = 256;

__device__ __forceinline__ double mass_of(score_stat s, float high)
{
    // A block without visible keys has sum 0. NaN must stay NaN.
    return s.sum == 0.0f ? 0.0 : (double)(s.sum * exp2f(s.top - high));
}

__device__ __forceinline__ score_stat read(const score_stat *at)
{
    const float2 v = __ldg((const float2 *)at);
    return score_stat{ v.x, v.y };
}

// One thread block per (query head, query block of the window). out: [B][Hq][nq][nk].
__global__ void __launch_bounds__(THREADS)
    importance_kernel(const __grid_constant__ score_job x, float *out, int nq, int blocks)
{
    __shared__ float high[MOST_SAMPLES];
    __shared__ double inverse[MOST_SAMPLES]; // 1 / total
    // Key blocks the sample sees; 0: it does not count.
    __shared__ int ends[MOST_SAMPLES];
    const int i = blockIdx.x % blocks, head = blockIdx.x / blocks, Hq = x.Hkv * x.ratio,
              b = head / Hq, h = head % Hq;
    const int first = i * x.per_block, count = min(x.per_block, x.samples - first),
              lane = threadIdx.x % 32;
    const int len = x.kv_len[b], existing = ceil_div(len, x.block_k);
    const score_stat *const stats = x.stats + (((int64_t)b * x.Hkv + h / x.ratio) * x.rows +
                                               h % x.ratio * x.samples + first) *
                                                  x.pitch;
    float *const line = out + ((int64_t)head * nq + x.block0 + i) * x.nk;

    for (int s = threadIdx.x / 32; s < count; s += WARPS) {
        const int end = ceil_div(keys_seen(x, sample_position(x, first + s), len), x.block_k);
        const score_stat *const at = stats + (int64_t)s * x.pitch;
        float most = -INFINITY;
#pragma unroll 8
        for (int j = lane; j < end; j += 32) most = fmaxf(most, read(at + j).top);
        most = lanes_max<32>(most);
        double total = 0.0;
#pragma unroll 8
        for (int j = lane; j < end; j += 32) total += mass_of(read(at + j), most);
        total = lanes_sum<32>(total);
        if (lane == 0) {
            high[s] = most;
            inverse[s] = 1.0 / total;
            ends[s] = total == 0.0 ? 0 : end; // every score is -inf: no key exists
        }
    }
    __syncthreads();

    int seeing = 0;
    for (int s = 0; s < count; s++) seeing += ends[s] > 0;
    const double share = seeing ? 1.0 / (double)seeing : 0.0;
    for (int j = threadIdx.x; j < x.nk; j += THREADS) {
        double mean = 0.0;
        if (j < existing)
#pragma unroll 4
            for (int s = 0; s < count; s++)
                // 0 times NaN is NaN.
                if (ends[s])
                    mean += (j < ends[s] ? mass_of(read(stats + (int64_t)s * x.pitch + j), high[s])
                                         : 0.0) *
                            inverse[s];
        line[j] = (float)(mean * share);
    }
}

} // namespace

esa_status importance_launch(esa_cuda_device *dev, const score_job &x, float *out, int64_t nq,
                             cudaStream_t stream)
{
    const int64_t blocks = ceil_div(x.samples, x.per_block);
    importance_kernel<<<(unsigned)(blocks * x.B * x.Hkv * x.ratio), THREADS, 0, stream>>>(
        x, out, (int)nq, (int)blocks);
    return launch_check(dev, "launching the importance kernel");
}
