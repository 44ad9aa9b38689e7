// order.cuh - the adaptive order on the GPU (rules/order.h): what its kernels share.
// SPDX-License-Identifier: Apache-2.0
//
// The heads of both sides go level by level, as on the CPU:
//
//   order.cu            the start order, and the table of all nodes
//   order_metric.cu     C of each head
//   order_direction.cu  w of each large node, one thread block a node
//   order_cut.cu        coordinates of all tokens, then the stable partition of each large node
//   order_block.cu      all cuts of a small node, one thread block a node
//
// All sizes are known to the host, so the launches do not depend on the data. Products of samples
// take tokens minus their mean, rounded to bf16, and the metric in bf16; coordinates of large nodes
// are in f32.
#pragma once

#include "cuda/runtime/device.cuh"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/views.cuh"
#include "rules/order.h"
#include "rules/rank.h"

struct order_side {
    const void *data;
    int64_t stride[3];
    int32_t N, heads; // heads of one batch entry
    int32_t at;       // first head of this side among all heads
    uint32_t block, small;
    esa_order_node root;
    int32_t pieces;       // 1: rows can be read in 16-byte pieces
    const int32_t *start; // [N] or null
    int32_t *perm;        // [B][heads][N]
    uint32_t *key;        // [B][heads][N] coordinates, as esa_rank_bits
    int32_t *spare;       // [B][heads][N]
    // Node `slot` of level l is entry (1 << l) + slot: first, n, cut (0: not cut), 0.
    uint4 *nodes;
};

struct order_job {
    order_side side[2];
    int32_t B, Hq, Hkv, D;
    int32_t pitch;         // D rounded up to 16
    int32_t heads;         // of both sides and all batch entries
    int32_t levels, level; // levels of large nodes; the current one
    int32_t samples;       // tokens that give a direction, at most ESA_ORDER_SAMPLE
    int32_t parts;         // thread blocks per node in the pass over coordinates
    const int32_t *kv_len; // [B] or null
    float *moment;         // [heads][pitch][pitch]
    bf16 *metric;          // [heads][pitch][pitch], zeros from D on; symmetric
    float *direction;      // [heads][nodes of a level][pitch]
};

// Room for n tokens in the kernel of small nodes, in bytes.
int order_block_bytes(int tokens, int pitch);
// The same for the samples of a direction.
int order_direction_bytes(int samples, int pitch);

// Each enqueues its launches for the job's level (metric, block: once).
esa_status order_metric(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                        cudaStream_t stream);
esa_status order_direction(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                           cudaStream_t stream);
// largest: an upper bound for the tokens of a node.
esa_status order_cut(esa_cuda_device *dev, const order_job &job, int32_t dtype, int64_t largest,
                     cudaStream_t stream);
esa_status order_block(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                       cudaStream_t stream);

#ifdef __CUDACC__
// One head of the job, as kernels use it.
template <class T> struct order_head {
    const order_side &s;
    const T *data; // first token
    int64_t at;    // first entry in perm, key and spare
    int32_t b, h;
    __device__ __forceinline__ order_head(const order_job &x, int head)
        : s(x.side[head >= x.side[1].at])
    {
        const int own = head - s.at;
        b = own / s.heads, h = own % s.heads;
        at = (int64_t)own * s.N;
        data = (const T *)s.data + b * s.stride[0] + h * s.stride[1];
    }
};

// Elements d .. d+7 of a row of D; 0 from D on.
template <class T> DEV void load_eight(float (&x)[8], const T *row, int d, int D, bool pieces)
{
    constexpr int N = packed<T>::N;
    if (pieces) {
#pragma unroll
        for (int i = 0; i < 8; i += N) {
            float part[N] = {};
            if (d + i < D) packed<T>{ __ldg((const uint4 *)(row + d + i)) }.unpack(part);
#pragma unroll
            for (int j = 0; j < N; ++j) x[i + j] = part[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = d + i < D ? to_float(row[d + i]) : 0.0f;
    }
}

// Writes rows token[0] .. token[n-1] minus their mean to dst as bf16, [rows][pitch + 8]; rows from
// n on are zeros. There are 32 bytes per thread at dst, which first hold partial sums. Ends with a
// barrier.
template <class T>
DEV void load_centred(bf16 *dst, const order_head<T> &head, const int32_t *token, int n, int rows,
                      int D, int pitch)
{
    float *const sums = (float *)dst; // [groups][pitch]
    const int pieces = pitch / 8, group = threadIdx.x / pieces, groups = blockDim.x / pieces,
              d = threadIdx.x % pieces * 8;
    const bool works = group < groups, vector = head.s.pieces;
    float mean[8] = {};
    if (works) {
#pragma unroll 4
        for (int i = group; i < n; i += groups) {
            float x[8];
            load_eight(x, head.data + token[i] * head.s.stride[2], d, D, vector);
#pragma unroll
            for (int j = 0; j < 8; ++j) mean[j] += x[j];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[group * pitch + d + j] = mean[j];
    }
    __syncthreads();
    if (works) {
#pragma unroll
        for (int j = 0; j < 8; ++j) mean[j] = 0.0f;
        for (int g = 0; g < groups; ++g)
#pragma unroll
            for (int j = 0; j < 8; ++j) mean[j] += sums[g * pitch + d + j];
#pragma unroll
        for (int j = 0; j < 8; ++j) mean[j] /= (float)n;
    }
    __syncthreads();
    if (works) {
#pragma unroll 4
        for (int i = group; i < rows; i += groups) {
            float x[8];
            uint4 out = make_uint4(0, 0, 0, 0);
            if (i < n) {
                load_eight(x, head.data + token[i] * head.s.stride[2], d, D, vector);
                out = make_uint4(pack2<bf16>(x[0] - mean[0], x[1] - mean[1]),
                                 pack2<bf16>(x[2] - mean[2], x[3] - mean[3]),
                                 pack2<bf16>(x[4] - mean[4], x[5] - mean[5]),
                                 pack2<bf16>(x[6] - mean[6], x[7] - mean[7]));
            }
            *(uint4 *)(dst + i * (pitch + 8) + d) = out;
        }
    }
    __syncthreads();
}
#endif
