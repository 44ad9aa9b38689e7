// attention.cuh - what an attention kernel gets: attention.cu prepares a job and hands it to one of
// the three kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/device.cuh"

// Everything in device memory, ready to run. Blocks a row may not use (beyond kv_len, hidden by
// causality) may still be listed: the kernels trim them. Order of a job: prepared on the stream
// before the kernel.
struct attention_job {
    // views in block order (gathered if there was an order): perm_q and perm_k are null here
    esa_attn_args a;
    const int32_t *scatter; // position -> token for o and lse; null: identity
    int32_t *next;          // tile counter, 0 when the kernel starts
    // [B][Hq][nq] query-block rows of each head, heaviest first; null without a mask
    const int32_t *order;

    // Tail (a.tail): the mean key and value of every key block, rounded to a.dtype, contiguous, D'
    // = mean_pitch elements per row (D rounded up to 64 below 64, 128 below 128, 256 above; columns
    // D .. D'-1 are 0, rows nk .. nk_pad-1 and those of blocks beyond kv_len are 0).
    const void *k_mean, *v_mean; // [B][Hkv][nk_pad][mean_pitch], nk_pad = ceil(nk/128)*128
    int64_t mean_pitch, nk_pad;
    // Which means stand in for row (b,h,i): bit j of word j/32; never a listed block, one beyond
    // kv_len, or one that some query of the block may not fully see. [B][Hq][nq][nk_pad/32]. The
    // logit of block j is scale q.k_mean + ln(min(Bk, kv_len - j Bk)).
    const uint32_t *stands;
    // Centroid tail: first state of every row of query block (b,h,i), made from its mean query. o
    // is the weighted sum (not divided by l); m is the reference maximum of the logits in log2
    // units (scale and log2(e) included), -inf where nothing stands in (o and l are then 0).
    const float *state_o;           // [B][Hq][nq][mean_pitch]
    const float *state_m, *state_l; // [B][Hq][nq]
};

// 1 if the kernel takes this job. args only (sizes, dtype, blocks, scale) when counting; the
// kernels below are asked in this order. sm90.cu: level, D 64/128, 16-bit, aligned views, Bq
// 128/256, Bk 64/128, scale > 0
bool sm90_takes(const esa_cuda_device *dev, const esa_attn_args *a);
// sm80.cu: 16-bit, any D and strides, Bq 64/128/256, Bk 64/128, scale > 0
bool sm80_takes(const esa_cuda_device *dev, const esa_attn_args *a);
esa_status sm90_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
esa_status sm80_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
// simt.cu: everything else, f32 included; correct, not fast
esa_status simt_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
