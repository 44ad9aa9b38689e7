// sm90_quantise.cu - queries, keys and values in 8 bit, in block order: centres, scales, rounding,
// transposed values, means. D = 128.
// SPDX-License-Identifier: Apache-2.0
//
// Three launches. stats_kernel sums rows of k and finds sums and limits of v in QUANTISE_PARTS
// parts per head; centre_kernel makes one centre and one scale per column of them. round_kernel
// reads every row of q, k and v once, through the order of the tokens, and writes it in 8 bit;
// block means come out of the same registers. Sums have a fixed order, so the bits are always the
// same.
//
// The centre of k only has to be near the keys, so a sample of rows is enough. All values count for
// the limits of v.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/quantise.cuh"
#include "cuda/attention/sm90_8bit_ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

constexpr int D = 128, THREADS = 256, COLUMNS = D / 8, GROUPS = THREADS / COLUMNS,
              ROWS = RUN_8BIT / GROUPS;
constexpr int SAMPLE = 4096; // rows of k that make its centre, at least

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

// ---------------------------------------------------------------- centres and scales

enum { K_SUM, V_SUM, V_LEAST, V_MOST, STATS };

template <class T>
__global__ void __launch_bounds__(THREADS) stats_kernel(const __grid_constant__ quantise_plan p)
{
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

// ---------------------------------------------------------------- rounding

// 8 floats to 8 signed bytes: adding 1.5 2^23 rounds to the nearest even integer, which is then in
// the lowest bits.
__device__ __forceinline__ uint2 to_int8(const float (&x)[8], float inv)
{
    uint32_t y[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) y[c] = __float_as_uint(fmaf(x[c], inv, 12582912.0f));
    const auto four = [&](int c) {
        return __byte_perm(__byte_perm(y[c], y[c + 1], 0x0040),
                           __byte_perm(y[c + 2], y[c + 3], 0x0040), 0x5410);
    };
    return make_uint2(four(0), four(4));
}

// The largest absolute value of the thread block, as bits; from 0x7f800000 on if one is not finite.
__device__ __forceinline__ uint32_t block_top(uint32_t top)
{
    __shared__ uint32_t tops[THREADS / 32];
    top = __reduce_max_sync(~0u, top);
    __syncthreads(); // those of the last call have been read
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) top = max(top, tops[i]);
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
template <class T>
__device__ __forceinline__ void load_run(packed<T> (&x)[ROWS], const head_rows<T> &rows, int first,
                                         int end, int column)
{
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        x[i].words = make_uint4(0, 0, 0, 0);
        if (first + i < end) x[i] = rows.load(first + i, column);
    }
}

template <class T> __device__ __forceinline__ void round_queries(const quantise_plan &p)
{
    const int64_t run = blockIdx.x, bh = run / p.out.nq, b = bh / p.q.H, h = bh % p.q.H;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS,
              first = (int)(run % p.out.nq) * RUN_8BIT + ROWS * group;
    packed<T> row[ROWS];
    load_run(row, head_rows<T>(p.q, b, h), first, p.q.N, column);
    uint32_t top = 0;
    float x[8];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) top = max(top, __float_as_uint(fabsf(x[c])));
    }
    const run_scale s(block_top(top));
    if (threadIdx.x == 0) p.out.q_scale[run] = s.scale;
    int8_t *const to = p.out.q + (run * RUN_8BIT + ROWS * group) * D + column * 8;
    const float *const centre = p.out.k_centre + (b * p.k.H + h / p.group) * D + column * 8;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        row[i].unpack(x);
        *(uint2 *)(to + i * D) = to_int8(x, s.inv);
        if (!p.out.q_centre) continue;
        float product = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) product = fmaf(x[c], centre[c], product);
#pragma unroll
        for (int step = COLUMNS / 2; step; step /= 2)
            product += __shfl_xor_sync(~0u, product, step);
        if (column == 0 && first + i < p.q.N) p.out.q_centre[bh * p.q.N + first + i] = product;
    }
}

// Sums of the ROWS rows of each group, [GROUPS][D].
struct run_sums {
    float x[GROUPS][D];
    // The mean of n rows, in groups from .. to - 1.
    __device__ __forceinline__ float mean(int d, int from, int to, int n) const
    {
        float sum = 0.0f;
        for (int g = from; g < to; ++g) sum += x[g][d];
        return n > 0 ? sum / (float)n : 0.0f;
    }
};

