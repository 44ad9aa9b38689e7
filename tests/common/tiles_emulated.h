/* tiles_emulated.h - the bf16 set over AMX tiles on machines without AMX: the same source, its tile
 * operations in plain C (cpu/amx_tiles.h). With AVX-512 BF16 the vector code is the real one too;
 * elsewhere it is that of AVX2 or NEON, and rows are packed by plain loops (tiles_plain.h).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_TILES_EMULATED_H
#define ESA_TESTS_TILES_EMULATED_H

#include "cpu/cpu.h"

#if defined(__x86_64__)
extern const esa_cpu_kernels esa_kernels_tiles_avx512;
extern const esa_cpu_kernels esa_kernels_tiles_avx2;
#elif defined(__aarch64__)
extern const esa_cpu_kernels esa_kernels_tiles_neon;
#endif

/* Emulated table number i that this machine can run, the one nearest to AMX first; NULL: no
 * more. */
static inline const esa_cpu_kernels *tiles_emulated(int i)
{
    const esa_cpu_kernels *table[2] = { NULL, NULL };
    int n = 0;
#if defined(__x86_64__)
    const uint32_t have = esa_cpu_detect();
    if (have >> ESA_CPU_AVX512BF16 & 1) table[n++] = &esa_kernels_tiles_avx512;
    if (have >> ESA_CPU_AVX2 & 1) table[n++] = &esa_kernels_tiles_avx2;
#elif defined(__aarch64__)
    table[n++] = &esa_kernels_tiles_neon;
#endif
    return i < n ? table[i] : NULL;
}

#endif
