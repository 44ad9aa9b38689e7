// quantise_rows.cuh - what the two files that round q, k and v share: centres, scales, and the
// rounding of queries and keys.
// SPDX-License-Identifier: Apache-2.0
//
// Three launches. stats_kernel sums rows of k and finds sums and limits of v in QUANTISE_PARTS
// parts per head; centre_kernel makes one centre and one scale per column of them. A round kernel
// of the including file reads every row of q, k and v once, through the order of the tokens, and
// writes it in 8 bit, values in its own format; block means come out of the same registers. Sums
// have a fixed order, so the bits are always the same.
//
// The centre of k only has to be near the keys, so a sample of rows is enough. All values count for
// the limits of v.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/quantise.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

constexpr int THREADS = 256;
constexpr int SAMPLE = 4096; // rows of k that make its centre, at least

// How the threads of a block share a run of RUN_8BIT rows: a thread has 8 columns of ROWS adjacent
// rows.
template <int D> struct run_shape {
    static constexpr int COLUMNS = D / 8, GROUPS = THREADS / COLUMNS, ROWS = RUN_8BIT / GROUPS;
};

// One of q, k, v, in block order.
struct rows_view {
    const void *data;
    const int32_t *perm;
    int64_t stride[3], perm_stride[2];
    int32_t H, N;
    bool wide; // rows in pieces of 16 bytes
};

struct quantise_plan {
    rows_view q, k, v;
    quantised out;
    const int32_t *kv_len;
    int64_t q_runs, kv_runs; // thread blocks of round_kernel: for q, k and v
    int32_t fine, group, sample_step;
    bool tail;
};

// Rows of one head.
template <class T> struct head_rows {
    const T *data;
    const int32_t *perm;
    int64_t step;
    bool wide;
    __device__ __forceinline__ head_rows(const rows_view &x, int64_t b, int64_t h)
        : data((const T *)x.data + b * x.stride[0] + h * x.stride[1]),
          perm(x.perm ? x.perm + b * x.perm_stride[0] + h * x.perm_stride[1] : nullptr),
          step(x.stride[2]), wide(x.wide)
    {
    }
    // 8 elements of the row at a position.
    __device__ __forceinline__ packed<T> load(int position, int column) const
    {
        const T *const at = data + (perm ? perm[position] : position) * step + column * 8;
        packed<T> x;
        if (wide) {
            x.words = *(const uint4 *)at;
        } else {
            const uint16_t *const e = (const uint16_t *)at;
            x.words = make_uint4(e[0] | (uint32_t)e[1] << 16, e[2] | (uint32_t)e[3] << 16,
                                 e[4] | (uint32_t)e[5] << 16, e[6] | (uint32_t)e[7] << 16);
        }
        return x;
    }
};

__device__ __forceinline__ bool is_finite(float x)
{
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

enum { K_SUM, V_SUM, V_LEAST, V_MOST, STATS };

template <class T, int D>
__global__ void __launch_bounds__(THREADS) stats_kernel(const __grid_constant__ quantise_plan p)
{
    constexpr int COLUMNS = run_shape<D>::COLUMNS, GROUPS = run_shape<D>::GROUPS;
    __shared__ float part[STATS][GROUPS][D];
    const int64_t bh = blockIdx.y, b = bh / p.k.H, h = bh % p.k.H;
    const head_rows<T> k(p.k, b, h), v(p.v, b, h);
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS,
              length = key_length(p.kv_len, b, p.k.N), step = QUANTISE_PARTS * GROUPS;
    float sum[8] = {}, k_sum[8] = {}, least[8], most[8];
    for (int c = 0; c < 8; ++c) least[c] = INFINITY, most[c] = -INFINITY;
    for (int n = blockIdx.x * GROUPS + group; n < length; n += 4 * step) {
        packed<T> row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (n + i * step < length) row[i] = v.load(n + i * step, column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (n + i * step >= length) continue;
            float x[8];
            row[i].unpack(x);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                if (!is_finite(x[c])) continue;
                sum[c] += x[c], least[c] = fminf(least[c], x[c]), most[c] = fmaxf(most[c], x[c]);
            }
        }
    }
    for (int n = blockIdx.x * GROUPS + group; n * (int64_t)p.sample_step < length; n += step) {
        float x[8];
        k.load(n * p.sample_step, column).unpack(x);
        for (int c = 0; c < 8; ++c)
            if (is_finite(x[c])) k_sum[c] += x[c];
    }
    for (int c = 0; c < 8; ++c) {
        const int d = column * 8 + c;
        part[K_SUM][group][d] = k_sum[c], part[V_SUM][group][d] = sum[c],
        part[V_LEAST][group][d] = least[c], part[V_MOST][group][d] = most[c];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < STATS * D; e += THREADS) {
        const int what = e / D, d = e % D;
        float x = part[what][0][d];
        for (int g = 1; g < GROUPS; ++g) {
            const float y = part[what][g][d];
            x = what == V_LEAST ? fminf(x, y) : what == V_MOST ? fmaxf(x, y) : x + y;
        }
        p.out.partial[(bh * QUANTISE_PARTS + blockIdx.x) * STATS * D + e] = x;
    }
}

