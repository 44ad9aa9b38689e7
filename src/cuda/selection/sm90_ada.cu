// sm90_ada.cu - the product of ada_bsa on Hopper: wgmma on tiles from bulk copies.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block makes 192 rows x 256 columns, 64 x 256 for each of three consumer warpgroups. Of
// the tiles whose sums fit into registers, this one loads least from L2 per product (110 operations
// per byte; 128 x 256 would have 85, and L2 is the limit). A producer warp fills a ring of four
// stages of 64 elements of depth, and runs ahead into the next tile while the consumers reduce this
// one. Token u of every group is a view of its own with eight tokens between rows, so a short last
// group needs no special case: rows beyond a view are zeros. At D = 64 the reduction costs as much
// as the product, and the smaller tiles of ada_mma.cu are faster (1.23 against 1.41 ms, 48 heads,
// 17776 tokens).
#include "cuda/selection/ada.cuh"
#include "cuda/runtime/sm90_ptx.cuh"

namespace
{

constexpr int CONSUMERS = 3, ROWS = 64 * CONSUMERS, COLUMNS = 256, DEPTH = 64, STAGES = 4,
              THREADS = 128 * (CONSUMERS + 1);
// 32 + 3 * 160 = 4 * 128: what the launch allocates.
constexpr int PRODUCER_REGS = 32, CONSUMER_REGS = 160;
constexpr int COLUMNS_AT = ROWS * DEPTH * 2, STAGE = COLUMNS_AT + COLUMNS * DEPTH * 2;
// full[STAGES], empty[STAGES]; room to align the base.
constexpr int BARRIERS = STAGES * STAGE, BYTES = BARRIERS + 16 * STAGES + 1024;
constexpr int GROUP_TILES = 8; // row tiles that run side by side and share columns

struct ada_maps {
    CUtensorMap q[8], k[8]; // map u: token u of every group
};

struct ada_tiles {
    int rows, columns; // tiles of a head
    int64_t all;
};

struct stage_ring {
    uint32_t base, stage = 0, phase = 0;
    __device__ __forceinline__ explicit stage_ring(uint32_t b) : base(b) {}
    __device__ __forceinline__ uint32_t data() const { return base + stage * STAGE; }
    __device__ __forceinline__ uint32_t full() const { return base + BARRIERS + 8 * stage; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8 * STAGES; }
    __device__ __forceinline__ void step()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The tiles of a thread block, in the same order for its producer and its consumers.
struct tile_walk {
    int64_t at = blockIdx.x;
    int head, row0, column0; // head: within the window
    __device__ __forceinline__ bool next(const ada_job &x, const ada_tiles &tiles)
    {
        for (; at < tiles.all; at += gridDim.x) {
            const int per_head = tiles.rows * tiles.columns, within = (int)(at % per_head),
                      group = within / (GROUP_TILES * tiles.columns);
            const int in_group = within % (GROUP_TILES * tiles.columns),
                      tall = min(GROUP_TILES, tiles.rows - group * GROUP_TILES);
            head = (int)(at / per_head);
            row0 = (int)x.row0 + (group * GROUP_TILES + in_group % tall) * ROWS;
            column0 = in_group / tall * COLUMNS;
            const int64_t b = (x.head0 + head) / x.a.Hq;
            // Limits grow with the row.
            const int last = min(row0 + ROWS, (int)(x.row0 + x.rows)) - 1;
            if (column0 >= esa_ada_limit(&x.a, esa_ada_columns(&x.a, x.kv_len[b]), last)) continue;
            at += gridDim.x;
            return true;
        }
        return false;
    }
};

DEV void produce(const ada_job &x, const ada_maps &maps, const ada_tiles &tiles, stage_ring r)
{
    tile_walk w;
    while (w.next(x, tiles)) {
        const int64_t head = x.head0 + w.head;
        const int b = (int)(head / x.a.Hq), h = (int)(head % x.a.Hq),
                  g = h / (int)(x.a.Hq / x.a.Hkv);
        for (int u = 0; u < 8; u++)
            for (int chunk = 0; chunk < x.a.D / DEPTH; chunk++) {
                mbar_wait(r.empty(), r.phase ^ 1);
                mbar_arrive_tx(r.full(), STAGE);
                tma_load(r.data(), &maps.q[7 - u], r.full(), w.row0, chunk, h, b, L2_EVICT_LAST);
                tma_load(r.data() + COLUMNS_AT, &maps.k[u], r.full(), w.column0, chunk, g, b,
                         L2_EVICT_LAST);
                r.step();
            }
    }
}

// Adds the products of a stage, for the 64 rows of the warpgroup, to both halves of
// its 256 columns.
template <class T>
DEV void multiply(float (&left)[64], float (&right)[64], uint32_t rows, uint32_t columns)
{
    wgmma_pin(left);
    wgmma_pin(right);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        const uint64_t a = wgmma_desc(rows + k * 32, 0, 1024);
        wgmma_ss_kmajor<T, true>(left, a, wgmma_desc(columns + k * 32, 0, 1024));
        wgmma_ss_kmajor<T, true>(right, a, wgmma_desc(columns + 128 * DEPTH * 2 + k * 32, 0, 1024));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(left);
    wgmma_pin(right);
}

template <class T>
DEV void consume(const ada_job &x, const ada_tiles &tiles, stage_ring r, int warp)
{
    const int steps = 8 * (int)(x.a.D / DEPTH);
    const auto power = [](float v) { return exp2_approx(v); };
    tile_walk w;
    while (w.next(x, tiles)) {
        float left[64], right[64];
#pragma unroll
        for (int i = 0; i < 64; i++) left[i] = right[i] = 0.0f;
        for (int s = 0; s < steps; s++) {
            mbar_wait(r.full(), r.phase);
            multiply<T>(left, right, r.data() + warp / 4 * (64 * DEPTH * 2), r.data() + COLUMNS_AT);
            if (threadIdx.x % 32 == 0) mbar_arrive(r.empty());
            r.step();
        }
        const ada_head head(x, x.head0 + w.head);
        const int row = w.row0 + 16 * warp;
        float *out = x.lse + w.head * x.rows * x.a.nk;
        ada_finish<0>(x, head, left, row, w.column0, out, power);
        ada_finish<32>(x, head, left, row, w.column0 + 64, out, power);
        ada_finish<0>(x, head, right, row, w.column0 + 128, out, power);
        ada_finish<32>(x, head, right, row, w.column0 + 192, out, power);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1)
    ada_kernel(const __grid_constant__ ada_job x, const __grid_constant__ ada_maps maps,
               const __grid_constant__ ada_tiles tiles)
{
    extern __shared__ unsigned char raw[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const stage_ring start((smem_addr(raw) + 1023) & ~1023u);
    if (threadIdx.x == 0) {
        stage_ring r = start;
        for (int s = 0; s < STAGES; s++, r.step()) {
            mbar_init(r.full(), 1);
            mbar_init(r.empty(), 4 * CONSUMERS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if (warp >= 4 * CONSUMERS) {
        regs_lower<PRODUCER_REGS>();
        if (warp == 4 * CONSUMERS && threadIdx.x % 32 == 0) produce(x, maps, tiles, start);
    } else {
        regs_raise<CONSUMER_REGS>();
        consume<T>(x, tiles, start, warp);
    }
}

// Token u of every group, as a view of its own. stride: 3 words for it.
view token_view(const esa_select_args &a, bool keys, int u, int64_t *stride)
{
    const int64_t *const of = keys ? a.k_stride : a.q_stride, N = keys ? a.Nk : a.Nq;
    stride[0] = of[0], stride[1] = of[1], stride[2] = 8 * of[2];
    return { (const char *)(keys ? a.k : a.q) + u * of[2] * 2,
             stride,
             { a.B, keys ? a.Hkv : a.Hq, ceil_div<int64_t>(N - u, 8) } };
}

bool token_map(CUtensorMap *map, const esa_cuda_device *dev, const esa_select_args &a, bool keys,
               int u, int rows)
{
    int64_t stride[3];
    return make_map(map, dev, a.dtype, token_view(a, keys, u, stride), a.D, rows, 1);
}

template <class T>
esa_status launch(esa_cuda_device *dev, const ada_job &x, const ada_maps &maps,
                  const ada_tiles &tiles, cudaStream_t stream)
{
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(ada_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES),
        "preparing ada_bsa");
    if (status) return status;
    ada_kernel<T><<<(unsigned)esa_min64(dev->multiprocessors, tiles.all), THREADS, BYTES, stream>>>(
        x, maps, tiles);
    return launch_check(dev, "scoring groups of tokens");
}

} // namespace

bool sm90_ada_takes(const esa_cuda_device *dev, const esa_select_args *a)
{
    if (dev->level < LEVEL_SM90A || dev->shared_bytes < BYTES || !ada_mma_takes(a) || a->perm_q ||
        a->perm_k)
        return false;
    if (a->D < 128 || a->D % DEPTH) return false;
    if (a->Nq < 8 || a->Nk < 8) return false;
    int64_t stride[3];
    return fits_map(token_view(*a, false, 0, stride)) && fits_map(token_view(*a, true, 0, stride));
}

esa_status sm90_ada_launch(esa_cuda_device *dev, ada_job job, cudaStream_t stream)
{
    ada_maps maps;
    for (int u = 0; u < 8; u++)
        if (!token_map(&maps.q[u], dev, job.a, false, u, ROWS) ||
            !token_map(&maps.k[u], dev, job.a, true, u, COLUMNS))
            return device_fail(dev, ESA_ERR_DEVICE,
                               "the driver refused a tensor map of the tokens");
    job.beyond = 1;
    ada_tiles tiles;
    tiles.rows = (int)ceil_div<int64_t>(job.rows, ROWS);
    tiles.columns = (int)ceil_div<int64_t>(ceil_div<int64_t>(job.a.Nk, 8), COLUMNS);
    tiles.all = job.heads * tiles.rows * tiles.columns;
    return job.a.dtype == ESA_DTYPE_BF16 ? launch<bf16>(dev, job, maps, tiles, stream)
                                         : launch<f16>(dev, job, maps, tiles, stream);
}
