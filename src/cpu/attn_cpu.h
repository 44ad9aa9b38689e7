/* attn_cpu.h - attention on the CPU: takes bound arguments, writes output rows.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_ATTN_CPU_H
#define ESA_CPU_ATTN_CPU_H

#include "base/args.h"
#include "cpu/cpu.h"

/* The kernel set for a call, from the best one of a ctx, and what runs. */
const esa_cpu_kernels *esa_attn_cpu_kernels(const esa_cpu_kernels *best, const esa_attn_args *args);
esa_attn_kernel esa_attn_cpu_kernel(const esa_cpu_kernels *best, const esa_attn_args *args);
/* Scratch bytes for esa_attn_cpu. Reads only sizes, kern, pool, blocks, tail and precision. */
int64_t esa_attn_cpu_workspace(const esa_attn_args *args);
/* Computes attention. Cannot fail. ws: esa_attn_cpu_workspace bytes,
 * aligned to ESA_WORKSPACE_ALIGN. */
void esa_attn_cpu(const esa_attn_args *args, void *ws);

/* 8-bit attention (attn_cpu_eight.c), which esa_attn_cpu calls: 1 if it takes the call; scratch
 * bytes; the call. */
int32_t esa_attn_cpu_eight_takes(const esa_attn_args *args);
int64_t esa_attn_cpu_eight_workspace(const esa_attn_args *args);
void esa_attn_cpu_eight(const esa_attn_args *args, void *ws);

/* Exact rows (attn_cpu_exact.c), as exact_take and exact_mend of backend/backend.h. */
void esa_attn_cpu_take(const esa_attn_args *args, void *rows);
void esa_attn_cpu_mend(const esa_attn_args *args, const void *exact, const float *lse);

#endif