template <int D>
__global__ void __launch_bounds__(D) centre_kernel(const __grid_constant__ quantise_plan p)
{
    const int64_t bh = blockIdx.x;
    const int d = threadIdx.x, length = key_length(p.kv_len, bh / p.k.H, p.k.N);
    const float *const from = p.out.partial + bh * QUANTISE_PARTS * STATS * D + d;
    float x[STATS] = { 0.0f, 0.0f, INFINITY, -INFINITY };
#pragma unroll 8
    for (int i = 0; i < QUANTISE_PARTS; ++i) {
        const float *const y = from + i * STATS * D;
        x[K_SUM] += y[K_SUM * D], x[V_SUM] += y[V_SUM * D];
        x[V_LEAST] = fminf(x[V_LEAST], y[V_LEAST * D]), x[V_MOST] = fmaxf(x[V_MOST], y[V_MOST * D]);
    }
    const float centre = length > 0 ? x[V_SUM] / (float)length : 0.0f,
                span = fmaxf(x[V_MOST] - centre, centre - x[V_LEAST]);
    p.out.k_centre[bh * D + d] = length > 0 ? x[K_SUM] / (float)ceil_div(length, p.sample_step)
                                            : 0.0f;
    p.out.v_centre[bh * D + d] = centre;
    p.out.v_scale[bh * D + d] = esa_eight_scale(span, ESA_EIGHT_TOP);
}

// 8 floats to 8 signed bytes, ties to even.
__device__ __forceinline__ uint2 to_int8(const float (&x)[8], float inv)
{
    uint32_t y[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) y[c] = __float_as_uint(fmaf(x[c], inv, EIGHT_WHOLE));
    const auto four = [&](int c) {
        return __byte_perm(__byte_perm(y[c], y[c + 1], 0x0040),
                           __byte_perm(y[c + 2], y[c + 3], 0x0040), 0x5410);
    };
    return make_uint2(four(0), four(4));
}

// The largest absolute value of the thread block, or of this thread's half of it (parts 2), as
// bits; from 0x7f800000 on if one is not finite.
__device__ __forceinline__ uint32_t block_top(uint32_t top, int parts)
{
    constexpr int WARPS = THREADS / 32;
    __shared__ uint32_t tops[WARPS];
    const int warp = threadIdx.x / 32;
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32 == 0) tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
        if (parts == 1 || i / (WARPS / 2) == warp / (WARPS / 2)) top = max(top, tops[i]);
    return top;
}
struct run_scale {
    float scale, inv;
    __device__ __forceinline__ explicit run_scale(uint32_t top_bits)
    {
        const float top = top_bits >= 0x7f800000u ? NAN : __uint_as_float(top_bits);
        // Any scale is right where all codes are 0. With 0 the kernel's shift of logits is exact.
        scale = top < ESA_EIGHT_LITTLE ? 0.0f : esa_eight_scale(top, ESA_EIGHT_CODE);
        inv = esa_eight_inverse(scale);
    }
};

// This thread's rows of a run: positions first + ROWS * group + i. Positions from end on are 0.
template <class T, int ROWS>
__device__ __forceinline__ void load_run(packed<T> (&x)[ROWS], const head_rows<T> &rows, int first,
                                         int end, int column)
{
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        x[i].words = make_uint4(0, 0, 0, 0);
        if (first + i < end) x[i] = rows.load(first + i, column);
    }
}

