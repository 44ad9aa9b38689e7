/* tiles_emulated_neon.c - see tiles_emulated.h. It includes sources of the library: what is
 * replaced are instructions, and there is no other seam at that depth.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tiles_emulated.h"

#define ESA_TILES_EMULATED
#include "cpu/simd_neon.h"

enum { MR = 6, NV = 8, ROWS_A = 2, ROWS_B = 4 }; /* panels of 32 queries, as with AMX */
#include "cpu/kernels.inc.h"
#include "common/tiles_plain.h"
#include "cpu/kernels_tiles.inc.h"

static const esa_cpu_kernels tile_set = { .name = "tiles_neon", .level = ESA_CPU_AMX, TILE_SLOTS };

const esa_cpu_kernels esa_kernels_tiles_neon = {
    .name = "tiles_neon", .level = ESA_CPU_NEON, KERNEL_SLOTS, .bf16 = &tile_set
};
