// quantise_e4m3.cuh - the format of values in E4M3, transposed, for quantise_launch.cuh.
// SPDX-License-Identifier: Apache-2.0
//
// Values are stored channel after channel, in the order of slots (quantise.cuh).
#pragma once

#include "cuda/attention/quantise_launch.cuh"
#include "cuda/runtime/sm89_ptx.cuh"

namespace
{

// Adds to a sum of errors.
__device__ __forceinline__ void add_whole(long long *sum, float x)
{
    atomicAdd((unsigned long long *)sum, (unsigned long long)__float2ll_rn(x * (1 / ERROR_UNIT)));
}

__device__ __forceinline__ uint8_t to_e4m3(float x) { return (uint8_t)pack_e4m3(x, 0, 0, 0); }

// The sum of the numbers of four bytes, in two halves. The sum in f16 has a random error far below
// that of the bytes.
__device__ __forceinline__ __half2 sum_of(uint32_t w)
{
    return __hadd2(unpack_e4m3((uint16_t)w), unpack_e4m3((uint16_t)(w >> 16)));
}

// Makes the bytes of the 8 rows of a thread, key after key: two words for each of 8 columns. error:
// for each column, the sum of v - code over the first `exist` rows, in units of the scale.
template <class T, int D>
__device__ __forceinline__ void to_words(uint32_t (&w)[8][2], float (&error)[8],
                                         const packed<T> (&row)[8], int exist,
                                         const value_columns<D> &columns, int column)
{
    uint32_t mask[2]; // of the bytes of rows that exist
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int n = exist - 4 * half;
        mask[half] = n >= 4 ? ~0u : n <= 0 ? 0u : (1u << 8 * n) - 1;
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const int d = column * 8 + 2 * pair;
        const float inverse[2] = { columns.inverse[d], columns.inverse[d + 1] },
                    shift[2] = { columns.shift[d], columns.shift[d + 1] };
        float sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = floats<T>(word(row[4 * half + i], pair));
                x[i].x = fmaf(x[i].x, inverse[0], shift[0]);
                x[i].y = fmaf(x[i].y, inverse[1], shift[1]);
                if (4 * half + i < exist) sum[0] += x[i].x, sum[1] += x[i].y;
            }
            w[2 * pair][half] = pack_e4m3(x[0].x, x[1].x, x[2].x, x[3].x);
            w[2 * pair + 1][half] = pack_e4m3(x[0].y, x[1].y, x[2].y, x[3].y);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const uint32_t(&bytes)[2] = w[2 * pair + c];
            const float2 codes = __half22float2(
                __hadd2(sum_of(bytes[0] & mask[0]), sum_of(bytes[1] & mask[1])));
            error[2 * pair + c] = sum[c] - (codes.x + codes.y);
        }
    }
}

// Adds the sums of errors of all threads to the sums `to` of the head.
template <int D>
__device__ __forceinline__ void put_errors(long long *to, const float (&error)[8],
                                           const run_shape<D> &my)
{
    __shared__ float shared[run_shape<D>::GROUPS / 4][D];
    // The four threads of a column share its 8 elements: each takes two.
    const int odd = my.group % 2, high = my.group / 2 % 2;
    float four[4], two[2];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        four[c] = (odd ? error[c + 4] : error[c]) +
                  __shfl_xor_sync(~0u, odd ? error[c] : error[c + 4], 8);
#pragma unroll
    for (int c = 0; c < 2; ++c)
        two[c] = (high ? four[c + 2] : four[c]) +
                 __shfl_xor_sync(~0u, high ? four[c] : four[c + 2], 16);
    float *const at = shared[my.group / 4] + my.column * 8 + 4 * odd + 2 * high;
    at[0] = two[0], at[1] = two[1];
    __syncthreads();
    if (threadIdx.x >= D) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < run_shape<D>::GROUPS / 4; ++i) sum += shared[i][threadIdx.x];
    add_whole(to + threadIdx.x, sum);
}

// True if a byte is 448, -448 or NaN.
__device__ __forceinline__ bool reach_top(const uint32_t (&w)[8][2])
{
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) found |= (w[i / 2][i % 2] & 0x7f7f7f7fu) + 0x02020202u;
    return found & 0x80808080u;
}

