// prepare.cuh - what happens on the stream before an attention kernel: one small file per step, all called by attention.cu.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.cuh"

// The parts of the workspace of one call; null where the call has no use for them. Shapes as in attention_job.
struct prepared {
    void *q, *k, *v;            // rows in block order, [B][H][N][row_pitch]; q only with perm_q, k and v only with perm_k
    int64_t row_pitch;          // elements: D rounded up to whole 16 bytes
    int32_t *next, *order;
    uint32_t *runs;             // [B][Hq][nq] scratch of row_order, where one run does not hold all rows of a head
    void *k_mean, *v_mean;
    float *q_mean;              // [B][Hq][nq][mean_pitch] centroid
    int64_t mean_pitch, nk_pad;
    uint32_t *stands;
    float *state_o, *state_m, *state_l;
};

// Rows of a head that are ranked against each other in shared memory; more are ranked in runs of this many.
enum { ORDER_RUN = 4096 };

// Each enqueues one launch. a: views in block order, except for gather_rows.
// gather.cu
esa_status gather_rows(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream);
// row_order.cu: also zeroes next, which is all it does without a mask. Two launches where a head has more than ORDER_RUN rows.
esa_status row_order(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream);
// tail_state.cu: means of k and v, and of q for the centroid tail; the bits; for the centroid tail the states, which need both.
esa_status tail_means(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream);
esa_status tail_stands(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream);
esa_status tail_states(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p, cudaStream_t stream);

static inline int64_t element_bytes(int32_t dtype) { return dtype == ESA_DTYPE_F32 ? 4 : 2; }

// Whether every row of a view [B][H][N][D] can be read in 16-byte pieces. Strides of axes of length 1 do not matter.
static inline bool rows_in_16_bytes(const void *data, const int64_t *stride, int64_t B, int64_t H, int64_t N, int64_t D, int64_t element) {
    const int64_t mixed = (B > 1 ? stride[0] : 0) | (H > 1 ? stride[1] : 0) | (N > 1 ? stride[2] : 0) | D;
    return (uintptr_t)data % 16 == 0 && mixed * element % 16 == 0;
}

#ifdef __CUDACC__
static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
// 16 bytes of a row, kept as words until they are used: the compiler would split 16-bit elements into a register each.
template <class T> struct packed {
    static constexpr int N = 16 / (int)sizeof(T);
    uint4 words;
    __device__ __forceinline__ void unpack(float (&x)[N]) const {
        const uint32_t w[4] = { words.x, words.y, words.z, words.w };
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack_word(x + i * N / 4, w[i], (T *)nullptr);
    }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, float *) { x[0] = __uint_as_float(w); }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, __nv_bfloat16 *) {
        x[0] = __uint_as_float(w << 16), x[1] = __uint_as_float(w & 0xffff0000u);
    }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, __half *) {
        x[0] = __half2float(__ushort_as_half((unsigned short)w)), x[1] = __half2float(__ushort_as_half((unsigned short)(w >> 16)));
    }
};
template <class T> struct single {
    static constexpr int N = 1;
    T element;
    __device__ __forceinline__ void unpack(float (&x)[1]) const { x[0] = to_float(element); }
};
static __device__ __forceinline__ void round_to(float *dst, float x) { *dst = x; }
static __device__ __forceinline__ void round_to(__half *dst, float x) { *dst = __float2half_rn(x); }
static __device__ __forceinline__ void round_to(__nv_bfloat16 *dst, float x) { *dst = __float2bfloat16_rn(x); }

// Keys of batch entry b that exist.
static __device__ __forceinline__ int key_length(const int32_t *kv_len, int64_t b, int Nk) { return kv_len ? min(max(kv_len[b], 0), Nk) : Nk; }
#endif
