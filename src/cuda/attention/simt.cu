// simt.cu - attention without tensor cores, for every dtype, block size, head dimension, stride and
// scale that the library takes.
// SPDX-License-Identifier: Apache-2.0
//
// Correctness first. Everything is f32 in shared memory and registers (tf32 would lose bits of f32
// inputs). 128 threads compute 32 query rows in steps of 32 keys. Thread (y, x), y < 8, x < 16,
// owns rows 4y .. 4y + 3, score columns x and x + 16, and output columns 4x + 64c + {0, 1, 2, 3}.
// Shorter blocks are padded; their missing rows and keys do not count. Scores are in log2 units, so
// a negative scale needs no special case.
#include "cuda/runtime/lanes.cuh"
#include "cuda/attention/walk.cuh"
#include "rules/carry.h"

namespace
{

constexpr int ROWS = 32, STEP = 32, THREADS = 128, MOST_COLUMNS = 4; // 4 x 64 = 256
constexpr int SHARERS = 16;                                          // threads that share rows
constexpr int P_PITCH = STEP + 4;
constexpr int64_t MOST_TOKENS = INT32_MAX - 1024; // positions are 32-bit in the kernel

// Floats per row of a tile: D rounded up to 8, plus 4 so that rows a 16-byte read apart use
// different banks.
__host__ __device__ constexpr int pitch_of(int D) { return (D + 7) / 8 * 8 + 4; }
constexpr int shared_bytes_of(int D)
{
    return ((ROWS + STEP) * pitch_of(D) + ROWS * P_PITCH) * (int)sizeof(float);
}

// Loads 32 rows to f32 in shared memory, times factor. Rows whose bit is 0 and columns from D on
// are 0. A warp reads 8 rows at once, so it waits for memory once per 32 columns instead of once
// per row.
template <class T>
__device__ __forceinline__ void load_tile(float *dst, const T *src, int64_t stride, uint32_t valid,
                                          int D, float factor)
{
    constexpr int SPAN = 32 / (THREADS / 32);
    const int pitch = pitch_of(D), first = threadIdx.x / 32 * SPAN;
    src += first * stride;
    dst += first * pitch;
    valid >>= first;
    for (int d = threadIdx.x % 32; d < pitch; d += 32) {
        float x[SPAN];
#pragma unroll
        for (int r = 0; r < SPAN; ++r)
            x[r] = (valid >> r & 1) && d < D ? to_float(src[r * stride + d]) : 0.0f;
#pragma unroll
        for (int r = 0; r < SPAN; ++r) dst[r * pitch + d] = factor * x[r];
    }
}

// Loads 32 fine means from column `first` of the tile on. src: those of the head.
template <class T>
__device__ __forceinline__ void load_fine(float *dst, const T *src, const attention_job &job,
                                          const tile_place &p, int first, uint32_t valid)
{
    const uint16_t *const list = fine_list(job.a, p);
    const int D = (int)job.a.D, pitch = pitch_of(D);
    for (int r = threadIdx.x / 32; r < STEP; r += THREADS / 32) {
        const bool exists = valid >> r & 1;
        const T *const row = src +
                             (exists ? fine_row(list, job.a.fine, first + r) : 0) * job.mean_pitch;
        for (int d = threadIdx.x % 32; d < pitch; d += 32)
            dst[r * pitch + d] = exists && d < D ? to_float(row[d]) : 0.0f;
    }
}

// K or V of one head, and where the rows of a step are.
template <class T> struct step_source {
    const T *rows, *means, *fine;
    int64_t stride, pitch;
    __device__ __forceinline__ step_source(const void *view, const int64_t *strides,
                                           const void *mean, const void *fine_mean,
                                           const attention_job &job, const tile_place &p)
    {
        const int64_t hkv = kv_head(job.a, p), head = p.b * job.a.Hkv + hkv;
        rows = (const T *)view + p.b * strides[0] + hkv * strides[1];
        means = (const T *)mean + head * job.nk_pad * job.mean_pitch;
        fine = (const T *)fine_mean + head * job.a.nk * job.a.fine * job.mean_pitch;
        stride = strides[2];
        pitch = job.mean_pitch;
    }
    __device__ __forceinline__ void load(float *dst, const attention_job &job, const tile_place &p,
                                         int step, uint32_t valid) const
    {
        const int D = (int)job.a.D;
        if (step >= 0)
            load_tile(dst, rows + step * stride, stride, valid, D, 1.0f);
        else if (is_fine(step))
            load_fine(dst, fine, job, p, key_walk<STEP>::first_fine(step), valid);
        else
            load_tile(dst, means + (int64_t)~step * STEP * pitch, pitch, valid, D, 1.0f);
    }
};

__device__ __forceinline__ float dot4(float sum, float4 a, float4 b)
{
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
__device__ __forceinline__ float4 read4(const float *p) { return *(const float4 *)p; }

struct thread_rows { // state of the four rows of a thread
    float o[4][MOST_COLUMNS][4];
    // Maximum in log2 units, the same in all threads of the row; this thread's part of the sum.
    float m[4], l[4];

    __device__ __forceinline__ void begin(const attention_job &job, const tile_place &p, int x)
    {
        const int64_t i = row_of(job.a, p);
        const bool state = job.a.tail == ESA_TAIL_CENTROID && job.state_o &&
                           job.state_m[i] != -INFINITY;
        for (int r = 0; r < 4; ++r) {
            m[r] = state ? job.state_m[i] : -INFINITY;
            l[r] = state && x == 0 ? job.state_l[i] : 0.0f;
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int d = 64 * c + 4 * x + e;
                    o[r][c][e] = state && d < job.a.D ? job.state_o[i * job.mean_pitch + d] : 0.0f;
                }
        }
    }

    // Turns s into P, writes it to shared memory, and rescales earlier results to the new maximum.
    __device__ __forceinline__ void soften(float (&s)[4][2], float *p, int y, int x)
    {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float top = fmaxf(m[r], lanes_max<SHARERS>(fmaxf(s[r][0], s[r][1])));
            // Nothing seen yet: -inf - -inf would be NaN.
            const float zero = top == -INFINITY ? 0.0f : top;
            const float alpha = top > m[r] ? exp2f(m[r] - zero) : 1.0f;
            m[r] = top;
            l[r] *= alpha;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                s[r][j] = exp2f(s[r][j] - zero);
                l[r] += s[r][j];
                p[(4 * y + r) * P_PITCH + x + 16 * j] = s[r][j];
            }
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[r][c][e] *= alpha;
        }
    }

    // O += P V
    __device__ __forceinline__ void attend(const float *p, const float *v, int D, int y, int x)
    {
        const int pitch = pitch_of(D);
        for (int k = 0; k < STEP; k += 4) {
            float w[4][4];
#pragma unroll
            for (int r = 0; r < 4; ++r) *(float4 *)w[r] = read4(p + (4 * y + r) * P_PITCH + k);
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; ++c) {
                if (64 * c + 4 * x >= D) break;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 b = read4(v + (k + j) * pitch + 64 * c + 4 * x);
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        o[r][c][0] = fmaf(w[r][j], b.x, o[r][c][0]);
                        o[r][c][1] = fmaf(w[r][j], b.y, o[r][c][1]);
                        o[r][c][2] = fmaf(w[r][j], b.z, o[r][c][2]);
                        o[r][c][3] = fmaf(w[r][j], b.w, o[r][c][3]);
                    }
                }
            }
        }
    }

    // Puts O / l into shared memory, rows as load_tile lays them out, and writes the LSE.
    __device__ __forceinline__ void stage(float *tile, const attention_job &job,
                                          const tile_place &p, int y, int x) const
    {
        const int D = (int)job.a.D, pitch = pitch_of(D);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float sum = lanes_sum<SHARERS>(l[r]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int row = 4 * y + r;
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int d = 64 * c + 4 * x + e;
                    if (d < D) tile[row * pitch + d] = o[r][c][e] * inverse;
                }
            if (row < p.rows && job.a.lse && x == 0)
                store_lse(job.a, p, token_of(job, p, p.row + row), r, sum);
        }
    }

    __device__ __forceinline__ void store_lse(const esa_attn_args &a, const tile_place &p,
                                              int64_t token, int r, float sum) const
    {
        a.lse[p.b * a.lse_stride[0] + p.h * a.lse_stride[1] + token * a.lse_stride[2]] =
            sum == 0.0f ? -INFINITY : fmaf(m[r], 0.6931471805599453f, logf(sum));
    }

    template <class T>
    __device__ __forceinline__ void store(const attention_job &job, const tile_place &p, int y,
                                          int x) const
    {
        const esa_attn_args &a = job.a;
        for (int r = 0; r < 4; ++r) {
            const float sum = lanes_sum<SHARERS>(l[r]);
            if (4 * y + r >= p.rows) continue;
            // An empty row is 0; NaN stays NaN.
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int64_t token = token_of(job, p, p.row + 4 * y + r);
            T *const dst = (T *)a.o + p.b * a.o_stride[0] + p.h * a.o_stride[1] +
                           token * a.o_stride[2];
#pragma unroll
            for (int c = 0; c < MOST_COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (64 * c + 4 * x + e < a.D)
                        round_to(dst + 64 * c + 4 * x + e, o[r][c][e] * inverse);
            if (a.lse && x == 0) store_lse(a, p, token, r, sum);
        }
    }
};

