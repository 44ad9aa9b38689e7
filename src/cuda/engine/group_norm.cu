// group_norm.cu - group norm over the frames of a decoder with its activation, and the border of
// planes whose convolutions see copies of the edge.
// SPDX-License-Identifier: Apache-2.0
//
// Three launches: sums of parts, factors of channels, application. Parts are runs of rows; thread
// (c, p) of a thread block adds the channels of piece c in every pixel p, p + PY, ... of its part,
// in f32 for RUN pixels at a time and in double beyond. The sums of parts are added in their order,
// so the result does not depend on the GPU.
#include "cuda/engine/activate.cuh"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/sm80_ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

enum { THREADS = 256, RUN = 32, MAX_CHANNELS = 2048 };

// The room of a call: sums [parts][groups][2] in double, then factors and summands of channels.
struct job {
    esa_plane_group_args a;
    double *sums;
    float *scale, *shift;
    int64_t pixels; // of all frames
    int parts;
};

__device__ __forceinline__ int64_t offset(const esa_plane_group_args &a, int64_t pixel, int64_t row,
                                          int64_t frame)
{
    const int64_t y = pixel / a.width;
    return y / a.height * frame + y % a.height * row + pixel % a.width * a.channels;
}

// As esa_guide_offset.
__device__ __forceinline__ int64_t guide_offset(const esa_plane_group_args &a, int64_t f, int64_t y,
                                                int64_t x)
{
    const esa_plane_guide &g = a.guide;
    const int64_t frame = g.first_apart ? (f ? 1 + ((f - 1) >> g.time_level) : 0)
                                        : f >> g.time_level,
                  high = a.height >> g.level, wide = a.width >> g.level;
    return ((frame * high + (y >> g.level)) * wide + (x >> g.level)) * a.channels;
}

template <class T, int W> __device__ __forceinline__ void load(float (&x)[W], const T *at)
{
    if constexpr (W == 8) {
        packed<T> p[sizeof(T) / 2];
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; ++i) {
            p[i].words = ((const uint4 *)at)[i];
            float some[packed<T>::N];
            p[i].unpack(some);
#pragma unroll
            for (int e = 0; e < packed<T>::N; ++e) x[i * packed<T>::N + e] = some[e];
        }
    } else {
        x[0] = to_float(at[0]);
    }
}

template <class T, int W>
__global__ void __launch_bounds__(THREADS) sums_kernel(const __grid_constant__ job j)
{
    __shared__ double room[2][THREADS];
    const esa_plane_group_args &a = j.a;
    const int channels = (int)a.channels, pieces = channels / W,
              across = pieces < THREADS ? pieces : THREADS, down = THREADS / across;
    const int piece = threadIdx.x % across, line = threadIdx.x / across;
    const int64_t first = blockIdx.x * j.pixels / j.parts,
                  last = (blockIdx.x + 1) * j.pixels / j.parts;
    double *const out = j.sums + (int64_t)blockIdx.x * a.groups * 2;
    const int width = (int)(a.channels / a.groups);
    for (int base = 0; base < pieces; base += across) {
        const int c = (base + piece) * W;
        double sum[W] = {}, squares[W] = {};
        if (line < down && base + piece < pieces)
            for (int64_t p = first + line; p < last; p += (int64_t)down * RUN) {
                float s[W] = {}, q[W] = {};
                for (int k = 0; k < RUN && p + (int64_t)k * down < last; ++k) {
                    float x[W];
                    load<T, W>(x, (const T *)a.x + c +
                                      offset(a, p + (int64_t)k * down, a.x_row, a.x_frame));
#pragma unroll
                    for (int e = 0; e < W; ++e) s[e] += x[e], q[e] += x[e] * x[e];
                }
#pragma unroll
                for (int e = 0; e < W; ++e) sum[e] += s[e], squares[e] += q[e];
            }
            // One channel of the pieces at a time: threads of a column are added, then the
            // channel's sum goes to its group. A group's channels come in their order.
#pragma unroll
        for (int e = 0; e < W; ++e) {
            __syncthreads();
            room[0][threadIdx.x] = sum[e], room[1][threadIdx.x] = squares[e];
            __syncthreads();
            if (line == 0 && base + piece < pieces)
                for (int l = 1; l < down; ++l)
                    for (int k = 0; k < 2; ++k) room[k][piece] += room[k][l * across + piece];
            __syncthreads();
            // Groups have several channels; one thread for each group of this step.
            const int here = pieces - base < across ? pieces - base : across;
            for (int g = threadIdx.x; g < a.groups; g += THREADS)
                for (int k = 0; k < 2; ++k) {
                    double more = 0;
                    for (int n = 0; n < here; ++n) {
                        const int channel = (base + n) * W + e;
                        if (channel / width == g) more += room[k][n];
                    }
                    const bool begun = base > 0 || e > 0;
                    out[2 * g + k] = begun ? out[2 * g + k] + more : more;
                }
        }
    }
}

// One thread block for each group.
__global__ void __launch_bounds__(THREADS) factors_kernel(const __grid_constant__ job j)
{
    __shared__ double total[2];
    const esa_plane_group_args &a = j.a;
    const int g = blockIdx.x, width = (int)(a.channels / a.groups);
    if (threadIdx.x < 2) {
        double sum = 0;
        for (int p = 0; p < j.parts; ++p)
            sum += j.sums[((int64_t)p * a.groups + g) * 2 + threadIdx.x];
        total[threadIdx.x] = sum;
    }
    __syncthreads();
    const double count = (double)j.pixels * width, mean = total[0] / count,
                 variance = fmax(0.0, total[1] / count - mean * mean),
                 factor = 1.0 / sqrt(variance + (double)a.eps);
    for (int c = g * width + threadIdx.x; c < (g + 1) * width; c += THREADS) {
        j.scale[c] = (float)(factor * a.weight[c]);
        j.shift[c] = (float)(a.bias[c] - mean * factor * a.weight[c]);
    }
}

