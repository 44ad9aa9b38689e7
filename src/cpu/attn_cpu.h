/* attn_cpu.h - attention on the CPU: takes bound arguments, writes output rows.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_ATTN_CPU_H
#define ESA_CPU_ATTN_CPU_H

#include "base/args.h"
#include "cpu/cpu.h"

/* Scratch bytes for esa_attn_cpu. Reads only sizes, kern, pool, blocks and tail. */
int64_t esa_attn_cpu_workspace(const esa_attn_args *args);
/* Computes attention. Cannot fail. ws: esa_attn_cpu_workspace bytes,
 * aligned to ESA_WORKSPACE_ALIGN. */
void esa_attn_cpu(const esa_attn_args *args, void *ws);

/* Exact rows (attn_cpu_exact.c), as exact_take and exact_mend of backend/backend.h. */
void esa_attn_cpu_take(const esa_attn_args *args, void *rows);
void esa_attn_cpu_mend(const esa_attn_args *args, const void *exact, const float *lse);

#endif
