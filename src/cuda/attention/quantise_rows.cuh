// quantise_rows.cuh - what the two files that round q, k and v share: centres, scales, and the
// rounding of queries and keys.
// SPDX-License-Identifier: Apache-2.0
//
// The steps are launches (enum quantise_step). STATS sums a sample of the rows of k and v in
// QUANTISE_PARTS parts per head, and finds the limits of v. CENTRES adds up the parts and makes one
// centre per column of k, and one centre and one scale per column of v. ROUND reads every row of q,
// k and v once, through the order of the tokens, and writes it in 8 bits, values in the format of
// the including file; block means come out of the same registers. Sums have a fixed order, so the
// bits are always the same.
//
// A sample is enough for the centres, which only have to be near the rows. It is not enough for the
// scales of v. So scales from a sample leave room for values SLACK times as large: a power of two,
// which changes no mantissa. ROUND reports values beyond that, and AGAIN rounds all values of their
// heads again, with the true largest ones. As a rule there are none. Scales from all rows leave
// room for twice the largest value. So a code of E4M3 is the largest one only if its value hardly
// fits or is not finite, and only such codes are looked at again.
//
// In E4M3, without a tail, AGAIN also adds the mean error of the codes of each channel to its
// centre (docs/precision.md). The errors are summed in whole numbers, so the bits do not depend on
// the order.
//
// Memory limits the speed, so every row is loaded in pieces of 16 bytes, eight per thread at once,
// and magnitudes are compared two at a time, before they become floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/quantise.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

constexpr int SAMPLE = 4096;   // rows that make centres and scales, at least
constexpr int SAMPLE_STEP = 8; // and at least one row in so many
constexpr float SLACK = 8.0f;
constexpr int AGAIN_BLOCKS = 512;      // thread blocks of AGAIN, at most
constexpr float ERROR_UNIT = 0x1p-16f; // unit of the sums of errors, times the scale

enum quantise_step { STATS, CENTRES, ROUND, AGAIN, STEPS };

// How a thread block shares a run of RUN_8BIT rows: a thread has 8 columns of 8 adjacent rows. A
// warp has 8 x 4 threads, so it reads 128 bytes of a row, and holds 32 adjacent rows of a column.
template <int D> struct run_shape {
    static constexpr int COLUMNS = D / 8, ROWS = 8, GROUPS = RUN_8BIT / ROWS,
                         THREADS = COLUMNS * GROUPS, WARPS = THREADS / 32;
    // Thread blocks per multiprocessor, which leaves 64 registers for a thread, or 80 for means.
    static constexpr int BLOCKS = 1024 / THREADS, BLOCKS_TAIL = 768 / THREADS;
    static_assert(COLUMNS % 8 == 0, "a warp takes 8 columns");
    int column, group; // of this thread; columns of 8 elements
    __device__ __forceinline__ run_shape()
        : column(threadIdx.x / 32 % (COLUMNS / 8) * 8 + threadIdx.x % 8),
          group(threadIdx.x / 32 / (COLUMNS / 8) * 4 + threadIdx.x % 32 / 8)
    {
    }
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
    int64_t q_runs, kv_runs; // thread blocks of ROUND: for q, k and v
    int64_t kv_heads;
    int32_t fine, group;
};

// Rows of one head, by position, or by token (ordered false).
template <class T> struct head_rows {
    const T *data;
    const int32_t *perm;
    int64_t step;
    bool wide;
    __device__ __forceinline__ head_rows(const rows_view &x, int64_t b, int64_t h, bool ordered)
        : data((const T *)x.data + b * x.stride[0] + h * x.stride[1]),
          perm(x.perm && ordered ? x.perm + b * x.perm_stride[0] + h * x.perm_stride[1] : nullptr),
          step(x.stride[2]), wide(x.wide)
    {
    }
    __device__ __forceinline__ const T *at(int position, int column) const
    {
        return data + (perm ? perm[position] : position) * step + column * 8;
    }
    // N pieces of 8 elements, the i-th from where(i).
    template <int N, class Where>
    __device__ __forceinline__ void load(packed<T> (&x)[N], const Where &where) const
    {
        if (wide) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i].words = *(const uint4 *)where(i);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint16_t *const e = (const uint16_t *)where(i);
            x[i].words = make_uint4(e[0] | (uint32_t)e[1] << 16, e[2] | (uint32_t)e[3] << 16,
                                    e[4] | (uint32_t)e[5] << 16, e[6] | (uint32_t)e[7] << 16);
        }
    }
};

