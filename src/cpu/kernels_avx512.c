/* kernels_avx512.c - the f32 set in AVX-512: 12 x 32 tiles. 24 registers are accumulators and 2
 * hold keys; broadcasts come from memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/simd_avx512.h"

enum { MR = 12, NV = 2, ROWS_A = 4, ROWS_B = 8 };
#include "cpu/kernels.inc.h"

const esa_cpu_kernels esa_kernels_avx512 = {
    .name = "avx512", .level = ESA_CPU_AVX512, KERNEL_SLOTS, .bf16 = NULL
};
