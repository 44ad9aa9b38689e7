// sm90_score.cu - the score pass on Hopper: wgmma on keys that bulk copies bring, statistics under the next product.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block holds 256 sampled queries in registers (two consumer warpgroups, each two units of 64 rows) and streams keys, 128 a step,
// through a ring that a producer warp fills. Per step and block: 2048 cycles of tensor cores and 2048 of the special function unit
// at D = 128, so both must run all the time: while a warpgroup takes maximum and sum of one unit's scores, its other unit's product runs.
// With 256 rows a key is read from L2 once per 2048 cycles and 256 bytes: 16 bytes a cycle, well under what L2 gives.
#include "cuda/entropy.cuh"
#include "cuda/ptx.cuh"

namespace {

constexpr int STEP = 128;           // keys
constexpr int UNIT = 64;            // rows of one product
constexpr int TILE = 4 * UNIT;      // rows of a thread block
constexpr int CONSUMERS = 2;        // warpgroups
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_REGS = 40, CONSUMER_REGS = 232;      // 40 + 2 * 232 = 3 * 168, what the launch allocates

template <int D> struct plan {
    static constexpr int STAGES = D == 128 ? 6 : 10;
    static constexpr int CHUNK = STEP * 128;                // [128 keys][64 elements], swizzled
    static constexpr int STAGE = CHUNK * (D / 64);
    static constexpr int BARRIERS = STAGES * STAGE;         // full[STAGES], empty[STAGES]
    static constexpr int BYTES = BARRIERS + 16 * STAGES + 1024;     // room to align the base to a swizzle atom
};

template <int D> struct ring {
    uint32_t base, stage = 0, phase = 0;
    __device__ __forceinline__ explicit ring(uint32_t b) : base(b) {}
    __device__ __forceinline__ uint32_t data() const { return base + stage * plan<D>::STAGE; }
    __device__ __forceinline__ uint32_t full() const { return base + plan<D>::BARRIERS + 8 * stage; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8 * plan<D>::STAGES; }
    __device__ __forceinline__ void step() { if (++stage == plan<D>::STAGES) stage = 0, phase ^= 1; }
};

template <int D> DEV void produce(const score_job &x, const CUtensorMap *keys, ring<D> r) {
    score_walk walk;
    while (walk.next<TILE>(x, STEP))
        for (int t = walk.step0; t < walk.step1; t++) {
            mbar_wait(r.empty(), r.phase ^ 1);
            mbar_arrive_tx(r.full(), plan<D>::STAGE);
            tma_load(r.data(), keys, r.full(), t * STEP, 0, walk.g, walk.b, L2_EVICT_LAST);
            r.step();
        }
}

// Starts s = q k^T for the 64 rows in q and the keys at `keys`.
template <class T, int D> DEV void multiply(float (&s)[64], uint32_t (&q)[D / 4], uint32_t keys) {
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint64_t b = wgmma_desc(keys + k / 4 * plan<D>::CHUNK + k % 4 * 32, 0, 1024);
        if (k == 0) wgmma_rs_kmajor<T, false>(s, q + 4 * k, b);
        else wgmma_rs_kmajor<T, true>(s, q + 4 * k, b);
    }
    wgmma_commit();
}

// The rows of one unit that a thread shares with the three other lanes of its quad: g and g + 8. A thread keeps the statistics of
// one key block in four, so that a quad writes whole sectors.
struct unit_rows {
    int limit[2];           // keys the rows see; 0: nothing to write
    score_stat kept[2];

    // Key block j is columns FROM .. FROM+BK-1 of s. HIDE: some keys, counted from column 0 at `key`, are not seen by every row. s itself
    // is never changed: the other unit's product is in flight, and the assembler would wait for it before any change to an accumulator.
    template <int BK, int FROM, bool HIDE> __device__ __forceinline__ void take(const float (&s)[64], float scale, int j, int key, int lane) {
        constexpr int N = BK / 2, AT = FROM / 2;            // a thread's values of the block
        int seen[2] = {limit[0] - key - 2 * (lane % 4), limit[1] - key - 2 * (lane % 4)};
        auto score = [&](int i) { return HIDE && 8 * (i / 4) + i % 2 >= seen[i / 2 % 2] ? -INFINITY : s[i]; };
        float high[4] = {score(AT), score(AT + 1), score(AT + 2), score(AT + 3)};
#pragma unroll
        for (int i = 4; i < N; i++) high[i % 4] = fmaxf(high[i % 4], score(AT + i));
        float top[2] = {fmaxf(high[0], high[1]), fmaxf(high[2], high[3])};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2)) * scale;
        }
        // A row that sees nothing has top = -inf: 0 is subtracted instead and every exponential is 0.
        const float base[2] = {top[0] == -INFINITY ? 0.0f : top[0], top[1] == -INFINITY ? 0.0f : top[1]};
        if constexpr (HIDE) asm volatile("" : "+r"(seen[0]), "+r"(seen[1]));     // hidden scores are made twice rather than held in 64 registers
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < N; i++) part[i % 4] += exp2_approx(fmaf(score(AT + i), scale, -base[i / 2 % 2]));
        float sum[2] = {part[0] + part[1], part[2] + part[3]};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            if ((j & 3) == (lane & 3)) kept[r] = score_stat{top[r], sum[r]};
        }
    }
};