// ---------------------------------------------------------------- words of two elements

template <class T> struct two;
template <> struct two<__nv_bfloat16> {
    using type = __nv_bfloat162;
};
template <> struct two<__half> {
    using type = __half2;
};
template <class T> __device__ __forceinline__ typename two<T>::type pair_of(uint32_t word)
{
    return *(const typename two<T>::type *)&word;
}
template <class P> __device__ __forceinline__ uint32_t word_of(P pair)
{
    return *(const uint32_t *)&pair;
}
// The smaller and the larger elements of two words, and the larger magnitudes; NaN stays.
template <class T> __device__ __forceinline__ uint32_t least_of(uint32_t a, uint32_t b)
{
    return word_of(__hmin2_nan(pair_of<T>(a), pair_of<T>(b)));
}
template <class T> __device__ __forceinline__ uint32_t most_of(uint32_t a, uint32_t b)
{
    return word_of(__hmax2_nan(pair_of<T>(a), pair_of<T>(b)));
}
template <class T> __device__ __forceinline__ uint32_t largest_of(uint32_t a, uint32_t b)
{
    return word_of(__hmax2_nan(__habs2(pair_of<T>(a)), __habs2(pair_of<T>(b))));
}
// Word i of 4.
template <class T> __device__ __forceinline__ uint32_t word(const packed<T> &x, int i)
{
    return i == 0 ? x.words.x : i == 1 ? x.words.y : i == 2 ? x.words.z : x.words.w;
}
template <class T> __device__ __forceinline__ float2 floats(uint32_t word)
{
    float x[2];
    packed<T>::unpack_word(x, word, (T *)nullptr);
    return make_float2(x[0], x[1]);
}

__device__ __forceinline__ bool is_finite(float x)
{
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}
// Bits of magnitudes are in the order of their sizes; those that are not finite come last.
__device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(fabsf(x)); }

// ---------------------------------------------------------------- STATS and CENTRES

enum { K_SUM, V_SUM, V_LEAST, V_MOST, SUMS };

// One row in so many is in the sample. The more keys a row weighs evenly, the smaller is its
// output, and the nearer to the mean of v the centre must be. For what is left of the mean in the
// codes has the relative error of the sums of P, some thousandths.
__device__ __forceinline__ int sample_step(int length)
{
    return min(SAMPLE_STEP, max(1, length / SAMPLE));
}

template <class T, int D>
__global__ void __launch_bounds__(run_shape<D>::THREADS)
    stats_kernel(const __grid_constant__ quantise_plan p)
{
    constexpr int GROUPS = run_shape<D>::GROUPS, AT_ONCE = 4;
    __shared__ float part[SUMS][GROUPS][D];
    const run_shape<D> my;
    const int64_t bh = blockIdx.y, b = bh / p.k.H, h = bh % p.k.H;
    const head_rows<T> k(p.k, b, h, false), v(p.v, b, h, false);
    const int length = key_length(p.kv_len, b, p.k.N), step = sample_step(length),
              count = ceil_div(length, step), stride = QUANTISE_PARTS * GROUPS;
    float sum[8] = {}, k_sum[8] = {}, least[8], most[8];
    for (int c = 0; c < 8; ++c) least[c] = INFINITY, most[c] = -INFINITY;
    for (int n = blockIdx.x * GROUPS + my.group; n < count; n += AT_ONCE * stride) {
        packed<T> keys[AT_ONCE], values[AT_ONCE];
        const auto row = [&](int i) { return min(n + i * stride, count - 1) * step; };
        k.load(keys, [&](int i) { return k.at(row(i), my.column); });
        v.load(values, [&](int i) { return v.at(row(i), my.column); });
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (n + i * stride >= count) continue;
            float x[8], y[8];
            keys[i].unpack(x), values[i].unpack(y);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                if (is_finite(x[c])) k_sum[c] += x[c];
                if (!is_finite(y[c])) continue;
                sum[c] += y[c], least[c] = fminf(least[c], y[c]), most[c] = fmaxf(most[c], y[c]);
            }
        }
    }
    for (int c = 0; c < 8; ++c) {
        const int d = my.column * 8 + c;
        part[K_SUM][my.group][d] = k_sum[c], part[V_SUM][my.group][d] = sum[c],
        part[V_LEAST][my.group][d] = least[c], part[V_MOST][my.group][d] = most[c];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < SUMS * D; e += run_shape<D>::THREADS) {
        const int what = e / D, d = e % D;
        float x = part[what][0][d];
        for (int g = 1; g < GROUPS; ++g) {
            const float y = part[what][g][d];
            x = what == V_LEAST ? fminf(x, y) : what == V_MOST ? fmaxf(x, y) : x + y;
        }
        p.out.partial[(bh * QUANTISE_PARTS + blockIdx.x) * SUMS * D + e] = x;
    }
}

