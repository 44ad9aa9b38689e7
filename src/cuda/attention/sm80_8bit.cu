// sm80_8bit.cu - which jobs the 8-bit kernel of sm_80 takes, its P and V in f16, and its eight
// instantiations.
// SPDX-License-Identifier: Apache-2.0
//
// Thread blocks that fit on a multiprocessor with 227, 163 and 99 KB of shared memory:
//
// | D   | rows | shared memory | 227 / 163 / 99 KB |
// | 64  | 128  | 32 KB         | 3 / 3 / 3         |
// | 64  |  64  | 28 KB         | 3 / 3 / 3         |
// | 128 | 128  | 64 KB         | 2 / 2 / 1         |
// | 128 |  64  | 56 KB         | 3 / 2 / 1         |
#include "cuda/attention/sm80_8bit_kernel.cuh"

bool sm80_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    // Hopper does not use it: its own kernels of 16 bits are faster.
    if (a->precision != 8 || dev->level >= LEVEL_SM90A || !sm80_takes(dev, a)) return false;
    if ((a->D != 64 && a->D != 128) || a->causal || a->tail == ESA_TAIL_CENTROID) return false;
    // The workspace of a plan is counted for 16 fine means: if those are taken, fewer are, too.
    if (a->tail == ESA_TAIL_LEVELS && a->fine && (a->block_k % a->fine || a->block_k / a->fine % 4))
        return false;
    if (a->B < 1 || a->Nq < 1 || a->Nk < 1) return false;
    // Thread blocks of one launch.
    return a->B * a->Hkv <= 65535 && a->B * (a->Hq * ceil_div(a->Nq, (int64_t)RUN_8BIT) +
                                             2 * a->Hkv * ceil_div(a->Nk, (int64_t)RUN_8BIT)) <=
                                         INT32_MAX;
}

// Values are rows of DP elements, one for each key.
template <int DP> struct f16_steps {
    using value = f16;
    static constexpr int BYTES = SM80_KEYS * DP * 2, NARROW = 3;

    DEV void load(uint32_t to, int step, const f16 *head, const attention_job &job,
                  const tile_place &p)
    {
        load_codes<f16, DP>(to, step, head, job.q8.v_mean, job.q8.v_fine, job, p);
    }
    DEV uint32_t lane(int lane) { return fragment_by_row<DP>(lane); }

    template <int MT>
    DEV void add(warp_rows<DP, MT> &rows, const float (&s)[MT][8][4], uint32_t from,
                 const float (&factor)[MT * 2], const float (&shift)[MT * 2])
    {
        rows.template add_values<f16>(s, from, factor, shift);
    }
};

esa_status sm80_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    return launch_8bit_kernel<f16_steps>(dev, job, stream);
}
