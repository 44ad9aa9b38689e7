// sm80_quantise.cu - queries, keys and values as the 8-bit kernel of sm_80 reads them: values in
// f16, row by row. D 64 and 128.
// SPDX-License-Identifier: Apache-2.0
//
// Values are stored in units of their channel's scale, within -448 .. 448. So values of bf16 beyond
// the largest f16 do not overflow, and those of a small channel do not underflow. With scales
// from a sample, most values are smaller by a power of two, but one that the sample lacks may be as
// large as f16 allows.
#include "cuda/attention/quantise_launch.cuh"
#include "cuda/runtime/ptx.cuh"

namespace
{

constexpr float MOST_F16 = 65504.0f;

struct f16_values {
    static constexpr int GRAIN = 4; // tokens of the smallest fine mean: blocks of 64, 16 means
    static constexpr int MOST_PARTS = 2;
    static constexpr bool TAKES_64 = true, ADDS_ERROR = false; // errors of f16 do not matter

    // Writes the 8 rows of a thread. Returns false if an element is not finite.
    template <class T, int D>
    static __device__ __forceinline__ bool put_rows(__half *to, const packed<T> (&row)[8],
                                                    const value_columns<D> &columns, int column)
    {
        uint32_t larger = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t w[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 x = floats<T>(word(row[i], e));
                const int d = column * 8 + 2 * e;
                w[e] = pack2<f16>(fmaf(x.x, columns.inverse[d], columns.shift[d]),
                                  fmaf(x.y, columns.inverse[d + 1], columns.shift[d + 1]));
                larger = largest_of<__half>(larger, w[e]);
            }
            *(uint4 *)(to + i * D) = make_uint4(w[0], w[1], w[2], w[3]);
        }
        const float2 top = floats<__half>(larger);
        return is_finite(top.x) && is_finite(top.y);
    }

    template <class T, int D, bool TAIL, bool AGAIN>
    static __device__ __forceinline__ void round(const quantise_plan &p, int64_t number,
                                                 run_sums<D, GRAIN> &sums)
    {
        const run_shape<D> my;
        const key_run r(p, number);
        packed<T> row[8];
        r.load(row, p.v, my);
        __shared__ value_columns<D> columns;
        take_columns<D, AGAIN>(columns, p, r);
        __half *const head = (__half *)p.out.v + r.run * RUN_8BIT * D, *const to = head +
                                                                                   my.group * 8 *
                                                                                       D +
                                                                                   my.column * 8;
        if constexpr (TAIL) put_sums(sums, row, r.n - my.group * 8, columns, my);
        bool fit = true;
        if (r.n > 0)
            fit = put_rows(to, row, columns, my.column);
        else
            for (int i = 0; i < 8; ++i) *(uint4 *)(to + i * D) = make_uint4(0, 0, 0, 0);
        if (!fit) {
            mend_values<T>(p, r, columns, MOST_F16, [&](float y, int key, int d) {
                head[key * D + d] = __float2half_rn(y);
            });
        }
        if constexpr (TAIL) {
            __syncthreads();
            const int parts = (int)p.out.blocks;
            sums.put_means(parts, p.fine, r.n, [&](float mean, int d, int part, int e) {
                __half *const at = e ? (__half *)p.out.v_fine +
                                           ((r.run * parts + part) * p.fine + e - 1) * D
                                     : (__half *)p.out.v_mean +
                                           (r.bh * p.out.nk_pad + r.j * parts + part) * D;
                at[d] = __float2half_rn((mean + (mean - mean)) * columns.inverse[d]);
            });
        }
    }
};

} // namespace

esa_status sm80_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream)
{
    return quantise<f16_values>(dev, a, q, stream);
}
