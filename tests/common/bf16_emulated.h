/* bf16_emulated.h - the bf16 kernel set on machines that lack its instructions: the same source,
 * its three intrinsics spelled out in plain AVX-512, so that the set is tested wherever AVX-512 is.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_BF16_EMULATED_H
#define ESA_TESTS_BF16_EMULATED_H

#include "cpu/cpu.h"

#if defined(__x86_64__)
extern const esa_cpu_kernels esa_kernels_bf16_emulated;
#endif

/* The emulated table where AVX-512 exists without native bf16; NULL elsewhere. */
static inline const esa_cpu_kernels *bf16_emulated(void)
{
#if defined(__x86_64__)
    const uint32_t have = esa_cpu_detect();
    if ((have >> ESA_CPU_AVX512 & 1) && !(have >> ESA_CPU_AVX512BF16 & 1))
        return &esa_kernels_bf16_emulated;
#endif
    return NULL;
}

#endif
