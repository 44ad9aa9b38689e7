// error_plain.cu - the scores of the error selector with plain multiply-adds: f32, and every shape
// that error_scores.cu does not take. For correctness, not for speed.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes the scores of one query block and one key block, mean query by mean query:
// the weights of all columns of the tile, one warp per column; then a thread per element of D adds
// up the errors.
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"
#include "cuda/selection/error.cuh"

namespace
{

enum { THREADS = 128, WARPS = THREADS / 32, COLUMNS = 256 + 17 };

// Sum over the thread block, in thread 0. shared: a word per warp.
__device__ float sum_of(float x, float *shared)
{
    x = lanes_sum<32>(x);
    __syncthreads(); // the last sum has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += shared[w];
    return sum;
}

template <class T> struct plain_tile {
    const T *k, *v, *kt, *vt; // of the key block
    __device__ __forceinline__ const T *row(const error_job &x, bool values, int column) const
    {
        return column < x.per_k ? (values ? v : k) + (int64_t)column * x.pitch
                                : (values ? vt : kt) + (int64_t)(column - x.per_k) * x.pitch;
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS)
    plain_kernel(const __grid_constant__ error_job x, int64_t cells)
{
    __shared__ float weight[COLUMNS], shared[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = x.per_k + x.fine + 1;
    for (int64_t cell = blockIdx.x; cell < cells; cell += gridDim.x) {
        const int j = (int)(cell % x.nk), i = (int)(cell / x.nk % x.nq);
        const int64_t bh = cell / x.nk / x.nq, b = bh / x.Hq,
                      place = (b * x.Hkv + bh % x.Hq / (x.Hq / x.Hkv)) * x.nk + j;
        const int tokens = x.kv_len[b] - j * x.block_k;
        if (tokens <= 0) continue;
        const plain_tile<T> tile = { (const T *)x.k + place * x.per_k * x.pitch,
                                     (const T *)x.v + place * x.per_k * x.pitch,
                                     (const T *)x.kt + place * x.tail_rows * x.pitch,
                                     (const T *)x.vt + place * x.tail_rows * x.pitch };
        float mean = 0.0f, fine = 0.0f;
        for (int s = 0; s < x.per_q; ++s) {
            const int queries = error_queries(x, i * x.per_q + s);
            if (queries == 0) break;
            const int64_t row = bh * x.rows + i * x.per_q + s;
            const T *const q = (const T *)x.q + row * x.pitch, *const o = (const T *)x.o +
                                                                          row * x.pitch;
            const float reference = x.lse[row] * 1.44269504f;
            __syncthreads(); // the last weights have been read
            for (int c = warp; c < columns; c += WARPS) {
                const T *const k = tile.row(x, false, c);
                float dot = 0.0f;
                for (int d = lane; d < x.D; d += 32) dot += to_float(q[d]) * to_float(k[d]);
                dot = lanes_sum<32>(dot);
                if (lane == 0)
                    weight[c] = exp2f(fmaf(dot, x.scale, error_bias(x, c, tokens) - reference));
            }
            __syncthreads();
            const float u = weight[columns - 1];
            float e_mean = 0.0f, e_fine = 0.0f;
            for (int d = threadIdx.x; d < x.D; d += THREADS) {
                const float out = to_float(o[d]);
                float a = 0.0f, f = 0.0f;
                // Relative to o: what all values have in common drops out before it is rounded.
                for (int c = 0; c < x.per_k; ++c)
                    a = fmaf(weight[c], to_float(tile.row(x, true, c)[d]) - out, a);
                for (int c = x.per_k; c < columns - 1; ++c)
                    f = fmaf(weight[c], to_float(tile.row(x, true, c)[d]) - out, f);
                const float m = a - u * (to_float(tile.row(x, true, columns - 1)[d]) - out);
                e_mean = fmaf(m, m, e_mean);
                e_fine = fmaf(a - f, a - f, e_fine);
            }
            mean = fmaf((float)queries, sum_of(e_mean, shared), mean);
            if (x.fine) fine = fmaf((float)queries, sum_of(e_fine, shared), fine);
        }
        if (threadIdx.x) continue;
        const float all = (float)min(x.block_q, x.Nq - i * x.block_q);
        x.out[cell] = mean / all;
        if (x.fine) x.out[x.level_stride + cell] = fine / all;
    }
}

} // namespace

esa_status error_plain_launch(esa_cuda_device *dev, const error_job &x, cudaStream_t stream)
{
    const int64_t cells = x.level_stride;
    const unsigned grid = (unsigned)esa_min64(cells, 1 << 20);
    if (x.dtype == ESA_DTYPE_F32)
        plain_kernel<float><<<grid, THREADS, 0, stream>>>(x, cells);
    else if (x.dtype == ESA_DTYPE_F16)
        plain_kernel<__half><<<grid, THREADS, 0, stream>>>(x, cells);
    else
        plain_kernel<__nv_bfloat16><<<grid, THREADS, 0, stream>>>(x, cells);
    return launch_check(dev, "scoring errors");
}
