// SPDX-License-Identifier: Apache-2.0
//
// Host side: tensor maps, the row order, the launch.
#pragma once

#include "kernel.cuh"

// order[bh][rank] = row, heaviest first, ties by row: a fixed order whatever the machine does. One
// block per head; also zeroes the tile counter. Quadratic in nq, which at a few hundred rows is
// microseconds.
static __global__ void order_rows(int32_t *next, int32_t *order, const int32_t *count, int nq)
{
    extern __shared__ int32_t c[]; // [nq]
    count += (int64_t)blockIdx.x * nq;
    order += (int64_t)blockIdx.x * nq;
    for (int i = threadIdx.x; i < nq; i += blockDim.x) c[i] = count[i];
    if (blockIdx.x == 0 && threadIdx.x == 0) *next = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < nq; i += blockDim.x) {
        const int mine = c[i];
        int rank = 0;
        for (int j = 0; j < nq; ++j) rank += c[j] > mine || (c[j] == mine && j < i);
        order[rank] = i;
    }
}

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn *driver_encode()
{
    void *fn = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess)
        return nullptr;
    return found == cudaDriverEntryPointSuccess ? (encode_fn *)fn : nullptr;
}

// x [B,H,N,D] seen as (64, N, D/64, H, B), so that one copy of (64, rows, chunks) lands as
// [chunk][row][64], the layout wgmma reads under the 128-byte swizzle. Rows past N read as zero.
static bool make_map(CUtensorMap *map, encode_fn *encode, const ladder_args *a, const void *x,
                     const int64_t *stride, int N, int rows, int chunks)
{
    const cuuint64_t dims[5] = { 64, (cuuint64_t)N, (cuuint64_t)(a->D / 64), (cuuint64_t)a->H,
                                 (cuuint64_t)a->B };
    const cuuint64_t bytes[4] = { (cuuint64_t)stride[2] * 2, 128, (cuuint64_t)stride[1] * 2,
                                  (cuuint64_t)stride[0] * 2 };
    const cuuint32_t box[5] = { 64, (cuuint32_t)rows, (cuuint32_t)chunks, 1, 1 };
    const cuuint32_t ones[5] = { 1, 1, 1, 1, 1 };
    return encode(map,
                  a->dtype == LADDER_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  5, (void *)x, dims, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int D, class P> static int launch(const ladder_args *a, cudaStream_t stream)
{
    encode_fn *const encode = driver_encode();
    CUtensorMap qm, km, vm;
    const int chunks = a->Bk == TILE_K ? D / 64 : 1;
    if (!encode || !make_map(&qm, encode, a, a->q, a->q_stride, a->Nq, TILE_Q, D / 64) ||
        !make_map(&km, encode, a, a->k, a->k_stride, a->Nk, a->Bk, chunks) ||
        !make_map(&vm, encode, a, a->v, a->v_stride, a->Nk, a->Bk, chunks))
        return -1;

    kernel_args k = {};
    k.count = a->count, k.index = a->index;
    k.order = a->count ? a->work + 1 : nullptr;
    k.next = a->work;
    k.o = a->o, k.lse = a->lse;
    for (int i = 0; i < 3; ++i) k.o_stride[i] = a->o_stride[i];
    k.H = a->H, k.Nq = a->Nq, k.Nk = a->Nk, k.Bk = a->Bk, k.cap = a->cap;
    k.nq = (a->Nq + a->Bq - 1) / a->Bq;
    k.split = a->Bq / TILE_Q;
    k.tiles = a->B * a->H * k.nq * k.split;
    k.scale = a->scale;

    constexpr int bytes = smem_plan<D, P::template STAGES<D>>::block_bytes(P::TEAMS);
    cudaError_t e = cudaFuncSetAttribute(attn_kernel<T, D, P>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    if (a->count)
        // + 4: the unrolled loop reads ahead
        order_rows<<<a->B * a->H, 512, (k.nq + 4) * 4, stream>>>(k.next, a->work + 1, a->count,
                                                                 k.nq);
    else if ((e = cudaMemsetAsync(k.next, 0, 4, stream)) != cudaSuccess)
        return e;

    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    attn_kernel<T, D, P>
        <<<min(sms, k.tiles), block_shape<P>::THREADS, bytes, stream>>>(k, qm, km, vm);
    return cudaGetLastError();
}

// The table of instantiations of one version: P128 and P64 are its policies by head dim.
template <class P128, class P64> static int dispatch(const ladder_args *a, void *stream)
{
    const bool shape = (a->D == 64 || a->D == 128) && (a->Bk == 64 || a->Bk == 128) &&
                       a->Bq % TILE_Q == 0 && a->Nk > 0;
    if (!shape) return -1;
    cudaStream_t s = (cudaStream_t)stream;
    if (a->dtype == LADDER_BF16)
        return a->D == 128 ? launch<bf16, 128, P128>(a, s) : launch<bf16, 64, P64>(a, s);
    return a->D == 128 ? launch<f16, 128, P128>(a, s) : launch<f16, 64, P64>(a, s);
}
