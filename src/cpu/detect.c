/* detect.c - which ISA levels this CPU and this operating system allow.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A CPUID bit is not enough. The operating system must also save the wide registers (XCR0), or the
 * first wide instruction faults. */
#include "cpu/amx.h"
#include "cpu/cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t read_xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return ((uint64_t)hi << 32) | lo;
}

uint32_t esa_cpu_detect(void)
{
    uint32_t a, b, c, d, levels = 1u << ESA_CPU_REF;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return levels;
    const uint32_t fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
    if (!(fma && osxsave && avx && f16c)) return levels;
    const uint64_t xcr0 = read_xcr0();
    if ((xcr0 & 0x6) != 0x6) return levels; /* xmm, ymm */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return levels;
    if (!(b >> 5 & 1)) return levels; /* AVX2 */
    levels |= 1u << ESA_CPU_AVX2;
    const uint32_t f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    /* opmask, zmm low and high */
    if (!(f && dq && bw && vl) || (xcr0 & 0xe0) != 0xe0) return levels;
    levels |= 1u << ESA_CPU_AVX512;
    if (!(a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1))) return levels;
    levels |= 1u << ESA_CPU_AVX512BF16;
    if (esa_cpu_amx()) levels |= 1u << ESA_CPU_AMX;
    return levels;
}

/* AMD cores issue VDPBF16PS at the rate of an f32 FMA, which is twice the work. Intel cores
 * issue it at less than half that rate: 148 GFLOP/s against 233 for f32, measured on a
 * 16-core Xeon (docs/speed.md). */
int32_t esa_cpu_bf16_pays(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && d == signature_AMD_edx &&
           c == signature_AMD_ecx;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

#define HWCAP2_BITS_BF16 (1ul << 14) /* HWCAP2_BF16 of <asm/hwcap.h> since Linux 5.7 */

int32_t esa_cpu_bf16_pays(void) { return 0; }
/* NEON is part of the base ISA; BFMMLA comes with FEAT_BF16. */
uint32_t esa_cpu_detect(void)
{
    const uint32_t levels = 1u << ESA_CPU_REF | 1u << ESA_CPU_NEON;
    return getauxval(AT_HWCAP2) & HWCAP2_BITS_BF16 ? levels | 1u << ESA_CPU_NEONBF16 : levels;
}
#else
int32_t esa_cpu_bf16_pays(void) { return 0; }
uint32_t esa_cpu_detect(void) { return 1u << ESA_CPU_REF; }
#endif

int32_t esa_cpu_vectors(int32_t level)
{
    if (level == ESA_CPU_AVX512BF16 || level == ESA_CPU_AMX) return ESA_CPU_AVX512;
    return level == ESA_CPU_NEONBF16 ? ESA_CPU_NEON : level;
}

static const char *const level_name[ESA_CPU_LEVELS] = { "best",       "ref",  "avx2", "avx512",
                                                        "avx512bf16", "neon", "amx",  "neonbf16" };

int32_t esa_cpu_level_from_name(const char *name)
{
    for (int32_t i = 0; i < ESA_CPU_LEVELS; i++)
        if (!strcmp(name, level_name[i])) return i;
    return -1;
}
