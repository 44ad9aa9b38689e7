/* kernels_neon.c - the f32 set in NEON: 6 x 16 tiles. Of 32 registers, 24 are accumulators and 4
 * hold keys.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/simd_neon.h"

enum { MR = 6, NV = 4, ROWS_A = 2, ROWS_B = 4 };
#include "cpu/kernels.inc.h"

const esa_cpu_kernels esa_kernels_neon = {
    .name = "neon", .level = ESA_CPU_NEON, KERNEL_SLOTS, .bf16 = NULL
};