template <class T, int D, int BK> struct consumer {
    const score_job &x;
    ring<D> r;
    const int lane, row_in_tile;
    uint32_t qa[D / 4], qb[D / 4];      // two units of queries, as fragments
    unit_rows a, b;
    int whole;                          // steps before this one need no hiding
    int first, nk;                      // first key block of this part; blocks of the head
    score_stat *line;                   // statistics of row g of unit a

    __device__ __forceinline__ consumer(const score_job &job, ring<D> ring_, int warp, int lane_)
        : x(job), r(ring_), lane(lane_), row_in_tile(2 * UNIT * (warp / 4) + 16 * (warp % 4) + lane_ / 4) {}

    __device__ __forceinline__ void load(uint32_t (&q)[D / 4], unit_rows &u, const score_walk &w, int row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = row + 8 * i;
            u.limit[i] = row_limit(x, at, w.len);
            u.kept[i] = score_stat{0.0f, 0.0f};
            const uint32_t *src = (const uint32_t *)((const uint16_t *)x.q + row_offset(x, w.b, w.g, min(at, x.rows - 1))) + lane % 4;
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                q[4 * k + i] = src[8 * k] ^ x.flip;
                q[4 * k + 2 + i] = src[8 * k + 4] ^ x.flip;
            }
        }
    }

    __device__ __forceinline__ void open(const score_walk &w) {
        const int row = w.tile * TILE + row_in_tile;
        load(qa, a, w, row);
        load(qb, b, w, row + UNIT);
        unsigned shortest = ~0u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (a.limit[i]) shortest = min(shortest, (unsigned)a.limit[i]);
            if (b.limit[i]) shortest = min(shortest, (unsigned)b.limit[i]);
        }
        whole = (int)(__reduce_min_sync(~0u, shortest) / STEP);
        first = w.step0 * (STEP / BK);
        nk = x.nk;
        line = x.stats + (((int64_t)w.b * x.Hkv + w.g) * x.rows + row) * x.pitch + lane % 4;
        wgmma_pin(qa);
        wgmma_pin(qb);
    }

    // Writes the run of four key blocks that ends with j.
    __device__ __forceinline__ void flush(const unit_rows &u, score_stat *at, int j) {
        const int mine = (j & ~3) + lane % 4;
        const bool has = mine >= first && mine <= j && mine < nk;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (has && u.limit[i] > 0) *(float2 *)(at + (int64_t)8 * i * x.pitch + (j & ~3)) = make_float2(u.kept[i].top, u.kept[i].sum);
    }

    template <bool HIDE> __device__ __forceinline__ void take_step(unit_rows &u, const float (&s)[64], int t) {
        u.template take<BK, 0, HIDE>(s, x.scale, t * (STEP / BK), t * STEP, lane);
        if constexpr (BK < STEP) u.template take<BK, BK, HIDE>(s, x.scale, 2 * t + 1, t * STEP, lane);
    }
    __device__ __forceinline__ void take(unit_rows &u, const float (&s)[64], score_stat *at, int t, bool last) {
        if (t < whole) take_step<false>(u, s, t);
        else take_step<true>(u, s, t);
        const int j = t * (STEP / BK) + (STEP / BK - 1);
        if ((j & 3) == 3 || last) flush(u, at, j);
    }

    // One part. The last step starts a product that nobody reads, on keys that are still there: without it a product would be in flight on
    // one way into a line of code and not on the other, and the assembler would wait for it on both.
    __device__ __forceinline__ void part(int step, int end) {
        float sa[64], sb[64];
        mbar_wait(r.full(), r.phase);
        multiply<T, D>(sa, qa, r.data());
        bool last;
        do {
            last = step + 1 == end;
            wgmma_wait<0>();
            wgmma_pin(sa);
            multiply<T, D>(sb, qb, r.data());
            take(a, sa, line, step, last);
            const uint32_t done = r.empty();
            if (!last) {
                r.step();
                mbar_wait(r.full(), r.phase);
            }
            wgmma_wait<0>();
            wgmma_pin(sb);
            multiply<T, D>(sa, qa, r.data());
            if (!last && lane == 0) mbar_arrive(done);
            take(b, sb, line + (int64_t)UNIT * x.pitch, step, last);
            step++;
        } while (!last);
        wgmma_wait<0>();
        wgmma_pin(sa);
        if (lane == 0) mbar_arrive(r.empty());
        r.step();
    }

    __device__ __forceinline__ void run() {
        score_walk w;
        while (w.next<TILE>(x, STEP)) {
            open(w);
            part(w.step0, w.step1);
        }
    }
};

