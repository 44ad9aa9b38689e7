// sm90_score.cu - the score pass on Hopper: wgmma on keys from bulk copies, with four warpgroups
// that overlap on their own.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block holds 256 sampled queries in shared memory, 64 for each of four consumer
// warpgroups, and streams keys, 128 per step, through a ring that a producer warp fills. At D = 128
// a step takes 2048 cycles of the tensor cores and 2048 of the special function unit, so both must
// run all the time: while some warpgroups wait for products, others compute exponentials. With 256
// rows a key block is read from L2 once per 2048 cycles: 16 bytes per cycle, well below the rate of
// L2.
//
// Issue slots are scarce too, so the maximum of a key block is not computed. Any reference will do
// as long as the sum neither overflows nor vanishes beside the largest of the row. A row takes the
// largest score of the first block of its part and keeps it. If a sum still overflows, that block
// is done again with its own maximum.
#include "cuda/selection/entropy.cuh"
#include "cuda/runtime/sm90_ptx.cuh"
#include "cuda/runtime/views.cuh"

namespace
{

constexpr int STEP = 128;    // keys
constexpr int UNIT = 64;     // rows of one product
constexpr int CONSUMERS = 4; // warpgroups
constexpr int TILE = CONSUMERS * UNIT;
constexpr int THREADS = 128 * (CONSUMERS + 1);
// 32 + 4 * 112 = 5 * 96: what the launch allocates.
constexpr int PRODUCER_REGS = 32, CONSUMER_REGS = 112;

template <int D> struct plan {
    static constexpr int STAGES = D == 128 ? 5 : 10;
    static constexpr int CHUNK = STEP * 128; // [128 keys][64 elements], swizzled
    static constexpr int STAGE = CHUNK * (D / 64);
    static constexpr int QUERY_CHUNK = UNIT * 128;          // [64 rows][64 elements], swizzled
    static constexpr int QUERIES = STAGES * STAGE;          // [CONSUMERS][D/64] chunks
    static constexpr int BARRIERS = QUERIES + TILE * D * 2; // full[STAGES], empty[STAGES]
    // Room to align the base to a swizzle atom.
    static constexpr int BYTES = BARRIERS + 16 * STAGES + 1024;
};

template <int D> struct ring {
    uint32_t base, stage = 0, phase = 0;
    __device__ __forceinline__ explicit ring(uint32_t b) : base(b) {}
    __device__ __forceinline__ uint32_t data() const { return base + stage * plan<D>::STAGE; }
    __device__ __forceinline__ uint32_t full() const
    {
        return base + plan<D>::BARRIERS + 8 * stage;
    }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8 * plan<D>::STAGES; }
    __device__ __forceinline__ void step()
    {
        if (++stage == plan<D>::STAGES) stage = 0, phase ^= 1;
    }
};

template <int D> DEV void produce(const score_job &x, const CUtensorMap *keys, ring<D> r)
{
    score_walk walk;
    while (walk.next<TILE>(x, STEP))
        for (int t = walk.step0; t < walk.step1; t++) {
            mbar_wait(r.empty(), r.phase ^ 1);
            mbar_arrive_tx(r.full(), plan<D>::STAGE);
            tma_load(r.data(), keys, r.full(), t * STEP, 0, walk.g, walk.b, L2_EVICT_LAST);
            r.step();
        }
}

// s = q k^T for the 64 rows and 128 keys at two places in shared memory.
template <class T, int D> DEV void multiply(float (&s)[64], uint32_t queries, uint32_t keys)
{
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint64_t a = wgmma_desc(queries + k / 4 * plan<D>::QUERY_CHUNK + k % 4 * 32, 0, 1024);
        const uint64_t b = wgmma_desc(keys + k / 4 * plan<D>::CHUNK + k % 4 * 32, 0, 1024);
        if (k == 0)
            wgmma_ss_kmajor<T, false>(s, a, b);
        else
            wgmma_ss_kmajor<T, true>(s, a, b);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
}

// The two rows, g and g + 8 of a unit, that a thread shares with the other three lanes of its quad.
// A thread keeps the statistics of one key block in four, so that a quad writes whole sectors.
struct row_pair {
    int limit[2];       // keys the rows see; 0: nothing to write
    float reference[2]; // log2 units; -inf: none found yet
    score_stat kept[2];

    DEV float over_quad(float x)
    {
        x += __shfl_xor_sync(~0u, x, 1);
        return x + __shfl_xor_sync(~0u, x, 2);
    }

