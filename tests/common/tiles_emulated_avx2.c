/* tiles_emulated_avx2.c - see tiles_emulated.h. It includes sources of the library: what is
 * replaced are instructions, and there is no other seam at that depth.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tiles_emulated.h"

#define ESA_TILES_EMULATED
#include "cpu/simd_avx2.h"

enum { MR = 6, NV = 4, ROWS_A = 2, ROWS_B = 4 }; /* panels of 32 queries, as with AMX */
#include "cpu/kernels.inc.h"
#include "common/tiles_plain.h"
#include "cpu/kernels_tiles.inc.h"

static const esa_cpu_kernels tile_set = { .name = "tiles_avx2", .level = ESA_CPU_AMX, TILE_SLOTS };

const esa_cpu_kernels esa_kernels_tiles_avx2 = {
    .name = "tiles_avx2", .level = ESA_CPU_AVX2, KERNEL_SLOTS, .bf16 = &tile_set
};
