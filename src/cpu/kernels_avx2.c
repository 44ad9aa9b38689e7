/* kernels_avx2.c - the f32 set in AVX2: 6 x 16 tiles. Of 16 registers, 12 are accumulators, 2 hold
 * keys and 2 are spare.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/simd_avx2.h"

enum { MR = 6, NV = 2, ROWS_A = 2, ROWS_B = 4 };
#include "cpu/kernels.inc.h"

const esa_cpu_kernels esa_kernels_avx2 = {
    .name = "avx2", .level = ESA_CPU_AVX2, KERNEL_SLOTS, .bf16 = NULL
};
