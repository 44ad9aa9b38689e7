/* kernels_amx.c - the sets for CPUs with AMX: the AVX-512 f32 set, and a bf16 set over tiles.
 * SPDX-License-Identifier: Apache-2.0
 *
 * f16 stays with the f32 set: rounding its values to bf16 would multiply their error by eight. */
#include "cpu/amx.h"
#include "cpu/simd_avx512.h"

#if !defined(ESA_AMX_HERE) || !defined(__AVX512BF16__)
#error "kernels_amx.c needs -mamx-tile -mamx-bf16 -mavx512bf16"
#endif

enum { MR = 12, NV = 2, ROWS_A = 4, ROWS_B = 8 };
#include "cpu/kernels.inc.h"
#include "cpu/tiles_avx512.h"
#include "cpu/kernels_tiles.inc.h"

static const esa_cpu_kernels tile_set = { .name = "amx", .level = ESA_CPU_AMX, TILE_SLOTS };

const esa_cpu_kernels esa_kernels_amx = {
    .name = "amx", .level = ESA_CPU_AMX, KERNEL_SLOTS, .bf16 = &tile_set
};
