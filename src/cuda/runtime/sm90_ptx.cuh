// sm90_ptx.cuh - thin wrappers for Hopper's own instructions: mbarrier, tensor
// copies, warpgroup products.
// SPDX-License-Identifier: Apache-2.0
//
// They need sm_90a; only sm90*.cu may call them.
#pragma once

#include <cuda.h>

#include "cuda/runtime/ptx.cuh"

// 1 / x with an error of one ulp. A subnormal x counts as 0, and a subnormal result becomes 0.
DEV float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- barriers (mbarrier addresses are shared-space offsets) ----

DEV void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same without waiting: the caller counts as one of the threads.
DEV void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEV void mbar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
DEV void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// The whole warp calls it, and one lane arrives. elect.sync orders no memory of the other lanes,
// so __syncwarp puts their reads of the stage before the arrival.
DEV void mbar_arrive_warp(uint32_t bar)
{
    __syncwarp();
    asm volatile("{\n"
                 ".reg .pred P;\n"
                 "elect.sync _|P, -1;\n"
                 "@P mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "}\n" ::"r"(bar)
                 : "memory");
}
DEV void mbar_arrive_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// Waits until the phase of the given parity is complete. On a fresh barrier, parity 1
// passes at once.
DEV void mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred P;\n"
                 "WAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n"
                 "@P bra DONE;\n"
                 "bra WAIT;\n"
                 "DONE:\n"
                 "}\n" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

// Tensor cores and bulk copies after the fence see ordinary stores to shared memory before it.
DEV void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- global memory that is read once ----

// Brings bytes (a multiple of 16, aligned to 16) to L2.
DEV void prefetch_l2(const void *p, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
// Memory that the kernel does not write. If valid is false, nothing is read and the result is 0.
DEV uint4 load_once(const uint4 *p, bool valid)
{
    uint4 x;
    asm volatile("{.reg .pred there;\n"
                 "setp.ne.b32 there, %5, 0;\n"
                 "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(p), "r"((int)valid)
                 : "memory");
    return x;
}
DEV float load_once(const float *p, bool valid)
{
    float x;
    asm volatile("{.reg .pred there;\n"
                 "setp.ne.b32 there, %2, 0;\n"
                 "mov.b32 %0, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.b32 %0, [%1];}"
                 : "=&f"(x)
                 : "l"(p), "r"((int)valid)
                 : "memory");
    return x;
}

// ---- tensor copies ----

// L2 eviction priorities, as the 64-bit policy words that createpolicy produces.
constexpr uint64_t L2_EVICT_FIRST = 0x12F0000000000000ull;
constexpr uint64_t L2_EVICT_LAST = 0x14F0000000000000ull;

DEV void tma_prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies one box of a (64, N, D/64, H, B) map from global to shared memory; completes on bar.
DEV void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int n, int chunk, int h,
                  int b, uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(0), "r"(n), "r"(chunk), "r"(h), "r"(b), "l"(policy)
        : "memory");
}

// ---- warpgroups ----

template <int R> DEV void regs_raise()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R> DEV void regs_lower()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler takes the registers of a wgmma as final once it is issued. This tells it that they
// change here, so that no use moves above the wait and no definition below the issue.
template <int N> DEV void wgmma_pin(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> DEV void wgmma_pin(uint32_t (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Descriptor of a shared-memory matrix with 128-byte swizzle; addresses and strides in bytes.
// K-major operand: stride = bytes between groups of 8 rows; lead is unused.
// MN-major operand: stride = bytes between groups of 8 k; lead = bytes between 64-element chunks
// of MN.
DEV uint64_t wgmma_desc(uint32_t addr, uint32_t lead, uint32_t stride)
{
    return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}

// The same without swizzle, for matrices of 8 x 8 cores of 128 bytes in a row. K-major operand:
// lead = bytes between cores along K, stride = bytes between groups of 8 rows.
DEV uint64_t wgmma_plain_desc(uint32_t addr, uint32_t lead, uint32_t stride)
{
    return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32;
}

#define R4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R32(d)    R16(d, 0), R16(d, 16)
#define R36(d)    R16(d, 0), R16(d, 16), R4(d, 32)
#define R48(d)    R16(d, 0), R16(d, 16), R16(d, 32)
#define R64(d)    R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)
#define L32                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31}"
#define L36                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}"
#define L48                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31,%32,%33,%34,"                                                      \
    "%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}"
#define L64                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31,%32,%33,%34,"                                                      \
    "%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63}"

// S (64 x 64) = (ACC ? S : 0) + A (64 x 16, shared, K-major) * B (64 x 16, shared, K-major)^T
template <class T, bool ACC> DEV void wgmma_ss_kmajor(float (&d)[32], uint64_t a, uint64_t b)
{
    if constexpr (is_bf16<T>)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32
                     ", %32, %33, p, 1, 1, 0, 0;}"
                     : R32(d)
                     : "l"(a), "l"(b), "n"(ACC));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " L32
                     ", %32, %33, p, 1, 1, 0, 0;}"
                     : R32(d)
                     : "l"(a), "l"(b), "n"(ACC));
}

// S (64 x 128) the same way.
template <class T, bool ACC> DEV void wgmma_ss_kmajor(float (&d)[64], uint64_t a, uint64_t b)
{
    if constexpr (is_bf16<T>)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " L64
                     ", %64, %65, p, 1, 1, 0, 0;}"
                     : R64(d)
                     : "l"(a), "l"(b), "n"(ACC));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " L64
                     ", %64, %65, p, 1, 1, 0, 0;}"
                     : R64(d)
                     : "l"(a), "l"(b), "n"(ACC));
}

// O (64 x 128) += A (64 x 16, registers) * B (16 x 128, shared, MN-major)
template <class T> DEV void wgmma_rs(float (&d)[64], const uint32_t *a, uint64_t b)
{
    if constexpr (is_bf16<T>)
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " L64
                     ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
                     : R64(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " L64
                     ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
                     : R64(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// O (64 x 64) += A (64 x 16, registers) * B (16 x 64, shared, MN-major)
template <class T> DEV void wgmma_rs(float (&d)[32], const uint32_t *a, uint64_t b)
{
    if constexpr (is_bf16<T>)
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32
                     ", {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                     : R32(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " L32
                     ", {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                     : R32(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// O (64 x 72) += A (64 x 16, registers, bf16) * B (16 x 72, shared, MN-major)
template <class T> DEV void wgmma_rs(float (&d)[36], const uint32_t *a, uint64_t b)
{
    static_assert(is_bf16<T>, "only for bf16");
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 " L36
                 ", {%36,%37,%38,%39}, %40, p, 1, 1, 1;}"
                 : R36(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// O (64 x 96) += A (64 x 16, registers, bf16) * B (96 x 16, shared, K-major)^T
DEV void wgmma_rs_kmajor(float (&d)[48], const uint32_t *a, uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " L48
                 ", {%48,%49,%50,%51}, %52, p, 1, 1, 0;}"
                 : R48(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef R4
#undef R16
#undef R32
#undef R36
#undef R48
#undef R64
#undef L32
#undef L36
#undef L48
#undef L64
