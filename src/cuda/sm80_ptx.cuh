// sm80_ptx.cuh - thin wrappers over the Ampere instructions of the sm80 kernel: cp.async, ldmatrix, mma.sync. One wrapper per
// instruction; anything with a policy in it lives in sm80_tile.cuh.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define SM80_DEV static __device__ __forceinline__

template <class T> struct is_bf16 { static constexpr bool value = false; };
template <> struct is_bf16<__nv_bfloat16> { static constexpr bool value = true; };

SM80_DEV uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- copies, global to shared ----

// 16 bytes past L1; where valid is false nothing is read and zeros are written.
SM80_DEV void copy_16(uint32_t dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
SM80_DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all but the newest PENDING groups of this thread have landed; other threads see them after a barrier.
template <int PENDING> SM80_DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

SM80_DEV void store_shared(uint32_t dst, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
SM80_DEV void store_shared(uint32_t dst, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(x) : "memory"); }
SM80_DEV uint4 load_shared(uint32_t src) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(src) : "memory");
    return x;
}

// ---- fragments ----

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8, and receives elements
// (i / 4, 2 (i % 4) + {0, 1}) of each.
SM80_DEV void load_matrices(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr));
}
// The same, each matrix transposed.
SM80_DEV void load_matrices_transposed(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr));
}

// d (16 x 8) += a (16 x 16) b (16 x 8). A lane holds of d: rows g = lane / 4 and g + 8, columns 2 (lane % 4) + {0, 1};
// of a: (g, lo) (g + 8, lo) (g, hi) (g + 8, hi), lo and hi being the halves of the 16 columns; of b: (lo, g) (hi, g).
template <class T> SM80_DEV void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (is_bf16<T>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to T, the first in the low half: the order of fragments and of memory.
template <class T> SM80_DEV uint32_t round_pair(float lo, float hi) {
    uint32_t r;
    if constexpr (is_bf16<T>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

SM80_DEV float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
