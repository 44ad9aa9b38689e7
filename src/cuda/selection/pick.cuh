// pick.cuh - one warp picks one row: forced blocks, then the best by value up to the quota. The
// best block is always kept.
// SPDX-License-Identifier: Apache-2.0
//
// Values become integers of the same order (esa_rank_bits). The bar that the wanted number of
// candidates reaches is found bit by bit from the top, counting over the warp. Candidates equal to
// the bar go by index, lower ones first. It needs no sorting and no float compares, and picks the
// same blocks as esa_rules_pick. A lane holds the values of blocks lane, lane + 32, ... in PER
// registers. With PER = 0, for rows too long for registers, it reads them again for every bit.
#pragma once

#include "rules/rank.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/selection/select.cuh"

// Rows per thread block; the most blocks of a row that fit into registers.
enum { PICK_WARPS = 8, PICK_LONGEST = 2048 };

struct pick_args {
    select_rules rules;
    const int32_t *quota;
    int32_t *count;
    uint16_t *index;
    unsigned long long *kept; // facts[1]
    int64_t row0, rows, nq, Hq, nk, cap;
    bool quota_per_head;
    double cdf;
};

pick_args pick_args_of(const esa_select_args *a, const select_rules &rules, const pick_job &job,
                       const esa_cuda_mask *mask);

#ifdef __CUDACC__
static constexpr unsigned ALL_LANES = 0xffffffffu;

// Writes the list of a row: call put for 32 consecutive blocks at a time, ascending.
struct row_writer {
    uint16_t *index;
    int n = 0;
    __device__ __forceinline__ void put(int j, bool keep)
    {
        const unsigned ballot = __ballot_sync(ALL_LANES, keep), lane = threadIdx.x % 32;
        if (keep) index[n + __popc(ballot & ((1u << lane) - 1))] = (uint16_t)j;
        n += __popc(ballot);
    }
};

// The ranks of the candidates of a row (visible blocks that are not forced); 0 for all other blocks
// and for NaN.
template <class Source, int PER> struct pick_row {
    static constexpr bool HELD = PER > 0;
    const Source &source;
    const uint8_t *column;
    int64_t at; // row of the source
    int visible, diagonal, dense;
    uint32_t held[HELD ? PER : 1];
    uint64_t forced_bits;

    __device__ __forceinline__ int block(int t) const { return t * 32 + threadIdx.x % 32; }
    __device__ __forceinline__ bool find_forced(int j) const
    {
        return j < visible && (dense || j >= diagonal || column[j]);
    }
    __device__ __forceinline__ bool forced(int t) const
    {
        if constexpr (HELD)
            return forced_bits >> t & 1;
        else
            return find_forced(block(t));
    }
    __device__ __forceinline__ bool candidate(int t) const
    {
        return block(t) < visible && !forced(t);
    }
    __device__ __forceinline__ uint32_t bits(int t) const
    {
        if constexpr (HELD)
            return held[t];
        else
            return candidate(t) ? esa_rank_bits(source(at, block(t))) : 0;
    }
    __device__ __forceinline__ void load()
    {
        forced_bits = 0;
        if constexpr (HELD) {
#pragma unroll
            for (int t = 0; t < PER; ++t) {
                const int j = block(t);
                const bool is_forced = find_forced(j);
                held[t] = j < visible && !is_forced ? esa_rank_bits(source(at, j)) : 0;
                forced_bits |= (uint64_t)is_forced << t;
            }
        }
    }
    template <class F> __device__ __forceinline__ void each(F f) const
    {
        if constexpr (HELD) {
#pragma unroll
            for (int t = 0; t < PER; ++t) f(t);
        } else {
            for (int t = 0; t * 32 < visible; ++t) f(t);
        }
    }
    // Number of candidates with rank at least `bar`, which is not 0.
    __device__ __forceinline__ int reaching(uint32_t bar) const
    {
        int n = 0;
        each([&](int t) { n += bits(t) >= bar; });
        return __reduce_add_sync(ALL_LANES, n);
    }
};

// The best of all visible blocks, forced or not.
template <class Row> static __device__ int best_block(const Row &row)
{
    uint64_t best = 0;
    for (int j = threadIdx.x % 32; j < row.visible; j += 32)
        best = max(best, esa_rank_key(row.source(row.at, j), j));
    return (int)esa_rank_index(lanes_max<32>(best));
}

