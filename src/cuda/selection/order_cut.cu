// order_cut.cu - coordinates of the tokens of large nodes, and the partition by them.
// SPDX-License-Identifier: Apache-2.0
//
// The pass over coordinates reads every row once, in 16-byte pieces where it can. LANES lanes share
// a row and hold their part of w in registers. A warp sums several rows at once: in each step lanes
// exchange half of their sums, so the sums of eight rows cost eight shuffles.
//
// The partition is one thread block per node: a radix select of the cut's key (11, 11 and 10 bits),
// then every warp moves its own run of positions, so that both halves keep their order.
#include "cuda/selection/order.cuh"

namespace
{

enum { KEY_THREADS = 256, KEY_TOKENS = 1024, ROWS = 8, BINS = 2048 };

// Thread blocks of (head, node, part of its tokens). Piece: packed<T> or single<T>; a lane holds
// PER pieces that are LANES pieces apart.
template <class T, class Piece, int LANES, int PER>
__global__ void __launch_bounds__(KEY_THREADS) key_kernel(const __grid_constant__ order_job x)
{
    constexpr int N = Piece::N, AT_ONCE = 32 / LANES * ROWS; // rows of a warp
    const int at = blockIdx.x / x.parts, part = blockIdx.x % x.parts;
    const order_head<T> head(x, at >> x.level);
    const uint4 node = head.s.nodes[(1 << x.level) + (at & ((1 << x.level) - 1))];
    const int lane = threadIdx.x % 32, own = lane % LANES, n = (int)node.y;
    const int end = min(n, (part + 1) * KEY_TOKENS);
    if (n <= (int)head.s.small) return;
    const int32_t *const perm = head.s.perm + head.at + node.x;
    uint32_t *const key = head.s.key + head.at + node.x;
    float w[PER][N];
#pragma unroll
    for (int i = 0; i < PER; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int d = (own + i * LANES) * N + j;
            w[i][j] = d < x.D ? x.direction[(int64_t)at * x.pitch + d] : 0.0f;
        }
    for (int first = part * KEY_TOKENS + threadIdx.x / 32 * AT_ONCE; first < end;
         first += KEY_THREADS / 32 * AT_ONCE) {
        float sum[ROWS];
        const T *row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int p = min(first + r * (32 / LANES) + lane / LANES, end - 1);
            row[r] = head.data + perm[p] * head.s.stride[2];
            sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            const int d = (own + i * LANES) * N;
            Piece piece[ROWS] = {};
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (d < x.D) piece[r] = *(const Piece *)(row[r] + d);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float v[N];
                piece[r].unpack(v);
#pragma unroll
                for (int j = 0; j < N; ++j)
                    if (d < x.D) sum[r] = fmaf(v[j], w[i][j], sum[r]);
            }
        }
        // Row r of a group ends in lanes whose highest bits are r.
        int offset = LANES / 2;
#pragma unroll
        for (int half = ROWS / 2; half; half /= 2, offset /= 2) {
            const bool upper = lane & offset;
#pragma unroll
            for (int r = 0; r < half; ++r) {
                const float give = upper ? sum[r] : sum[r + half],
                            keep = upper ? sum[r + half] : sum[r];
                sum[r] = keep + __shfl_xor_sync(~0u, give, offset);
            }
        }
#pragma unroll
        for (; offset; offset /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], offset);
        const int p = first + own / (LANES / ROWS) * (32 / LANES) + lane / LANES;
        if (own % (LANES / ROWS) == 0 && p < end) key[p] = esa_rank_bits(sum[0]);
    }
}

// ---- the partition ----

template <int THREADS> struct partition_shared {
    uint32_t bins[BINS];
    uint32_t sums[THREADS / 32], less[THREADS / 32], equal[THREADS / 32];
    uint32_t bar, left; // the key of the cut so far; how many of the equal ones go first
};

