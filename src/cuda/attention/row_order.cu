// row_order.cu - the order in which the rows of a head are processed: heaviest first, ties by row.
// The weight of a row is its number of listed blocks, and fine means count as blocks of Bk of them.
// SPDX-License-Identifier: Apache-2.0
//
// Only masks need it; without one the kernels know which rows are heavy. The key of a row is weight
// << 16 | 65535 - row. All keys of a head differ, and the place of a row is the number of larger
// keys. Up to ORDER_RUN rows are ranked against each other in shared memory, spread over many
// thread blocks. More rows are sorted in runs of ORDER_RUN, and a second launch adds up the places
// of each key in all runs, found by bisection.
#include "cuda/attention/prepare.cuh"

namespace
{

enum { RANK_THREADS = 128, MERGE_THREADS = 256 };

struct order_plan {
    const int32_t *count;
    int32_t *next, *order;
    uint32_t *runs;
    int64_t mask_batch;
    int32_t H, nq;
    const int32_t *fine_count; // null: no fine level
    int32_t fine, block_k;
};

__device__ uint32_t weight_of(const order_plan &p, int64_t row)
{
    int weight = p.count[row];
    if (p.fine_count) weight += ceil_div(p.fine_count[row] * p.fine, p.block_k);
    return (uint32_t)min(weight, 65535);
}

__device__ int row_of(uint32_t key) { return 65535 - (int)(key & 65535u); }

// grid (heads, row tiles). A tile never spans two runs.
__global__ void __launch_bounds__(RANK_THREADS) rank_kernel(order_plan p)
{
    __shared__ uint4 shared[ORDER_RUN / 4];
    uint32_t *keys = (uint32_t *)shared;
    const int64_t bh = blockIdx.x;
    const int64_t row0 = (bh / p.H * p.mask_batch + bh % p.H) * p.nq;
    const int tile = blockIdx.y * RANK_THREADS;
    const int from = tile / ORDER_RUN * ORDER_RUN, n = min((int)ORDER_RUN, p.nq - from),
              padded = ceil_div(n, 4) * 4;
    if (bh == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.next = 0;
    for (int i = threadIdx.x; i < padded; i += RANK_THREADS)
        // Padding: 0 is below every key.
        keys[i] = i < n ? weight_of(p, row0 + from + i) << 16 | (65535u - from - i) : 0;
    __syncthreads();

    const int i = tile + threadIdx.x;
    if (i >= p.nq) return;
    const uint32_t mine = keys[i - from];
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < padded / 4; ++j) {
        const uint4 x = shared[j];
        rank += (x.x > mine) + (x.y > mine) + (x.z > mine) + (x.w > mine);
    }
    if (p.nq <= ORDER_RUN)
        p.order[bh * p.nq + rank] = row_of(mine);
    else
        p.runs[bh * p.nq + from + rank] = mine;
}

// Number of keys in a descending run that are larger than key.
__device__ int larger(const uint32_t *run, int n, uint32_t key)
{
    int low = 0, high = n;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (run[middle] > key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(order_plan p)
{
    const int64_t bh = blockIdx.x;
    const int i = blockIdx.y * MERGE_THREADS + threadIdx.x;
    if (i >= p.nq) return;
    const uint32_t *runs = p.runs + bh * p.nq, mine = runs[i];
    int rank = 0;
    for (int from = 0; from < p.nq; from += ORDER_RUN)
        rank += larger(runs + from, min((int)ORDER_RUN, p.nq - from), mine);
    p.order[bh * p.nq + rank] = row_of(mine);
}

} // namespace

esa_status row_order(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                     cudaStream_t stream)
{
    if (!a->count)
        return device_check(dev, cudaMemsetAsync(p->next, 0, sizeof *p->next, stream),
                            "clearing the tile counter");
    const order_plan plan = { a->count,       p->next,        p->order,      p->runs, a->mask_batch,
                              (int32_t)a->Hq, (int32_t)a->nq, a->fine_count, a->fine, a->block_k };
    const unsigned heads = (unsigned)(a->B * a->Hq);
    rank_kernel<<<dim3(heads, (unsigned)ceil_div(a->nq, (int64_t)RANK_THREADS)), RANK_THREADS, 0,
                  stream>>>(plan);
    const esa_status status = launch_check(dev, "ordering rows");
    if (status || a->nq <= ORDER_RUN) return status;
    merge_kernel<<<dim3(heads, (unsigned)ceil_div(a->nq, (int64_t)MERGE_THREADS)), MERGE_THREADS, 0,
                   stream>>>(plan);
    return launch_check(dev, "merging the orders of rows");
}
