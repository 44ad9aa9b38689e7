/* amx.c - whether this process may use AMX.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* syscall */
#include "cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023 /* <asm/prctl.h> since Linux 5.16 */
#define XFEATURE_XTILEDATA  18

/* The processor has the tiles and the operating system saves them (XCR0). */
static int32_t present(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* OSXSAVE */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return 0; /* bf16, tiles, int8 */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3; /* tile shapes, tile data */
}

int32_t esa_cpu_amx(void)
{
    static _Atomic int32_t answer; /* 0: not asked yet, 1: yes, 2: no */
    int32_t now = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!now) {
        now = present() && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
                  ? 1
                  : 2;
        atomic_store_explicit(&answer, now, memory_order_relaxed);
    }
    return now == 1;
}
#else
int32_t esa_cpu_amx(void) { return 0; }
#endif