// Rows with a carried difference, from where stage put them. A warp has one row at a time.
template <class T>
__device__ __forceinline__ void store_carried(float *tile, const attention_job &job,
                                              const tile_place &p)
{
    const esa_attn_args &a = job.a;
    const esa_carry_args &carry = a.carry;
    const int D = (int)a.D, lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < min(ROWS, p.rows); row += THREADS / 32) {
        const int64_t token = token_of(job, p, p.row + row),
                      number = p.b * carry.batch + p.h * a.Nq + token;
        T *const o = (T *)a.o + p.b * a.o_stride[0] + p.h * a.o_stride[1] + token * a.o_stride[2];
        uint8_t *const codes = (uint8_t *)carry.value + number * D;
        uint16_t *const values = (uint16_t *)carry.value + number * D;
        float *const x = tile + row * pitch_of(D);
        float largest = 0.0f;
        if (carry.use == ESA_CARRY_ADD) {
            const float scale = carry.scale ? carry.scale[number] : 1.0f;
            for (int d = lane; d < D; d += 32)
                round_to(o + d, x[d] + (carry.scale ? esa_f8_to_f32(codes[d]) * scale
                                                    : esa_bf16_to_f32(values[d])));
            continue;
        }
        for (int d = lane; d < D; d += 32) {
            T sparse;
            round_to(&sparse, x[d]);
            x[d] = esa_carry_difference(to_float(o[d]), to_float(sparse));
            largest = fmaxf(largest, fabsf(x[d]));
        }
        const float scale = esa_carry_scale(lanes_max<32>(largest)),
                    inverse = esa_carry_inverse(scale);
        if (carry.scale && lane == 0) carry.scale[number] = scale;
        for (int d = lane; d < D; d += 32) {
            if (carry.scale)
                codes[d] = esa_f32_to_f8(x[d] * inverse);
            else
                values[d] = esa_f32_to_bf16(x[d]);
        }
    }
}