// The scale of values whose largest magnitude is known.
__device__ __forceinline__ float whole_scale(float largest)
{
    return 2.0f * esa_eight_scale(largest, ESA_EIGHT_TOP);
}
// The scale of values of which a sample has this largest magnitude. If the sample is all 0, the
// scale is so small that any value of normal size is reported.
__device__ __forceinline__ float sampled_scale(float largest, int step)
{
    if (step == 1) return whole_scale(largest);
    return largest < ESA_EIGHT_LITTLE ? 0x1p-60f : SLACK * esa_eight_scale(largest, ESA_EIGHT_TOP);
}

template <int D>
__global__ void __launch_bounds__(D) centre_kernel(const __grid_constant__ quantise_plan p)
{
    const int64_t bh = blockIdx.x;
    const int d = threadIdx.x, length = key_length(p.kv_len, bh / p.k.H, p.k.N),
              step = sample_step(length);
    const float *const from = p.out.partial + bh * QUANTISE_PARTS * SUMS * D + d;
    float x[SUMS] = { 0.0f, 0.0f, INFINITY, -INFINITY };
#pragma unroll 8
    for (int i = 0; i < QUANTISE_PARTS; ++i) {
        const float *const y = from + i * SUMS * D;
        x[K_SUM] += y[K_SUM * D], x[V_SUM] += y[V_SUM * D];
        x[V_LEAST] = fminf(x[V_LEAST], y[V_LEAST * D]), x[V_MOST] = fmaxf(x[V_MOST], y[V_MOST * D]);
    }
    const float count = (float)max(1, ceil_div(length, step)), centre = x[V_SUM] / count,
                scale = sampled_scale(fmaxf(x[V_MOST] - centre, centre - x[V_LEAST]), step);
    p.out.k_centre[bh * D + d] = x[K_SUM] / count;
    p.out.v_centre[bh * D + d] = p.out.v_middle[bh * D + d] = centre;
    p.out.v_scale[bh * D + d] = p.out.v_sampled[bh * D + d] = scale;
    p.out.v_over[bh * D + d] = 0;
    for (long long *error : p.out.v_error) error[bh * D + d] = 0;
    if (d == 0) p.out.again[bh] = p.out.done[bh] = 0;
}

// ---------------------------------------------------------------- ROUND: queries

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

// The scale of elements whose largest magnitude has these bits.
struct code_scale {
    float scale, inv;
    __device__ __forceinline__ explicit code_scale(uint32_t top_bits)
    {
        const float top = top_bits >= 0x7f800000u ? NAN : __uint_as_float(top_bits);
        // Any scale is right where all codes are 0. With 0 the kernel's shift of logits is exact.
        scale = top < ESA_EIGHT_LITTLE ? 0.0f : esa_eight_scale(top, ESA_EIGHT_CODE);
        inv = esa_eight_inverse(scale);
    }
};