// The larger magnitudes of two words with two elements each; NaN stays.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16 *)
{
    const __nv_bfloat162 x = __hmax2_nan(__habs2(*(__nv_bfloat162 *)&a),
                                         __habs2(*(__nv_bfloat162 *)&b));
    return *(const uint32_t *)&x;
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half *)
{
    const __half2 x = __hmax2_nan(__habs2(*(__half2 *)&a), __habs2(*(__half2 *)&b));
    return *(const uint32_t *)&x;
}

// Every row has its own scale. Eight lanes share a row, so that none waits for another warp.
template <class T, int D> __device__ __forceinline__ void round_queries(const quantise_plan &p)
{
    constexpr int LANES = 8, PIECES = D / 64, GROUPS = THREADS / LANES, ROWS = RUN_8BIT / GROUPS;
    const int64_t run = blockIdx.x, bh = run / p.out.nq, b = bh / p.q.H, h = bh % p.q.H;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES,
              first = (int)(run % p.out.nq) * RUN_8BIT + group;
    const head_rows<T> rows(p.q, b, h);
    packed<T> row[ROWS][PIECES];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int c = 0; c < PIECES; ++c) // rows past the end are copies of the last one
            row[i][c] = rows.load(min(first + i * GROUPS, p.q.N - 1), c * LANES + lane);
    const float *const centre = p.out.k_centre + (b * p.k.H + h / p.group) * D;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        uint32_t word = 0;
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            const uint4 w = row[i][c].words;
            word = larger(larger(word, w.x, (T *)nullptr), larger(w.y, w.z, (T *)nullptr),
                          (T *)nullptr);
            word = larger(word, w.w, (T *)nullptr);
        }
        float two[2];
        packed<T>::unpack_word(two, word, (T *)nullptr);
        uint32_t top = max(__float_as_uint(two[0]), __float_as_uint(two[1]));
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
        const run_scale s(top);
        const int64_t to = run * RUN_8BIT + group + i * GROUPS;
        if (lane == 0) p.out.q_scale[to] = s.scale;
        float product = 0.0f, x[8];
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            const int d = (c * LANES + lane) * 8;
            row[i][c].unpack(x);
            *(uint2 *)(p.out.q + to * D + d) = to_int8(x, s.inv);
            if (!p.out.q_centre) continue;
#pragma unroll
            for (int e = 0; e < 8; ++e) product = fmaf(x[e], centre[d + e], product);
        }
        if (!p.out.q_centre) continue;
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) product += __shfl_xor_sync(~0u, product, step);
        const int position = first + i * GROUPS;
        if (lane == 0 && position < p.q.N) p.out.q_centre[bh * p.q.N + position] = product;
    }
}

// Sums of GRAIN rows each, and the means that they make. A thread makes them of its rows.
template <int D, int GRAIN> struct run_sums {
    static_assert(run_shape<D>::ROWS % GRAIN == 0, "sums of the rows of one thread");
    float x[RUN_8BIT / GRAIN][D];

    // Puts the sum of 8 columns and of GRAIN rows, the last of which is `row` of the run, and
    // clears it.
    __device__ __forceinline__ void put(float (&sum)[8], int row, int column)
    {
#pragma unroll
        for (int c = 0; c < 8; ++c) x[row / GRAIN][column * 8 + c] = sum[c], sum[c] = 0.0f;
    }
    // The mean of n rows, in sums from .. to - 1.
    __device__ __forceinline__ float mean(int d, int from, int to, int n) const
    {
        float sum = 0.0f;
        for (int i = from; i < to; ++i) sum += x[i][d];
        return n > 0 ? sum / (float)n : 0.0f;
    }
    // Means of a run of n existing rows with `parts` blocks; put(mean, d, part, number): number is
    // 0 for the mean of the block, and from 1 on its fine means.
    template <class Put>
    __device__ __forceinline__ void put_means(int parts, int fine, int n, const Put &put) const
    {
        const int d = threadIdx.x % D, keys = RUN_8BIT / parts;
        for (int i = threadIdx.x / D; i < parts * (fine + 1); i += THREADS / D) {
            const int part = i / (fine + 1), e = i % (fine + 1), rows = e ? keys / fine : keys,
                      from = part * keys + (e ? (e - 1) * rows : 0);
            put(mean(d, from / GRAIN, (from + rows) / GRAIN, min(rows, n - from)), d, part, e);
        }
    }
};

