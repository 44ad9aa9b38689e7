/* kernels_avx2.c - the f32 set in AVX2: 6 x 16 tiles (12 accumulators, 2 key vectors, 2 spare of 16
 * registers).
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/simd_avx2.h"

enum { MR = 6, NV = 2, ROWS_A = 2, ROWS_B = 4 };
#include "cpu/kernels.inc.h"

const esa_cpu_kernels esa_kernels_avx2 = {
    .name = "avx2", .level = ESA_CPU_AVX2, KERNEL_SLOTS, .bf16 = NULL
};
