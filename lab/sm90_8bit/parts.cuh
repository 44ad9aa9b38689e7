// parts.cuh - what all versions share: parameters, shared memory, the producer, the store, the
// kernel around a consumer.
// SPDX-License-Identifier: Apache-2.0
//
// Dense attention of one batch entry, D = HEAD: 128 or 64. A tile is 64 query rows for each of two
// warpgroups of consumers, or of three (TEAM 3, v8 and v9 at D = 64 only). K comes as [128 keys][D
// bytes], V transposed as [D columns][128 keys], with eight rows of ones behind it.
#pragma once

#include <cuda_bf16.h>

#include "products.cuh"

#ifndef HEAD
#define HEAD 128
#endif
#ifndef TEAM
#define TEAM 2
#endif
constexpr int D = HEAD, KEYS = 128, TILE = 64 * TEAM,
              NO = D / 2 + 4; // accumulators of a thread, with four for the sums
constexpr float MAGIC = 12582912.0f, LOG2_448 = 8.8073549f;
constexpr int MAGIC_BITS = 0x4B400000;

struct args {
    __nv_bfloat16 *o; // [H][N][D]
    float *lse;       // [H][N], of the logits minus those of the centre of k
    // [H][blocks], [H][blocks], [H][D], [H][D]
    const float *q_scale, *k_scale, *v_scale, *v_centre;
    int N, H;
    int nq, nk;        // tiles of a head; key blocks that a tile visits
    int blocks, tiles; // blocks of 128 rows of a head; tiles of all heads
    int *next;
    float scale_log2;
    long long *cycles; // cycles of thread block 0
};

constexpr int RING = D == 128 ? 5 : TEAM == 2 ? 10 : 9, V_BYTES = KEYS * D + 1024;
constexpr int Q_AT = 0, K_AT = TILE * D, V_AT = K_AT + RING * KEYS * D,
              BARS_AT = V_AT + RING * V_BYTES, INFO_AT = BARS_AT + 8 * (4 * RING + 2),
              SHARED = INFO_AT + 64 + 1024;
static_assert(SHARED <= 227 * 1024, "more shared memory than a block may have");

// Descriptor of rows of D bytes, swizzled as the tensor copy leaves them.
DEV uint64_t rows_desc(uint32_t addr)
{
    const uint64_t desc = wgmma_desc(addr, 16, 8 * D);
    return D == 128 ? desc : desc ^ (uint64_t)3 << 62; // 64 bytes: swizzle mode 2 instead of 1
}

