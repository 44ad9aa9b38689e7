// exact_rows.cu - exact rows: copies the sampled queries of every block, and mends the output with
// their errors.
// SPDX-License-Identifier: Apache-2.0
//
// rules/exact_rows.h has the rule. Both kernels only move memory. Mending reads and writes o once:
// one thread block per query block first computes the mean error of its exact rows (a thread has
// some columns of all of them), then goes through its rows in 16-byte pieces.
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"
#include "rules/exact_rows.h"

namespace
{

enum { THREADS = 256, PIECES = 4 };

// A query block of the call.
struct block_place {
    int64_t b, h, i, rows; // rows: how many it has
    const int32_t *perm;   // its positions -> tokens, or null
    int64_t row0;
    __device__ __forceinline__ block_place(const esa_attn_args &a, int64_t item)
    {
        const int64_t head = item / a.nq;
        b = head / a.Hq, h = head % a.Hq, i = item % a.nq;
        row0 = i * a.block_q;
        rows = min((int64_t)a.block_q, a.Nq - row0);
        perm = a.perm_q ? a.perm_q + b * a.perm_q_stride[0] + h * a.perm_q_stride[1] + row0
                        : nullptr;
    }
    __device__ __forceinline__ int32_t token(int64_t r) const
    {
        return perm ? perm[r] : (int32_t)(row0 + r);
    }
};

// rows [B][Hq][nq*R][D] of pieces; columns: pieces per row; elements: elements per piece.
template <class Piece>
__global__ void __launch_bounds__(THREADS)
    take_kernel(esa_attn_args a, Piece *rows, int64_t total, int columns, int elements)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= total) return;
    const int64_t row = at / columns;
    const int column = (int)(at % columns), R = a.exact_rows;
    const block_place block(a, row / R);
    const int64_t r = esa_exact_row_at(block.rows, R, row % R);
    const int64_t from = block.b * a.q_stride[0] + block.h * a.q_stride[1] +
                         block.token(r) * a.q_stride[2];
    rows[at] = ((const Piece *)a.q)[from / elements + column];
}

// A part of a row: 16 bytes of T, or one element.
template <class T> struct wide_piece {
    static constexpr int N = 16 / (int)sizeof(T);
    alignas(16) T x[N];
};
template <class T> struct one_piece {
    static constexpr int N = 1;
    T x[1];
};

// The rows of a query block, worked out once: 64-bit divisions are dear.
struct row_table {
    int32_t token[256]; // of each row; no block is longer
    int8_t number[256]; // which exact row it is; -1: none
    float mend[ESA_MAX_HEAD_DIM];
};

// o += mend for the rows that are not exact, if there is something to add, and the exact output for
// those that are. o: the head's.
template <class T, class Piece>
__device__ __forceinline__ void mend_rows(const esa_attn_args &a, const row_table &table, T *o,
                                          const T *exact, int rows, bool some)
{
    const int columns = (int)a.D / Piece::N, total = rows * columns;
    for (int first = threadIdx.x; first < total; first += PIECES * THREADS) {
        Piece piece[PIECES];
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const int e = first + n * THREADS, r = e / columns, column = e % columns;
            if (e >= total) continue;
            const int number = table.number[r];
            if (number >= 0)
                piece[n] = ((const Piece *)(exact + (int64_t)number * a.D))[column];
            else if (some)
                piece[n] = ((const Piece *)(o + table.token[r] * a.o_stride[2]))[column];
        }
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const int e = first + n * THREADS, r = e / columns, column = e % columns;
            if (e >= total) continue;
            const bool exact_row = table.number[r] >= 0;
            if (!exact_row && !some) continue;
            if (!exact_row) {
#pragma unroll
                for (int j = 0; j < Piece::N; ++j)
                    round_to(&piece[n].x[j],
                             to_float(piece[n].x[j]) + table.mend[column * Piece::N + j]);
            }
            ((Piece *)(o + table.token[r] * a.o_stride[2]))[column] = piece[n];
        }
    }
}

