// sm89_8bit.cu - the 8-bit kernel for GPUs with E4M3 in mma.sync and no wgmma (Ada, and Blackwell
// of compute capability 12.x): the jobs it takes, its P and V in E4M3, its eight instantiations.
// SPDX-License-Identifier: Apache-2.0
//
// docs/precision.md has the arithmetic. Values come transposed and in the order of slots
// (quantise.cuh), so P needs no shuffles: the four weights of a lane in two neighbouring tiles of
// logits are four slots, one register of the A fragment.
//
// Tensor cores of Ada keep about 14 bits when they add products of E4M3. So P V of the 64 keys of a
// step is summed from 0, and o takes the sum in f32. Another product, with a column of quarters,
// gives every lane of a quad a quarter of the sum of the rounded P.
//
// Thread blocks that fit on a multiprocessor with 227 and 99 KB of shared memory:
//
// | D   | rows | shared memory | 227 / 99 KB |
// | 64  | 128  | 24 KB         | 3 / 3       |
// | 64  |  64  | 20 KB         | 3 / 3       |
// | 128 | 128  | 48 KB         | 2 / 2       |
// | 128 |  64  | 40 KB         | 2 / 2       |
#include "cuda/attention/sm80_8bit_kernel.cuh"
#include "cuda/runtime/sm89_ptx.cuh"

bool sm89_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    return dev->level == LEVEL_SM89 && sm80_8bit_takes(dev, a);
}

constexpr uint32_t QUARTERS = 0x28282828; // 0.25, four times

// Values of a step are DP rows of 64 slots, one for each channel.
template <int DP> struct e4m3_steps {
    using value = uint8_t;
    static constexpr int ROW = SM80_KEYS, BYTES = DP * ROW, NARROW = DP == 128 ? 2 : 3;

    // Where the 64 keys or means from `first` on begin in [n / 128][DP][128 slots].
    DEV int64_t begin(int first) { return (int64_t)(first & -RUN_8BIT) * DP + first % RUN_8BIT; }

    // Means that do not stand in are loaded, too. They are finite, or every row of the head is NaN
    // in the channel: it meets the value or its mean.
    DEV void load(uint32_t to, int step, const uint8_t *head, const attention_job &job,
                  const tile_place &p)
    {
        if (__builtin_expect(is_fine(step), 0)) return load_fine(to, step, job, p);
        const uint8_t *from = head + begin(step);
        if (__builtin_expect(step < 0, 0)) {
            const int64_t kv = p.b * job.a.Hkv + kv_head(job.a, p);
            from = (const uint8_t *)job.q8.v_mean + kv * job.q8.nk_pad * DP +
                   begin(~step * SM80_KEYS);
        }
#pragma unroll
        for (int d = 0; d < DP; d += 64)
            row_loader<uint16_t, ROW / 2>::copy_all(
                to + d * ROW, (const uint16_t *)(from + d * RUN_8BIT), RUN_8BIT / 2, ROW / 2);
    }

    // Fine means, two at a time: those of a block are an even number, side by side, and 0 where
    // there are no keys. Columns past the end become 0. It is rare, so it is not inlined: its
    // registers would cost spills elsewhere.
    static __device__ __noinline__ void load_fine(uint32_t to, int step, const attention_job &job,
                                                  const tile_place p)
    {
        const quantised &x = job.q8;
        const int fine = job.a.fine, first = key_walk<SM80_KEYS>::first_fine(step),
                  exist = fine_columns(job, p, first);
        const uint16_t *const list = fine_list(job.a, p);
        const int64_t kv = p.b * job.a.Hkv + kv_head(job.a, p);
        const uint8_t *const from = (const uint8_t *)x.v_fine + kv * x.nk * x.blocks * DP * fine;
#pragma unroll 1
        for (int i = threadIdx.x; i < DP * ROW / 2; i += SM80_THREADS) {
            const int d = i / (ROW / 2), column = i % (ROW / 2) * 2, c = first + column,
                      slot = slot_of_key(column);
            uint16_t two = 0;
            if (column < exist)
                two = *(const uint16_t *)(from + ((int64_t)list[c / fine] * DP + d) * fine +
                                          c % fine);
            store_shared(to + chunk_place<ROW>(slot / 16, d) + slot % 16, two);
        }
    }

    DEV uint32_t lane(int lane) { return fragment_by_column<ROW / 2>(lane); }

    template <int MT>
    DEV void add(warp_rows<DP, MT> &rows, const float (&s)[MT][8][4], uint32_t from,
                 const float (&factor)[MT * 2], const float (&shift)[MT * 2])
    {
        uint32_t p[2][MT][4]; // of 32 keys each
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = m * 2 + i % 2, n = 4 * k + i / 2 * 2, e = i % 2 * 2;
                    const auto weight = [&](float x) {
                        return exp2_approx(fmaf(x, factor[r], shift[r]));
                    };
                    p[k][m][i] = pack_e4m3(weight(s[m][n][e]), weight(s[m][n][e + 1]),
                                           weight(s[m][n + 1][e]), weight(s[m][n + 1][e + 1]));
                }
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            uint32_t b[2][4]; // channels n 8 .. n 8 + 15
#pragma unroll
            for (int k = 0; k < 2; ++k) load_matrices(b[k], (from ^ k * 32) + n * 8 * ROW);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float t[4] = {};
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        multiply_e4m3(t, p[k][m], b[k][2 * half], b[k][2 * half + 1]);
#pragma unroll
                    for (int e = 0; e < 4; ++e) rows.o[m][n + half][e] += t[e];
                }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            float t[4] = {};
            multiply_e4m3(t, p[0][m], QUARTERS, QUARTERS);
            multiply_e4m3(t, p[1][m], QUARTERS, QUARTERS);
            rows.l[2 * m] += t[0], rows.l[2 * m + 1] += t[2];
        }
    }
};

esa_status sm89_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    return launch_8bit_kernel<e4m3_steps>(dev, job, stream);
}