template <int N> DEV void pin(int (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}
DEV uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint32_t r;
    asm("{.reg .b16 x, y;\n"
        "cvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\n"
        "mov.b32 %0, {x, y};}"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}

// ptxas moves the wait for P V up, in front of the exponentials, unless a branch stands between
// them. bits: of some P. P is never negative, so this branch is never taken.
DEV void hold(int bits)
{
    asm volatile("{.reg .pred mine, any;\n"
                 "HOLD:\n"
                 "setp.eq.s32 mine, %0, 0x80000001;\n"
                 "vote.sync.any.pred any, mine, -1;\n"
                 "@any bra.uni HOLD;}" ::"r"(bits)
                 : "memory");
}

// 2^z on the multipliers, for a part of the logits. Three mantissa bits are all P keeps.
DEV float exp2_poly(float z)
{
    z = fmaxf(z, -120.0f);
    const float r = z + MAGIC, y = z - (r - MAGIC);
    const float q = fmaf(fmaf(0.2402265f, y, 0.6951f), y, 1.0f);
    return __int_as_float(__float_as_int(q) + (__float_as_int(r) << 23));
}

DEV void load_box(uint32_t dst, const CUtensorMap *map, uint32_t bar, int x, int y, int z,
                  uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

struct memory_view {
    uint32_t base;
    unsigned char *at;
    __device__ __forceinline__ explicit memory_view(unsigned char *raw)
        : base((smem_addr(raw) + 1023) & ~1023u), at(raw + (base - smem_addr(raw)))
    {
    }
    __device__ __forceinline__ uint32_t k(int s) const { return base + K_AT + s * KEYS * D; }
    __device__ __forceinline__ uint32_t v(int s) const { return base + V_AT + s * V_BYTES; }
    __device__ __forceinline__ uint32_t bar(int i) const { return base + BARS_AT + 8 * i; }
    __device__ __forceinline__ uint32_t k_full(int s) const { return bar(s); }
    __device__ __forceinline__ uint32_t k_empty(int s) const { return bar(RING + s); }
    __device__ __forceinline__ uint32_t v_full(int s) const { return bar(2 * RING + s); }
    __device__ __forceinline__ uint32_t v_empty(int s) const { return bar(3 * RING + s); }
    __device__ __forceinline__ uint32_t q_full() const { return bar(4 * RING); }
    __device__ __forceinline__ uint32_t q_empty() const { return bar(4 * RING + 1); }
    __device__ __forceinline__ volatile int *tile() const { return (volatile int *)(at + INFO_AT); }

    __device__ __forceinline__ void begin() const // the whole block
    {
        for (int i = threadIdx.x; i < RING * 1024; i += blockDim.x)
            at[V_AT + i / 1024 * V_BYTES + KEYS * D + i % 1024] = 0x38; // 1.0
        proxy_fence();
        if (threadIdx.x == 0) {
            for (int s = 0; s < RING; ++s) {
                mbar_init(k_full(s), 1), mbar_init(k_empty(s), 4 * TEAM);
                mbar_init(v_full(s), 1), mbar_init(v_empty(s), 4 * TEAM);
            }
            mbar_init(q_full(), 1), mbar_init(q_empty(), 4 * TEAM);
            mbar_init_fence();
        }
        __syncthreads();
    }
};

struct ring_pos {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void step()
    {
        if (++stage == RING) stage = 0, phase ^= 1;
    }
};

// One thread.
DEV void produce(const args &a, const memory_view &m, const CUtensorMap *qm, const CUtensorMap *km,
                 const CUtensorMap *vm)
{
    ring_pos k, v;
    int q_phase = 1;
    const long long begin = clock64();
    for (int tile = blockIdx.x;; tile = gridDim.x + atomicAdd(a.next, 1)) {
        mbar_wait(m.q_empty(), q_phase), q_phase ^= 1;
        if (tile >= a.tiles) {
            *m.tile() = -1;
            mbar_arrive(m.q_full());
            if (blockIdx.x == 0) *a.cycles = clock64() - begin;
            return;
        }
        const int h = tile / a.nq;
        *m.tile() = tile;
        mbar_arrive_tx(m.q_full(), TILE * D);
        load_box(m.base + Q_AT, qm, m.q_full(), 0, tile % a.nq * TILE, h, L2_EVICT_FIRST);
        for (int j = 0; j <= a.nk; ++j) {
            if (j < a.nk) {
                mbar_wait(m.k_empty(k.stage), k.phase ^ 1);
                mbar_arrive_tx(m.k_full(k.stage), KEYS * D);
                load_box(m.k(k.stage), km, m.k_full(k.stage), 0, j * KEYS, h, L2_EVICT_LAST);
                k.step();
            }
            if (j > 0) {
                mbar_wait(m.v_empty(v.stage), v.phase ^ 1);
                mbar_arrive_tx(m.v_full(v.stage), KEYS * D);
                load_box(m.v(v.stage), vm, m.v_full(v.stage), (j - 1) * KEYS, 0, h, L2_EVICT_LAST);
                v.step();
            }
        }
    }
}

// sum: of P, for both rows of the thread.
template <int N>
DEV void store(const args &a, int tile, int wg, const float (&o)[N], const float (&sum)[2],
               const float (&top)[2])
{
    const int lane = threadIdx.x % 32, quad = lane % 4, h = tile / a.nq;
    const int row0 = tile % a.nq * TILE + 64 * wg + 16 * (threadIdx.x / 32 % 4) + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + 8 * r;
        if (row >= a.N) continue;
        const float inv = 1.0f / sum[r];
        if (quad == 0)
            a.lse[(int64_t)h * a.N + row] = (top[r] - LOG2_448 + log2f(sum[r])) * 0.69314718f;
        __nv_bfloat16 *const to = a.o + ((int64_t)h * a.N + row) * D;
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const int d = 8 * c + 2 * quad;
            const float *const s = a.v_scale + h * D + d, *const z = a.v_centre + h * D + d;
            *(__nv_bfloat162 *)(to + d) = __floats2bfloat162_rn(
                o[4 * c + 2 * r] * inv * s[0] + z[0], o[4 * c + 2 * r + 1] * inv * s[1] + z[1]);
        }
    }
}

// C: the consumer of a version.
template <class C>
__global__ void __launch_bounds__(128 * TEAM + 128, 1)
    attention_kernel(const __grid_constant__ args a, const __grid_constant__ CUtensorMap qm,
                     const __grid_constant__ CUtensorMap km, const __grid_constant__ CUtensorMap vm)
{
    extern __shared__ unsigned char raw[];
    const memory_view mem(raw);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    mem.begin();
    if (warp >= 4 * TEAM) {
        regs_lower<24>();
        if (warp == 4 * TEAM && lane == 0) produce(a, mem, &qm, &km, &vm);
    } else {
        regs_raise<TEAM == 2 ? 240 : 160>();
        C(a, mem, warp, lane).run();
    }
}