    // Sums over the columns FROM .. FROM+BK-1 of s, one key block. Returns false, in all lanes, if
    // the sum of some row is not usable.
    template <int BK, int FROM>
    __device__ __forceinline__ bool sums(float (&sum)[2], const float (&s)[64], float scale) const
    {
        constexpr int N = BK / 2, AT = FROM / 2; // values of the block per thread
        float part[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
        for (int i = 0; i < N; i++)
            part[i % 4] += exp2_approx(fmaf(s[AT + i], scale, -reference[i / 2 % 2]));
        sum[0] = over_quad(part[0] + part[1]), sum[1] = over_quad(part[2] + part[3]);
        return __all_sync(~0u, sum[0] < INFINITY && sum[1] < INFINITY);
    }

    // The same with the maximum of the block, which becomes the reference, and without keys that a
    // row does not see. key: that of column FROM.
    template <int BK, int FROM>
    __device__ __forceinline__ void exact_sums(float (&sum)[2], const float (&s)[64], float scale,
                                               int key, int lane)
    {
        constexpr int N = BK / 2, AT = FROM / 2;
        int seen[2] = { limit[0] - key - 2 * (lane % 4), limit[1] - key - 2 * (lane % 4) };
        auto score = [&](int i) {
            return 8 * (i / 4) + i % 2 < seen[i / 2 % 2] ? s[AT + i] : -INFINITY;
        };
        float high[2] = { -INFINITY, -INFINITY };
#pragma unroll
        for (int i = 0; i < N; i++) high[i / 2 % 2] = fmaxf(high[i / 2 % 2], score(i));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 1));
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 2)) * scale;
            // Nothing here: exp2(-inf - 0) is 0.
            reference[r] = high[r] == -INFINITY ? 0.0f : high[r];
        }
        asm volatile(
            ""
            : "+r"(seen[0]),
              "+r"(seen[1])); // hidden scores are computed twice instead of held in 64 registers
        float part[2] = { 0.0f, 0.0f };
#pragma unroll
        for (int i = 0; i < N; i++)
            part[i / 2 % 2] += exp2_approx(fmaf(score(i), scale, -reference[i / 2 % 2]));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] = over_quad(part[r]);
            // Keys are still to come, but none gave a reference. With -inf the next sum overflows
            // and is computed exactly.
            if (high[r] == -INFINITY && limit[r] > key + BK) reference[r] = -INFINITY;
        }
    }

    __device__ __forceinline__ void keep(const float (&sum)[2], int j, int lane)
    {
#pragma unroll
        for (int r = 0; r < 2; r++)
            if ((j & 3) == (lane & 3))
                kept[r] = score_stat{ sum[r] == 0.0f ? -INFINITY : reference[r], sum[r] };
    }
};

template <class T, int D, int BK> struct consumer {
    const score_job &x;
    ring<D> r;
    const int warp, lane;
    row_pair rows;
    // Steps before this one hide no key from any row of the warp.
    int whole;
    score_stat *line; // statistics of row g

    __device__ __forceinline__ consumer(const score_job &job, ring<D> ring_, int warp_, int lane_)
        : x(job), r(ring_), warp(warp_), lane(lane_)
    {
    }

    __device__ __forceinline__ uint32_t queries() const
    {
        return r.base + plan<D>::QUERIES + warp / 4 * (UNIT * D * 2);
    }

    // Loads the queries of the warpgroup to shared memory, 16 bytes per thread at a time.
    __device__ __forceinline__ void load_queries(const score_walk &w)
    {
        const int first = w.tile * TILE + warp / 4 * UNIT, thread = warp % 4 * 32 + lane,
                  chunk = thread % (D / 8);
        // The queries of the last part have been read.
        named_sync(1 + warp / 4, 128);
#pragma unroll 4
        for (int row = thread / (D / 8); row < UNIT; row += 128 / (D / 8)) {
            const uint4 v = *(const uint4 *)((const uint16_t *)x.q +
                                             row_offset(x, w.b, w.g, min(first + row, x.rows - 1)) +
                                             8 * chunk);
            const uint32_t dst = queries() + chunk / 8 * plan<D>::QUERY_CHUNK + row * 128 +
                                 (chunk % 8 ^ row % 8) * 16;
            store_shared(dst, make_uint4(v.x ^ x.flip, v.y ^ x.flip, v.z ^ x.flip, v.w ^ x.flip));
        }
        proxy_fence();
        named_sync(1 + warp / 4, 128);
    }

    __device__ __forceinline__ void open(const score_walk &w)
    {
        const int row = w.tile * TILE + warp * 16 + lane / 4;
        load_queries(w);
        unsigned shortest = ~0u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows.limit[i] = row_limit(x, row + 8 * i, w.len);
            rows.kept[i] = score_stat{ 0.0f, 0.0f };
            if (rows.limit[i]) shortest = min(shortest, (unsigned)rows.limit[i]);
        }
        whole = (int)(__reduce_min_sync(~0u, shortest) / STEP);
        line = x.stats + (((int64_t)w.b * x.Hkv + w.g) * x.rows + row) * x.pitch + lane % 4;
    }

    template <int FROM>
    __device__ __forceinline__ void take(const float (&s)[64], int t, bool exact)
    {
        float sum[2];
        if (exact || !rows.template sums<BK, FROM>(sum, s, x.scale))
            rows.template exact_sums<BK, FROM>(sum, s, x.scale, t * STEP + FROM, lane);
        rows.keep(sum, (t * STEP + FROM) / BK, lane);
    }

    // Writes the run of four key blocks that ends with j. The part began with block `first`.
    __device__ __forceinline__ void flush(int first, int j)
    {
        const int mine = (j & ~3) + lane % 4;
        const bool has = mine >= first && mine <= j && mine < x.nk;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (has && rows.limit[i] > 0)
                *(float2 *)(line + (int64_t)8 * i * x.pitch +
                            (j & ~3)) = make_float2(rows.kept[i].top, rows.kept[i].sum);
    }

    __device__ __forceinline__ void run()
    {
        score_walk w;
        while (w.next<TILE>(x, STEP)) {
            open(w);
            for (int t = w.step0; t < w.step1; t++) {
                float s[64];
                mbar_wait(r.full(), r.phase);
                multiply<T, D>(s, queries(), r.data());
                if (lane == 0) mbar_arrive(r.empty());
                r.step();
                const bool exact = t == w.step0 || t >= whole;
                take<0>(s, t, exact);
                if constexpr (BK < STEP) take<BK>(s, t, exact);
                const int j = t * (STEP / BK) + (STEP / BK - 1);
                if ((j & 3) == 3 || t + 1 == w.step1) flush(w.step0 * (STEP / BK), j);
            }
        }
    }
};