template <class T, bool CARRY>
__global__ __launch_bounds__(THREADS,
                             4) void simt_attention(const __grid_constant__ attention_job job,
                                                    float factor)
{
    extern __shared__ __align__(16) float shared[];
    const esa_attn_args &a = job.a;
    const int D = (int)a.D, pitch = pitch_of(D), y = threadIdx.x / 16, x = threadIdx.x % 16;
    float *const q = shared, *const kv = q + ROWS * pitch, *const p_tile = kv + STEP * pitch;
    const tile_place p = place_of<ROWS>(job, blockIdx.x);
    if (p.rows <= 0) return;
    const step_source<T> k_source(a.k, a.k_stride, job.k_mean, job.k_fine, job, p),
        v_source(a.v, a.v_stride, job.v_mean, job.v_fine, job, p);
    key_walk<STEP> walk(job, p);

    load_tile(q, (const T *)a.q + p.b * a.q_stride[0] + p.h * a.q_stride[1] + p.row * a.q_stride[2],
              a.q_stride[2], p.rows >= 32 ? ~0u : (1u << p.rows) - 1, D, factor);
    thread_rows rows;
    rows.begin(job, p, x);
    for (int step = walk.next(job, p); step != WALK_END; step = walk.next(job, p)) {
        const uint32_t valid = (uint32_t)walk.columns(job, p, step);
        k_source.load(kv, job, p, step, valid);
        __syncthreads();
        float s[4][2] = {};
        for (int d = 0; d < D; d += 4) {
            const float4 k0 = read4(kv + x * pitch + d), k1 = read4(kv + (x + 16) * pitch + d);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float4 u = read4(q + (4 * y + r) * pitch + d);
                s[r][0] = dot4(s[r][0], u, k0);
                s[r][1] = dot4(s[r][1], u, k1);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = x + 16 * j;
                const bool seen = step < 0 || !a.causal || step + column < p.seen + 4 * y + r;
                // Also if the score is NaN.
                if (!seen || !(valid >> column & 1))
                    s[r][j] = -INFINITY;
                else if (step < 0)
                    s[r][j] += is_fine(step) ? fine_bias(a, p, walk.first_fine(step) + column)
                                             : mean_bias(a, p, ~step * STEP + column);
            }
        rows.soften(s, p_tile, y, x);
        __syncthreads();
        v_source.load(kv, job, p, step, valid);
        __syncthreads();
        rows.attend(p_tile, kv, D, y, x);
        __syncthreads();
    }
    if constexpr (CARRY) {
        rows.stage(kv, job, p, y, x);
        __syncthreads();
        store_carried<T>(kv, job, p);
    } else {
        rows.store<T>(job, p, y, x);
    }
}