// table.mend[D] = what the rows that are not exact get. Returns false if it is nothing. All threads
// of the thread block call it; o may change once it returns.
template <class T>
__device__ __forceinline__ bool block_mend(row_table &table, const esa_attn_args &a, const T *o,
                                           const T *exact, int rows)
{
    static_assert((int)THREADS >= (int)ESA_MAX_HEAD_DIM, "a thread has at most one column");
    __shared__ float warp_size[THREADS / 32], warp_spread[THREADS / 32];
    const int R = a.exact_rows, d = threadIdx.x;
    float size = 0.0f, spread = 0.0f, mean = 0.0f;
    if (d < a.D) {
        float error[ESA_MAX_EXACT_ROWS], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ESA_MAX_EXACT_ROWS; ++i)
            if (i < R) {
                const int r = (int)esa_exact_row_at(rows, R, i);
                error[i] = to_float(exact[(int64_t)i * a.D + d]) -
                           to_float(o[table.token[r] * a.o_stride[2] + d]);
                sum += error[i];
            }
        mean = sum / (float)R;
#pragma unroll
        for (int i = 0; i < ESA_MAX_EXACT_ROWS; ++i)
            if (i < R) spread += (error[i] - mean) * (error[i] - mean);
        size = mean * mean;
    }
    size = lanes_sum<32>(size), spread = lanes_sum<32>(spread);
    if (threadIdx.x % 32 == 0)
        warp_size[threadIdx.x / 32] = size, warp_spread[threadIdx.x / 32] = spread;
    __syncthreads();
    size = spread = 0.0f;
    for (int w = 0; w < THREADS / 32; ++w) size += warp_size[w], spread += warp_spread[w];
    const float share = esa_exact_share(spread, size, R);
    if (d < a.D) table.mend[d] = share * mean;
    __syncthreads();
    return share > 0.0f;
}

template <class T, class Piece>
__global__ void __launch_bounds__(THREADS)
    mend_kernel(esa_attn_args a, const T *exact_rows, const float *exact_lse)
{
    __shared__ row_table table;
    const block_place block(a, blockIdx.x);
    const int64_t mask_row = (block.b * a.mask_batch + block.h) * a.nq + block.i,
                  blocks = esa_ceil_div(key_length(a.kv_len, block.b, (int)a.Nk), a.block_k);
    if (esa_exact_already(blocks, a.count[mask_row], a.index + mask_row * a.cap)) return;
    const int R = a.exact_rows, rows = (int)block.rows, r = threadIdx.x;
    if (r < rows) {
        table.token[r] = block.token(r);
        table.number[r] = (int8_t)esa_exact_row_number(rows, R, r);
    }
    __syncthreads();
    const T *exact = exact_rows + (int64_t)blockIdx.x * R * a.D;
    T *o = (T *)a.o + block.b * a.o_stride[0] + block.h * a.o_stride[1];
    const bool some = rows > R && block_mend(table, a, o, exact, rows);
    mend_rows<T, Piece>(a, table, o, exact, rows, some);
    if (a.lse && r < rows && table.number[r] >= 0)
        a.lse[block.b * a.lse_stride[0] + block.h * a.lse_stride[1] +
              table.token[r] * a.lse_stride[2]] =
            exact_lse[(int64_t)blockIdx.x * R + table.number[r]];
}

template <class T>
void mend_launch(const esa_attn_args *a, const void *exact, const float *lse, cudaStream_t stream)
{
    const unsigned grid = (unsigned)(a->B * a->Hq * a->nq);
    if (rows_in_pieces({ a->o, a->o_stride, { a->B, a->Hq, a->Nq } }, a->D, sizeof(T), 16))
        mend_kernel<T, wide_piece<T>><<<grid, THREADS, 0, stream>>>(*a, (const T *)exact, lse);
    else
        mend_kernel<T, one_piece<T>><<<grid, THREADS, 0, stream>>>(*a, (const T *)exact, lse);
}

template <class Piece>
void take_launch(const esa_attn_args *a, void *rows, int64_t element, cudaStream_t stream)
{
    const int elements = (int)(sizeof(Piece) / element), columns = (int)(a->D / elements);
    const int64_t total = a->B * a->Hq * a->nq * a->exact_rows * columns;
    take_kernel<Piece><<<(unsigned)ceil_div(total, (int64_t)THREADS), THREADS, 0, stream>>>(
        *a, (Piece *)rows, total, columns, elements);
}

} // namespace

esa_status exact_take(esa_cuda_device *dev, const esa_attn_args *a, void *rows, void *stream_handle)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_handle;
    const int64_t element = element_bytes(a->dtype);
    if (rows_in_pieces({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, a->D, element, 16))
        take_launch<uint4>(a, rows, element, stream);
    else if (element == 4)
        take_launch<uint32_t>(a, rows, element, stream);
    else
        take_launch<uint16_t>(a, rows, element, stream);
    return launch_check(dev, "taking exact rows");
}

esa_status exact_mend(esa_cuda_device *dev, const esa_attn_args *a, const void *o, const float *lse,
                      void *stream_handle)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_handle;
    if (a->dtype == ESA_DTYPE_F32)
        mend_launch<float>(a, o, lse, stream);
    else if (a->dtype == ESA_DTYPE_F16)
        mend_launch<__half>(a, o, lse, stream);
    else
        mend_launch<__nv_bfloat16>(a, o, lse, stream);
    return launch_check(dev, "mending with exact rows");
}