// LEAST_BLOCK: keys of the smallest block, 64 or 128.
template <int LEAST_BLOCK, bool TAKES_D64> struct e4m3_values {
    static constexpr int GRAIN = LEAST_BLOCK / 16; // 16 fine means are the most
    static constexpr int MOST_PARTS = RUN_8BIT / LEAST_BLOCK;
    static constexpr bool TAKES_64 = TAKES_D64, ADDS_ERROR = true;

    template <class T, int D, bool TAIL, bool AGAIN>
    static __device__ __forceinline__ void round(const quantise_plan &p, int64_t number,
                                                 run_sums<D, GRAIN> &sums)
    {
        const run_shape<D> my;
        const key_run r(p, number);
        const int odd = my.group % 2;
        packed<T> row[8];
        r.load(row, p.v, my);
        __shared__ value_columns<D> columns;
        take_columns<D, AGAIN>(columns, p, r);
        if constexpr (TAIL) put_sums(sums, row, r.n - my.group * 8, columns, my);
        uint32_t w[8][2] = {};
        float error[8] = {};
        if (r.n > 0) to_words(w, error, row, r.n - my.group * 8, columns, my.column);
        // Lanes 8 apart hold 16 adjacent keys: the lower one takes the first four columns, the
        // other one the last four. With the lanes 16 apart they write 32 adjacent bytes.
        uint8_t *const to = (uint8_t *)p.out.v + r.run * D * RUN_8BIT + my.group / 2 * 16;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint32_t low[2], high[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t other = __shfl_xor_sync(~0u, odd ? w[c][i] : w[c + 4][i], 8);
                low[i] = odd ? other : w[c][i];
                high[i] = odd ? w[c + 4][i] : other;
            }
            *(uint4 *)(to + (my.column * 8 + 4 * odd + c) * RUN_8BIT) = make_uint4(
                __byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
                __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
        }
        __syncwarp(); // another lane wrote the values of this one
        long long *const errors = p.out.v_error[AGAIN] + r.bh * D;
        if (__builtin_expect(reach_top(w), 0)) {
#pragma unroll
            for (float &e : error) e = 0.0f;
            mend_values<T>(p, r, columns, ESA_EIGHT_TOP, [&](float y, int key, int d) {
                const uint8_t code = to_e4m3(y);
                ((uint8_t *)p.out.v)[(r.run * D + d) * RUN_8BIT + slot_of_key(key)] = code;
                if (!TAIL && fabsf(y) <= ESA_EIGHT_TOP) // not NaN
                    add_whole(errors + d, y - __low2float(unpack_e4m3(code)));
            });
        }
        if constexpr (TAIL)
            put_means(p, r, sums, columns);
        else
            put_errors(errors, error, my);
    }

    template <int D>
    static __device__ __forceinline__ void put_means(const quantise_plan &p, const key_run &r,
                                                     const run_sums<D, GRAIN> &sums,
                                                     const value_columns<D> &columns)
    {
        __syncthreads();
        const int parts = MOST_PARTS == 1 ? 1 : (int)p.out.blocks;
        const int64_t stages = p.out.nk_pad / RUN_8BIT, blocks = p.out.nk * parts;
        const auto mean_at = [&](int64_t block, int d) {
            return (uint8_t *)p.out.v_mean +
                   ((r.bh * stages + block / RUN_8BIT) * D + d) * RUN_8BIT +
                   slot_of_key((int)(block % RUN_8BIT));
        };
        sums.put_means(parts, p.fine, r.n, [&](float mean, int d, int part, int e) {
            const uint8_t byte = to_e4m3((mean + (mean - mean)) * columns.inverse[d]);
            *(e ? (uint8_t *)p.out.v_fine + ((r.run * parts + part) * D + d) * p.fine + e - 1
                : mean_at(r.j * parts + part, d)) = byte;
        });
        if (r.j + 1 == p.out.nk) // means that do not exist
            for (int64_t e = threadIdx.x; e < (p.out.nk_pad - blocks) * D;
                 e += run_shape<D>::THREADS)
                *mean_at(blocks + e / D, (int)(e % D)) = 0;
    }
};

} // namespace