template <class T, int W>
__global__ void __launch_bounds__(THREADS) apply_kernel(const __grid_constant__ job j)
{
    const esa_plane_group_args &a = j.a;
    const int64_t pieces = a.channels / W, at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= j.pixels * pieces) return;
    const int64_t pixel = at / pieces;
    const int c = (int)(at % pieces) * W;
    T *const y = (T *)a.y + offset(a, pixel, a.y_row, a.y_frame) + c;
    float x[W];
    load<T, W>(x, (const T *)a.x + offset(a, pixel, a.x_row, a.x_frame) + c);
#pragma unroll
    for (int e = 0; e < W; ++e) x[e] = fmaf(x[e], __ldg(j.scale + c + e), __ldg(j.shift + c + e));
    if (a.guide.times) {
        const int64_t line = pixel / a.width,
                      from = guide_offset(a, line / a.height, line % a.height, pixel % a.width) + c;
#pragma unroll
        for (int e = 0; e < W; ++e)
            x[e] = fmaf(x[e], __ldg(a.guide.times + from + e), __ldg(a.guide.plus + from + e));
    }
#pragma unroll
    for (int e = 0; e < W; ++e) x[e] = activate(x[e], a.act);
    if constexpr (W == 8) {
        alignas(16) T rounded[W];
#pragma unroll
        for (int e = 0; e < W; ++e) round_to(&rounded[e], x[e]);
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; ++i) ((uint4 *)y)[i] = ((const uint4 *)rounded)[i];
    } else {
        round_to(y, x[0]);
    }
}

template <class T, int W> void launch(const job &j, cudaStream_t stream)
{
    const unsigned blocks = (unsigned)ceil_div(j.pixels * (j.a.channels / W), (int64_t)THREADS);
    sums_kernel<T, W><<<j.parts, THREADS, 0, stream>>>(j);
    factors_kernel<<<(unsigned)j.a.groups, THREADS, 0, stream>>>(j);
    apply_kernel<T, W><<<blocks, THREADS, 0, stream>>>(j);
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// ---- the border ----

template <class T>
__global__ void __launch_bounds__(THREADS)
    border_kernel(const __grid_constant__ esa_plane_border_args a, int64_t total)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= total) return;
    const int64_t wide = a.width + 2, around = 2 * wide + 2 * a.height, c = at % a.channels,
                  n = at / a.channels % around, f = at / a.channels / around;
    // Pixels of the border: the line above, the line below, then left and right of each row.
    int64_t y, x;
    if (n < 2 * wide)
        y = n < wide ? -1 : a.height, x = n % wide - 1;
    else
        y = (n - 2 * wide) / 2, x = (n - 2 * wide) % 2 ? a.width : -1;
    const int64_t from_y = min(max(y, (int64_t)0), a.height - 1),
                  from_x = min(max(x, (int64_t)0), a.width - 1);
    T *const plane = (T *)a.x + f * a.frame + c;
    plane[y * a.row + x * a.channels] = plane[from_y * a.row + from_x * a.channels];
}

} // namespace

esa_status group_norm_run(esa_cuda_device *dev, const esa_plane_group_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_plane_group_args &a = *args;
    job j = { a, (double *)a.room, nullptr, nullptr, a.frames * a.height * a.width, 0 };
    if (j.pixels < 1 || a.channels < 1) return ESA_OK;
    if (a.groups < 1 || a.channels % a.groups || a.channels > MAX_CHANNELS ||
        j.pixels * a.channels / THREADS > 0x7ffffff0)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "a group norm of %lld channels in %lld groups over %lld pixels, the GPU "
                           "takes up to %d channels",
                           (long long)a.channels, (long long)a.groups, (long long)j.pixels,
                           (int)MAX_CHANNELS);
    j.parts = j.pixels < ESA_GROUP_PARTS ? (int)j.pixels : ESA_GROUP_PARTS;
    j.scale = (float *)(j.sums + (int64_t)ESA_GROUP_PARTS * a.groups * 2);
    j.shift = j.scale + a.channels;
    const bool wide = a.channels % 8 == 0 && a.x_row % 8 == 0 && a.y_row % 8 == 0 &&
                      a.x_frame % 8 == 0 && a.y_frame % 8 == 0 && aligned(a.x) && aligned(a.y);
    cudaStream_t const s = (cudaStream_t)stream;
    if (a.dtype == ESA_DTYPE_BF16)
        wide ? launch<bf16, 8>(j, s) : launch<bf16, 1>(j, s);
    else
        wide ? launch<float, 8>(j, s) : launch<float, 1>(j, s);
    return launch_check(dev, "a group norm");
}

esa_status border_run(esa_cuda_device *dev, const esa_plane_border_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_plane_border_args &a = *args;
    const int64_t total = a.frames * (2 * (a.width + 2) + 2 * a.height) * a.channels,
                  blocks = ceil_div(total, (int64_t)THREADS);
    if (a.frames < 1 || a.height < 1 || a.width < 1) return ESA_OK;
    if (blocks > 0x7fffffff)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "the border of %lld frames is too large",
                           (long long)a.frames);
    if (a.dtype == ESA_DTYPE_BF16)
        border_kernel<bf16><<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(a, total);
    else
        border_kernel<float><<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(a, total);
    return launch_check(dev, "the border of planes");
}