// parts: key blocks of a run.
template <class T, int D, int GRAIN>
__device__ __forceinline__ void round_keys(const quantise_plan &p, int parts,
                                           run_sums<D, GRAIN> &sums)
{
    constexpr int COLUMNS = run_shape<D>::COLUMNS, ROWS = run_shape<D>::ROWS;
    __shared__ float inverse[2];
    const int64_t run = blockIdx.x - p.q_runs, bh = run / p.out.nk, b = bh / p.k.H,
                  j = run % p.out.nk;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS,
              mine = threadIdx.x * parts / THREADS, length = key_length(p.kv_len, b, p.k.N),
              n = length - (int)j * RUN_8BIT, first = (int)j * RUN_8BIT + ROWS * group;
    packed<T> row[ROWS];
    load_run(row, head_rows<T>(p.k, b, bh % p.k.H), first, length, column);
    float centre[8], x[8], sum[8] = {};
    uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) centre[c] = p.out.k_centre[bh * D + column * 8 + c];
        // Rows that do not exist become the centre, which is 0 in 8 bit.
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] = first + i < length ? x[c] - centre[c] : 0.0f;
            top = max(top, __float_as_uint(fabsf(x[c])));
            sum[c] += x[c];
        }
        if (p.tail && i % GRAIN == GRAIN - 1) sums.put(sum, ROWS * group + i, column);
    }
    const run_scale s(block_top(top, parts));
    if (threadIdx.x % (THREADS / parts) == 0)
        p.out.k_scale[run * parts + mine] = s.scale, inverse[mine] = s.inv;
    int8_t *const to = p.out.k + (run * RUN_8BIT + ROWS * group) * D + column * 8;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] = first + i < length ? x[c] - centre[c] : 0.0f;
        *(uint2 *)(to + i * D) = to_int8(x, s.inv);
    }
    if (!p.tail) return;
    __syncthreads();
    sums.put_means(parts, p.fine, n, [&](float mean, int d, int part, int e) {
        int8_t *const at = e ? p.out.k_fine + ((run * parts + part) * p.fine + e - 1) * D
                             : p.out.k_mean + (bh * p.out.nk_pad + j * parts + part) * D;
        at[d] = (int8_t)__float_as_uint(fmaf(mean, inverse[part], EIGHT_WHOLE));
    });
}

// ---------------------------------------------------------------- the launches

rows_view view_of(const void *data, const int64_t *stride, const int32_t *perm,
                  const int64_t *perm_stride, int64_t B, int64_t H, int64_t N, int64_t D)
{
    rows_view x = {};
    x.data = data, x.perm = perm, x.H = (int32_t)H, x.N = (int32_t)N;
    for (int i = 0; i < 3; ++i) x.stride[i] = stride[i];
    for (int i = 0; i < 2; ++i) x.perm_stride[i] = perm_stride[i];
    x.wide = rows_in_pieces({ data, stride, { B, H, N } }, D, 2, 16);
    return x;
}

quantise_plan plan_of(const esa_attn_args *a, const quantised *q)
{
    quantise_plan p = {};
    p.q = view_of(a->q, a->q_stride, a->perm_q, a->perm_q_stride, a->B, a->Hq, a->Nq, a->D);
    p.k = view_of(a->k, a->k_stride, a->perm_k, a->perm_k_stride, a->B, a->Hkv, a->Nk, a->D);
    p.v = view_of(a->v, a->v_stride, a->perm_k, a->perm_k_stride, a->B, a->Hkv, a->Nk, a->D);
    p.out = *q;
    p.kv_len = a->kv_len;
    p.q_runs = a->B * a->Hq * q->nq, p.kv_runs = a->B * a->Hkv * q->nk;
    p.tail = q->k_mean != nullptr;
    p.fine = q->k_fine ? a->fine : 0;
    p.group = (int32_t)(a->Hq / a->Hkv);
    p.sample_step = a->Nk > SAMPLE ? (int32_t)(a->Nk / SAMPLE) : 1;
    return p;
}

// Centres and scales of the kv heads.
template <class T, int D>
void launch_stats(const quantise_plan &p, int64_t heads, cudaStream_t stream)
{
    stats_kernel<T, D><<<dim3(QUANTISE_PARTS, (unsigned)heads), THREADS, 0, stream>>>(p);
    centre_kernel<D><<<(unsigned)heads, D, 0, stream>>>(p);
}

} // namespace
