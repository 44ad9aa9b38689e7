// sm90_8bit_gather.cuh - how helper warps of the 8-bit kernel gather fine means.
// SPDX-License-Identifier: Apache-2.0
//
// Values lie transposed, so the means of one block are `fine` bytes of each of D rows: too little
// for a tensor copy. A helper copies them with cp.async in pieces of `fine` bytes, and keys in
// pieces of 16. Values keep their order, slot after slot. Keys are put where the logit of a slot is
// expected (quantise.cuh).
#pragma once

#include "cuda/attention/quantise.cuh"
#include "cuda/attention/sm90_attn_gather.cuh"

namespace sm90
{

template <int BYTES> DEV void copy_piece(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(BYTES)
                 : "memory");
}

// The fine means of one job.
struct fine_run {
    const kernel_args &a;
    const gather_job &job;
    const uint16_t *list;
    int last; // entry of the list that the last slots repeat
    int64_t head;

    __device__ __forceinline__ fine_run(const kernel_args &a, const gather_job &job)
        : a(a), job(job),
          list(a.fine_index + (int64_t)job.mask_row * a.cap + (job.first >> a.fine_log2)),
          last((min(job.columns, STAGE_KEYS) - 1) >> a.fine_log2),
          head((int64_t)job.b * (a.Hq / a.group) + job.h)
    {
    }
    __device__ __forceinline__ int block(int slot) const
    {
        return list[min(slot >> a.fine_log2, last)];
    }
    // The number of the slot's mean among those of the head.
    __device__ __forceinline__ int mean(int slot) const
    {
        return (block(slot) << a.fine_log2) + (slot & ((1 << a.fine_log2) - 1));
    }
};

template <int D> DEV void gather_keys8(const fine_run &run, const smem_view<D, 8> &sm, int lane)
{
    constexpr int PIECES = D / 16;
    const kernel_args &a = run.a;
    const uint32_t dst = sm.stage(run.job.stage);
    const uint8_t *const from = a.k_fine + (run.head * a.nk << a.fine_log2) * D;
#pragma unroll 4
    for (int i = lane; i < STAGE_KEYS * PIECES; i += 32) {
        const int row = i / PIECES, piece = i % PIECES;
        copy_piece<16>(dst + row * D + (piece ^ row % 8) * 16, // swizzled
                       from + (int64_t)run.mean(slot_of_key(row)) * D + piece * 16);
    }
    const int tokens = STAGE_KEYS >> a.fine_log2,
              keys = a.kv_len ? max(0, min(a.kv_len[run.job.b], a.Nk)) : a.Nk;
    const float *const scales = key_scales(a, run.job.b, run.job.h);
    stage_note8 &note = sm.notes[run.job.stage];
#pragma unroll 1
    for (int c = lane; c < STAGE_KEYS; c += 32) {
        const int slot = slot_of_key(c);
        float2 column = make_float2(0.0f, -INFINITY);
        if (slot < run.job.columns)
            column = make_float2(scales[run.block(slot)],
                                 __log2f((float)min(tokens, keys - run.mean(slot) * tokens)));
        note.column[c] = column;
    }
    if (lane == 0) note.flags = NOTE_COLUMNS;
}

template <int D, int FINE>
DEV void gather_values8(const fine_run &run, const smem_view<D, 8> &sm, int lane)
{
    const uint32_t dst = sm.stage(run.job.stage);
    const uint8_t *const from = run.a.v_fine + run.head * run.a.nk * FINE * D;
#pragma unroll 4
    for (int i = lane; i < D * STAGE_KEYS / FINE; i += 32) {
        const int d = i % D, slot = i / D * FINE;
        copy_piece<FINE>(dst + d * STAGE_KEYS + (slot / 16 ^ d % 8) * 16 + slot % 16,
                         from + ((int64_t)run.block(slot) * D + d) * FINE);
    }
}

// Fills a stage, by a whole warp.
template <int D>
DEV void gather8(const kernel_args &a, const smem_view<D, 8> &sm, const gather_job &job, int lane)
{
    const fine_run run(a, job);
    if (!job.values)
        gather_keys8(run, sm, lane);
    else if (a.fine_log2 == 2)
        gather_values8<D, 4>(run, sm, lane);
    else if (a.fine_log2 == 3)
        gather_values8<D, 8>(run, sm, lane);
    else
        gather_values8<D, 16>(run, sm, lane);
    asm volatile("cp.async.wait_all;" ::: "memory");
    proxy_fence();
    __syncwarp();
    if (lane == 0) mbar_arrive(sm.full(job.stage));
}

} // namespace sm90
