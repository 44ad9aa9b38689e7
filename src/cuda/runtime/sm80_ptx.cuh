// sm80_ptx.cuh - thin wrappers for Ampere instructions that Hopper's kernels replace with
// better ones: cp.async, mma.sync, and ldmatrix as mma.sync needs it. sm80_tile.cuh has
// everything with a policy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/ptx.cuh"

// ---- copies, global to shared ----

// Copies 16 bytes past L1. If valid is false, nothing is read and zeros are written.
DEV void copy_16(uint32_t dst, const void *src, bool valid)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest PENDING groups of this thread have arrived. Other threads see them
// after a barrier.
template <int PENDING> DEV void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- fragments ----

// load_matrices with each matrix transposed.
DEV void load_matrices_transposed(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}

// d (16 x 8) += a (16 x 16) b (16 x 8). With g = lane / 4, and lo and hi the halves of the 16
// columns, a lane holds: of d rows g and g + 8, columns 2 (lane % 4) + {0, 1}; of a (g, lo) (g + 8,
// lo) (g, hi) (g + 8, hi); of b (lo, g) (hi, g).
//
// T int8_t: a (16 x 32) and b (32 x 8), four codes in the place of two elements. d holds the bits
// of int32 sums.
template <class T>
DEV void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (sizeof(T) == 1) {
        int x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __float_as_int(d[i]);
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = __int_as_float(x[i]);
    } else if constexpr (is_bf16<T>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