enum { CENTRE, INVERSE };
__device__ __forceinline__ uint8_t to_e4m3(float x) { return (uint8_t)pack_e4m3(x, 0, 0, 0); }

// Means of a run of n existing rows; put(mean, d, number): number is 0 for the mean of the run, and
// from 1 on the fine means.
template <class Put>
__device__ __forceinline__ void put_means(const run_sums &sums, int fine, int n, const Put &put)
{
    const int d = threadIdx.x % D;
    for (int e = threadIdx.x / D; e <= fine; e += THREADS / D) {
        const int rows = e ? RUN_8BIT / fine : RUN_8BIT, from = e ? (e - 1) * rows : 0;
        put(sums.mean(d, from / ROWS, (from + rows) / ROWS, min(rows, n - from)), d, e);
    }
}

template <class T> __device__ __forceinline__ void round_keys(const quantise_plan &p)
{
    __shared__ run_sums sums;
    const int64_t run = blockIdx.x - p.q_runs, bh = run / p.out.nk, b = bh / p.k.H,
                  j = run % p.out.nk;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS,
              length = key_length(p.kv_len, b, p.k.N), n = length - (int)j * RUN_8BIT,
              first = (int)j * RUN_8BIT + ROWS * group;
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
    }
    const run_scale s(block_top(top));
    if (threadIdx.x == 0) p.out.k_scale[run] = s.scale;
    int8_t *const to = p.out.k + (run * RUN_8BIT + ROWS * group) * D + column * 8;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        row[i].unpack(x);
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] = first + i < length ? x[c] - centre[c] : 0.0f;
        *(uint2 *)(to + i * D) = to_int8(x, s.inv);
    }
    if (!p.tail) return;
#pragma unroll
    for (int c = 0; c < 8; ++c) sums.x[group][column * 8 + c] = sum[c];
    __syncthreads();
    put_means(sums, p.fine, n, [&](float mean, int d, int e) {
        int8_t *const at = e ? p.out.k_fine + (run * p.fine + e - 1) * D
                             : p.out.k_mean + (bh * p.out.nk_pad + j) * D;
        at[d] = (int8_t)__float_as_uint(fmaf(mean, s.inv, 12582912.0f));
    });
}

// Bytes of the rows of this thread, key after key: two words for each of 8 columns. Adds what is
// rounded to sum.
template <class T>
__device__ __forceinline__ void values_to_words(uint32_t (&w)[8][2], float (&sum)[8],
                                                const float (*column)[D],
                                                const packed<T> (&row)[ROWS], int exist)
{
    const int at = threadIdx.x % COLUMNS * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        float x[2][8];
        row[i].unpack(x[0]), row[i + 1].unpack(x[1]);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float &z = x[r][c];
                z = i + r < exist ? z - column[CENTRE][at + c] : 0.0f;
                z += z - z; // infinities become NaN
                sum[c] += z;
            }
            const float inv = column[INVERSE][at + c];
            const uint32_t two = pack_e4m3(x[0][c] * inv, x[1][c] * inv, 0.0f, 0.0f);
            w[c][i / 4] = i % 4 ? w[c][i / 4] | two << 16 : two;
        }
    }
}

template <class T> __device__ __forceinline__ void round_values(const quantise_plan &p)
{
    __shared__ run_sums sums;
    const int64_t run = blockIdx.x - p.q_runs - p.kv_runs, bh = run / p.out.nk, b = bh / p.v.H,
                  j = run % p.out.nk;
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS, odd = group % 2,
              length = key_length(p.kv_len, b, p.v.N), n = length - (int)j * RUN_8BIT,
              first = (int)j * RUN_8BIT + ROWS * group;
    static_assert(ROWS == 8 && COLUMNS == 16, "lanes 16 apart hold 16 adjacent keys");
    packed<T> row[ROWS];
    load_run(row, head_rows<T>(p.v, b, bh % p.v.H), first, length, column);
    __shared__ float about[2][D]; // CENTRE, INVERSE
    if (threadIdx.x < D) {
        about[CENTRE][threadIdx.x] = p.out.v_centre[bh * D + threadIdx.x];
        about[INVERSE][threadIdx.x] = esa_eight_inverse(p.out.v_scale[bh * D + threadIdx.x]);
    }
    __syncthreads();
    uint32_t w[8][2];
    float sum[8] = {};
    values_to_words(w, sum, about, row, length - first);
    // The thread with the lower 8 keys takes the first four columns, the other one the last four.
    uint8_t *const to = p.out.v + run * D * RUN_8BIT + group / 2 * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        uint32_t low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t other = __shfl_xor_sync(~0u, odd ? w[c][i] : w[c + 4][i], 16);
            low[i] = odd ? other : w[c][i];
            high[i] = odd ? w[c + 4][i] : other;
        }
        *(uint4 *)(to + (column * 8 + 4 * odd + c) * RUN_8BIT) = make_uint4(
            __byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
            __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
    }
    if (!p.tail) return;
