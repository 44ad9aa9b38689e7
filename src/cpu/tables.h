/* tables.h - the kernel tables, one line per ISA level.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_TABLES_H
#define ESA_CPU_TABLES_H

#include "cpu/cpu.h"

/* Plain C (kernels_ref.c): the reference and the fallback. */
extern const esa_cpu_kernels esa_kernels_ref;
#if defined(__x86_64__)
extern const esa_cpu_kernels esa_kernels_avx2;       /* AVX2 + FMA + F16C */
extern const esa_cpu_kernels esa_kernels_avx512;     /* AVX-512 F, DQ, BW, VL */
extern const esa_cpu_kernels esa_kernels_avx512bf16; /* the same, plus a bf16 set on VDPBF16PS */
extern const esa_cpu_kernels esa_kernels_amx;        /* the same, plus a bf16 set on AMX tiles */
#elif defined(__aarch64__)
extern const esa_cpu_kernels esa_kernels_neon;
extern const esa_cpu_kernels esa_kernels_neonbf16; /* the same, plus a bf16 set on BFMMLA */
#endif

#endif
