// sm90_quantise.cu - queries, keys and values as the 8-bit kernel of sm_90a reads them: values in
// E4M3, transposed. D = 128.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/quantise_rows.cuh"
#include "cuda/attention/sm90_8bit_ptx.cuh"

namespace
{

constexpr int D = 128, COLUMNS = run_shape<D>::COLUMNS, ROWS = run_shape<D>::ROWS;

enum { CENTRE, INVERSE };
__device__ __forceinline__ uint8_t to_e4m3(float x) { return (uint8_t)pack_e4m3(x, 0, 0, 0); }

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

template <class T>
__device__ __forceinline__ void round_values(const quantise_plan &p, run_sums<D, ROWS> &sums)
{
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
    uint8_t *const to = (uint8_t *)p.out.v + run * D * RUN_8BIT + group / 2 * 16;
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
    sums.put(sum, ROWS * group, column);
    __syncthreads();
    const int64_t stages = p.out.nk_pad / RUN_8BIT;
    const auto mean_at = [&](int64_t block, int d) {
        return (uint8_t *)p.out.v_mean + ((bh * stages + block / RUN_8BIT) * D + d) * RUN_8BIT +
               slot_of_key((int)(block % RUN_8BIT));
    };
    sums.put_means(1, p.fine, n, [&](float mean, int d, int, int e) {
        const uint8_t byte = to_e4m3(mean * about[INVERSE][d]);
        *(e ? (uint8_t *)p.out.v_fine + (run * D + d) * p.fine + e - 1 : mean_at(j, d)) = byte;
    });
    if (j + 1 == p.out.nk) // means that do not exist
        for (int64_t e = threadIdx.x; e < (p.out.nk_pad - p.out.nk) * D; e += THREADS)
            *mean_at(p.out.nk + e / D, (int)(e % D)) = 0;
}

template <class T>
__global__ void __launch_bounds__(THREADS, 3) round_kernel(const __grid_constant__ quantise_plan p)
{
    __shared__ run_sums<D, ROWS> sums;
    if (blockIdx.x < p.q_runs)
        round_queries<T, D>(p);
    else if (blockIdx.x < p.q_runs + p.kv_runs)
        round_keys<T>(p, 1, sums);
    else
        round_values<T>(p, sums);
}

template <class T> void launch(const quantise_plan &p, int64_t heads, cudaStream_t stream)
{
    launch_stats<T, D>(p, heads, stream);
    round_kernel<T><<<(unsigned)(p.q_runs + 2 * p.kv_runs), THREADS, 0, stream>>>(p);
}

} // namespace

esa_status quantise_e4m3(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream)
{
    const quantise_plan p = plan_of(a, q);
    if (a->dtype == ESA_DTYPE_BF16)
        launch<__nv_bfloat16>(p, a->B * a->Hkv, stream);
    else
        launch<__half>(p, a->B * a->Hkv, stream);
    return launch_check(dev, "rounding to 8 bit");
}