// Every row has its own scale. Eight lanes share a row, so that none waits for another warp.
template <class T, int D> __device__ __forceinline__ void round_queries(const quantise_plan &p)
{
    constexpr int LANES = 8, PIECES = D / 64, GROUPS = run_shape<D>::THREADS / LANES,
                  ROWS = RUN_8BIT / GROUPS;
    const int64_t run = blockIdx.x, bh = run / p.out.nq, b = bh / p.q.H, h = bh % p.q.H;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES,
              first = (int)(run % p.out.nq) * RUN_8BIT + group;
    const head_rows<T> rows(p.q, b, h, true);
    packed<T> row[ROWS * PIECES];
    // Rows past the end are copies of the last one.
    rows.load(row, [&](int i) {
        return rows.at(min(first + i / PIECES * GROUPS, p.q.N - 1), i % PIECES * LANES + lane);
    });
    const float *const centre = p.out.k_centre + (b * p.k.H + h / p.group) * D;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        uint32_t larger = 0;
#pragma unroll
        for (int w = 0; w < PIECES * 4; ++w)
            larger = largest_of<T>(larger, word(row[i * PIECES + w / 4], w % 4));
        const float2 both = floats<T>(larger);
        uint32_t top = max(size_bits(both.x), size_bits(both.y));
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
        const code_scale s(top);
        const int64_t to = run * RUN_8BIT + group + i * GROUPS;
        if (lane == 0) p.out.q_scale[to] = s.scale;
        float product = 0.0f, x[8];
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            const int d = (c * LANES + lane) * 8;
            row[i * PIECES + c].unpack(x);
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

// ---------------------------------------------------------------- ROUND: keys

// A run of the keys or values of one head.
struct key_run {
    int64_t run, bh, b, j; // number of the run, and in its head
    int length, n;         // keys of the head; those from the first one of the run on
    __device__ __forceinline__ key_run(const quantise_plan &p, int64_t run)
        : run(run), bh(run / p.out.nk), b(bh / p.k.H), j(run % p.out.nk),
          length(key_length(p.kv_len, b, p.k.N)), n(length - (int)j * RUN_8BIT)
    {
    }
    // The 8 rows of a thread. Those past the end are copies of the last one; 0 if no row exists.
    template <class T, int D>
    __device__ __forceinline__ void load(packed<T> (&x)[8], const rows_view &view,
                                         const run_shape<D> &my) const
    {
        const head_rows<T> rows(view, b, bh % view.H, true);
        const int first = (int)j * RUN_8BIT + my.group * 8;
        if (n > 0) {
            rows.load(x, [&](int i) { return rows.at(min(first + i, length - 1), my.column); });
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i].words = make_uint4(0, 0, 0, 0);
        }
    }
};

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
        for (int i = threadIdx.x / D; i < parts * (fine + 1); i += run_shape<D>::THREADS / D) {
            const int part = i / (fine + 1), e = i % (fine + 1), rows = e ? keys / fine : keys,
                      from = part * keys + (e ? (e - 1) * rows : 0);
            put(mean(d, from / GRAIN, (from + rows) / GRAIN, min(rows, n - from)), d, part, e);
        }
    }
};
// The largest magnitude of the thread block, or of this thread's half of it (parts 2), as bits.
template <int D> __device__ __forceinline__ uint32_t block_top(uint32_t top, int parts)
{
    constexpr int WARPS = run_shape<D>::WARPS;
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

// parts: key blocks of a run. sums: used with a tail.
template <class T, int D, int GRAIN, bool TAIL>
__device__ __forceinline__ void round_keys(const quantise_plan &p, int64_t number, int parts,
                                           run_sums<D, GRAIN> &sums)
{
    constexpr int THREADS = run_shape<D>::THREADS;
    __shared__ float inverse[2];
    const run_shape<D> my;
    const key_run r(p, number);
    const int mine = threadIdx.x * parts / THREADS, exist = r.n - my.group * 8;
    packed<T> row[8];
    r.load(row, p.k, my);
    float centre[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) centre[c] = p.out.k_centre[r.bh * D + my.column * 8 + c];
    // Subtracting the centre keeps the order, so only the limits of a column are looked at.
    uint32_t top = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32_t least = word(row[0], w), most = least;
#pragma unroll
        for (int i = 1; i < 8; ++i)
            least = least_of<T>(least, word(row[i], w)), most = most_of<T>(most, word(row[i], w));
        const float2 low = floats<T>(least), high = floats<T>(most);
        top = max(max(top, size_bits(low.x - centre[2 * w])), size_bits(high.x - centre[2 * w]));
        top = max(max(top, size_bits(low.y - centre[2 * w + 1])),
                  size_bits(high.y - centre[2 * w + 1]));
    }
    const code_scale s(block_top<D>(top, parts));
    if (threadIdx.x % (THREADS / parts) == 0)
        p.out.k_scale[r.run * parts + mine] = s.scale, inverse[mine] = s.inv;
    int8_t *const to = p.out.k + (r.run * RUN_8BIT + my.group * 8) * D + my.column * 8;
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float x[8];
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] -= centre[c];
            if (TAIL && i < exist) sum[c] += x[c];
        }
        *(uint2 *)(to + i * D) = to_int8(x, s.inv);
        if constexpr (TAIL)
            if (i % GRAIN == GRAIN - 1) sums.put(sum, my.group * 8 + i, my.column);
    }
    if constexpr (TAIL) {
        __syncthreads();
        sums.put_means(parts, p.fine, r.n, [&](float mean, int d, int part, int e) {
            int8_t *const at = e ? p.out.k_fine + ((r.run * parts + part) * p.fine + e - 1) * D
                                 : p.out.k_mean + (r.bh * p.out.nk_pad + r.j * parts + part) * D;
            at[d] = (int8_t)__float_as_uint(fmaf(mean, inverse[part], EIGHT_WHOLE));
        });
    }
}