template <class T, int D, int BK>
__global__ void __launch_bounds__(THREADS, 1)
    score_kernel(const __grid_constant__ score_job x, const __grid_constant__ CUtensorMap keys)
{
    extern __shared__ unsigned char raw[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const ring<D> start((smem_addr(raw) + 1023) & ~1023u);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&keys);
        ring<D> r = start;
        for (int s = 0; s < plan<D>::STAGES; s++, r.step()) {
            mbar_init(r.full(), 1);
            mbar_init(r.empty(), 4 * CONSUMERS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if (warp >= 4 * CONSUMERS) {
        regs_lower<PRODUCER_REGS>();
        if (warp == 4 * CONSUMERS && lane == 0) produce<D>(x, &keys, start);
    } else {
        regs_raise<CONSUMER_REGS>();
        consumer<T, D, BK>(x, start, warp, lane).run();
    }
}

template <class T, int D, int BK>
esa_status launch(esa_cuda_device *dev, const score_job &x, const CUtensorMap &keys,
                  cudaStream_t stream)
{
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(score_kernel<T, D, BK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             plan<D>::BYTES),
        "preparing the score kernel");
    if (status) return status;
    const int blocks = (int)esa_min64(dev->multiprocessors, (int64_t)x.tiles * x.ranges);
    score_kernel<T, D, BK><<<blocks, THREADS, plan<D>::BYTES, stream>>>(x, keys);
    return launch_check(dev, "launching the score kernel");
}

template <class T>
esa_status launch_shape(esa_cuda_device *dev, const score_job &x, const CUtensorMap &keys,
                        cudaStream_t stream)
{
    if (x.D == 128)
        return x.block_k == 128 ? launch<T, 128, 128>(dev, x, keys, stream)
                                : launch<T, 128, 64>(dev, x, keys, stream);
    return x.block_k == 128 ? launch<T, 64, 128>(dev, x, keys, stream)
                            : launch<T, 64, 64>(dev, x, keys, stream);
}

} // namespace

bool sm90_score_takes(const esa_cuda_device *dev, const esa_select_args *a)
{
    if (dev->level < LEVEL_SM90A || a->dtype == ESA_DTYPE_F32 || (a->D != 64 && a->D != 128) ||
        a->perm_k)
        return false;
    if (a->params.block_k != 64 && a->params.block_k != 128) return false;
    return fits_map({ a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }) &&
           rows_in_pieces({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, a->D, 2, 16);
}

esa_status sm90_score_launch(esa_cuda_device *dev, score_job x, cudaStream_t stream)
{
    CUtensorMap keys;
    if (!make_map(&keys, dev, x.dtype, { x.k, x.k_stride, { x.B, x.Hkv, x.Nk } }, x.D, STEP,
                  x.D / 64))
        return device_fail(dev, ESA_ERR_DEVICE, "the driver refused a tensor map of the keys");
    score_cut(x, TILE, ceil_div(x.Nk, STEP), dev->multiprocessors);
    return x.dtype == ESA_DTYPE_BF16 ? launch_shape<bf16>(dev, x, keys, stream)
                                     : launch_shape<f16>(dev, x, keys, stream);
}
