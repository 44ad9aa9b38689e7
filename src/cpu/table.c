/* table.c - picks the kernel table: the best level of this machine, lowered by $ESA_CPU
 * or the caller.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/cpu.h"
#include "cpu/tables.h"

#include <stdlib.h>

static const esa_cpu_kernels *table_of(int32_t level)
{
    switch (level) {
    case ESA_CPU_REF: return &esa_kernels_ref;
#if defined(__x86_64__)
    case ESA_CPU_AVX2: return &esa_kernels_avx2;
    case ESA_CPU_AVX512: return &esa_kernels_avx512;
    case ESA_CPU_AVX512BF16: return &esa_kernels_avx512bf16;
    case ESA_CPU_AMX: return &esa_kernels_amx;
#elif defined(__aarch64__)
    case ESA_CPU_NEON: return &esa_kernels_neon;
    case ESA_CPU_NEONBF16: return &esa_kernels_neonbf16;
#endif
    default: return NULL;
    }
}

/* The last one is always there. */
static const int32_t best_first[] = { ESA_CPU_AMX,  ESA_CPU_AVX512BF16, ESA_CPU_AVX512,
                                      ESA_CPU_AVX2, ESA_CPU_NEONBF16,   ESA_CPU_NEON,
                                      ESA_CPU_REF };

const esa_cpu_kernels *esa_cpu_kernels_get(int32_t level)
{
    const uint32_t have = esa_cpu_detect();
    if (level != ESA_CPU_BEST)
        return level > 0 && level < 32 && (have >> level & 1) ? table_of(level) : NULL;
    const char *env = getenv("ESA_CPU");
    if (env && *env) {
        level = esa_cpu_level_from_name(env);
        if (level < 0) return NULL;
        if (level != ESA_CPU_BEST) return have >> level & 1 ? table_of(level) : NULL;
    }
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++) {
        level = best_first[i];
        if ((have >> level & 1) && (level != ESA_CPU_AVX512BF16 || esa_cpu_bf16_pays())) break;
    }
    return table_of(level);
}
