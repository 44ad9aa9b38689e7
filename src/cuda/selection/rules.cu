// rules.cu - which blocks each row sees, which ones it must keep and how many it may keep, for all
// batch entries in one launch.
// SPDX-License-Identifier: Apache-2.0
//
// One thread block per batch entry. The rules are the pure functions of rules/rows.h, as on the
// CPU. kv_len is read only here, on the device, so a captured graph follows it.
#include "cuda/selection/select.cuh"

select_rules rules_carve(carve &c, const esa_select_args *a)
{
    select_rules r;
    r.kv_len = c.take<int32_t>(a->B);
    r.existing = c.take<int32_t>(a->B);
    r.seen = c.take<int64_t>(a->B);
    r.visible = c.take<int32_t>(a->B * a->nq);
    r.diagonal = c.take<int32_t>(a->B * a->nq);
    r.least = c.take<int32_t>(a->B * a->nq);
    r.dense = c.take<uint8_t>(a->B * a->nq);
    r.column = c.take<uint8_t>(a->B * a->nk);
    r.before = c.take<int32_t>(a->B * (a->nk + 1));
    return r;
}

namespace
{

enum { THREADS = 1024 };

// Sum of the blocks that the rows of batch entry b see, by the whole thread block.
__device__ uint32_t seen_of(const esa_select_args &a, int64_t b, uint32_t *shared)
{
    const int64_t kv_len = esa_kv_len(a.params.kv_len ? a.params.kv_len[b] : a.Nk, a.Nk),
                  existing = esa_blocks_existing(&a, kv_len);
    uint32_t n = 0;
    for (int64_t i = threadIdx.x; i < a.nq; i += THREADS)
        n += (uint32_t)esa_row_visible(&a, kv_len, existing, i);
    return block_sum(n, shared);
}

__global__ void __launch_bounds__(THREADS, 1)
    rules_kernel(const __grid_constant__ esa_select_args a, select_rules r, int32_t *quota,
                 int64_t *facts)
{
    __shared__ uint32_t shared[32];
    const int64_t b = blockIdx.x,
                  kv_len = esa_kv_len(a.params.kv_len ? a.params.kv_len[b] : a.Nk, a.Nk);
    const int64_t existing = esa_blocks_existing(&a, kv_len);
    int32_t *visible = r.visible + b * a.nq, *least = r.least + b * a.nq,
            *before = r.before + b * (a.nk + 1);

    uint32_t forced = 0;
    for (int64_t first = 0; first < a.nk; first += THREADS) {
        const int64_t j = first + threadIdx.x;
        const bool flag = j < a.nk && esa_column_forced(&a, kv_len, existing, j);
        uint32_t all;
        const uint32_t rank = block_rank(flag, &all, shared);
        if (j < a.nk) {
            r.column[b * a.nk + j] = flag;
            before[j] = (int32_t)(forced + rank);
        }
        forced += all;
    }
    if (threadIdx.x == 0) {
        before[a.nk] = (int32_t)forced;
        r.kv_len[b] = (int32_t)kv_len;
        r.existing[b] = (int32_t)existing;
    }
    __syncthreads();

    uint32_t seen = 0, wish = 0;
    for (int64_t i = threadIdx.x; i < a.nq; i += THREADS) {
        const int64_t v = esa_row_visible(&a, kv_len, existing, i),
                      d = esa_row_diagonal(&a, kv_len, v, i);
        const int32_t dense = esa_row_dense(&a, i);
        visible[i] = (int32_t)v;
        r.diagonal[b * a.nq + i] = (int32_t)d;
        r.dense[b * a.nq + i] = (uint8_t)dense;
        least[i] = esa_row_least((int32_t)v, (int32_t)d, dense, before[d]);
        seen += (uint32_t)v;
        if (quota) wish += (uint32_t)esa_row_wish(&a.params, v);
    }
    seen = block_sum(seen, shared);
    if (threadIdx.x == 0) r.seen[b] = seen;
    if (facts && b == 0) {
        int64_t all = seen;
        for (int64_t other = 1; other < a.B; other++) all += seen_of(a, other, shared);
        if (threadIdx.x == 0) {
            facts[0] = a.Hq * all;
            facts[1] = facts[2] = 0;
        }
    }
    if (!quota) return;
    wish = block_sum(wish, shared);
    spread_rows(quota + b * a.nq, visible, least, a.nq,
                esa_selector_has(a.params.selector, ESA_ROW_ONE_TOTAL)
                    ? esa_ada_total(&a.params, seen)
                    : wish,
                shared);
}

} // namespace

esa_status rules_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                        int32_t *quota, int64_t *facts, cudaStream_t stream)
{
    rules_kernel<<<(unsigned)a->B, THREADS, 0, stream>>>(*a, rules, quota, facts);
    return launch_check(dev, "finding what the rows see");
}