// Number of candidates, best first, that bring the mass of a row to cdf of the whole
// (esa_ada_pick_fixed). Values are not negative.
template <class Row> static __device__ int taken_by_mass(const Row &row, int candidates, double cdf)
{
    double forced = 0.0, open = 0.0;
    for (int j = threadIdx.x % 32; j < row.visible; j += 32) {
        const double x = (double)row.source(row.at, j);
        if (row.find_forced(j))
            forced += x;
        else
            open += x;
    }
    forced = lanes_sum<32>(forced), open = lanes_sum<32>(open);
    const double target = cdf * (forced + open);
    // The top bit of a rank gives a non-negative value back.
    auto with = [&](uint32_t bar) {
        double sum = 0.0;
        row.each([&](int t) {
            if (row.bits(t) >= bar) sum += (double)__uint_as_float(row.bits(t) ^ 0x80000000u);
        });
        return forced + lanes_sum<32>(sum);
    };
    if (forced >= target) return 0;
    if (!(forced + open >= target)) return candidates; // NaN
    uint32_t bar = 0x80000000u;
    for (uint32_t bit = 1u << 30; bit; bit >>= 1)
        if (with(bar | bit) >= target) bar |= bit;
    int n = row.reaching(bar + 1);
    double sum = with(bar + 1);
    while (n < candidates && !(sum >= target)) {
        sum += (double)__uint_as_float(bar ^ 0x80000000u);
        n++;
    }
    return n;
}

template <class Source, int PER, bool CDF>
static __device__ void pick_one(const Source &source, const pick_args &x, int64_t at,
                                row_writer &out)
{
    const int64_t row_of_all = x.row0 + at, b = row_of_all / (x.Hq * x.nq), i = row_of_all % x.nq,
                  rule = b * x.nq + i;
    const int visible = x.rules.visible[rule], diagonal = x.rules.diagonal[rule],
              dense = x.rules.dense[rule];
    const int forced = dense ? visible
                             : visible - diagonal + x.rules.before[b * (x.nk + 1) + diagonal];
    pick_row<Source, PER> row = { source, x.rules.column + b * x.nk, at, visible, diagonal, dense };
    int quota = x.quota[x.quota_per_head ? row_of_all : rule], best = -1;
    row.load();
    if (CDF && forced < visible)
        quota = min(quota, forced + taken_by_mass(row, visible - forced, x.cdf));

    uint32_t bar = 0; // candidates above it are kept, and the first `ties` equal to it
    int ties = visible;
    // The budget is used up, but a row always keeps its best block.
    if (forced < visible && quota <= forced) {
        best = best_block(row);
        bar = 0xffffffffu; // no number ranks this high
    } else if (forced < visible && quota < visible) {
        const int need = quota - forced;
        for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
            const int n = row.reaching(bar | bit);
            if (n < need) continue;
            bar |= bit;
            if (n == need) break; // all at or above the bar
        }
        ties = need - row.reaching(bar + 1);
    }
    int met = 0; // candidates at the bar so far
    row.each([&](int t) {
        const uint32_t u = row.bits(t);
        const bool tied = u == bar && row.candidate(t);
        const unsigned ballot = __ballot_sync(ALL_LANES, tied);
        const bool chosen = tied && met + __popc(ballot & ((1u << threadIdx.x % 32) - 1)) < ties;
        met += __popc(ballot);
        out.put(row.block(t), row.forced(t) || chosen || u > bar || row.block(t) == best);
    });
}

template <class Source, int PER, bool CDF>
static __global__ void __launch_bounds__(PICK_WARPS * 32)
    pick_kernel(const __grid_constant__ pick_args x, const Source source)
{
    __shared__ int kept[PICK_WARPS];
    const int warp = threadIdx.x / 32;
    const int64_t at = (int64_t)blockIdx.x * PICK_WARPS + warp;
    row_writer out = { x.index + (x.row0 + at) * x.cap };
    if (at < x.rows) {
        pick_one<Source, PER, CDF>(source, x, at, out);
        if (threadIdx.x % 32 == 0) x.count[x.row0 + at] = out.n;
    }
    if (threadIdx.x % 32 == 0) kept[warp] = out.n;
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int w = 0; w < PICK_WARPS; ++w) sum += kept[w];
        atomicAdd(x.kept, (unsigned long long)sum);
    }
}

// Picks with the kernel for rows of x.nk blocks.
template <class Source, bool CDF>
static void pick_with(const pick_args &x, const Source &source, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div<int64_t>(x.rows, PICK_WARPS),
                   threads = PICK_WARPS * 32;
    if (x.nk <= 256)
        pick_kernel<Source, 8, CDF><<<grid, threads, 0, stream>>>(x, source);
    else if (x.nk <= 640)
        pick_kernel<Source, 20, CDF><<<grid, threads, 0, stream>>>(x, source);
    else if (x.nk <= PICK_LONGEST)
        pick_kernel<Source, PICK_LONGEST / 32, CDF><<<grid, threads, 0, stream>>>(x, source);
    else
        pick_kernel<Source, 0, CDF><<<grid, threads, 0, stream>>>(x, source);
}
#endif