template <class T>
esa_status launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    unsigned tiles = 0;
    const int shared = shared_bytes_of((int)job->a.D), most = shared_bytes_of(64 * MOST_COLUMNS);
    esa_status status = count_tiles<ROWS>(&tiles, dev, &job->a);
    if (status || tiles == 0) return status;
    // The limit belongs to the kernel, not to this launch. A smaller one could reach the launch of
    // another thread between its two calls.
    const auto kernel = job->a.carry.value ? simt_attention<T, true> : simt_attention<T, false>;
    status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "preparing the simt kernel");
    if (status) return status;
    kernel<<<tiles, THREADS, shared, stream>>>(*job, (float)(job->a.scale * 1.4426950408889634));
    return launch_check(dev, "launching the simt kernel");
}

} // namespace

esa_status simt_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const esa_attn_args *a = &job->a;
    if (a->D < 1 || a->D > 64 * MOST_COLUMNS)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "head dimension %lld, the GPU kernels take 1 to 256", (long long)a->D);
    if (a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "%lld queries and %lld keys, the GPU kernels take up to %lld",
                           (long long)a->Nq, (long long)a->Nk, (long long)MOST_TOKENS);
    if (a->dtype == ESA_DTYPE_F32) return launch<float>(dev, job, stream);
    return a->dtype == ESA_DTYPE_BF16 ? launch<__nv_bfloat16>(dev, job, stream)
                                      : launch<__half>(dev, job, stream);
}