// Moves bar and left on by the digit at `shift` in which left falls.
template <int THREADS> DEV void choose_digit(partition_shared<THREADS> &s, uint32_t left, int shift)
{
    constexpr int PER = BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) own += s.bins[threadIdx.x * PER + i];
    uint32_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += before;
    }
    if (lane == 31) s.sums[warp] = upto;
    __syncthreads();
    const uint32_t part = lane < warp && lane < THREADS / 32 ? s.sums[lane] : 0;
    upto += __reduce_add_sync(~0u, part);
    if (upto - own < left && left <= upto) { // in exactly one thread
        uint32_t rest = left - (upto - own), digit = threadIdx.x * PER;
        for (; rest > s.bins[digit]; ++digit) rest -= s.bins[digit];
        s.bar |= digit << shift;
        s.left = rest;
    }
    __syncthreads();
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) partition_kernel(const __grid_constant__ order_job x)
{
    __shared__ partition_shared<THREADS> s;
    constexpr int WARPS = THREADS / 32;
    const order_head<char> head(x, blockIdx.x >> x.level);
    const uint4 node = head.s.nodes[(1 << x.level) + (blockIdx.x & ((1 << x.level) - 1))];
    const int n = (int)node.y, k = (int)(node.z - node.x), lane = threadIdx.x % 32,
              warp = threadIdx.x / 32;
    if (n <= (int)head.s.small) return;
    const uint32_t *const key = head.s.key + head.at + node.x;
    int32_t *const perm = head.s.perm + head.at + node.x, *const spare = head.s.spare + head.at +
                                                                         node.x;
    if (threadIdx.x == 0) s.bar = 0, s.left = (uint32_t)k;
    uint32_t known = 0;
    for (int round = 0; round < 3; ++round) {
        const int bits = round < 2 ? 11 : 10, shift = round == 0 ? 21 : round == 1 ? 10 : 0;
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        const uint32_t bar = s.bar, left = s.left;
#pragma unroll 4
        for (int first = warp * 32; first < n; first += THREADS) {
            const int i = first + lane;
            const uint32_t mine = i < n ? key[i] : 0;
            const bool counts = i < n && ((mine ^ bar) & known) == 0;
            const uint32_t digit = mine >> shift & ((1u << bits) - 1);
            // Many keys share a digit, so a warp adds them up first.
            const uint32_t alike = __match_any_sync(~0u, counts ? digit : ~0u);
            if (counts && lane == __ffs(alike) - 1) atomicAdd(&s.bins[digit], __popc(alike));
        }
        __syncthreads();
        choose_digit(s, left, shift);
        known |= ((1u << bits) - 1) << shift;
    }
    const uint32_t bar = s.bar, left = s.left;
    const int run = (int)ceil_div<int64_t>(n, THREADS) * 32, from = min(n, warp * run),
              to = min(n, from + run);
    uint32_t less = 0, equal = 0;
#pragma unroll 4
    for (int i = from + lane; i < to; i += 32) {
        const uint32_t mine = key[i];
        less += mine < bar, equal += mine == bar;
    }
    less = __reduce_add_sync(~0u, less), equal = __reduce_add_sync(~0u, equal);
    if (lane == 0) s.less[warp] = less, s.equal[warp] = equal;
    __syncthreads();
    const bool before = lane < warp && lane < WARPS;
    less = __reduce_add_sync(~0u, before ? s.less[lane] : 0);
    equal = __reduce_add_sync(~0u, before ? s.equal[lane] : 0);
    uint32_t low = less + min(equal, left); // tokens of the first half before this run
    const uint32_t below = (1u << lane) - 1;
#pragma unroll 4
    for (int first = from; first < to; first += 32) {
        const int i = first + lane;
        const uint32_t mine = i < to ? key[i] : 0xffffffffu;
        const uint32_t same = __ballot_sync(~0u, i < to && mine == bar);
        const bool goes = i < to &&
                          (mine < bar || (mine == bar && equal + __popc(same & below) < left));
        const uint32_t firsts = __ballot_sync(~0u, goes), rank = low + __popc(firsts & below);
        if (i < to) spare[goes ? rank : k + (i - rank)] = perm[i];
        low += __popc(firsts), equal += __popc(same);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) perm[i] = spare[i];
}

// ---- launches ----

template <class T>
void launch_keys(const order_job &x, unsigned grid, bool vector, cudaStream_t stream)
{
    using piece = packed<T>;
    const int pieces = ceil_div(x.D, (int)piece::N);
    if (!vector)
        key_kernel<T, single<T>, 32, 8><<<grid, KEY_THREADS, 0, stream>>>(x);
    else if (pieces <= 8)
        key_kernel<T, piece, 8, 1><<<grid, KEY_THREADS, 0, stream>>>(x);
    else if (pieces <= 16)
        key_kernel<T, piece, 16, 1><<<grid, KEY_THREADS, 0, stream>>>(x);
    else if (pieces <= 32)
        key_kernel<T, piece, 32, 1><<<grid, KEY_THREADS, 0, stream>>>(x);
    else
        key_kernel<T, piece, 32, 2><<<grid, KEY_THREADS, 0, stream>>>(x);
}

} // namespace

esa_status order_cut(esa_cuda_device *dev, const order_job &job, int32_t dtype, int64_t largest,
                     cudaStream_t stream)
{
    order_job x = job;
    x.parts = (int)ceil_div<int64_t>(largest, KEY_TOKENS);
    const int64_t nodes = (int64_t)x.heads << x.level, blocks = nodes * x.parts;
    if (blocks > INT32_MAX)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "an adaptive order of %lld pieces is too large", (long long)blocks);
    const bool vector = x.side[0].pieces && x.side[1].pieces;
    if (dtype == ESA_DTYPE_F32)
        launch_keys<float>(x, (unsigned)blocks, vector, stream);
    else if (dtype == ESA_DTYPE_F16)
        launch_keys<f16>(x, (unsigned)blocks, vector, stream);
    else
        launch_keys<bf16>(x, (unsigned)blocks, vector, stream);
    if (largest > 4096)
        partition_kernel<1024><<<(unsigned)nodes, 1024, 0, stream>>>(x);
    else
        partition_kernel<256><<<(unsigned)nodes, 256, 0, stream>>>(x);
    return launch_check(dev, "the cuts of an order");
}
