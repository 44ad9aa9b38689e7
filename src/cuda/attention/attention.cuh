// attention.cuh - the job of an attention kernel. attention.cu prepares it and gives it to one of
// the kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention/quantise.cuh"
#include "cuda/runtime/device.cuh"

// Everything is in device memory, prepared on the stream before the kernel. Lists may hold blocks a
// row must not use (beyond kv_len, hidden by causality); the kernels leave them out.
struct attention_job {
    // Views in block order (gathered if there is an order), so perm_q and perm_k are null.
    esa_attn_args a;
    // Position -> token of o and lse; null: identity. The order of (b,h) starts at
    // b * scatter_stride[0] + h * scatter_stride[1].
    const int32_t *scatter;
    int64_t scatter_stride[2];
    int32_t *next; // tile counter, 0 when the kernel starts
    // [B][Hq][nq] rows (query blocks) of each head, heaviest first; null without a mask.
    const int32_t *order;

    // Tail: a.tail is NONE, POOLED (also if levels were asked for) or CENTROID. The mean key and
    // value of every key block, rounded to a.dtype, contiguous, with mean_pitch elements per row (D
    // rounded up to 64, 128 or 256). Columns from D on are 0, and so are rows from nk on and those
    // of blocks beyond kv_len.
    const void *k_mean, *v_mean; // [B][Hkv][nk_pad][mean_pitch], nk_pad = ceil(nk/128)*128
    int64_t mean_pitch, nk_pad;
    // [B][Hq][nq][nk_pad/32]: the means that stand in for blocks of row (b,h,i), bit j of word
    // j/32. Never a listed block, one of the fine level, one beyond kv_len, or one that some query
    // of the row does not fully see. The logit of block j is scale q.k_mean + ln(min(Bk, kv_len - j
    // Bk)).
    const uint32_t *stands;

    // Fine level, if a.fine_count is set: a.fine means for every key block, laid out as above
    // without padding. Means of parts beyond kv_len are 0. Row (b,h,i) has fine_columns of them:
    // column c is mean c % fine of block c / fine of its fine list. Only the last column can stand
    // for less than Bk / fine tokens. The logit gets the logarithm of this number.
    const void *k_fine, *v_fine; // [B][Hkv][nk * fine][mean_pitch]
    const int32_t *fine_columns; // [B][Hq][nq]

    // Centroid tail: the first state of every row of query block (b,h,i), made from its mean query.
    // o is the weighted sum (not divided by l). m is the reference maximum of the logits in log2
    // units (scale and log2(e) included); -inf if nothing stands in, and then o and l are 0.
    const float *state_o;           // [B][Hq][nq][mean_pitch]
    const float *state_m, *state_l; // [B][Hq][nq]

    // 8 bit: q, k, v and their means. Views of a and means above are not used.
    quantised q8;
};

// takes: 1 if the kernel takes this job. While counting, args holds only sizes, dtype, blocks and
// scale. The kernels are asked in this order.
// sm90.cu: precision 8, level, D 128, 16-bit input, no causality, no centroid tail, Bq 128/256, Bk
// 128, 4 to 16 fine means, scale > 0. It reads no views, so the workspace knows the answer.
bool sm90_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a);
// sm89_8bit.cu: at its own level what sm80_8bit takes. It reads no views.
bool sm89_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a);
// sm80_8bit.cu: precision 8, a level below sm90a, D 64/128, otherwise what sm80 takes without
// causality and the centroid tail, fine means of 4 tokens or more. It reads no views.
bool sm80_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a);
// sm90.cu: level, D 64/128, 16-bit, aligned views, Bq 128/256, Bk 64/128, scale > 0
bool sm90_takes(const esa_cuda_device *dev, const esa_attn_args *a);
// sm80.cu: 16-bit, any D and strides, Bq 64/128/256, Bk 64/128, scale > 0
bool sm80_takes(const esa_cuda_device *dev, const esa_attn_args *a);
esa_status sm90_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
esa_status sm89_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
esa_status sm80_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
esa_status sm90_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
esa_status sm80_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
// simt.cu: everything else, including f32; correct, but slow
esa_status simt_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream);