#pragma unroll
    for (int c = 0; c < 8; ++c) sums.x[group][column * 8 + c] = sum[c];
    __syncthreads();
    const int64_t stages = p.out.nk_pad / RUN_8BIT;
    const auto mean_at = [&](int64_t block, int d) {
        return p.out.v_mean + ((bh * stages + block / RUN_8BIT) * D + d) * RUN_8BIT +
               slot_of_key((int)(block % RUN_8BIT));
    };
    put_means(sums, p.fine, n, [&](float mean, int d, int e) {
        const uint8_t byte = to_e4m3(mean * about[INVERSE][d]);
        *(e ? p.out.v_fine + (run * D + d) * p.fine + e - 1 : mean_at(j, d)) = byte;
    });
    if (j + 1 == p.out.nk) // means that do not exist
        for (int64_t e = threadIdx.x; e < (p.out.nk_pad - p.out.nk) * D; e += THREADS)
            *mean_at(p.out.nk + e / D, (int)(e % D)) = 0;
}

template <class T>
__global__ void __launch_bounds__(THREADS, 3) round_kernel(const __grid_constant__ quantise_plan p)
{
    if (blockIdx.x < p.q_runs)
        round_queries<T>(p);
    else if (blockIdx.x < p.q_runs + p.kv_runs)
        round_keys<T>(p);
    else
        round_values<T>(p);
}

rows_view view_of(const void *data, const int64_t *stride, const int32_t *perm,
                  const int64_t *perm_stride, int64_t B, int64_t H, int64_t N)
{
    rows_view x = {};
    x.data = data, x.perm = perm, x.H = (int32_t)H, x.N = (int32_t)N;
    for (int i = 0; i < 3; ++i) x.stride[i] = stride[i];
    for (int i = 0; i < 2; ++i) x.perm_stride[i] = perm_stride[i];
    x.wide = rows_in_pieces({ data, stride, { B, H, N } }, D, 2, 16);
    return x;
}

template <class T> void launch(const quantise_plan &p, int64_t heads, cudaStream_t stream)
{
    stats_kernel<T><<<dim3(QUANTISE_PARTS, (unsigned)heads), THREADS, 0, stream>>>(p);
    centre_kernel<<<(unsigned)heads, D, 0, stream>>>(p);
    round_kernel<T><<<(unsigned)(p.q_runs + 2 * p.kv_runs), THREADS, 0, stream>>>(p);
}

} // namespace

esa_status quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                    cudaStream_t stream)
{
    quantise_plan p = {};
    p.q = view_of(a->q, a->q_stride, a->perm_q, a->perm_q_stride, a->B, a->Hq, a->Nq);
    p.k = view_of(a->k, a->k_stride, a->perm_k, a->perm_k_stride, a->B, a->Hkv, a->Nk);
    p.v = view_of(a->v, a->v_stride, a->perm_k, a->perm_k_stride, a->B, a->Hkv, a->Nk);
    p.out = *q;
    p.kv_len = a->kv_len;
    p.q_runs = a->B * a->Hq * q->nq, p.kv_runs = a->B * a->Hkv * q->nk;
    p.tail = q->k_mean != nullptr;
    p.fine = q->k_fine ? a->fine : 0;
    p.group = (int32_t)(a->Hq / a->Hkv);
    p.sample_step = a->Nk > SAMPLE ? (int32_t)(a->Nk / SAMPLE) : 1;
    if (a->dtype == ESA_DTYPE_BF16)
        launch<__nv_bfloat16>(p, a->B * a->Hkv, stream);
    else
        launch<__half>(p, a->B * a->Hkv, stream);
    return launch_check(dev, "rounding to 8 bit");
}