// ---------------------------------------------------------------- ROUND and AGAIN: values

// The columns of the values of one head, in shared memory.
template <int D> struct value_columns {
    float centre[D], inverse[D], shift[D]; // centre: v_middle; shift = -centre inverse
};

// The scale of the second rounding.
__device__ __forceinline__ float again_scale(const quantise_plan &p, int64_t channel)
{
    const uint32_t over = p.out.v_over[channel];
    return over ? whole_scale(__uint_as_float(over)) : p.out.v_sampled[channel];
}

// Fills the columns for the values of a run; all threads. AGAIN: with the scales that hold the
// largest value, which become those of the head.
template <int D, bool AGAIN>
__device__ __forceinline__ void take_columns(value_columns<D> &to, const quantise_plan &p,
                                             const key_run &r)
{
    if (threadIdx.x < D) {
        const int64_t at = r.bh * D + threadIdx.x;
        const float scale = AGAIN ? again_scale(p, at) : p.out.v_sampled[at];
        if (AGAIN && r.j == 0) p.out.v_scale[at] = scale;
        const float centre = p.out.v_middle[at], inverse = esa_eight_inverse(scale);
        to.centre[threadIdx.x] = centre, to.inverse[threadIdx.x] = inverse,
        to.shift[threadIdx.x] = -centre * inverse;
    }
    __syncthreads();
}

// Sums of v - centre of the rows of a thread that exist.
template <class T, int D, int GRAIN>
__device__ __forceinline__ void put_sums(run_sums<D, GRAIN> &sums, const packed<T> (&row)[8],
                                         int exist, const value_columns<D> &columns,
                                         const run_shape<D> &my)
{
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float x[8];
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (i < exist) sum[c] += x[c] - columns.centre[my.column * 8 + c];
        if (i % GRAIN == GRAIN - 1) sums.put(sum, my.group * 8 + i, my.column);
    }
}

// Rounds the values of a thread once more, one by one, after a code came out as the largest one or
// as NaN: put(y, key, d) gets a value in units of its scale, or NaN if it is not finite. Reports
// values beyond `most`.
template <class T, int D, class Put>
__device__ __noinline__ void mend_values(const quantise_plan &p, const key_run &r,
                                         const value_columns<D> &columns, float most,
                                         const Put &put)
{
    const run_shape<D> my;
    const head_rows<T> rows(p.v, r.b, r.bh % p.v.H, true);
#pragma unroll 1
    for (int e = 0; e < 64; ++e) {
        const int key = my.group * 8 + e / 8, d = my.column * 8 + e % 8;
        if (key >= r.n) return; // copies of the last row stay as they are
        const float x = to_float(rows.at((int)r.j * RUN_8BIT + key, my.column)[e % 8]),
                    z = x - columns.centre[d], y = z * columns.inverse[d];
        if (is_finite(z) && fabsf(y) > most) {
            atomicMax(p.out.v_over + r.bh * D + d, size_bits(z));
            p.out.again[r.bh] = 1;
        }
        put(is_finite(z) ? y : NAN, key, d);
    }
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
    p.kv_heads = a->B * a->Hkv;
    p.fine = q->k_fine ? a->fine : 0;
    p.group = (int32_t)(a->Hq / a->Hkv);
    return p;
}

} // namespace