template <class T, int D, int BK>
__global__ void __launch_bounds__(THREADS, 1) score_kernel(const __grid_constant__ score_job x, const __grid_constant__ CUtensorMap keys) {
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

// The keys as (64, Nk, D/64, Hkv, B): one copy of (64, 128, D/64) lands as [chunk][key][64]. Keys past Nk read as zero.
bool key_map(CUtensorMap *map, const esa_cuda_device *dev, const score_job &x) {
    const cuuint64_t dims[5] = {64, (cuuint64_t)x.Nk, (cuuint64_t)(x.D / 64), (cuuint64_t)x.Hkv, (cuuint64_t)x.B};
    const cuuint64_t bytes[4] = {(cuuint64_t)x.k_stride[2] * 2, 128, x.Hkv > 1 ? (cuuint64_t)x.k_stride[1] * 2 : 16,
                                 x.B > 1 ? (cuuint64_t)x.k_stride[0] * 2 : 16};
    const cuuint32_t box[5] = {64, STEP, (cuuint32_t)(x.D / 64), 1, 1}, ones[5] = {1, 1, 1, 1, 1};
    const CUtensorMapDataType type = x.dtype == ESA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return dev->encode_tiled(map, type, 5, (void *)x.k, dims, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int D, int BK> esa_status launch(esa_cuda_device *dev, const score_job &x, const CUtensorMap &keys, cudaStream_t stream) {
    const esa_status status = device_check(dev, cudaFuncSetAttribute(score_kernel<T, D, BK>, cudaFuncAttributeMaxDynamicSharedMemorySize, plan<D>::BYTES),
                                           "preparing the score kernel");
    if (status) return status;
    const int blocks = (int)esa_min64(dev->multiprocessors, (int64_t)x.tiles * x.ranges);
    score_kernel<T, D, BK><<<blocks, THREADS, plan<D>::BYTES, stream>>>(x, keys);
    return launch_check(dev, "launching the score kernel");
}

template <class T> esa_status launch_shape(esa_cuda_device *dev, const score_job &x, const CUtensorMap &keys, cudaStream_t stream) {
    if (x.D == 128) return x.block_k == 128 ? launch<T, 128, 128>(dev, x, keys, stream) : launch<T, 128, 64>(dev, x, keys, stream);
    return x.block_k == 128 ? launch<T, 64, 128>(dev, x, keys, stream) : launch<T, 64, 64>(dev, x, keys, stream);
}

bool fits(int64_t stride, int64_t n, int64_t multiple) { return n == 1 || (stride > 0 && stride % multiple == 0); }

} // namespace

bool sm90_score_takes(const esa_cuda_device *dev, const esa_select_args *a) {
    if (dev->level < LEVEL_SM90A || a->dtype == ESA_DTYPE_F32 || (a->D != 64 && a->D != 128) || a->perm_k) return false;
    if (a->params.block_k != 64 && a->params.block_k != 128) return false;
    if ((uintptr_t)a->k % 16 || a->k_stride[2] <= 0 || a->k_stride[2] % 8 || !fits(a->k_stride[1], a->Hkv, 8) || !fits(a->k_stride[0], a->B, 8)) return false;
    return (uintptr_t)a->q % 4 == 0 && a->q_stride[0] % 2 == 0 && a->q_stride[1] % 2 == 0 && a->q_stride[2] % 2 == 0;
}

esa_status sm90_score_launch(esa_cuda_device *dev, score_job x, cudaStream_t stream) {
    CUtensorMap keys;
    if (!key_map(&keys, dev, x)) return device_fail(dev, ESA_ERR_DEVICE, "the driver refused a tensor map of the keys");
    score_cut(x, TILE, ceil_div(x.Nk, STEP), dev->multiprocessors);
    return x.dtype == ESA_DTYPE_BF16 ? launch_shape<bf16>(dev, x, keys, stream) : launch_shape<f16>(dev, x, keys, stream);
}
